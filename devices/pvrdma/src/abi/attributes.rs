//! Port and queue pair attributes (Linux `pvrdma_verbs.h`).

use zerocopy::little_endian::{U16, U32};

plain! {
    /// Attributes of a port.
    pub struct Port {
        /// See [`port_state`].
        pub state: U32,
        /// Limit of the path MTU, as a verbs code.
        pub max_mtu: U32,
        /// Active path MTU, as a verbs code.
        pub active_mtu: U32,
        /// Entries of the GID table; equals the capabilities' number.
        pub gid_table_len: U32,
        /// Port capability flags.
        pub flags: U32,
        /// Limit of a message, bytes.
        pub max_message: U32,
        /// Number of packets with an unknown P_Key.
        pub bad_pkeys: U32,
        /// Number of packets with a wrong Q_Key.
        pub qkey_violations: U32,
        /// Number of P_Keys.
        pub pkey_table_len: U16,
        /// Always 0.
        pub lid: U16,
        /// Always 0.
        pub sm_lid: U16,
        /// Always 0.
        pub lmc: u8,
        /// Number of virtual lanes.
        pub max_vl: u8,
        /// Always 0.
        pub sm_sl: u8,
        /// Always 0.
        pub subnet_timeout: u8,
        /// Always 0.
        pub init_type_reply: u8,
        /// Link width code.
        pub active_width: u8,
        /// Link speed code.
        pub active_speed: u8,
        /// Physical state: 5 link up, 3 disabled.
        pub physical_state: u8,
        /// Not used.
        pub reserved: [u8; 2],
    }
}
layout!(Port, size 48, gid_table_len at 12, max_message at 20, pkey_table_len at 32, lmc at 38, active_width at 43, physical_state at 45);

/// Port states.
pub mod port_state {
    /// `IB_PORT_DOWN`: no link.
    pub const DOWN: u32 = 1;
    /// `IB_PORT_ACTIVE`: the state of the device's port.
    pub const ACTIVE: u32 = 4;
}

plain! {
    /// Attributes of a queue pair. Fields that the mask doesn't include are garbage.
    pub struct QueuePair {
        /// New state.
        pub state: U32,
        /// The state that the caller assumes.
        pub current_state: U32,
        /// Path MTU code.
        pub path_mtu: U32,
        /// Path migration state.
        pub path_migration: U32,
        /// Q_Key of a datagram queue pair.
        pub qkey: U32,
        /// First expected PSN.
        pub rq_psn: U32,
        /// First PSN to send.
        pub sq_psn: U32,
        /// Queue pair number of the peer.
        pub destination_qpn: U32,
        /// Access rights of the peer.
        pub access: U32,
        /// P_Key index.
        pub pkey_index: U16,
        /// Alternate path's P_Key index.
        pub alternate_pkey_index: U16,
        /// Whether to send the event SQ_DRAINED.
        pub sqd_notify: u8,
        /// On query: whether the send queue is draining.
        pub sq_draining: u8,
        /// Limit of READs and atomics outstanding as initiator.
        pub max_rd_atomic: u8,
        /// Limit of READs and atomics outstanding as responder.
        pub max_dest_rd_atomic: u8,
        /// RNR timer code.
        pub min_rnr_timer: u8,
        /// Port number, always 1.
        pub port: u8,
        /// Local ACK timeout code.
        pub timeout: u8,
        /// Transport retries.
        pub retry_count: u8,
        /// RNR retries.
        pub rnr_retry: u8,
        /// Alternate path's port.
        pub alternate_port: u8,
        /// Alternate path's timeout code.
        pub alternate_timeout: u8,
        /// Not used.
        pub reserved: [u8; 5],
        /// Capacities in responses; MODIFY_QP can't change them.
        pub capacities: Capacities,
        /// Path to the peer.
        pub address: Address,
        /// Alternate path.
        pub alternate_address: Address,
    }
}
layout!(QueuePair, size 160, destination_qpn at 28, access at 32, pkey_index at 36, sqd_notify at 40, max_rd_atomic at 42,
    min_rnr_timer at 44, rnr_retry at 48, alternate_timeout at 50, capacities at 56, address at 80, alternate_address at 120);

plain! {
    /// Capacities of a queue pair.
    pub struct Capacities {
        /// Capacity of the send queue, requests.
        pub max_send_wr: U32,
        /// Capacity of the receive queue, requests.
        pub max_receive_wr: U32,
        /// Limit of elements per send request.
        pub max_send_sge: U32,
        /// Limit of elements per receive request.
        pub max_receive_sge: U32,
        /// Always 0.
        pub max_inline_data: U32,
        /// Not used.
        pub reserved: U32,
    }
}
layout!(Capacities, size 24);

plain! {
    /// Path of a connected queue pair.
    pub struct Address {
        /// Destination GID.
        pub dgid: [u8; 16],
        /// Flow label.
        pub flow_label: U32,
        /// Index of the source GID.
        pub sgid_index: u8,
        /// Hop limit.
        pub hop_limit: u8,
        /// Traffic class.
        pub traffic_class: u8,
        /// Not used.
        pub reserved0: u8,
        /// Always 0.
        pub dlid: U16,
        /// Never set by Linux.
        pub vlan: U16,
        /// Service level.
        pub service_level: u8,
        /// Always 0.
        pub source_path_bits: u8,
        /// Always 0.
        pub static_rate: u8,
        /// 1: with GRH.
        pub flags: u8,
        /// Port number: responses have 1, and 0 in the alternate path.
        pub port: u8,
        /// Destination MAC.
        pub dmac: [u8; 6],
        /// Not used.
        pub reserved1: u8,
    }
}
layout!(Address, size 40, flow_label at 16, sgid_index at 20, dlid at 24, service_level at 28, flags at 31, port at 32, dmac at 33);
