//! Test support for this crate and for crates with PCI functions: a fake function, stand-ins for the machine that check
//! their calls, and the contract of every [`crate::function::PciFunction`]. A running VM uses none of it.
//!
//! A crate with a function of its own writes, in a test module:
//!
//! ```
//! # use std::sync::Arc;
//! # use pci::function::PciFunction;
//! fn new_device() -> Arc<dyn PciFunction> {
//!     // ... the crate's own function, newly made.
//! #   pci::testing::FakeFunction::builder("fake").build()
//! }
//!
//! pci::pci_function_contract!(my_device_contract, new_device);
//! # fn main() {}
//! ```

pub mod contract;
mod fake;
mod machine;

pub use fake::{FakeFunction, FakeFunctionBuilder};
pub use machine::{FakeIntx, FakeLine, FakeMsi, FakeVector, PlacedBar, RecordingPlacer};
