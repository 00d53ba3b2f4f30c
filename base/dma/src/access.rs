//! What a device model may do with guest memory.

use crate::alias::{Alias, AliasError};

/// An access that does not lie wholly within the memory the guest has, or is not aligned as it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The guest's address {address:#x} with length {len:#x} is not memory that this device may access")]
pub struct DmaFault {
    /// Guest DMA address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Guest memory by guest DMA address (the guest-physical address where there is no virtual IOMMU).
///
/// Threads and the guest's CPUs may access the same bytes concurrently. A bulk access then copies any mixture of old and new bytes; an
/// access to an aligned word is atomic. An access with a single byte outside of the guest's memory changes nothing and fails. An access may
/// cross from one region into an adjacent one.
pub trait Dma {
    /// Copies guest memory out. Each byte is loaded once.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault>;

    /// Copies into guest memory.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault>;

    /// Sets `len` bytes to zero.
    fn zero(&self, address: u64, len: u64) -> Result<(), DmaFault>;

    /// Loads an aligned word with acquire order: what the guest stored before it stored this is visible.
    fn load_u32(&self, address: u64) -> Result<u32, DmaFault>;

    /// Stores an aligned word with release order: a guest CPU that loads it also sees all earlier writes of this thread.
    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault>;

    /// Exchanges an aligned word, sequentially consistent. Returns the previous value.
    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault>;

    /// Stores `new` in the aligned word if it holds `expected`, atomically against the guest's CPUs. Returns the previous value, which
    /// equals `expected` if `new` was stored.
    fn compare_exchange_u64(&self, address: u64, expected: u64, new: u64) -> Result<u64, DmaFault>;

    /// Adds to the aligned word, wrapping, atomically against the guest's CPUs. Returns the previous value.
    fn fetch_add_u64(&self, address: u64, operand: u64) -> Result<u64, DmaFault>;

    /// Copies `len` bytes to another guest's memory without a buffer in between. Fails with the first invalid range. After a failure
    /// nothing was written, or a prefix if memory was unmapped concurrently.
    fn copy_to(&self, from: u64, to: &Self, address: u64, len: u64) -> Result<(), CopyFault>;

    /// Prefetches a range into this CPU's cache. A hint: memory doesn't change, and a range outside of the guest's memory is ignored.
    fn prefetch(&self, address: u64, len: u64) {
        let _ = (address, len);
    }

    /// As [`Dma::prefetch`], for a range that will be written: other CPUs' copies of its cache lines are invalidated.
    fn prefetch_write(&self, address: u64, len: u64) {
        let _ = (address, len);
    }

    /// Whether the guest has not-present pages: a post-copy migration has not delivered them yet.
    #[inline]
    fn is_late(&self) -> bool {
        false
    }

    /// Whether an access to the range would fail now because of not-present pages. Requests those pages from the source. With `write`, a
    /// page that the range covers wholly needn't be present.
    fn awaits(&self, address: u64, len: u64, write: bool) -> bool {
        let _ = (address, len, write);
        false
    }

    /// How many accesses have failed at a not-present page. A caller that compares two readings learns whether an error between them is
    /// temporary.
    fn absences(&self) -> u64 {
        0
    }

    /// Whether the whole range is the guest's memory.
    fn check(&self, address: u64, len: u64) -> Result<(), DmaFault>;

    /// A second, writable view of pieces of guest memory (address, length), contiguous in the given order, for a device of the host. All
    /// but the first piece begin at a page of 4096 bytes, all but the last end at one.
    ///
    /// # Errors
    /// When a piece isn't the guest's, or this memory can't be mapped twice.
    fn alias(&self, pieces: &[(u64, u64)]) -> Result<Alias, AliasError>;
}

/// Which side of [`Dma::copy_to`] was at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyFault {
    /// The source range.
    #[error("The source of a copy is at fault")]
    Source(#[source] DmaFault),
    /// The destination range.
    #[error("The destination of a copy is at fault")]
    Destination(#[source] DmaFault),
}

/// Reads a plain structure or array of `N` bytes: the copy that is validated and used.
pub fn read_array<const N: usize>(memory: &impl Dma, address: u64) -> Result<[u8; N], DmaFault> {
    let mut bytes = [0; N];
    memory.read(address, &mut bytes)?;
    Ok(bytes)
}
