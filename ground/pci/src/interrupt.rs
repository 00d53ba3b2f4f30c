//! What a PCI function needs to interrupt the guest; implemented by whoever owns the interrupt controllers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A message-signalled interrupt as a function's MSI-X table entry holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct MsiMessage {
    /// Guest-physical address of the write (0xFEE0_0000 page on x86).
    pub address: u64,
    /// Data of the write: vector and delivery mode.
    pub data: u32,
}

/// One interrupt vector of one function. Thread-safe; `trigger` may be called from any device thread.
pub trait MsiVector: Send + Sync {
    /// Gives the vector a new message, or masks it. While masked, `trigger` is not delivered: the MSI-X
    /// state keeps the pending bit and calls `trigger` again on unmask.
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError>;
    /// Sends the interrupt now.
    fn trigger(&self) -> Result<(), InterruptError>;
    /// An eventfd that sends the interrupt without this process, where there is one (KVM irqfd). A
    /// device server in another process is given this fd.
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;
}

/// Allocates vectors; one per machine.
pub trait Msi: Send + Sync {
    /// Allocates `count` vectors (MSI-X table entries), all masked.
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError>;
}

/// One of INTA..INTD of a slot, level-triggered, routed to an IOAPIC pin by the root bus.
pub trait IntxLine: Send + Sync {
    /// Sets this function's contribution to the line. The wire is the OR of all contributions.
    fn set_level(&self, asserted: bool) -> Result<(), InterruptError>;
}

/// An interrupt could not be set up or sent.
#[derive(Debug, thiserror::Error)]
pub enum InterruptError {
    /// The interrupt controller has no routes left.
    #[error("No interrupt route is left for {wanted} more vectors; give the VM fewer devices or queues")]
    OutOfRoutes {
        /// How many vectors were asked for.
        wanted: u16,
    },
    /// The interrupt controller refused the request.
    #[error("The interrupt controller refused to {what}")]
    Refused {
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
