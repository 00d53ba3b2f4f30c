//! The virtio network device (virtio 1.2, section 5.1).
//!
//! ```text
//!  guest rings ── QueuePair ── NetChannel ──┬─ tap queue: readv/writev between guest memory and the kernel
//!      │            one thread per pair     ├─ passt: frames behind their length on a stream socket
//!  control queue ── thread of pair 0        └─ in-process pair: sequenced-packet sockets, for tests
//! ```
//!
//! - [`header`]: the offload header of a frame. Read once, checked, and only the copy reaches the host.
//! - [`queue_pair`]: the data path without a thread, as tests and the fuzz target `net_frame` use it.
//! - [`worker`]: when the data path runs: backpressure in both directions without spinning.
//! - [`control`]: the control queue.
//! - [`tap`], [`passt`], [`pair`]: back ends behind [`backend::NetBackend`] and [`backend::NetChannel`].
//!
//! The lists of system calls, for the sandbox: [`worker::SYSCALLS`] in every device's threads and those of
//! its back end, [`tap::SYSCALLS`] or [`passt::SYSCALLS`].
//!
//! Frames longer than what the guest has posted (a segmentation-offloaded frame over many mergeable
//! buffers) spill into a buffer of the host's and are finished when buffers come; nothing is truncated
//! silently, every frame is delivered or counted as dropped.

mod announcement;
pub mod backend;
pub mod control;
pub mod counters;
mod device;
mod error;
mod frame;
pub mod header;
mod mac;
pub mod pair;
pub mod passt;
pub mod queue_pair;
pub mod tap;
pub mod worker;

use std::os::fd::OwnedFd;

pub use device::{Net, QUEUE_SIZE};
pub use error::NetError;
pub use frame::{FrameSink, FrameSource, Storage};
pub use mac::{BadMac, MacAddress};
pub use queue_pair::QueuePair;

/// A network device to be opened.
#[derive(Debug)]
pub struct NetConfig {
    /// Name of the device, unique in the VM.
    pub name: String,
    /// Where its frames go.
    pub backend: Backend,
    /// Its address; [`MacAddress::stable`] when not given.
    pub mac: Option<MacAddress>,
    /// Queue pairs, 1 to 256; 1 where the back end has no more. One thread each.
    pub queue_pairs: u16,
    /// Largest packet that the guest is told, in bytes, 68 to 65535. Not given: that of the tap.
    pub mtu: Option<u16>,
}

/// Where the frames of a network device go.
#[derive(Debug)]
pub enum Backend {
    /// A tap interface by name; created while the VM runs when it doesn't exist and the process may.
    Tap {
        /// Interface name.
        ifname: String,
    },
    /// Opened taps, one file descriptor per queue pair (`fd=N`).
    TapFd(Vec<OwnedFd>),
    /// User-mode networking through passt, without any privilege.
    User,
}

#[cfg(test)]
mod tests;
