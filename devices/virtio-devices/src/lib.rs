//! virtio 1.2 devices over PCI.
//!
//! A device implements [`device::VirtioDevice`], and [`transport`] makes a PCI function of it. All devices use [`queue`] for safe access to
//! the driver's rings, and [`worker`] for their threads. Each device folder has the same files: `device`, `worker`, `request` or `packet`,
//! and its tests.
//!
//! The driver's side, for tests, is in the crate `virtio-devices-testbed`.

pub mod block;
pub mod device;
#[cfg(test)]
mod fixtures;
pub mod net;
pub mod queue;
pub mod rng;
pub mod saved;
pub mod transport;
pub mod vsock;
pub mod worker;
