//! The trait of every PCI function: a virtio device of this process, a vfio-user server, a VFIO device or a reference
//! model.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::interrupt::IntxLine;

/// Address space of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum BarKind {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Memory32,
    /// Memory at any address; uses two BAR registers.
    Memory64,
}

/// A base address register of a function.
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

/// A BAR range that is ordinary memory. The monitor maps it into the guest, so accesses don't exit.
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
    /// Whether guest writes exit (and reach [`PciFunction::bar_write`]) instead of changing the memory.
    pub read_only: bool,
}

/// A BAR address whose writes only signal an eventfd in the kernel (ioeventfd).
#[derive(Debug, Clone)]
pub struct Doorbell {
    /// BAR index.
    pub bar: u8,
    /// Offset within the BAR.
    pub offset: u64,
    /// Width in bytes of the writes that signal: 0 (any), 1, 2, 4 or 8.
    pub width: u8,
    /// If set, only writes of this value signal.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// A BAR range whose writes may be deferred until the guest's next exit ([`PciFunction::late_writes`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateWrites {
    /// BAR index.
    pub bar: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// Changes by a configuration write, which the bus applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConfigEffect {
    /// BAR addresses or the decode bits of the command register changed.
    pub decoding_changed: bool,
    /// The set of doorbells or mappings changed, for instance by an MSI-X or device-specific write.
    pub resources_changed: bool,
}

/// A BAR's current address, from configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarPlace {
    /// The BAR.
    pub layout: BarLayout,
    /// Guest-physical address or port. `None` if its decoding is off or the address is invalid.
    pub address: Option<u64>,
}

/// A PCI function. Calls come from vCPU threads and from the API thread at any time, possibly in parallel.
/// Implementations must lock. Offsets and data come from the guest, so they are hostile input.
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
    /// Writes 1, 2 or 4 bytes of configuration space within one aligned dword.
    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect;
    /// Returns the BARs' current addresses.
    fn places(&self) -> Vec<BarPlace>;
    /// Reads `data.len()` (1 to 8) bytes at `offset` of a BAR.
    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]);
    /// Writes `data` (1 to 8 bytes) at `offset` of a BAR.
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]);
    /// Returns the doorbells: writes that signal eventfds.
    fn doorbells(&self) -> Vec<Doorbell>;
    /// Returns the ranges whose writes may be deferred. Deferred writes arrive in order, before any other access to any
    /// BAR and before a pause, but perhaps only at the guest's next such access. None by default.
    fn late_writes(&self) -> Vec<LateWrites> {
        Vec::new()
    }
    /// Returns the ranges to map into the guest.
    fn mappings(&self) -> Vec<BarMapping>;
    /// Connects the INTx wire of the slot. The bus calls it once, before the guest runs.
    fn attach_intx(&self, line: Arc<dyn IntxLine>);
    /// Conventional reset (machine reset): configuration space and device return to power-on state.
    fn reset(&self) -> Result<(), FunctionError>;
    /// Stops all activity on guest memory and interrupts, for a pause. Returns when no activity is left.
    fn quiesce(&self) -> Result<(), FunctionError>;
    /// Undoes [`PciFunction::quiesce`].
    fn unquiesce(&self) -> Result<(), FunctionError>;
    /// Returns the complete state while quiesced, with the function's own version. A function that can't be saved
    /// returns [`FunctionError::NotSaveable`].
    fn save(&self) -> Result<SavedFunction, FunctionError>;
    /// Returns state and counters for `causeway inspect`.
    fn inspect(&self) -> serde_json::Value;
}

/// Saved state of a function: opaque here, with its owner's version. A constructor of the concrete type restores it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedFunction {
    /// Name of the type that can restore it, for instance `virtio-block`.
    pub kind: String,
    /// Version of `state`.
    pub version: u32,
    /// Serialized state.
    pub state: Vec<u8>,
}

/// A function can't perform an operation.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// It can't be saved or migrated.
    #[error("Device {name} can't be saved: {reason}")]
    NotSaveable {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The operation failed.
    #[error("Device {name} failed to {what}")]
    Failed {
        /// Device name.
        name: String,
        /// The operation.
        what: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Connects BARs to the guest's address spaces. The monitor implements it.
pub trait BarPlacer: Send + Sync {
    /// Makes a BAR respond at `address`: registers it with the I/O or memory bus, attaches its doorbells as ioeventfds,
    /// and maps its [`BarMapping`]s as memslots. It may defer [`PciFunction::late_writes`].
    fn place(&self, function: &Arc<dyn PciFunction>, bar: BarLayout, address: u64) -> Result<(), PlaceError>;
    /// Undoes [`BarPlacer::place`]. Succeeds if the BAR isn't placed there.
    fn unplace(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError>;
    /// Updates a placed BAR after its doorbells or mappings changed: attaches the current ones instead of those that
    /// [`BarPlacer::place`] attached. Implementations must remember these, as the function no longer returns them.
    /// After an error the bus unplaces the BAR. The default unplaces it for a moment, so implementations with running
    /// vCPUs should override it.
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

/// A BAR can't be placed at the guest's address.
#[derive(Debug, thiserror::Error)]
#[error("BAR {bar} of {name} can't be placed at {address:#x}: {reason}")]
pub struct PlaceError {
    /// Device name.
    pub name: String,
    /// BAR index.
    pub bar: u8,
    /// Address or port.
    pub address: u64,
    /// The reason.
    pub reason: String,
}
