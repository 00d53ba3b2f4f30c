//! The interfaces by which a PCI function interrupts the guest. The owner of the interrupt controllers implements them.

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
    /// Sets the vector's message, or masks the vector with `None`. While masked, `trigger` isn't delivered: the MSI-X
    /// state keeps the pending bit, and calls `trigger` again on unmask.
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError>;
    /// Sends the interrupt.
    fn trigger(&self) -> Result<(), InterruptError>;
    /// Returns an eventfd that sends the interrupt without this process, if there is one (KVM irqfd). A device server
    /// in another process gets this descriptor.
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
    /// The interrupt controller has no free routes.
    #[error("No interrupt route is left for {wanted} more vectors; give the VM fewer devices or queues")]
    OutOfRoutes {
        /// The number of requested vectors.
        wanted: u16,
    },
    /// The interrupt controller refused the request.
    #[error("The interrupt controller refused to {what}")]
    Refused {
        /// The operation, with its values.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}
