//! virtio-blk (virtio 1.2, 5.2): disks from raw images, block devices and (read-only) qcow2 images.
//!
//! A write completes when it is in the host's page cache, so it survives the end of this process. A flush completes after `fdatasync`, so
//! what it covers survives a crash of the host. [`request`] parses and checks, `task` turns a request into system calls, two engines
//! execute them (io_uring, or one at a time), and [`worker`] connects a ring to an engine.

mod chunks;
mod counters;
mod device;
mod direct;
mod disk;
mod error;
mod format;
mod gate;
mod image;
mod mirror;
mod qcow2;
pub mod request;
mod sync;
mod task;
#[cfg(test)]
mod tests;
mod uring;
pub mod worker;

pub use chunks::{CHUNK, Chunks};
pub use counters::BlockCounters;
pub use device::{Block, BlockConfig, EngineChoice, ImageFormat, MAX_QUEUES, QUEUE_SIZE};
pub use error::BlockError;
pub use mirror::{Buffer, DiskContent};
pub use worker::{BlockQueue, SYSCALLS};
