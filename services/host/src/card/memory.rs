//! A guest's memory, for its device model, for the emulated receiver, and for the card.

use std::sync::{Arc, Mutex, PoisonError};

use device_models::describe::Direction;
use device_models::physical::Bus;
use dma::{Dma as _, MappedMemory};
use vpio::MemoryMap;

/// Page size of the IOMMU, bytes.
const PAGE: u64 = 4096;

/// The current mappings of a guest's monitor. Shared by the guest's connection and the device model.
#[derive(Debug, Clone, Default)]
pub(super) struct Table(Arc<Mutex<MappedMemory>>);

impl Table {
    pub fn set(&self, memory: MappedMemory) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = memory;
    }

    pub fn get(&self) -> MappedMemory {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl MemoryMap for Table {
    /// Identity: a shared card uses the guest's own addresses, behind an IOMMU.
    fn dma(&self, base: u64, length: u64, direction: Direction) -> Option<u64> {
        let end = base.checked_add(length)?;
        let memory = self.get();
        let region = memory
            .regions()
            .iter()
            .find(|region| base >= region.address() && end <= region.address() + region.size())?;
        (region.is_writable() || direction == Direction::DeviceReads).then_some(base)
    }

    fn all(&self) -> Vec<(u64, u64, bool)> {
        let whole = |address: u64| address.is_multiple_of(PAGE);
        let memory = self.get();
        let regions =
            memory.regions().iter().filter(|region| whole(region.address()) && whole(region.size()));
        regions.map(|region| (region.address(), region.size(), region.is_writable())).collect()
    }
}

/// The memory of the guest that has the card, for the emulated receiver.
#[derive(Debug)]
pub struct GuestBus(pub(super) MappedMemory);

impl Bus for GuestBus {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        if self.0.read(address, into).is_err() {
            into.fill(0xFF);
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        // Without memory at the address, the data is dropped.
        let _ = self.0.write(address, data);
    }
}
