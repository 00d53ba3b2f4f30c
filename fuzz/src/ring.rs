//! A small guest whose driver follows the fuzzer: 32 KiB of RAM in three regions, two of them adjacent, and rings that are
//! well-formed unless the input breaks them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use arbitrary::{Arbitrary, Result, Unstructured};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemorySpace};
use virtio_devices::device::ActiveQueue;
use virtio_devices_testbed::{INDIRECT, NEXT, WRITE};
use virtio_queue::{Queue, QueueT};

/// RAM: start and bytes. Between the second and the third region there is a hole.
pub const REGIONS: [(u64, usize); 3] = [(0, 0x4000), (0x4000, 0x2000), (0x8000, 0x2000)];
/// Distance of the rings' default addresses.
const RING_STRIDE: u64 = 0x1000;
/// Start of the data of well-formed requests, behind the rings of one queue.
pub const DATA: u64 = 0x3000;

/// Guest memory, which is zeroed before each execution, and the notification.
pub struct Guest {
    pub space: GuestMemorySpace,
    kick: Arc<OwnedFd>,
}

impl Guest {
    pub fn new() -> Self {
        let kick = virtio_devices::worker::new_event().expect("an eventfd");
        Self { space: virtio_devices_testbed::memory(&REGIONS), kick: Arc::new(kick) }
    }

    pub fn memory(&self) -> Arc<GuestMemory> {
        self.space.memory().into_inner()
    }

    /// Zeros all RAM.
    pub fn clear(&self) {
        let (memory, zeroes) = (self.memory(), [0; 0x4000]);
        for (start, len) in REGIONS {
            memory.write_slice(&zeroes[..len], GuestAddress(start)).expect("a region");
        }
    }

    /// Writes bytes where there is RAM.
    pub fn put(&self, address: u64, bytes: &[u8]) {
        // Bytes outside RAM are dropped: the input chose the address.
        let _ = self.memory().write(bytes, GuestAddress(address));
    }
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

/// A guest-physical address, mostly in or near RAM.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub u64);

impl<'a> Arbitrary<'a> for Address {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let near = u64::from(u16::arbitrary(u)?);
        Ok(Self(if near >= 0xF000 { u64::arbitrary(u)? } else { near % 0xA800 }))
    }

    fn size_hint(_depth: usize) -> (usize, Option<usize>) {
        (2, Some(10))
    }
}

/// A length, mostly small.
#[derive(Debug, Clone, Copy)]
pub struct Length(pub u32);

impl<'a> Arbitrary<'a> for Length {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let small = u32::from(u16::arbitrary(u)?);
        Ok(Self(if small >= 0xF000 { u32::arbitrary(u)? } else { small % 0x1200 }))
    }

    fn size_hint(_depth: usize) -> (usize, Option<usize>) {
        (2, Some(6))
    }
}

/// A descriptor from the guest.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Descriptor {
    pub address: Address,
    pub len: Length,
    pub flags: u8,
    pub next: u8,
}

impl Descriptor {
    fn bytes(&self) -> [u8; 16] {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&self.address.0.to_le_bytes());
        raw[8..12].copy_from_slice(&self.len.0.to_le_bytes());
        raw[12..14].copy_from_slice(&u16::from(self.flags & 0xF).to_le_bytes());
        raw[14..].copy_from_slice(&u16::from(self.next).to_le_bytes());
        raw
    }
}

/// One buffer of a well-formed chain.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Buffer {
    pub address: Address,
    pub len: Length,
    pub writable: bool,
}

/// Bytes that the guest writes anywhere, including its rings.
#[derive(Debug, Arbitrary)]
pub struct Poke {
    pub address: Address,
    pub bytes: Vec<u8>,
}

/// Deviations of a queue from a well-formed one.
#[derive(Debug, Arbitrary)]
pub struct RingShape {
    /// Power of two: 2^0 to 2^5 entries.
    pub size_log: u8,
    pub event_idx: bool,
    pub indirect: bool,
    /// Non-default ring addresses.
    pub table: Option<Address>,
    pub available: Option<Address>,
    pub used: Option<Address>,
    /// Positions in the rings, as after a restore.
    pub position: u16,
    /// Descriptors that overwrite those of the chains.
    pub descriptors: Vec<(u8, Descriptor)>,
    /// Heads that are made available after those of the chains.
    pub heads: Vec<u8>,
    /// Offset of the available index from the correct value.
    pub jump: u16,
    pub used_event: u16,
}

/// The features of a ring, as [`virtio_devices::queue::Ring::new`] expects them.
impl RingShape {
    pub fn features(&self) -> u64 {
        let bit = |on: bool, bit: u32| if on { 1 << bit } else { 0 };
        virtio_devices_testbed::PLAIN | bit(self.event_idx, 29) | bit(self.indirect, 28)
    }

    pub fn size(&self) -> u16 {
        1 << (self.size_log % 6)
    }

    fn place(&self, ring: Option<Address>, index: u64, align: u64) -> u64 {
        // The library refuses unaligned rings when they are set, which is the transport's part.
        ring.map_or(index * RING_STRIDE, |address| address.0 & !(align - 1))
    }
}

/// Builds the rings of one queue in guest memory.
pub struct Driver<'a> {
    guest: &'a Guest,
    shape: &'a RingShape,
    table: u64,
    available: u64,
    used: u64,
    next_descriptor: u16,
    heads: Vec<u16>,
}

impl<'a> Driver<'a> {
    /// Creates the driver. `queue` selects the three default pages of the rings.
    pub fn new(guest: &'a Guest, shape: &'a RingShape, queue: u64) -> Self {
        Self {
            guest,
            shape,
            table: shape.place(shape.table, 3 * queue, 16),
            available: shape.place(shape.available, 3 * queue + 1, 2),
            used: shape.place(shape.used, 3 * queue + 2, 4),
            next_descriptor: 0,
            heads: Vec::new(),
        }
    }

    /// Makes a chain available; returns false without free descriptors. `table` is the address of an indirect table.
    pub fn push(&mut self, buffers: &[(u64, u32, bool)], table: Option<u64>) -> bool {
        let count = buffers.len() as u16;
        let needed = if table.is_some() { 1 } else { count };
        let head = self.next_descriptor;
        if buffers.is_empty() || head + needed > self.shape.size() {
            return false;
        }
        let (base, first) = match table {
            Some(table) => {
                let mut raw = [0; 16];
                raw[..8].copy_from_slice(&table.to_le_bytes());
                raw[8..12].copy_from_slice(&(16 * u32::from(count)).to_le_bytes());
                raw[12..14].copy_from_slice(&INDIRECT.to_le_bytes());
                self.guest.put(self.table.wrapping_add(16 * u64::from(head)), &raw);
                (table, 0)
            }
            None => (self.table, head),
        };
        for (at, (address, len, writable)) in (0_u16..).zip(buffers) {
            let last = at + 1 == count;
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let mut raw = [0; 16];
            raw[..8].copy_from_slice(&address.to_le_bytes());
            raw[8..12].copy_from_slice(&len.to_le_bytes());
            raw[12..14].copy_from_slice(&flags.to_le_bytes());
            raw[14..].copy_from_slice(&(if last { 0 } else { first + at + 1 }).to_le_bytes());
            self.guest.put(base.wrapping_add(16 * u64::from(first + at)), &raw);
        }
        self.next_descriptor += needed;
        self.heads.push(head);
        true
    }

    /// Writes the available ring and the input's deviations. Returns the queue as the transport passes it on.
    pub fn finish(mut self, index: u16) -> ActiveQueue {
        let shape = self.shape;
        let size = shape.size();
        for (at, descriptor) in &shape.descriptors {
            self.guest.put(self.table.wrapping_add(16 * u64::from(*at)), &descriptor.bytes());
        }
        self.heads.extend(shape.heads.iter().map(|head| u16::from(*head)));
        let mut available = shape.position;
        for head in &self.heads {
            let slot = 4 + 2 * u64::from(available % size);
            self.guest.put(self.available.wrapping_add(slot), &head.to_le_bytes());
            available = available.wrapping_add(1);
        }
        // Most jumps exceed any queue: make small ones likely.
        let jump = shape.jump.saturating_sub(0x8000);
        available = available.wrapping_add(jump);
        self.guest.put(self.available.wrapping_add(2), &available.to_le_bytes());
        let event = self.available.wrapping_add(4 + 2 * u64::from(size));
        self.guest.put(event, &shape.used_event.to_le_bytes());

        let mut queue = Queue::new(size).expect("a power of two");
        queue.try_set_desc_table_address(GuestAddress(self.table)).expect("aligned");
        queue.try_set_avail_ring_address(GuestAddress(self.available)).expect("aligned");
        queue.try_set_used_ring_address(GuestAddress(self.used)).expect("aligned");
        queue.set_next_avail(shape.position);
        queue.set_next_used(shape.position);
        queue.set_ready(true);
        ActiveQueue { index, queue, kick: Arc::clone(&self.guest.kick) }
    }
}
