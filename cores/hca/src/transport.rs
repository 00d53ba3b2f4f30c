//! What the engine passes to transports: actions, and the requests and datagrams in them.

use crate::names::{DeviceId, Gid, QpHandle, Qpn, SegmentId};
use crate::objects::QpRef;
use crate::work::{Datagram, Remote};

/// Identifier of a queue pair for transports. Never reused, so the identifier of a destroyed queue pair finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpId {
    /// Its device.
    pub device: DeviceId,
    /// Its handle.
    pub handle: QpHandle,
    stamp: u64,
    /// Number of times that it has left RESET: another incarnation is another connection.
    incarnation: u32,
}

impl QpId {
    pub(crate) fn new(device: DeviceId, handle: QpHandle, stamp: u64, incarnation: u32) -> Self {
        Self { device, handle, stamp, incarnation }
    }

    pub(crate) fn incarnation(self) -> u32 {
        self.incarnation
    }

    pub(crate) fn at(self) -> QpRef {
        QpRef { device: self.device.0, handle: self.handle.0, stamp: self.stamp }
    }
}

/// The operation of a posted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostedOperation {
    /// A SEND: consumes a receive of the peer.
    Send {
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
        /// The peer's key to invalidate.
        invalidate: Option<u32>,
    },
    /// A WRITE: consumes a receive of the peer only with immediate data.
    Write {
        /// Remote address and key.
        remote: Remote,
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
    },
    /// A READ: [`Posted::length`] bytes from the peer's memory.
    Read {
        /// Remote address and key.
        remote: Remote,
    },
    /// Compare and swap.
    CompareSwap {
        /// Remote address and key of the word.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add.
    FetchAdd {
        /// Remote address and key of the word.
        remote: Remote,
        /// The addend.
        add: u64,
    },
}

/// A request for a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// Identifier in [`Engine::remote_gather`](crate::engine::Engine::remote_gather), [`Engine::remote_place`](crate::engine::Engine::remote_place) and [`Engine::remote_complete`](crate::engine::Engine::remote_complete); increases by one per request.
    pub token: u64,
    /// The operation.
    pub operation: PostedOperation,
    /// Bytes of the message; 8 for atomics.
    pub length: u32,
    /// Waits for earlier READs and atomics.
    pub fence: bool,
    /// Raises a solicited event at the peer.
    pub solicited: bool,
}

/// An action for a transport. Actions of a queue pair must be executed in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send a request of a connected queue pair to its peer.
    Post {
        /// Queue pair.
        qp: QpId,
        /// The request, whose token increases by one per request of the queue pair.
        request: Posted,
    },
    /// Send a datagram; nothing waits for it.
    Datagram(Box<OutgoingDatagram>),
    /// A receive was posted after [`Refusal::NotReady`](crate::remote::Refusal::NotReady).
    ReceivePosted {
        /// Queue pair.
        qp: QpId,
    },
    /// The not-present guest memory of a message of a connected queue pair ([`Refusal::NotHere`](crate::remote::Refusal::NotHere), [`Unmoved::NotHere`](crate::remote::Unmoved::NotHere)) has arrived.
    MemoryCame {
        /// Queue pair.
        qp: QpId,
    },
    /// The connection is closed: the queue pair was reset, failed, or is gone. The transport may still send pending responses.
    Closed {
        /// Queue pair.
        qp: QpId,
    },
    /// A region that the transport has registered ([`Engine::remote_region`](crate::engine::Engine::remote_region)) is gone: its memory must not be accessed any more.
    RegionGone {
        /// Device that owns the region.
        device: DeviceId,
        /// Key of the region.
        key: u32,
    },
}

/// A datagram to send: a copy, independent of the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingDatagram {
    /// Sending queue pair.
    pub qp: QpId,
    /// Segment that it is sent in.
    pub segment: SegmentId,
    /// The sender's queue pair number; the general services queue pair sends as 1.
    pub source_qpn: Qpn,
    /// The sender's address.
    pub source_gid: Gid,
    /// The sender's MAC.
    pub source_mac: [u8; 6],
    /// Destination, with the Q_Key to send.
    pub to: Datagram,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// Raises a solicited event.
    pub solicited: bool,
    /// Payload, at most the port's MTU.
    pub payload: Vec<u8>,
}
