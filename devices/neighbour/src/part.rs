//! A part of a message.

/// A buffer, or a part of one: global address and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Global address.
    pub address: u64,
    /// Bytes, not 0.
    pub length: u32,
}
