//! Ranges of guest-physical addresses.

/// A range of guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

impl AddressRange {
    /// First address after the range (saturating at 2^64 - 1).
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Whether `[start, start + len)` lies inside.
    pub const fn contains(&self, start: u64, len: u64) -> bool {
        match start.checked_add(len) {
            Some(end) => start >= self.start && end <= self.end(),
            None => false,
        }
    }
}

/// RAM, and the NUMA node it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRange {
    /// Where.
    pub range: AddressRange,
    /// NUMA node (SRAT proximity domain).
    pub node: u32,
}
