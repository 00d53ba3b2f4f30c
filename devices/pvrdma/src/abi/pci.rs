//! Identity of the PCI function and its interrupt vectors (Linux `pvrdma_dev_api.h`).

use super::PAGE;

/// PCI vendor ID of VMware.
pub const VENDOR: u16 = 0x15AD;
/// The paravirtual RDMA function. The driver matches vendor and device only.
pub const DEVICE: u16 = 0x0820;
/// Class code: network controller, other.
pub const CLASS: [u8; 3] = [0x02, 0x80, 0x00];
/// Function number in the slot whose function 0 is the vmxnet3.
pub const FUNCTION: u8 = 1;

/// MSI-X table and pending bits; a 32-bit memory BAR, since a 64-bit one would occupy BAR1 too.
pub const MSIX_BAR: u8 = 0;
/// Size of [`MSIX_BAR`], bytes.
pub const MSIX_BAR_SIZE: u64 = 0x4000;
/// Offset of the MSI-X table in [`MSIX_BAR`].
pub const MSIX_TABLE: u32 = 0;
/// Offset of the pending bit array in [`MSIX_BAR`].
pub const MSIX_PENDING: u32 = 0x2000;
/// Registers; a 32-bit memory BAR.
pub const REGISTER_BAR: u8 = 1;
/// Size of [`REGISTER_BAR`], bytes.
pub const REGISTER_BAR_SIZE: u64 = PAGE;
/// UAR pages; a 64-bit memory BAR.
pub const UAR_BAR: u8 = 2;

/// Number of interrupt vectors.
pub const VECTORS: u16 = 3;
/// A command's response was written.
pub const VECTOR_RESPONSE: u16 = 0;
/// Asynchronous events were posted.
pub const VECTOR_ASYNC: u16 = 1;
/// Completion notifications were posted.
pub const VECTOR_COMPLETION: u16 = 2;

/// Size of [`UAR_BAR`], bytes.
#[must_use]
pub const fn uar_bar_size(max_uar: u32) -> u64 {
    max_uar as u64 * PAGE
}
