//! Neighbours of a VM: the PCI function, windows as read-only memslots, and the connection to the host daemon's registry.
//!
//! ```text
//!            guest                                monitor                          host daemon
//!  load from a window        ── memslot, no exit
//!  store to a window         ── exit ─▶ `windows`: discarded, counted, logged
//!  store to a doorbell       ── KVM ioeventfd ──▶ the peer's irqfd (its VM's interrupt), no process in between
//!  ring in a segment         ── memory (BAR 2)
//!  register                  ── exit ─▶ `function` ─▶ neighbour::device
//!                                            │ effects       `thread` ◀── Connect, Gone ── registry
//!                                            └─────────────▶ `thread` ─── Release, Alive ─▶
//! ```
//!
//! Windows and segments come and go while the guest runs. If the daemon goes away, connections continue. When it returns, they end one by
//! one, and new ones begin as soon as the guest has released the old ones.
//!
//! | file | contents |
//! |---|---|
//! | `opened` | the connection and the geometry, before there is a machine |
//! | `network` | instead of the function, a virtio network device whose frames go to neighbours |
//! | `function` | the PCI function |
//! | `mappings` | the mappings of each peer |
//! | `thread` | a member's thread: the registry's messages, the guest's requests, heartbeats |
//! | `windows` | the bus device under all windows |

mod function;
mod mappings;
mod network;
mod opened;
mod thread;
mod windows;

pub use function::NeighbourFunction;
pub use network::{OpenedNetwork, RunningNetwork, SYSCALLS as NETWORK_SYSCALLS};
pub use opened::OpenedNeighbour;

use std::path::PathBuf;

/// Why a VM can't have neighbours.
#[derive(Debug, thiserror::Error)]
pub enum NeighbourError {
    /// The daemon can't be reached, or sends something else.
    #[error("The host daemon's registry of neighbours at {} can't be used", path.display())]
    Registry {
        /// The daemon's socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon refuses this VM.
    #[error("The host daemon at {} refuses this VM as a neighbour: {reason}", path.display())]
    Refused {
        /// The daemon's socket.
        path: PathBuf,
        /// The daemon's reason.
        reason: String,
    },
    /// The daemon has another version of the protocol.
    #[error("The host daemon at {} speaks version {found} about neighbours, and this monitor {known}; use the same of both", path.display())]
    Version {
        /// The daemon's socket.
        path: PathBuf,
        /// The daemon's version.
        found: u32,
        /// This monitor's version.
        known: u32,
    },
    /// The windows don't fit into the machine.
    #[error("Neighbour windows from {base:#x} to {end:#x} can't be in this VM: {reason}")]
    Windows {
        /// Start of the first window.
        base: u64,
        /// End of the last window.
        end: u64,
        /// The reason, and what to do.
        reason: String,
    },
    /// An operation of this process failed.
    #[error("The monitor could not {what} for neighbours")]
    Monitor {
        /// The operation.
        what: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl NeighbourError {
    fn monitor(what: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Monitor { what, source: Box::new(source) }
    }
}

/// Locks a mutex. The state is consistent even after a panic, since no lock is held across calls that may panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
