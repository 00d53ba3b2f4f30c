//! State of one page and of the vCPUs at a node.

use std::collections::VecDeque;

use crate::event::Fault;
use crate::message::{Intent, Request, Seq, UNKNOWN_CHANGE};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority, Vcpu};

/// State of one page at a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Local {
    pub mode: Mode,
    pub access: Access,
    /// This node answers requests for the page and knows its copyset. In a write-update mode, the sequencer does.
    pub owner: bool,
    /// Version of the content. It grows with every grant to write.
    pub version: u64,
    /// Memory has the content of that version, whatever `access` is.
    pub kept: bool,
    /// At the owner, the copyset: other nodes that may have a copy.
    pub copies: NodeSet,
    /// The pending request.
    pub want: Option<Want>,
    /// vCPUs that the page was granted to and whose instruction hasn't been reported as retired.
    pub holds: Vec<Hold>,
    /// vCPUs that wait for the page.
    pub waiting: Vec<(Vcpu, Fault)>,
    /// Requests that this owner, or owner to be, hasn't served.
    pub queue: VecDeque<Request>,
    /// An invalidation that waits for a hold to end.
    pub invalidation: Option<Invalidation>,
    /// Age of the oldest instruction that is known to wait for this page at any node behind this one.
    pub hurry: Option<Priority>,
    /// Updates since the copy was last known to be read, and the number after which the node closes or leaves it.
    pub unread: (u32, u32),
    /// The page becomes write-update once the pending request completes.
    pub convert_next: bool,
    /// This node sent `Leave`, which the sequencer hasn't answered: the `seq` of that message.
    pub leaving: Option<Seq>,
    /// The sequencer ended write-update, which the home hasn't acknowledged.
    pub reverting: bool,
    /// Bytes that changed when the page last arrived here, or [`UNKNOWN_CHANGE`].
    pub changed: u16,
    /// Operations in this window, and its start, ns.
    pub operations: (u32, u64),
    /// Changes of the operating node in this window, and the last such node.
    pub turns: (u32, NodeId),
    /// In the scheme of the vNUMA paper: stores of each node that the content has.
    pub counters: Vec<u64>,
    /// In the scheme of the vNUMA paper: stores that arrived before the page.
    pub early: Vec<(NodeId, u64, crate::operation::Change)>,
}

impl Local {
    pub fn new(owner: bool) -> Self {
        Self {
            mode: Mode::Invalidate,
            access: Access::None,
            owner,
            version: 0,
            kept: owner,
            copies: NodeSet::EMPTY,
            want: None,
            holds: Vec::new(),
            waiting: Vec::new(),
            queue: VecDeque::new(),
            invalidation: None,
            hurry: None,
            unread: (0, 0),
            convert_next: false,
            leaving: None,
            reverting: false,
            changed: UNKNOWN_CHANGE,
            operations: (0, 0),
            turns: (0, NodeId(0)),
            counters: Vec::new(),
            early: Vec::new(),
        }
    }

    /// A write-update copy that the guest may not read for now, to learn whether it still does.
    pub fn is_closed(&self) -> bool {
        self.mode.is_update() && self.access == Access::None && self.leaving.is_none() && !self.owner
    }

    /// A copy that the guest can read and that must have all updates.
    pub fn is_replica(&self) -> bool {
        self.mode.is_update() && self.access >= Access::Read
    }

    /// Whether the present rights satisfy a fault.
    pub fn satisfies(&self, fault: Fault) -> bool {
        match fault {
            Fault::Read => self.access >= Access::Read,
            Fault::Write | Fault::Atomic => self.access == Access::Write || self.traps(),
        }
    }

    /// Whether the page waits for more than the answer to a request that its arrival has made obsolete.
    pub fn is_changing(&self) -> bool {
        self.want.as_ref().is_some_and(|want| want.kind != WantKind::Remote)
    }

    /// Whether stores of the guest trap.
    pub fn traps(&self) -> bool {
        // Stores to a copy that is about to go don't trap: their instructions wait for the page in its new state.
        self.is_replica() && self.invalidation.is_none() && !self.reverting && !self.is_changing()
    }
}

/// The pending request of a node for a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Want {
    pub kind: WantKind,
    pub intent: Intent,
    pub priority: Priority,
    /// Nodes whose `InvalidateAck` it needs; unknown until the grant arrives.
    pub needed: Option<NodeSet>,
    pub acked: NodeSet,
    /// From the grant: its intent, and the nodes that have copies.
    pub granted: Option<(Intent, NodeSet)>,
    /// The age that `Hurry` announced for it.
    pub hurried: Option<Priority>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WantKind {
    /// A request to the home.
    Remote,
    /// The owner invalidates copies to write.
    Upgrade,
    /// The sequencer requests the page to make it write-update.
    Convert,
    /// The sequencer invalidates copies to end write-update.
    Revert,
}

/// The protection of a page that was granted to a vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Hold {
    pub vcpu: Vcpu,
    pub priority: Priority,
    /// Whether it was granted to write.
    pub write: bool,
    /// Time from which on the node may kick the vCPU, ns.
    pub until: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Invalidation {
    pub writer: NodeId,
    pub priority: Priority,
}

/// State of a vCPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct VcpuState {
    /// Age of its instruction, from the first fault to retirement.
    pub priority: Option<Priority>,
    /// The page that it waits for.
    pub waiting: Option<Page>,
    /// Pages granted to that instruction.
    pub held: Vec<Page>,
    /// The node has kicked the vCPU for this instruction.
    pub kicked: bool,
    /// Its operation is in flight.
    pub operating: bool,
}

/// State of the sequencer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Sequencer {
    /// For each node, the last update addressed to it.
    pub last: Vec<Seq>,
    /// For each node, the updates that it hasn't reported as applied.
    pub unacked: Vec<u64>,
    /// Operations that wait until nodes have caught up.
    pub stalled: VecDeque<Stalled>,
    /// Candidate for the role, by a majority vote over operations, and its lead.
    pub candidate: (NodeId, u32),
    /// Operations since the last one of the sequencer's own vCPUs.
    pub foreign: u32,
    /// When the role arrived, ns.
    pub since: u64,
    /// All write-update pages.
    pub pages: std::collections::BTreeSet<Page>,
    /// Pages with a pending change of mode. The role can't move while there are any.
    pub busy: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Stalled {
    pub requester: NodeId,
    pub vcpu: Vcpu,
    pub page: Page,
    pub operation: crate::operation::Operation,
}

/// State of a page at its home.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Home {
    /// The owner, once all forwarded requests are served.
    pub owner: NodeId,
    pub mode: Mode,
    /// Statistics for adaptation.
    pub seen: Seen,
}

/// Statistics of a page at its home.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Seen {
    /// Start of the window, ns, and requests in it.
    pub window: (u64, u32),
    /// Nodes that requested the page in this window.
    pub nodes: NodeSet,
    /// Requests in this window that reported few changed bytes ([`crate::config::Policy::changed_bytes`]).
    pub small: u32,
    /// Whether an atomic instruction needed the page in this window.
    pub atomic: bool,
    /// Time of the last change of mode, ns.
    pub changed_at: Option<u64>,
    /// Node of the last request, and whether it was to read.
    pub last: Option<(NodeId, bool)>,
    /// How often the next writer was the last reader.
    pub migrations: u8,
}
