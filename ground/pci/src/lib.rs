//! PCI Express as the guest sees it: functions, configuration space, BARs, MSI-X and the root bus.
//!
//! This crate knows neither KVM nor guest memory. What it needs from the machine it names as traits
//! ([`Msi`], [`IntxLine`], [`BarPlacer`]) that the monitor implements over the crate `machine`.

pub mod function;
pub mod interrupt;
