//! The daemon's clients for tests and benchmarks: a monitor with vfio-user, and a guest's driver and program behind it, without KVM. Errors
//! panic.
#![allow(missing_docs, clippy::unwrap_used, clippy::missing_panics_doc)] // Of use to tests and benchmarks alone.

pub mod driver;
pub mod monitor;
pub mod moving;
