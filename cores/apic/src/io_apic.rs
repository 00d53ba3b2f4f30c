//! The IOAPIC: 24 pins, each with a redirection entry. 82093AA data sheet; version 0x20 with its EOI register.
//!
//! A line is asserted or not, and the polarity in its entry has no effect. An edge on a masked pin is lost, as in the data sheet. An
//! asserted level-triggered line interrupts as soon as its entry allows it.

mod saved;

use crate::message::{Message, low, vector_of};

/// Number of pins, each with a redirection entry.
pub const IO_APIC_PINS: u8 = 24;
/// Version 0x20, and the number of the last pin in bits 23:16.
const VERSION_VALUE: u32 = 0x17_0020;
/// Offset of the index register.
const SELECT: u64 = 0x00;
/// Offset of the data register.
const WINDOW: u64 = 0x10;
/// Offset of the EOI register, which is write-only.
const END: u64 = 0x40;
/// Index of the first redirection entry's lower half.
const FIRST_ENTRY: u8 = 0x10;

const MASKED: u64 = 1 << 16;
const LEVEL: u64 = 1 << 15;
const REMOTE_IRR: u64 = 1 << 14;
/// Vector, delivery mode, destination mode, polarity, trigger mode, mask, destination.
const WRITABLE: u64 = 0xFF00_0000_0001_AFFF;
/// Bits 14:8 of the destination, with extended destination ids.
const EXTENDED_DESTINATION: u64 = 0x7F << 49;

/// A set of pins: bit n is pin n.
pub(crate) type Pins = u32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IoApic {
    id: u8,
    select: u8,
    entries: [u64; IO_APIC_PINS as usize],
    /// Lines that devices assert.
    asserted: Pins,
    /// Lines that are asserted until the end of their interrupt is reported.
    until_end: Pins,
    extended: bool,
}

/// Effect of a register write on the pins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinEffect {
    None,
    /// The pin may interrupt now.
    Service(u8),
    /// An EOI of level-triggered interrupts with this vector.
    End(u8),
}

fn bit(pin: u8) -> Pins {
    1 << (pin & 31)
}

impl IoApic {
    pub(crate) fn new(extended: bool) -> Self {
        let entries = [MASKED; IO_APIC_PINS as usize];
        Self { id: 0, select: 0, entries, asserted: 0, until_end: 0, extended }
    }

    /// Resets to the power-on state. Lines that devices assert stay asserted; those that are asserted until an EOI don't.
    pub(crate) fn reset(&mut self) {
        *self = Self { asserted: self.asserted, ..Self::new(self.extended) };
    }

    fn writable(&self) -> u64 {
        WRITABLE | if self.extended { EXTENDED_DESTINATION } else { 0 }
    }

    fn line(&self, pin: u8) -> bool {
        (self.asserted | self.until_end) & bit(pin) != 0
    }

    fn entry(&self, pin: u8) -> u64 {
        self.entries.get(usize::from(pin)).copied().unwrap_or(MASKED)
    }

    /// Whether the pin is level-triggered.
    pub(crate) fn is_level(&self, pin: u8) -> bool {
        self.entry(pin) & LEVEL != 0
    }

    /// The vector of the pin's entry.
    pub(crate) fn vector(&self, pin: u8) -> u8 {
        vector_of(self.entry(pin))
    }

    /// Sets the level that the pin's device drives. Returns whether the pin may have an interrupt to send.
    pub(crate) fn set_line(&mut self, pin: u8, asserted: bool) -> bool {
        let was = self.line(pin);
        self.asserted = if asserted { self.asserted | bit(pin) } else { self.asserted & !bit(pin) };
        self.line(pin) && (!was || self.is_level(pin))
    }

    /// Asserts the line until the EOI of the pin's interrupt. Returns whether the pin may have an interrupt to send.
    pub(crate) fn assert_until_end(&mut self, pin: u8) -> bool {
        let was = self.line(pin);
        self.until_end |= bit(pin);
        !was || self.is_level(pin)
    }

    /// The pin's interrupt to send now. `None` while the entry is masked. A level-triggered pin also needs an asserted line, and no remote
    /// IRR.
    pub(crate) fn pending(&self, pin: u8) -> Option<Message> {
        let entry = self.entry(pin);
        if entry & MASKED != 0 || entry & LEVEL != 0 && (entry & REMOTE_IRR != 0 || !self.line(pin)) {
            return None;
        }
        Message::from_redirection(entry, self.extended)
    }

    /// Sets remote IRR: a local APIC has accepted the pin's level-triggered interrupt.
    pub(crate) fn set_remote_irr(&mut self, pin: u8) {
        if let Some(entry) = self.entries.get_mut(usize::from(pin)) {
            *entry |= REMOTE_IRR;
        }
    }

    /// Clears remote IRR of the level-triggered pins with this vector, and returns the pins for which it was set.
    pub(crate) fn end(&mut self, vector: u8) -> Pins {
        let mut pins = 0;
        for (pin, entry) in (0..).zip(&mut self.entries) {
            if vector_of(*entry) == vector && *entry & (LEVEL | REMOTE_IRR) == LEVEL | REMOTE_IRR {
                *entry &= !REMOTE_IRR;
                pins |= bit(pin);
            }
        }
        pins
    }

    /// Deasserts a line of [`Self::assert_until_end`]. Returns whether it was asserted in that way.
    pub(crate) fn release(&mut self, pin: u8) -> bool {
        let was = self.until_end & bit(pin) != 0;
        self.until_end &= !bit(pin);
        was
    }

    /// Reads up to 8 bytes. A register has 4 bytes; those above are 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            SELECT => self.select.into(),
            WINDOW => self.read_window(),
            _ => 0,
        };
        let bytes = u64::from(value).to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(index).copied().unwrap_or(0);
        }
    }

    fn read_window(&self) -> u32 {
        match self.select {
            // Identification and arbitration.
            0 | 2 => u32::from(self.id) << 24,
            1 => VERSION_VALUE,
            select => match self.selected(select) {
                Some((pin, high)) => low(self.entry(pin) >> if high { 32 } else { 0 }),
                None => u32::MAX,
            },
        }
    }

    /// The pin of a selected entry, and whether its upper half is selected.
    fn selected(&self, select: u8) -> Option<(u8, bool)> {
        let index = select.checked_sub(FIRST_ENTRY)?;
        (index < 2 * IO_APIC_PINS).then_some((index / 2, index % 2 != 0))
    }

    /// Writes up to 8 bytes, of which the register stores the lowest 4.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> PinEffect {
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let value = u32::from_le_bytes(bytes);
        match offset {
            SELECT => self.select = bytes[0],
            WINDOW => return self.write_window(value),
            END => return PinEffect::End(bytes[0]),
            _ => {}
        }
        PinEffect::None
    }

    fn write_window(&mut self, value: u32) -> PinEffect {
        if self.select == 0 {
            self.id = vector_of(u64::from(value) >> 24) & 0xF;
            return PinEffect::None;
        }
        let Some((pin, high)) = self.selected(self.select) else { return PinEffect::None };
        let writable = self.writable();
        let Some(entry) = self.entries.get_mut(usize::from(pin)) else { return PinEffect::None };
        let remote_irr = *entry & REMOTE_IRR;
        let value = u64::from(value);
        let new = if high { value << 32 | *entry & 0xFFFF_FFFF } else { *entry >> 32 << 32 | value };
        *entry = new & writable;
        if *entry & LEVEL == 0 {
            // An edge-triggered entry has no remote IRR. Software that doesn't use the EOI register clears remote IRR by this change.
            return PinEffect::None;
        }
        *entry |= remote_irr;
        PinEffect::Service(pin)
    }
}

#[cfg(test)]
mod tests;
