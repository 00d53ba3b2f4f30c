//! A guest without an ABI: rings in plain memory that a test fills and empties, so that tests, benchmarks and simulations can
//! drive the engine. Rings are shared between the engine's end and the guest's, which may be on another thread.

pub mod requests;
mod rings;
mod world;

pub use rings::{CompletionRing, ReceiveRing, Rings, SavedRing, SendRing};
pub use world::{Connected, Events, Guest, World, gid, mac};
