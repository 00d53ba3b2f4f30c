//! Deferred (coalesced) MMIO and port writes: guest stores that don't exit. KVM puts them into a ring, and they reach their devices
//! before any later access that exits (`KVM_REGISTER_COALESCED_MMIO`).
//!
//! ```text
//! guest's store ──▶ KVM: in a zone? ──▶ ring, 169 entries ─▶ CoalescedWrites::drain ──▶ bus ──▶ device
//!                        │ no, or the ring is full                     ▲
//!                        └──▶ exit ── drains first ────────────────────┘  also: pauses, and wake-ups of devices' threads
//! ```
//!
//! A VM has one ring for both address spaces, so all deferred writes stay in order. A thread that drains the ring holds a lock until the
//! device has the write. A vCPU's next access therefore can't overtake its own deferred write that another thread drains. A deferred
//! write waits until the next exit of any vCPU for a port or memory access, the next pause, or the next wake-up of a device's thread.
#![allow(unsafe_code)] // The ring is memory that the kernel writes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_COALESCED_MMIO_PAGE_OFFSET, kvm_coalesced_mmio, kvm_coalesced_mmio_zone};
use rustix::mm::{MapFlags, ProtFlags};

use crate::bus::AddressSpace;
use crate::io_event::IoSpace;

const PAGE: usize = 4096;
/// Bytes of the indices in front of the entries.
const RING_HEADER_BYTES: usize = 8;
/// Entries of the ring; one always stays empty.
const RING_ENTRIES: u32 = 170;
const _: () = assert!(RING_ENTRIES as usize == (PAGE - RING_HEADER_BYTES) / size_of::<kvm_coalesced_mmio>());

/// A range of addresses in which KVM defers writes, whatever their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoalescedZone {
    /// Ports or memory.
    pub space: IoSpace,
    /// First port or guest-physical address.
    pub address: u64,
    /// Length in bytes. A write that begins in the zone and ends behind it exits.
    pub length: u32,
}

impl CoalescedZone {
    pub(crate) fn request(&self) -> kvm_coalesced_mmio_zone {
        let mut zone =
            kvm_coalesced_mmio_zone { addr: self.address, size: self.length, ..Default::default() };
        zone.__bindgen_anon_1.pio = u32::from(self.space == IoSpace::Port);
        zone
    }
}

/// The deferred writes of a VM. Thread-safe.
#[derive(Debug, Default)]
pub struct CoalescedWrites {
    /// Zones added so far; while it is 0, no thread reads the ring.
    zones: AtomicUsize,
    /// Writes that came through the ring.
    drained: AtomicU64,
    ring: Mutex<Option<Ring>>,
}

impl CoalescedWrites {
    fn ring(&self) -> MutexGuard<'_, Option<Ring>> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the ring, which is part of each vCPU's file. The first call maps it; later ones change nothing.
    pub(crate) fn map(&self, vcpu: &impl AsRawFd) -> io::Result<()> {
        let mut ring = self.ring();
        if ring.is_none() {
            *ring = Some(Ring::map(vcpu)?);
        }
        Ok(())
    }

    pub(crate) fn count_zone(&self) {
        self.zones.fetch_add(1, Ordering::AcqRel);
    }

    /// Passes all deferred writes to their devices, in the order in which the guest made them. Must not be called from a device's own
    /// `write`, nor with a lock held that a device acquires in it.
    pub fn drain(&self, ports: &AddressSpace, memory: &AddressSpace) {
        // The count never falls: a removed zone may have left writes in the ring.
        if self.zones.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut ring = self.ring();
        let Some(ring) = ring.as_mut() else { return };
        let mut drained = 0;
        while let Some(write) = ring.first() {
            let data = write.data.get(..write.length).unwrap_or(&write.data);
            match write.space {
                IoSpace::Port => ports.write(write.address, data),
                IoSpace::Memory => memory.write(write.address, data),
            };
            ring.advance();
            drained += 1;
        }
        self.drained.fetch_add(drained, Ordering::Relaxed);
    }

    /// Writes that came through the ring since the VM began.
    pub fn drained(&self) -> u64 {
        self.drained.load(Ordering::Relaxed)
    }
}

/// A copy of one deferred write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Write {
    space: IoSpace,
    address: u64,
    length: usize,
    data: [u8; 8],
}

/// The page that KVM shares with this process: the indices `first` and `last`, then the entries. KVM advances `last`, this process
/// `first`.
#[derive(Debug)]
struct Ring(NonNull<u8>);

// SAFETY: no other code of this process has the mapping's address; the indices are accessed atomically.
unsafe impl Send for Ring {}

impl Ring {
    fn map(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the descriptor is open as long as `vcpu` lives.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let offset = u64::from(KVM_COALESCED_MMIO_PAGE_OFFSET) * PAGE as u64;
        Self::of(fd, offset)
    }

    fn of(fd: BorrowedFd<'_>, offset: u64) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice; it keeps the file open by itself.
        let mapped = unsafe { rustix::mm::mmap(null, PAGE, protection, MapFlags::SHARED, fd, offset) };
        let address = mapped?;
        NonNull::new(address.cast()).map(Self).ok_or_else(|| io::ErrorKind::Other.into())
    }

    fn index(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: an aligned word of the mapping, which lives as long as `self`; the kernel accesses it as such.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().add(offset).cast()) }
    }

    /// The oldest deferred write, without removing it.
    fn first(&self) -> Option<Write> {
        let first = self.index(0).load(Ordering::Relaxed) % RING_ENTRIES;
        if self.index(4).load(Ordering::Acquire) % RING_ENTRIES == first {
            return None;
        }
        let at = RING_HEADER_BYTES + first as usize * size_of::<kvm_coalesced_mmio>();
        // SAFETY: `first` is below PLACES, so the entry lies in the mapping.
        let at = unsafe { self.0.as_ptr().add(at).cast::<kvm_coalesced_mmio>() };
        // SAFETY: the entry is aligned to 8 bytes, and `last`, read before with acquire ordering, shows that KVM has finished writing it.
        let entry = unsafe { at.read() };
        // SAFETY: both names are the same word.
        let port = unsafe { entry.__bindgen_anon_1.pio } != 0;
        Some(Write {
            space: if port { IoSpace::Port } else { IoSpace::Memory },
            address: entry.phys_addr,
            length: (entry.len as usize).min(entry.data.len()),
            data: entry.data,
        })
    }

    /// Returns the oldest entry to KVM.
    fn advance(&mut self) {
        let first = self.index(0).load(Ordering::Relaxed) % RING_ENTRIES;
        self.index(0).store((first + 1) % RING_ENTRIES, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `of`; no other code has its address.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE) } {
            tracing::error!(%error, "The ring of deferred writes could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::bus::BusDevice;
    use crate::exits::RangeNames;

    /// The writes that reached a device: offset and bytes.
    #[derive(Default)]
    struct Seen(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Seen {
        fn read(&self, _: u64, _: &mut [u8]) {}
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    /// KVM's side of a ring.
    struct Kernel(Ring);

    impl Kernel {
        fn put(&self, port: bool, address: u64, length: u32, data: [u8; 8]) -> bool {
            let last = self.0.index(4).load(Ordering::Relaxed);
            if (last + 1) % RING_ENTRIES == self.0.index(0).load(Ordering::Acquire) {
                return false;
            }
            let mut entry =
                kvm_coalesced_mmio { phys_addr: address, len: length, data, ..Default::default() };
            entry.__bindgen_anon_1.pio = u32::from(port);
            let at = RING_HEADER_BYTES + last as usize * size_of::<kvm_coalesced_mmio>();
            // SAFETY: `last` is a place of the ring, and the other side reads it only once `last` has moved on.
            unsafe { self.0.0.as_ptr().add(at).cast::<kvm_coalesced_mmio>().write(entry) };
            self.0.index(4).store((last + 1) % RING_ENTRIES, Ordering::Release);
            true
        }
    }

    struct World {
        kernel: Kernel,
        coalesced: CoalescedWrites,
        ports: AddressSpace,
        memory: AddressSpace,
        seen: Arc<Seen>,
    }

    fn world() -> World {
        let page = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&page, PAGE as u64).unwrap();
        let ring = || Ring::of(page.as_fd(), 0).unwrap();
        let coalesced = CoalescedWrites { ring: Mutex::new(Some(ring())), ..CoalescedWrites::default() };
        let names = RangeNames::new();
        let (ports, memory) = (AddressSpace::ports(Arc::clone(&names)), AddressSpace::memory(names));
        let seen = Arc::new(Seen::default());
        ports.insert(0x300, 0x20, "ports", Arc::clone(&seen) as Arc<dyn BusDevice>).unwrap();
        memory.insert(0x1000, 0x100, "memory", Arc::clone(&seen) as Arc<dyn BusDevice>).unwrap();
        World { kernel: Kernel(ring()), coalesced, ports, memory, seen }
    }

    #[test]
    fn writes_reach_their_devices_in_order_and_once() {
        let world = world();
        world.coalesced.count_zone();
        let mut expected = Vec::new();
        // Three times around the ring, ports and memory mixed.
        for round in 0..=255_u8 {
            assert!(world.kernel.put(true, 0x310, 2, [round, 1, 9, 9, 9, 9, 9, 9]));
            assert!(world.kernel.put(false, 0x1008, 4, [round, 2, 3, 4, 9, 9, 9, 9]));
            expected.push((0x10, vec![round, 1]));
            expected.push((8, vec![round, 2, 3, 4]));
            if round % 50 == 49 || round == 255 {
                world.coalesced.drain(&world.ports, &world.memory);
                assert_eq!(*world.seen.0.lock().unwrap(), expected);
            }
        }
        assert_eq!(world.coalesced.drained(), 512);
    }

    #[test]
    fn without_zones_no_thread_reads_the_ring() {
        let world = world();
        assert!(world.kernel.put(true, 0x310, 1, [7; 8]));
        world.coalesced.drain(&world.ports, &world.memory);
        assert!(world.seen.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_full_ring_takes_no_more_until_it_is_drained() {
        let world = world();
        world.coalesced.count_zone();
        let mut put = 0;
        while world.kernel.put(true, 0x310, 1, [1; 8]) {
            put += 1;
        }
        assert_eq!(put, 169);
        world.coalesced.drain(&world.ports, &world.memory);
        assert_eq!(world.seen.0.lock().unwrap().len(), 169);
        assert!(world.kernel.put(true, 0x310, 1, [1; 8]));
    }

    #[test]
    fn nonsense_in_the_ring_is_cut_down_to_what_a_write_can_be() {
        let world = world();
        world.coalesced.count_zone();
        world.kernel.0.index(0).store(u32::MAX - 5, Ordering::Relaxed);
        world.kernel.0.index(4).store(u32::MAX, Ordering::Relaxed);
        world.coalesced.drain(&world.ports, &world.memory);
        world.kernel.0.index(0).store(0, Ordering::Relaxed);
        world.kernel.0.index(4).store(0, Ordering::Relaxed);
        assert!(world.kernel.put(false, u64::MAX, 1 << 30, [5; 8]));
        assert!(world.kernel.put(false, 0x1000, 0, [5; 8]));
        world.coalesced.drain(&world.ports, &world.memory);
        assert!(world.seen.0.lock().unwrap().iter().all(|(_, data)| data.len() <= 8));
    }
}
