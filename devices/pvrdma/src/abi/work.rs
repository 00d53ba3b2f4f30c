//! Work queue elements and address vectors (Linux `vmw_pvrdma-abi.h`).

use zerocopy::little_endian::{U32, U64};

plain! {
    /// Scatter-gather element.
    pub struct Sge {
        /// Address in the region's terms.
        pub address: U64,
        /// Length in bytes.
        pub length: U32,
        /// Local key.
        pub lkey: U32,
    }
}
layout!(Sge, size 16, length at 8, lkey at 12);

plain! {
    /// Header of a receive request; elements follow.
    pub struct ReceiveHeader {
        /// Echoed in the completion.
        pub wr_id: U64,
        /// Number of elements.
        pub sge_count: U32,
        /// Length in bytes according to the guest, ignored.
        pub total_length: U32,
    }
}
layout!(ReceiveHeader, size 16, sge_count at 8);

plain! {
    /// Header of a send request; elements follow. Fields that the opcode doesn't use are garbage.
    pub struct SendHeader {
        /// Echoed in the completion.
        pub wr_id: U64,
        /// Number of elements.
        pub sge_count: U32,
        /// Length in bytes according to the guest, ignored.
        pub total_length: U32,
        /// See [`opcode`].
        pub opcode: U32,
        /// See [`send_flags`].
        pub flags: U32,
        /// Immediate data in network order, or a key to invalidate in host order.
        pub immediate: [u8; 4],
        /// Not used.
        pub reserved: U32,
        /// Operands; their layout depends on the opcode.
        pub operands: [u8; 48],
    }
}
layout!(SendHeader, size 80, sge_count at 8, opcode at 16, flags at 20, immediate at 24, operands at 32);

plain! {
    /// Operands of WRITEs and READs.
    pub struct RemoteOperands {
        /// Remote address.
        pub address: U64,
        /// Remote key.
        pub rkey: U32,
        /// Not used.
        pub unused: [u8; 36],
    }
}
layout!(RemoteOperands, size 48, rkey at 8);

plain! {
    /// Operands of atomics.
    pub struct AtomicOperands {
        /// Remote address.
        pub address: U64,
        /// Expected value, or the addend.
        pub compare_or_add: U64,
        /// New value.
        pub swap: U64,
        /// Remote key.
        pub rkey: U32,
        /// Not used.
        pub unused: [u8; 20],
    }
}
layout!(AtomicOperands, size 48, compare_or_add at 8, swap at 16, rkey at 24);

plain! {
    /// Operands of a fast registration.
    pub struct FastRegisterOperands {
        /// First address.
        pub iova: U64,
        /// Guest address of a page directory that lists the registered pages.
        pub directory: U64,
        /// Always 12.
        pub page_shift: U32,
        /// Number of pages.
        pub page_count: U32,
        /// Length in bytes.
        pub length: U32,
        /// Access flags.
        pub access: U32,
        /// The new key.
        pub rkey: U32,
        /// Not used.
        pub unused: [u8; 12],
    }
}
layout!(FastRegisterOperands, size 48, directory at 8, page_shift at 16, page_count at 20, length at 24, access at 28, rkey at 32);

plain! {
    /// Operands of a datagram.
    pub struct DatagramOperands {
        /// Destination queue pair.
        pub qpn: U32,
        /// Q_Key to send; with bit 31 set, the sender's own.
        pub qkey: U32,
        /// Address vector.
        pub address: AddressVector,
    }
}
layout!(DatagramOperands, size 48, qkey at 4, address at 8);

plain! {
    /// Address vector of a datagram.
    pub struct AddressVector {
        /// Port in bits 31:24, protection domain in 23:0.
        pub port_pd: U32,
        /// Traffic class in bits 27:20, flow label in 19:0.
        pub traffic: U32,
        /// Destination GID.
        pub dgid: [u8; 16],
        /// Source path bits, and 0x80.
        pub source_path: u8,
        /// Index of the source GID.
        pub gid_index: u8,
        /// Always 0.
        pub static_rate: u8,
        /// Hop limit.
        pub hop_limit: u8,
        /// Destination MAC.
        pub dmac: [u8; 6],
        /// Not used.
        pub reserved: [u8; 6],
    }
}
layout!(AddressVector, size 40, traffic at 4, dgid at 8, source_path at 24, gid_index at 25, hop_limit at 27, dmac at 28);

/// Opcodes of send requests. User space posts verbs' own numbers, which are the same up to [`opcode::FETCH_ADD`] only.
pub mod opcode {
    /// RDMA WRITE.
    pub const WRITE: u32 = 0;
    /// RDMA WRITE with immediate.
    pub const WRITE_IMMEDIATE: u32 = 1;
    /// SEND without immediate data.
    pub const SEND: u32 = 2;
    /// SEND with immediate.
    pub const SEND_IMMEDIATE: u32 = 3;
    /// RDMA READ.
    pub const READ: u32 = 4;
    /// Compare and swap.
    pub const COMPARE_SWAP: u32 = 5;
    /// Fetch and add.
    pub const FETCH_ADD: u32 = 6;
    /// SEND with invalidate; kernel only.
    pub const SEND_INVALIDATE: u32 = 8;
    /// Local invalidate; kernel only.
    pub const LOCAL_INVALIDATE: u32 = 10;
    /// Fast registration; kernel only.
    pub const FAST_REGISTER: u32 = 11;
}

/// Flags of send requests.
pub mod send_flags {
    /// Waits for earlier READs and atomics.
    pub const FENCE: u32 = 1;
    /// Requests a completion.
    pub const SIGNALED: u32 = 2;
    /// Requests a solicited event at the receiver.
    pub const SOLICITED: u32 = 4;
    /// The data should be copied when the request is posted. The provider passes the flag through and copies nothing. So the device refuses
    /// a request with data: queue pairs have no room for inline data.
    pub const INLINE: u32 = 8;
}

/// Bytes of a send slot for a queue of `max_sge` elements per request.
#[must_use]
pub const fn send_slot(max_sge: u32) -> u64 {
    (80 + 16 * max_sge as u64).next_power_of_two()
}

/// Bytes of a receive slot for a queue of `max_sge` elements per request.
#[must_use]
pub const fn receive_slot(max_sge: u32) -> u64 {
    (16 + 16 * max_sge as u64).next_power_of_two()
}

const _: () = {
    // As the driver computes them: a header and `max_sge` elements, rounded up to a power of two.
    assert!(send_slot(1) == 128 && send_slot(3) == 128 && send_slot(4) == 256 && send_slot(11) == 256);
    assert!(send_slot(12) == 512 && send_slot(16) == 512);
    assert!(
        receive_slot(1) == 32 && receive_slot(3) == 64 && receive_slot(7) == 128 && receive_slot(16) == 512
    );
};
