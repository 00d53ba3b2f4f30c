//! The saved state of a connection: types of their own, separate from those at run time. Times are relative to the moment of saving, since
//! clocks differ between hosts. [`crate::Connection::restore`] restores it.
//!
//! Version rule: an added field has a default; any other change is a new [`VERSION`], and the old types stay.

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
    /// Layout of this type: [`VERSION`].
    pub version: u32,
    /// Attributes in force when it was saved.
    pub config: Config,
    /// Whether it is usable.
    pub state: State,
    /// Whether it was suspended.
    pub suspended: bool,
    /// State of the requester.
    pub requester: Requester,
    /// State of the responder.
    pub responder: Responder,
    /// Congestion control's sender side, if it is on.
    pub sender: Option<Sender>,
    /// A congestion notification is due.
    pub notify: bool,
    /// Nanoseconds until the next one may be sent.
    pub next_notification: u64,
    /// Counts since the connection was created.
    #[serde(default)]
    pub counters: Counters,
}

/// State of the requester. PSNs are extended: their low 24 bits are those on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Requester {
    /// Requests that are not complete, oldest first.
    pub queue: Vec<Pending>,
    /// PSN of the oldest request in the queue, or of the next one if it is empty.
    pub first: u64,
    /// Oldest PSN without acknowledgement.
    pub una: u64,
    /// Next PSN to be sent.
    pub next: u64,
    /// First PSN that was never sent.
    pub sent: u64,
    /// Local requests that are executed, or that retransmission passes again, before `next`.
    pub cursor: u32,
    /// Current limit of unacknowledged packets.
    pub limit: u32,
    /// Packets acknowledged since the limit last changed.
    pub grown: u32,
    /// PSN at which the losses end for which the limit was lowered.
    pub cut_at: u64,
    /// Where `una` stood when the requester last went back.
    pub went_back: Option<u64>,
    /// Retransmissions without progress.
    pub retries: u32,
    /// Those caused by a timeout.
    pub timeouts: u32,
    /// RNR waits without progress.
    pub rnr_waits: u32,
    /// Nanoseconds left of the RNR wait.
    pub rnr_wait: Option<u64>,
    /// Nanoseconds until the ACK timeout expires.
    pub deadline: Option<u64>,
}

/// A request that is not complete.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pending {
    /// The request.
    pub request: Request,
    /// Its status, if it is known to fail.
    pub error: Option<Status>,
    /// A local request was executed.
    pub executed: bool,
}

/// State of the responder.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Responder {
    /// Next expected PSN.
    pub expected: u64,
    /// Completed requests, 24 bits.
    pub msn: u32,
    /// The message in progress.
    pub incoming: Incoming,
    /// READs and atomics that the peer may repeat, oldest first.
    pub resources: Vec<Resource>,
    /// The acknowledgement or NAK to send after their responses.
    pub tail: Tail,
    /// A NAK was sent for the expected packet.
    pub nak_sent: bool,
    /// An RNR NAK was sent for it.
    pub awaits_receive: bool,
    /// Whether a packet was accepted yet.
    pub established: bool,
    /// Syndrome and PSN of the NAK that ended the connection.
    pub refused: Option<(u8, u64)>,
}

/// A message in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Incoming {
    /// No message has begun.
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
        /// Remote address and key of its start.
        remote: Remote,
        /// Length in bytes.
        length: u32,
        /// Bytes received.
        offset: u64,
    },
    /// A message that is dropped up to its end.
    Drop,
}

/// A READ or atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Resource {
    /// PSN of its first packet.
    pub first: u64,
    /// Number of its PSNs.
    pub packets: u32,
    /// The response.
    pub answer: Answer,
    /// Whether the whole response was sent once.
    pub answered: bool,
    /// Whether the response is to be sent.
    pub due: bool,
}

/// The response of a READ or atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Answer {
    /// READ: memory.
    Read {
        /// Remote address and key.
        remote: Remote,
        /// Length in bytes.
        length: u32,
        /// Index of the next packet.
        next: u32,
        /// Index of the first packet of the current run.
        start: u32,
    },
    /// Atomic: the previous value.
    Atomic {
        /// The previous value.
        original: u64,
    },
}

/// The acknowledgement or NAK after the responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tail {
    /// No acknowledgement is due.
    Nothing,
    /// Acknowledges everything accepted.
    Ack,
    /// Acknowledges everything up to this PSN.
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
    /// Current rate, bytes per second.
    pub rate: f64,
    /// Target rate, bytes per second.
    pub target: f64,
    /// Estimate of congestion.
    pub alpha: f64,
    /// Nanoseconds since the estimate was updated.
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
    /// A version other than [`VERSION`].
    #[error("The saved connection has version {0}, this program knows {VERSION}")]
    Version(u32),
    /// Invalid attributes.
    #[error("The saved connection's attributes can't be used")]
    Config(#[from] crate::config::InvalidConfig),
    /// The named field is out of range or contradicts another.
    #[error("The saved connection has an impossible {0}")]
    Field(&'static str),
}
