//! What the accesses of a device would be searched for otherwise, each time: which registers may be at an offset, and which transitions a register has.

use crate::describe::{Device, Event, Reg, Transition};

/// Offsets that are looked up; those behind them are searched for. All of the port devices, whose data come in words through one register.
const OFFSETS: u32 = 256;

/// Of one device.
#[derive(Debug)]
pub(crate) struct Index {
    /// For reads and for writes, by offset: registers that some bank has there.
    places: [Vec<Vec<Reg>>; 2],
    /// By register: what its reads and its writes lead to.
    transitions: [Vec<Vec<&'static Transition>>; 2],
}

impl Index {
    pub fn new(device: &'static Device) -> Self {
        let places = |write: bool| {
            let at = |offset| {
                let found = device.numbered().filter(|(_, register)| {
                    let direction = if write { register.write } else { register.read };
                    direction.is_some() && (0..8).any(|bank| register.is_at(offset, bank))
                });
                found.map(|(reg, _)| reg).collect()
            };
            (0..OFFSETS).map(at).collect()
        };
        let transitions = |event: fn(Reg) -> Event| {
            let of = |reg| device.transitions.iter().filter(|one| one.event == event(reg)).collect();
            device.numbered().map(|(reg, _)| of(reg)).collect()
        };
        Self {
            places: [places(false), places(true)],
            transitions: [transitions(Event::Read), transitions(Event::Write)],
        }
    }

    /// Registers that may be at an offset, in the order of the description; `None` where that isn't known.
    pub fn places(&self, offset: u32, write: bool) -> Option<&[Reg]> {
        let place = usize::try_from(offset).ok()?;
        self.places[usize::from(write)].get(place).map(Vec::as_slice)
    }

    /// Transitions of an access to a register, in the order of the description; `None` for other events.
    pub fn transitions(&self, event: Event) -> Option<&[&'static Transition]> {
        let (kind, reg) = match event {
            Event::Read(reg) => (0, reg),
            Event::Write(reg) => (1, reg),
            _ => return None,
        };
        self.transitions[kind].get(reg.index()).map(Vec::as_slice)
    }
}
