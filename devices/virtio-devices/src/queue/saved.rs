//! Saved state of a queue, apart from its run-time type.

use machine::memory::GuestAddress;
use virtio_queue::{Queue, QueueT};

/// Positions of a queue, and its set-up by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedQueue {
    /// Index within the device.
    pub index: u16,
    /// Limit of the size that the device offers.
    pub max_size: u16,
    /// Size that the driver chose.
    pub size: u16,
    /// Whether the driver enabled it.
    pub ready: bool,
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// Index of the next entry of the available ring to pop.
    pub next_available: u16,
    /// Index of the next entry of the used ring to write.
    pub next_used: u16,
    /// Whether event suppression by index was negotiated.
    pub event_index: bool,
}

/// An invalid saved queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("Saved queue {index} has a bad {field}: {value:#x}; the saved state is damaged")]
pub struct SavedQueueError {
    /// Queue index.
    pub index: u16,
    /// Name of the field.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
}

impl SavedQueue {
    /// Saves `queue`.
    pub fn of(index: u16, queue: &Queue) -> Self {
        Self {
            index,
            max_size: queue.max_size(),
            size: queue.size(),
            ready: queue.ready(),
            descriptors: queue.desc_table(),
            available: queue.avail_ring(),
            used: queue.used_ring(),
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
            event_index: queue.event_idx_enabled(),
        }
    }

    /// Restores the queue.
    pub fn restore(&self) -> Result<Queue, SavedQueueError> {
        let bad = |field, value| SavedQueueError { index: self.index, field, value };
        let mut queue =
            Queue::new(self.max_size).map_err(|_| bad("largest size", u64::from(self.max_size)))?;
        queue.try_set_size(self.size).map_err(|_| bad("size", u64::from(self.size)))?;
        queue
            .try_set_desc_table_address(GuestAddress(self.descriptors))
            .map_err(|_| bad("descriptor table address", self.descriptors))?;
        queue
            .try_set_avail_ring_address(GuestAddress(self.available))
            .map_err(|_| bad("available ring address", self.available))?;
        queue
            .try_set_used_ring_address(GuestAddress(self.used))
            .map_err(|_| bad("used ring address", self.used))?;
        queue.set_next_avail(self.next_available);
        queue.set_next_used(self.next_used);
        queue.set_event_idx(self.event_index);
        queue.set_ready(self.ready);
        Ok(queue)
    }
}
