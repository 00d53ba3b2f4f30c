//! PCI Express from the guest's side: functions, configuration space, BARs, MSI-X and the root bus.
//!
//! The crate uses neither KVM nor guest memory. It defines what it needs from the machine as traits
//! ([`interrupt::Msi`], [`interrupt::IntxLine`], [`function::BarPlacer`], [`root::IntxSink`]). The monitor implements
//! them with the crate `machine`.
//!
//! | module | holds |
//! |---|---|
//! | [`function`], [`interrupt`] | the traits between functions, bus and machine |
//! | [`config`] | configuration space of one function |
//! | [`msix`], [`intx`] | a function's interrupts |
//! | [`root`] | the root complex: slots, ECAM and 0xCF8, BAR placement, INTx routing |
//! | [`bar`] | one BAR as a bus device |
//!
//! Fakes for tests, and the contract that every function must pass, are in the crate `pci-testbed`.

pub mod bar;
pub mod config;
pub mod function;
pub mod interrupt;
pub mod intx;
mod log_limit;
pub mod msix;
pub mod registers;
pub mod root;
mod sync;
