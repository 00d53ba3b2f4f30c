//! The C rings of the guest module `mmnet` against the crate `neighbour`, which host, payload programs and benchmarks use.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

mod bed;
mod hostile;
mod talk;
