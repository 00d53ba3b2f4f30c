//! Dispatch of exits by address: one [`AddressSpace`] for I/O ports, one for memory-mapped I/O.

/// A device at a range of addresses. Called from vCPU threads, possibly several at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` (1, 2, 4 or 8) bytes at `offset` from the start of the range. Offset and length
    /// come from the guest.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes likewise.
    fn write(&self, offset: u64, data: &[u8]);
}
