//! A part of a message.

/// A buffer, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Global address.
    pub address: u64,
    /// Length, bytes, not 0.
    pub length: u32,
}
