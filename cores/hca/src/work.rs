//! Work requests and completions. A provider makes a request from ONE read of guest memory, so later stores of the guest to its ring change
//! nothing here.

use smallvec::SmallVec;

use crate::names::{CqHandle, Gid, Key, QpHandle, Qpn};

/// Limit of scatter-gather elements of a request, for any ABI (`max_sge`).
pub const MAX_SGE: usize = 16;

/// One scatter-gather element, not yet checked against any memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Sge {
    /// Address in the region's terms (user virtual address; guest-physical for a DMA region).
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// Scatter-gather elements of a request. The provider ensures that there are at most [`MAX_SGE`]. Up to three are stored inline: requests
/// move on the data path, so they are small.
pub type SgeList = SmallVec<[Sge; 3]>;

/// Serialises lists in a saved state like any sequence.
mod sge_list {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{Sge, SgeList};

    pub fn serialize<S: Serializer>(list: &SgeList, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<SgeList, D::Error> {
        Vec::<Sge>::deserialize(deserializer).map(SgeList::from_vec)
    }
}

/// The remote side of a one-sided operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Remote {
    /// Address in the remote region.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// The destination of a datagram, copied from the request's address vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Datagram {
    /// Remote queue pair.
    pub qpn: Qpn,
    /// Q_Key to send. If bit 31 is set, the engine sends the queue pair's own instead (IBTA 10.2.5).
    pub qkey: u32,
    /// Protection domain of the address vector; must be the queue pair's.
    pub pd: u32,
    /// GID of the destination's port.
    pub dgid: Gid,
    /// Index into the sender's GID table.
    pub sgid_index: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Destination MAC as the guest resolved it.
    pub dmac: [u8; 6],
}

/// The operation of a send request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Operation {
    /// SEND; to a connected peer, or as a datagram.
    Send {
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
        /// SEND with invalidate: the remote key that the responder invalidates.
        invalidate: Option<u32>,
        /// Destination, for UD and GSI.
        datagram: Option<Datagram>,
    },
    /// RDMA WRITE, with or without immediate data.
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
    /// Invalidates a fast-register region of this guest.
    LocalInvalidate {
        /// Key of the region, of the queue pair's protection domain.
        rkey: u32,
    },
    /// Makes a fast-register region valid.
    FastRegister(Box<FastRegister>),
}

/// A fast registration; the page list is copied already.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FastRegister {
    /// First address of the region; also gives its offset within the first page.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access flags from the guest; unknown bits are ignored.
    pub access: u32,
    /// The new key; bits 31:8 must be the region's.
    pub rkey: u32,
    /// Guest addresses of the 4 KiB pages.
    pub pages: Box<[u64]>,
}

/// A send request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SendRequest {
    /// Echoed in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// Waits for earlier READs and atomics.
    pub fence: bool,
    /// Requests a completion (besides `sq_sig_all`).
    pub signaled: bool,
    /// Raises a solicited event at the receiver.
    pub solicited: bool,
    /// Buffers with the data to send; a READ or atomic stores its result in them.
    #[serde(with = "sge_list")]
    pub sges: SgeList,
}

/// A receive request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReceiveRequest {
    /// Echoed in the completion.
    pub wr_id: u64,
    /// Buffers for the message, filled in order.
    #[serde(with = "sge_list")]
    pub sges: SgeList,
}

/// Why a request in the ring is malformed. The request completes with [`Status::LocalQpOperation`] if it has a `wr_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// An opcode that the queue pair's type or owner doesn't permit.
    #[error("The request has opcode {0}, which this queue pair doesn't offer")]
    Opcode(u32),
    /// More elements than the queue was created with.
    #[error("The request has {0} scatter-gather elements, more than the queue takes")]
    SgeCount(u32),
    /// More inline data than the queue has room for: the guest's driver should have copied the elements when it posted the request.
    #[error(
        "The request has {0} bytes of inline data, more than the queue takes; post it without the inline flag"
    )]
    Inline(u64),
    /// Another field has an invalid value.
    #[error("The request has an invalid {0}")]
    Field(&'static str),
}

/// Completion status; numbers are those of verbs and of PVRDMA (IBTA 11.6.2).
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
    /// Not executed or not known to be: the queue pair is in the error state (`IB_WC_WR_FLUSH_ERR`).
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

/// The completed operation; numbers are those of PVRDMA and verbs work completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u32)]
pub enum CompletedOperation {
    /// SEND of any kind.
    Send = 0,
    /// WRITE, also with immediate.
    Write = 1,
    /// READ: the data is in the request's buffers.
    Read = 2,
    /// Compare and swap.
    CompareSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// Local invalidate.
    LocalInvalidate = 7,
    /// Fast registration.
    FastRegister = 8,
    /// Receive of a SEND.
    Receive = 128,
    /// Receive consumed by a WRITE with immediate.
    ReceiveWriteImmediate = 129,
}

/// A completion, before the ABI encodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The request's `wr_id`.
    pub wr_id: u64,
    /// Queue pair.
    pub qp: QpHandle,
    /// The completed operation.
    pub operation: CompletedOperation,
    /// How it ended.
    pub status: Status,
    /// Bytes received, read, or 8 for atomics; 40 more for datagrams (their GRH area).
    pub byte_len: u32,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// The key that a SEND with invalidate invalidated.
    pub invalidated: Option<Key>,
    /// Sender's queue pair, for datagrams.
    pub source: Option<Qpn>,
    /// Whether the first 40 bytes of the buffer are a GRH area (datagrams), and its address family.
    pub grh: Option<NetworkHeader>,
}

/// Network header of a received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkHeader {
    /// IPv4 at bytes 20 to 39.
    Ipv4,
    /// IPv6 at bytes 0 to 39.
    Ipv6,
}

/// Which next completion causes an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Arm {
    /// Any completion.
    Next,
    /// Solicited receives and errors only.
    Solicited,
}

/// An asynchronous event (IBTA 11.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The completion queue overran or its memory is gone.
    CqError(CqHandle),
    /// The queue pair failed for a local reason.
    QpFatal(QpHandle),
    /// The queue pair received an invalid request.
    QpRequestError(QpHandle),
    /// The queue pair received a request without permission.
    QpAccessError(QpHandle),
    /// The first packet arrived in RTR.
    CommunicationEstablished(QpHandle),
    /// The send queue has drained after RTS to SQD.
    SqDrained(QpHandle),
    /// A queue pair with a shared receive queue is in the error state and has consumed its last receive.
    LastWqeReached(QpHandle),
    /// The shared receive queue failed.
    SrqError(crate::names::SrqHandle),
    /// The shared receive queue fell below its limit.
    SrqLimitReached(crate::names::SrqHandle),
    /// The device failed and must be set up again.
    DeviceFatal,
    /// The port came up.
    PortActive,
    /// The port went down.
    PortError,
}
