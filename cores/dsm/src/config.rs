//! Configuration that all nodes share, and the policy by which a node decides.

use thiserror::Error;

use crate::names::{MAX_NODES, MAX_VCPUS, NodeId, Page};

/// Configuration of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// This node.
    pub me: NodeId,
    /// Number of nodes of the VM, 1 to [`MAX_NODES`]. Node 0 starts as the sequencer.
    pub nodes: u8,
    /// vCPUs of this node, 1 to [`MAX_VCPUS`].
    pub vcpus: u16,
    /// Consecutive pages per home: node 0 is the home of pages 0 to `stride - 1`, node 1 of the next `stride` pages. After the last node
    /// the pattern repeats. In a guest with NUMA nodes, one NUMA node has `stride` pages.
    pub stride: u64,
    /// Pages of guest memory. The node refuses events and messages with a page number of `pages` or more.
    pub pages: u64,
    /// The policy. All nodes must have the same one.
    pub policy: Policy,
    /// A bug to inject, for tests.
    pub plant: Plant,
}

/// Consistency model of write-update pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One total order of all updates: x86-TSO.
    Sequenced,
    /// The scheme of the vNUMA paper. A store retires at once and goes to all nodes. Receivers count stores per writer and merge them on
    /// arrival.
    /// **Weak: fences of an x86 guest don't hold.** For the simulator only.
    PerWriter,
}

/// Thresholds and switches by which a node decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Consistency model of write-update pages.
    pub order: Order,
    /// Homes request a change of a page's mode by its statistics.
    pub adapt: bool,
    /// Pages with atomic instructions may be write-update; the sequencer is then their single writer. Without, the component that decodes
    /// an atomic instruction on a write-update page advises write-invalidate.
    pub atomics: bool,
    /// A home grants a page for writing to a reader that always writes next. This moves ownership once instead of a read and an upgrade.
    pub migratory: bool,
    /// Every read moves the ownership, as in GiantVM.
    pub read_moves_ownership: bool,
    /// The new owner invalidates one copy after the other, as in GiantVM.
    pub serial_invalidation: bool,
    /// Requests for a page in one window from which on its home considers write-update.
    pub transfers: u32,
    /// Length of the window for counts, ns.
    pub window_ns: u64,
    /// Limit of changed bytes up to which a request counts as small. At least half of the requests must be small for write-update.
    pub changed_bytes: u16,
    /// Operations on a page in one window above which the sequencer ends write-update: trapped stores then cost more than transfers.
    pub storm: u32,
    /// Operations per change of the operating node, in one window, above which the sequencer ends write-update. Nodes then take turns, and
    /// one transfer per turn is cheaper. The value is the cost of a transfer in trapped stores.
    pub turn: u32,
    /// Shortest time between two changes of a page's mode, ns.
    pub cooldown_ns: u64,
    /// Operations by which a node must lead all others to become the sequencer. 0: the sequencer doesn't move.
    pub token_votes: u32,
    /// Updates after which a node closes its copy of a write-update page, to learn whether the guest still reads it. A closed copy still
    /// gets updates. The next fault opens it again and doubles this number; after as many updates without a fault the node leaves. 0:
    /// never.
    pub probe_updates: u32,
    /// Updates that a node may be behind before the sequencer stalls operations for it.
    pub update_window: u64,
    /// Time that a grant protects a page before the node kicks the vCPU to finish its instruction, ns.
    pub hold_ns: u64,
    /// Twins (old contents of pages) that a node keeps to compute differences. 0: none.
    pub twins: usize,
    /// Versions name contents: a node that already has the owner's version gets no data.
    pub versions: bool,
}

impl Policy {
    /// Plain Ivy with fixed managers: write-invalidate only, ownership moves on writes.
    pub const IVY: Self = Self {
        order: Order::Sequenced,
        adapt: false,
        atomics: true,
        migratory: false,
        read_moves_ownership: false,
        serial_invalidation: false,
        transfers: 8,
        window_ns: 10_000_000,
        changed_bytes: 256,
        storm: 2_000,
        turn: 8,
        cooldown_ns: 10_000_000,
        token_votes: 0,
        probe_updates: 0,
        update_window: 256,
        hold_ns: 50_000,
        twins: 0,
        versions: true,
    };

    /// All optimizations of this crate, for x86 guests.
    pub const OURS: Self =
        Self { adapt: true, migratory: true, token_votes: 8, probe_updates: 16, twins: 256, ..Self::IVY };

    /// After the vNUMA paper: Ivy, stores sent to all without waiting, single-writer pages for atomics.
    pub const VNUMA_2009: Self = Self { order: Order::PerWriter, adapt: true, ..Self::IVY };

    /// After GiantVM: reads move ownership too, invalidations one by one, always whole pages.
    pub const GIANTVM_2026: Self = Self {
        read_moves_ownership: true,
        serial_invalidation: true,
        versions: false,
        hold_ns: 0,
        ..Self::IVY
    };
}

/// A bug that tests inject. The model checker or the simulator must find each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Plant {
    /// No injected bug.
    #[default]
    None,
    /// `InvalidateAck` carries no time stamp.
    DropAckStamp,
    /// An update is applied again after the next one.
    ApplyTwice,
    /// A node releases a page before the instruction that it was granted for has retired.
    ReleaseEarly,
    /// A writer doesn't wait for `InvalidateAck`.
    SkipAcks,
    /// No instruction yields to an older one.
    NeverYield,
    /// A node drops updates that arrive before their predecessor.
    ForgetEarly,
    /// A saved node omits the pages of which it is the home and another node is the owner.
    ForgetOwners,
    /// Ages of instructions are times of the host's clock instead of the logical clock.
    HostClockAges,
}

/// Why a configuration can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The number of nodes is out of range.
    #[error("A machine of {0} nodes can't be made: 1 to 64 are possible")]
    Nodes(u8),
    /// The node's number is out of range.
    #[error("Node {node} is not one of {nodes} nodes, which are numbered from 0")]
    Me {
        /// The node's number.
        node: u8,
        /// Number of nodes.
        nodes: u8,
    },
    /// The number of vCPUs is out of range.
    #[error("A node with {0} vCPUs can't be made: 1 to 1024 are possible")]
    Vcpus(u16),
    /// `stride` is 0.
    #[error("Homes of 0 pages can't be made: give the number of pages that each node is the home of")]
    Stride,
}

impl Config {
    /// Node `me` of `nodes`, with one vCPU, a stride of one page, and a guest of 2^20 pages.
    #[must_use]
    pub fn new(me: u8, nodes: u8, policy: Policy) -> Self {
        Self { me: NodeId(me), nodes, vcpus: 1, stride: 1, pages: 1 << 20, policy, plant: Plant::None }
    }

    /// The node that is the home of `page`.
    #[must_use]
    pub fn home(&self, page: Page) -> NodeId {
        let home = (page / self.stride.max(1)) % u64::from(self.nodes.max(1));
        NodeId(u8::try_from(home).unwrap_or(0))
    }

    /// Checks all ranges.
    ///
    /// # Errors
    /// Returns the first value that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.nodes == 0 || self.nodes > MAX_NODES {
            return Err(ConfigError::Nodes(self.nodes));
        }
        if self.me.0 >= self.nodes {
            return Err(ConfigError::Me { node: self.me.0, nodes: self.nodes });
        }
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Err(ConfigError::Vcpus(self.vcpus));
        }
        if self.stride == 0 {
            return Err(ConfigError::Stride);
        }
        Ok(())
    }
}
