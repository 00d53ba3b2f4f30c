//! The host bridge at 00:00.0: only an identity for the guest.

use std::sync::{Arc, Mutex};

use crate::config::{ClassCode, ConfigError, ConfigSpace, Identity, SavedConfig};
use crate::function::{
    BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, PciFunction, SavedFunction,
};
use crate::interrupt::IntxLine;
use crate::sync::lock;

/// The generic PCI Express host bridge of QEMU's PCI ID list (1b36:0008), for which no guest has quirks.
const IDENTITY: Identity = Identity {
    vendor_id: 0x1B36,
    device_id: 0x0008,
    revision: 0,
    class: ClassCode::HOST_BRIDGE,
    subsystem_vendor_id: 0x1AF4,
    subsystem_id: 0x1100,
};

pub(super) struct HostBridge {
    config: Mutex<ConfigSpace>,
}

impl HostBridge {
    pub(super) fn new() -> Self {
        Self { config: Mutex::new(ConfigSpace::builder(IDENTITY).build()) }
    }

    pub(super) fn restore(saved: &SavedConfig) -> Result<Self, ConfigError> {
        Ok(Self { config: Mutex::new(ConfigSpace::builder(IDENTITY).build().restore(saved)?) })
    }

    pub(super) fn save_config(&self) -> SavedConfig {
        lock(&self.config).save()
    }
}

impl PciFunction for HostBridge {
    fn name(&self) -> &str {
        "host-bridge"
    }

    fn bars(&self) -> Vec<BarLayout> {
        Vec::new()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        lock(&self.config).read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        lock(&self.config).write(offset, data)
    }

    fn places(&self) -> Vec<BarPlace> {
        Vec::new()
    }

    fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
    }

    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) {}

    fn doorbells(&self) -> Vec<Doorbell> {
        Vec::new()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        Vec::new()
    }

    fn attach_intx(&self, _line: Arc<dyn IntxLine>) {}

    fn reset(&self) -> Result<(), FunctionError> {
        lock(&self.config).reset();
        Ok(())
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        // The root's own saved state contains it.
        Err(FunctionError::NotSaveable {
            name: self.name().to_owned(),
            reason: "it is saved with the root bus".to_owned(),
        })
    }

    fn inspect(&self) -> serde_json::Value {
        lock(&self.config).inspect()
    }
}
