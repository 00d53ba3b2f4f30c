//! Memory for frames that a device sends to itself ([`crate::fast_forward`]).

/// Memory of the monitor that the device may use: a ring and a frame.
pub trait Scratch {
    /// Base address for the device: [`RING`] bytes for a ring, then [`FRAME`] bytes for a frame.
    fn device_base(&self) -> u64;
    /// Writes bytes at an offset.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// Size in bytes of the scratch ring: the largest ring, its slack, and a frame behind it.
pub const RING: u64 = 0x1_1000;
/// Size in bytes of the scratch frame: the largest window that a worst-case check requests.
pub const FRAME: u64 = 0x2000;
