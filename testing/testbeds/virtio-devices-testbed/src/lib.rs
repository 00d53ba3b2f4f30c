//! The driver's side of virtqueues, for tests, fuzz targets and benchmarks: builds rings and chains in ordinary memory, valid or corrupted.
//!
//! Its functions panic when a test misuses them.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // Test support: a failure ends the test.

mod pci;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemorySpace};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_devices::device::{Activation, ActiveQueue, VirtioInterrupt};
use virtio_devices::worker;
use virtio_queue::{Queue, QueueT};

pub use self::pci::{COMMON, DEVICE, ISR, MSIX_TABLE, NOTIFY, PciDriver};

/// Features: `VERSION_1` alone.
pub const PLAIN: u64 = 1 << VIRTIO_F_VERSION_1;
/// Features that Linux negotiates for rings.
pub const RINGS: u64 = PLAIN | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Descriptor flag: another descriptor follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer.
pub const WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// RAM of these regions (start, bytes).
pub fn memory(regions: &[(u64, usize)]) -> GuestMemorySpace {
    let ranges: Vec<_> = regions.iter().map(|(start, len)| (GuestAddress(*start), *len)).collect();
    GuestMemorySpace::new(GuestMemory::from_ranges(&ranges).unwrap())
}

/// A raw descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// Index of the next descriptor.
    pub next: u16,
}

impl RawDescriptor {
    fn bytes(&self) -> [u8; 16] {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&self.address.to_le_bytes());
        raw[8..12].copy_from_slice(&self.len.to_le_bytes());
        raw[12..14].copy_from_slice(&self.flags.to_le_bytes());
        raw[14..].copy_from_slice(&self.next.to_le_bytes());
        raw
    }
}

/// The driver of one queue. Its rings are at `base`: descriptors, available ring, used ring, each on pages of their own.
pub struct MockDriver {
    /// Queue index.
    pub index: u16,
    /// Number of entries.
    pub size: u16,
    /// Guest memory.
    pub space: GuestMemorySpace,
    /// The notification's eventfd.
    pub kick: Arc<OwnedFd>,
    base: u64,
    features: u64,
    available: u16,
    used: u16,
    free: Vec<u16>,
    chains: std::collections::HashMap<u16, Vec<u16>>,
}

impl MockDriver {
    /// A queue of `size` entries whose rings use [`MockDriver::ring_bytes`] from `base` (page-aligned).
    pub fn new(space: &GuestMemorySpace, index: u16, size: u16, base: u64, features: u64) -> Self {
        Self {
            index,
            size,
            space: space.clone(),
            kick: Arc::new(worker::new_event().unwrap()),
            base,
            features,
            available: 0,
            used: 0,
            free: (0..size).rev().collect(),
            chains: std::collections::HashMap::new(),
        }
    }

    /// Bytes that the rings of a queue of `size` entries use.
    pub fn ring_bytes(size: u16) -> u64 {
        let size = u64::from(size);
        (16 * size).next_multiple_of(4096)
            + (6 + 2 * size).next_multiple_of(4096)
            + (6 + 8 * size).next_multiple_of(4096)
    }

    /// Descriptor table address.
    pub fn descriptors(&self) -> u64 {
        self.base
    }

    /// Available ring address.
    pub fn available_ring(&self) -> u64 {
        self.base + (16 * u64::from(self.size)).next_multiple_of(4096)
    }

    /// Used ring address.
    pub fn used_ring(&self) -> u64 {
        self.available_ring() + (6 + 2 * u64::from(self.size)).next_multiple_of(4096)
    }

    /// The ring as the driver has set it up.
    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(self.descriptors())).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(self.available_ring())).unwrap();
        queue.try_set_used_ring_address(GuestAddress(self.used_ring())).unwrap();
        queue.set_event_idx(self.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        queue.set_ready(true);
        queue
    }

    /// The queue as the transport would pass it to the device.
    pub fn active_queue(&self) -> ActiveQueue {
        ActiveQueue { index: self.index, queue: self.queue(), kick: Arc::clone(&self.kick) }
    }

    /// Writes one descriptor of the table.
    pub fn set_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        self.put(self.descriptors() + 16 * u64::from(index), &descriptor.bytes());
    }

    /// Makes the chain at `head` available.
    pub fn push_head(&mut self, head: u16) {
        let slot = self.available_ring() + 4 + 2 * u64::from(self.available % self.size);
        self.put(slot, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.set_available_index(self.available);
    }

    /// Writes the available index, even an invalid one.
    pub fn set_available_index(&self, index: u16) {
        let memory = self.memory();
        memory.store(index.to_le(), GuestAddress(self.available_ring() + 2), Ordering::Release).unwrap();
    }

    /// Sets the driver's flag that suppresses interrupts (without `EVENT_IDX`).
    pub fn set_no_interrupt(&self, off: bool) {
        self.put(self.available_ring(), &u16::from(off).to_le_bytes());
    }

    /// Writes `used_event`: interrupt when the used index passes it (with `EVENT_IDX`).
    pub fn set_used_event(&self, index: u16) {
        self.put(self.available_ring() + 4 + 2 * u64::from(self.size), &index.to_le_bytes());
    }

    /// Makes a chain of buffers (address, length, whether the device writes it) available; `None` without enough descriptors.
    pub fn push(&mut self, buffers: &[(u64, u32, bool)]) -> Option<u16> {
        if buffers.is_empty() || self.free.len() < buffers.len() {
            return None;
        }
        let taken: Vec<u16> = buffers.iter().map(|_| self.free.pop().unwrap()).collect();
        for (at, (address, len, writable)) in buffers.iter().enumerate() {
            let next = taken.get(at + 1).copied();
            let flags = if next.is_some() { NEXT } else { 0 } | if *writable { WRITE } else { 0 };
            let descriptor = RawDescriptor { address: *address, len: *len, flags, next: next.unwrap_or(0) };
            self.set_descriptor(taken[at], descriptor);
        }
        let head = taken[0];
        self.chains.insert(head, taken);
        self.push_head(head);
        Some(head)
    }

    /// The same through an indirect table, written at `table`.
    pub fn push_indirect(&mut self, table: u64, buffers: &[(u64, u32, bool)]) -> Option<u16> {
        let head = self.free.pop()?;
        let count = u16::try_from(buffers.len()).unwrap();
        for (at, (address, len, writable)) in (0u16..).zip(buffers) {
            let last = at + 1 == count;
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let next = if last { 0 } else { at + 1 };
            let descriptor = RawDescriptor { address: *address, len: *len, flags, next };
            self.put(table + 16 * u64::from(at), &descriptor.bytes());
        }
        let len = 16 * u32::from(count);
        self.set_descriptor(head, RawDescriptor { address: table, len, flags: INDIRECT, next: 0 });
        self.chains.insert(head, vec![head]);
        self.push_head(head);
        Some(head)
    }

    /// Signals the notification.
    pub fn kick(&self) {
        worker::signal(&*self.kick);
    }

    /// Consumes the next used element (head, bytes written), if there is one. Advances `used_event`: a device that reads it only afterwards
    /// sends no interrupt for this element. So a test that needs the interrupt waits for it first.
    pub fn pop_used(&mut self) -> Option<(u16, u32)> {
        let memory = self.memory();
        let index: u16 =
            memory.load(GuestAddress(self.used_ring() + 2), Ordering::Acquire).map(u16::from_le).unwrap();
        if index == self.used {
            return None;
        }
        let mut raw = [0u8; 8];
        let slot = self.used_ring() + 4 + 8 * u64::from(self.used % self.size);
        memory.read_slice(&mut raw, GuestAddress(slot)).unwrap();
        self.used = self.used.wrapping_add(1);
        // Request an interrupt for the next one; no effect without EVENT_IDX.
        self.set_used_event(self.used);
        let head = u16::try_from(u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]])).unwrap();
        if let Some(taken) = self.chains.remove(&head) {
            self.free.extend(taken);
        }
        Some((head, u32::from_le_bytes([raw[4], raw[5], raw[6], raw[7]])))
    }

    /// Waits for the next used element.
    ///
    /// # Panics
    /// When none arrives within 10 seconds.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let start = Instant::now();
        loop {
            if let Some(used) = self.pop_used() {
                return used;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "queue {}: no completion", self.index);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Writes guest memory.
    pub fn put(&self, address: u64, data: &[u8]) {
        self.memory().write_slice(data, GuestAddress(address)).unwrap();
    }

    /// Reads guest memory.
    pub fn get(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory().read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }

    fn memory(&self) -> Arc<GuestMemory> {
        self.space.memory().into_inner()
    }
}

/// Counts the interrupts of a device under test.
#[derive(Default)]
pub struct MockInterrupt {
    queues: AtomicU64,
    configs: AtomicU64,
    failure: Mutex<Option<String>>,
    changed: Condvar,
}

impl MockInterrupt {
    /// A counter at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts a queue interrupt.
    pub fn count_queue(&self) {
        self.queues.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a configuration interrupt.
    pub fn count_config(&self) {
        self.configs.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes why the device failed; the first reason stays.
    pub fn note_failure(&self, reason: &str) {
        self.failure.lock().unwrap().get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    /// Number of queue interrupts so far.
    pub fn queues(&self) -> u64 {
        self.queues.load(Ordering::SeqCst)
    }

    /// Number of configuration interrupts so far.
    pub fn configs(&self) -> u64 {
        self.configs.load(Ordering::SeqCst)
    }

    /// The reason why the device failed, if it has.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap().clone()
    }

    /// Waits up to 10 seconds for the device to fail.
    pub fn wait_failure(&self) -> Option<String> {
        let guard = self.failure.lock().unwrap();
        let (guard, _) = self
            .changed
            .wait_timeout_while(guard, Duration::from_secs(10), |failure| failure.is_none())
            .unwrap();
        guard.clone()
    }
}

impl VirtioInterrupt for MockInterrupt {
    fn queue(&self, _index: u16) {
        self.count_queue();
    }

    fn config(&self) {
        self.count_config();
    }

    fn failed(&self, reason: &str) {
        self.note_failure(reason);
    }
}

/// The activation that a transport would pass to a device for these queues.
pub fn activation(
    space: &GuestMemorySpace,
    features: u64,
    drivers: &[&MockDriver],
    interrupt: &Arc<MockInterrupt>,
) -> Activation {
    Activation {
        memory: space.clone(),
        features,
        queues: drivers.iter().map(|driver| driver.active_queue()).collect(),
        interrupt: Arc::clone(interrupt) as Arc<dyn VirtioInterrupt>,
    }
}
