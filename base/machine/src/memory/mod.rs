//! Guest memory types. RAM is allocated only in sealed memfds, so that other processes can map it.

mod layout;
pub mod postcopy;
mod present;
mod ram;
pub mod shared;
mod userfault;
mod windows;

pub use layout::{HIGH_RAM_START, LOW_RAM_END, RamLayout, RamRange};
pub use ram::{GuestRam, HostNuma, NumaMode, PageSize, RamOptions, RamRegion, Readers};
pub use userfault::{Userfault, UserfaultError};
pub use windows::{WindowError, is_writable, map_window, unmap_window};

pub use vm_memory::bitmap::{AtomicBitmap, Bitmap, BitmapSlice};
pub use vm_memory::{
    Address, ByteValued, Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryAtomic,
    GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, GuestUsize, Le16, Le32, Le64, VolatileSlice,
};

/// One guest's RAM, with a bitmap of the pages that devices of this process have written, and the windows of neighbours' memory that
/// devices may read ([`map_window`]).
pub type GuestMemory = vm_memory::GuestMemoryMmap<AtomicBitmap>;
/// Guest memory whose regions can change while devices run. Devices take a snapshot per request: `space.memory()`.
pub type GuestMemorySpace = GuestMemoryAtomic<GuestMemory>;

/// Guest RAM could not be laid out or allocated.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size isn't possible.
    #[error("Memory of {size} bytes for NUMA node {node} is not possible: {reason}")]
    BadSize {
        /// Guest NUMA node.
        node: usize,
        /// Requested bytes.
        size: u64,
        /// Why, and which sizes are possible.
        reason: String,
    },
    /// No memory at all.
    #[error("The VM has no memory node; give it at least one with 1 MiB or more")]
    NoNodes,
    /// More memory than the host has.
    #[error(
        "The VM wants {wanted} bytes of memory, but the host has {available} bytes available; choose less"
    )]
    TooLarge {
        /// Requested bytes.
        wanted: u64,
        /// Memory and swap of the host; with prefault, the part that is available now.
        available: u64,
    },
    /// Not enough huge pages.
    #[error(
        "{wanted} huge pages of {page_kib} KiB are needed for NUMA node {node}, but {free} are free; reserve more: echo {suggest} > /sys/kernel/mm/hugepages/hugepages-{page_kib}kB/nr_hugepages"
    )]
    NoHugePages {
        /// Guest NUMA node.
        node: usize,
        /// Pages needed.
        wanted: u64,
        /// Pages free.
        free: u64,
        /// Size of a page in KiB.
        page_kib: u64,
        /// Value to write into nr_hugepages.
        suggest: u64,
    },
    /// The host refused an operation.
    #[error("Memory for NUMA node {node} could not be {what}")]
    Host {
        /// Guest NUMA node.
        node: usize,
        /// What was tried, with its values.
        what: String,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
}
