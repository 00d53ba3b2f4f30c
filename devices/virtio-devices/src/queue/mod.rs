//! Split virtqueues (virtio 1.2, 2.7) over hostile guest memory.
//!
//! The device reads everything from the guest once, and copies it. A [`Chain`] owns its list of [`Segment`]s, which was validated against
//! guest RAM when the chain was popped. A guest's error is a [`RingError`]; the device then calls `VirtioInterrupt::failed` with its text
//! and stops serving its queues.
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
