//! Commands and responses (Linux `pvrdma_dev_api.h`). Layouts begin after the 16-byte headers.

use zerocopy::little_endian::{U16, U32, U64};

use super::attributes::{Port, QueuePair};

/// Bytes that the driver copies into the command slot.
pub const COMMAND_SIZE: usize = 184;
/// Bytes that the driver copies out of the response slot.
pub const RESPONSE_SIZE: usize = 176;
/// Bytes of either header.
pub const HEADER_SIZE: usize = 16;
/// Added to the command's number in its response.
pub const ACKNOWLEDGE: u32 = 0x8000_0000;

/// Command numbers.
pub mod number {
    /// Queries port attributes.
    pub const QUERY_PORT: u32 = 0;
    /// Queries a P_Key.
    pub const QUERY_PKEY: u32 = 1;
    /// Creates a protection domain.
    pub const CREATE_PD: u32 = 2;
    /// No response.
    pub const DESTROY_PD: u32 = 3;
    /// Creates a memory region.
    pub const CREATE_MR: u32 = 4;
    /// No response.
    pub const DESTROY_MR: u32 = 5;
    /// Creates a completion queue.
    pub const CREATE_CQ: u32 = 6;
    /// Never issued by Linux.
    pub const RESIZE_CQ: u32 = 7;
    /// No response.
    pub const DESTROY_CQ: u32 = 8;
    /// Creates a queue pair.
    pub const CREATE_QP: u32 = 9;
    /// Modifies a queue pair; the only command whose response has an error code.
    pub const MODIFY_QP: u32 = 10;
    /// Queries attributes of a queue pair.
    pub const QUERY_QP: u32 = 11;
    /// No response.
    pub const DESTROY_QP: u32 = 12;
    /// Creates a user context.
    pub const CREATE_UC: u32 = 13;
    /// No response.
    pub const DESTROY_UC: u32 = 14;
    /// Binds a GID. No response.
    pub const CREATE_BIND: u32 = 15;
    /// No response.
    pub const DESTROY_BIND: u32 = 16;
    /// Creates a shared receive queue.
    pub const CREATE_SRQ: u32 = 17;
    /// No response.
    pub const MODIFY_SRQ: u32 = 18;
    /// Queries attributes of a shared receive queue.
    pub const QUERY_SRQ: u32 = 19;
    /// No response.
    pub const DESTROY_SRQ: u32 = 20;
    /// Number of commands.
    pub const COUNT: u32 = 21;
}

plain! {
    /// Header of a command.
    pub struct CommandHeader {
        /// Echoed in the response.
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
        /// Echoed from the command.
        pub response: U64,
        /// Command number plus [`ACKNOWLEDGE`].
        pub acknowledge: U32,
        /// Error code; the driver reads it for MODIFY_QP only.
        pub error: u8,
        /// Not used.
        pub reserved: [u8; 3],
    }
}
layout!(ResponseHeader, size 16, acknowledge at 8, error at 12);

plain! {
    /// QUERY_PORT, QUERY_PKEY.
    pub struct QueryPort {
        /// Port number, always 1.
        pub port: u8,
        /// P_Key index; QUERY_PKEY only.
        pub index: u8,
    }
}
plain! {
    /// Response to QUERY_PORT.
    pub struct PortResponse {
        /// Attributes of port 1.
        pub port: Port,
    }
}
plain! {
    /// Response to QUERY_PKEY.
    pub struct PkeyResponse {
        /// P_Key at the index: always the default key.
        pub pkey: U16,
    }
}

plain! {
    /// Commands whose body is a single handle.
    pub struct Handle {
        /// Handle of the object.
        pub handle: U32,
    }
}

plain! {
    /// CREATE_UC, interface version 19 and up.
    pub struct CreateContext {
        /// Guest page frame number of the context's UAR page.
        pub pfn: U64,
    }
}

plain! {
    /// Body of CREATE_MR: registers memory, or allocates a fast-register region.
    pub struct CreateMr {
        /// First address of a user region; also gives its offset in the first page.
        pub start: U64,
        /// Length in bytes.
        pub length: U64,
        /// Guest address of the page directory.
        pub directory: U64,
        /// Handle of the protection domain.
        pub pd: U32,
        /// Access flags; unknown bits are ignored.
        pub access: U32,
        /// See [`mr_kind`].
        pub kind: U32,
        /// Number of pages.
        pub pages: U32,
    }
}
layout!(CreateMr, size 40, length at 8, directory at 16, pd at 24, access at 28, kind at 32, pages at 36);

/// Kinds of memory regions.
pub mod mr_kind {
    /// A range of a process's memory.
    pub const USER: u32 = 0;
    /// All of guest memory.
    pub const DMA: u32 = 1;
    /// Made valid by fast registration.
    pub const FAST: u32 = 2;
}

plain! {
    /// Response to CREATE_MR.
    pub struct MrResponse {
        /// Handle of the region.
        pub handle: U32,
        /// Local key.
        pub lkey: U32,
        /// Remote key.
        pub rkey: U32,
    }
}

plain! {
    /// Body of CREATE_CQ: creates a completion queue on the guest's pages.
    pub struct CreateCq {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Handle of the context.
        pub context: U32,
        /// Number of entries, a power of two.
        pub entries: U32,
        /// Number of pages, with the one for the indices.
        pub pages: U32,
        /// Not used.
        pub reserved: U32,
    }
}
layout!(CreateCq, size 24, context at 8, entries at 12, pages at 16);

plain! {
    /// Response to CREATE_CQ.
    pub struct CqResponse {
        /// Handle of the completion queue.
        pub handle: U32,
        /// Number of entries: the command's.
        pub entries: U32,
    }
}

plain! {
    /// Body of CREATE_QP: creates a queue pair on the guest's pages.
    pub struct CreateQp {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Handle of the protection domain.
        pub pd: U32,
        /// Handle of the completion queue for sends.
        pub send_cq: U32,
        /// Handle of the completion queue for receives.
        pub receive_cq: U32,
        /// Handle of the shared receive queue, if `has_srq`.
        pub srq: U32,
        /// Slots of the send queue, a power of two.
        pub max_send_wr: U32,
        /// Slots of the receive queue, a power of two; 0 with a shared one.
        pub max_receive_wr: U32,
        /// Limit of elements per send request.
        pub max_send_sge: U32,
        /// Limit of elements per receive request.
        pub max_receive_sge: U32,
        /// Always 0.
        pub max_inline_data: U32,
        /// Always 0.
        pub lkey: U32,
        /// Not the queue pair's remote access rights; those come with MODIFY_QP.
        pub access: U32,
        /// Number of pages, with the one for the indices.
        pub total_pages: U16,
        /// Number of pages of the send queue.
        pub send_pages: U16,
        /// Always 0.
        pub max_atomic_argument: U16,
        /// Whether every send request produces a completion.
        pub signal_all: u8,
        /// See [`qp_kind`].
        pub kind: u8,
        /// Whether `srq` is valid.
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
    /// Response to CREATE_QP, interface version 20.
    pub struct QpResponse {
        /// Queue pair number.
        pub qpn: U32,
        /// Handle of the queue pair.
        pub handle: U32,
        /// As requested.
        pub max_send_wr: U32,
        /// As requested.
        pub max_receive_wr: U32,
        /// As requested.
        pub max_send_sge: U32,
        /// As requested.
        pub max_receive_sge: U32,
        /// Always 0.
        pub max_inline_data: U32,
    }
}
layout!(QpResponse, size 28, handle at 4);

plain! {
    /// Body of MODIFY_QP: changes the attributes in the mask.
    pub struct ModifyQp {
        /// Handle of the queue pair.
        pub handle: U32,
        /// Mask of the valid attributes.
        pub mask: U32,
        /// New values; only those in the mask count.
        pub attributes: QueuePair,
    }
}
layout!(ModifyQp, size 168, mask at 4, attributes at 8);

plain! {
    /// Response to QUERY_QP.
    pub struct QueryQpResponse {
        /// Current attributes, with the PSNs.
        pub attributes: QueuePair,
    }
}

plain! {
    /// Body of CREATE_BIND: adds an entry to the GID table.
    pub struct CreateBind {
        /// Not used.
        pub mtu: U32,
        /// Not used.
        pub vlan: U32,
        /// Index in the GID table.
        pub index: U32,
        /// GID of the new entry.
        pub gid: [u8; 16],
        /// 1 for RoCEv1, 2 for RoCEv2.
        pub gid_type: u8,
        /// Not used.
        pub reserved: [u8; 3],
    }
}
layout!(CreateBind, size 32, index at 8, gid at 12, gid_type at 28);

plain! {
    /// Body of DESTROY_BIND: removes an entry of the GID table.
    pub struct DestroyBind {
        /// Index in the GID table.
        pub index: U32,
        /// GID of the entry; it must be the one at the index.
        pub gid: [u8; 16],
    }
}
layout!(DestroyBind, size 20);

plain! {
    /// Body of CREATE_SRQ: creates a shared receive queue on the guest's pages.
    pub struct CreateSrq {
        /// Guest address of the page directory.
        pub directory: U64,
        /// Handle of the protection domain.
        pub pd: U32,
        /// Number of pages, with the one for the indices; the provider passes twice the number needed.
        pub pages: U32,
        /// Number of slots, a power of two.
        pub max_wr: U32,
        /// Limit of elements per request.
        pub max_sge: U32,
        /// Limit of the limit event.
        pub limit: U32,
        /// Not used.
        pub reserved0: U32,
        /// Kind; 0 is basic.
        pub kind: u8,
        /// Not used.
        pub reserved1: [u8; 7],
    }
}
layout!(CreateSrq, size 40, pd at 8, pages at 12, max_wr at 16, max_sge at 20, limit at 24, kind at 32);

plain! {
    /// Body of MODIFY_SRQ: arms the limit event.
    pub struct ModifySrq {
        /// Handle of the shared receive queue.
        pub handle: U32,
        /// See [`SRQ_LIMIT`].
        pub mask: U32,
        /// Not changed.
        pub max_wr: U32,
        /// Not changed.
        pub max_sge: U32,
        /// New limit.
        pub limit: U32,
    }
}
layout!(ModifySrq, size 20, limit at 16);

/// Mask of MODIFY_SRQ: sets the limit.
pub const SRQ_LIMIT: u32 = 2;

plain! {
    /// Response to QUERY_SRQ.
    pub struct SrqResponse {
        /// Number of slots.
        pub max_wr: U32,
        /// Limit of elements per request.
        pub max_sge: U32,
        /// Limit of the limit event.
        pub limit: U32,
    }
}
