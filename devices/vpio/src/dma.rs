//! DMA windows: checked against the guest's memory map, then mapped (with an IOMMU) or translated (without one).
//!
//! With an IOMMU the device uses guest-physical addresses and reaches only the pages of validated windows. [`Mappings`]
//! counts the windows per page: the first window maps a page, and the last one unmaps it. A device that reads addresses
//! from guest memory (e1000) reaches all of the guest's memory, from the first start of an engine until a reset or the
//! hand-off.

use std::collections::BTreeMap;

use device_models::describe::{Direction, Permission};
use device_models::model::{Denied, Granted, Grants};
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};

use crate::violation::Recorder;

/// Size in bytes of an IOMMU page.
pub const PAGE: u64 = 4096;

/// The part of a guest's memory that devices may use.
pub trait MemoryMap {
    /// Returns the address by which a device without an IOMMU reaches the guest-physical address `base`.
    ///
    /// Returns `None` unless all `length` bytes belong to the guest, permit `direction`, and are contiguous in the
    /// device's addresses.
    fn dma(&self, base: u64, length: u64, direction: Direction) -> Option<u64>;
    /// Returns all regions that devices may use: guest-physical base, length in bytes (both multiples of [`PAGE`]), and
    /// whether devices may write. Regions don't overlap. The result doesn't change during the guest's lifetime.
    fn all(&self) -> Vec<(u64, u64, bool)>;
}

/// A region of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Guest-physical base address, a multiple of [`PAGE`].
    pub guest_base: u64,
    /// Length in bytes, a multiple of [`PAGE`].
    pub length: u64,
    /// Base address for a device without an IOMMU.
    pub device_base: u64,
    /// Whether devices may write to the region.
    pub writable: bool,
}

/// A memory map of slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slots(pub Vec<Slot>);

impl MemoryMap for Slots {
    fn dma(&self, base: u64, length: u64, direction: Direction) -> Option<u64> {
        let end = base.checked_add(length)?;
        let slot = self.0.iter().find(|slot| {
            base >= slot.guest_base
                && slot.guest_base.checked_add(slot.length).is_some_and(|limit| end <= limit)
        })?;
        let usable = slot.writable || direction == Direction::DeviceReads;
        usable.then_some(())?;
        slot.device_base.checked_add(base - slot.guest_base)
    }

    fn all(&self) -> Vec<(u64, u64, bool)> {
        self.0.iter().map(|slot| (slot.guest_base, slot.length, slot.writable)).collect()
    }
}

/// Why memory couldn't be mapped for the device.
#[derive(Debug)]
pub(crate) enum Unmapped {
    /// The IOMMU refused this memory. Earlier mappings are unchanged. The error concerns only the requesting guest.
    Refused(DeviceError),
    /// Earlier mappings couldn't be restored: the device must be reset.
    Failed(DeviceError),
}

/// The resident guest's memory that the device reaches through the IOMMU. Either single pages, each with the number of
/// windows that use it and how many of these permit writes, or all of the guest's memory.
#[derive(Debug, Default)]
pub struct Mappings {
    pages: BTreeMap<u64, (u32, u32)>,
    /// Mappings of all guest memory, while `whole_users` windows need it. Meanwhile pages are counted but not mapped
    /// one by one.
    whole: Vec<Mapping>,
    whole_users: u32,
    /// Largest number of bytes that were mapped at one time.
    pub peak: u64,
}

impl Mappings {
    /// Returns the number of bytes that are mapped, and so pinned.
    pub fn bytes(&self) -> u64 {
        if self.whole_users > 0 {
            return self.whole.iter().map(|mapping| mapping.length).sum();
        }
        u64::try_from(self.pages.len()).unwrap_or(u64::MAX).saturating_mul(PAGE)
    }

    /// Maps all of the guest's memory. On the first call no engine that uses memory runs, so single pages may be
    /// unmapped for a moment.
    pub(crate) fn add_all<P: PhysicalDevice>(
        &mut self,
        physical: &mut P,
        memory: &[(u64, u64, bool)],
    ) -> Result<(), Unmapped> {
        if self.whole_users == 0 {
            self.unmap_pages(physical).map_err(Unmapped::Failed)?;
            for &(base, length, writable) in memory {
                let mapping = Mapping { device_base: base, guest_base: base, length, writable };
                if let Err(error) = physical.map(mapping) {
                    // Roll back: unmap the regions, then map the counted pages again.
                    self.unmap_whole(physical)
                        .and_then(|()| self.map_pages(physical))
                        .map_err(Unmapped::Failed)?;
                    return Err(Unmapped::Refused(error));
                }
                self.whole.push(mapping);
            }
        }
        self.whole_users += 1;
        self.peak = self.peak.max(self.bytes());
        Ok(())
    }

    pub(crate) fn remove_all<P: PhysicalDevice>(&mut self, physical: &mut P) -> Result<(), DeviceError> {
        self.whole_users = self.whole_users.saturating_sub(1);
        if self.whole_users == 0 {
            self.unmap_whole(physical)?;
            self.map_pages(physical)?;
        }
        Ok(())
    }

    fn unmap_whole<P: PhysicalDevice>(&mut self, physical: &mut P) -> Result<(), DeviceError> {
        while let Some(mapping) = self.whole.last() {
            physical.unmap(*mapping)?;
            self.whole.pop();
        }
        Ok(())
    }

    /// Unmaps everything, for all users. The caller has reset the device.
    pub(crate) fn clear<P: PhysicalDevice>(&mut self, physical: &mut P) -> Result<(), DeviceError> {
        if self.whole.is_empty() {
            while let Some((&page, &(_, writers))) = self.pages.first_key_value() {
                physical.unmap(Self::mapping(page, writers > 0))?;
                self.pages.pop_first();
            }
        }
        self.unmap_whole(physical)?;
        self.pages.clear();
        self.whole_users = 0;
        Ok(())
    }

    /// Maps all counted pages. After an error, pages that aren't mapped are no longer counted.
    fn map_pages<P: PhysicalDevice>(&mut self, physical: &mut P) -> Result<(), DeviceError> {
        let failed = self.pages.iter().find_map(|(&page, &(_, writers))| {
            physical.map(Self::mapping(page, writers > 0)).err().map(|error| (page, error))
        });
        let Some((page, error)) = failed else { return Ok(()) };
        self.pages.split_off(&page);
        Err(error)
    }

    /// Unmaps all pages but keeps their counts. After an error only the pages that are still mapped stay counted.
    fn unmap_pages<P: PhysicalDevice>(&mut self, physical: &mut P) -> Result<(), DeviceError> {
        let failed = self.pages.iter().find_map(|(&page, &(_, writers))| {
            physical.unmap(Self::mapping(page, writers > 0)).err().map(|error| (page, error))
        });
        let Some((page, error)) = failed else { return Ok(()) };
        self.pages = self.pages.split_off(&page);
        Err(error)
    }

    fn pages_of(base: u64, length: u64) -> std::ops::RangeInclusive<u64> {
        base / PAGE..=(base + (length - 1)) / PAGE
    }

    fn mapping(page: u64, writable: bool) -> Mapping {
        Mapping { device_base: page * PAGE, guest_base: page * PAGE, length: PAGE, writable }
    }

    fn add<P: PhysicalDevice>(
        &mut self,
        physical: &mut P,
        base: u64,
        length: u64,
        writes: bool,
    ) -> Result<(), Unmapped> {
        let pages = Self::pages_of(base, length);
        for page in pages.clone() {
            match self.add_page(physical, page, writes) {
                Err(Unmapped::Refused(error)) => {
                    // Roll back.
                    for added in *pages.start()..page {
                        self.remove_page(physical, added, writes).map_err(Unmapped::Failed)?;
                    }
                    return Err(Unmapped::Refused(error));
                }
                added => added?,
            }
        }
        self.peak = self.peak.max(self.bytes());
        Ok(())
    }

    fn add_page<P: PhysicalDevice>(
        &mut self,
        physical: &mut P,
        page: u64,
        writes: bool,
    ) -> Result<(), Unmapped> {
        let (users, writers) = self.pages.get(&page).copied().unwrap_or((0, 0));
        if self.whole_users > 0 {
            // Already mapped, as part of all guest memory.
        } else if users == 0 {
            physical.map(Self::mapping(page, writes)).map_err(Unmapped::Refused)?;
        } else if writes && writers == 0 {
            physical.unmap(Self::mapping(page, false)).map_err(Unmapped::Failed)?;
            if let Err(error) = physical.map(Self::mapping(page, true)) {
                if let Err(lost) = physical.map(Self::mapping(page, false)) {
                    self.pages.remove(&page);
                    return Err(Unmapped::Failed(lost));
                }
                return Err(Unmapped::Refused(error));
            }
        }
        self.pages.insert(page, (users + 1, writers + u32::from(writes)));
        Ok(())
    }

    fn remove<P: PhysicalDevice>(
        &mut self,
        physical: &mut P,
        base: u64,
        length: u64,
        writes: bool,
    ) -> Result<(), DeviceError> {
        Self::pages_of(base, length).try_for_each(|page| self.remove_page(physical, page, writes))
    }

    fn remove_page<P: PhysicalDevice>(
        &mut self,
        physical: &mut P,
        page: u64,
        writes: bool,
    ) -> Result<(), DeviceError> {
        let Some((users, writers)) = self.pages.get(&page).copied() else { return Ok(()) };
        let single = self.whole_users == 0;
        if users <= 1 {
            if single {
                physical.unmap(Self::mapping(page, writers > 0))?;
            }
            self.pages.remove(&page);
            return Ok(());
        }
        let left = writers.saturating_sub(u32::from(writes));
        if single && writers > 0 && left == 0 {
            physical.unmap(Self::mapping(page, true))?;
            if let Err(lost) = physical.map(Self::mapping(page, false)) {
                self.pages.remove(&page);
                return Err(lost);
            }
        }
        self.pages.insert(page, (users - 1, left));
        Ok(())
    }
}

/// Decides grants of memory to the resident guest's model.
pub(crate) struct Vetter<'a, P> {
    pub physical: &'a mut P,
    pub mappings: &'a mut Mappings,
    pub memory: &'a dyn MemoryMap,
    pub permissions: &'a [Permission],
    pub recorder: &'a mut Recorder,
    /// A failure of the device during map or unmap. Memory that can't be mapped isn't a failure: the grant is denied.
    pub failure: Option<DeviceError>,
}

impl<P: PhysicalDevice> Vetter<'_, P> {
    fn decide(&mut self, base: u64, length: u64, direction: Direction) -> Result<u64, Denied> {
        let address = self.memory.dma(base, length, direction).ok_or_else(|| {
            Denied(format!("isn't memory of the guest that a device may use so ({direction:?})"))
        })?;
        if !self.physical.has_iommu() {
            return Ok(address);
        }
        let writes = direction == Direction::DeviceWrites;
        match self.mappings.add(self.physical, base, length, writes) {
            Ok(()) => Ok(base),
            Err(unmapped) => Err(self.denied(unmapped)),
        }
    }

    fn denied(&mut self, unmapped: Unmapped) -> Denied {
        let error = match unmapped {
            Unmapped::Refused(error) => error,
            Unmapped::Failed(error) => {
                self.failure = Some(error.clone());
                error
            }
        };
        Denied(format!("can't be mapped for the device: {error}"))
    }
}

impl<P: PhysicalDevice> Grants for Vetter<'_, P> {
    fn grant(&mut self, base: u64, length: u64, direction: Direction) -> Result<u64, Denied> {
        let verdict = self.decide(base, length, direction);
        self.recorder.granted(&verdict);
        verdict
    }

    /// Grants all of the guest's memory that devices may use, with an IOMMU. Without an IOMMU nothing confines the
    /// device. A shared card then takes its rings from the owner, who copies the descriptors after checking them
    /// (`crate::sharing`).
    fn grant_all(&mut self, _: Direction) -> Result<(), Denied> {
        let verdict = if self.physical.has_iommu() {
            self.mappings.add_all(self.physical, &self.memory.all()).map_err(|unmapped| self.denied(unmapped))
        } else {
            Err(Denied(
                "can't be kept in the guest's memory without an IOMMU: the device takes addresses out of it; use it as a shared \
                 card (vpio::sharing), whose rings are its owner's, for one guest too"
                    .to_owned(),
            ))
        };
        self.recorder.granted(&verdict.clone().map(|()| 0));
        verdict
    }

    fn release_all(&mut self) {
        if self.physical.has_iommu()
            && let Err(error) = self.mappings.remove_all(self.physical)
        {
            self.failure = Some(error);
        }
    }

    fn release(&mut self, window: Granted, direction: Direction) {
        if self.physical.has_iommu() {
            let writes = direction == Direction::DeviceWrites;
            if let Err(error) = self.mappings.remove(self.physical, window.base, window.length, writes) {
                self.failure = Some(error);
            }
        }
    }

    fn allows(&self, permission: Permission) -> bool {
        self.permissions.contains(&permission)
    }
}

#[cfg(test)]
mod tests {
    use device_models::describe::Direction::{DeviceReads, DeviceWrites};

    use super::{MemoryMap, Slot, Slots};

    #[test]
    fn ranges_lie_in_one_slot_and_are_usable_in_their_direction() {
        let slots = Slots(vec![
            Slot { guest_base: 0x1000, length: 0x2000, device_base: 0x9000, writable: true },
            Slot { guest_base: 0x3000, length: 0x1000, device_base: 0x5000, writable: false },
        ]);
        assert_eq!(slots.dma(0x1800, 0x1800, DeviceWrites), Some(0x9800));
        assert_eq!(slots.dma(0x1800, 0x1801, DeviceWrites), None, "not contiguous");
        assert_eq!(slots.dma(0x3000, 0x10, DeviceReads), Some(0x5000));
        assert_eq!(slots.dma(0x3000, 0x10, DeviceWrites), None, "read only");
        assert_eq!(slots.dma(0, 0x10, DeviceReads), None);
        assert_eq!(slots.dma(u64::MAX, 0x10, DeviceReads), None, "wraps");
    }
}
