//! Test tools for the host daemon. Errors panic.
//!
//! | module | holds |
//! |---|---|
//! | [`monitor`] | a monitor's side of vfio-user, without KVM |
//! | [`driver`] | a guest's driver and program behind it |
//! | [`moving`] | hosts that migrate guests with open connections: daemons' engines and transports, the nomad protocol, and a check |
//! | [`rnic`] | hosts' RDMA devices in memory |
#![allow(missing_docs, clippy::unwrap_used, clippy::missing_panics_doc)] // Of use to tests and benchmarks alone.

pub mod driver;
pub mod monitor;
pub mod moving;
pub mod rnic;
