//! One split virtqueue in use by a device.

use std::num::Wrapping;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};

use machine::memory::{Address, Bytes, GuestAddress, GuestMemory, is_writable};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};

use super::chain::{Chain, Source};
use super::error::RingError;
use crate::device::ActiveQueue;

const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// A queue with its negotiated rules. Belongs to one thread at a time.
///
/// After any [`RingError`] the ring must not be used again, except for [`Ring::into_active`].
pub struct Ring {
    active: ActiveQueue,
    indirect: bool,
    in_flight: u16,
    /// Position in the used ring at the last [`Ring::should_interrupt`].
    signalled: Wrapping<u16>,
}

/// Whether `features` has bit `bit`.
fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

impl Ring {
    /// Uses a queue that the transport activated under `features`. The transport has enabled event suppression on the queue. Enabling it
    /// again here corrects rings of tests and fuzzers.
    pub fn new(mut active: ActiveQueue, features: u64) -> Self {
        debug_assert!(has(features, VIRTIO_F_VERSION_1), "legacy drivers are never activated");
        active.queue.set_event_idx(has(features, VIRTIO_RING_F_EVENT_IDX));
        let signalled = Wrapping(active.queue.next_used());
        Self { active, indirect: has(features, VIRTIO_RING_F_INDIRECT_DESC), in_flight: 0, signalled }
    }

    /// Queue index.
    pub fn index(&self) -> u16 {
        self.active.index
    }

    /// Number of entries that the driver chose.
    pub fn size(&self) -> u16 {
        self.active.queue.size()
    }

    /// Number of chains popped and not completed.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// The eventfd that the driver's notification signals.
    pub fn kick(&self) -> BorrowedFd<'_> {
        self.active.kick.as_fd()
    }

    /// Empties the kick eventfd. Call it before polling the ring, so that a later kick wakes the thread again.
    pub fn drain_kick(&self) {
        // EAGAIN (no kick) is as good as success; the read has no other error.
        let _ = rustix::io::read(&*self.active.kick, &mut [0u8; 8]);
    }

    /// Returns the queue with its positions. Nothing may be in flight, unless the device has failed: those chains are never completed.
    pub fn into_active(self) -> ActiveQueue {
        self.active
    }

    /// Checks that the whole ring is in RAM (2.7.1). Call once per activation.
    pub fn check(&self, memory: &GuestMemory) -> Result<(), RingError> {
        let queue = self.active.index;
        let q = &self.active.queue;
        if !q.ready() {
            return Err(RingError::NotReady { queue });
        }
        let size = u64::from(q.size());
        for (part, address, len) in [
            ("descriptor table", q.desc_table(), 16 * size),
            ("available ring", q.avail_ring(), 6 + 2 * size),
            ("used ring", q.used_ring(), 6 + 8 * size),
        ] {
            if !is_writable(memory, address, len) {
                return Err(RingError::RingOutsideRam { queue, part, address });
            }
        }
        Ok(())
    }

    /// Pops the next available chain; `None` when there is none.
    pub fn pop(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, RingError> {
        let queue = self.active.index;
        let q = &mut self.active.queue;
        if !q.ready() {
            return Err(RingError::NotReady { queue });
        }
        let size = q.size();
        let outside = RingError::RingOutsideRam { queue, part: "available ring", address: q.avail_ring() };
        // Acquire: the driver wrote the ring entries and descriptors before the index.
        let Ok(available) = q.avail_idx(memory, Ordering::Acquire) else { return Err(outside) };
        let from = q.next_avail();
        let waiting = (available - Wrapping(from)).0;
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > size {
            return Err(RingError::AvailableIndex { queue, from, to: available.0, size });
        }
        if self.in_flight >= size {
            return Err(RingError::TooManyInFlight { queue, size });
        }
        let entry = 4 + 2 * u64::from(from % size);
        let Some(entry) = GuestAddress(q.avail_ring()).checked_add(entry) else { return Err(outside) };
        let Ok(head) = memory.load::<u16>(entry, Ordering::Relaxed) else { return Err(outside) };
        let source =
            Source { memory, queue, table: GuestAddress(q.desc_table()), size, indirect: self.indirect };
        let chain = source.collect(u16::from_le(head))?;
        q.set_next_avail(from.wrapping_add(1));
        self.in_flight += 1;
        Ok(Some(chain))
    }

    /// Puts a chain into the used ring. `written` is the number of bytes written to the chain's writable buffers, from their start.
    pub fn complete(&mut self, memory: &GuestMemory, head: u16, written: u32) -> Result<(), RingError> {
        let queue = self.active.index;
        self.active
            .queue
            .add_used(memory, head, written)
            .map_err(|error| RingError::Library { queue, what: error.to_string() })?;
        self.in_flight = self.in_flight.saturating_sub(1);
        Ok(())
    }

    /// Puts several chains into the used ring at once: the driver sees all or none of them, as required when they hold one frame together
    /// (5.1.6.4).
    pub fn complete_together(&mut self, memory: &GuestMemory, done: &[(u16, u32)]) -> Result<(), RingError> {
        let Some(((head, written), earlier)) = done.split_last() else { return Ok(()) };
        let queue = self.active.index;
        let q = &mut self.active.queue;
        let (size, address) = (q.size(), q.used_ring());
        let outside = RingError::RingOutsideRam { queue, part: "used ring", address };
        let mut next = q.next_used();
        for (head, written) in earlier {
            let Some(entry) = GuestAddress(address).checked_add(4 + 8 * u64::from(next % size)) else {
                return Err(outside);
            };
            let mut element = [0; 8];
            element[..4].copy_from_slice(&u32::from(*head).to_le_bytes());
            element[4..].copy_from_slice(&written.to_le_bytes());
            if memory.write_slice(&element, entry).is_err() {
                return Err(outside);
            }
            next = next.wrapping_add(1);
        }
        q.set_next_used(next);
        self.in_flight = self.in_flight.saturating_sub(u16::try_from(earlier.len()).unwrap_or(u16::MAX));
        // Publishes the index with release order, after all the entries.
        self.complete(memory, *head, *written)
    }

    /// Undoes the last [`Ring::pop`], for a device that can't serve the chain yet (a receive queue whose buffer is too small so far). Only
    /// while nothing popped later is in flight.
    pub fn undo_pop(&mut self) {
        let q = &mut self.active.queue;
        q.set_next_avail(q.next_avail().wrapping_sub(1));
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Whether the driver wants an interrupt for the chains completed since the last call (2.7.7).
    pub fn should_interrupt(&mut self, memory: &GuestMemory) -> Result<bool, RingError> {
        let queue = self.active.index;
        let q = &self.active.queue;
        let used = Wrapping(q.next_used());
        let before = std::mem::replace(&mut self.signalled, used);
        if used == before {
            return Ok(false);
        }
        // The used index must be visible before the driver's suppression fields are read.
        fence(Ordering::SeqCst);
        let address = q.avail_ring();
        // The library counts completions one by one, unlike `complete_together`, so this decides by itself.
        let offset = if q.event_idx_enabled() { 4 + 2 * u64::from(q.size()) } else { 0 };
        let field = GuestAddress(address)
            .checked_add(offset)
            .and_then(|field| memory.load::<u16>(field, Ordering::Relaxed).ok())
            .map(u16::from_le);
        let Some(field) = field else {
            return Err(RingError::RingOutsideRam { queue, part: "available ring", address });
        };
        if q.event_idx_enabled() {
            return Ok(used - Wrapping(field) - Wrapping(1) < used - before);
        }
        Ok(field & AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Enables the driver's notifications. Returns whether chains became available meanwhile: serve them first then.
    pub fn enable_kicks(&mut self, memory: &GuestMemory) -> Result<bool, RingError> {
        let queue = self.active.index;
        self.active
            .queue
            .enable_notification(memory)
            .map_err(|error| RingError::Library { queue, what: error.to_string() })
    }

    /// Disables the driver's notifications; a hint only.
    pub fn disable_kicks(&mut self, memory: &GuestMemory) -> Result<(), RingError> {
        let queue = self.active.index;
        self.active
            .queue
            .disable_notification(memory)
            .map_err(|error| RingError::Library { queue, what: error.to_string() })
    }

    /// The library's queue, for reports.
    pub fn queue(&self) -> &Queue {
        &self.active.queue
    }
}
