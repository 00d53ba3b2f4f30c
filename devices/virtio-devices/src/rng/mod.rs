//! The virtio entropy device (virtio 1.2, 5.4): random bytes of the host's kernel.
//!
//! One thread serves the queue. A request gets at most [`REQUEST_MAX`] bytes, whatever its buffers hold. The driver learns their number,
//! and posts another request for more.

mod device;
mod worker;

pub use device::{QUEUE_SIZE, Rng};
pub use worker::{REQUEST_MAX, SYSCALLS};

#[cfg(test)]
mod tests;
