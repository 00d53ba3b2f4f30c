//! Dispatch of exits by address: one [`AddressSpace`] for I/O ports, one for memory-mapped I/O.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use crate::exits::{RangeId, RangeNames};

/// A device at a range of addresses. Called from vCPU threads, possibly several at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` (1, 2, 4 or 8) bytes at `offset` from the start of the range. The guest chooses offset and length; the bus
    /// guarantees that the access lies within the range.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data`; the same rules hold as for [`Self::read`].
    fn write(&self, offset: u64, data: &[u8]);
}

/// A range could not be claimed or released.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BusError {
    /// The range overlaps one that another device has.
    #[error(
        "Range {start:#x}..={last:#x} of {name} overlaps {other} at {other_start:#x}..={other_last:#x} on the {space} bus"
    )]
    Overlap {
        /// Bus name.
        space: &'static str,
        /// Name of the range to insert.
        name: String,
        /// First address.
        start: u64,
        /// Last address.
        last: u64,
        /// Name of the range that is registered already.
        other: String,
        /// Its first address.
        other_start: u64,
        /// Its last address.
        other_last: u64,
    },
    /// The range is empty, or ends beyond the address space.
    #[error(
        "Range of {name} at {start:#x} with {len:#x} bytes doesn't fit the {space} bus, whose last address is {limit:#x}"
    )]
    BadRange {
        /// Bus name.
        space: &'static str,
        /// Name of the range.
        name: String,
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
        /// Last address of the bus.
        limit: u64,
    },
    /// No range with this start and length is registered.
    #[error("No device is registered at {start:#x} with {len:#x} bytes on the {space} bus")]
    Absent {
        /// Bus name.
        space: &'static str,
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// One registered range, as [`AddressSpace::ranges`] lists it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RangeInfo {
    /// Name given at registration.
    pub name: String,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

#[derive(Clone)]
struct Entry {
    start: u64,
    last: u64,
    name: Arc<str>,
    id: RangeId,
    device: Arc<dyn BusDevice>,
}

/// The devices of one address space. Look-ups take no lock and may run on all vCPU threads at once. Changes are serialized, and an access
/// that begins after a change uses the new ranges.
pub struct AddressSpace {
    name: &'static str,
    limit: u64,
    unclaimed: RangeId,
    names: Arc<RangeNames>,
    entries: ArcSwap<Vec<Entry>>,
    writer: Mutex<()>,
}

impl AddressSpace {
    /// The 64 Ki I/O ports.
    pub fn ports(names: Arc<RangeNames>) -> Self {
        Self::new("port", 0xffff, RangeId::UNCLAIMED_PORT, names)
    }

    /// Guest-physical memory.
    pub fn memory(names: Arc<RangeNames>) -> Self {
        Self::new("memory", u64::MAX, RangeId::UNCLAIMED_MEMORY, names)
    }

    fn new(name: &'static str, limit: u64, unclaimed: RangeId, names: Arc<RangeNames>) -> Self {
        let entries = ArcSwap::from_pointee(Vec::new());
        Self { name, limit, unclaimed, names, entries, writer: Mutex::new(()) }
    }

    /// Registers `device` at `start` for `len` bytes. `name` shows up in exit tables; a range that moves keeps its
    /// counters when it keeps its name.
    pub fn insert(
        &self,
        start: u64,
        len: u64,
        name: &str,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let bad =
            || BusError::BadRange { space: self.name, name: name.to_owned(), start, len, limit: self.limit };
        let last = len.checked_sub(1).and_then(|n| start.checked_add(n)).ok_or_else(bad)?;
        if last > self.limit {
            return Err(bad());
        }
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = Vec::clone(&self.entries.load());
        let at = entries.partition_point(|e| e.last < start);
        if let Some(other) = entries.get(at).filter(|e| e.start <= last) {
            return Err(BusError::Overlap {
                space: self.name,
                name: name.to_owned(),
                start,
                last,
                other: other.name.to_string(),
                other_start: other.start,
                other_last: other.last,
            });
        }
        let id = self.names.intern(self.name, name);
        entries.insert(at, Entry { start, last, name: Arc::from(name), id, device });
        self.entries.store(Arc::new(entries));
        Ok(())
    }

    /// Removes the range registered with exactly this start and length. An access that another vCPU began before may still reach the
    /// device shortly after this function returns.
    pub fn remove(&self, start: u64, len: u64) -> Result<(), BusError> {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = Vec::clone(&self.entries.load());
        let found = entries.iter().position(|e| e.start == start && e.last - e.start == len.wrapping_sub(1));
        let at = found.ok_or(BusError::Absent { space: self.name, start, len })?;
        entries.remove(at);
        self.entries.store(Arc::new(entries));
        Ok(())
    }

    /// Removes all ranges. To be called when the machine ends: the bus and some of its devices hold references to each other.
    pub fn clear(&self) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.entries.store(Arc::new(Vec::new()));
    }

    /// Reads at `address`. Bytes that no range claims read as 0xFF. Returns the range of the first byte.
    pub fn read(&self, address: u64, data: &mut [u8]) -> RangeId {
        let entries = self.entries.load();
        let mut claimed_by = None;
        let mut done = 0;
        while done < data.len() {
            let (entry, offset, piece) = self.piece(&entries, address, done, data.len());
            let part = &mut data[done..done + piece];
            part.fill(0xff);
            if let Some(entry) = entry {
                entry.device.read(offset, part);
            }
            claimed_by.get_or_insert(entry.map_or(self.unclaimed, |e| e.id));
            done += piece;
        }
        claimed_by.unwrap_or(self.unclaimed)
    }

    /// Writes at `address`. Bytes that no range claims are dropped. Returns the range of the first byte.
    pub fn write(&self, address: u64, data: &[u8]) -> RangeId {
        let entries = self.entries.load();
        let mut claimed_by = None;
        let mut done = 0;
        while done < data.len() {
            let (entry, offset, piece) = self.piece(&entries, address, done, data.len());
            if let Some(entry) = entry {
                entry.device.write(offset, &data[done..done + piece]);
            }
            claimed_by.get_or_insert(entry.map_or(self.unclaimed, |e| e.id));
            done += piece;
        }
        claimed_by.unwrap_or(self.unclaimed)
    }

    /// The largest part of an access from byte `done` on that one device (or none) can serve in one call: 1, 2, 4 or 8 bytes, not beyond
    /// the range. Guests may access across range ends and with odd lengths.
    fn piece<'a>(
        &self,
        entries: &'a [Entry],
        address: u64,
        done: usize,
        len: usize,
    ) -> (Option<&'a Entry>, u64, usize) {
        let left = len - done;
        // Beyond the last address nothing answers; no wrap-around to address 0.
        let at = u64::try_from(done).ok().and_then(|n| address.checked_add(n)).filter(|at| *at <= self.limit);
        let Some(at) = at else { return (None, 0, largest_part(left)) };
        let index = entries.partition_point(|e| e.last < at);
        let (entry, offset, room) = match entries.get(index) {
            Some(e) if e.start <= at => (Some(e), at - e.start, (e.last - at).saturating_add(1)),
            Some(e) => (None, 0, e.start - at),
            None => (None, 0, u64::MAX),
        };
        (entry, offset, largest_part(left.min(usize::try_from(room).unwrap_or(usize::MAX))))
    }

    /// Registered ranges, ascending by address.
    pub fn ranges(&self) -> Vec<RangeInfo> {
        let entries = self.entries.load();
        entries
            .iter()
            .map(|e| RangeInfo {
                name: e.name.to_string(),
                start: e.start,
                len: (e.last - e.start).saturating_add(1),
            })
            .collect()
    }
}

fn largest_part(len: usize) -> usize {
    match len {
        8.. => 8,
        4..=7 => 4,
        2..=3 => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::VcpuExits;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Stores bytes by offset, and checks the guarantees of the bus.
    struct Bytes {
        len: u64,
        stored: Mutex<BTreeMap<u64, u8>>,
    }

    impl Bytes {
        fn new(len: u64) -> Arc<Self> {
            Arc::new(Self { len, stored: Mutex::default() })
        }

        fn check(&self, offset: u64, len: usize) {
            assert!(matches!(len, 1 | 2 | 4 | 8), "length {len}");
            assert!(offset + (len as u64) - 1 < self.len, "offset {offset:#x} length {len}");
        }
    }

    impl BusDevice for Bytes {
        fn read(&self, offset: u64, data: &mut [u8]) {
            self.check(offset, data.len());
            for (at, byte) in (offset..).zip(data) {
                *byte = self.stored.lock().unwrap().get(&at).copied().unwrap_or(0);
            }
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.check(offset, data.len());
            self.stored.lock().unwrap().extend((offset..).zip(data.iter().copied()));
        }
    }

    #[test]
    fn unclaimed_addresses_read_as_ones_and_swallow_writes() {
        let space = AddressSpace::memory(RangeNames::new());
        let mut data = [0; 8];
        assert_eq!(space.read(0x1000, &mut data), RangeId::UNCLAIMED_MEMORY);
        assert_eq!(data, [0xff; 8]);
        assert_eq!(space.write(u64::MAX, &data), RangeId::UNCLAIMED_MEMORY);
    }

    #[test]
    fn an_access_across_the_end_of_a_range_is_split_there() {
        let space = AddressSpace::ports(RangeNames::new());
        let device = Bytes::new(4);
        space.insert(0x3f8, 4, "serial", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
        space.write(0x3fa, &[1, 2, 3, 4]);
        assert_eq!(*device.stored.lock().unwrap(), BTreeMap::from([(2, 1), (3, 2)]));
        let mut data = [0; 4];
        assert_eq!(space.read(0x3f7, &mut data), RangeId::UNCLAIMED_PORT);
        assert_eq!(data, [0xff, 0, 0, 1]);
    }

    #[test]
    fn nothing_wraps_around_at_the_last_address() {
        let names = RangeNames::new();
        let (ports, memory) = (AddressSpace::ports(Arc::clone(&names)), AddressSpace::memory(names));
        for (space, last) in [(&ports, 0xffff), (&memory, u64::MAX)] {
            let (low, high) = (Bytes::new(1), Bytes::new(1));
            space.insert(0, 1, "low", Arc::clone(&low) as Arc<dyn BusDevice>).unwrap();
            space.insert(last, 1, "high", Arc::clone(&high) as Arc<dyn BusDevice>).unwrap();
            space.write(last, &[5, 6, 7, 8]);
            assert_eq!(*high.stored.lock().unwrap(), BTreeMap::from([(0, 5)]));
            assert!(low.stored.lock().unwrap().is_empty());
            let mut data = [0; 2];
            space.read(last, &mut data);
            assert_eq!(data, [5, 0xff]);
        }
        assert!(matches!(ports.insert(0xffff, 2, "long", Bytes::new(2)), Err(BusError::BadRange { .. })));
        assert!(matches!(memory.insert(u64::MAX, 2, "long", Bytes::new(2)), Err(BusError::BadRange { .. })));
        assert!(matches!(memory.insert(0x1000, 0, "empty", Bytes::new(1)), Err(BusError::BadRange { .. })));
    }

    #[test]
    fn overlaps_name_both_sides() {
        let space = AddressSpace::ports(RangeNames::new());
        space.insert(0x60, 5, "keyboard", Bytes::new(5)).unwrap();
        let text = space.insert(0x64, 1, "other", Bytes::new(1)).unwrap_err().to_string();
        assert_eq!(text, "Range 0x64..=0x64 of other overlaps keyboard at 0x60..=0x64 on the port bus");
        assert!(matches!(space.remove(0x60, 4), Err(BusError::Absent { .. })));
        space.remove(0x60, 5).unwrap();
        space.insert(0x64, 1, "other", Bytes::new(1)).unwrap();
        assert_eq!(space.ranges(), [RangeInfo { name: "other".into(), start: 0x64, len: 1 }]);
    }

    #[test]
    fn a_moved_range_keeps_its_counter() {
        let names = RangeNames::new();
        let space = AddressSpace::memory(Arc::clone(&names));
        let exits = VcpuExits::new();
        for start in [0x1000, 0x9000] {
            space.insert(start, 16, "bar", Bytes::new(16)).unwrap();
            exits.count_range(space.write(start + 4, &[0; 4]));
            space.remove(start, 16).unwrap();
        }
        assert_eq!(exits.snapshot(0, &names).ranges, BTreeMap::from([("memory:bar".to_owned(), 2)]));
    }

    #[test]
    fn ranges_come_and_go_under_running_accesses() {
        let space = AddressSpace::memory(RangeNames::new());
        std::thread::scope(|scope| {
            let churn = scope.spawn(|| {
                for _ in 0..2000 {
                    space.insert(0x1000, 8, "bar", Bytes::new(8)).unwrap();
                    space.remove(0x1000, 8).unwrap();
                }
            });
            while !churn.is_finished() {
                let mut data = [1; 8];
                space.read(0x1000, &mut data);
                assert!(data == [0; 8] || data == [0xff; 8], "half of a device answered: {data:x?}");
            }
        });
    }

    proptest! {
        /// Any accesses to any ranges: devices get only offsets and lengths that the bus guarantees, and every byte reaches the device
        /// that a byte-wise bus would choose.
        #[test]
        fn dispatch_agrees_with_a_bytewise_model(
            ranges in prop::collection::vec((0u64..48, 1u64..12), 0..8),
            accesses in prop::collection::vec((0u64..64, 1usize..9, any::<bool>()), 1..40),
            base in prop::sample::select(vec![0u64, 0x1000, u64::MAX - 40]),
        ) {
            let space = AddressSpace::memory(RangeNames::new());
            let mut claimed: Vec<(u64, u64)> = Vec::new();
            for (start, len) in ranges {
                let Some(start) = base.checked_add(start) else { continue };
                let fits = start.checked_add(len - 1).is_some();
                let last = start.saturating_add(len - 1);
                let clash = claimed.iter().any(|(s, l)| *s <= last && start <= *l);
                let result = space.insert(start, len, "range", Bytes::new(len));
                prop_assert_eq!(result.is_ok(), fits && !clash);
                if result.is_ok() {
                    claimed.push((start, last));
                }
            }
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            let owned = |at: u64| claimed.iter().any(|(s, l)| (*s..=*l).contains(&at));
            for (n, (address, len, is_write)) in (1u8..).zip(accesses) {
                let address = base.saturating_add(address);
                let places = (0..len as u64).map(|i| address.checked_add(i).filter(|at| owned(*at)));
                if is_write {
                    space.write(address, &vec![n; len]);
                    model.extend(places.flatten().map(|at| (at, n)));
                } else {
                    let mut data = vec![0xaa; len];
                    space.read(address, &mut data);
                    let expected: Vec<u8> =
                        places.map(|at| at.map_or(0xff, |at| model.get(&at).copied().unwrap_or(0))).collect();
                    prop_assert_eq!(data, expected);
                }
            }
        }
    }
}
