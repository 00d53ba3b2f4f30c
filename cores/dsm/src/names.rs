//! Names of nodes, pages and vCPUs, and rights to pages.

/// Limit of nodes per VM: a set of nodes is one 64-bit word.
pub const MAX_NODES: u8 = 64;

/// Limit of vCPUs per node.
pub const MAX_VCPUS: u16 = 1024;

/// Number of a node, below [`MAX_NODES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

impl NodeId {
    /// The number as an index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A guest frame number: the guest-physical address divided by the page size.
pub type Page = u64;

/// Number of a vCPU within its node.
pub type Vcpu = u16;

/// A set of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSet(pub u64);

impl NodeSet {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// The set of one node.
    #[must_use]
    pub fn one(node: NodeId) -> Self {
        Self(1u64.checked_shl(u32::from(node.0)).unwrap_or(0))
    }

    /// The first `count` nodes.
    #[must_use]
    pub fn first(count: u8) -> Self {
        Self(1u64.checked_shl(u32::from(count)).map_or(u64::MAX, |bit| bit - 1))
    }

    /// Whether the set has the node.
    #[must_use]
    pub fn has(self, node: NodeId) -> bool {
        self.0 & Self::one(node).0 != 0
    }

    /// The union.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The difference: this set without the nodes of `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is a subset of `other`.
    #[must_use]
    pub fn is_within(self, other: Self) -> bool {
        self.without(other).is_empty()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of nodes in the set.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Nodes of the set, lowest first.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        (0..MAX_NODES).map(NodeId).filter(move |node| self.has(*node))
    }
}

/// Rights of the guest's mapping of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Every access faults.
    #[default]
    None,
    /// Loads don't fault; stores do.
    Read,
    /// No access faults.
    Write,
}

/// Coherence protocol of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Write-invalidate (Ivy): one node may write and no other may read, or any may read.
    #[default]
    Invalidate,
    /// Write-update: nodes have copies, and the sequencer sends stores of any node to them.
    Update,
    /// Write-update for a page with atomic instructions: the sequencer executes them as the page's single writer.
    SingleWriter,
}

impl Mode {
    /// Whether the mode is a write-update mode.
    #[must_use]
    pub fn is_update(self) -> bool {
        self != Self::Invalidate
    }
}

/// Wound-wait priority: the age of an instruction. The smaller is the older, and of two instructions that conflict the older one wins.
///
/// A node assigns the age at an instruction's first fault, and keeps it until the instruction retires. Ages are times of a logical clock
/// (L. Lamport, *Time, clocks, and the ordering of events in a distributed system*, 1978): one more than the latest age that the node has
/// assigned or received. So an instruction that begins after its node has received another one's age is younger, for any clocks of the
/// hosts. Every instruction becomes the oldest at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority {
    /// Logical time, up to [`Self::MAX_TIME`], or [`Self::NO_INSTRUCTION`].
    pub time: u64,
    /// The node.
    pub node: NodeId,
    /// The vCPU within the node.
    pub vcpu: Vcpu,
}

impl Priority {
    /// Time of a request that no instruction waits for. It is younger than every instruction.
    pub const NO_INSTRUCTION: u64 = u64::MAX;

    /// The latest time that an instruction may have. Clocks count instructions, so a correct node never reaches it. A peer that sent a time
    /// near the end of the range would make all later ages equal.
    pub const MAX_TIME: u64 = u64::MAX >> 1;
}
