//! What a node knows of one page, and of its virtual CPUs.

use std::collections::VecDeque;

use crate::event::Fault;
use crate::message::{Intent, Request, Seq, UNKNOWN_CHANGE};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority, Vcpu};

/// A page at one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Local {
    pub mode: Mode,
    pub access: Access,
    /// This node gives the page to others, and knows who has copies. In an update mode: the holder of the token.
    pub owner: bool,
    /// Version of the content: grows with every time that a node gets the page to write.
    pub version: u64,
    /// Memory holds the content of that version, whatever the access.
    pub kept: bool,
    /// At the owner: the other nodes that may have a copy.
    pub copies: NodeSet,
    /// What has been asked for.
    pub want: Option<Want>,
    /// Virtual CPUs that the page was granted to, and whose instruction hasn't retired as far as is known.
    pub holds: Vec<Hold>,
    /// Virtual CPUs that wait for the page.
    pub waiting: Vec<(Vcpu, Fault)>,
    /// Requests that the owner, or the owner to be, hasn't served.
    pub queue: VecDeque<Request>,
    /// An invalidation that waits for a hold.
    pub invalidation: Option<Invalidation>,
    /// The oldest instruction that is known to wait for this page somewhere behind us.
    pub hurry: Option<Priority>,
    /// Updates since the copy was last seen to be read, and after how many to look next.
    pub unread: (u32, u32),
    /// To be kept by updates once what is under way is here.
    pub convert_next: bool,
    /// The copy is to be given up, which the holder of the token hasn't confirmed: the `seq` of the question.
    pub leaving: Option<Seq>,
    /// The update mode was ended, which the home hasn't confirmed.
    pub reverting: bool,
    /// Bytes that changed when the page last came here.
    pub changed: u16,
    /// Operations in this window of time, and when it began.
    pub operations: (u32, u64),
    /// Changes of the operating node in it, and that node.
    pub turns: (u32, NodeId),
    /// Stores of each node that the content has, in the paper's scheme.
    pub counters: Vec<u64>,
    /// Stores that came before the page did, in the paper's scheme.
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

    /// A copy that gets updates and that the guest may not read at present, to see whether it wants to.
    pub fn is_closed(&self) -> bool {
        self.mode.is_update() && self.access == Access::None && self.leaving.is_none() && !self.owner
    }

    /// A copy that the guest can read and that must have all updates.
    pub fn is_replica(&self) -> bool {
        self.mode.is_update() && self.access >= Access::Read
    }

    /// Whether a fault of this kind is answered by the rights that there are.
    pub fn satisfies(&self, fault: Fault) -> bool {
        match fault {
            Fault::Read => self.access >= Access::Read,
            Fault::Write | Fault::Atomic => self.access == Access::Write || self.traps(),
        }
    }

    /// Whether more is under way than a request that is still to be answered, though the page has come.
    pub fn is_changing(&self) -> bool {
        self.want.as_ref().is_some_and(|want| want.kind != WantKind::Remote)
    }

    /// Whether stores are to be trapped.
    pub fn traps(&self) -> bool {
        // A copy that is about to go traps nothing more: its instruction waits for the page as it will be.
        self.is_replica() && self.invalidation.is_none() && !self.reverting && !self.is_changing()
    }
}

/// What a node waits for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Want {
    pub kind: WantKind,
    pub intent: Intent,
    pub priority: Priority,
    /// Whose answers are needed; unknown until the grant is there.
    pub needed: Option<NodeSet>,
    pub acked: NodeSet,
    /// From the grant: its intent, and who has copies.
    pub granted: Option<(Intent, NodeSet)>,
    /// The age that all nodes were told of.
    pub hurried: Option<Priority>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WantKind {
    /// Asked for at the home.
    Remote,
    /// The owner invalidates copies.
    Upgrade,
    /// The holder of the token asked at the home, to keep the page by updates.
    Convert,
    /// The holder of the token invalidates copies, to end that.
    Revert,
}

/// A page was granted to a virtual CPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Hold {
    pub vcpu: Vcpu,
    pub priority: Priority,
    /// To write.
    pub write: bool,
    /// When the virtual CPU may be kicked.
    pub until: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Invalidation {
    pub writer: NodeId,
    pub priority: Priority,
}

/// A virtual CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct VcpuState {
    /// Age of its instruction, from the first fault to retirement.
    pub priority: Option<Priority>,
    /// The page that it waits for.
    pub waiting: Option<Page>,
    /// Pages that it was granted since.
    pub held: Vec<Page>,
    /// It has been kicked.
    pub kicked: bool,
    /// Its operation is under way.
    pub operating: bool,
}

/// What the holder of the token knows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Sequencer {
    /// For each node the last update addressed to it.
    pub last: Vec<Seq>,
    /// For each node how many updates it hasn't said to have applied.
    pub unacked: Vec<u64>,
    /// Operations that wait until nodes have caught up.
    pub stalled: VecDeque<Stalled>,
    /// The node that operates most, by a majority vote, and how far it is ahead.
    pub candidate: (NodeId, u32),
    /// Operations since the last one of the holder itself.
    pub foreign: u32,
    /// When the token came.
    pub since: u64,
    /// Pages that are kept by updates.
    pub pages: std::collections::BTreeSet<Page>,
    /// Pages for which something is under way that the token must not leave behind.
    pub busy: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Stalled {
    pub requester: NodeId,
    pub vcpu: Vcpu,
    pub page: Page,
    pub operation: crate::operation::Operation,
}

/// A page at its home.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Home {
    /// Who owns it, or will when all that was passed on is done.
    pub owner: NodeId,
    pub mode: Mode,
    /// What was seen of it.
    pub seen: Seen,
}

/// What a home has seen of a page.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Seen {
    /// When the window began, and transfers in it.
    pub window: (u64, u32),
    /// Nodes that asked for it in this window.
    pub nodes: NodeSet,
    /// Requests in this window that told of few changed bytes.
    pub small: u32,
    /// Whether an atomic instruction wanted it in this window.
    pub atomic: bool,
    /// When the mode last changed.
    pub changed_at: Option<u64>,
    /// The last request: who, and whether to read.
    pub last: Option<(NodeId, bool)>,
    /// How often a node that read was the next to write.
    pub migrations: u8,
}
