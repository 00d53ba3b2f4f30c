//! Descriptions of commodity devices, and what is derived from them.
//!
//! A description ([`describe`]) is data. It contains the registers and their treatment, the states, and the transitions
//! with their checks. It also contains the memory that the device accesses by itself, and the order in which it is
//! saved and restored. From it follow
//!
//! | what | where |
//! |---|---|
//! | the monitor's model: which requests may reach the device, what the guest reads | [`model`] |
//! | reference emulations, which replace the physical device in tests | [`reference`] |
//! | saved state | [`saved`] |
//! | requests for fuzzers and races | [`grammar`] |
//! | a reference page with diagrams of the states | [`page`] |
//! | the exhaustive exploration | `examples/explore` |
//!
//! The crate has no threads, clocks or files: accesses and causes come in, answers and device writes go out.
//! [`physical`] is the interface to the device. The crate `vpio` runs models for guests.
//!
//! The idea: *Investigating Virtual Passthrough I/O on Commodity Devices* (2009).

pub mod describe;
pub mod devices;
pub mod grammar;
pub mod grants;
pub mod graph;
mod index;
pub mod model;
pub mod page;
pub mod physical;
pub mod reference;
pub mod saved;

pub use describe::Device;
pub use grants::{Granted, Grants};
pub use graph::{Access, Piece};
pub use model::{Model, Refusal};
pub use physical::PhysicalDevice;
