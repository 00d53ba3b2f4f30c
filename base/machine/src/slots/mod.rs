//! The memslots of a VM: host memory that guests access without exits, by guest-physical address.

#![allow(unsafe_code)] // KVM_SET_USER_MEMORY_REGION over mappings that the table keeps alive.

mod mapping;
mod page;
mod table;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

pub use mapping::HostMapping;
pub use page::SharedPage;

use self::table::{Backing, Slot, Table};
use crate::memory::GuestRam;
use crate::{sys, vm};

/// Bytes of a page of memslots and dirty logs.
pub const PAGE: u64 = 4096;

/// Identifies a memslot. Never reused within a VM's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub(crate) u64);

/// A memslot could not be made, found or changed.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// The range overlaps another slot.
    #[error(
        "Memory {name} at {start:#x} with {len:#x} bytes overlaps {other} at {other_start:#x} with {other_len:#x} bytes"
    )]
    Overlap {
        /// Name of the new memory.
        name: String,
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
        /// Name of the existing memory.
        other: String,
        /// Its first address.
        other_start: u64,
        /// Its bytes.
        other_len: u64,
    },
    /// Not page-aligned, empty, or beyond an end.
    #[error("Memory {name} at {start:#x} with {len:#x} bytes can't be given to the guest: {reason}")]
    Bad {
        /// Name of the memory.
        name: String,
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
        /// Rule that the range breaks.
        reason: &'static str,
    },
    /// All of KVM's memslots are in use.
    #[error(
        "All {limit} memslots of the VM are in use, so {name} can't be mapped; give the VM fewer devices or windows"
    )]
    Full {
        /// Number of memslots that KVM has.
        limit: usize,
        /// Name of the memory.
        name: String,
    },
    /// The slot doesn't log writes.
    #[error("Memory {name} doesn't log writes; start logging first")]
    NotLogging {
        /// Name of the memory.
        name: String,
    },
    /// The slot was removed already.
    #[error("Memslot {} doesn't exist any more", .0.0)]
    Absent(SlotId),
    /// KVM or the host refused an operation.
    #[error("Memory {name} could not be {what}")]
    Refused {
        /// Name of the memory.
        name: String,
        /// What was tried, with its values.
        what: String,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
}

/// One slot, as [`Slots::list`] and [`Slots::lookup`] show it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SlotInfo {
    /// Id for calls that change the slot.
    #[serde(skip)]
    pub id: SlotId,
    /// Name given when it was added.
    pub name: String,
    /// First guest-physical address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Guest writes exit to the memory bus.
    pub read_only: bool,
    /// KVM logs guest writes.
    pub dirty_logging: bool,
}

/// Pages of one slot that were written since the last call of [`Slots::take_dirty`].
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

/// The memslots of one VM. Thread-safe; changes are serialized.
#[derive(Debug)]
pub struct Slots {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

impl Slots {
    pub(crate) fn new(vm: Arc<VmFd>, limit: usize) -> Self {
        Self { vm, table: Mutex::new(Table::new(limit)) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates or changes a slot in KVM; with `remove`, deletes it.
    fn set_kvm_slot(&self, slot: &Slot, remove: bool, what: &str) -> Result<(), SlotError> {
        let region = kvm_userspace_memory_region {
            slot: slot.number,
            flags: if slot.read_only { KVM_MEM_READONLY } else { 0 }
                | if slot.dirty_logging { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: slot.start,
            memory_size: if remove { 0 } else { slot.len },
            userspace_addr: slot.backing.address(),
        };
        // SAFETY: `slot.backing` owns a mapping of at least `slot.len` bytes. It is dropped only after KVM has deleted the slot, or
        // together with the table in `Drop`, which deletes all slots first.
        unsafe { sys::set_memory_region(&*self.vm, &region) }.map_err(|source| SlotError::Refused {
            name: slot.name.clone(),
            what: format!("{what} at {:#x} with {:#x} bytes", slot.start, slot.len),
            source,
        })
    }

    /// Maps all of `ram` into the guest. The host memory stays mapped until the slots are removed. After an error none of it is mapped
    /// into the guest.
    pub fn add_ram(&self, ram: &GuestRam) -> Result<Vec<SlotId>, SlotError> {
        let mut added = Vec::new();
        for region in ram.regions() {
            let range = &region.range;
            let name = format!("ram{}", range.node);
            let backing = Backing::Ram(Arc::clone(region.mapping()));
            match self.insert(&name, range.start, range.size, backing, false) {
                Ok(id) => added.push(id),
                Err(error) => {
                    for id in added {
                        self.remove(id)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(added)
    }

    /// Maps all of `mapping` at guest-physical `start`. A mapping that isn't writable must be `read_only`. With
    /// `read_only`, guest writes exit and reach the memory bus; reads never exit.
    pub fn add(
        &self,
        name: &str,
        start: u64,
        mapping: Arc<HostMapping>,
        read_only: bool,
    ) -> Result<SlotId, SlotError> {
        let len = mapping.len();
        self.insert(name, start, len, Backing::Mapping(mapping), read_only)
    }

    fn insert(
        &self,
        name: &str,
        start: u64,
        len: u64,
        backing: Backing,
        read_only: bool,
    ) -> Result<SlotId, SlotError> {
        let mut table = self.table();
        let slot = table.prepare(name, start, len, backing, read_only)?;
        let id = slot.id;
        if let Err(error) = self.set_kvm_slot(&slot, false, "mapped into the guest") {
            table.release_number(slot);
            return Err(error);
        }
        table.insert(slot);
        Ok(id)
    }

    /// Removes a slot; the guest's accesses exit from then on. This process unmaps the memory when no other reference to it exists.
    pub fn remove(&self, id: SlotId) -> Result<(), SlotError> {
        let mut table = self.table();
        self.set_kvm_slot(table.get(id)?, true, "taken from the guest")?;
        table.remove(id);
        Ok(())
    }

    /// Makes a slot read-only or writable. KVM can't do this in one step: the slot is absent for some microseconds, so pause the vCPUs
    /// during the call. With dirty logging on, writes logged so far are kept.
    pub fn set_read_only(&self, id: SlotId, read_only: bool) -> Result<(), SlotError> {
        let mut table = self.table();
        let slot = table.get_mut(id)?;
        if slot.read_only == read_only {
            return Ok(());
        }
        if !read_only && !slot.backing.is_writable() {
            return Err(SlotError::Bad {
                name: slot.name.clone(),
                start: slot.start,
                len: slot.len,
                reason: "it is mapped read-only into this process, so the guest can't be let write",
            });
        }
        if slot.dirty_logging {
            // KVM discards its log with the old slot.
            let log = self.kvm_log(slot)?;
            slot.carry(log);
        }
        self.set_kvm_slot(slot, true, "taken from the guest for a moment")?;
        slot.read_only = read_only;
        if let Err(error) = self.set_kvm_slot(slot, false, "mapped anew") {
            slot.read_only = !read_only;
            if self.set_kvm_slot(slot, false, "mapped again as before").is_err() {
                table.remove(id);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Starts or stops dirty logging of a slot. May be called while the guest runs.
    pub fn set_dirty_logging(&self, id: SlotId, on: bool) -> Result<(), SlotError> {
        let mut table = self.table();
        self.set_logging(table.get_mut(id)?, on)
    }

    /// Starts or stops dirty logging of all writable slots.
    pub fn set_dirty_logging_all(&self, on: bool) -> Result<(), SlotError> {
        for slot in self.table().iter_mut().filter(|slot| !slot.read_only) {
            self.set_logging(slot, on)?;
        }
        Ok(())
    }

    fn set_logging(&self, slot: &mut Slot, on: bool) -> Result<(), SlotError> {
        if slot.dirty_logging == on {
            return Ok(());
        }
        slot.dirty_logging = on;
        if on {
            // Discards the device writes from before this log.
            slot.backing.take_device_log();
        }
        slot.carried.clear();
        self.set_kvm_slot(slot, false, if on { "set to log writes" } else { "set to log no writes" })
            .inspect_err(|_| slot.dirty_logging = !on)
    }

    /// Returns the pages written since the last call (or since logging began), by the guest and, in RAM, by devices of this process.
    /// Clears both logs.
    pub fn take_dirty(&self, id: SlotId) -> Result<DirtyPages, SlotError> {
        let mut table = self.table();
        self.harvest(table.get_mut(id)?)
    }

    /// Returns the dirty pages of all slots that log.
    pub fn take_dirty_all(&self) -> Result<Vec<DirtyPages>, SlotError> {
        self.table().iter_mut().filter(|slot| slot.dirty_logging).map(|slot| self.harvest(slot)).collect()
    }

    fn kvm_log(&self, slot: &Slot) -> Result<Vec<u64>, SlotError> {
        let refused = |source: io::Error| SlotError::Refused {
            name: slot.name.clone(),
            what: format!("asked for its dirty log of {:#x} bytes", slot.len),
            source,
        };
        let len = usize::try_from(slot.len).map_err(|_| refused(io::ErrorKind::InvalidInput.into()))?;
        self.vm.get_dirty_log(slot.number, len).map_err(|error| refused(vm::errno(error)))
    }

    fn harvest(&self, slot: &mut Slot) -> Result<DirtyPages, SlotError> {
        if !slot.dirty_logging {
            return Err(SlotError::NotLogging { name: slot.name.clone() });
        }
        let log = self.kvm_log(slot)?;
        slot.carry(log);
        let device_log = slot.backing.take_device_log();
        slot.carry(device_log);
        Ok(DirtyPages { start: slot.start, bitmap: std::mem::take(&mut slot.carried) })
    }

    /// The slot that contains a guest-physical address.
    pub fn lookup(&self, address: u64) -> Option<SlotInfo> {
        self.table().lookup(address).map(Slot::info)
    }

    /// All slots, ascending by address.
    pub fn list(&self) -> Vec<SlotInfo> {
        self.table().iter().map(Slot::info).collect()
    }
}

impl Drop for Slots {
    /// vCPU threads may hold the VM a little longer than this table. So the drop deletes the slots in KVM, before their memory is
    /// unmapped.
    fn drop(&mut self) {
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
        let slots = table.drain();
        for slot in slots {
            if let Err(error) = self.set_kvm_slot(&slot, true, "taken from the guest") {
                tracing::error!(error = %error, "A memslot outlives its VM");
                // Unmapping it now would leave KVM with a stale address.
                std::mem::forget(slot.backing);
            }
        }
    }
}
