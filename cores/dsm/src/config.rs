//! What all nodes must agree on, and how a node decides.

use thiserror::Error;

use crate::names::{MAX_NODES, MAX_VCPUS, NodeId, Page};

/// Configuration of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// This node.
    pub me: NodeId,
    /// How many nodes there are: 1 to [`MAX_NODES`]. Node 0 begins with the token.
    pub nodes: u8,
    /// Virtual CPUs of this node.
    pub vcpus: u16,
    /// Pages per home: pages 0 to `stride - 1` have node 0 as their home, the next `stride` node 1, and so on, again and again.
    /// In a guest with NUMA nodes: the pages of one NUMA node.
    pub stride: u64,
    /// Pages of guest memory; numbers from here on are refused.
    pub pages: u64,
    /// How it decides. The same on all nodes.
    pub policy: Policy,
    /// A fault that is put in on purpose, for tests.
    pub plant: Plant,
}

/// How updates are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One order for all: x86-TSO.
    Sequenced,
    /// The scheme of the vNUMA paper: stores retire at once, are sent to all, counted per writer, and merged as they arrive.
    /// **Weak: fences of an x86 guest don't hold.** For the simulator only.
    PerWriter,
}

/// How a node decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// How updates are ordered.
    pub order: Order,
    /// Homes change modes of pages by what they see.
    pub adapt: bool,
    /// Pages that see atomic instructions may be kept by updates, too, with the holder of the token as their single writer. Without, whoever
    /// decodes an atomic instruction on a page with updates advises to invalidate it.
    pub atomics: bool,
    /// A reader that always writes next gets the page to write at once: then moving the ownership pays.
    pub migratory: bool,
    /// Reads always move the ownership, as in GiantVM.
    pub read_moves_ownership: bool,
    /// The new owner invalidates copies one after the other, as in GiantVM.
    pub serial_invalidation: bool,
    /// Transfers of a page in one window that make its home think of updates.
    pub transfers: u32,
    /// Length of that window, nanoseconds.
    pub window_ns: u64,
    /// Most bytes that change between two transfers of such a page.
    pub changed_bytes: u16,
    /// Operations on a page in one window that end its update mode: a trapped store costs more than it saves.
    pub storm: u32,
    /// Operations on a page per change of the operating node, in one window, that end its update mode: nodes take turns then, and a
    /// page per turn is cheaper. The price of a transfer in traps.
    pub turn: u32,
    /// How long a page keeps its mode after a change, nanoseconds.
    pub cooldown_ns: u64,
    /// By how many operations a node has to be ahead of all others to get the token; 0: the token stays.
    pub token_votes: u32,
    /// Updates after which a node looks whether its copy is still read: it closes the copy, which goes on getting updates, opens it
    /// again at the next fault, and gives it up after as many more without one. Doubled whenever the copy was read. 0: never.
    pub probe_updates: u32,
    /// Updates that a node may be behind before the sequencer waits for it.
    pub update_window: u64,
    /// How long a granted page stays before the node is asked to finish the instruction, nanoseconds.
    pub hold_ns: u64,
    /// Old contents that a node keeps, to send differences; 0: none.
    pub twins: usize,
    /// Versions name contents: no data are sent to a node that has them.
    pub versions: bool,
}

impl Policy {
    /// Plain Ivy with fixed managers: invalidation only, ownership moves on writes.
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

    /// All that this crate has, for x86 guests.
    pub const OURS: Self =
        Self { adapt: true, migratory: true, token_votes: 8, probe_updates: 16, twins: 256, ..Self::IVY };

    /// After the paper: Ivy, updates sent to all without waiting, single-writer updates for atomics.
    pub const VNUMA_2009: Self = Self { order: Order::PerWriter, adapt: true, ..Self::IVY };

    /// After GiantVM: ownership moves on reads too, invalidations one by one, whole pages always.
    pub const GIANTVM_2026: Self = Self {
        read_moves_ownership: true,
        serial_invalidation: true,
        versions: false,
        hold_ns: 0,
        ..Self::IVY
    };
}

/// A fault that is put in on purpose. What checks the protocol must find each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Plant {
    /// None.
    #[default]
    None,
    /// Answers to invalidations carry no stamp.
    DropAckStamp,
    /// An update is applied again after the next one.
    ApplyTwice,
    /// Pages are given away before the instruction that they were granted for has retired.
    ReleaseEarly,
    /// A writer doesn't wait for the answers of those who have copies.
    SkipAcks,
    /// Nobody yields to an older instruction.
    NeverYield,
    /// Updates that arrive before their page does are forgotten.
    ForgetEarly,
    /// A saved node doesn't say which of its pages other nodes own.
    ForgetOwners,
    /// Ages of instructions are times of the host's clock.
    HostClockAges,
}

/// Why a configuration can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// Number of nodes.
    #[error("A machine of {0} nodes can't be made: 1 to 64 are possible")]
    Nodes(u8),
    /// The node is none of them.
    #[error("Node {node} is not one of {nodes} nodes, which are numbered from 0")]
    Me {
        /// The node.
        node: u8,
        /// How many there are.
        nodes: u8,
    },
    /// Number of virtual CPUs.
    #[error("A node with {0} vCPUs can't be made: 1 to 1024 are possible")]
    Vcpus(u16),
    /// No pages per home.
    #[error("Homes of 0 pages can't be made: give the number of pages that each node is the home of")]
    Stride,
}

impl Config {
    /// Node `me` of `nodes`, with one virtual CPU, in a guest of 4 GiB.
    #[must_use]
    pub fn new(me: u8, nodes: u8, policy: Policy) -> Self {
        Self { me: NodeId(me), nodes, vcpus: 1, stride: 1, pages: 1 << 20, policy, plant: Plant::None }
    }

    /// The home of a page.
    #[must_use]
    pub fn home(&self, page: Page) -> NodeId {
        let home = (page / self.stride.max(1)) % u64::from(self.nodes.max(1));
        NodeId(u8::try_from(home).unwrap_or(0))
    }

    /// Checks it.
    ///
    /// # Errors
    /// The first value that can't be used.
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
