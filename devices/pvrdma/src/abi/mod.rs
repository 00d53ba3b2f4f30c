//! Numbers and layouts of the guest ABI, as Linux' `vmw_pvrdma` and rdma-core's `libvmw_pvrdma` have them (interface
//! version 20). Section numbers refer to `pvrdma.md`, the project's collection of facts about the interface.
//!
//! | module | holds | section |
//! |---|---|---|
//! | [`pci`] | identity, BARs, interrupt vectors | 2, 11 |
//! | [`registers`] | BAR1 | 3 |
//! | [`shared_region`] | device shared region, capabilities | 4 |
//! | [`commands`] | commands and responses | 6 |
//! | [`attributes`] | port and queue pair attributes | 6.4 |
//! | [`rings`] | ring state, event elements | 7, 11 |
//! | [`completion`] | completion queue entries | 8 |
//! | [`work`] | send and receive work queue elements, address vectors | 9, 12 |
//! | [`doorbells`] | UAR pages | 10 |
//!
//! Structures are plain bytes without padding or alignment, little-endian throughout. Their offsets are proven when the crate
//! is compiled.

/// Proves sizes and offsets at compile time.
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

/// Pages of the interface, bytes; whatever the guest's own page size.
pub const PAGE: u64 = PAGE_SIZE as u64;
/// The same, for arrays.
pub const PAGE_SIZE: usize = 4096;
