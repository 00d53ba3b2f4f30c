//! What nodes say to each other.
//!
//! ```text
//! read miss     reader ─Request─▶ home ─Request─▶ owner ─Grant─▶ reader
//! write miss    writer ─Request─▶ home ─Request─▶ owner ─Grant─▶ writer
//!                                                 owner ─Invalidate─▶ every copy ─InvalidateAck─▶ writer
//! upgrade       owner ─Invalidate─▶ every copy ─InvalidateAck─▶ owner
//! store         writer ─Operate─▶ holder of the token ─Update─▶ every copy, the writer among them
//! ```
//!
//! Links keep the order of messages and lose none (a connection of a stream protocol).

use crate::names::{Mode, NodeId, NodeSet, Page, Priority, Vcpu};
use crate::operation::{Change, Operation};
use crate::payload::Payload;

/// Place of an update in the one order of all updates; the first is 1.
pub type Seq = u64;

/// What a message says about updates that came before it. Every message has one (spec dsm, section 5, the stamp rule).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// The latest update that the sender knows of, by itself or by messages that it acted on.
    pub seq: Seq,
    /// The receiver must have applied all updates up to this one that are addressed to it. The same as `seq` unless the sender
    /// holds the token, and so knows which update was the last one for this receiver.
    pub need: Seq,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// Who sends it.
    pub from: NodeId,
    /// Who gets it.
    pub to: NodeId,
    /// What came before it.
    pub stamp: Stamp,
    /// The page that it is about; 0 when it is about none.
    pub page: Page,
    /// What it says.
    pub body: Body,
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// A node wants a page; to its home, which passes it on to the owner.
    Request(Request),
    /// The owner gives it.
    Grant(Grant),
    /// The copy has to go; the answer goes to `writer`.
    Invalidate {
        /// Who waits for the answer.
        writer: NodeId,
        /// Age of the instruction that wants to write.
        priority: Priority,
        /// It is a copy that updates are sent to.
        updated: bool,
    },
    /// The copy is gone.
    InvalidateAck,
    /// An older instruction waits behind a younger one; to the home, which tells all nodes.
    Hurry {
        /// Its age.
        priority: Priority,
    },
    /// An operation for the holder of the token.
    Operate {
        /// Whose operation it is.
        requester: NodeId,
        /// Which of its virtual CPUs waits.
        vcpu: Vcpu,
        /// What is to be done.
        operation: Operation,
    },
    /// A sequenced update; its own place is the `seq` of the stamp, the one before it for this receiver is `need`.
    Update {
        /// What changes.
        change: Change,
        /// For the node whose operation it was: the virtual CPU, and the value before.
        done: Option<(Vcpu, u64)>,
    },
    /// An operation that changed nothing is done.
    Done {
        /// Which virtual CPU waits.
        vcpu: Vcpu,
        /// The value before.
        old: u64,
    },
    /// The page isn't kept by updates any more; the instruction has to be carried out again.
    Refuse {
        /// Which virtual CPU waits.
        vcpu: Vcpu,
    },
    /// Asks the holder of the token for a [`Body::Tick`].
    Sync {
        /// Who asks.
        requester: NodeId,
    },
    /// Says nothing but its stamp: what was the last update for this receiver.
    Tick,
    /// A node has applied so many more updates. For the window of the sequencer.
    Applied {
        /// Who.
        node: NodeId,
        /// How many since it last said so.
        count: u64,
    },
    /// A node gives up its copy of a page that is kept by updates.
    Leave {
        /// Who.
        node: NodeId,
        /// It has applied all updates addressed to it up to this one. If a later one is addressed to it, the copy has been renewed,
        /// perhaps, and stays.
        seq: Seq,
    },
    /// The answer.
    Left {
        /// From the question.
        seq: Seq,
        /// It goes on getting updates of that page.
        stays: bool,
    },
    /// A wish for another mode; to the home, which passes it on to the holder of the token.
    Advise {
        /// The mode.
        mode: Mode,
    },
    /// The holder of the token ended the update mode and owns the page; to the home.
    Reverted,
    /// The home knows.
    RevertedAck,
    /// The right to sequence, and what goes with it.
    Token(Token),
    /// A store of the paper's own scheme, applied when it arrives. Not for x86 guests.
    Weak {
        /// How many stores to this page its writer has sent.
        counter: u64,
        /// What changes.
        change: Change,
    },
}

/// What a node wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Intent {
    /// To read.
    Read,
    /// To read and become the owner; the old owner keeps a copy.
    ReadOwn,
    /// To write.
    Write,
}

/// A node wants a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// Who.
    pub requester: NodeId,
    /// What for.
    pub intent: Intent,
    /// Age of the instruction.
    pub priority: Priority,
    /// Version of the content that it has kept.
    pub held: Option<u64>,
    /// The home took the page for one that is kept by updates.
    pub as_update: bool,
    /// The holder of the token wants it, to keep it by updates from then on.
    pub convert: bool,
    /// The instruction is atomic.
    pub atomic: bool,
    /// How many bytes had changed when the page last came to this node; [`UNKNOWN_CHANGE`] when it doesn't know.
    pub changed: u16,
}

/// The number of changed bytes is not known.
pub const UNKNOWN_CHANGE: u16 = u16::MAX;

/// The owner gives a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// To read, to own, to write.
    pub intent: Intent,
    /// How it is kept from now on. In an update mode, the content has all updates up to the `seq` of the stamp.
    pub mode: Mode,
    /// Version of the content.
    pub version: u64,
    /// To write: who has copies, and answers an invalidation. To own: who has copies from now on. Else empty.
    pub copies: NodeSet,
    /// The content.
    pub payload: Payload,
    /// Stores of each node that the content has, in the paper's scheme; else empty.
    pub counters: Vec<u64>,
}

/// The right to sequence updates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Token {
    /// For each node the last update that was addressed to it.
    pub last: Vec<Seq>,
    /// For each node how many updates it hasn't said to have applied.
    pub unacked: Vec<u64>,
    /// All pages that are kept by updates, their modes, and who has copies.
    pub pages: Vec<(Page, Mode, NodeSet)>,
}

impl Body {
    /// What kind of message it is, in a word.
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
    /// Whether it belongs to the stream of updates: `need` puts these in order, whoever sends them, and they never wait behind
    /// other messages.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        match &self.body {
            Body::Update { .. } | Body::Tick | Body::Token(_) => true,
            Body::Grant(grant) => grant.mode.is_update(),
            _ => false,
        }
    }
}
