//! Split virtqueues (virtio 1.2, 2.7) over hostile guest memory.
//!
//! Everything a guest writes is read once and copied: a [`Chain`] owns its list of [`Segment`]s, checked
//! against guest RAM when it was taken off the ring. What a guest does wrong is a [`RingError`]; the
//! device that meets one calls `VirtioInterrupt::failed` with its text and stops serving its queues.
//!
//! ```text
//! driver: avail ring ──pop──▶ Chain ──read / write / GuestIoVecs──▶ device
//! driver: used ring ◀─────────complete(head, written)── should_interrupt ──▶ interrupt
//! ```

mod buffers;
mod chain;
mod error;
mod ring;
mod saved;
#[cfg(test)]
mod tests;

pub use buffers::{GuestIoVecs, mark_written, read, write};
pub use chain::{Chain, MAX_SEGMENTS, Segment, part, total_len};
pub use error::RingError;
pub use ring::Ring;
pub use saved::{SavedQueue, SavedQueueError};
