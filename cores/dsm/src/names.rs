//! Names of nodes, pages and virtual CPUs, and what a node may do with a page.

/// Most nodes that one machine may have: a set of nodes is one 64-bit word.
pub const MAX_NODES: u8 = 64;

/// Most virtual CPUs that one node may have.
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

/// Number of a virtual CPU inside its node.
pub type Vcpu = u16;

/// A set of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeSet(pub u64);

impl NodeSet {
    /// No node.
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

    /// Whether the node is in it.
    #[must_use]
    pub fn has(self, node: NodeId) -> bool {
        self.0 & Self::one(node).0 != 0
    }

    /// Both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without another.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether every node of it is in another.
    #[must_use]
    pub fn is_within(self, other: Self) -> bool {
        self.without(other).is_empty()
    }

    /// Whether it has no node.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many nodes it has.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Its nodes, lowest first.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        (0..MAX_NODES).map(NodeId).filter(move |node| self.has(*node))
    }
}

/// What the guest's mapping of a page allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Every access faults.
    #[default]
    None,
    /// Loads don't fault.
    Read,
    /// Nothing faults.
    Write,
}

/// How a page is kept the same everywhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// One node may write and no other may read, or any may read (Ivy).
    #[default]
    Invalidate,
    /// Nodes have copies; stores of any node are sequenced and sent to them.
    Update,
    /// The same for a page that sees atomic instructions: they are carried out by one writer, the holder of the sequencer's token.
    SingleWriter,
}

impl Mode {
    /// Whether copies are kept and updates sent to them.
    #[must_use]
    pub fn is_update(self) -> bool {
        self != Self::Invalidate
    }
}

/// Age of an instruction: the smaller, the older. Of two instructions that want each other's pages the older one wins.
///
/// It is taken at the first fault of an instruction and kept until it retires. Times are those of a logical clock (L. Lamport, *Time, clocks, and the
/// ordering of events in a distributed system*, 1978): one more than the latest that the node has given or seen. So an instruction that
/// begins after its node has seen another one's age is younger than that, whatever the hosts' clocks say, and every instruction is the
/// oldest some day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority {
    /// Logical time, up to [`Self::MAX_TIME`], or [`Self::NO_INSTRUCTION`].
    pub time: u64,
    /// The node.
    pub node: NodeId,
    /// Its virtual CPU.
    pub vcpu: Vcpu,
}

impl Priority {
    /// The time of what no instruction waits for: it is younger than every instruction.
    pub const NO_INSTRUCTION: u64 = u64::MAX;

    /// The latest time that an instruction may have. Clocks count instructions, so that correct ones never come near; one that a peer
    /// sets close to the end of its numbers would make all ages the same.
    pub const MAX_TIME: u64 = u64::MAX >> 1;
}
