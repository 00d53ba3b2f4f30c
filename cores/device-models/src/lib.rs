//! Commodity devices, described once, and what follows from a description.
//!
//! A description ([`describe`]) is data: registers and how each is treated, states, transitions with their checks, the memory that the
//! device touches by itself, and the order in which it is saved and restored. From it come
//!
//! | what | where |
//! |---|---|
//! | the monitor's model: which request may reach the device, what the guest sees | [`model`] |
//! | reference emulations, which play the physical device in tests | [`reference`] |
//! | saved state | [`saved`] |
//! | requests for fuzzers and races | [`grammar`] |
//! | a page to read, with pictures of the states | [`page`] |
//! | the exhaustive exploration | `examples/explore` |
//!
//! No threads, clocks or files: accesses and causes come in, answers and writes for the device go out. [`physical`] is the seam to
//! whatever plays the device. The crate `vpio` drives all this for guests.
//!
//! Facts about devices: spec nics. The idea: *Investigating Virtual Passthrough I/O on Commodity Devices* (2009).

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
