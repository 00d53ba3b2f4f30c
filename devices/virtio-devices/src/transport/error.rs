//! Why a virtio function can't be created.

use std::io;

use pci::config::ConfigError;
use pci::interrupt::InterruptError;
use pci::msix::MsixError;

use super::layout::MAX_QUEUES;

/// Why a virtio function can't be created or restored.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The device has too many queues.
    #[error("Device {name} can't have {queues} queues; give 1 to {MAX_QUEUES}")]
    Queues {
        /// Device name.
        name: String,
        /// Number of queues.
        queues: usize,
    },
    /// Interrupt vectors can't be allocated.
    #[error("Device {name} could not get {vectors} interrupt vectors")]
    Vectors {
        /// Device name.
        name: String,
        /// Number of vectors.
        vectors: u16,
        /// The error.
        #[source]
        source: InterruptError,
    },
    /// The MSI-X state is invalid.
    #[error("Device {name} could not set up MSI-X")]
    Msix {
        /// Device name.
        name: String,
        /// The error.
        #[source]
        source: MsixError,
    },
    /// The configuration space can't be built.
    #[error("Device {name} could not set up its configuration space")]
    Config {
        /// Device name.
        name: String,
        /// The error.
        #[source]
        source: ConfigError,
    },
    /// Eventfds can't be created.
    #[error("Device {name} could not create an eventfd for its notifications")]
    Event {
        /// Device name.
        name: String,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The saved state doesn't fit.
    #[error("Saved state of device {name} doesn't fit: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
}
