//! A guest's memory: as its model sees it, as the emulated receiver does, as the card does.

use std::sync::{Arc, Mutex, PoisonError};

use device_models::describe::Direction;
use device_models::physical::Bus;
use dma::{Dma as _, MappedMemory};
use vpio::MemoryMap;

/// Bytes of a page: what an IOMMU maps.
const PAGE: u64 = 4096;

/// What a guest's monitor has mapped at present. Shared by the guest's connection and the model.
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
    /// In the guest's own addresses: a shared card is behind an IOMMU.
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

/// The holder's memory for the emulated receiver.
#[derive(Debug)]
pub struct GuestBus(pub(super) MappedMemory);

impl Bus for GuestBus {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        if self.0.read(address, into).is_err() {
            into.fill(0xFF);
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        // Where there is no memory it goes nowhere.
        let _ = self.0.write(address, data);
    }
}
