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
/// Accesses from several threads, and by the guest's CPUs, may overlap: bulk accesses may then see any mixture
/// of old and new bytes, word accesses are atomic. An access that touches a single byte outside of the guest's
/// memory does nothing and fails. Accesses may straddle regions that are adjacent in the guest.
pub trait Dma {
    /// Copies guest memory out, once. No byte is read twice.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault>;

    /// Copies into guest memory.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault>;

    /// Sets `len` bytes to zero.
    fn zero(&self, address: u64, len: u64) -> Result<(), DmaFault>;

    /// Loads an aligned word with acquire order: what the guest stored before it stored this is visible.
    fn load_u32(&self, address: u64) -> Result<u32, DmaFault>;

    /// Stores an aligned word with release order: whoever loads it sees all that was written before.
    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault>;

    /// Exchanges an aligned word, sequentially consistent. Returns the value before.
    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault>;

    /// Stores `new` in the aligned word if it holds `expected`, atomically against the guest's CPUs. Returns the
    /// value before, equal to `expected` when it was stored.
    fn compare_exchange_u64(&self, address: u64, expected: u64, new: u64) -> Result<u64, DmaFault>;

    /// Adds to the aligned word, wrapping, atomically against the guest's CPUs. Returns the value before.
    fn fetch_add_u64(&self, address: u64, operand: u64) -> Result<u64, DmaFault>;

    /// Copies `len` bytes to another guest's memory: exactly one copy. Fails with the first range at fault, and then
    /// has written nothing, or a prefix if memory was unmapped meanwhile.
    fn copy_to(&self, from: u64, to: &Self, address: u64, len: u64) -> Result<(), CopyFault>;

    /// Asks the CPU to have a range in its cache soon. A hint: no effect on memory, none at all where it isn't the guest's.
    fn prefetch(&self, address: u64, len: u64) {
        let _ = (address, len);
    }

    /// As [`Dma::prefetch`], for a range that will be written: other CPUs lose their copies.
    fn prefetch_write(&self, address: u64, len: u64) {
        let _ = (address, len);
    }

    /// Whether memory of the guest is still to come from another host.
    #[inline]
    fn is_late(&self) -> bool {
        false
    }

    /// Whether bytes of a range are still to come, so that an access would fail now and not later. They are asked for then. Pages that are
    /// overwritten as a whole (`write`) needn't be there.
    fn awaits(&self, address: u64, len: u64, write: bool) -> bool {
        let _ = (address, len, write);
        false
    }

    /// How many accesses have failed as their memory was still to come: whether an error is one that passes is told by comparing.
    fn absences(&self) -> u64 {
        0
    }

    /// Whether the whole range is the guest's memory.
    fn check(&self, address: u64, len: u64) -> Result<(), DmaFault>;

    /// A second, writable view of pieces of guest memory (address, length), one behind the other, for a device of the host. All but the
    /// first begin with a page of 4096 bytes, all but the last end with one.
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
