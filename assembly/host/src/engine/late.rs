//! Devices whose guests' memory is still to come (post-copy): who waits for pages is told when they are there.

use std::os::fd::{BorrowedFd, OwnedFd};

use dma::MappedMemory;
use hca::names::DeviceId;

use super::worker::Worker;
use crate::function::descriptors::drain;

/// Memory of a device's guest that is still to come.
#[derive(Debug)]
pub(super) struct LateDevice {
    memory: MappedMemory,
    /// Counts up when pages have come that were asked for.
    arrivals: OwnedFd,
    /// What was seen last.
    seen: Option<u64>,
}

impl LateDevice {
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd as _;
        self.arrivals.as_fd()
    }
}

impl Worker {
    /// Memory of a device's guest is still to come, as its table knows; `arrivals` is an eventfd that counts up when pages have come, which was
    /// checked to be one.
    pub fn set_late(&mut self, id: DeviceId, memory: MappedMemory, arrivals: OwnedFd) {
        self.engine.set_late(id, true);
        self.late.insert(id, LateDevice { seen: memory.arrivals(), memory, arrivals });
    }

    /// Memory of a device's guest that must be there before the device goes on: addresses and lengths.
    pub fn control_memory(&mut self, id: DeviceId) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut each = |address, len| ranges.push((address, len));
        self.engine.control_memory(id, &mut each);
        if let Some(device) = self.devices.get(id) {
            device.control_memory(&mut each);
        }
        ranges
    }

    /// Looks whether pages have come since the last time: a load per region, where anything is late at all.
    pub(super) fn look_for_memory(&mut self) -> bool {
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

    /// After a sleep: arrivals that woke the thread are as good as seen, since what counts is in memory.
    pub(super) fn hush_arrivals(&self) {
        for device in self.late.values() {
            drain(device.fd());
        }
    }
}
