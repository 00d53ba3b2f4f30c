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
//! The monitor emulates what belongs to the machine: identity and header as read once, BAR placement, MSI-X table, INTx line. The server
//! serves what belongs to the device: the command register (bus mastering), other capabilities, registers.
//!
//! The loss of a server ends neither the VM nor the function:
//!
//! ```text
//! connected ── connection lost, or a request not answered in time ──▶ failed: BARs read ones, writes are dropped,
//!     ▲                                                                │       mapped memory stays
//!     └── reconnected: memory, interrupts, command register sent ◀─────┘ back-off 50 ms to 2 s
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `connector` | sources of connections |
//! | `shape` | properties of the server's device, read once |
//! | `registers` | configuration space: bytes of the monitor and of the server |
//! | `link` | one connection and its set-up |
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
pub use function::{DmaRange, IncomingFunction, OpenedFunction, VfioUserFunction};

/// System calls of a device access, for vCPU threads and for threads that reset, pause or inspect a VM. They send a message to the
/// server, receive its reply, and check a server's file before a part of it is mapped.
pub const ACCESS_SYSCALLS: &[i64] = &[
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_shutdown,
    libc::SYS_fstat,
    libc::SYS_lseek,
];

/// Further system calls of a function's thread: to map BAR memory, to reconnect, and to send requests to the host daemon (gRPC).
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

/// Why a device of another process can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum VfioUserError {
    /// The connection, or a request on it, failed.
    #[error("The vfio-user server at {target} can't be used")]
    Server {
        /// Address of the server.
        target: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device isn't usable for a guest.
    #[error("The device of the vfio-user server at {target} can't be used: {reason}")]
    Device {
        /// Address of the server.
        target: String,
        /// The reason.
        reason: String,
    },
    /// After a reconnection, the device differs from the previous one.
    #[error("The vfio-user server at {target} offers another device now ({what}); restart the VM to use it")]
    OtherDevice {
        /// Address of the server.
        target: String,
        /// The difference.
        what: &'static str,
    },
    /// An operation of this process failed.
    #[error("The monitor could not {what} for a vfio-user device")]
    Monitor {
        /// The operation.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// No interrupt vectors are available.
    #[error("There are no interrupts for a vfio-user device")]
    Interrupts(#[source] pci::interrupt::InterruptError),
}

/// Locks a mutex. The state is consistent even after a panic, since no lock is held across calls that may panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
