//! Ranges of guest-physical addresses.

/// A range of guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl AddressRange {
    /// Returns the first address after the range (saturating at 2^64 - 1).
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Returns whether `[start, start + len)` lies inside.
    pub const fn contains(&self, start: u64, len: u64) -> bool {
        match start.checked_add(len) {
            Some(end) => start >= self.start && end <= self.end(),
            None => false,
        }
    }
}

/// A range of RAM with its NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRange {
    /// The addresses.
    pub range: AddressRange,
    /// NUMA node (SRAT proximity domain).
    pub node: u32,
}
