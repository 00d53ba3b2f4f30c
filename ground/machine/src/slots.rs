//! The memslots of a VM: which host memory answers at which guest-physical addresses, without exits.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::memory::GuestRam;

/// Names a memslot until it is removed. Never reused for another slot within a VM's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(u64);

/// A memslot could not be made, found or changed.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// Two slots at one address.
    #[error(
        "Memory {name} at {start:#x} with {len:#x} bytes overlaps {other} at {other_start:#x} with {other_len:#x} bytes"
    )]
    Overlap {
        /// Who asked.
        name: String,
        /// First address.
        start: u64,
        /// Bytes.
        len: u64,
        /// Who is there.
        other: String,
        /// Its first address.
        other_start: u64,
        /// Its bytes.
        other_len: u64,
    },
    /// Not page-aligned, empty, or beyond an end.
    #[error("Memory {name} at {start:#x} with {len:#x} bytes can't be given to the guest: {reason}")]
    Bad {
        /// Who asked.
        name: String,
        /// First address.
        start: u64,
        /// Bytes.
        len: u64,
        /// Why.
        reason: &'static str,
    },
    /// KVM has a fixed number of them.
    #[error(
        "All {limit} memslots of the VM are in use, so {name} can't be mapped; give the VM fewer devices or windows"
    )]
    Full {
        /// How many there are.
        limit: usize,
        /// Who asked.
        name: String,
    },
    /// Removed already.
    #[error("Memslot {0:?} doesn't exist any more")]
    Absent(SlotId),
    /// The host refused.
    #[error("Memory {name} could not be {what}")]
    Refused {
        /// Whose.
        name: String,
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Part of a file or memfd, mapped shared into this process for as long as this lives.
#[derive(Debug)]
pub struct HostMapping {
    address: usize,
    len: usize,
    writable: bool,
}

impl HostMapping {
    /// Maps `len` bytes at `offset` of `fd` (both whole pages), writable or not. The descriptor may be closed afterwards.
    pub fn new(
        _name: &str,
        _fd: BorrowedFd<'_>,
        _offset: u64,
        _len: u64,
        _writable: bool,
    ) -> Result<Arc<Self>, SlotError> {
        todo!()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never: an empty mapping is an error.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this process (and so the guest) may write.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Where it is mapped. Valid while the mapping lives; the contents change under every reader.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }
}

/// One slot, as [`Slots::list`] and [`Slots::lookup`] show it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SlotInfo {
    /// Its name.
    #[serde(skip)]
    pub id: Option<SlotId>,
    /// Name given when it was added.
    pub name: String,
    /// First guest-physical address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Guest writes exit to the memory bus.
    pub read_only: bool,
    /// KVM logs guest writes.
    pub dirty_logging: bool,
}

/// Pages of one slot that were written since the last harvest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyPages {
    /// First guest-physical address of the slot.
    pub start: u64,
    /// Bit n of word n/64 stands for the 4 KiB page at `start + n * 4096`.
    pub bitmap: Vec<u64>,
}

impl DirtyPages {
    /// Number of dirty pages.
    pub fn count(&self) -> u64 {
        self.bitmap.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Guest-physical addresses of the dirty pages, ascending.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let start = self.start;
        (0u64..).zip(&self.bitmap).flat_map(move |(i, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| start + (i * 64 + bit) * 4096)
        })
    }
}

/// The memslots of one VM. Thread-safe.
pub struct Slots {
    _private: (),
}

impl Slots {
    /// Gives all of `ram` to the guest. Its memory stays mapped until the slots are removed.
    pub fn add_ram(&self, _ram: &GuestRam) -> Result<Vec<SlotId>, SlotError> {
        todo!()
    }

    /// Maps all of `mapping` at guest-physical `start`. A mapping that isn't writable must be `read_only`. With
    /// `read_only`, guest writes exit and reach the memory bus; reads never exit.
    pub fn add(
        &self,
        _name: &str,
        _start: u64,
        _mapping: Arc<HostMapping>,
        _read_only: bool,
    ) -> Result<SlotId, SlotError> {
        todo!()
    }

    /// Removes a slot; the guest's accesses exit from then on. Its memory is unmapped from this process when nobody else
    /// holds it.
    pub fn remove(&self, _id: SlotId) -> Result<(), SlotError> {
        todo!()
    }

    /// Makes a slot read-only or writable. KVM can't do this in one step: the slot is absent for some microseconds, so
    /// pause the vCPUs around it.
    pub fn set_read_only(&self, _id: SlotId, _read_only: bool) -> Result<(), SlotError> {
        todo!()
    }

    /// Starts or stops logging guest writes to a slot; may be called while the guest runs.
    pub fn set_dirty_logging(&self, _id: SlotId, _on: bool) -> Result<(), SlotError> {
        todo!()
    }

    /// The same for all writable slots.
    pub fn set_dirty_logging_all(&self, _on: bool) -> Result<(), SlotError> {
        todo!()
    }

    /// Pages written since the last call (or since logging began), by the guest and, in RAM, by devices of this process.
    /// Clears both logs.
    pub fn take_dirty(&self, _id: SlotId) -> Result<DirtyPages, SlotError> {
        todo!()
    }

    /// The same for all slots that log.
    pub fn take_dirty_all(&self) -> Result<Vec<DirtyPages>, SlotError> {
        todo!()
    }

    /// The slot at a guest-physical address.
    pub fn lookup(&self, _address: u64) -> Option<SlotInfo> {
        todo!()
    }

    /// All slots, ascending by address.
    pub fn list(&self) -> Vec<SlotInfo> {
        todo!()
    }
}
