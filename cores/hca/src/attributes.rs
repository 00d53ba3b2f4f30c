//! Queue pair attributes and states (IBTA 10.3, 11.2.5), in the numbering of verbs.

use crate::names::{Gid, Qpn};

/// Transport type of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum QpKind {
    /// Reliable connection.
    Rc,
    /// Unreliable connection. PVRDMA doesn't offer it; other front ends do.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// General services: a datagram queue pair with number 1.
    Gsi,
}

/// Queue pair state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u32)]
pub enum QpState {
    /// Initial state. A change to it closes the connection and resets all attributes.
    Reset = 0,
    /// Initialized: receives may be posted.
    Init = 1,
    /// Ready to receive.
    ReadyToReceive = 2,
    /// Ready to send.
    ReadyToSend = 3,
    /// Send queue drained.
    SendQueueDrained = 4,
    /// Send queue error (UD, UC).
    SendQueueError = 5,
    /// Failed, or set by the guest: requests and receives complete as [`crate::work::Status::Flushed`].
    Error = 6,
}

bitflags::bitflags! {
    /// Which attributes a modify call carries (`enum ib_qp_attr_mask`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct QpAttributeMask: u32 {
        /// `IB_QP_STATE`: carries [`QpAttributes::state`].
        const STATE = 1 << 0;
        /// `IB_QP_CUR_STATE`: the call fails unless [`QpAttributes::current_state`] is the state.
        const CURRENT_STATE = 1 << 1;
        /// Requests the event SQ_DRAINED.
        const SQD_NOTIFY = 1 << 2;
        /// `IB_QP_ACCESS_FLAGS`: carries [`QpAttributes::access`].
        const ACCESS_FLAGS = 1 << 3;
        /// `IB_QP_PKEY_INDEX`: carries [`QpAttributes::pkey_index`].
        const PKEY_INDEX = 1 << 4;
        /// `IB_QP_PORT`: carries [`QpAttributes::port`].
        const PORT = 1 << 5;
        /// `IB_QP_QKEY`: carries [`QpAttributes::qkey`].
        const QKEY = 1 << 6;
        /// `IB_QP_AV`: carries [`QpAttributes::address`].
        const ADDRESS_VECTOR = 1 << 7;
        /// `IB_QP_PATH_MTU`: carries [`QpAttributes::path_mtu`].
        const PATH_MTU = 1 << 8;
        /// `IB_QP_TIMEOUT`: carries [`QpAttributes::timeout`].
        const TIMEOUT = 1 << 9;
        /// `IB_QP_RETRY_CNT`: carries [`QpAttributes::retry_count`].
        const RETRY_COUNT = 1 << 10;
        /// `IB_QP_RNR_RETRY`: carries [`QpAttributes::rnr_retry`].
        const RNR_RETRY = 1 << 11;
        /// `IB_QP_RQ_PSN`: carries [`QpAttributes::rq_psn`].
        const RQ_PSN = 1 << 12;
        /// `IB_QP_MAX_QP_RD_ATOMIC`: carries [`QpAttributes::max_rd_atomic`].
        const MAX_RD_ATOMIC = 1 << 13;
        /// Alternate path: accepted where the state table permits it, and never used.
        const ALTERNATE_PATH = 1 << 14;
        /// `IB_QP_MIN_RNR_TIMER`: carries [`QpAttributes::min_rnr_timer`].
        const MIN_RNR_TIMER = 1 << 15;
        /// `IB_QP_SQ_PSN`: carries [`QpAttributes::sq_psn`].
        const SQ_PSN = 1 << 16;
        /// `IB_QP_MAX_DEST_RD_ATOMIC`: carries [`QpAttributes::max_dest_rd_atomic`].
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// Path migration state.
        const PATH_MIGRATION = 1 << 18;
        /// Capacities; can't be changed.
        const CAPACITIES = 1 << 19;
        /// `IB_QP_DEST_QPN`: carries [`QpAttributes::destination_qpn`].
        const DESTINATION_QPN = 1 << 20;
    }
}

bitflags::bitflags! {
    /// Access rights of memory regions. The remote ones also apply to queue pairs (`enum ib_access_flags`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
    #[serde(transparent)]
    pub struct Access: u32 {
        /// The HCA may place received data and READ responses there.
        const LOCAL_WRITE = 1;
        /// Peers may write.
        const REMOTE_WRITE = 2;
        /// Peers may read.
        const REMOTE_READ = 4;
        /// Peers may execute atomics.
        const REMOTE_ATOMIC = 8;
        /// Addresses count from 0.
        const ZERO_BASED = 32;
    }
}

/// The path to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AddressVector {
    /// GID of the peer's port.
    pub dgid: Gid,
    /// Index into the own GID table.
    pub sgid_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Destination MAC as the guest resolved it.
    pub dmac: [u8; 6],
}

/// Attributes of a queue pair. On modify only those in the mask apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QpAttributes {
    /// New state; on query the current one.
    pub state: QpState,
    /// The state that the caller assumes.
    pub current_state: QpState,
    /// Path MTU code: 1 to 5 for 256 to 4096 bytes.
    pub path_mtu: u8,
    /// Q_Key of a datagram queue pair, 32 bits.
    pub qkey: u32,
    /// First expected PSN, 24 bits.
    pub rq_psn: u32,
    /// First PSN to send, 24 bits.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub destination_qpn: Qpn,
    /// Access rights of the peer.
    pub access: Access,
    /// P_Key index; only 0 exists.
    pub pkey_index: u16,
    /// Whether to send the event SQ_DRAINED.
    pub sqd_notify: bool,
    /// Limit of READs and atomics outstanding as initiator.
    pub max_rd_atomic: u8,
    /// Limit of READs and atomics outstanding as responder.
    pub max_dest_rd_atomic: u8,
    /// RNR timer code, 0 to 31.
    pub min_rnr_timer: u8,
    /// Port number, always 1.
    pub port: u8,
    /// Local ACK timeout code, 5 bits; 0 is no timeout.
    pub timeout: u8,
    /// Transport retries, 0 to 7.
    pub retry_count: u8,
    /// RNR retries, 0 to 7; 7 is no limit.
    pub rnr_retry: u8,
    /// Path to the peer.
    pub address: AddressVector,
}

impl QpAttributes {
    /// Attributes of a queue pair in RESET.
    #[must_use]
    pub fn in_reset() -> Self {
        Self {
            state: QpState::Reset,
            current_state: QpState::Reset,
            path_mtu: 1,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            destination_qpn: Qpn(0),
            access: Access::empty(),
            pkey_index: 0,
            sqd_notify: false,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port: 1,
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            address: AddressVector {
                dgid: Gid([0; 16]),
                sgid_index: 0,
                flow_label: 0,
                hop_limit: 0,
                traffic_class: 0,
                service_level: 0,
                dmac: [0; 6],
            },
        }
    }
}
