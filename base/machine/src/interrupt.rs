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
    /// Data of the write, whose low byte is the vector.
    pub data: u32,
}

/// A route from an eventfd to an MSI. It is masked until it has a message. Dropping it frees the route.
pub trait MsiRoute: Send + Sync {
    /// Sets the message, or masks the route with `None`.
    fn set(&self, message: Option<MsiMessage>) -> std::io::Result<()>;
    /// Sends the message now; does nothing while the route is masked.
    fn trigger(&self) -> std::io::Result<()>;
    /// The eventfd that sends the message, where the controller polls one.
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;
}

/// A level-triggered pin driven by eventfds.
#[derive(Debug, Clone)]
pub struct LevelLine {
    /// Writing asserts the pin.
    pub trigger: Arc<OwnedFd>,
    /// Becomes readable when the guest has signaled the end of the interrupt and the pin was deasserted. A device that still needs
    /// service writes `trigger` again.
    pub resample: Arc<OwnedFd>,
}

/// The interrupt controllers of one VM: IOAPIC pins and MSI. Thread-safe.
pub trait InterruptController: Send + Sync {
    /// Drives IOAPIC pin `gsi` (0 to 23).
    fn set_line(&self, gsi: u32, asserted: bool) -> std::io::Result<()>;
    /// An eventfd whose writes pulse edge-triggered pin `gsi`. Each call returns the same eventfd.
    fn edge_eventfd(&self, gsi: u32) -> std::io::Result<Arc<OwnedFd>>;
    /// Eventfds that drive level-triggered pin `gsi` from another process or a poll loop. Each call returns a new pair; several pairs on
    /// one pin are ORed.
    fn level_eventfds(&self, gsi: u32) -> std::io::Result<LevelLine>;
    /// Sends one MSI now.
    fn signal_msi(&self, message: MsiMessage) -> std::io::Result<()>;
    /// Allocates `count` MSI routes, all masked, with an eventfd each. Fails with `ErrorKind::StorageFull` when fewer are free.
    fn allocate_msi(&self, count: u16) -> std::io::Result<Vec<Arc<dyn MsiRoute>>>;
    /// Puts the controllers into their power-on state, for a machine reset while all vCPUs are paused. Routes stay, and lines that
    /// devices assert stay asserted.
    fn reset(&self) -> std::io::Result<()>;
    /// State of the controllers outside the vCPUs, while all vCPUs are paused. It doesn't hold routes: their owners allocate and set them
    /// again.
    fn save(&self) -> std::io::Result<SavedInterruptController>;
    /// Loads saved state into fresh controllers, before any vCPU runs. Devices assert their level-triggered lines again afterwards.
    fn restore(&self, saved: &SavedInterruptController) -> std::io::Result<()>;
}
