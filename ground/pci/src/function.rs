//! The trait that every PCI function implements, whatever is behind it: a virtio device of this process,
//! a vfio-user server, a VFIO device or a reference model.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::interrupt::IntxLine;

/// What kind of address space a BAR decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum BarKind {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Memory32,
    /// Memory anywhere; takes two BAR registers.
    Memory64,
}

/// One base address register that a function implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BarLayout {
    /// Register index, 0 to 5.
    pub index: u8,
    /// Address space.
    pub kind: BarKind,
    /// Prefetchable bit (memory only).
    pub prefetchable: bool,
    /// Size in bytes, a power of two; at least 4 (I/O) or 16 (memory), and a whole page for [`BarMapping`].
    pub size: u64,
}

/// A BAR range that is ordinary memory: the monitor maps it into the guest, so accesses never exit.
#[derive(Debug)]
pub struct BarMapping {
    /// BAR index.
    pub bar: u8,
    /// Offset within the BAR, page-aligned.
    pub offset: u64,
    /// Length in bytes, whole pages.
    pub len: u64,
    /// The memory.
    pub fd: Arc<OwnedFd>,
    /// Offset of the range within `fd`.
    pub fd_offset: u64,
    /// Whether guest writes exit (and reach [`PciFunction::bar_write`]) instead of landing in memory.
    pub read_only: bool,
}

/// A BAR address whose writes only ring an eventfd, handled in the kernel (ioeventfd).
#[derive(Debug, Clone)]
pub struct Doorbell {
    /// BAR index.
    pub bar: u8,
    /// Offset within the BAR.
    pub offset: u64,
    /// Width in bytes of the writes that ring: 0 (any), 1, 2, 4 or 8.
    pub width: u8,
    /// Only this value rings, where given.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// Bytes of a BAR whose writes may wait until the guest does something else ([`PciFunction::late_writes`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateWrites {
    /// Number of the BAR.
    pub bar: u8,
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// What a configuration write changed, so that the bus acts on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConfigEffect {
    /// BAR addresses or the decode bits of the command register changed.
    pub decoding_changed: bool,
    /// The set of doorbells or mappings changed (for instance by an MSI-X or device-specific write).
    pub resources_changed: bool,
}

/// Where a BAR now answers, as configuration space says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarPlace {
    /// The BAR.
    pub layout: BarLayout,
    /// Guest-physical address or port, `None` while its decoding is off or the address is invalid.
    pub address: Option<u64>,
}

/// A PCI function. Calls come from vCPU threads and from the API thread, at any time, possibly at
/// once; implementations lock what they need. Offsets and data come from the guest: hostile.
///
/// ```text
/// created -> plugged (bus calls attach_intx) -> configured by the guest <-> reset -> unplugged (dropped)
/// ```
pub trait PciFunction: Send + Sync {
    /// Name for logs, counters and the device tree, unique in the VM (for instance `disk0`).
    fn name(&self) -> &str;
    /// BARs that this function implements.
    fn bars(&self) -> Vec<BarLayout>;
    /// Reads 1, 2 or 4 bytes of configuration space (4 KiB with ECAM) within one aligned dword.
    fn config_read(&self, offset: u16, data: &mut [u8]);
    /// Writes likewise.
    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect;
    /// Where the BARs answer at present.
    fn places(&self) -> Vec<BarPlace>;
    /// Reads `data.len()` (1 to 8) bytes at `offset` of a BAR.
    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]);
    /// Writes likewise.
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]);
    /// Writes that ring eventfds.
    fn doorbells(&self) -> Vec<Doorbell>;
    /// Writes that needn't leave the guest at once: they come in order, before any other access of any BAR and before a pause, but perhaps
    /// no sooner than the guest's next such access. None by default.
    fn late_writes(&self) -> Vec<LateWrites> {
        Vec::new()
    }
    /// Ranges to map into the guest.
    fn mappings(&self) -> Vec<BarMapping>;
    /// The bus hands over the INTx wire of the slot; called once, before the guest runs.
    fn attach_intx(&self, line: Arc<dyn IntxLine>);
    /// Conventional reset (machine reset): configuration space and device return to power-on state.
    fn reset(&self) -> Result<(), FunctionError>;
    /// Stops all activity on guest memory and interrupts, for a pause. Returns when it is quiet.
    fn quiesce(&self) -> Result<(), FunctionError>;
    /// Undoes [`PciFunction::quiesce`].
    fn unquiesce(&self) -> Result<(), FunctionError>;
    /// Complete state while quiesced, versioned by the function itself. A function that can't be saved
    /// says so with [`FunctionError::NotSaveable`].
    fn save(&self) -> Result<SavedFunction, FunctionError>;
    /// State and counters for `causeway inspect`.
    fn inspect(&self) -> serde_json::Value;
}

/// Saved state of a function: opaque here, versioned by its owner. Restoring is a constructor of the
/// concrete type.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedFunction {
    /// Type name that can restore it, for instance `virtio-block`.
    pub kind: String,
    /// Version of `state`.
    pub version: u32,
    /// Serialised state.
    pub state: Vec<u8>,
}

/// A function could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// It can't be saved or moved.
    #[error("Device {name} can't be saved: {reason}")]
    NotSaveable {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
    /// It failed.
    #[error("Device {name} failed to {what}")]
    Failed {
        /// Device name.
        name: String,
        /// What was tried.
        what: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Connects BARs to the guest's address spaces; implemented by the monitor.
pub trait BarPlacer: Send + Sync {
    /// Makes a BAR answer at `address`: register it with the I/O or memory bus, attach its doorbells as
    /// ioeventfds, map its [`BarMapping`]s as memslots. [`PciFunction::late_writes`] may be let wait.
    fn place(&self, function: &Arc<dyn PciFunction>, bar: BarLayout, address: u64) -> Result<(), PlaceError>;
    /// Undoes [`BarPlacer::place`]. Succeeds when the BAR isn't placed there.
    fn unplace(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError>;
    /// A placed BAR's doorbells or mappings changed: attaches the present ones instead of those that
    /// [`BarPlacer::place`] attached (remember them, the function no longer tells). After an error the bus
    /// unplaces the BAR. By default the BAR goes away for a moment; where vCPUs run meanwhile, do better.
    fn refresh(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError> {
        self.unplace(function, bar, address)?;
        self.place(function, bar, address)
    }
}

/// A BAR could not be placed where the guest put it.
#[derive(Debug, thiserror::Error)]
#[error("BAR {bar} of {name} can't be placed at {address:#x}: {reason}")]
pub struct PlaceError {
    /// Device name.
    pub name: String,
    /// BAR index.
    pub bar: u8,
    /// Address or port.
    pub address: u64,
    /// Why.
    pub reason: String,
}
