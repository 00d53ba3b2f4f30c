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
//! - [`worker`]: the data path's thread: backpressure in both directions without spinning.
//! - [`control`]: the control queue.
//! - [`tap`], [`passt`], [`pair`]: backends behind [`backend::NetBackend`] and [`backend::NetChannel`].
//!
//! The lists of system calls, for the sandbox: [`worker::SYSCALLS`] in every device's threads and its backend's, [`tap::SYSCALLS`] or
//! [`passt::SYSCALLS`].
//!
//! A frame longer than the posted buffers (a segmentation-offloaded frame over many mergeable buffers) spills into a buffer of the host,
//! and is completed when the guest posts more. No frame is truncated silently: each is delivered or counted as dropped.

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

/// Configuration of a network device.
#[derive(Debug)]
pub struct NetConfig {
    /// Name of the device, unique in the VM.
    pub name: String,
    /// Backend that sends and receives its frames.
    pub backend: Backend,
    /// MAC address; default: [`MacAddress::stable`].
    pub mac: Option<MacAddress>,
    /// Number of queue pairs, 1 to 256, each with a thread; 1 if the backend has no more.
    pub queue_pairs: u16,
    /// MTU reported to the guest, in bytes, 68 to 65535. Default: that of the tap.
    pub mtu: Option<u16>,
}

/// Backend of a network device.
#[derive(Debug)]
pub enum Backend {
    /// A tap interface by name. If it doesn't exist and the process may, it is created while the VM runs.
    Tap {
        /// Interface name.
        ifname: String,
    },
    /// Opened taps, one file descriptor per queue pair (`fd=N`).
    TapFd(Vec<OwnedFd>),
    /// User-mode networking by passt, without privileges.
    User,
}

#[cfg(test)]
mod tests;
