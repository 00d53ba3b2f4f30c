//! Live migration of a VM to another monitor.
//!
//! ```text
//! source                                       destination (causeway run --incoming)
//!   │── Hello (every stream) ────────────────────▶│
//!   │── Offer: the guest-visible shape ──────────▶│ compares it with its own
//!   │◀── Accepted, or Refused with a sentence ────│
//!   │══ Pages, several rounds, every stream ═════▶│ the guest runs at the source
//!   │ stops the guest, unlocks its disks          │
//!   │══ Pages, State, End ═══════════════════════▶│ checks, restores, locks the disks
//!   │◀── Ready, or Refused ───────────────────────│
//!   │── Go ──────────────────────────────────────▶│ runs the guest
//!   │◀── Running ─────────────────────────────────│ announces it to the network
//!   ends
//! ```
//!
//! `Go` is the commit. After any failure before `Go` the source resumes the guest, and the destination ends. After `Go` the source never
//! resumes the guest by itself. Without `Running` the guest is in doubt: it stays stopped, and the user decides.
//!
//! A side that works on something without sending anything shows that it lives: see [`keepalive`].
//!
//! On request, disks that only the source has are copied: see [`mirror`].
//!
//! A migration ends differently if a daemon serves devices of the VM: see [`daemon`]. With post-copy, memory follows the guest: see
//! [`postcopy`].
//!
//! [`source`] and [`destination`] are the two sides, over any sockets and any machine ([`source::SourceMachine`]); `vm::migration` is the
//! machine. A stream is hostile until checked. Frames have a type, a number, a length with a limit per type, and a checksum. Pages must
//! lie in RAM. State is decoded into types, and every constructor that gets it checks it.

pub mod connection;
pub mod daemon;
pub mod destination;
pub mod error;
pub mod frame;
pub mod keepalive;
pub mod message;
pub mod mirror;
pub mod pages;
pub mod policy;
pub mod postcopy;
pub mod progress;
mod sealed;
pub mod service;
pub mod shape;
pub mod source;
pub mod state;
#[cfg(test)]
mod tests;

pub use error::MigrationError;

/// System calls of threads that migrate a VM, beyond those of threads that pause it. They serve the streams, the request socket, finding
/// allocated memory, making disks durable, and marking images that are filled.
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
    // The request socket's file is removed at the end.
    libc::SYS_lstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_unlink,
];
