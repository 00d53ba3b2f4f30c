//! For tests of this crate and of crates with PCI functions: a fake function, stand-ins for the machine
//! that check what they are told, and the contract that every [`crate::function::PciFunction`] must pass.
//! Nothing here is used by a running VM.
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
