//! Why a virtio function can't be made.

use std::io;

use pci::config::ConfigError;
use pci::interrupt::InterruptError;
use pci::msix::MsixError;

use super::layout::MAX_QUEUES;

/// A virtio function can't be made, or not from this saved state.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The device has too many queues.
    #[error("Device {name} can't have {queues} queues; give 1 to {MAX_QUEUES}")]
    Queues {
        /// Device name.
        name: String,
        /// As the device says.
        queues: usize,
    },
    /// Interrupt vectors.
    #[error("Device {name} could not get {vectors} interrupt vectors")]
    Vectors {
        /// Device name.
        name: String,
        /// How many.
        vectors: u16,
        /// Why.
        #[source]
        source: InterruptError,
    },
    /// MSI-X state.
    #[error("Device {name} could not set up MSI-X")]
    Msix {
        /// Device name.
        name: String,
        /// Why.
        #[source]
        source: MsixError,
    },
    /// Configuration space.
    #[error("Device {name} could not set up its configuration space")]
    Config {
        /// Device name.
        name: String,
        /// Why.
        #[source]
        source: ConfigError,
    },
    /// Eventfds.
    #[error("Device {name} could not create an eventfd for its notifications")]
    Event {
        /// Device name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Saved state that doesn't fit.
    #[error("Saved state of device {name} doesn't fit: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
}
