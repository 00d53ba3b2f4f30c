//! Permissions of a member.

use alloc::string::String;

/// A peer that may see a member, and that the member may see: a VM's name, and a user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permit {
    /// Name of the peer's VM.
    pub vm: String,
    /// User of the peer's monitor.
    pub uid: u32,
}
