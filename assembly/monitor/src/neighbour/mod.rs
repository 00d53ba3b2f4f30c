//! A VM's neighbours: the PCI function, windows as read-only memslots, and the connection to the host daemon's registry.
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
//! Windows and segments come and go while the guest runs. When the daemon goes away, connections that stand go on; when it is
//! back, they end one by one, and new ones begin as soon as the guest has released the old.
//!
//! | file | holds |
//! |---|---|
//! | `opened` | the connection and the geometry, before there is a machine |
//! | `network` | in place of the function: a virtio network device whose frames go to neighbours |
//! | `function` | the PCI function |
//! | `views` | what is mapped of each peer |
//! | `thread` | a member's thread: the registry's messages, the guest's effects, heartbeats |
//! | `windows` | the bus device under all windows |

mod function;
mod network;
mod opened;
mod thread;
mod views;
mod windows;

pub use function::NeighbourFunction;
pub use network::{OpenedNetwork, RunningNetwork, SYSCALLS as NETWORK_SYSCALLS};
pub use opened::OpenedNeighbour;

use std::path::PathBuf;

/// Neighbours can't be had.
#[derive(Debug, thiserror::Error)]
pub enum NeighbourError {
    /// The daemon isn't there, or speaks of something else.
    #[error("The host daemon's registry of neighbours at {} can't be used", path.display())]
    Registry {
        /// Its socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It refuses this VM.
    #[error("The host daemon at {} refuses this VM as a neighbour: {reason}", path.display())]
    Refused {
        /// Its socket.
        path: PathBuf,
        /// Its words.
        reason: String,
    },
    /// Another version.
    #[error("The host daemon at {} speaks version {found} about neighbours, and this monitor {known}; use the same of both", path.display())]
    Version {
        /// Its socket.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// Windows don't fit.
    #[error("Neighbour windows from {base:#x} to {end:#x} can't be in this VM: {reason}")]
    Windows {
        /// Start of the first.
        base: u64,
        /// End of the last.
        end: u64,
        /// Why, and what to do.
        reason: String,
    },
    /// Something of this process.
    #[error("The monitor could not {what} for neighbours")]
    Monitor {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl NeighbourError {
    fn monitor(what: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Monitor { what, source: Box::new(source) }
    }
}

/// Locks; what a panicking thread left behind is consistent, as no lock is held across calls that may panic.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
