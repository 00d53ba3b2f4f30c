//! The phase of a PVRDMA function; [`crate::device`] has the transitions.

/// Progress of the guest's driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Phase {
    /// No driver; the device accesses no guest memory.
    Silent,
    /// The shared region is known, and the device has written its capabilities there.
    Described,
    /// The device executes commands.
    Active,
    /// The device has notified the guest of its failure. It refuses commands until the driver describes a new region.
    Failed,
}
