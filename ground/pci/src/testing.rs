//! For tests of this crate and of crates with PCI functions: a fake function, recording stand-ins for the
//! machine, and the contract that every [`crate::function::PciFunction`] must pass. Nothing here is used
//! by a running VM.
