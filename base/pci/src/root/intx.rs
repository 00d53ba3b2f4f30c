//! INTx routing: the swizzle from slot and pin to an interrupt controller input, and the wired OR on each input.

use std::sync::{Arc, Mutex};

use super::FunctionAddress;
use crate::config::InterruptPin;
use crate::interrupt::{InterruptError, IntxLine};
use crate::sync::lock;

/// First of the four GSIs of INTx: the IOAPIC pins above the ISA ones.
pub const FIRST_INTX_GSI: u32 = 16;
const GSIS: usize = 4;

/// Drives interrupt controller inputs. The monitor implements it, for instance as a closure.
pub trait IntxSink: Send + Sync {
    /// Sets the level of input `gsi`. Called in order whenever the OR of all functions on it changes.
    ///
    /// # Errors
    /// The interrupt controller refuses.
    fn set_gsi(&self, gsi: u32, asserted: bool) -> Result<(), InterruptError>;
}

impl<F: Fn(u32, bool) -> Result<(), InterruptError> + Send + Sync> IntxSink for F {
    fn set_gsi(&self, gsi: u32, asserted: bool) -> Result<(), InterruptError> {
        self(gsi, asserted)
    }
}

/// One entry of ACPI's `_PRT`. The entry has no polarity; the IOAPIC entry is level-triggered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct IntxRoute {
    /// Slot; `_PRT` encodes it as `slot << 16 | 0xFFFF`.
    pub slot: u8,
    /// Pin; `_PRT` encodes it as [`InterruptPin::index`].
    pub pin: InterruptPin,
    /// Interrupt controller input.
    pub gsi: u32,
}

/// Returns the GSI of a slot's pin: GSIs 16 to 19, rotated by slot so that adjacent slots' INTA don't share one.
#[must_use]
pub fn intx_gsi(slot: u8, pin: InterruptPin) -> u32 {
    FIRST_INTX_GSI + u32::from(wire_index(slot, pin))
}

fn wire_index(slot: u8, pin: InterruptPin) -> u8 {
    (slot % 4 + pin.index()) % 4
}

/// The four wires, each the OR of its contributions.
pub(super) struct IntxWires {
    sink: Arc<dyn IntxSink>,
    /// Number of functions that assert each wire.
    asserting: [Mutex<u32>; GSIS],
}

impl IntxWires {
    pub(super) fn new(sink: Arc<dyn IntxSink>) -> Arc<Self> {
        Arc::new(Self { sink, asserting: Default::default() })
    }

    /// Creates a contribution for the function at `address`.
    pub(super) fn line(self: &Arc<Self>, address: FunctionAddress, pin: InterruptPin) -> Arc<dyn IntxLine> {
        Arc::new(Contribution {
            wires: Arc::clone(self),
            wire: wire_index(address.slot(), pin),
            asserted: Mutex::new(false),
        })
    }

    /// Returns how many functions assert each GSI now.
    pub(super) fn levels(&self) -> [(u32, u32); GSIS] {
        let mut gsi = FIRST_INTX_GSI;
        self.asserting.each_ref().map(|count| {
            let level = (gsi, *lock(count));
            gsi += 1;
            level
        })
    }

    fn change(&self, wire: u8, asserted: bool) -> Result<(), InterruptError> {
        // The lock spans the call, so that levels reach the interrupt controller in order.
        let mut count = lock(&self.asserting[usize::from(wire)]);
        let new = if asserted { count.saturating_add(1) } else { count.saturating_sub(1) };
        if (new == 0) != (*count == 0) {
            self.sink.set_gsi(FIRST_INTX_GSI + u32::from(wire), new != 0)?;
        }
        *count = new;
        Ok(())
    }
}

/// One function's contribution to a wire.
struct Contribution {
    wires: Arc<IntxWires>,
    wire: u8,
    asserted: Mutex<bool>,
}

impl IntxLine for Contribution {
    fn set_level(&self, asserted: bool) -> Result<(), InterruptError> {
        let mut current = lock(&self.asserted);
        if *current != asserted {
            self.wires.change(self.wire, asserted)?;
            *current = asserted;
        }
        Ok(())
    }
}

impl Drop for Contribution {
    fn drop(&mut self) {
        let asserted = *lock(&self.asserted);
        if asserted && let Err(error) = self.wires.change(self.wire, false) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "INTx of a function that goes away stays asserted"
            );
        }
    }
}
