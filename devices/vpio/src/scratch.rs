//! Memory for frames that a device sends to itself ([`crate::fast_forward`]).

/// Memory of the monitor's that the device may use: a ring and a frame.
pub trait Scratch {
    /// First byte in the device's addresses: [`RING`] bytes for a ring, then [`FRAME`] for a frame.
    fn device_base(&self) -> u64;
    /// Writes bytes at an offset.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// Bytes of the scratch ring: the largest ring, its slack, and a frame behind it.
pub const RING: u64 = 0x1_1000;
/// Bytes of the scratch frame: what a worst-case check would ask for.
pub const FRAME: u64 = 0x2000;
