//! The PCI function by which a guest is a neighbour: identity, BARs, registers, vectors. Version 2.
//!
//! | BAR | contents |
//! |---|---|
//! | 0 | registers (trapped) and doorbells (a store signals the peer, in the kernel) |
//! | 2 | memory: the segment of the pair with slot *n* at *n* times [`SEGMENT_STRIDE`]; at the own slot, the status page |
//! | 4 | MSI-X: vector 0 when [`CHANGED`] has something, 1 + *n* when the peer in slot *n* signals |
//!
//! Windows aren't in a BAR: each guest may place BARs elsewhere, while a window has the same address in every guest.

use crate::window::{MAX_EXTENTS, MAX_SLOTS};

/// PCI vendor: Red Hat's ID for virtual devices. QEMU's docs/specs/pci-ids reserves devices 0x10f0 to 0x10ff for experiments without
/// registration, and requires a registered ID before a product ships.
pub const VENDOR: u16 = 0x1af4;
/// PCI device, an experimental ID until the project has a registered one. Another experiment may have the same, so a driver checks
/// [`MAGIC`] first.
pub const DEVICE: u16 = 0x10f5;
/// Revision, raised with [`VERSION`].
pub const REVISION: u8 = 2;
/// Subsystem vendor and subsystem.
pub const SUBSYSTEM: (u16, u16) = (0x1af4, 0x4357);

/// BAR of registers and doorbells.
pub const BAR_REGISTERS: u8 = 0;
/// Size of that BAR, bytes.
pub const BAR_REGISTERS_SIZE: u64 = 0x8000;
/// BAR of segments.
pub const BAR_SEGMENTS: u8 = 2;
/// BAR of the MSI-X table and pending bits.
pub const BAR_MSIX: u8 = 4;

/// `CWNB` in memory order; 32 bits.
pub const MAGIC: u32 = u32::from_le_bytes(*b"CWNB");
/// Version of this interface.
pub const VERSION: u32 = 2;

/// [`MAGIC`]. Registers have 32 bits and are read-only, unless stated otherwise.
pub const REGISTER_MAGIC: u64 = 0x00;
/// Value [`VERSION`]; a driver for another version refuses the device.
pub const REGISTER_VERSION: u64 = 0x04;
/// The own slot; all ones before the first contact with the host daemon.
pub const OWN_SLOT: u64 = 0x08;
/// Number of slots.
pub const SLOTS: u64 = 0x0c;
/// Start of the first window; 64 bits.
pub const BASE: u64 = 0x10;
/// Distance between windows, bytes; 64 bits.
pub const STRIDE: u64 = 0x18;
/// Entries per ring.
pub const ENTRIES: u64 = 0x20;
/// Distance between segments in BAR 2, bytes.
pub const SEGMENT_STRIDE: u64 = 0x24;
/// Interval at which a driver increments the first word of its status page, ms.
pub const HEARTBEAT_MS: u64 = 0x28;
/// Write 1: a driver is loaded, and counts. Write 0: it is unloaded, and all connections end except those of [`PEER_KEEP`].
pub const DRIVER: u64 = 0x2c;
/// A bit per slot whose block has changed; reading clears them; 64 bits.
pub const CHANGED: u64 = 0x30;
/// Number of this guest's stores to windows, which were discarded; 64 bits.
pub const DISCARDED: u64 = 0x38;

/// Block of slot 0.
pub const PEERS: u64 = 0x4000;
/// Distance between blocks, bytes.
pub const PEER_STRIDE: u64 = 0x100;
/// In a block: [`PEER_NONE`], [`PEER_OFFERED`] or [`PEER_GONE`].
pub const PEER_STATE: u64 = 0x00;
/// In a block: the epoch.
pub const PEER_EPOCH: u64 = 0x04;
/// In a block: start of the window; 64 bits.
pub const PEER_WINDOW: u64 = 0x08;
/// In a block: number of RAM extents of the window.
pub const PEER_EXTENTS: u64 = 0x10;
/// In a block: write the epoch when nothing of window and segment is in use any more, or to end the connection.
pub const PEER_RELEASE: u64 = 0x14;
/// In a block: why the connection ended; see [`reason`].
pub const PEER_REASON: u64 = 0x18;
/// In a block: write the epoch before [`DRIVER`] gets 0, if pages of the window are still in use. Window and segment then stay mapped
/// without a driver, and the block is empty, until the epoch is written to [`PEER_RELEASE`].
pub const PEER_KEEP: u64 = 0x1c;
/// In a block: RAM extents, offset in the window and bytes, 64 bits each.
pub const PEER_EXTENT: u64 = 0x20;
/// In a block: the VM's complete name, padded with zeros.
pub const PEER_NAME: u64 = 0x60;
/// Bytes of [`PEER_NAME`], the limit of a VM's name.
pub const PEER_NAME_SIZE: usize = 64;
/// In a block: the Ethernet address of this VM's device for that peer, 6 bytes in the order of transmission and 2 zeros.
pub const PEER_MAC: u64 = 0xa0;

/// A bit per slot: members that both this VM and the peer in slot 0 may read, so that each may name their memory to the other
/// (docs/design/neighbours.md); 64 bits.
pub const COMMON: u64 = 0x2400;
/// Distance between these registers, bytes.
pub const COMMON_STRIDE: u64 = 8;

/// No peer is there, or none that this VM may see.
pub const PEER_NONE: u32 = 0;
/// Window and segment are mapped.
pub const PEER_OFFERED: u32 = 1;
/// The connection has ended. Window and segment stay mapped until it is released.
pub const PEER_GONE: u32 = 2;

/// Doorbell of slot 0: a 32-bit store of any value signals the peer.
pub const DOORBELLS: u64 = 0x3000;
/// Distance between doorbells, bytes.
pub const DOORBELL_STRIDE: u64 = 8;

/// Values of [`PEER_REASON`].
pub mod reason {
    /// The peer's monitor has ended.
    pub const LEFT: u32 = 1;
    /// The peer's monitor doesn't report.
    pub const SILENT: u32 = 2;
    /// The peer's guest hangs.
    pub const HUNG: u32 = 3;
    /// This VM itself was silent or hung.
    pub const OWN: u32 = 4;
    /// The peer has ended the connection.
    pub const GIVEN_UP: u32 = 5;
    /// The host daemon was replaced, or is gone.
    pub const REGISTRY: u32 = 6;
}

/// Number of MSI-X vectors with `slots` slots.
#[must_use]
pub const fn vectors(slots: u32) -> u32 {
    slots + 1
}

const _: () = {
    assert!(PEERS + PEER_STRIDE * MAX_SLOTS as u64 <= BAR_REGISTERS_SIZE);
    assert!(COMMON + COMMON_STRIDE * MAX_SLOTS as u64 <= DOORBELLS);
    assert!(DOORBELLS + DOORBELL_STRIDE * MAX_SLOTS as u64 <= PEERS);
    assert!(
        PEER_EXTENT + 16 * MAX_EXTENTS as u64 <= PEER_NAME
            && PEER_NAME + PEER_NAME_SIZE as u64 <= PEER_MAC
            && PEER_MAC + 8 <= PEER_STRIDE
    );
};
