//! Identities of NICs, and what NICs' functions notify the registry's keeper of.

use std::fmt;

/// Identity of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NicKey {
    /// Name of the VM.
    pub vm: String,
    /// Name of the NIC.
    pub name: String,
}

impl fmt::Display for NicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NIC {} of VM {}", self.name, self.vm)
    }
}

/// An event for the keeper.
#[derive(Debug)]
pub enum Event {
    /// The last client of a NIC has disconnected.
    Unused {
        /// Identity of the NIC.
        key: NicKey,
        /// Distinguishes it from a later one with the same name.
        generation: u64,
    },
    /// The record has changed.
    Changed,
    /// The daemon is ending.
    Stop,
}
