//! Register accesses.

use dma::Dma;
use telemetry::guest_warn;

use super::Vmxnet3;
use crate::mac::MacAddress;
use crate::pci::{BAR_COMMAND, BAR_DOORBELL};
use crate::registers as r;
use crate::shared_area::offset;

impl<M: Dma> Vmxnet3<M> {
    /// Reads `data.len()` bytes at `offset` of BAR 0 or 1. Registers have 4 bytes; bytes between them, and other BARs, read as 0. Never
    /// blocks.
    pub fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let lane = usize::try_from(at & 3).unwrap_or(0);
            *byte = self.register(bar, at & !3).to_le_bytes()[lane];
        }
    }

    fn register(&self, bar: u8, offset: u64) -> u32 {
        match (bar, offset) {
            (BAR_DOORBELL, _) => {
                interrupt_at(offset).map_or(0, |vector| u32::from(self.vectors.is_masked(vector)))
            }
            (BAR_COMMAND, r::VRRS) => r::REVISIONS,
            (BAR_COMMAND, r::UVRS) => r::UPT_VERSIONS,
            (BAR_COMMAND, r::CMD) => self.result,
            (BAR_COMMAND, r::MACL) => self.station.to_registers().0,
            (BAR_COMMAND, r::MACH) => self.station.to_registers().1,
            (BAR_COMMAND, r::ECR) => self.active.as_ref().map_or(0, |active| active.events),
            // Device and pass-through capabilities: none. No INTx, so ICR is 0 as well.
            _ => 0,
        }
    }

    /// Writes at `offset` of BAR 0 or 1. Only aligned writes of 4 bytes have an effect. A command is complete when this returns. Never
    /// blocks; bounded by the size of the tables that a command reads.
    pub fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            guest_warn!(
                self.log,
                "{}: a write of {} bytes to BAR {bar} at {offset:#x} is ignored; registers have 4",
                self.config.name,
                data.len()
            );
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match bar {
            BAR_DOORBELL => self.write_doorbell(offset, value),
            BAR_COMMAND => self.write_command(offset, value),
            _ => {}
        }
    }

    fn write_doorbell(&mut self, offset: u64, value: u32) {
        if let Some(vector) = interrupt_at(offset) {
            self.vectors.set_masked(vector, value & 1 != 0);
            self.fire();
        } else if crate::pci::doorbell_offsets().any(|doorbell| doorbell == offset) {
            self.kick();
        }
    }

    fn write_command(&mut self, offset: u64, value: u32) {
        let (low, high) = self.station.to_registers();
        match offset {
            r::VRRS => self.revision = value & r::REVISIONS,
            r::DSAL => self.shared_area = self.shared_area & !0xFFFF_FFFF | u64::from(value),
            r::DSAH => self.shared_area = self.shared_area & 0xFFFF_FFFF | u64::from(value) << 32,
            r::CMD => self.command(value),
            r::MACL => self.station = MacAddress::from_registers(value, high),
            r::MACH => self.station = MacAddress::from_registers(low, value),
            r::ECR => self.acknowledge(value),
            _ => {}
        }
    }

    /// Clears events that the driver has acknowledged.
    fn acknowledge(&mut self, bits: u32) {
        let memory = self.memory.as_ref().filter(|_| self.bus_master);
        let (Some(active), Some(memory)) = (self.active.as_mut(), memory) else { return };
        active.events &= !bits;
        // If the driver's memory is gone, the result is lost.
        let _ = memory.store_u32(active.shared.wrapping_add(offset::EVENTS), active.events);
    }
}

/// The vector whose mask register is at an offset of BAR 0.
fn interrupt_at(offset: u64) -> Option<u8> {
    let index = offset.checked_sub(r::IMR)? / 8;
    let vector = u8::try_from(index).ok().filter(|vector| *vector < r::INTERRUPTS_MAX)?;
    offset.is_multiple_of(8).then_some(vector)
}
