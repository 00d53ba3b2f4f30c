//! Commands (register CMD).

use dma::Dma;

use super::{Vmxnet3, offset, read_multicast, read_vlans};
use crate::pci;
use crate::registers::command as c;
use crate::shared_area::offset::{ERROR, STATISTICS, STOPPED};

impl<M: Dma> Vmxnet3<M> {
    /// Executes a command and returns its result. Unknown commands do nothing and return 0: drivers of later revisions issue more commands
    /// than they need.
    pub(super) fn execute(&mut self, code: u32) -> u32 {
        match code {
            c::ACTIVATE_DEV => self.restart(),
            c::QUIESCE_DEV => {
                self.write_stats();
                self.active = None;
                0
            }
            c::RESET_DEV => {
                // The area's address and the selected revision stay: the driver activates again without setting them.
                self.active = None;
                self.vectors = crate::interrupts::Vectors::new();
                0
            }
            c::UPDATE_RX_MODE | c::UPDATE_MAC_FILTERS | c::UPDATE_VLAN_FILTERS | c::UPDATE_FEATURE => {
                self.update(code);
                0
            }
            c::GET_QUEUE_STATUS => {
                self.write_queue_status();
                0
            }
            c::GET_STATS => {
                self.write_stats();
                0
            }
            c::GET_LINK if self.link_up => u32::from(self.config.link_mbps) << 16 | 1,
            c::GET_PERM_MAC_LO => self.config.mac.to_registers().0,
            c::GET_PERM_MAC_HI => self.config.mac.to_registers().1,
            c::GET_DID_LO => u32::from(pci::DEVICE_ID),
            c::GET_DID_HI => u32::from(pci::REVISION_ID),
            c::GET_TXDATA_DESC_SIZE => 128,
            // One RX and one TX queue.
            c::GET_MAX_QUEUES_CONF => 1 << 8 | 1,
            _ => 0,
        }
    }

    /// Reads one part of the shared area again. A part that can't be read keeps its value.
    fn update(&mut self, code: u32) {
        let memory = self.memory.as_ref().filter(|_| self.bus_master);
        let (Some(active), Some(memory)) = (self.active.as_mut(), memory) else { return };
        let shared = active.shared;
        match code {
            c::UPDATE_RX_MODE => {
                if let Ok(mode) = memory.load_u32(shared.wrapping_add(offset::RX_MODE)) {
                    active.filter.mode = mode;
                }
            }
            c::UPDATE_MAC_FILTERS => {
                if let Ok(groups) = read_multicast(memory, shared) {
                    active.filter.groups = groups.into_iter().collect();
                }
            }
            c::UPDATE_VLAN_FILTERS => {
                if let Ok(vlans) = read_vlans(memory, shared) {
                    active.filter.vlans = vlans;
                }
            }
            _ => {
                if let Ok(bytes) = dma::access::read_array(memory, shared.wrapping_add(offset::FEATURES)) {
                    active.features = u64::from_le_bytes(bytes);
                }
            }
        }
    }

    fn write_queue_status(&self) {
        let (Some(active), Some(memory)) = (&self.active, self.dma()) else { return };
        let tx = active.tx.iter().map(|queue| (queue.layout.entry, queue.stopped));
        let rx = active.rx.iter().map(|queue| (queue.layout.entry, queue.stopped));
        for (entry, stopped) in tx.chain(rx) {
            write_status(memory, entry, stopped);
        }
    }

    fn write_stats(&self) {
        let (Some(active), Some(memory)) = (&self.active, self.dma()) else { return };
        let tx = active.tx.iter().map(|queue| (queue.layout.entry, queue.stats.words()));
        let rx = active.rx.iter().map(|queue| (queue.layout.entry, queue.stats.words()));
        for (entry, words) in tx.chain(rx) {
            let mut bytes = [0; 80];
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
                chunk.copy_from_slice(&word.to_le_bytes());
            }
            // If the driver's memory is gone, the result is lost.
            let _ = memory.write(entry.wrapping_add(STATISTICS), &bytes);
        }
    }
}

/// Writes a queue's state to its entry.
pub(super) fn write_status(memory: &impl Dma, entry: u64, error: Option<u32>) {
    // The entry itself may be invalid; then the driver gets no status.
    let _ = memory.write(entry.wrapping_add(ERROR), &error.unwrap_or(0).to_le_bytes());
    let _ = memory.write(entry.wrapping_add(STOPPED), &[u8::from(error.is_some())]);
}
