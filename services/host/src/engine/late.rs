//! Devices with not-present guest memory (post-copy): waiting requests continue when pages arrive.

use std::os::fd::{BorrowedFd, OwnedFd};

use dma::MappedMemory;
use hca::names::DeviceId;

use super::worker::Worker;
use crate::function::descriptors::drain;

/// A device with not-present guest memory.
#[derive(Debug)]
pub(super) struct PostcopyDevice {
    memory: MappedMemory,
    /// Eventfd that counts up when requested pages arrive.
    arrivals: OwnedFd,
    /// The last read generation.
    seen: Option<u64>,
}

impl PostcopyDevice {
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd as _;
        self.arrivals.as_fd()
    }
}

impl Worker {
    /// Begins post-copy for a device's guest, by its memory table. `arrivals` is an eventfd that counts up when pages arrive; the caller
    /// has verified that it is one.
    pub fn set_late(&mut self, id: DeviceId, memory: MappedMemory, arrivals: OwnedFd) {
        self.engine.set_late(id, true);
        self.late.insert(id, PostcopyDevice { seen: memory.arrivals(), memory, arrivals });
    }

    /// Guest memory that must be present before the device continues: addresses and lengths.
    pub fn control_memory(&mut self, id: DeviceId) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut each = |address, len| ranges.push((address, len));
        self.engine.control_memory(id, &mut each);
        if let Some(device) = self.devices.get(id) {
            device.control_memory(&mut each);
        }
        ranges
    }

    /// Checks for arrived pages: a load per region, if any device is in post-copy.
    pub(super) fn poll_arrived_pages(&mut self) -> bool {
        if self.late.is_empty() {
            return false;
        }
        let mut came = false;
        let Self { late, engine, .. } = self;
        late.retain(|id, device| {
            let now = device.memory.arrivals();
            if now != device.seen {
                device.seen = now;
                engine.memory_came(*id);
                came = true;
            }
            now.is_some() && engine.is_late(*id)
        });
        came
    }

    /// Empties the eventfds after a sleep; the generation in memory is what counts.
    pub(super) fn clear_arrivals(&self) {
        for device in self.late.values() {
            drain(device.fd());
        }
    }
}
