//! The language in which a device is described: constants of the types below, in one file per device of [`crate::devices`].
//!
//! | part | says |
//! |---|---|
//! | [`Register`] | where a register is, how it is treated ([`Class`]), what may come back from the device |
//! | [`Component`], [`State`] | the state graph: small machines side by side |
//! | [`Transition`] | event × states → checks, then effects |
//! | [`Window`] | which memory the device may touch, and when: a fact of the device, apart from the transitions that guard it |
//! | [`Interrupts`] | status and mask registers that the guest sees only as virtual ones |
//! | [`Context`] | how the device is stopped, saved and restored, in order |
//!
//! A register is *hooked* in a state when one of its transitions that has a check may fire in that state: the hook list follows from
//! the guards, and nothing has to be listed twice.

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
    /// As an index into the table of registers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A state of a component: which component, which of its states.
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
    /// As an index into the table of windows.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One small state machine of the device; the first state is the one after reset.
#[derive(Debug, Clone, Copy)]
pub struct Component {
    /// Its name.
    pub name: &'static str,
    /// The names of its states.
    pub states: &'static [&'static str],
}

/// Where a window lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// In memory on the card, from byte `from` up to but not including `to`. Checked against these bounds.
    Card {
        /// First byte.
        from: u64,
        /// Byte after the last one.
        to: u64,
    },
    /// Whatever lies in the guest's memory, at addresses that the device finds in that memory: no check of them in place would hold. Granted as
    /// a whole, by an IOMMU that lets the device reach that memory and nothing else; base and length mean nothing.
    Guest,
    /// In the host's memory: DMA. Checked against the guest's memory map. The device computes addresses with `bits` bits.
    Host {
        /// Width of the device's addresses.
        bits: u8,
    },
}

/// What the device does to a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads.
    DeviceReads,
    /// The device writes.
    DeviceWrites,
}

/// A check in advance, with the largest length that any request could name: requests need none any more then (spec nics 0.4).
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    /// That length.
    pub length: Expr,
    /// The state when it is granted.
    pub granted: State,
    /// The state when each use has to be checked.
    pub each: State,
}

/// Memory that the device touches by itself. The fields speak of the registers as the *device* holds them, and nothing here refers
/// to states or checks: explorations and tests judge the transitions by it.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its name.
    pub name: &'static str,
    /// Where it lies.
    pub space: Space,
    /// What the device does to it.
    pub direction: Direction,
    /// Its first byte.
    pub base: Expr,
    /// The largest number of bytes that the device can use with these registers.
    pub length: Expr,
    /// When the device may use it.
    pub active: Cond,
    /// A check in advance, if there is one.
    pub standing: Option<Standing>,
    /// No guest is ever granted it: it stands here so that explorations see when the device could use it.
    pub never: bool,
}

/// Interrupt status and mask, which the guest sees as virtual registers only.
#[derive(Debug, Clone, Copy)]
pub struct Interrupts {
    /// The status register.
    pub status: Reg,
    /// The mask register.
    pub mask: Reg,
    /// Status bits that can raise the line.
    pub line: u32,
    /// Status bits that the model itself derives: taken neither from the device nor enabled there.
    pub derived: u32,
    /// Value of the device's own mask while a guest holds it.
    pub physical_mask: u32,
    /// The register by which causes are set, where the device has one.
    pub set: Option<Reg>,
    /// Registers that say more about causes, and about which (status bits): remembered whenever one of these is taken, and answered
    /// from there.
    pub latched: &'static [(Reg, u32)],
    /// Bit that tells the driver of a failed request (policy `device error`), where the driver has a way to recover from it.
    pub error: Option<u32>,
}

/// What drivers look at and write for each frame. Where there are any, a guest can read a page of the monitor's instead of the device
/// (`vpio::shown`), which is kept as fresh as this says.
#[derive(Debug, Clone, Copy)]
pub struct Polled {
    /// Registers that change by themselves and that drivers look at all the time.
    pub read: &'static [Reg],
    /// Registers whose writes change no others but these and the status.
    pub written: &'static [Reg],
    /// Causes with which nothing but these has changed.
    pub causes: u32,
    /// Values that drivers write to the interrupt mask at each interrupt, which are only told of. They may take effect when the device is
    /// looked at next: until then no interrupt comes, or one that was on its way.
    pub masks: &'static [u32],
    /// Where such a value opens the mask: it is looked at without delay, since causes may wait for it.
    pub prompt: bool,
    /// Registers that are done some time after they were written, and the bit that says so. Who has not seen it when the device goes to another guest has the last value written
    /// again when it comes back, so twice must do no harm.
    pub settles: &'static [(Reg, u32)],
    /// The status is cleared by a read, which nobody sees in a page: the register whose write, of ones to clear bits of the mask, follows that
    /// read in drivers. Frames of causes in `causes` are looked for after it.
    pub read_clears: Option<Reg>,
}

impl Polled {
    /// Drivers leave the guest for each read.
    pub const NONE: Self = Self {
        read: &[],
        written: &[],
        causes: 0,
        masks: &[],
        prompt: false,
        settles: &[],
        read_clears: None,
    };

    /// Whether a page can be kept up.
    pub const fn any(&self) -> bool {
        !self.read.is_empty() || self.read_clears.is_some()
    }
}

/// A bank register: which group of registers an offset means.
#[derive(Debug, Clone, Copy)]
pub struct Bank {
    /// The register that selects.
    pub register: Reg,
    /// Lowest bit of the number of the bank.
    pub shift: u8,
    /// Bits of the number of the bank.
    pub mask: u32,
    /// Bits of the register that the monitor keeps when it selects a bank by itself.
    pub keep: u32,
    /// Bits that it sets then.
    pub set: u32,
    /// States in which writing the register would disturb the device.
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
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Revision shown to the guest.
    pub revision: u8,
    /// Class code, 24 bits.
    pub class: u32,
    /// Bus mastering.
    pub bus_master: BusMaster,
}

/// A base address register. All of a device's BARs show the same registers, unless denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// I/O ports, so many bytes.
    Ports(u32),
    /// Memory, so many bytes.
    Memory(u32),
    /// Hidden from the guest.
    Hidden,
}

/// An access of the device's registers without any model: through the first BAR that the guest sees, in whatever bank is selected.
#[derive(Debug, Clone, Copy)]
pub enum Poke {
    /// Writes so many bytes at an offset.
    Write(u32, u8, u32),
    /// Reads so many bytes at an offset, for the read's effect.
    Read(u32, u8),
    /// Reads so many bytes at an offset until the bits of the mask have the value, at most 10,000 times.
    Await(u32, u8, u32, u32),
    /// Reads so many bytes at an offset, so many times: as long as that takes on the bus.
    Hold(u32, u8, u32),
}

/// Where a device that was just reset tells the Ethernet address that it was made with.
#[derive(Debug, Clone, Copy)]
pub struct Station {
    /// What has to be done first.
    pub before: &'static [Poke],
    /// Where the first byte is read.
    pub offset: u32,
    /// How much further the next one is; 0: at the same port.
    pub stride: u32,
    /// Bytes of the registers that hold them: a device may know no smaller access.
    pub width: u8,
    /// What has to be done afterwards.
    pub after: &'static [Poke],
}

/// A device.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    /// Short name: `ne2000`.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// Where the facts come from.
    pub source: &'static str,
    /// PCI identity.
    pub pci: Pci,
    /// Base address registers.
    pub bars: &'static [Bar],
    /// A reset by the device's own registers, for a function that can't be reset from outside.
    pub reset: &'static [Poke],
    /// What a reset leaves as the last driver had it, as after power-on: for a card that was just reset and goes to another VM. May take a while.
    pub power_on: &'static [Poke],
    /// Where the device tells its own address.
    pub station: Station,
    /// Registers.
    pub registers: &'static [Register],
    /// Banks, where offsets mean different registers.
    pub bank: Option<Bank>,
    /// Registers that hold the guest's Ethernet address, a byte each; no reset changes them.
    pub identity: &'static [Reg],
    /// Components of the state.
    pub components: &'static [Component],
    /// Transitions.
    pub transitions: &'static [Transition],
    /// Memory that the device touches by itself.
    pub windows: &'static [Window],
    /// Interrupts.
    pub interrupts: Interrupts,
    /// What drivers look at all the time.
    pub polled: Polled,
    /// States in which the device can be given to another guest. Different components must all be in one of theirs.
    pub reusable: &'static [State],
    /// Stopping, saving, restoring.
    pub context: Context,
    /// Explorations, each of which leaves these registers at their value after reset: parts of the device that don't depend on each
    /// other are explored one by one. One empty list: all at once.
    pub slices: &'static [&'static [Reg]],
}

impl Device {
    /// The register with number `reg`.
    pub fn register(&self, reg: Reg) -> &'static Register {
        &self.registers[reg.index()]
    }

    /// All registers with their numbers.
    pub fn numbered(&self) -> impl Iterator<Item = (Reg, &'static Register)> {
        (0u8..).map(Reg).zip(self.registers)
    }

    /// Number of the BAR through which the monitor itself reaches the registers: the first that the guest sees.
    pub fn bar(&self) -> u8 {
        let visible = self.bars.iter().position(|bar| *bar != Bar::Hidden);
        visible.and_then(|at| u8::try_from(at).ok()).unwrap_or(0)
    }

    /// `component=state`, for texts.
    pub fn state_name(&self, state: State) -> String {
        let component = &self.components[usize::from(state.component)];
        format!("{}={}", component.name, component.states[usize::from(state.number)])
    }

    /// Whether `states` (a state number per component) satisfies `guards`: for each component that is named, one of its states.
    pub fn holds(guards: &[State], states: &[u8]) -> bool {
        guards.iter().all(|guard| {
            guards.iter().any(|other| {
                other.component == guard.component && states[usize::from(other.component)] == other.number
            })
        })
    }

    /// What is wrong with the description, one sentence each: a description of this crate has nothing.
    pub fn problems(&self) -> Vec<String> {
        validate::problems(self)
    }
}

/// Numbers the entries of a table: `table! { REGISTERS: Register => Reg { CR = register(..), .. } }` makes the constants `CR = Reg(0)`, ..
/// and the slice.
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

/// Names the states of components: `states! { COMPONENTS { 0 "tx": TX_IDLE = "idle", TX_BUSY = "busy"; .. } }`.
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
