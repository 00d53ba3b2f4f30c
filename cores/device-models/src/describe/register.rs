//! Registers: offset, class, stored bits, and values that may return.

use super::{Expr, Reg};

/// How accesses to a register are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Forwarded without checks or memory.
    Free,
    /// Forwarded, and the model stores the last value.
    Shadow,
    /// Answered from the model. The device's own register isn't the guest's.
    Virtual,
    /// In some states a write is checked before it reaches the device.
    Check,
    /// As `Check`, and the write can start or redirect DMA or the card's own engine.
    Dma,
    /// Never forwarded: reads return the reset value, writes are dropped and counted.
    Deny,
}

impl Class {
    /// Returns the letter of the class in the reference pages.
    pub const fn letter(self) -> char {
        match self {
            Self::Free => 'F',
            Self::Shadow => 'S',
            Self::Virtual => 'V',
            Self::Check => 'C',
            Self::Dma => 'D',
            Self::Deny => 'X',
        }
    }
}

/// The effect of a guest's write on the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Replaces these bits.
    Plain(u32),
    /// Ones clear bits, of these only.
    ClearOnes(u32),
    /// Ones set bits, of these only.
    SetOnes(u32),
    /// Replaces bits. A write can only set these bits; the device clears them.
    Sticky(u32),
}

/// The part of a returned value that the guest may read.
#[derive(Debug, Clone, Copy)]
pub enum Returns {
    /// Every bit: the guest reads what the device returns.
    Any,
    /// The register isn't read from the device: the stored value is the answer.
    Shadow,
    /// These bits of it. The others must match the stored value, which answers for them.
    Bits(u32),
    /// Only numbers from the first up to but not including the second. Otherwise the stored value.
    Within(Expr, Expr),
}

/// A register. Built by [`register`] and the methods below.
#[derive(Debug, Clone, Copy)]
pub struct Register {
    /// The data sheet's name.
    pub name: &'static str,
    /// Offset in the BAR, or `None` for a value that only the model has.
    pub offset: Option<u32>,
    /// Width in bytes: 1, 2 or 4.
    pub width: u8,
    /// Length in bytes of the offsets that mean this register; more than `width` for data ports.
    pub span: u32,
    /// Other offsets of the same register.
    pub aliases: &'static [u32],
    /// Banks that contain the register, a bit per bank.
    pub banks: u8,
    /// Class of reads. `None` if reads of this offset mean another register.
    pub read: Option<Class>,
    /// Class of writes. `None` if writes of this offset mean another register.
    pub write: Option<Class>,
    /// Value after reset.
    pub reset: u32,
    /// The effect of a write on the stored value.
    pub store: Store,
    /// The values that may return from the device.
    pub returns: Returns,
    /// A write may be deferred in a coalescing ring, in order with other deferred writes.
    pub late: bool,
    /// A deferred write may start an action without another access. So it may be deferred only if the monitor drains
    /// the ring soon after any access.
    pub starts: bool,
    /// Representative values, one per case that the model or the device distinguishes. Exploration and grammar use
    /// them. In explorations a register without values keeps its reset value.
    pub values: &'static [u32],
    /// Bits that the device clears, bits that it sets, and causes that it reports, on completion of a request.
    pub becomes: Option<(u32, u32, u32)>,
    /// The device advances this register to that register's value by itself, and then reports these causes.
    pub follows: Option<(Reg, u32)>,
    /// Reads return this register's value instead.
    pub mirrors: Option<Reg>,
    /// A table: the monitor stores each word.
    pub table: bool,
    /// Description for the reference page.
    pub about: &'static str,
}

/// Builds a register of one byte at `offset`, in every bank, readable and writable, with a stored value.
pub const fn register(name: &'static str, offset: u32) -> Register {
    Register {
        name,
        offset: Some(offset),
        width: 1,
        span: 1,
        aliases: &[],
        banks: 0xFF,
        read: Some(Class::Free),
        write: Some(Class::Shadow),
        reset: 0,
        store: Store::Plain(u32::MAX),
        returns: Returns::Any,
        late: false,
        starts: false,
        values: &[],
        becomes: None,
        follows: None,
        mirrors: None,
        table: false,
        about: "",
    }
}

impl Register {
    /// Sets the width in bytes.
    pub const fn width(mut self, bytes: u8) -> Self {
        self.width = bytes;
        self.span = bytes as u32;
        self
    }
    /// Makes it a data port: accesses of 1, 2 and 4 bytes anywhere in `bytes` bytes mean the port.
    pub const fn port(mut self, bytes: u32) -> Self {
        self.span = bytes;
        self.width = 4;
        self
    }
    /// Makes it a table of adjacent words in `bytes` bytes, which belong to the context
    /// ([`Step::Table`](super::Step::Table)).
    pub const fn table(mut self, bytes: u32) -> Self {
        self.table = true;
        self.port(bytes)
    }
    /// Restricts it to these banks, a bit per bank.
    pub const fn banks(mut self, banks: u8) -> Self {
        self.banks = banks;
        self
    }
    /// Sets the class of reads. Writes of this offset mean another register.
    pub const fn reads(mut self, class: Class) -> Self {
        self.read = Some(class);
        self.write = None;
        self
    }
    /// Sets the class of writes. Reads of this offset mean another register.
    pub const fn writes(mut self, class: Class) -> Self {
        self.read = None;
        self.write = Some(class);
        self.returns = Returns::Shadow;
        self
    }
    /// Sets the classes of reads and writes.
    pub const fn class(mut self, read: Class, write: Class) -> Self {
        self.read = Some(read);
        self.write = Some(write);
        if matches!(read, Class::Virtual) {
            self.returns = Returns::Shadow;
        }
        self
    }
    /// Makes it a value that only the model has.
    pub const fn internal(mut self) -> Self {
        self.offset = None;
        self.read = None;
        self.write = None;
        self
    }
    /// Sets the value after reset.
    pub const fn reset(mut self, value: u32) -> Self {
        self.reset = value;
        self
    }
    /// Sets the effect of writes.
    pub const fn store(mut self, store: Store) -> Self {
        self.store = store;
        self
    }
    /// Sets the values that may return.
    pub const fn returns(mut self, returns: Returns) -> Self {
        self.returns = returns;
        self
    }
    /// Permits deferred writes.
    pub const fn late(mut self) -> Self {
        self.late = true;
        self
    }
    /// Permits deferred writes if the monitor drains the ring soon after any access.
    pub const fn late_watched(mut self) -> Self {
        self.late = true;
        self.starts = true;
        self
    }
    /// Adds offsets of the same register.
    pub const fn aliases(mut self, offsets: &'static [u32]) -> Self {
        self.aliases = offsets;
        self
    }
    /// Sets the representative values.
    pub const fn values(mut self, values: &'static [u32]) -> Self {
        self.values = values;
        self
    }
    /// Sets what the device clears, sets and reports on completion.
    pub const fn becomes(mut self, clear: u32, set: u32, causes: u32) -> Self {
        self.becomes = Some((clear, set, causes));
        self
    }
    /// Lets the device advance the register to `reg`'s value and report these causes.
    pub const fn follows(mut self, reg: Reg, causes: u32) -> Self {
        self.follows = Some((reg, causes));
        self
    }
    /// Makes it a read-only copy of another register.
    pub const fn mirrors(mut self, reg: Reg) -> Self {
        self.mirrors = Some(reg);
        self.reads(Class::Virtual)
    }
    /// Sets the description.
    pub const fn about(mut self, text: &'static str) -> Self {
        self.about = text;
        self
    }

    /// Returns the mask of all bits of the register.
    pub const fn mask(&self) -> u32 {
        if self.width >= 4 { u32::MAX } else { (1 << (self.width * 8)) - 1 }
    }

    /// Returns the representative of `value` in explorations. A register without representatives has its reset value. A
    /// counter is rounded down to a representative.
    pub fn abstracted(&self, value: u32) -> u32 {
        if self.offset.is_none() && !self.values.is_empty() {
            self.values.iter().copied().filter(|&known| known <= value).max().unwrap_or(0)
        } else if self.values.is_empty() || self.span > self.width as u32 {
            self.reset
        } else {
            value
        }
    }

    /// Returns whether `offset` in bank `bank` means this register.
    pub fn is_at(&self, offset: u32, bank: u8) -> bool {
        let covers = |start: u32| offset >= start && offset - start < self.span;
        self.banks >> bank & 1 == 1
            && (self.offset.is_some_and(covers) || self.aliases.iter().any(|&start| covers(start)))
    }

    /// Returns the offset of the word at `offset`, in the table's own range rather than an alias.
    pub fn word_of_table(&self, offset: u32) -> Option<u32> {
        let own = self.offset?;
        let covers = |start: &u32| offset >= *start && offset - *start < self.span;
        let start = std::iter::once(own).chain(self.aliases.iter().copied()).find(covers)?;
        self.table.then_some(own + (offset - start) / 4 * 4)
    }

    /// Returns the device's value after a write of `value` over `old`, for the bits that a write can change.
    pub fn held(&self, old: u32, value: u32) -> u32 {
        match self.store {
            Store::Plain(_) | Store::ClearOnes(_) => value & self.mask(),
            Store::SetOnes(_) => self.stored(old, value),
            Store::Sticky(_) => self.stored(old, value),
        }
    }

    /// Returns the value after a write of `value` over `old`.
    pub fn stored(&self, old: u32, value: u32) -> u32 {
        match self.store {
            Store::Plain(mask) => (old & !mask | value & mask) & self.mask(),
            Store::ClearOnes(mask) => old & !(value & mask),
            Store::SetOnes(mask) => old | value & mask,
            Store::Sticky(mask) => (value | old & mask) & self.mask(),
        }
    }
}
