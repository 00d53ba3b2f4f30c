//! What a guest is given.

use device_models::describe::Permission;
use serde::{Deserialize, Serialize};

use crate::dma::MemoryMap;

/// A guest's number in its monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GuestId(pub usize);

/// What happens when a request is refused (spec nics 0.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailurePolicy {
    /// The request is dropped and counted.
    Ignore,
    /// The device's own error status is raised, so that the driver recovers. For a device without such a status, as `Stop`.
    DeviceError,
    /// The guest gets a machine check.
    MachineCheck,
    /// The guest's use of the device is frozen.
    Stop,
}

/// A guest of a monitor.
pub struct GuestConfig {
    /// Its name, for texts.
    pub name: String,
    /// The Ethernet address that the device has for it.
    pub address: [u8; 6],
    /// What it may do beyond its own traffic.
    pub permissions: Vec<Permission>,
    /// What happens when a request is refused.
    pub policy: FailurePolicy,
    /// Its memory.
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
