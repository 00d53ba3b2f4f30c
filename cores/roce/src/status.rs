//! How requests end, and what can go wrong at a responder (spec rocev2 sections 9 and 14).

use crate::packet::Syndrome;

/// Completion status; the numbers are those of verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Success = 0,
    /// Local length error.
    LocalLength = 1,
    /// Local QP operation error.
    LocalQpOperation = 2,
    /// Local protection error.
    LocalProtection = 4,
    /// Flushed.
    Flushed = 5,
    /// Memory window bind or fast registration error.
    MemoryBind = 6,
    /// Bad response.
    BadResponse = 7,
    /// Local access error.
    LocalAccess = 8,
    /// Remote invalid request.
    RemoteInvalidRequest = 9,
    /// Remote access error.
    RemoteAccess = 10,
    /// Remote operation error.
    RemoteOperation = 11,
    /// Transport retry counter exceeded.
    RetryExceeded = 12,
    /// RNR retry counter exceeded.
    RnrRetryExceeded = 13,
    /// General error.
    General = 21,
}

/// Why a responder refuses a request. A reliable one answers with the NAK and fails; an unreliable one drops the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Refusal {
    /// The operation isn't permitted on this queue pair, or makes no sense. NAK invalid request.
    InvalidRequest,
    /// Key, range, or permission of the region. NAK remote access error.
    Access,
    /// The responder itself is at fault. NAK remote operational error.
    Operation,
    /// The guest's memory that it is about is still to come: the packet counts as lost, and is asked for again after
    /// [`crate::Connection::memory_came`]. No NAK until then, and nobody fails.
    NotHere,
    /// The queue pair is gone, in a state that takes no requests, or held: the packet counts as lost. No NAK, and nobody fails (InfiniBand
    /// 1.7, 10.3.1: inbound packets are silently dropped in the states Reset, Init and Error).
    Gone,
}

impl Refusal {
    /// How the requester is told; `None`: it isn't.
    #[must_use]
    pub fn syndrome(self) -> Option<Syndrome> {
        match self {
            Self::InvalidRequest => Some(Syndrome::InvalidRequest),
            Self::Access => Some(Syndrome::AccessError),
            Self::Operation => Some(Syndrome::OperationalError),
            Self::Gone | Self::NotHere => None,
        }
    }

    /// What the responder's owner is told.
    #[must_use]
    pub fn event(self) -> Option<Event> {
        match self {
            Self::InvalidRequest => Some(Event::RequestError),
            Self::Access => Some(Event::AccessError),
            Self::Operation => Some(Event::Fatal),
            Self::Gone | Self::NotHere => None,
        }
    }
}

/// Why bytes can't be gathered or placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmoved {
    /// With this status; what that means is said where it is returned.
    Failed(Status),
    /// The guest's memory is still to come: nothing happens until [`crate::Connection::memory_came`], and nothing fails.
    NotHere,
}

impl From<Status> for Unmoved {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

/// Why no receive can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoReceive {
    /// None is posted. RNR NAK; unreliable messages are dropped.
    NotPosted,
    /// It, or the queue, is unusable. NAK remote operational error, and the connection fails, an unreliable one as well.
    Unusable,
    /// As [`Refusal::Gone`].
    Gone,
}

/// What happened besides completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The first packet of the peer that was accepted.
    Established,
    /// A request was refused as invalid (QP_REQ_ERR).
    RequestError,
    /// A request was refused for lack of permission (QP_ACCESS_ERR).
    AccessError,
    /// A request failed since the own side is at fault (QP_FATAL).
    Fatal,
    /// The connection has failed: it takes no requests, and all that it had are complete. Comes last, and once.
    Failed,
    /// The send side of an unreliable connection has failed; the receive side goes on.
    SendFailed,
}
