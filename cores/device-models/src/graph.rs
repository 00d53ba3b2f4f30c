//! Register values and states of one device, and the transitions that change them. The monitor's model and the
//! reference emulation use it.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::describe::{
    Class, Device, Effect, Event, Expr, Reg, Register, State, Transition, Values, WindowId,
};
use crate::index::Index;

/// An access of the guest to a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Access {
    /// BAR number.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u32,
    /// Size in bytes: 1, 2 or 4.
    pub size: u8,
    /// The written value; `None` for a read.
    pub write: Option<u32>,
}

/// The part of an access that belongs to one register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The register, or `None` for an offset without one.
    pub reg: Option<Reg>,
    /// Offset in the BAR.
    pub offset: u32,
    /// First byte within the register.
    pub skip: u8,
    /// Length in bytes.
    pub bytes: u8,
}

impl Piece {
    /// Returns whether the piece covers the whole register.
    pub fn is_whole(&self, register: &Register) -> bool {
        register.span > u32::from(register.width) || self.skip == 0 && self.bytes == register.width
    }
}

/// Returns the low `bytes` bytes of `value`.
pub fn truncated(value: u32, bytes: u8) -> u32 {
    if bytes >= 4 { value } else { value & ((1 << (8 * bytes)) - 1) }
}

/// Register values and states.
#[derive(Debug, Clone)]
pub struct Graph {
    pub(crate) values: Vec<u32>,
    pub(crate) states: Vec<u8>,
    index: Arc<Index>,
}

impl PartialEq for Graph {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values && self.states == other.states
    }
}

impl Eq for Graph {}

impl Hash for Graph {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.values.hash(hasher);
        self.states.hash(hasher);
    }
}

/// An access as expressions see it: size, offset, written value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Given {
    pub size: u32,
    pub offset: u32,
    pub written: u32,
}

impl Given {
    pub fn size(bytes: u8) -> Self {
        Self { size: u32::from(bytes), ..Self::default() }
    }
}

/// The values that expressions see while an event is handled.
pub(crate) struct View<'a> {
    pub graph: &'a Graph,
    /// The register that is being written or was returned, and its new value.
    pub overlay: Option<(Reg, u32)>,
    pub access: Given,
    pub bases: &'a dyn Fn(WindowId) -> u64,
}

impl Values for View<'_> {
    fn register(&self, reg: Reg) -> u32 {
        match self.overlay {
            Some((overlaid, value)) if overlaid == reg => value,
            _ => self.graph.values[reg.index()],
        }
    }
    fn states(&self) -> &[u8] {
        &self.graph.states
    }
    fn access_size(&self) -> u32 {
        self.access.size
    }
    fn access_offset(&self) -> u32 {
        self.access.offset
    }
    fn written(&self) -> u32 {
        self.access.written
    }
    fn device_base(&self, window: WindowId) -> u64 {
        (self.bases)(window)
    }
}

impl Values for Graph {
    fn register(&self, reg: Reg) -> u32 {
        self.values[reg.index()]
    }
    fn states(&self) -> &[u8] {
        &self.states
    }
}

/// No window has a base in the device's addresses.
pub(crate) fn no_base(_: WindowId) -> u64 {
    0
}

impl Graph {
    /// Creates a device after reset.
    pub fn new(device: &'static Device) -> Self {
        Self {
            values: device.registers.iter().map(|register| register.reset).collect(),
            states: vec![0; device.components.len()],
            index: Arc::new(Index::new(device)),
        }
    }

    /// Resets all values but the guest's address.
    pub fn reset(&mut self, device: &'static Device) {
        for (reg, register) in device.numbered() {
            if !device.identity.contains(&reg) {
                self.values[reg.index()] = register.reset;
            }
        }
        self.states.fill(0);
    }

    /// Returns the value of a register.
    pub fn value(&self, reg: Reg) -> u32 {
        self.values[reg.index()]
    }

    /// Sets the value of a register.
    pub fn set(&mut self, reg: Reg, value: u32) {
        self.values[reg.index()] = value;
    }

    /// Enters a state of a component.
    pub fn enter(&mut self, state: State) {
        self.states[usize::from(state.component)] = state.number;
    }

    /// Returns whether the device is in `state`.
    pub fn is(&self, state: State) -> bool {
        self.states[usize::from(state.component)] == state.number
    }

    /// Returns the state numbers, one per component.
    pub fn states(&self) -> &[u8] {
        &self.states
    }

    /// Evaluates an expression.
    pub fn number(&self, expr: &Expr) -> u64 {
        expr.value(self)
    }

    /// Returns the number of the selected bank.
    pub fn bank(&self, device: &Device) -> u8 {
        device.bank.as_ref().map_or(0, |bank| {
            u8::try_from(self.values[bank.register.index()] >> bank.shift & bank.mask).unwrap_or(0)
        })
    }

    /// Returns the first piece of an access of `remaining` bytes at `offset`.
    pub fn piece(&self, device: &Device, offset: u32, remaining: u8, write: bool) -> Piece {
        let bank = self.bank(device);
        let found = match self.index.places(offset, write) {
            Some(places) => places.iter().copied().find(|reg| device.register(*reg).is_at(offset, bank)),
            None => device.numbered().find_map(|(reg, register)| {
                let direction = if write { register.write } else { register.read };
                (direction.is_some() && register.is_at(offset, bank)).then_some(reg)
            }),
        };
        let Some((reg, register)) = found.map(|reg| (reg, device.register(reg))) else {
            return Piece { reg: None, offset, skip: 0, bytes: 1 };
        };
        if register.span > u32::from(register.width) {
            return Piece { reg: Some(reg), offset, skip: 0, bytes: remaining };
        }
        let start = std::iter::once(register.offset.unwrap_or(offset))
            .chain(register.aliases.iter().copied())
            .filter(|&start| start <= offset && offset - start < register.span)
            .max()
            .unwrap_or(offset);
        let skip = u8::try_from(offset - start).unwrap_or(0);
        Piece { reg: Some(reg), offset, skip, bytes: remaining.min(register.width - skip) }
    }

    /// Returns the transitions that fire at `event`.
    pub(crate) fn firing(
        &self,
        device: &'static Device,
        event: Event,
        overlay: Option<(Reg, u32)>,
        access: Given,
    ) -> Vec<&'static Transition> {
        let view = View { graph: self, overlay, access, bases: &no_base };
        let fires = |transition: &&'static Transition| {
            Device::holds(transition.states, &self.states) && transition.given.holds(&view)
        };
        if let Some(candidates) = self.index.transitions(event) {
            return candidates.iter().copied().filter(fires).collect();
        }
        let meant = |transition: &&'static Transition| match (transition.event, event) {
            (Event::Cause(these), Event::Cause(those)) => these & those != 0,
            (one, other) => one == other,
        };
        device.transitions.iter().filter(meant).filter(fires).collect()
    }

    /// Applies the effects of transitions. Effects beyond the graph go to `other`.
    pub(crate) fn perform(
        &mut self,
        device: &'static Device,
        transitions: &[&'static Transition],
        access: Given,
        bases: &dyn Fn(WindowId) -> u64,
        other: &mut dyn FnMut(&Effect, &View<'_>),
    ) {
        for effect in transitions.iter().flat_map(|transition| transition.effects) {
            match effect {
                Effect::Enter(state) => self.states[usize::from(state.component)] = state.number,
                Effect::Raise(bits) => self.values[device.interrupts.status.index()] |= bits,
                Effect::Lower(bits) => self.values[device.interrupts.status.index()] &= !bits,
                Effect::Store(reg, expr) => {
                    let value = expr.value(&View { graph: self, overlay: None, access, bases });
                    let mask = device.register(*reg).mask();
                    self.values[reg.index()] = u32::try_from(value & u64::from(mask)).unwrap_or(mask);
                }
                Effect::Reset => self.reset(device),
                Effect::Device(..) | Effect::Forget(_) | Effect::Answer(_) | Effect::Look(_) => {}
            }
            other(effect, &View { graph: self, overlay: None, access, bases });
        }
    }

    /// Handles an event without a monitor, for the reference emulation: transitions fire, and their checks are ignored.
    /// Returns a read's answer if a transition defines it.
    pub(crate) fn happen(
        &mut self,
        device: &'static Device,
        event: Event,
        overlay: Option<(Reg, u32)>,
        access: Given,
    ) -> Option<u32> {
        let firing = self.firing(device, event, overlay, access);
        if let Some((reg, value)) = overlay {
            self.values[reg.index()] = value;
        }
        let mut answer = None;
        self.perform(device, &firing, access, &no_base, &mut |effect, view| {
            if let Effect::Answer(expr) = effect {
                answer = u32::try_from(expr.value(view) & u64::from(u32::MAX)).ok();
            }
        });
        answer
    }

    /// Returns the level of the virtual interrupt line.
    pub fn line(&self, device: &Device) -> bool {
        let interrupts = &device.interrupts;
        self.value(interrupts.status) & self.value(interrupts.mask) & interrupts.line != 0
    }

    /// Returns whether a write of class `class` reaches the device.
    pub(crate) fn reaches(class: Class) -> bool {
        !matches!(class, Class::Virtual | Class::Deny)
    }
}
