//! Counts the memory that is mapped for a card.

use device_models::physical::{DeviceError, Mapping, PhysicalDevice};

/// A card and its mapped bytes.
#[derive(Debug)]
pub(super) struct Counted<P> {
    pub card: P,
    pub mapped: u64,
    pub peak: u64,
}

impl<P: PhysicalDevice> PhysicalDevice for Counted<P> {
    fn read(&mut self, bar: u8, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        self.card.read(bar, offset, bytes)
    }

    fn write(&mut self, bar: u8, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        self.card.write(bar, offset, bytes, value)
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.card.interrupt()
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.card.reset()
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.card.set_bus_master(on)
    }

    fn has_iommu(&self) -> bool {
        self.card.has_iommu()
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.card.map(mapping)?;
        self.mapped = self.mapped.saturating_add(mapping.length);
        self.peak = self.peak.max(self.mapped);
        Ok(())
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.card.unmap(mapping)?;
        self.mapped = self.mapped.saturating_sub(mapping.length);
        Ok(())
    }
}
