//! The bus device under all windows. It receives loads where no memslot is, and all stores.

use std::sync::{Arc, Mutex};

use machine::bus::BusDevice;
use neighbour::device::Device;
use telemetry::guest_log::GuestLog;

use super::lock;

/// The address range of all windows.
pub(super) struct Windows {
    pub name: String,
    pub base: u64,
    pub device: Arc<Mutex<Device>>,
    pub log: GuestLog,
}

impl BusDevice for Windows {
    /// Only for addresses without RAM of a member: loads from mapped RAM don't exit.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let count = lock(&self.device).discarded();
        let address = self.base.saturating_add(offset);
        telemetry::guest_warn!(
            self.log,
            device = %self.name,
            count,
            "The guest stored {} bytes to {address:#x}, in a neighbour's window; discarded",
            data.len()
        );
    }
}
