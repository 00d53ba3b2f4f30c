//! Moving a running VM to another monitor.
//!
//! ```text
//! source                                      destination (causeway run --incoming)
//!   │── Hello (every stream) ───────────────────▶│
//!   │── Offer: what the guest sees of the machine ▶│ compares it with its own
//!   │◀── Accepted, or Refused with a sentence ────│
//!   │══ Pages, several rounds, every stream ═════▶│ the guest runs at the source
//!   │ stops the guest, gives up its disks         │
//!   │══ Pages, State, End ═══════════════════════▶│ checks, restores, takes the disks
//!   │◀── Ready, or Refused ───────────────────────│
//!   │── Go ──────────────────────────────────────▶│ runs the guest
//!   │◀── Running ─────────────────────────────────│ announces it to the network
//!   ends
//! ```
//!
//! Until `Go` has been sent, any failure leaves the guest at the source, and the destination ends. Once it has been sent, the
//! source never runs the guest by itself again: without `Running` it stands still, and its user decides.
//!
//! Disks that only the source has are copied along, where that is wished: see [`mirror`].
//!
//! A VM with devices that a daemon serves has another end: see [`served`]; one whose memory comes after it, too: see [`postcopy`].
//!
//! [`source`] and [`destination`] are the two sides over any sockets and any machine ([`source::Departing`]); `vm::moving` is
//! the machine. A stream is hostile until checked: frames have a kind, a number, a length with a limit per kind and a
//! checksum; pages must lie in RAM; state is decoded into types and checked by every constructor that takes it.

pub mod connection;
pub mod destination;
pub mod error;
pub mod frame;
pub mod message;
pub mod mirror;
pub mod pages;
pub mod policy;
pub mod postcopy;
pub mod progress;
mod sealed;
pub mod served;
pub mod service;
pub mod shape;
pub mod source;
pub mod state;
#[cfg(test)]
mod tests;

pub use error::MigrationError;

/// System calls of threads that move a VM, beyond those of threads that pause it: streams, the requests' socket, the parts
/// of memory that exist, making disks durable, and marking those that are filled.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    // The requests' socket file is removed at the end.
    libc::SYS_lstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_unlink,
];
