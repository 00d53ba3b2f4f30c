//! VMware's paravirtual RDMA function (PVRDMA), as the unmodified Linux driver `vmw_pvrdma` and rdma-core's provider `libvmw_pvrdma` expect
//! it, on top of the verbs engine of [`hca`].
//!
//! No threads, sockets or KVM: [`Device::register_write`] receives register writes, a [`Uar`] holds doorbells, [`dma::Dma`] is guest
//! memory, and [`Interrupts`] receives interrupts. One thread owns the engine and its devices.
//!
//! ```text
//! BAR1 writes ──▶ Device::register_write ──▶ commands ──▶ Engine (verbs)     ──▶ response slot, vector 0
//! UAR page    ──▶ Device::scan           ──▶ hints    ──▶ Engine::poll
//!                                                          │ fetches by PvrdmaSendQueue, PvrdmaReceiveQueue
//!                                                          │ completes by PvrdmaCompletionQueue
//!                                                          └ calls Devices (a Sink) ──▶ event rings
//!                 Device::flush_events   ──▶ vectors 1 and 2, once per batch
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`abi`] | numbers and layouts |
//! | [`device`] | the function: registers, commands, doorbells, events |
//! | [`devices`] | all functions of an engine, as its [`hca::provider::Sink`] |
//! | [`ring`], [`page_list`] | rings in guest memory, and the page lists that describe them |
//! | [`send_queue`], [`receive_queue`], [`completion_queue`] | the rings behind the engine's provider traits |
//! | [`model`] | the rings alone, for model checkers and benchmarks |
//!
//! A driver that behaves as Linux's does, for tests, is in the crate `pvrdma-testbed`.
//!
//! Deliberate limits: interface version 20 and RoCEv2 only (Linux 5.5 and later); interrupts by MSI-X only; no RESIZE_CQ, which Linux never
//! issues.

pub mod abi;
pub mod completion_queue;
mod counters;
mod decode;
pub mod device;
pub mod devices;
pub mod model;
pub mod page_list;
mod phase;
mod provider;
pub mod receive_queue;
pub mod ring;
pub mod saved;
pub mod send_queue;

pub use device::doorbells::{DoorbellMode, Uar};
pub use device::{Config, ConfigError, Device, Interrupts, Phase};
pub use devices::Devices;
pub use provider::Pvrdma;
