//! virtio over PCI (virtio 1.2, 4.1), modern only: makes a PCI function of a [`crate::device::VirtioDevice`].
//!
//! ```text
//!            vCPU: BAR access                    device thread
//!                 │                                   │
//!     VirtioPciFunction (one lock: registers,   Interrupts (no common lock:
//!     device, configuration space)               MSI-X, INTx, ISR, failure)
//!                 │ activate / stop                   ▲ queue / config / failed
//!                 └────────▶ VirtioDevice ────────────┘
//! kicks: guest store ─▶ ioeventfd ─▶ device thread (or bar_write ─▶ the same eventfd)
//! ```

mod error;
mod function;
mod interrupts;
mod layout;
mod registers;
mod saved;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use error::TransportError;
pub use function::VirtioPciFunction;
pub use threads::DeviceThreads;

/// Locks a mutex, even after a panic of another thread: the guarded data is valid between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
