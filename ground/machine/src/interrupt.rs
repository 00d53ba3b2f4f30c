//! Interrupt controllers behind one trait: in the kernel, or in the monitor.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use crate::irqchip_kind::IrqchipKind;
use crate::state::SavedInterruptController;

/// A message-signalled interrupt: the write a device makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct MsiMessage {
    /// Guest-physical address.
    pub address: u64,
    /// Data.
    pub data: u32,
}

/// A route from an eventfd to an MSI. Masked until it is given a message. Dropping it frees the route.
pub trait MsiRoute: Send + Sync {
    /// Sets the message, or masks the route with `None`.
    fn set(&self, message: Option<MsiMessage>) -> std::io::Result<()>;
    /// Sends it now; nothing happens while masked.
    fn trigger(&self) -> std::io::Result<()>;
    /// The eventfd that sends it, where the controller listens to one.
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;
}

/// A level-triggered pin driven by eventfds.
#[derive(Debug, Clone)]
pub struct LevelLine {
    /// Writing asserts the pin.
    pub trigger: Arc<OwnedFd>,
    /// Readable when the guest has acknowledged the interrupt (end of interrupt) and the pin was deasserted; whoever
    /// still wants service writes `trigger` again.
    pub resample: Arc<OwnedFd>,
}

/// The interrupt controllers of one VM: IOAPIC pins and MSI. Thread-safe.
pub trait InterruptController: Send + Sync {
    /// Drives IOAPIC pin `gsi` (0 to 23).
    fn set_line(&self, gsi: u32, asserted: bool) -> std::io::Result<()>;
    /// An eventfd whose writes pulse edge-triggered pin `gsi`. The same one at each call.
    fn edge_eventfd(&self, gsi: u32) -> std::io::Result<Arc<OwnedFd>>;
    /// Eventfds for level-triggered pin `gsi`, to be driven by another process or a poll loop. One pair per call; several
    /// pairs on one pin are ORed.
    fn level_eventfds(&self, gsi: u32) -> std::io::Result<LevelLine>;
    /// Sends one MSI now.
    fn signal_msi(&self, message: MsiMessage) -> std::io::Result<()>;
    /// Allocates `count` MSI routes, all masked, with an eventfd each. `ErrorKind::StorageFull` when that many aren't left.
    fn allocate_msi(&self, count: u16) -> std::io::Result<Vec<Arc<dyn MsiRoute>>>;
    /// Power-on state, for a machine reset while all vCPUs are paused. Routes stay; lines that devices still assert stay
    /// asserted.
    fn reset(&self) -> std::io::Result<()>;
    /// State of the controllers outside the vCPUs, while all vCPUs are paused. Routes aren't included: their owners
    /// allocate and set them again.
    fn save(&self) -> std::io::Result<SavedInterruptController>;
    /// Puts saved state into fresh controllers, before any vCPU runs. Devices assert their level-triggered lines again
    /// afterwards.
    fn restore(&self, saved: &SavedInterruptController) -> std::io::Result<()>;
}
