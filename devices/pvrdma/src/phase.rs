//! The phase of a PVRDMA function; [`crate::device`] has the transitions.

/// How far the guest's driver has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Phase {
    /// No driver; nothing of the guest's memory is touched.
    Silent,
    /// The shared region is known and capabilities are in it.
    Described,
    /// Commands are taken.
    Active,
    /// The guest was told that the device failed; commands are refused until it describes a new region.
    Failed,
}
