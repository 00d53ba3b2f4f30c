//! What a connection is asked to send.

use serde::{Deserialize, Serialize};

use crate::memory::Remote;
use crate::status::Status;

/// Bytes of a message at most.
pub const MOST_MESSAGE: u32 = 1 << 31;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// SEND. Not both of the options.
    Send {
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
        /// The key that the receiver's side invalidates.
        invalidate: Option<u32>,
    },
    /// RDMA WRITE.
    Write {
        /// Where to.
        remote: Remote,
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
    },
    /// RDMA READ.
    Read {
        /// Where from.
        remote: Remote,
    },
    /// Compare and swap of 8 bytes.
    CompareSwap {
        /// Which word.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add of 8 bytes.
    FetchAdd {
        /// Which word.
        remote: Remote,
        /// What is added.
        add: u64,
    },
    /// Nothing that the peer sees, in its place among the others: registering or invalidating memory. Done by
    /// [`crate::Memory::execute_local`] when all requests before it have been sent once.
    Local {
        /// Only when all requests before it are complete.
        wait: bool,
    },
    /// A request that is known to fail, in its place among the others: malformed, or without memory.
    Failed(Status),
}

/// A request. Its payload stays with the caller, who is asked for it by `token`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    /// The caller's name for it.
    pub token: u64,
    /// What to do.
    pub kind: Kind,
    /// Bytes of the message; taken as 8 for atomics, and as 0 for local ones.
    pub length: u32,
    /// Raises a solicited event at the receiver.
    pub solicited: bool,
    /// Waits for earlier READs and atomics.
    pub fence: bool,
}

impl Request {
    /// A request without flags.
    #[must_use]
    pub fn new(token: u64, kind: Kind, length: u32) -> Self {
        Self { token, kind, length, solicited: false, fence: false }
    }
}

/// Why a request isn't taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// As many requests as there is room for wait already.
    #[error("The connection's queue is full")]
    Full,
    /// The connection has failed; the caller flushes.
    #[error("The connection has failed and takes no requests")]
    Failed,
    /// Longer than a message can be.
    #[error("A message of {0} bytes is longer than 2^31")]
    TooLong(u32),
    /// The kind of connection doesn't offer it.
    #[error("The kind of connection doesn't offer this operation")]
    Unsupported,
}
