//! Commands and responses (section 6). Layouts begin after the 16-byte headers.

use zerocopy::little_endian::{U16, U32, U64};

use super::attributes::{Port, QueuePair};

/// Bytes that the driver copies into the command slot.
pub const COMMAND_SIZE: usize = 184;
/// Bytes that the driver copies out of the response slot.
pub const RESPONSE_SIZE: usize = 176;
/// Bytes of the headers.
pub const HEADER_SIZE: usize = 16;
/// Added to the command's number in a response.
pub const ACKNOWLEDGE: u32 = 0x8000_0000;

/// Command numbers.
pub mod number {
    /// Port attributes.
    pub const QUERY_PORT: u32 = 0;
    /// A P_Key.
    pub const QUERY_PKEY: u32 = 1;
    /// Protection domain.
    pub const CREATE_PD: u32 = 2;
    /// No response.
    pub const DESTROY_PD: u32 = 3;
    /// Memory region.
    pub const CREATE_MR: u32 = 4;
    /// No response.
    pub const DESTROY_MR: u32 = 5;
    /// Completion queue.
    pub const CREATE_CQ: u32 = 6;
    /// Never issued by Linux.
    pub const RESIZE_CQ: u32 = 7;
    /// No response.
    pub const DESTROY_CQ: u32 = 8;
    /// Queue pair.
    pub const CREATE_QP: u32 = 9;
    /// The only command whose response has an error code.
    pub const MODIFY_QP: u32 = 10;
    /// Attributes of a queue pair.
    pub const QUERY_QP: u32 = 11;
    /// No response.
    pub const DESTROY_QP: u32 = 12;
    /// User context.
    pub const CREATE_UC: u32 = 13;
    /// No response.
    pub const DESTROY_UC: u32 = 14;
    /// GID. No response.
    pub const CREATE_BIND: u32 = 15;
    /// No response.
    pub const DESTROY_BIND: u32 = 16;
    /// Shared receive queue.
    pub const CREATE_SRQ: u32 = 17;
    /// No response.
    pub const MODIFY_SRQ: u32 = 18;
    /// Attributes of a shared receive queue.
    pub const QUERY_SRQ: u32 = 19;
    /// No response.
    pub const DESTROY_SRQ: u32 = 20;
    /// How many there are.
    pub const COUNT: u32 = 21;
}

plain! {
    /// Header of a command.
    pub struct CommandHeader {
        /// Echoed.
        pub response: U64,
        /// See [`number`].
        pub command: U32,
        /// Not used.
        pub reserved: U32,
    }
}
layout!(CommandHeader, size 16, command at 8);

plain! {
    /// Header of a response.
    pub struct ResponseHeader {
        /// From the command.
        pub response: U64,
        /// Command number and [`ACKNOWLEDGE`].
        pub acknowledge: U32,
        /// Looked at for MODIFY_QP only.
        pub error: u8,
        /// Not used.
        pub reserved: [u8; 3],
    }
}
layout!(ResponseHeader, size 16, acknowledge at 8, error at 12);

plain! {
    /// QUERY_PORT, QUERY_PKEY.
    pub struct QueryPort {
        /// 1.
        pub port: u8,
        /// P_Key index; QUERY_PKEY only.
        pub index: u8,
    }
}
plain! {
    /// Response to QUERY_PORT.
    pub struct PortResponse {
        /// Attributes.
        pub port: Port,
    }
}
plain! {
    /// Response to QUERY_PKEY.
    pub struct PkeyResponse {
        /// P_Key.
        pub pkey: U16,
    }
}

plain! {
    /// Commands that carry a single handle.
    pub struct Handle {
        /// Object.
        pub handle: U32,
    }
}

plain! {
    /// CREATE_UC, version 19 and up.
    pub struct CreateContext {
        /// Guest page frame number of the context's UAR page.
        pub pfn: U64,
    }
}

plain! {
    /// CREATE_MR.
    pub struct CreateMr {
        /// First address of a user region, also its offset in the first page.
        pub start: U64,
        /// Bytes.
        pub length: U64,
        /// Guest address of the page directory.
        pub directory: U64,
        /// Protection domain.
        pub pd: U32,
        /// Access flags; unknown bits are ignored.
        pub access: U32,
        /// See [`mr_kind`].
        pub kind: U32,
        /// Pages.
        pub pages: U32,
    }
}
layout!(CreateMr, size 40, length at 8, directory at 16, pd at 24, access at 28, kind at 32, pages at 36);

/// Kinds of memory regions.
pub mod mr_kind {
    /// A range of a process.
    pub const USER: u32 = 0;
    /// All of guest memory.
    pub const DMA: u32 = 1;
    /// Made valid by fast registration.
    pub const FAST: u32 = 2;
}

plain! {
    /// Response to CREATE_MR.
    pub struct MrResponse {
        /// Handle.
        pub handle: U32,
        /// Local key.
        pub lkey: U32,
        /// Remote key.
        pub rkey: U32,
    }
}

plain! {
    /// CREATE_CQ.
    pub struct CreateCq {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Context.
        pub context: U32,
        /// Entries, a power of two.
        pub entries: U32,
        /// Pages, with the one for the indices.
        pub pages: U32,
        /// Not used.
        pub reserved: U32,
    }
}
layout!(CreateCq, size 24, context at 8, entries at 12, pages at 16);

plain! {
    /// Response to CREATE_CQ.
    pub struct CqResponse {
        /// Handle.
        pub handle: U32,
        /// Entries: the command's number.
        pub entries: U32,
    }
}

plain! {
    /// CREATE_QP.
    pub struct CreateQp {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Protection domain.
        pub pd: U32,
        /// Completion queue for sends.
        pub send_cq: U32,
        /// Completion queue for receives.
        pub receive_cq: U32,
        /// Shared receive queue, where `has_srq`.
        pub srq: U32,
        /// Slots of the send queue, a power of two.
        pub max_send_wr: U32,
        /// Slots of the receive queue, a power of two; 0 with a shared one.
        pub max_receive_wr: U32,
        /// Elements of a send request.
        pub max_send_sge: U32,
        /// Elements of a receive request.
        pub max_receive_sge: U32,
        /// 0.
        pub max_inline_data: U32,
        /// 0.
        pub lkey: U32,
        /// Not the queue pair's remote access rights; those come with MODIFY_QP.
        pub access: U32,
        /// Pages, with the one for the indices.
        pub total_pages: U16,
        /// Pages of the send queue.
        pub send_pages: U16,
        /// 0.
        pub max_atomic_argument: U16,
        /// Every send request completes with an entry.
        pub signal_all: u8,
        /// See [`qp_kind`].
        pub kind: u8,
        /// Whether `srq` counts.
        pub has_srq: u8,
        /// Not used.
        pub reserved: [u8; 3],
    }
}
layout!(CreateQp, size 64, pd at 8, srq at 20, max_send_wr at 24, max_receive_sge at 36, access at 48, total_pages at 52,
    send_pages at 54, signal_all at 58, kind at 59, has_srq at 60);

/// Kinds of queue pairs.
pub mod qp_kind {
    /// General services.
    pub const GSI: u8 = 1;
    /// Reliable connection.
    pub const RC: u8 = 2;
    /// Unreliable datagram.
    pub const UD: u8 = 4;
}

plain! {
    /// Response to CREATE_QP, version 20.
    pub struct QpResponse {
        /// Number.
        pub qpn: U32,
        /// Handle.
        pub handle: U32,
        /// As asked.
        pub max_send_wr: U32,
        /// As asked.
        pub max_receive_wr: U32,
        /// As asked.
        pub max_send_sge: U32,
        /// As asked.
        pub max_receive_sge: U32,
        /// 0.
        pub max_inline_data: U32,
    }
}
layout!(QpResponse, size 28, handle at 4);

plain! {
    /// MODIFY_QP.
    pub struct ModifyQp {
        /// Handle.
        pub handle: U32,
        /// Which attributes count.
        pub mask: U32,
        /// Attributes.
        pub attributes: QueuePair,
    }
}
layout!(ModifyQp, size 168, mask at 4, attributes at 8);

plain! {
    /// Response to QUERY_QP.
    pub struct QueryQpResponse {
        /// Attributes.
        pub attributes: QueuePair,
    }
}

plain! {
    /// CREATE_BIND.
    pub struct CreateBind {
        /// Meaningless.
        pub mtu: U32,
        /// Meaningless.
        pub vlan: U32,
        /// Index in the GID table.
        pub index: U32,
        /// GID.
        pub gid: [u8; 16],
        /// 1 RoCEv1, 2 RoCEv2.
        pub gid_type: u8,
        /// Not used.
        pub reserved: [u8; 3],
    }
}
layout!(CreateBind, size 32, index at 8, gid at 12, gid_type at 28);

plain! {
    /// DESTROY_BIND.
    pub struct DestroyBind {
        /// Index in the GID table.
        pub index: U32,
        /// GID.
        pub gid: [u8; 16],
    }
}
layout!(DestroyBind, size 20);

plain! {
    /// CREATE_SRQ.
    pub struct CreateSrq {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Protection domain.
        pub pd: U32,
        /// Pages, with the one for the indices; the provider gives twice what is needed.
        pub pages: U32,
        /// Slots, a power of two.
        pub max_wr: U32,
        /// Elements of a request.
        pub max_sge: U32,
        /// Limit at which the event is raised.
        pub limit: U32,
        /// Not used.
        pub reserved0: U32,
        /// 0: basic.
        pub kind: u8,
        /// Not used.
        pub reserved1: [u8; 7],
    }
}
layout!(CreateSrq, size 40, pd at 8, pages at 12, max_wr at 16, max_sge at 20, limit at 24, kind at 32);

plain! {
    /// MODIFY_SRQ.
    pub struct ModifySrq {
        /// Handle.
        pub handle: U32,
        /// See [`SRQ_LIMIT`].
        pub mask: U32,
        /// Not changed.
        pub max_wr: U32,
        /// Not changed.
        pub max_sge: U32,
        /// Limit.
        pub limit: U32,
    }
}
layout!(ModifySrq, size 20, limit at 16);

/// Mask of MODIFY_SRQ: the limit.
pub const SRQ_LIMIT: u32 = 2;

plain! {
    /// Response to QUERY_SRQ.
    pub struct SrqResponse {
        /// Slots.
        pub max_wr: U32,
        /// Elements of a request.
        pub max_sge: U32,
        /// Limit.
        pub limit: U32,
    }
}
