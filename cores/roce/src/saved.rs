//! The saved state of a connection: types of their own, apart from those at run time. Times are relative to the moment of saving,
//! since clocks differ between hosts. Restoring is [`crate::Connection::restore`].
//!
//! Version rule: a field that is added has a default; anything else is a new [`VERSION`], and the old types stay.

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::connection::State;
use crate::counters::Counters;
use crate::memory::Remote;
use crate::request::Request;
use crate::status::Status;

/// Version of these types.
pub const VERSION: u32 = 1;

/// A connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// [`VERSION`].
    pub version: u32,
    /// Attributes.
    pub config: Config,
    /// Whether it works.
    pub state: State,
    /// Whether it was held.
    pub suspended: bool,
    /// What it sends.
    pub requester: Requester,
    /// What it receives.
    pub responder: Responder,
    /// Congestion control's sender side, if it is on.
    pub sender: Option<Sender>,
    /// A congestion notification is due.
    pub notify: bool,
    /// Nanoseconds until the next one may be sent.
    pub next_notification: u64,
    /// Counters.
    #[serde(default)]
    pub counters: Counters,
}

/// What a connection sends. PSNs are extended: their low 24 bits are those on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Requester {
    /// Requests that are not complete, oldest first.
    pub queue: Vec<Pending>,
    /// PSN of the oldest request in the queue, or that the next one gets.
    pub first: u64,
    /// Oldest PSN without acknowledgement.
    pub una: u64,
    /// Next PSN to be sent.
    pub next: u64,
    /// First PSN that was never sent.
    pub sent: u64,
    /// Local requests that are executed, or passed again, before `next`.
    pub cursor: u32,
    /// Packets that may be unacknowledged now.
    pub limit: u32,
    /// Packets acknowledged since that was last changed.
    pub grown: u32,
    /// PSN that ends the losses which it was lowered for.
    pub cut_at: u64,
    /// Where `una` stood when the requester last went back.
    pub went_back: Option<u64>,
    /// Retransmissions without progress.
    pub retries: u32,
    /// Of these, by timeout.
    pub timeouts: u32,
    /// Waits for a receive without progress.
    pub rnr_waits: u32,
    /// Nanoseconds left to wait for a receive.
    pub rnr_wait: Option<u64>,
    /// Nanoseconds until the acknowledgement is overdue.
    pub deadline: Option<u64>,
}

/// A request that is not complete.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pending {
    /// The request.
    pub request: Request,
    /// How it will end.
    pub error: Option<Status>,
    /// A local one that is done.
    pub executed: bool,
}

/// What a connection receives.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Responder {
    /// PSN expected next.
    pub expected: u64,
    /// Completed requests, 24 bits.
    pub msn: u32,
    /// The message that is coming in.
    pub incoming: Incoming,
    /// READs and atomics that can be asked for again, oldest first.
    pub resources: Vec<Resource>,
    /// What is to be said behind their answers.
    pub tail: Tail,
    /// A NAK was sent for the expected packet.
    pub nak_sent: bool,
    /// An RNR NAK was sent for it.
    pub awaits_receive: bool,
    /// Whether a packet was accepted yet.
    pub established: bool,
    /// Syndrome and PSN of the NAK that ended it.
    pub refused: Option<(u8, u64)>,
}

/// A message that is coming in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Incoming {
    /// None.
    None,
    /// A SEND; its receive is in use.
    Send {
        /// Bytes received.
        offset: u64,
        /// Bytes that fit.
        capacity: u64,
    },
    /// A WRITE.
    Write {
        /// Where it begins.
        remote: Remote,
        /// Its length.
        length: u32,
        /// Bytes received.
        offset: u64,
    },
    /// One that is dropped up to its end.
    Drop,
}

/// A READ or atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Resource {
    /// Its PSN.
    pub first: u64,
    /// How many PSNs it has.
    pub packets: u32,
    /// What it is answered with.
    pub answer: Answer,
    /// Whether the whole answer has left once.
    pub answered: bool,
    /// Whether the answer is to be sent.
    pub due: bool,
}

/// What a READ or atomic is answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Answer {
    /// Memory.
    Read {
        /// From where.
        remote: Remote,
        /// How much.
        length: u32,
        /// Packet that is next.
        next: u32,
        /// Packet that the present run began with.
        start: u32,
    },
    /// The value before.
    Atomic {
        /// It.
        original: u64,
    },
}

/// What is said behind the answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tail {
    /// Nothing.
    Nothing,
    /// Everything accepted is acknowledged.
    Ack,
    /// Everything up to this PSN is.
    AckUpTo(u64),
    /// A NAK.
    Nak {
        /// Its syndrome.
        syndrome: u8,
        /// Its PSN.
        psn: u64,
    },
}

/// The sender side of congestion control.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sender {
    /// Bytes per second.
    pub rate: f64,
    /// Bytes per second.
    pub target: f64,
    /// Estimate of congestion.
    pub alpha: f64,
    /// Nanoseconds since the estimate was brought up to date.
    pub estimated: u64,
    /// Nanoseconds since the last step by time.
    pub increased: u64,
    /// Bytes since the last step by bytes.
    pub bytes: u64,
    /// Steps by time.
    pub time_steps: u32,
    /// Steps by bytes.
    pub byte_steps: u32,
    /// Nanoseconds until the next packet may leave.
    pub next: u64,
}

/// Why a saved state can't be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidState {
    /// Another version.
    #[error("The saved connection has version {0}, this program knows {VERSION}")]
    Version(u32),
    /// The attributes.
    #[error("The saved connection's attributes can't be used")]
    Config(#[from] crate::config::InvalidConfig),
    /// Something that no connection's state can be.
    #[error("The saved connection has an impossible {0}")]
    Field(&'static str),
}
