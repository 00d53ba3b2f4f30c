//! Requests of a connection, and why it refuses one.

use serde::{Deserialize, Serialize};

use crate::memory::Remote;
use crate::status::Status;

/// Limit of a message's length, bytes.
pub const MOST_MESSAGE: u32 = 1 << 31;

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// SEND, with at most one of the options.
    Send {
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
        /// The key that the responder invalidates.
        invalidate: Option<u32>,
    },
    /// RDMA WRITE.
    Write {
        /// Remote address and key.
        remote: Remote,
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
    },
    /// RDMA READ.
    Read {
        /// Remote address and key.
        remote: Remote,
    },
    /// Compare and swap of 8 bytes.
    CompareSwap {
        /// Remote address and key of the word.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add of 8 bytes.
    FetchAdd {
        /// Remote address and key of the word.
        remote: Remote,
        /// The addend.
        add: u64,
    },
    /// A request that the peer doesn't see, in order with the others: it registers or invalidates memory. [`crate::Memory::execute_local`]
    /// executes it when all earlier requests have been sent once.
    Local {
        /// Executes only when all earlier requests are complete.
        wait: bool,
    },
    /// A request that is known to fail, in order with the others: malformed, or without memory.
    Failed(Status),
}

/// A request. Its payload stays with the caller, and [`crate::Memory::gather`] finds it by `token`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    /// The caller's identifier of the request.
    pub token: u64,
    /// The operation.
    pub kind: Kind,
    /// Bytes of the message; treated as 8 for atomics, and as 0 for local requests.
    pub length: u32,
    /// Raises a solicited event at the receiver.
    pub solicited: bool,
    /// Waits until earlier READs and atomics are complete.
    pub fence: bool,
}

impl Request {
    /// A request without flags.
    #[must_use]
    pub fn new(token: u64, kind: Kind, length: u32) -> Self {
        Self { token, kind, length, solicited: false, fence: false }
    }
}

/// Why [`crate::Connection::post`] refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The send queue is full.
    #[error("The connection's queue is full")]
    Full,
    /// The connection has failed; the caller flushes the request.
    #[error("The connection has failed and takes no requests")]
    Failed,
    /// Longer than [`MOST_MESSAGE`].
    #[error("A message of {0} bytes is longer than 2^31")]
    TooLong(u32),
    /// Not supported by this kind of connection.
    #[error("The kind of connection doesn't offer this operation")]
    Unsupported,
}
