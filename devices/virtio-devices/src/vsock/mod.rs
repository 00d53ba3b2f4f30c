//! The virtio socket device (virtio 1.2, 5.10): byte streams between programs in the guest and on the host, without a network.
//!
//! ```text
//!  guest rings ── VsockQueues ── Muxer ──┬─ Listener  <path>         host connects, sends "CONNECT <port>\n",
//!                 one thread             │                           receives "OK <host port>\n"
//!                                        └─ Connection ── <path>_<port>   sockets for guest connections
//! ```
//!
//! - [`packet`]: the header. [`connection`]: one stream: credit, half-closes. [`muxer`]: all of them,
//!   without rings and threads, for tests. [`socket`]: the files on the host's side.
//!
//! The protocol of the Unix socket is that of Firecracker and Cloud Hypervisor. All state that a guest can cause is bounded: connections
//! ([`muxer::CONNECTIONS_MAX`]), bytes per connection ([`connection::BUFFER`]) and over all ([`muxer::PENDING_MAX`]), replies
//! ([`muxer::RESETS_MAX`]). Connections survive a pause, but not a move to another process: the guest then gets the event TRANSPORT_RESET
//! and closes them.

pub mod connection;
pub mod counters;
mod device;
pub mod muxer;
pub mod packet;
pub mod socket;
mod worker;

pub use device::{QUEUE_SIZE, Vsock, VsockConfig, VsockError};
pub use worker::{GuestError, SYSCALLS};

#[cfg(test)]
mod tests;
