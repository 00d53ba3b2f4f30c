//! Messages between nodes.
//!
//! ```text
//! read miss     reader ─Request─▶ home ─Request─▶ owner ─Grant─▶ reader
//! write miss    writer ─Request─▶ home ─Request─▶ owner ─Grant─▶ writer
//!                                                 owner ─Invalidate─▶ every copy ─InvalidateAck─▶ writer
//! upgrade       owner ─Invalidate─▶ every copy ─InvalidateAck─▶ owner
//! store         writer ─Operate─▶ sequencer ─Update─▶ every copy, the writer among them
//! ```
//!
//! Links keep the order of messages and lose none.

use crate::names::{Mode, NodeId, NodeSet, Page, Priority, Vcpu};
use crate::operation::{Change, Operation};
use crate::payload::Payload;

/// Place of an update in the total order of all updates. The first is 1.
pub type Seq = u64;

/// The causal dependency of a message: updates that come before it. Every message has one ("Memory order" in docs/design/dsm.md).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// The latest update that the sender knows, from its own state or from messages that it acted on.
    pub seq: Seq,
    /// The receiver must have applied all updates addressed to it up to this one. It equals `seq` unless the sender is the sequencer, which
    /// knows the last update for each receiver.
    pub need: Seq,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// The sender.
    pub from: NodeId,
    /// The receiver.
    pub to: NodeId,
    /// The causal dependency.
    pub stamp: Stamp,
    /// The page that the message concerns; 0 if it concerns none.
    pub page: Page,
    /// The content.
    pub body: Body,
}

/// Kind and content of a message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// Requests a page. The home forwards it to the owner.
    Request(Request),
    /// The owner grants the page.
    Grant(Grant),
    /// Tells the receiver to drop its copy and to answer `writer`.
    Invalidate {
        /// The node that waits for `InvalidateAck`.
        writer: NodeId,
        /// Age of the instruction that requests to write.
        priority: Priority,
        /// The copy is one of a write-update page.
        updated: bool,
    },
    /// The copy is dropped.
    InvalidateAck,
    /// An older instruction waits behind a younger one. The home forwards this to all nodes.
    Hurry {
        /// Age of the older instruction.
        priority: Priority,
    },
    /// An operation for the sequencer.
    Operate {
        /// The node that issued the operation.
        requester: NodeId,
        /// The vCPU that waits for it there.
        vcpu: Vcpu,
        /// The store or atomic.
        operation: Operation,
    },
    /// A sequenced update. The stamp's `seq` is its place, `need` the update before it for this receiver.
    Update {
        /// The bytes to write.
        change: Change,
        /// For the node that issued the operation: its vCPU, and the value before.
        done: Option<(Vcpu, u64)>,
    },
    /// An operation that changed nothing is complete.
    Done {
        /// The vCPU that waits.
        vcpu: Vcpu,
        /// The value before.
        old: u64,
    },
    /// The page isn't write-update any more: the vCPU must execute the instruction again.
    Refuse {
        /// The vCPU that waits.
        vcpu: Vcpu,
    },
    /// Requests a [`Body::Tick`] from the sequencer.
    Sync {
        /// The node to answer.
        requester: NodeId,
    },
    /// Carries only its stamp: the last update for this receiver.
    Tick,
    /// Reports applied updates, for the sequencer's window.
    Applied {
        /// The node that applied them.
        node: NodeId,
        /// Updates applied since its previous report.
        count: u64,
    },
    /// A node requests to leave: it drops its copy of a write-update page.
    Leave {
        /// The node that leaves.
        node: NodeId,
        /// The node has applied all updates addressed to it up to this one. If a later one was addressed to it, the copy may be a newer
        /// one, and the
        /// sequencer refuses.
        seq: Seq,
    },
    /// The sequencer's answer to `Leave`.
    Left {
        /// The `seq` of the `Leave`.
        seq: Seq,
        /// The sequencer refuses: the node still gets updates of the page.
        stays: bool,
    },
    /// Requests another mode. The home forwards it to the sequencer.
    Advise {
        /// The requested mode.
        mode: Mode,
    },
    /// The sequencer ended write-update and owns the page. To the home.
    Reverted,
    /// The home has recorded `Reverted`.
    RevertedAck,
    /// The sequencer's role and its state.
    Token(Token),
    /// A store in the scheme of the vNUMA paper, applied on arrival. Not for x86 guests.
    Weak {
        /// Number of stores to this page that its writer has sent.
        counter: u64,
        /// The bytes to write.
        change: Change,
    },
}

/// Rights that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Intent {
    /// To read.
    Read,
    /// To read and become the owner. The old owner keeps a copy.
    ReadOwn,
    /// To write.
    Write,
}

/// A request for a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// The node that requests the page.
    pub requester: NodeId,
    /// The requested rights.
    pub intent: Intent,
    /// Age of the instruction.
    pub priority: Priority,
    /// Version of the content that the requester has kept.
    pub held: Option<u64>,
    /// The home forwarded it as a request for a write-update page.
    pub as_update: bool,
    /// The sequencer requests the page to make it write-update.
    pub convert: bool,
    /// The instruction is atomic.
    pub atomic: bool,
    /// Bytes that had changed when the page last arrived at the requester; [`UNKNOWN_CHANGE`] if it doesn't know.
    pub changed: u16,
}

/// Value of [`Request::changed`] when the number of changed bytes is unknown.
pub const UNKNOWN_CHANGE: u16 = u16::MAX;

/// A page from its owner.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The granted rights.
    pub intent: Intent,
    /// Mode of the page from now on. In a write-update mode, the content has all updates up to the stamp's `seq`.
    pub mode: Mode,
    /// Version of the content.
    pub version: u64,
    /// With [`Intent::Write`]: nodes with copies, which answer an invalidation. With [`Intent::ReadOwn`]: nodes with copies from now on.
    /// Else
    /// empty.
    pub copies: NodeSet,
    /// The content.
    pub payload: Payload,
    /// In the scheme of the vNUMA paper, the stores of each node that the content has; else empty.
    pub counters: Vec<u64>,
}

/// The sequencer's role and its state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Token {
    /// For each node, the last update addressed to it.
    pub last: Vec<Seq>,
    /// For each node, the updates that it hasn't reported as applied.
    pub unacked: Vec<u64>,
    /// All write-update pages with their modes and copysets.
    pub pages: Vec<(Page, Mode, NodeSet)>,
}

impl Body {
    /// Name of the kind of message, for counters and logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Request(_) => "request",
            Self::Grant(_) => "grant",
            Self::Invalidate { .. } => "invalidate",
            Self::InvalidateAck => "invalidate-ack",
            Self::Hurry { .. } => "hurry",
            Self::Operate { .. } => "operate",
            Self::Update { .. } => "update",
            Self::Done { .. } => "done",
            Self::Refuse { .. } => "refuse",
            Self::Sync { .. } => "sync",
            Self::Tick => "tick",
            Self::Applied { .. } => "applied",
            Self::Leave { .. } => "leave",
            Self::Left { .. } => "left",
            Self::Advise { .. } => "advise",
            Self::Reverted => "reverted",
            Self::RevertedAck => "reverted-ack",
            Self::Token(_) => "token",
            Self::Weak { .. } => "weak",
        }
    }
}

impl Message {
    /// Whether the message belongs to the stream of updates. `need` orders these messages for any sender, and they never wait behind other
    /// messages.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        match &self.body {
            Body::Update { .. } | Body::Tick | Body::Token(_) => true,
            Body::Grant(grant) => grant.mode.is_update(),
            _ => false,
        }
    }
}
