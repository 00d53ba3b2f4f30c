//! virtio 1.2 devices over PCI.
//!
//! A device implements [`device::VirtioDevice`]; `transport` makes a PCI function of it. Each device folder
//! has the same files: `device`, `worker`, `request` or `packet`, and its tests.

pub mod device;
