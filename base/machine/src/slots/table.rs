//! The table of [`super::Slots`]: slot numbers, overlap checks, look-up. It makes no KVM calls.

use std::collections::BTreeMap;
use std::sync::Arc;

use vm_memory::MmapRegion;

use super::{HostMapping, PAGE, SlotError, SlotId, SlotInfo};
use crate::memory::AtomicBitmap;

/// The host memory of a slot; holds it mapped.
#[derive(Debug, Clone)]
pub(super) enum Backing {
    Ram(Arc<MmapRegion<AtomicBitmap>>),
    Mapping(Arc<HostMapping>),
}

impl Backing {
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Ram(region) => region.as_ptr().addr() as u64,
            Self::Mapping(mapping) => mapping.as_ptr().addr() as u64,
        }
    }

    pub(super) fn is_writable(&self) -> bool {
        match self {
            Self::Ram(_) => true,
            Self::Mapping(mapping) => mapping.is_writable(),
        }
    }

    /// Returns and clears the pages that devices of this process wrote.
    pub(super) fn take_device_log(&self) -> Vec<u64> {
        match self {
            Self::Ram(region) => region.bitmap().get_and_reset(),
            Self::Mapping(_) => Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) id: SlotId,
    /// KVM's slot number.
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) backing: Backing,
    pub(super) read_only: bool,
    pub(super) dirty_logging: bool,
    /// Dirty pages that were read from KVM or devices, and not yet returned to the caller.
    pub(super) carried: Vec<u64>,
}

impl Slot {
    pub(super) fn info(&self) -> SlotInfo {
        SlotInfo {
            id: self.id,
            name: self.name.clone(),
            start: self.start,
            len: self.len,
            read_only: self.read_only,
            dirty_logging: self.dirty_logging,
        }
    }

    /// Adds pages to the log; drops bits beyond the slot's end.
    pub(super) fn carry(&mut self, log: Vec<u64>) {
        let pages = usize::try_from(self.len / PAGE).unwrap_or(usize::MAX);
        self.carried.resize(pages.div_ceil(64), 0);
        for (carried, new) in self.carried.iter_mut().zip(log) {
            *carried |= new;
        }
        if let Some(last) = self.carried.last_mut().filter(|_| !pages.is_multiple_of(64)) {
            *last &= (1 << (pages % 64)) - 1;
        }
    }
}

#[derive(Debug)]
pub(super) struct Table {
    limit: usize,
    by_start: BTreeMap<u64, Slot>,
    starts: BTreeMap<SlotId, u64>,
    /// KVM slot numbers that are free again.
    free: Vec<u32>,
    next_number: u32,
    next_id: u64,
}

impl Table {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            by_start: BTreeMap::new(),
            starts: BTreeMap::new(),
            free: Vec::new(),
            next_number: 0,
            next_id: 0,
        }
    }

    /// Makes a slot with a number of its own, without inserting it.
    pub(super) fn prepare(
        &mut self,
        name: &str,
        start: u64,
        len: u64,
        backing: Backing,
        read_only: bool,
    ) -> Result<Slot, SlotError> {
        let bad = |reason| SlotError::Bad { name: name.to_owned(), start, len, reason };
        if len == 0 || !start.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(bad("address and length must be whole pages of 4096 bytes, and not empty"));
        }
        let last = start.checked_add(len - 1).ok_or_else(|| bad("it ends beyond the address space"))?;
        if !read_only && !backing.is_writable() {
            return Err(bad(
                "it is mapped read-only into this process, so it must be read-only for the guest",
            ));
        }
        if let Some(other) =
            self.last_at_or_below(last).filter(|other| other.start + (other.len - 1) >= start)
        {
            return Err(SlotError::Overlap {
                name: name.to_owned(),
                start,
                len,
                other: other.name.clone(),
                other_start: other.start,
                other_len: other.len,
            });
        }
        let full = || SlotError::Full { limit: self.limit, name: name.to_owned() };
        let number = match self.free.pop() {
            Some(number) => number,
            None if (self.next_number as usize) < self.limit => {
                self.next_number += 1;
                self.next_number - 1
            }
            None => return Err(full()),
        };
        let id = SlotId(self.next_id);
        self.next_id += 1;
        let name = name.to_owned();
        Ok(Slot {
            id,
            number,
            name,
            start,
            len,
            backing,
            read_only,
            dirty_logging: false,
            carried: Vec::new(),
        })
    }

    /// Releases the number of a slot that wasn't inserted.
    pub(super) fn release_number(&mut self, slot: Slot) {
        self.free.push(slot.number);
    }

    pub(super) fn insert(&mut self, slot: Slot) {
        self.starts.insert(slot.id, slot.start);
        self.by_start.insert(slot.start, slot);
    }

    pub(super) fn remove(&mut self, id: SlotId) {
        if let Some(slot) = self.starts.remove(&id).and_then(|start| self.by_start.remove(&start)) {
            self.free.push(slot.number);
        }
    }

    pub(super) fn get(&self, id: SlotId) -> Result<&Slot, SlotError> {
        self.starts.get(&id).and_then(|start| self.by_start.get(start)).ok_or(SlotError::Absent(id))
    }

    pub(super) fn get_mut(&mut self, id: SlotId) -> Result<&mut Slot, SlotError> {
        self.starts.get(&id).and_then(|start| self.by_start.get_mut(start)).ok_or(SlotError::Absent(id))
    }

    fn last_at_or_below(&self, address: u64) -> Option<&Slot> {
        self.by_start.range(..=address).next_back().map(|(_, slot)| slot)
    }

    pub(super) fn lookup(&self, address: u64) -> Option<&Slot> {
        self.last_at_or_below(address).filter(|slot| address - slot.start < slot.len)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.by_start.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.by_start.values_mut()
    }

    /// Empties the table, and returns its slots.
    pub(super) fn drain(&mut self) -> Vec<Slot> {
        self.starts.clear();
        std::mem::take(&mut self.by_start).into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;

    fn backing(writable: bool) -> Backing {
        let fd = memfd_create("slot", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, PAGE).unwrap();
        Backing::Mapping(HostMapping::new("slot", fd.as_fd(), 0, PAGE, writable).unwrap())
    }

    fn add(table: &mut Table, start: u64, len: u64, backing: &Backing) -> Result<(SlotId, u32), SlotError> {
        let slot = table.prepare("slot", start, len, backing.clone(), false)?;
        let names = (slot.id, slot.number);
        table.insert(slot);
        Ok(names)
    }

    #[test]
    fn numbers_are_recycled_but_ids_are_not() {
        let memory = backing(true);
        let mut table = Table::new(2);
        let (first, number) = add(&mut table, 0, PAGE, &memory).unwrap();
        add(&mut table, PAGE, PAGE, &memory).unwrap();
        assert!(matches!(add(&mut table, 2 * PAGE, PAGE, &memory), Err(SlotError::Full { limit: 2, .. })));
        table.remove(first);
        assert!(matches!(table.get(first), Err(SlotError::Absent(_))));
        let (second, again) = add(&mut table, 2 * PAGE, PAGE, &memory).unwrap();
        assert_eq!(again, number);
        assert_ne!(second, first);
    }

    #[test]
    fn a_number_is_not_lost_when_kvm_refuses() {
        let mut table = Table::new(1);
        for _ in 0..3 {
            let slot = table.prepare("slot", 0, PAGE, backing(true), false).unwrap();
            table.release_number(slot);
        }
    }

    #[test]
    fn memory_mapped_read_only_is_never_writable_for_the_guest() {
        let mut table = Table::new(2);
        assert!(table.prepare("window", 0, PAGE, backing(false), false).is_err());
        assert!(table.prepare("window", 0, PAGE, backing(false), true).is_ok());
    }

    #[test]
    fn a_log_is_merged_and_ends_with_the_slot() {
        let mut table = Table::new(1);
        let mut slot = table.prepare("slot", 0, 66 * PAGE, backing(true), false).unwrap();
        slot.carry(vec![1, u64::MAX]);
        slot.carry(vec![2]);
        slot.carry(vec![0, 0, 5]);
        assert_eq!(slot.carried, [3, 3]);
    }

    proptest! {
        /// Compared with a plain list: the table refuses exactly the overlapping slots, and look-ups find the right slot.
        #[test]
        fn overlap_and_lookup_agree_with_a_naive_table(
            ops in prop::collection::vec((0u64..64, 1u64..9, any::<bool>()), 1..60),
        ) {
            let memory = backing(true);
            let mut table = Table::new(1000);
            let mut model: Vec<(SlotId, u64, u64)> = Vec::new();
            for (page, pages, remove) in ops {
                if remove && let Some((id, ..)) = model.pop() {
                    table.remove(id);
                    continue;
                }
                let (start, len) = (page * PAGE, pages * PAGE);
                let clash = model.iter().any(|(_, s, l)| start < s + l && *s < start + len);
                match add(&mut table, start, len, &memory) {
                    Ok((id, _)) => {
                        prop_assert!(!clash);
                        model.push((id, start, len));
                    }
                    Err(error) => {
                        let overlap = matches!(error, SlotError::Overlap { .. });
                        prop_assert!(clash && overlap);
                    },
                }
                for probe in (0..80).map(|p| p * PAGE + 17) {
                    let owner = model.iter().find(|(_, s, l)| (*s..s + l).contains(&probe)).map(|(id, ..)| *id);
                    prop_assert_eq!(table.lookup(probe).map(|slot| slot.id), owner);
                }
            }
        }
    }
}
