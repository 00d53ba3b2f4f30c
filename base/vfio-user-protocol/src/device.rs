//! The interface of a device server, and the types that both sides exchange about a device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::migration::Migration;

/// Region index of BAR 0; BARs 1 to 5 follow.
pub const REGION_BAR0: u32 = 0;
/// Region index of the expansion ROM.
pub const REGION_ROM: u32 = 6;
/// Region index of configuration space.
pub const REGION_CONFIG: u32 = 7;
/// Region index of VGA ranges.
pub const REGION_VGA: u32 = 8;
/// Interrupt index of INTx.
pub const INTERRUPT_INTX: u32 = 0;
/// Interrupt index of MSI.
pub const INTERRUPT_MSI: u32 = 1;
/// Interrupt index of MSI-X.
pub const INTERRUPT_MSIX: u32 = 2;
/// Interrupt index of errors.
pub const INTERRUPT_ERROR: u32 = 3;
/// Interrupt index of device requests, for instance to release the device.
pub const INTERRUPT_REQUEST: u32 = 4;

/// A region of a device: a BAR, the ROM, configuration space, or a device-specific one.
#[derive(Debug, Clone)]
pub struct Region {
    /// Index: 0 to 5 are BARs, 6 the ROM, 7 configuration space, 8 VGA, from 9 device-specific.
    pub index: u32,
    /// Size in bytes. 0 means that the region doesn't exist.
    pub size: u64,
    /// Clients may read.
    pub readable: bool,
    /// Clients may write.
    pub writable: bool,
    /// Parts that clients may map. All of a region share one descriptor, and `fd_offset - offset` is the same for all
    /// of them, since the protocol can't express anything else.
    pub mappings: Vec<RegionMapping>,
    /// Addresses whose writes only signal an eventfd.
    pub io_fds: Vec<RegionIoFd>,
}

/// A part of a region that clients may map.
#[derive(Debug, Clone)]
pub struct RegionMapping {
    /// Offset within the region in bytes, page-aligned.
    pub offset: u64,
    /// Size in bytes, whole pages.
    pub size: u64,
    /// The memory.
    pub fd: Arc<OwnedFd>,
    /// Offset of the part within `fd`, page-aligned.
    pub fd_offset: u64,
}

/// An address within a region whose writes only signal an eventfd (a KVM ioeventfd on the client's side).
#[derive(Debug, Clone)]
pub struct RegionIoFd {
    /// Offset within the region in bytes.
    pub offset: u64,
    /// Width in bytes of the writes that signal: 0 (any), 1, 2, 4 or 8.
    pub size: u64,
    /// If set, only writes of this value signal.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// The interrupts of one index of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupts {
    /// Index: 0 INTx, 1 MSI, 2 MSI-X, 3 errors, 4 requests, from 5 device-specific.
    pub index: u32,
    /// Number of interrupts.
    pub count: u32,
    /// `VFIO_IRQ_INFO_*`: see [`InterruptFlags`].
    pub flags: InterruptFlags,
}

/// Properties of an index' interrupts (`VFIO_IRQ_INFO_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InterruptFlags {
    /// They can signal eventfds.
    pub eventfd: bool,
    /// They can be masked and unmasked by [`SetInterrupts`].
    pub maskable: bool,
    /// Each masks itself when it fires (level-triggered INTx) until it is unmasked.
    pub automasked: bool,
    /// They are all set up at once; single ones can't be added later.
    pub no_resize: bool,
}

impl InterruptFlags {
    /// Eventfds only: the usual MSI-X vectors of a device server.
    pub const EVENTFD: Self = Self { eventfd: true, maskable: false, automasked: false, no_resize: false };
}

/// A range of client memory that the device may access.
#[derive(Debug)]
pub struct DmaMapping {
    /// Its address for the device (guest-physical without an IOMMU).
    pub address: u64,
    /// Size in bytes; not 0, and `address + size` doesn't overflow.
    pub size: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The memory. `None` if the client offers access by message only, which this server doesn't support. A device that
    /// needs the memory refuses the mapping.
    pub fd: Option<OwnedFd>,
    /// Offset of the range within `fd`. Not checked against the file's size: the client may lie.
    pub fd_offset: u64,
}

/// A change of interrupts `start..start + count` of an index.
#[derive(Debug)]
pub enum SetInterrupts {
    /// Connects each interrupt to its eventfd; `None` detaches. One entry per interrupt.
    Eventfds(Vec<Option<OwnedFd>>),
    /// Triggers those that are `true`, as if the device had (a self-test of the client).
    Trigger(Vec<bool>),
    /// Masks those that are `true`.
    Mask(Vec<bool>),
    /// Unmasks those that are `true`.
    Unmask(Vec<bool>),
    /// Detaches all eventfds of the index (`start` and `count` are 0).
    Disable,
}

/// Credentials of the socket's peer (SO_PEERCRED) at connect time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Process ID in this process' PID namespace; may have been reused since.
    pub pid: i32,
}

/// A device that a [`crate::server::Server`] serves.
///
/// All calls for one connection come from its thread, one at a time, between `authorize` and `disconnected`. The server
/// has checked form and bounds of the client's messages: regions and interrupt indices exist, offsets are within them,
/// and DMA ranges don't overlap. Values within them are hostile input. An `Err` becomes an error reply with its OS
/// error number (EIO if it has none); the connection stays open.
///
/// ```text
/// authorize -> (dma_map | dma_unmap | set_interrupts | region_read | region_write | reset)* -> disconnected
/// ```
pub trait Device: Send + Sync {
    /// Returns whether this peer may connect. Called before the server reads a byte.
    fn authorize(&self, peer: &Peer) -> bool;
    /// Returns all regions. Called once per connection.
    fn regions(&self) -> Vec<Region>;
    /// Returns all interrupts. Called once per connection.
    fn interrupts(&self) -> Vec<Interrupts>;
    /// Reads `data.len()` bytes (1 to 1 MiB) at `offset` of a readable region.
    ///
    /// # Errors
    /// The device refuses; the client gets the error number.
    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes `data` (1 byte to 1 MiB) at `offset` of a writable region. Also called for posted writes, whose errors
    /// are dropped.
    ///
    /// # Errors
    /// The device refuses; the client gets the error number.
    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Maps memory that the device may access from now on.
    ///
    /// # Errors
    /// The memory can't be mapped; then the device doesn't know it.
    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()>;
    /// Unmaps exactly one range of [`Device::dma_map`]. The device has stopped using it on return.
    ///
    /// # Errors
    /// The device can't stop using it; then it stays mapped.
    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()>;
    /// Changes interrupts.
    ///
    /// # Errors
    /// The device doesn't support the change.
    fn set_interrupts(&self, index: u32, start: u32, count: u32, change: SetInterrupts) -> io::Result<()>;
    /// Returns the interface for migration; `None` if the device can't migrate.
    fn migration(&self) -> Option<&dyn Migration>;
    /// Conventional reset: configuration space and device as at power-on. DMA mappings and eventfds stay.
    ///
    /// # Errors
    /// The reset failed.
    fn reset(&self) -> io::Result<()>;
    /// The client has closed the connection, regularly or not: release all its memory and eventfds, and reset. The
    /// server accepts the next client on return.
    fn disconnected(&self);
}
