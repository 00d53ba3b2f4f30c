//! A reference card's access to memory: its bus, with or without an IOMMU.

use crate::physical::{Bus, DeviceError, Mapping};

/// A card's access to memory.
#[derive(Debug)]
pub struct Port<B> {
    /// The memory, in the device's addresses.
    pub bus: B,
    /// With an IOMMU: the mappings.
    mappings: Option<Vec<Mapping>>,
    /// PCI's bus master enable.
    pub bus_master: bool,
    /// Requests that the IOMMU or a disabled bus master blocked.
    pub blocked: u64,
}

impl<B: Bus> Port<B> {
    /// Connects a card to `bus`, with bus mastering off. With `iommu` nothing is mapped yet.
    pub fn new(bus: B, iommu: bool) -> Self {
        Self { bus, mappings: iommu.then(Vec::new), bus_master: false, blocked: 0 }
    }

    /// Returns whether there is an IOMMU.
    pub fn has_iommu(&self) -> bool {
        self.mappings.is_some()
    }

    fn reaches(&mut self, address: u64, length: usize, writes: bool) -> bool {
        let allowed = self.bus_master
            && self.mappings.as_ref().is_none_or(|mappings| covered(mappings, address, length, writes));
        self.blocked += u64::from(!allowed);
        allowed
    }

    /// Reads memory. Returns false, without a change of `into`, if the access was blocked.
    pub fn read(&mut self, address: u64, into: &mut [u8]) -> bool {
        let allowed = into.is_empty() || self.reaches(address, into.len(), false);
        if allowed {
            self.bus.read(address, into);
        }
        allowed
    }

    /// Writes memory. Returns false if the access was blocked.
    pub fn write(&mut self, address: u64, data: &[u8]) -> bool {
        let allowed = data.is_empty() || self.reaches(address, data.len(), true);
        if allowed {
            self.bus.write(address, data);
        }
        allowed
    }

    /// Maps memory for the device.
    ///
    /// # Errors
    /// There is no IOMMU.
    pub fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        let why = || DeviceError { bar: 0, offset: 0, why: format!("no IOMMU to map {mapping:?}") };
        self.mappings.as_mut().ok_or_else(why)?.push(mapping);
        Ok(())
    }

    /// Removes a mapping.
    ///
    /// # Errors
    /// The mapping doesn't exist.
    pub fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        let known = self.mappings.as_mut().and_then(|mappings| {
            let at = mappings.iter().position(|known| *known == mapping)?;
            Some(mappings.swap_remove(at))
        });
        let why = || DeviceError { bar: 0, offset: 0, why: format!("{mapping:?} isn't mapped") };
        known.map(|_| ()).ok_or_else(why)
    }
}

/// Returns whether mappings cover `length` bytes from `address`.
fn covered(mappings: &[Mapping], address: u64, length: usize, writes: bool) -> bool {
    let Some(end) = u64::try_from(length).ok().and_then(|length| address.checked_add(length)) else {
        return false;
    };
    let mut at = address;
    while at < end {
        let reach = mappings.iter().filter(|mapping| mapping.writable || !writes).find_map(|mapping| {
            let limit = mapping.device_base.saturating_add(mapping.length);
            (mapping.device_base..limit).contains(&at).then_some(limit)
        });
        match reach {
            Some(limit) => at = limit,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_side_by_side_cover_what_spans_them() {
        let piece = |device_base, length, writable| Mapping { device_base, guest_base: 0, length, writable };
        let mappings = [piece(0x1000, 0x1000, true), piece(0x2000, 0x1000, false), piece(0x4000, 0x10, true)];
        assert!(covered(&mappings, 0x1FFF, 2, false));
        assert!(!covered(&mappings, 0x1FFF, 2, true), "the second may only be read");
        assert!(!covered(&mappings, 0x2FFF, 2, false), "a hole");
        assert!(covered(&mappings, 0x4000, 0x10, true) && !covered(&mappings, 0x4000, 0x11, true));
        assert!(!covered(&mappings, u64::MAX, 2, false), "the end of all addresses");
    }
}
