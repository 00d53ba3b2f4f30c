//! Test support for `pci` and for crates with PCI functions: a fake function, stand-ins for the machine that check
//! their calls, and the contract of every [`pci::function::PciFunction`].
//!
//! A crate with a function of its own writes, in a test module:
//!
//! ```
//! # use std::sync::Arc;
//! # use pci::function::PciFunction;
//! fn new_device() -> Arc<dyn PciFunction> {
//!     // ... the crate's own function, newly made.
//! #   pci_testbed::FakeFunction::builder("fake").build()
//! }
//!
//! pci_testbed::pci_function_contract!(my_device_contract, new_device);
//! # fn main() {}
//! ```

pub mod contract;
mod fake;
mod machine;

pub use fake::{FakeFunction, FakeFunctionBuilder};
pub use machine::{FakeIntx, FakeLine, FakeMsi, FakeVector, PlacedBar, RecordingPlacer};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks even after a panic of another thread: the guarded data is valid between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
