//! Saving and restoring the IOAPIC.

use super::{IO_APIC_PINS, IoApic, LEVEL, REMOTE_IRR, bit};
use crate::saved::{RestoreError, SavedIoApic};

impl IoApic {
    pub(crate) fn save(&self) -> SavedIoApic {
        SavedIoApic {
            id: self.id,
            select: self.select,
            entries: self.entries,
            asserted: self.asserted,
            until_end: self.until_end,
        }
    }

    pub(crate) fn restore(saved: &SavedIoApic, extended: bool) -> Result<Self, RestoreError> {
        let refuse = |what, value| Err(RestoreError::IoApic { what, value });
        let mut io_apic = Self::new(extended);
        if saved.id > 0xF {
            return refuse("identification", saved.id.into());
        }
        for lines in [saved.asserted, saved.until_end] {
            if lines >= bit(IO_APIC_PINS) {
                return refuse("asserted lines", lines.into());
            }
        }
        for entry in saved.entries {
            let possible = io_apic.writable() | if entry & LEVEL != 0 { REMOTE_IRR } else { 0 };
            if entry & !possible != 0 {
                return refuse("a redirection entry", entry);
            }
        }
        (io_apic.id, io_apic.select, io_apic.entries) = (saved.id, saved.select, saved.entries);
        (io_apic.asserted, io_apic.until_end) = (saved.asserted, saved.until_end);
        Ok(io_apic)
    }
}
