//! The interface by which a model requests windows and permissions from its monitor.

use thiserror::Error;

use crate::describe::{Direction, Permission};

/// A validated window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granted {
    /// Guest-physical base.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// Base in the device's addresses.
    pub device_base: u64,
}

/// The reason why a window can't be granted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Denied(pub String);

/// A guest's memory map and permissions. The monitor implements it.
pub trait Grants {
    /// Grants a window in the host's memory, and returns its base in the device's addresses. All `length` bytes from
    /// `base` (guest-physical) must belong to the guest, permit this direction, and be contiguous for the device.
    ///
    /// # Errors
    /// The reason.
    fn grant(&mut self, base: u64, length: u64, direction: Direction) -> Result<u64, Denied>;
    /// Grants all of the guest's memory to a device that reads addresses from that memory
    /// ([`Space::Guest`](crate::describe::Space::Guest)).
    ///
    /// # Errors
    /// The reason: only an IOMMU confines such a device.
    fn grant_all(&mut self, direction: Direction) -> Result<(), Denied>;
    /// Ends [`Self::grant_all`]: the device no longer reads addresses from the guest's memory.
    fn release_all(&mut self);
    /// Releases a granted window that the device no longer uses.
    fn release(&mut self, window: Granted, direction: Direction);
    /// Returns whether the guest has a permission.
    fn allows(&self, permission: Permission) -> bool;
}
