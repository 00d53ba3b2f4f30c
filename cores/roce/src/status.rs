//! Completion status, and errors of a responder (IBTA volume 1, 9.9).

use crate::packet::Syndrome;

/// Completion status; the numbers are those of verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u32)]
pub enum Status {
    /// The operation is complete, without error.
    Success = 0,
    /// Local length error.
    LocalLength = 1,
    /// Local QP operation error.
    LocalQpOperation = 2,
    /// Local protection error.
    LocalProtection = 4,
    /// Not executed or not known to be: the connection has failed or was closed (`IBV_WC_WR_FLUSH_ERR`).
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

/// Why a responder refuses a request. A reliable one sends the NAK and fails; an unreliable one drops the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Refusal {
    /// The operation is invalid, or not permitted on this queue pair. NAK invalid request.
    InvalidRequest,
    /// Wrong key, range, or permission of the region. NAK remote access error.
    Access,
    /// An error of the responder itself. NAK remote operational error.
    Operation,
    /// The guest memory of the request is not present (post-copy). The packet counts as lost; the responder requests it again after
    /// [`crate::Connection::memory_came`]. No NAK until then, and neither side fails.
    NotHere,
    /// The queue pair is gone, suspended, or in a state that accepts no requests. The packet counts as lost: no NAK, and neither side fails
    /// (IBTA volume 1, 10.3.1: inbound packets are silently dropped in the states Reset, Init and Error).
    Gone,
}

impl Refusal {
    /// The NAK's syndrome; `None` when no NAK is sent.
    #[must_use]
    pub fn syndrome(self) -> Option<Syndrome> {
        match self {
            Self::InvalidRequest => Some(Syndrome::InvalidRequest),
            Self::Access => Some(Syndrome::AccessError),
            Self::Operation => Some(Syndrome::OperationalError),
            Self::Gone | Self::NotHere => None,
        }
    }

    /// The event for the responder's owner, if any.
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
    /// Fails with this status; the function that returns it defines what follows.
    Failed(Status),
    /// The guest's memory is not present. The connection waits for [`crate::Connection::memory_came`], and nothing fails.
    NotHere,
}

impl From<Status> for Unmoved {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

/// Why no receive can be consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoReceive {
    /// None is posted. The responder sends an RNR NAK; an unreliable one drops the message.
    NotPosted,
    /// The receive or its queue is unusable. NAK remote operational error; the connection fails, an unreliable one as well.
    Unusable,
    /// As [`Refusal::Gone`].
    Gone,
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The first packet of the peer was accepted.
    Established,
    /// A request was refused as invalid (QP_REQ_ERR).
    RequestError,
    /// A request was refused for lack of permission (QP_ACCESS_ERR).
    AccessError,
    /// A request failed by an error of this end (QP_FATAL).
    Fatal,
    /// The connection has failed. It accepts no requests, and all posted ones are complete. The last event, and sent once.
    Failed,
    /// The send side of an unreliable connection has failed; the receive side still works.
    SendFailed,
}
