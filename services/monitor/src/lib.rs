//! The process of one VM: assembles machine, devices, boot, API and sandbox.

pub mod api;
pub mod description;
pub mod dsm;
pub mod migration;
pub mod neighbour;
pub mod nic;
pub mod payload;
pub mod sandbox;
pub mod vfio_user;
pub mod vm;
