//! Interrupt controllers behind one trait: in the kernel, or (for VMs that span hosts) in user space.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A message-signalled interrupt: the write a device makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiMessage {
    /// Guest-physical address.
    pub address: u64,
    /// Data.
    pub data: u32,
}

/// A route from an eventfd to an MSI. Masked until it is given a message.
pub trait MsiRoute: Send + Sync {
    /// Sets the message, or masks the route with `None`.
    fn set(&self, message: Option<MsiMessage>) -> std::io::Result<()>;
    /// Sends it now; nothing happens while masked.
    fn trigger(&self) -> std::io::Result<()>;
    /// The eventfd that sends it, where the controller listens to one.
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;
}

/// The interrupt controllers of one VM: IOAPIC pins and MSI.
pub trait InterruptController: Send + Sync {
    /// Drives IOAPIC pin `gsi` (0 to 23).
    fn set_line(&self, gsi: u32, asserted: bool) -> std::io::Result<()>;
    /// An eventfd whose writes pulse edge-triggered pin `gsi`.
    fn edge_eventfd(&self, gsi: u32) -> std::io::Result<Arc<std::os::fd::OwnedFd>>;
    /// Sends one MSI now.
    fn signal_msi(&self, message: MsiMessage) -> std::io::Result<()>;
    /// Allocates `count` MSI routes.
    fn allocate_msi(&self, count: u16) -> std::io::Result<Vec<Arc<dyn MsiRoute>>>;
}
