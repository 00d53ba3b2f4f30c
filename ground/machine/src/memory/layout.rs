//! Where guest RAM lies: on both sides of the PCI hole, node after node.

use super::MemoryError;

/// RAM below this address, then the hole for PCI, IOAPIC and local APICs.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// The rest of RAM begins here.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;

/// A piece of guest-physical RAM within one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RamRange {
    /// Guest NUMA node.
    pub node: usize,
    /// First guest-physical address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// Where in the node's memory it begins.
    pub node_offset: u64,
}

/// The RAM of a VM.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RamLayout {
    nodes: Vec<u64>,
    ranges: Vec<RamRange>,
}

impl RamLayout {
    /// Lays out nodes of the given sizes in bytes: ascending from address 0, leaving out the hole between
    /// [`LOW_RAM_END`] and [`HIGH_RAM_START`]. Sizes must be multiples of 4 KiB, and the first at least 1 MiB.
    pub fn new(nodes: &[u64]) -> Result<Self, MemoryError> {
        let _ = nodes;
        todo!()
    }

    /// Sizes of the nodes in bytes.
    pub fn nodes(&self) -> &[u64] {
        &self.nodes
    }

    /// All pieces, ascending by address.
    pub fn ranges(&self) -> &[RamRange] {
        &self.ranges
    }

    /// RAM in bytes.
    pub fn total(&self) -> u64 {
        self.nodes.iter().sum()
    }

    /// First address above the RAM below the hole.
    pub fn low_end(&self) -> u64 {
        self.ranges.iter().map(|r| r.start + r.size).filter(|end| *end <= LOW_RAM_END).max().unwrap_or(0)
    }

    /// First address above all RAM and the hole: [`HIGH_RAM_START`] or more. 64-bit BARs may go there.
    pub fn high_end(&self) -> u64 {
        self.ranges.iter().map(|r| r.start + r.size).max().unwrap_or(0).max(HIGH_RAM_START)
    }
}
