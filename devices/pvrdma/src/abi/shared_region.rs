//! The device shared region, DSR (Linux `pvrdma_dev_api.h`).

use zerocopy::byteorder::big_endian;
use zerocopy::little_endian::{U16, U32, U64};

plain! {
    /// The part that the driver fills in.
    pub struct DriverPart {
        /// The driver's interface version.
        pub driver_version: U32,
        /// Not used.
        pub pad0: U32,
        /// Guest operating system code.
        pub os: U32,
        /// Not used.
        pub pad1: U32,
        /// Guest address of the page for commands.
        pub command_slot: U64,
        /// Guest address of the page for responses.
        pub response_slot: U64,
        /// Ring of asynchronous events.
        pub async_ring: RingPages,
        /// Ring of completion notifications.
        pub completion_ring: RingPages,
        /// Guest page frame number of BAR2 (interface version 19 and up).
        pub uar_pfn: U64,
    }
}
layout!(DriverPart, size 72, command_slot at 16, response_slot at 24, async_ring at 32, completion_ring at 48, uar_pfn at 64);

plain! {
    /// Location of a ring.
    pub struct RingPages {
        /// Number of pages, with the one for the indices.
        pub pages: U32,
        /// Not used.
        pub reserved: U32,
        /// Guest address of the page directory.
        pub directory: U64,
    }
}
layout!(RingPages, size 16, directory at 8);

/// Offset of the capabilities in the region.
pub const CAPABILITIES: u64 = 72;

plain! {
    /// Capabilities, which the device writes.
    pub struct DeviceCapabilities {
        /// Firmware version: major in 63:32, minor in 31:16, patch in 15:0.
        pub firmware_version: U64,
        /// Node GUID.
        pub node_guid: big_endian::U64,
        /// System image GUID.
        pub system_image_guid: big_endian::U64,
        /// Limit of a memory region, bytes.
        pub max_mr_size: U64,
        /// Bitmap of page sizes.
        pub page_sizes: U64,
        /// Not used.
        pub atomic_argument_sizes: U64,
        /// Not used.
        pub extended_mask: U32,
        /// Not used.
        pub flags2: U32,
        /// Not used.
        pub max_fa_bit_boundary: U32,
        /// Not used.
        pub log_max_atomic_inline: U32,
        /// Vendor identifier.
        pub vendor_id: U32,
        /// Ignored by Linux.
        pub vendor_part_id: U32,
        /// Hardware version.
        pub hardware_version: U32,
        /// Limit of queue pairs, with the GSI one.
        pub max_qp: U32,
        /// Limit of requests per queue.
        pub max_qp_wr: U32,
        /// Verbs capability flags.
        pub flags: U32,
        /// Limit of scatter-gather elements per request.
        pub max_sge: U32,
        /// Limit of scatter-gather elements per READ.
        pub max_sge_rd: U32,
        /// Limit of completion queues.
        pub max_cq: U32,
        /// Limit of entries per completion queue.
        pub max_cqe: U32,
        /// Limit of memory regions.
        pub max_mr: U32,
        /// Limit of protection domains.
        pub max_pd: U32,
        /// Limit of READs and atomics outstanding as responder.
        pub max_qp_rd_atom: U32,
        /// Not used.
        pub max_ee_rd_atom: U32,
        /// Not used.
        pub max_res_rd_atom: U32,
        /// Limit of READs and atomics outstanding as initiator.
        pub max_qp_init_rd_atom: U32,
        /// Not used.
        pub unused: [U32; 9],
        /// Limit of address handles.
        pub max_ah: U32,
        /// Not used.
        pub max_fmr: U32,
        /// Not used.
        pub max_map_per_fmr: U32,
        /// Limit of shared receive queues.
        pub max_srq: U32,
        /// Limit of requests per shared receive queue.
        pub max_srq_wr: U32,
        /// Limit of scatter-gather elements of those.
        pub max_srq_sge: U32,
        /// Number of UAR pages; a power of two.
        pub max_uar: U32,
        /// Entries of the GID table.
        pub gid_table_len: U32,
        /// Number of P_Keys.
        pub max_pkeys: U16,
        /// Local CA acknowledge delay code.
        pub ack_delay: u8,
        /// Number of ports.
        pub ports: u8,
        /// Mode: 0 is RoCE.
        pub mode: u8,
        /// Bit 0 compare and swap, bit 1 fetch and add.
        pub atomic_operations: u8,
        /// Bit 0 local invalidate, bit 1 remote invalidate, bit 2 fast registration.
        pub memory_management: u8,
        /// 1 for RoCEv1, 2 for RoCEv2; not both.
        pub gid_types: u8,
        /// Limit of pages of a fast registration.
        pub max_fast_register_pages: U32,
    }
}
layout!(DeviceCapabilities, size 208, max_mr_size at 24, vendor_id at 64, max_qp at 76, max_qp_wr at 80, flags at 84,
    max_sge at 88, max_cq at 96, max_pd at 108, max_qp_init_rd_atom at 124, max_ah at 164, max_srq at 176,
    max_uar at 188, gid_table_len at 192, max_pkeys at 196, mode at 200, gid_types at 203, max_fast_register_pages at 204);

/// [`DeviceCapabilities::gid_types`]: RoCEv2.
pub const GID_TYPE_ROCE_V2: u8 = 2;
