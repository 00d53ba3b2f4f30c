//! What a guest was granted: the seam by which a model asks its monitor for windows and permissions.

use thiserror::Error;

use crate::describe::{Direction, Permission};

/// A window that was validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granted {
    /// First byte, in the guest's addresses.
    pub base: u64,
    /// Bytes.
    pub length: u64,
    /// First byte, in the device's addresses.
    pub device_base: u64,
}

/// A window that can't be granted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Denied(pub String);

/// What a guest was granted: its memory map and its permissions. Implemented by the monitor.
pub trait Grants {
    /// Grants a window in the host's memory: `length` bytes from `base` in the guest's addresses must be the guest's, usable in
    /// this direction and contiguous for the device. The answer is the device's address of the first byte.
    ///
    /// # Errors
    /// Why not.
    fn grant(&mut self, base: u64, length: u64, direction: Direction) -> Result<u64, Denied>;
    /// Grants all of the guest's memory, to a device that takes addresses out of that memory ([`Space::Guest`](crate::describe::Space::Guest)).
    ///
    /// # Errors
    /// Why not: nothing but an IOMMU keeps such a device in that memory.
    fn grant_all(&mut self, direction: Direction) -> Result<(), Denied>;
    /// The device takes no addresses out of the guest's memory any more.
    fn release_all(&mut self);
    /// The device doesn't use a granted window any more.
    fn release(&mut self, window: Granted, direction: Direction);
    /// Whether the guest has a permission.
    fn allows(&self, permission: Permission) -> bool;
}
