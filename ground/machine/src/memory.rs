//! Guest memory types. RAM lies only in sealed memfds, so that it can be handed to other processes.

pub use vm_memory::bitmap::{AtomicBitmap, Bitmap, BitmapSlice};
pub use vm_memory::{
    Address, ByteValued, Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend,
    GuestMemoryError, GuestMemoryRegion, GuestUsize, Le16, Le32, Le64, VolatileSlice,
};

/// One guest's RAM, with a bitmap of the pages that devices of this process have written.
pub type GuestMemory = vm_memory::GuestMemoryMmap<AtomicBitmap>;
/// The same, replaceable while devices run. Devices take a snapshot per request: `space.memory()`.
pub type GuestMemorySpace = GuestMemoryAtomic<GuestMemory>;
