//! A device of the engine, with what belongs to its client.

use std::sync::Arc;

use dma::MappedMemory;
use pvrdma::device::{Config, Interrupts};

use super::handshake::Handshake;
use super::load::Load;
use crate::function::interrupts::EventFds;
use crate::transport::WirePort;
use crate::uar::UarPages;

/// Parameters of a device.
#[derive(Debug)]
pub struct DeviceSetup {
    /// Name of the VM.
    pub vm: String,
    /// Its network's name.
    pub segment: String,
    /// The function.
    pub config: Config,
    /// Its doorbell pages.
    pub pages: Arc<UarPages>,
    /// The client's MSI-X eventfds.
    pub msix: Arc<EventFds>,
    /// The client's eventfd for doorbell mode.
    pub mode: Arc<EventFds>,
    /// Port to the Ethernet function's segment.
    pub wire: Arc<WirePort>,
}

/// A device that the thread serves.
pub(super) struct Served {
    pub pages: Arc<UarPages>,
    pub msix: Vectors,
    pub mode: Arc<EventFds>,
    pub handshake: Handshake,
    pub load: Load,
}

/// The device's interrupts.
pub(super) struct Vectors(pub Arc<EventFds>);

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        self.0.raise(vector.into());
    }
}

/// The device type of this daemon.
pub(super) type Device = pvrdma::Device<MappedMemory>;
