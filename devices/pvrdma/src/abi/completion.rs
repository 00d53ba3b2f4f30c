//! Completion queue entries (Linux `vmw_pvrdma-abi.h`).

use zerocopy::little_endian::{U16, U32, U64};

/// Bytes of an entry.
pub const SIZE: u64 = 64;

plain! {
    /// A completion.
    pub struct Entry {
        /// The request's `wr_id`.
        pub wr_id: U64,
        /// Queue pair handle.
        pub qp: U64,
        /// Completed operation.
        pub opcode: U32,
        /// Completion status.
        pub status: U32,
        /// Length in bytes.
        pub byte_len: U32,
        /// Immediate data in network order, or an invalidated key in host order.
        pub immediate: [u8; 4],
        /// Sender's queue pair.
        pub source_qp: U32,
        /// See [`flags`].
        pub flags: U32,
        /// Not used.
        pub vendor_error: U32,
        /// Always 0.
        pub pkey_index: U16,
        /// Always 0.
        pub slid: U16,
        /// Always 0.
        pub service_level: u8,
        /// Always 0.
        pub dlid_path_bits: u8,
        /// Always 1.
        pub port: u8,
        /// Not read by Linux.
        pub smac: [u8; 6],
        /// See [`network`].
        pub network_header: u8,
        /// Always 0.
        pub reserved: [u8; 6],
    }
}
layout!(Entry, size 64, qp at 8, opcode at 16, status at 20, byte_len at 24, immediate at 28, source_qp at 32, flags at 36,
    vendor_error at 40, pkey_index at 44, service_level at 48, port at 50, smac at 51, network_header at 57);

/// Flags of an entry. The provider passes them to the application unchanged, where 4 and 8 have other meanings. So only
/// [`flags::GRH`] and [`flags::IMMEDIATE`] may be set in a user's completion queue.
pub mod flags {
    /// The buffer begins with a GRH area.
    pub const GRH: u32 = 1;
    /// Immediate data.
    pub const IMMEDIATE: u32 = 2;
    /// A key was invalidated.
    pub const INVALIDATE: u32 = 4;
    /// `network_header` is valid.
    pub const NETWORK_HEADER: u32 = 64;
}

/// Network header types.
pub mod network {
    /// RoCEv2 over IPv4.
    pub const IPV4: u8 = 1;
    /// RoCEv2 over IPv6.
    pub const IPV6: u8 = 2;
}
