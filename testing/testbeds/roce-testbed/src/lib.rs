//! A deterministic simulator of many endpoints and a bad network, with an oracle that knows the right outcome of each program.
//!
//! A run is a function of its seed. `cores/roce/examples/simulate_connections.rs` runs many of them.

#[cfg(test)]
mod explore;
mod moving;
mod network;
mod oracle;
mod program;
mod world;

pub use facilities::rng::SplitMix64;
pub use world::{Options, Report, Violation, run};
