//! virtio 1.2 devices over PCI.
//!
//! A device implements [`device::VirtioDevice`]; [`transport`] makes a PCI function of it. [`queue`] is what all
//! of them use to talk to a driver safely, [`worker`] the thread that serves a device. Each device folder has
//! the same files: `device`, `worker`, `request` or `packet`, and its tests.

pub mod block;
pub mod device;
pub mod net;
pub mod queue;
pub mod rng;
pub mod saved;
pub mod testing;
pub mod transport;
pub mod vsock;
pub mod worker;
