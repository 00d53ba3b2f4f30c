//! 16550.
use machine::bus::BusDevice;
use crate::console::{Console, ConsoleError};
use crate::{Interrupt, RestoreError};

/// Saved state.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedSerial {
    /// Version.
    pub version: u32,
}

/// 16550 at eight I/O ports.
pub struct Serial {
    _console: Console,
}

impl Serial {
    /// Ports.
    pub const PORTS: u64 = 8;
    /// New, at power-on state.
    pub fn new(_name: &str, console: Console, _interrupt: Interrupt) -> Result<Self, ConsoleError> {
        Ok(Self { _console: console })
    }
    /// Restores.
    pub fn restore(_name: &str, _saved: &SavedSerial, _console: Console, _interrupt: Interrupt) -> Result<Self, RestoreError> {
        Err(RestoreError::Version { device: "serial", found: 0, known: 1 })
    }
    /// Registers and received bytes.
    pub fn save(&self) -> SavedSerial {
        SavedSerial { version: 1 }
    }
    /// Machine reset: registers to power-on state; the console stays.
    pub fn reset(&self) {}
    /// State and counters.
    pub fn inspect(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl BusDevice for Serial {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn write(&self, _offset: u64, _data: &[u8]) {}
}
