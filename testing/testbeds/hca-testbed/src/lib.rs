//! A guest without an ABI: rings in plain memory that a test fills and empties, so that tests, benchmarks and simulations can drive the
//! engine. The engine and the guest's side, which may be on another thread, share the rings.

pub mod requests;
mod rings;
mod world;

pub use rings::{CompletionRing, ReceiveRing, Rings, SavedRing, SendRing};
pub use world::{Connected, Events, Guest, World, gid, mac};
