//! Whom a member permits.

use alloc::string::String;

/// Who may see a member, and is seen by it: a VM by name, of a user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permit {
    /// The peer's VM.
    pub vm: String,
    /// Whose monitor runs it.
    pub uid: u32,
}
