//! What a device server implements, and the facts that both sides exchange about a device.

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
/// Interrupt index of device requests (for instance, to give the device back).
pub const INTERRUPT_REQUEST: u32 = 4;

/// A region of a device: a BAR, the ROM, configuration space, or a device-specific one.
#[derive(Debug, Clone)]
pub struct Region {
    /// Index: 0 to 5 are BARs, 6 the ROM, 7 configuration space, 8 VGA, from 9 device-specific.
    pub index: u32,
    /// Size in bytes. 0 means that there is no such region (the same as leaving it out).
    pub size: u64,
    /// Clients may read.
    pub readable: bool,
    /// Clients may write.
    pub writable: bool,
    /// Parts that clients may map. All of a region share one descriptor, and `fd_offset - offset` is the same
    /// for all of them: the protocol can express nothing else.
    pub mappings: Vec<RegionMapping>,
    /// Addresses whose writes only ring an eventfd.
    pub io_fds: Vec<RegionIoFd>,
}

/// A part of a region that is memory.
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

/// An address within a region whose writes only ring an eventfd (a KVM ioeventfd on the client's side).
#[derive(Debug, Clone)]
pub struct RegionIoFd {
    /// Offset within the region in bytes.
    pub offset: u64,
    /// Width in bytes of the writes that ring: 0 (any), 1, 2, 4 or 8.
    pub size: u64,
    /// Only this value rings, where given.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// A kind of interrupt of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupts {
    /// Index: 0 INTx, 1 MSI, 2 MSI-X, 3 errors, 4 requests, from 5 device-specific.
    pub index: u32,
    /// How many there are.
    pub count: u32,
    /// `VFIO_IRQ_INFO_*`: see [`InterruptFlags`].
    pub flags: InterruptFlags,
}

/// What can be done with interrupts of one index (`VFIO_IRQ_INFO_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InterruptFlags {
    /// They can be signalled through eventfds.
    pub eventfd: bool,
    /// They can be masked and unmasked by [`SetInterrupts`].
    pub maskable: bool,
    /// Each masks itself when it fires (level-triggered INTx) until it is unmasked.
    pub automasked: bool,
    /// All are set up at once; single ones can't be added later.
    pub no_resize: bool,
}

impl InterruptFlags {
    /// Signalled by eventfd, and nothing else: what MSI-X vectors of a device server usually are.
    pub const EVENTFD: Self = Self { eventfd: true, maskable: false, automasked: false, no_resize: false };
}

/// A range of client memory that the device may reach.
#[derive(Debug)]
pub struct DmaMapping {
    /// Its address in the device's eyes (guest-physical without an IOMMU).
    pub address: u64,
    /// Size in bytes; not 0, and `address + size` doesn't overflow.
    pub size: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The memory. `None` when the client only offers access by message, which this server side doesn't use:
    /// a device that needs the memory refuses the mapping with an error.
    pub fd: Option<OwnedFd>,
    /// Offset of the range within `fd`. Not checked against the file's size: the client may lie.
    pub fd_offset: u64,
}

/// What happens to interrupts `start..start + count` of an index.
#[derive(Debug)]
pub enum SetInterrupts {
    /// From now on each signals its eventfd; `None` entries are detached. One entry per interrupt.
    Eventfds(Vec<Option<OwnedFd>>),
    /// As if the device had raised those that are `true` (a self-test of the client).
    Trigger(Vec<bool>),
    /// Masks those that are `true`.
    Mask(Vec<bool>),
    /// Unmasks those that are `true`.
    Unmask(Vec<bool>),
    /// Detaches all eventfds of the index (`start` and `count` are 0).
    Disable,
}

/// Who is at the other end of the socket (SO_PEERCRED), as of when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Process ID, seen from this process's PID namespace; may have been reused since.
    pub pid: i32,
}

/// A device that a [`crate::server::Server`] offers.
///
/// All calls for one connection come from the thread that serves it, one at a time, between `authorize` and
/// `disconnected`. What the client sent was checked for form and bounds: regions and interrupt indices exist,
/// offsets lie within them, DMA ranges don't overlap. Values within are as hostile as the client is.
/// An `Err` becomes an error reply with its OS error number (EIO where it has none); the connection goes on.
///
/// ```text
/// authorize -> (dma_map | dma_unmap | set_interrupts | region_read | region_write | reset)* -> disconnected
/// ```
pub trait Device: Send + Sync {
    /// Whether this peer may connect; asked before a byte is read.
    fn authorize(&self, peer: &Peer) -> bool;
    /// All regions. Asked once per connection.
    fn regions(&self) -> Vec<Region>;
    /// All kinds of interrupts. Asked once per connection.
    fn interrupts(&self) -> Vec<Interrupts>;
    /// Reads `data.len()` bytes (1 to 1 MiB) at `offset` of a readable region.
    ///
    /// # Errors
    /// When the device refuses; the client gets the error number.
    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes likewise. Also called for posted writes, whose error nobody hears.
    ///
    /// # Errors
    /// When the device refuses; the client gets the error number.
    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()>;
    /// The device may reach this memory from now on.
    ///
    /// # Errors
    /// When it can't be mapped; then it isn't known to the device.
    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()>;
    /// Takes back exactly one range of [`Device::dma_map`]. The device has let go of it when this returns.
    ///
    /// # Errors
    /// When the device can't let go of it; then it stays mapped.
    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()>;
    /// Changes interrupts.
    ///
    /// # Errors
    /// When the device can't do that with them.
    fn set_interrupts(&self, index: u32, start: u32, count: u32, change: SetInterrupts) -> io::Result<()>;
    /// How its state is handed out and taken; `None`: it can't move.
    fn migration(&self) -> Option<&dyn Migration>;
    /// Conventional reset: configuration space and device as at power-on. DMA mappings and eventfds stay.
    ///
    /// # Errors
    /// When it couldn't be reset.
    fn reset(&self) -> io::Result<()>;
    /// The client has gone, in order or not: let go of all its memory and eventfds, and reset. The next client
    /// is accepted when this returns.
    fn disconnected(&self);
}
