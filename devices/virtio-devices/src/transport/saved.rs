//! Saved state of a virtio function: transport, queues, device, and the PCI side.

use pci::config::SavedConfig;
use pci::msix::SavedMsix;

use super::registers::Registers;
use crate::device::SavedDevice;

/// Version of [`SavedTransport`].
pub(super) const VERSION: u32 = 1;

/// The whole state while quiesced: the registers hold the queues' positions.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct SavedTransport {
    pub device_id: u16,
    pub registers: Registers,
    pub isr: u8,
    pub generation: u8,
    /// The reason why the device has failed, if it has.
    pub failure: Option<String>,
    pub config: SavedConfig,
    pub msix: SavedMsix,
    pub device: SavedDevice,
}

/// Name of the function's type, by virtio device id.
pub(super) fn kind(device_id: u16) -> String {
    match device_id {
        1 => "virtio-net".to_owned(),
        2 => "virtio-block".to_owned(),
        4 => "virtio-rng".to_owned(),
        19 => "virtio-vsock".to_owned(),
        other => format!("virtio-{other}"),
    }
}
