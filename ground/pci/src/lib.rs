//! PCI Express as the guest sees it: functions, configuration space, BARs, MSI-X and the root bus.
//!
//! This crate knows neither KVM nor guest memory. What it needs from the machine it names as traits
//! ([`interrupt::Msi`], [`interrupt::IntxLine`], [`function::BarPlacer`], [`root::IntxSink`]) that the
//! monitor implements over the crate `machine`.
//!
//! | module | holds |
//! |---|---|
//! | [`function`], [`interrupt`] | the traits between functions, bus and machine |
//! | [`config`] | configuration space of one function |
//! | [`msix`], [`intx`] | how a function interrupts |
//! | [`root`] | the root complex: slots, ECAM and 0xCF8, BAR placement, INTx routing |
//! | [`bar`] | one BAR as a bus device |
//! | [`testing`] | a fake function, and the contract that every function must pass |

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
pub mod testing;
