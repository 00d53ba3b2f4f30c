//! The virtio entropy device (virtio 1.2, section 5.4): random bytes of the host's kernel.
//!
//! One thread serves the queue. A request gets at most [`REQUEST_MAX`] bytes, whatever its buffers hold;
//! the driver learns how many it got and asks again.

mod device;
mod worker;

pub use device::{QUEUE_SIZE, Rng};
pub use worker::{REQUEST_MAX, SYSCALLS};

#[cfg(test)]
mod tests;
