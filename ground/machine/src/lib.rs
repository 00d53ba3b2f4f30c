//! KVM, guest memory, vCPU threads and interrupt controllers, wrapped once.
//!
//! No other crate names `kvm-ioctls`, `kvm-bindings` or `vm-memory`; they use what is here.

pub mod bus;
pub mod interrupt;
pub mod memory;
