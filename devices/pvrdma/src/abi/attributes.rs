//! Port and queue pair attributes (section 6.4).

use zerocopy::little_endian::{U16, U32};

plain! {
    /// Port attributes.
    pub struct Port {
        /// See [`port_state`].
        pub state: U32,
        /// Largest path MTU code.
        pub max_mtu: U32,
        /// Path MTU code in use.
        pub active_mtu: U32,
        /// Entries of the GID table; the capabilities' number.
        pub gid_table_len: U32,
        /// Flags.
        pub flags: U32,
        /// Largest message, bytes.
        pub max_message: U32,
        /// Counter.
        pub bad_pkeys: U32,
        /// Counter.
        pub qkey_violations: U32,
        /// P_Keys.
        pub pkey_table_len: U16,
        /// 0.
        pub lid: U16,
        /// 0.
        pub sm_lid: U16,
        /// 0.
        pub lmc: u8,
        /// Virtual lanes.
        pub max_vl: u8,
        /// 0.
        pub sm_sl: u8,
        /// 0.
        pub subnet_timeout: u8,
        /// 0.
        pub init_type_reply: u8,
        /// Width code.
        pub active_width: u8,
        /// Speed code.
        pub active_speed: u8,
        /// 5 link up, 3 disabled.
        pub physical_state: u8,
        /// Not used.
        pub reserved: [u8; 2],
    }
}
layout!(Port, size 48, gid_table_len at 12, max_message at 20, pkey_table_len at 32, lmc at 38, active_width at 43, physical_state at 45);

/// Port states.
pub mod port_state {
    /// Down.
    pub const DOWN: u32 = 1;
    /// Active.
    pub const ACTIVE: u32 = 4;
}

plain! {
    /// Attributes of a queue pair. Those that a mask doesn't name are garbage.
    pub struct QueuePair {
        /// State.
        pub state: U32,
        /// State that the caller believes in.
        pub current_state: U32,
        /// Path MTU code.
        pub path_mtu: U32,
        /// Path migration state.
        pub path_migration: U32,
        /// Q_Key.
        pub qkey: U32,
        /// First PSN expected.
        pub rq_psn: U32,
        /// First PSN sent.
        pub sq_psn: U32,
        /// Peer.
        pub destination_qpn: U32,
        /// What the peer may do.
        pub access: U32,
        /// P_Key index.
        pub pkey_index: U16,
        /// Alternate path's.
        pub alternate_pkey_index: U16,
        /// Event wanted once drained.
        pub sqd_notify: u8,
        /// Query: draining.
        pub sq_draining: u8,
        /// As initiator.
        pub max_rd_atomic: u8,
        /// As responder.
        pub max_dest_rd_atomic: u8,
        /// RNR timer code.
        pub min_rnr_timer: u8,
        /// Port.
        pub port: u8,
        /// Timeout code.
        pub timeout: u8,
        /// Transport retries.
        pub retry_count: u8,
        /// RNR retries.
        pub rnr_retry: u8,
        /// Alternate path's.
        pub alternate_port: u8,
        /// Alternate path's.
        pub alternate_timeout: u8,
        /// Not used.
        pub reserved: [u8; 5],
        /// Capacities.
        pub capacities: Capacities,
        /// Path.
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
        /// Send requests.
        pub max_send_wr: U32,
        /// Receive requests.
        pub max_receive_wr: U32,
        /// Elements of a send request.
        pub max_send_sge: U32,
        /// Elements of a receive request.
        pub max_receive_sge: U32,
        /// 0.
        pub max_inline_data: U32,
        /// Not used.
        pub reserved: U32,
    }
}
layout!(Capacities, size 24);

plain! {
    /// Path of a connected queue pair.
    pub struct Address {
        /// Destination.
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
        /// 0.
        pub dlid: U16,
        /// Never set by Linux.
        pub vlan: U16,
        /// Service level.
        pub service_level: u8,
        /// 0.
        pub source_path_bits: u8,
        /// 0.
        pub static_rate: u8,
        /// 1: with GRH.
        pub flags: u8,
        /// Port.
        pub port: u8,
        /// Destination MAC.
        pub dmac: [u8; 6],
        /// Not used.
        pub reserved1: u8,
    }
}
layout!(Address, size 40, flow_label at 16, sgid_index at 20, dlid at 24, service_level at 28, flags at 31, port at 32, dmac at 33);
