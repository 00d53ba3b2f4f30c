//! Identity of the function for the PCI shell around the model, which implements configuration space, BARs and MSI-X.
//!
//! Function 0 of the slot that it shares with PVRDMA needs the multi-function bit in its header type. There is no INTx: a shell must not
//! have an interrupt pin (all drivers of this device use MSI-X where it is offered).

/// PCI vendor: VMware.
pub const VENDOR_ID: u16 = 0x15AD;
/// PCI device: vmxnet3.
pub const DEVICE_ID: u16 = 0x07B0;
/// Subsystem vendor.
pub const SUBSYSTEM_VENDOR_ID: u16 = 0x15AD;
/// Subsystem ID.
pub const SUBSYSTEM_ID: u16 = 0x07B0;
/// PCI revision.
pub const REVISION_ID: u8 = 1;
/// Class code: network controller, Ethernet.
pub const CLASS_CODE: u32 = 0x02_00_00;

/// BAR with the registers of the data path. Must be 32-bit memory and not prefetchable. The driver expects [`BAR_COMMAND`] at index 1,
/// which a 64-bit BAR 0 would occupy.
pub const BAR_DOORBELL: u8 = 0;
/// BAR with the command registers. 32-bit memory, not prefetchable.
pub const BAR_COMMAND: u8 = 1;
/// BAR for the MSI-X table and pending bits. 32-bit memory; served by the shell alone.
pub const BAR_MSIX: u8 = 2;
/// Size in bytes of [`BAR_DOORBELL`] and of [`BAR_COMMAND`].
pub const BAR_SIZE: u64 = 4096;
/// Size in bytes of [`BAR_MSIX`].
pub const BAR_MSIX_SIZE: u64 = 8192;
/// Offset of the MSI-X table in [`BAR_MSIX`].
pub const MSIX_TABLE_OFFSET: u32 = 0;
/// Offset of the MSI-X pending bits in [`BAR_MSIX`].
pub const MSIX_PBA_OFFSET: u32 = 0x1000;
/// Number of MSI-X vectors. With one queue (revision 7) Linux uses vector 0 for the queue and 1 for events, and requests 3. Old drivers use
/// one per queue and one for events.
pub const VECTORS: u16 = 9;

/// Offsets in [`BAR_DOORBELL`] of doorbells: 4-byte writes to TXPROD, RXPROD and RXPROD2 of all queues that a driver may have. A shell
/// makes each an ioeventfd of any value. The model finds work in the rings, and needs neither the value nor each single write (see
/// [`crate::device`]).
pub fn doorbell_offsets() -> impl Iterator<Item = u64> {
    use crate::registers::{QUEUES_MAX, RXPROD, RXPROD2, TXPROD};
    [TXPROD, RXPROD, RXPROD2]
        .into_iter()
        .flat_map(|base| (0..u64::from(QUEUES_MAX)).map(move |q| base + 8 * q))
}
