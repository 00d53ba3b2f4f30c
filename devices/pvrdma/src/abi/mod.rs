//! Numbers and layouts of the guest ABI (interface version 20), as Linux's driver `vmw_pvrdma` and rdma-core's provider `libvmw_pvrdma`
//! define them. Sources are Linux's headers in `drivers/infiniband/hw/vmw_pvrdma/` and `include/uapi/rdma/vmw_pvrdma-abi.h`;
//! docs/design/specs/pvrdma-abi.md has the rules between the fields.
//!
//! | module | holds | header |
//! |---|---|---|
//! | [`pci`] | identity, BARs, interrupt vectors | `pvrdma_dev_api.h` |
//! | [`registers`] | BAR1 | `pvrdma_dev_api.h` |
//! | [`shared_region`] | device shared region, capabilities | `pvrdma_dev_api.h` |
//! | [`commands`] | commands and responses | `pvrdma_dev_api.h` |
//! | [`attributes`] | port and queue pair attributes | `pvrdma_verbs.h` |
//! | [`rings`] | ring state, event elements | `pvrdma_ring.h`, `pvrdma_dev_api.h` |
//! | [`completion`] | completion queue entries | `vmw_pvrdma-abi.h` |
//! | [`work`] | send and receive work queue elements, address vectors | `vmw_pvrdma-abi.h` |
//! | [`doorbells`] | UAR pages | `vmw_pvrdma-abi.h` |
//!
//! Structures are plain bytes without padding or alignment, little-endian throughout. The compiler verifies their offsets.

/// Verifies sizes and offsets at compile time.
macro_rules! layout {
    ($type:ty, size $size:expr $(, $field:ident at $offset:expr)* $(,)?) => {
        const _: () = {
            assert!(core::mem::size_of::<$type>() == $size);
            $(assert!(core::mem::offset_of!($type, $field) == $offset);)*
        };
    };
}

/// Declares a plain structure of the ABI.
macro_rules! plain {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }
    };
}

pub mod attributes;
pub mod commands;
pub mod completion;
pub mod doorbells;
pub mod pci;
pub mod registers;
pub mod rings;
pub mod shared_region;
pub mod work;

/// Page size of the interface, bytes, whatever the guest's own page size.
pub const PAGE: u64 = PAGE_SIZE as u64;
/// [`PAGE`] as a `usize`, for arrays.
pub const PAGE_SIZE: usize = 4096;
