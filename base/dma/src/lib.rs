//! Guest memory as a device reaches it: by the addresses that the guest hands out, every access checked.
//!
//! | module | holds |
//! |---|---|
//! | [`access`] | the trait [`Dma`]: all that a device model may do with guest memory |
//! | [`mapped`] | [`MappedMemory`]: the RAM of a guest that runs in another process, mapped from its memfds |
//! | [`arriving`] | its not-present pages during a post-copy migration |
//! | [`alias`] | [`Alias`]: a second view of it, in another order, for a device of the host |
//! | [`heap`] | [`HeapMemory`]: plain memory for tests, simulation and model checking |
//!
//! The guest's CPUs write this memory at any time. Nothing here hands out a reference into it: data is copied out once, validated, and the
//! copy is used; single words are loaded and stored atomically.

pub mod access;
pub mod alias;
pub mod arriving;
mod dirty;
pub mod heap;
mod map_error;
pub mod mapped;

pub use access::{Dma, DmaFault};
pub use alias::{Alias, AliasError};
pub use heap::HeapMemory;
pub use map_error::MapError;
pub use mapped::{MappedMemory, MemoryRegion, prefetch_object};
