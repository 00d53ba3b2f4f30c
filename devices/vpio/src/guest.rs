//! Configuration of a guest: address, permissions, policy and memory.

use device_models::describe::Permission;
use serde::{Deserialize, Serialize};

use crate::dma::MemoryMap;

/// A guest's number in its monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GuestId(pub usize);

/// What the monitor does when it refuses a request (`docs/reference/vpio.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailurePolicy {
    /// Drop the request and count it.
    Ignore,
    /// Raise the device's own error status, so that the driver recovers. A device without such a status is stopped, as
    /// with `Stop`.
    DeviceError,
    /// Inject a machine check into the guest.
    MachineCheck,
    /// Stop the guest's use of the device.
    Stop,
}

/// Configuration of a monitor's guest.
pub struct GuestConfig {
    /// Name for messages.
    pub name: String,
    /// The Ethernet address that the guest reads from the device.
    pub address: [u8; 6],
    /// Permissions beyond the guest's own traffic.
    pub permissions: Vec<Permission>,
    /// Reaction to a refused request.
    pub policy: FailurePolicy,
    /// The guest's memory map.
    pub memory: Box<dyn MemoryMap + Send>,
}

impl std::fmt::Debug for GuestConfig {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("GuestConfig")
            .field("name", &self.name)
            .field("address", &self.address)
            .field("permissions", &self.permissions)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}
