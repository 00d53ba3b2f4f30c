//! Everything of a paused machine but its RAM.

use machine::state::{SavedClock, SavedInterruptController, SavedVcpu};
use pci::function::SavedFunction;
use pci::root::SavedRoot;
use platform_devices::power::SavedPower;
use platform_devices::serial::SavedSerial;
use serde::{Deserialize, Serialize};

/// Version of [`SavedMachine`]. Its parts have versions of their own.
pub const MACHINE_STATE_VERSION: u32 = 1;

/// A PCI function and where it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedPlace {
    /// Slot times 8 plus function.
    pub devfn: u8,
    /// Its device's name.
    pub name: String,
    /// Its state.
    pub function: SavedFunction,
}

/// State of the devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedDevices {
    /// The PCI bus.
    pub root: SavedRoot,
    /// The functions on it, without the host bridge.
    pub functions: Vec<SavedPlace>,
    /// The serial port, where there is one.
    pub serial: Option<SavedSerial>,
    /// Power, reset and sleep registers.
    pub power: SavedPower,
}

/// A machine that stands still.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedMachine {
    /// [`MACHINE_STATE_VERSION`] of the writer.
    pub version: u32,
    /// Whether it ran before it was stopped to be saved.
    pub running: bool,
    /// vCPUs in order of creation.
    pub vcpus: Vec<SavedVcpu>,
    /// PICs and IOAPIC.
    pub controller: SavedInterruptController,
    /// KVM's paravirtual clock.
    pub clock: SavedClock,
    /// Devices.
    pub devices: SavedDevices,
}

impl SavedMachine {
    /// As bytes: CBOR with field names.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        ciborium::into_writer(self, &mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// Reads it back. What its parts mean is checked by those who take them.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let state: Self =
            ciborium::from_reader(bytes).map_err(|error| format!("The VM's saved state is damaged: {error}"))?;
        if state.version != MACHINE_STATE_VERSION {
            return Err(format!(
                "The VM's saved state has version {}; this program restores version {MACHINE_STATE_VERSION}",
                state.version
            ));
        }
        Ok(state)
    }
}
