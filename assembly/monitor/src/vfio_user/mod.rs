//! Devices that other processes serve over vfio-user, as PCI functions of this machine.
//!
//! ```text
//!            guest                              monitor                                server
//!  store to a mapped range   ─────────────────── memory ──────────────────────────▶  memory (memfd)
//!  store to a doorbell       ── KVM ioeventfd ──────────────────────────────────▶    eventfd
//!  other BAR access          ── exit ─▶ VfioUserFunction ── REGION_READ/WRITE ──▶    device
//!  configuration access      ── exit ─▶ header, BARs, MSI-X here, the rest there ▶   device
//!  MSI-X vector              ◀───────── KVM irqfd ◀──────────────────────────────    eventfd
//! ```
//!
//! What belongs to the machine is ours: identity and header as read once, BAR placement, MSI-X table, INTx wire. What
//! belongs to the device goes to the server: the command register (bus mastering), other capabilities, registers.
//!
//! A server that goes away takes neither the VM nor the function with it:
//!
//! ```text
//! connected ── connection lost, or a request not answered in time ──▶ failed: BARs read ones, writes are dropped,
//!     ▲                                                                │       mapped memory stays
//!     └── reconnected: memory, interrupts, command register sent ◀─────┘ back-off 50 ms to 2 s
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `connector` | where the connection comes from |
//! | `shape` | what the server's device looks like, read once |
//! | `registers` | configuration space: which byte is ours, which is the server's |
//! | `link` | one connection, and what is set up on it |
//! | `events` | eventfds that the server signals |
//! | `function` | the PCI function, saved and restored |
//! | `watcher` | its thread: interrupts, doorbell mode, reconnection |

mod connector;
mod events;
mod function;
mod link;
mod registers;
mod shape;
#[cfg(test)]
mod tests;
mod watcher;

pub use connector::{Connector, Nic, NicConnector, SocketConnector};
pub use function::{Arriving, DmaRange, OpenedFunction, VfioUserFunction};

/// What vCPU threads (and whoever resets, pauses or inspects) do for accesses: a message to the server and its reply,
/// and the look at a server's file before a part of it is mapped.
pub const ACCESS_SYSCALLS: &[i64] = &[
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_shutdown,
    libc::SYS_fstat,
    libc::SYS_lseek,
];

/// What the thread of a function does besides: maps BAR memory, reconnects, asks the host daemon (gRPC).
pub const WATCHER_SYSCALLS: &[i64] = &[
    libc::SYS_ioctl,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
];

/// A device of another process could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum VfioUserError {
    /// The connection, or a request on it.
    #[error("The vfio-user server at {target} can't be used")]
    Server {
        /// Where it is.
        target: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device isn't one that can be shown to a guest.
    #[error("The device of the vfio-user server at {target} can't be used: {reason}")]
    Device {
        /// Where it is.
        target: String,
        /// What is wrong.
        reason: String,
    },
    /// After a reconnection.
    #[error("The vfio-user server at {target} offers another device now ({what}); restart the VM to use it")]
    OtherDevice {
        /// Where it is.
        target: String,
        /// What differs.
        what: &'static str,
    },
    /// Something of this process.
    #[error("The monitor could not {what} for a vfio-user device")]
    Monitor {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Interrupt vectors.
    #[error("There are no interrupts for a vfio-user device")]
    Interrupts(#[source] pci::interrupt::InterruptError),
}

/// Locks; what a panicking thread left behind is consistent, as no lock is held across calls that may panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
