//! Device addresses of guests' memory, for a shared card that gets addresses from its owner only.
//!
//! Each guest has its own range of addresses. So a guest's memory stays mapped while other guests have the card, and a
//! hand-off needs no mapping. A chunk is mapped when it first holds a frame, and stays mapped while the guest's memory
//! map stays the same.
//!
//! A card without an IOMMU has no such ranges. A frame's address then follows from the guest's memory map, piece by
//! piece, and nothing is mapped.

use std::collections::{BTreeMap, BTreeSet};

use device_models::describe::Direction;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};

use crate::dma::{MemoryMap, PAGE};

/// Size in bytes of a chunk, and limit of chunks per guest. VFIO permits 65,535 mappings per process.
const CHUNK: u64 = 2 << 20;
const MAX_GUEST_CHUNKS: usize = 2048;
/// First address for guests: above the owner's, and below the limit of the smallest IOMMUs (39 bits).
const FROM: u64 = 1 << 32;
const TO: u64 = 1 << 39;

/// A region of a guest's memory.
#[derive(Debug)]
struct Area {
    guest_base: u64,
    length: u64,
    /// The region's base address for the card.
    base: u64,
    chunks: BTreeSet<u64>,
}

impl Area {
    fn mapping(&self, chunk: u64) -> Mapping {
        let start = chunk * CHUNK;
        Mapping {
            device_base: self.base + start,
            guest_base: self.guest_base + start,
            length: CHUNK.min(self.length - start),
            writable: false,
        }
    }
}

/// The memory of all guests of a card. See the module.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The holder's memory that the monitor has granted.
    granted: Vec<Mapping>,
    seats: BTreeMap<usize, Vec<Area>>,
}

impl Places {
    pub fn grant(&mut self, mapping: Mapping) {
        self.granted.push(mapping);
    }

    pub fn withdraw(&mut self, mapping: Mapping) {
        if let Some(at) = self.granted.iter().position(|known| *known == mapping) {
            self.granted.swap_remove(at);
        }
    }

    /// Returns the device addresses of `length` bytes of the holder's memory, piece by piece, and maps what isn't
    /// mapped.
    ///
    /// Returns `None` if a part isn't granted or can't be mapped: devices may only read it, or the host's lock limit is
    /// reached.
    pub fn find(
        &mut self,
        card: &mut dyn PhysicalDevice,
        holder: usize,
        address: u64,
        length: u64,
    ) -> Option<Vec<(u64, u64)>> {
        let end = address.checked_add(length)?;
        let (mut at, mut pieces) = (address, Vec::new());
        while at < end {
            let covers =
                |granted: &&Mapping| granted.guest_base <= at && at - granted.guest_base < granted.length;
            let granted = self.granted.iter().find(covers).copied()?;
            let area = self.area(holder, &granted)?;
            let within = at - granted.guest_base;
            let bytes = (end - at).min(granted.length - within);
            for chunk in within / CHUNK..=(within + bytes - 1) / CHUNK {
                let areas = self.seats.entry(holder).or_default();
                if areas[area].chunks.contains(&chunk) {
                    continue;
                }
                if areas.iter().map(|area| area.chunks.len()).sum::<usize>() >= MAX_GUEST_CHUNKS {
                    // Nothing can be unmapped now: the card may have frames there.
                    return None;
                }
                // The frame is refused and counted. The card itself works.
                card.map(areas[area].mapping(chunk)).ok()?;
                areas[area].chunks.insert(chunk);
            }
            pieces.push((self.seats.get(&holder).map_or(0, |areas| areas[area].base) + within, bytes));
            at += bytes;
        }
        Some(pieces)
    }

    /// Returns the device addresses of `length` bytes of the holder's memory for a card without an IOMMU, as at most
    /// `most` pieces.
    ///
    /// Returns `None` if a part isn't granted, the map has no address for it, or it needs more pieces.
    pub fn translate(
        &self,
        map: &dyn MemoryMap,
        address: u64,
        length: u64,
        most: usize,
    ) -> Option<Vec<(u64, u64)>> {
        let end = address.checked_add(length)?;
        let (mut at, mut pieces) = (address, Vec::<(u64, u64)>::new());
        while at < end {
            let covers =
                |granted: &&Mapping| granted.guest_base <= at && at - granted.guest_base < granted.length;
            let granted = self.granted.iter().find(covers)?;
            let limit = end.min(granted.guest_base.saturating_add(granted.length));
            // Try the whole length, which may be contiguous for the card, and else a page at a time. A page is always
            // contiguous.
            let bytes = limit - at;
            let (place, bytes) = match map.dma(at, bytes, Direction::DeviceReads) {
                Some(place) => (place, bytes),
                None => {
                    let bytes = bytes.min(PAGE - at % PAGE);
                    (map.dma(at, bytes, Direction::DeviceReads)?, bytes)
                }
            };
            place.checked_add(bytes)?;
            let full = pieces.len() == most;
            match pieces.last_mut() {
                Some((first, before)) if *first + *before == place => *before += bytes,
                _ if full => return None,
                _ => pieces.push((place, bytes)),
            }
            at += bytes;
        }
        Some(pieces)
    }

    /// Returns whether a guest is close to its limit of mapped chunks.
    pub fn is_full(&self, seat: usize) -> bool {
        let chunks = |areas: &Vec<Area>| areas.iter().map(|area| area.chunks.len()).sum::<usize>();
        // Descriptors that are processed before other work need at most two chunks each.
        self.seats.get(&seat).is_some_and(|areas| chunks(areas) + 512 >= MAX_GUEST_CHUNKS)
    }

    /// Unmaps a guest's memory. The card must have no frame of this guest.
    ///
    /// # Errors
    /// The card is unreachable.
    pub fn forget(&mut self, card: &mut dyn PhysicalDevice, seat: usize) -> Result<(), DeviceError> {
        let areas = self.seats.entry(seat).or_default();
        for area in areas {
            while let Some(&chunk) = area.chunks.first() {
                card.unmap(area.mapping(chunk))?;
                // Remove it only now: a failed unmap is retried.
                area.chunks.pop_first();
            }
        }
        self.seats.remove(&seat);
        Ok(())
    }

    /// Returns the number of the holder's area for a region. Adds an area while addresses remain.
    fn area(&mut self, holder: usize, granted: &Mapping) -> Option<usize> {
        let is = |area: &Area| (area.guest_base, area.length) == (granted.guest_base, granted.length);
        if let Some(known) = self.seats.get(&holder).and_then(|areas| areas.iter().position(is)) {
            return Some(known);
        }
        let mut taken: Vec<(u64, u64)> = self
            .seats
            .values()
            .flatten()
            .map(|area| (area.base, area.base + area.length.next_multiple_of(CHUNK)))
            .collect();
        taken.sort_unstable();
        let length = granted.length.checked_next_multiple_of(CHUNK)?;
        let mut base = FROM;
        for (start, end) in taken {
            if start.saturating_sub(base) >= length {
                break;
            }
            base = end;
        }
        if base.checked_add(length).is_none_or(|end| end > TO) {
            return None;
        }
        let areas = self.seats.entry(holder).or_default();
        areas.push(Area {
            guest_base: granted.guest_base,
            length: granted.length,
            base,
            chunks: BTreeSet::new(),
        });
        Some(areas.len() - 1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Records mappings and checks that no two share an address.
    #[derive(Default)]
    struct Maps(Vec<Mapping>);

    impl PhysicalDevice for Maps {
        fn read(&mut self, _: u8, _: u32, _: u8) -> Result<u32, DeviceError> {
            Ok(0)
        }
        fn write(&mut self, _: u8, _: u32, _: u8, _: u32) -> Result<(), DeviceError> {
            Ok(())
        }
        fn interrupt(&mut self) -> Result<bool, DeviceError> {
            Ok(false)
        }
        fn reset(&mut self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn set_bus_master(&mut self, _: bool) -> Result<(), DeviceError> {
            Ok(())
        }
        fn has_iommu(&self) -> bool {
            true
        }
        fn map(&mut self, new: Mapping) -> Result<(), DeviceError> {
            let apart = |old: &Mapping| {
                old.device_base + old.length <= new.device_base
                    || new.device_base + new.length <= old.device_base
            };
            assert!(self.0.iter().all(apart), "{new:?}");
            self.0.push(new);
            Ok(())
        }
        fn unmap(&mut self, old: Mapping) -> Result<(), DeviceError> {
            let at = self.0.iter().position(|known| *known == old);
            self.0.swap_remove(at.expect("it is mapped"));
            Ok(())
        }
    }

    /// A guest's regions: two adjacent ones, and one after a hole.
    const REGIONS: [(u64, u64); 3] = [(0, 0x30_0000), (0x30_0000, 0x1000), (0x1_0000_0000, 0x500_0000)];

    fn give(places: &mut Places, on: bool) {
        for (base, length) in REGIONS {
            let mapping = Mapping { device_base: base, guest_base: base, length, writable: true };
            if on { places.grant(mapping) } else { places.withdraw(mapping) }
        }
    }

    proptest! {
        /// For any requests of several guests: a result covers all requested bytes, in pieces that are mapped to this
        /// guest's bytes only. A range that isn't entirely the guest's has no result. A removed guest leaves no
        /// mapping.
        #[test]
        fn bytes_are_found_where_they_are_mapped(
            asks in prop::collection::vec(
                (0usize..3, prop_oneof![0u64..0x40_0000, 0xFFFF_0000u64..0x1_0600_0000, Just(u64::MAX - 3)], 1u64..0x10_0000, any::<bool>()),
                1..60,
            )
        ) {
            let (mut places, mut card) = (Places::default(), Maps::default());
            let mut owners: Vec<(u64, u64, usize)> = Vec::new();
            for (seat, address, length, goes) in asks {
                prop_assert_eq!(places.find(&mut card, seat, address, length), None, "nothing is granted");
                give(&mut places, true);
                let inside = |at: u64| REGIONS.iter().any(|(base, length)| (*base..base + length).contains(&at));
                // Regions consist of whole pages.
                let all = address.checked_add(length).is_some_and(|end| {
                    inside(address) && inside(end - 1) && (address..end).step_by(0x1000).all(inside)
                });
                let found = places.find(&mut card, seat, address, length);
                prop_assert_eq!(found.is_some(), all, "{:#x} {:#x}", address, length);
                let mut at = address;
                for (place, bytes) in found.into_iter().flatten() {
                    for within in [0, bytes / 2, bytes - 1] {
                        let is = |map: &&Mapping| (map.device_base..map.device_base + map.length).contains(&(place + within));
                        let map = card.0.iter().find(is).expect("it is mapped");
                        prop_assert_eq!(place + within - map.device_base + map.guest_base, at + within);
                    }
                    let other = |(start, end, owner): &(u64, u64, usize)| *owner != seat && *start < place + bytes && place < *end;
                    prop_assert!(!owners.iter().any(other), "another guest's addresses");
                    owners.push((place, place + bytes, seat));
                    at += bytes;
                }
                give(&mut places, false);
                if goes {
                    places.forget(&mut card, seat).unwrap();
                    owners.retain(|(_, _, owner)| *owner != seat);
                }
            }
            (0..3).for_each(|seat| places.forget(&mut card, seat).unwrap());
            prop_assert!(card.0.is_empty(), "nothing stays mapped");
        }
    }

    /// The same regions for a card without an IOMMU. The first consists of scattered pages, of which some are adjacent.
    /// The others are contiguous, and the last is read-only.
    struct Scattered;

    impl Scattered {
        fn byte(at: u64) -> Option<u64> {
            match at {
                0..0x30_0000 => {
                    // Pairs of pages, in reverse order.
                    let (pair, within) = (at / 0x2000, at % 0x2000);
                    Some(0x9000_0000 - pair * 0x3000 + within)
                }
                0x30_0000..0x30_1000 => Some(at + 0x7000_0000),
                0x1_0000_0000..0x1_0500_0000 => Some(at + 0x5_0000_0000),
                _ => None,
            }
        }
    }

    impl MemoryMap for Scattered {
        fn dma(&self, base: u64, length: u64, direction: Direction) -> Option<u64> {
            let (first, last) = (Self::byte(base)?, Self::byte(base.checked_add(length - 1)?)?);
            let usable = base < 1 << 32 || direction == Direction::DeviceReads;
            // Comparing both ends suffices: across a gap their distances differ.
            (usable && first.checked_add(length - 1) == Some(last)).then_some(first)
        }
        fn all(&self) -> Vec<(u64, u64, bool)> {
            REGIONS.iter().map(|&(base, length)| (base, length, base < 1 << 32)).collect()
        }
    }

    proptest! {
        /// Without an IOMMU: a result covers all bytes, in order, at the map's addresses. It has at most the requested
        /// number of pieces, of which no two could be one. A range that isn't the guest's, or isn't granted, has no
        /// result. Nothing is mapped.
        #[test]
        fn bytes_are_translated_where_the_map_has_them(
            address in prop_oneof![0u64..0x40_0000, 0xFFFF_0000u64..0x1_0600_0000, Just(u64::MAX - 3)],
            length in prop_oneof![1u64..0x4000, 1u64..0x10_0000],
            most in 1usize..200,
        ) {
            let mut places = Places::default();
            prop_assert_eq!(places.translate(&Scattered, address, length, most), None, "nothing is granted");
            give(&mut places, true);
            let all = (address..address.saturating_add(length)).step_by(0x800).chain([address.saturating_add(length - 1)]).all(|at| {
                Scattered::byte(at).is_some()
            });
            let found = places.translate(&Scattered, address, length, most);
            if let Some(pieces) = &found {
                prop_assert!(all && pieces.len() <= most);
                let mut at = address;
                for (number, &(place, bytes)) in pieces.iter().enumerate() {
                    for within in (0..bytes).step_by(0x333).chain([bytes - 1]) {
                        prop_assert_eq!(Scattered::byte(at + within), Some(place + within));
                    }
                    at += bytes;
                    prop_assert!(pieces.get(number + 1).is_none_or(|&(next, _)| next != place + bytes));
                }
                prop_assert_eq!(at, address + length);
            } else if all {
                prop_assert!(places.translate(&Scattered, address, length, usize::MAX).unwrap().len() > most);
            }
            give(&mut places, false);
            prop_assert_eq!(places.translate(&Scattered, address, length, most), None, "it was taken back");
        }
    }

    /// A range that the map has but the monitor hasn't granted has no result, even directly behind granted memory.
    #[test]
    fn without_an_iommu_all_of_a_frame_must_be_granted() {
        let mut places = Places::default();
        // The range behind the second region is contiguous with it for the card.
        for (base, length) in [REGIONS[0], (REGIONS[2].0, 0x3000)] {
            places.grant(Mapping { device_base: base, guest_base: base, length, writable: true });
            let end = base + length;
            let found = |address, length| places.translate(&Scattered, address, length, 128).is_some();
            assert!(found(end - 0x10, 0x10) && !found(end - 0x10, 0x11) && !found(end, 1), "{base:x}");
        }
    }

    #[test]
    fn a_guest_has_no_more_mapped_than_it_may() {
        let (mut places, mut card) = (Places::default(), Maps::default());
        let all = Mapping { device_base: 0, guest_base: 0, length: 8 << 30, writable: true };
        places.grant(all);
        let found = |places: &mut Places, card: &mut Maps, chunk: usize| {
            places.find(card, 0, u64::try_from(chunk).unwrap() * CHUNK, 64).is_some()
        };
        assert!((0..MAX_GUEST_CHUNKS).all(|chunk| found(&mut places, &mut card, chunk)));
        assert!(
            places.is_full(0)
                && !found(&mut places, &mut card, MAX_GUEST_CHUNKS)
                && card.0.len() == MAX_GUEST_CHUNKS
        );
        places.forget(&mut card, 0).unwrap();
        assert!(!places.is_full(0) && found(&mut places, &mut card, MAX_GUEST_CHUNKS) && card.0.len() == 1);
    }
}
