//! An index over a description, which avoids a search per access: the registers that may be at an offset, and the
//! transitions of a register.

use crate::describe::{Device, Event, Reg, Transition};

/// Indexed offsets; higher ones are searched. They cover the port devices, whose data pass through one register word by
/// word.
const OFFSETS: u32 = 256;

/// The index of one device.
#[derive(Debug)]
pub(crate) struct Index {
    /// For reads and for writes, by offset: the registers at this offset in any bank.
    places: [Vec<Vec<Reg>>; 2],
    /// For reads and for writes, by register: the transitions.
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

    /// Returns the registers that may be at an offset, in the description's order, or `None` if the offset isn't
    /// indexed.
    pub fn places(&self, offset: u32, write: bool) -> Option<&[Reg]> {
        let place = usize::try_from(offset).ok()?;
        self.places[usize::from(write)].get(place).map(Vec::as_slice)
    }

    /// Returns the transitions of an access to a register, in the description's order, or `None` for other events.
    pub fn transitions(&self, event: Event) -> Option<&[&'static Transition]> {
        let (kind, reg) = match event {
            Event::Read(reg) => (0, reg),
            Event::Write(reg) => (1, reg),
            _ => return None,
        };
        self.transitions[kind].get(reg.index()).map(Vec::as_slice)
    }
}
