//! Guest-physical layout of RAM: below and above the PCI hole, one NUMA node after the other.

use super::MemoryError;

/// End of the RAM below the hole for PCI, IOAPIC and local APICs.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of the RAM above the hole.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;

const PAGE: u64 = 4096;
const MIN_FIRST_NODE_BYTES: u64 = 1 << 20;
/// End of the architecture's physical address space.
const MAX_ADDRESS: u64 = 1 << 52;

/// A piece of guest-physical RAM within one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RamRange {
    /// Guest NUMA node.
    pub node: usize,
    /// First guest-physical address.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
    /// Offset in the node's memory, in bytes.
    pub node_offset: u64,
}

/// The RAM of a VM.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RamLayout {
    nodes: Vec<u64>,
    ranges: Vec<RamRange>,
}

impl RamLayout {
    /// Lays out nodes of the given sizes in bytes: ascending from address 0, without the hole between [`LOW_RAM_END`] and
    /// [`HIGH_RAM_START`]. Sizes must be multiples of 4 KiB, and the first at least 1 MiB.
    pub fn new(nodes: &[u64]) -> Result<Self, MemoryError> {
        let first = *nodes.first().ok_or(MemoryError::NoNodes)?;
        let bad =
            |node: usize, size: u64, reason: &str| MemoryError::BadSize { node, size, reason: reason.into() };
        let mut ranges = Vec::new();
        let mut at = 0u64;
        for (node, &size) in nodes.iter().enumerate() {
            if size == 0 {
                return Err(bad(node, size, "a node needs memory"));
            }
            if !size.is_multiple_of(PAGE) {
                return Err(bad(node, size, "sizes are multiples of 4096"));
            }
            let mut placed = 0;
            while placed < size {
                if at == LOW_RAM_END {
                    at = HIGH_RAM_START;
                }
                let room = if at < LOW_RAM_END { LOW_RAM_END - at } else { MAX_ADDRESS.saturating_sub(at) };
                let part = room.min(size - placed);
                if part == 0 {
                    return Err(bad(node, size, "it ends beyond the 52-bit physical address space"));
                }
                ranges.push(RamRange { node, start: at, size: part, node_offset: placed });
                placed += part;
                at += part;
            }
        }
        if first < MIN_FIRST_NODE_BYTES {
            return Err(bad(0, first, "the first node needs at least 1048576"));
        }
        Ok(Self { nodes: nodes.to_vec(), ranges })
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

    /// First address above all RAM and the hole: [`HIGH_RAM_START`] or more. 64-bit BARs may be placed there.
    pub fn high_end(&self) -> u64 {
        self.ranges.iter().map(|r| r.start + r.size).max().unwrap_or(0).max(HIGH_RAM_START)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn small_ram_is_one_piece() {
        let layout = RamLayout::new(&[GIB]).unwrap();
        assert_eq!(layout.ranges(), [RamRange { node: 0, start: 0, size: GIB, node_offset: 0 }]);
        assert_eq!((layout.low_end(), layout.high_end()), (GIB, HIGH_RAM_START));
    }

    #[test]
    fn ram_up_to_the_hole_stays_in_one_piece() {
        let layout = RamLayout::new(&[3 * GIB]).unwrap();
        assert_eq!(layout.ranges().len(), 1);
        assert_eq!((layout.low_end(), layout.high_end()), (LOW_RAM_END, HIGH_RAM_START));
    }

    #[test]
    fn a_node_that_meets_the_hole_goes_on_above_it() {
        let layout = RamLayout::new(&[2 * GIB, 4 * GIB]).unwrap();
        assert_eq!(
            layout.ranges(),
            [
                RamRange { node: 0, start: 0, size: 2 * GIB, node_offset: 0 },
                RamRange { node: 1, start: 2 * GIB, size: GIB, node_offset: 0 },
                RamRange { node: 1, start: HIGH_RAM_START, size: 3 * GIB, node_offset: GIB },
            ]
        );
        assert_eq!(layout.high_end(), HIGH_RAM_START + 3 * GIB);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for nodes in [&[] as &[u64], &[0], &[4096], &[GIB + 1], &[GIB, 0], &[!4095], &[1 << 52]] {
            assert!(RamLayout::new(nodes).is_err(), "{nodes:?}");
        }
    }

    proptest! {
        /// For all sizes: pieces ascend, never overlap each other or the hole, and hold every byte once.
        #[test]
        fn pieces_cover_all_nodes_outside_the_hole(pages in prop::collection::vec(256u64..3_000_000, 1..9)) {
            let nodes: Vec<u64> = pages.iter().map(|n| n * 4096).collect();
            let layout = RamLayout::new(&nodes).unwrap();
            let mut filled = vec![0; nodes.len()];
            let mut end = 0;
            for range in layout.ranges() {
                prop_assert!(range.start >= end);
                end = range.start + range.size;
                prop_assert!(end <= LOW_RAM_END || range.start >= HIGH_RAM_START);
                prop_assert_eq!(range.node_offset, filled[range.node]);
                filled[range.node] += range.size;
            }
            prop_assert_eq!(filled, nodes);
            prop_assert_eq!(layout.high_end(), end.max(HIGH_RAM_START));
        }
    }
}
