//! Registers: place, class, what is kept and what may come back.

use super::{Expr, Reg};

/// How accesses to a register are treated (spec nics 0.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Forwarded; nothing to know, nothing to check.
    Free,
    /// Forwarded, and the last value is remembered.
    Shadow,
    /// Answered from the model; the device's own register is not the guest's.
    Virtual,
    /// A write is checked in some states before it reaches the device.
    Check,
    /// As `Check`, and the write can start or re-aim DMA, or the card's own engine.
    Dma,
    /// Never forwarded: reads answer the reset value, writes are dropped and counted.
    Deny,
}

impl Class {
    /// The letter of spec nics 0.1.
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

/// What a guest's write does to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Replaces these bits.
    Plain(u32),
    /// Ones clear bits, of these only.
    ClearOnes(u32),
    /// Ones set bits, of these only.
    SetOnes(u32),
    /// Replaces bits, but these can only be set by a write; the device clears them.
    Sticky(u32),
}

/// What the guest may see of a value that the device returned.
#[derive(Debug, Clone, Copy)]
pub enum Returns {
    /// Everything.
    Any,
    /// The register isn't read from the device: the remembered value is the answer.
    Shadow,
    /// These bits of it; the others must be as remembered, and are answered from there.
    Bits(u32),
    /// Only numbers from the first up to but not including the second; otherwise the remembered value.
    Within(Expr, Expr),
}

/// A register, made with [`register`] and the functions below.
#[derive(Debug, Clone, Copy)]
pub struct Register {
    /// Its name in the data sheet.
    pub name: &'static str,
    /// Offset in the BAR; `None` for what the model only remembers.
    pub offset: Option<u32>,
    /// Width in bytes: 1, 2 or 4.
    pub width: u8,
    /// Bytes of the BAR that mean this register; more than `width` for data ports.
    pub span: u32,
    /// Other offsets at which the same register is found.
    pub aliases: &'static [u32],
    /// Banks in which it is found, a bit per bank.
    pub banks: u8,
    /// Class of reads; `None`: reads of this offset mean another register.
    pub read: Option<Class>,
    /// Class of writes; `None`: writes of this offset mean another register.
    pub write: Option<Class>,
    /// Value after reset.
    pub reset: u32,
    /// What a write keeps.
    pub store: Store,
    /// What may come back.
    pub returns: Returns,
    /// A write may reach the model and the device late (in order with other late ones): it may wait in a coalescing ring.
    pub late: bool,
    /// A late write may start something that nobody waits for by another access: late writes are looked at soon after any access.
    pub starts: bool,
    /// Values that stand for all, one per case that the model or the device tells apart: exploration and grammar use them. The
    /// exploration leaves registers without values at their reset value.
    pub values: &'static [u32],
    /// Bits that the device clears, that it sets, and the causes that it reports, by itself when it is done with a request.
    pub becomes: Option<(u32, u32, u32)>,
    /// The device brings it to that register's value by itself, and reports these causes then: how far it has come with what it was told.
    pub follows: Option<(Reg, u32)>,
    /// Reads answer with this register's value instead.
    pub mirrors: Option<Reg>,
    /// Its words are remembered by the monitor, each for itself.
    pub table: bool,
    /// What it is.
    pub about: &'static str,
}

/// A register of one byte at `offset`, in every bank, readable and writable, remembered.
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
    /// Of `bytes` bytes.
    pub const fn width(mut self, bytes: u8) -> Self {
        self.width = bytes;
        self.span = bytes as u32;
        self
    }
    /// A data port: accesses of 1, 2 and 4 bytes anywhere in `bytes` bytes mean the port.
    pub const fn port(mut self, bytes: u32) -> Self {
        self.span = bytes;
        self.width = 4;
        self
    }
    /// Words side by side, in `bytes` bytes, that belong to the context ([`Step::Table`](super::Step::Table)).
    pub const fn table(mut self, bytes: u32) -> Self {
        self.table = true;
        self.port(bytes)
    }
    /// Found in these banks only, a bit per bank.
    pub const fn banks(mut self, banks: u8) -> Self {
        self.banks = banks;
        self
    }
    /// Class of reads; writes of this offset mean another register.
    pub const fn reads(mut self, class: Class) -> Self {
        self.read = Some(class);
        self.write = None;
        self
    }
    /// Class of writes; reads of this offset mean another register.
    pub const fn writes(mut self, class: Class) -> Self {
        self.read = None;
        self.write = Some(class);
        self.returns = Returns::Shadow;
        self
    }
    /// Classes of reads and writes.
    pub const fn class(mut self, read: Class, write: Class) -> Self {
        self.read = Some(read);
        self.write = Some(write);
        if matches!(read, Class::Virtual) {
            self.returns = Returns::Shadow;
        }
        self
    }
    /// Nothing of the device's: the model only remembers it.
    pub const fn internal(mut self) -> Self {
        self.offset = None;
        self.read = None;
        self.write = None;
        self
    }
    /// Value after reset.
    pub const fn reset(mut self, value: u32) -> Self {
        self.reset = value;
        self
    }
    /// What a write keeps.
    pub const fn store(mut self, store: Store) -> Self {
        self.store = store;
        self
    }
    /// What may come back.
    pub const fn returns(mut self, returns: Returns) -> Self {
        self.returns = returns;
        self
    }
    /// Writes may be late.
    pub const fn late(mut self) -> Self {
        self.late = true;
        self
    }
    /// Writes may be late, where late writes are looked at soon after any access.
    pub const fn late_watched(mut self) -> Self {
        self.late = true;
        self.starts = true;
        self
    }
    /// Also found at these offsets.
    pub const fn aliases(mut self, offsets: &'static [u32]) -> Self {
        self.aliases = offsets;
        self
    }
    /// Values that stand for all.
    pub const fn values(mut self, values: &'static [u32]) -> Self {
        self.values = values;
        self
    }
    /// The device clears and sets these bits by itself, and reports these causes.
    pub const fn becomes(mut self, clear: u32, set: u32, causes: u32) -> Self {
        self.becomes = Some((clear, set, causes));
        self
    }
    /// The device brings it to that register's value by itself, and reports these causes then.
    pub const fn follows(mut self, reg: Reg, causes: u32) -> Self {
        self.follows = Some((reg, causes));
        self
    }
    /// A read-only copy of another register.
    pub const fn mirrors(mut self, reg: Reg) -> Self {
        self.mirrors = Some(reg);
        self.reads(Class::Virtual)
    }
    /// What it is.
    pub const fn about(mut self, text: &'static str) -> Self {
        self.about = text;
        self
    }

    /// All bits of the register.
    pub const fn mask(&self) -> u32 {
        if self.width >= 4 { u32::MAX } else { (1 << (self.width * 8)) - 1 }
    }

    /// The value that stands for `value` in explorations: registers without values that stand for all are as after reset, what the
    /// model counts is rounded down to one of the values.
    pub fn abstracted(&self, value: u32) -> u32 {
        if self.offset.is_none() && !self.values.is_empty() {
            self.values.iter().copied().filter(|&known| known <= value).max().unwrap_or(0)
        } else if self.values.is_empty() || self.span > self.width as u32 {
            self.reset
        } else {
            value
        }
    }

    /// Whether `offset` in bank `bank` means this register.
    pub fn is_at(&self, offset: u32, bank: u8) -> bool {
        let covers = |start: u32| offset >= start && offset - start < self.span;
        self.banks >> bank & 1 == 1
            && (self.offset.is_some_and(covers) || self.aliases.iter().any(|&start| covers(start)))
    }

    /// Offset of the word that `offset` means, in the table's own place rather than an alias.
    pub fn word_of_table(&self, offset: u32) -> Option<u32> {
        let own = self.offset?;
        let covers = |start: &u32| offset >= *start && offset - *start < self.span;
        let start = std::iter::once(own).chain(self.aliases.iter().copied()).find(covers)?;
        self.table.then_some(own + (offset - start) / 4 * 4)
    }

    /// What the device holds after a write of `value` over `old`, as far as it is the writer's.
    pub fn held(&self, old: u32, value: u32) -> u32 {
        match self.store {
            Store::Plain(_) | Store::ClearOnes(_) => value & self.mask(),
            Store::SetOnes(_) => self.stored(old, value),
            Store::Sticky(_) => self.stored(old, value),
        }
    }

    /// What a write of `value` makes of `old`.
    pub fn stored(&self, old: u32, value: u32) -> u32 {
        match self.store {
            Store::Plain(mask) => (old & !mask | value & mask) & self.mask(),
            Store::ClearOnes(mask) => old & !(value & mask),
            Store::SetOnes(mask) => old | value & mask,
            Store::Sticky(mask) => (value | old & mask) & self.mask(),
        }
    }
}
