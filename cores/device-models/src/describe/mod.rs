//! The language of device descriptions: constants of the types below, in one file per device of [`crate::devices`].
//!
//! | part | describes |
//! |---|---|
//! | [`Register`] | a register's offset, its treatment ([`Class`]), the values that may return from the device |
//! | [`Component`], [`State`] | the state graph: small parallel state machines |
//! | [`Transition`] | event × states → checks, then effects |
//! | [`Window`] | memory that the device may touch, and when: a fact of the device, independent of the transitions that guard it |
//! | [`Interrupts`] | status and mask registers, of which the guest has virtual ones only |
//! | [`Context`] | how the device is stopped, saved and restored, in order |
//!
//! A register is a *hook* in a state if one of its transitions with a check may fire in that state. So the list of
//! hooks follows from the guards, and no description lists it.

mod context;
mod expr;
mod register;
mod transition;
mod validate;

pub use context::{Context, Memory, Pages, Pointers, Step};
pub(crate) use expr::Named;
pub use expr::{Cond, Expr, Values};
pub use register::{Class, Register, Returns, Store, register};
pub use transition::{Check, Effect, Event, Permission, Transition, on};

/// A register's number in its device's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u8);

impl Reg {
    /// Returns the index into the table of registers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A state of a component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State {
    /// Index into [`Device::components`].
    pub component: u8,
    /// Index into [`Component::states`].
    pub number: u8,
}

/// A window's number in its device's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub u8);

impl WindowId {
    /// Returns the index into the table of windows.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A small state machine of the device. Its first state is the one after reset.
#[derive(Debug, Clone, Copy)]
pub struct Component {
    /// Its name.
    pub name: &'static str,
    /// The names of its states.
    pub states: &'static [&'static str],
}

/// The address space of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Memory on the card, from byte `from` up to but not including `to`. A window is checked against these bounds.
    Card {
        /// First byte.
        from: u64,
        /// Byte after the last one.
        to: u64,
    },
    /// Guest memory at addresses that the device reads from guest memory. No check of the addresses could hold, as the
    /// guest may change them. So an IOMMU grants all of the guest's memory and nothing else. Base and length have no
    /// meaning.
    Guest,
    /// The host's memory, by DMA. A window is checked against the guest's memory map. The device computes addresses
    /// with `bits` bits.
    Host {
        /// Width of the device's addresses.
        bits: u8,
    },
}

/// Direction of the device's access to a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads.
    DeviceReads,
    /// The device writes.
    DeviceWrites,
}

/// A check in advance, with the largest length that any request could name. If it succeeds, the requests need no check.
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    /// The largest length in bytes.
    pub length: Expr,
    /// The state if the window was granted.
    pub granted: State,
    /// The state if each use must be checked.
    pub each: State,
}

/// Memory that the device accesses by itself. The fields refer to the registers as the *device* holds them, and never
/// to states or checks. So explorations and tests can judge the transitions by them.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its name.
    pub name: &'static str,
    /// The address space.
    pub space: Space,
    /// The direction of the device's access.
    pub direction: Direction,
    /// Offset or address of the first byte.
    pub base: Expr,
    /// The largest number of bytes that the device can access with these registers.
    pub length: Expr,
    /// The condition under which the device may use the window.
    pub active: Cond,
    /// The check in advance, if any.
    pub standing: Option<Standing>,
    /// The window is never granted. It exists so that explorations detect a possible use.
    pub never: bool,
}

/// Interrupt status and mask. The guest has virtual ones only.
#[derive(Debug, Clone, Copy)]
pub struct Interrupts {
    /// The status register.
    pub status: Reg,
    /// The mask register.
    pub mask: Reg,
    /// Status bits that can assert the line.
    pub line: u32,
    /// Status bits that the model derives by itself. They are neither read from the device nor enabled there.
    pub derived: u32,
    /// Value of the device's own mask while a guest is resident.
    pub physical_mask: u32,
    /// The register that sets causes, if the device has one.
    pub set: Option<Reg>,
    /// Registers with details of causes, and these causes' status bits. The model latches such a register when one of
    /// its causes is harvested, and answers reads from there.
    pub latched: &'static [(Reg, u32)],
    /// Status bit that reports a failed request (policy `device error`), if drivers can recover from it.
    pub error: Option<u32>,
}

/// The registers that drivers poll and write for each frame. If there are any, a guest can read a shadow register page
/// instead of the device (`vpio::shown`). This description defines when the page is updated.
#[derive(Debug, Clone, Copy)]
pub struct Polled {
    /// Registers that change by themselves and that drivers poll.
    pub read: &'static [Reg],
    /// Registers whose writes change only these registers and the status.
    pub written: &'static [Reg],
    /// Causes that change nothing but these registers.
    pub causes: u32,
    /// Values that drivers write to the interrupt mask at each interrupt. An eventfd reports them. They may take effect
    /// at the next use of the device: until then no interrupt arrives, or one that was in flight.
    pub masks: &'static [u32],
    /// Such a value unmasks interrupts. The monitor handles it without delay, since causes may be pending.
    pub prompt: bool,
    /// Slow registers, which complete some time after a write, and the bit that reports completion. If the guest hasn't
    /// read it before a hand-off, the monitor repeats the last write at the guest's return. So a repeated write must be
    /// harmless.
    pub settles: &'static [(Reg, u32)],
    /// A read clears the status, and the monitor doesn't see reads of a page. The value is the register that drivers
    /// write after that read, with ones that clear bits of the mask. Drivers poll for the frames of `causes` after that
    /// write.
    pub read_clears: Option<Reg>,
}

impl Polled {
    /// No page: each read exits.
    pub const NONE: Self = Self {
        read: &[],
        written: &[],
        causes: 0,
        masks: &[],
        prompt: false,
        settles: &[],
        read_clears: None,
    };

    /// Returns whether the device supports a page.
    pub const fn any(&self) -> bool {
        !self.read.is_empty() || self.read_clears.is_some()
    }
}

/// A bank register, which selects the group of registers at an offset.
#[derive(Debug, Clone, Copy)]
pub struct Bank {
    /// The selecting register.
    pub register: Reg,
    /// Lowest bit of the bank number.
    pub shift: u8,
    /// Bit mask of the bank number, after the shift.
    pub mask: u32,
    /// Bits of the register that the monitor preserves when it selects a bank by itself.
    pub keep: u32,
    /// Bits that the monitor sets then.
    pub set: u32,
    /// States in which a write of the register would disturb the device.
    pub busy: &'static [State],
}

/// Bus mastering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BusMaster {
    /// The device never needs it: it stays off.
    Never,
    /// On while all windows of the guest are validated.
    WhileValidated,
}

/// PCI identity.
#[derive(Debug, Clone, Copy)]
pub struct Pci {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID that the guest reads.
    pub revision: u8,
    /// Class code, 24 bits.
    pub class: u32,
    /// Bus mastering.
    pub bus_master: BusMaster,
}

/// A base address register. All BARs of a device contain the same registers, unless hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// I/O ports, of this size in bytes.
    Ports(u32),
    /// Memory, of this size in bytes.
    Memory(u32),
    /// Hidden from the guest.
    Hidden,
}

/// A register access without a model, through the first BAR that the guest sees, in the selected bank.
#[derive(Debug, Clone, Copy)]
pub enum Poke {
    /// Writes at an offset: offset, size in bytes, value.
    Write(u32, u8, u32),
    /// Reads at an offset for the read's side effect: offset, size in bytes.
    Read(u32, u8),
    /// Reads until the masked bits have a value, at most 10,000 times: offset, size in bytes, mask, value.
    Await(u32, u8, u32, u32),
    /// Reads repeatedly, as a delay: offset, size in bytes, count.
    Hold(u32, u8, u32),
}

/// The source of the factory Ethernet address after a reset.
#[derive(Debug, Clone, Copy)]
pub struct Station {
    /// Accesses that must precede the read.
    pub before: &'static [Poke],
    /// Offset of the first byte.
    pub offset: u32,
    /// Distance between bytes; 0 if all come from the same port.
    pub stride: u32,
    /// Access size in bytes of the registers: a device may not support smaller ones.
    pub width: u8,
    /// Accesses that must follow the read.
    pub after: &'static [Poke],
}

/// A device.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    /// Short name: `ne2000`.
    pub name: &'static str,
    /// Full name.
    pub title: &'static str,
    /// Source of the facts.
    pub source: &'static str,
    /// PCI identity.
    pub pci: Pci,
    /// Base address registers.
    pub bars: &'static [Bar],
    /// A reset through the device's own registers, for a function that can't be reset from outside.
    pub reset: &'static [Poke],
    /// Restores the power-on state that a reset preserves. For a card that was just reset and goes to another VM. May
    /// take a while.
    pub power_on: &'static [Poke],
    /// Source of the device's own address.
    pub station: Station,
    /// All registers of the model; a [`Reg`] is an index of this list.
    pub registers: &'static [Register],
    /// The bank register, if offsets mean different registers.
    pub bank: Option<Bank>,
    /// Registers of the guest's Ethernet address, a byte each. No reset changes them.
    pub identity: &'static [Reg],
    /// Components of the state.
    pub components: &'static [Component],
    /// Changes of the components' states, and their effects.
    pub transitions: &'static [Transition],
    /// Memory that the device accesses by itself.
    pub windows: &'static [Window],
    /// Interrupt status and mask, and the line that follows from them.
    pub interrupts: Interrupts,
    /// Registers that drivers poll.
    pub polled: Polled,
    /// Quiescent states, in which the device can be handed to another guest. Every component that is named must be in
    /// one of its states.
    pub reusable: &'static [State],
    /// Stop, save and restore.
    pub context: Context,
    /// Explorations, each of which leaves these registers at their reset values. So independent parts of the device are
    /// explored one by one. One empty list means all at once.
    pub slices: &'static [&'static [Reg]],
}

impl Device {
    /// Returns the register with number `reg`.
    pub fn register(&self, reg: Reg) -> &'static Register {
        &self.registers[reg.index()]
    }

    /// Returns all registers with their numbers.
    pub fn numbered(&self) -> impl Iterator<Item = (Reg, &'static Register)> {
        (0u8..).map(Reg).zip(self.registers)
    }

    /// Returns the BAR through which the monitor accesses the registers: the first one that the guest sees.
    pub fn bar(&self) -> u8 {
        let visible = self.bars.iter().position(|bar| *bar != Bar::Hidden);
        visible.and_then(|at| u8::try_from(at).ok()).unwrap_or(0)
    }

    /// Returns `component=state`, for messages.
    pub fn state_name(&self, state: State) -> String {
        let component = &self.components[usize::from(state.component)];
        format!("{}={}", component.name, component.states[usize::from(state.number)])
    }

    /// Returns whether `states` (a state number per component) satisfies `guards`: each named component is in one of
    /// its named states.
    pub fn holds(guards: &[State], states: &[u8]) -> bool {
        guards.iter().all(|guard| {
            guards.iter().any(|other| {
                other.component == guard.component && states[usize::from(other.component)] == other.number
            })
        })
    }

    /// Checks the description. Returns a sentence per problem; the descriptions of this crate have none.
    pub fn problems(&self) -> Vec<String> {
        validate::problems(self)
    }
}

/// Numbers the entries of a table. `table! { REGISTERS: Register => Reg { CR = register(..), .. } }` defines the
/// constants `CR = Reg(0)`, .. and the slice.
macro_rules! table {
    ($(#[$meta:meta])* $table:ident: $type:ty => $id:ident { $($name:ident = $value:expr;)* }) => {
        table!(@number $id, 0u8; $($name)*);
        $(#[$meta])*
        const $table: &[$type] = &[$($value),*];
    };
    (@number $id:ident, $n:expr; $name:ident $($rest:ident)*) => {
        #[doc = concat!("`", stringify!($name), "`")]
        pub const $name: $id = $id($n);
        table!(@number $id, $n + 1u8; $($rest)*);
    };
    (@number $id:ident, $n:expr;) => {};
}
pub(crate) use table;

/// Numbers the states of components: `states! { COMPONENTS { 0 "tx": TX_IDLE = "idle", TX_BUSY = "busy"; .. } }`.
macro_rules! states {
    ($table:ident { $($number:literal $component:literal: $($name:ident = $text:literal),+;)* }) => {
        $(states!(@number $number, 0u8; $($name)+);)*
        const $table: &[Component] = &[$(Component { name: $component, states: &[$($text),+] }),*];
    };
    (@number $component:literal, $n:expr; $name:ident $($rest:ident)*) => {
        #[doc = concat!("State `", stringify!($name), "`")]
        pub const $name: State = State { component: $component, number: $n };
        states!(@number $component, $n + 1u8; $($rest)*);
    };
    (@number $component:literal, $n:expr;) => {};
}
pub(crate) use states;
