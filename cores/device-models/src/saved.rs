//! Saved state of a [`Model`]: its own type, with names instead of numbers. Restoring is a constructor. Windows aren't
//! part of it: they are validated again, against the guest's memory at that time.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::describe::Device;
use crate::model::Model;

/// Version of the format.
pub const VERSION: u32 = 1;

/// A guest's view of its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedModel {
    /// The format's version: [`VERSION`].
    pub version: u32,
    /// Name of the device.
    pub device: String,
    /// Names and values of the registers, in the description's order.
    pub registers: Vec<(String, u32)>,
    /// Names of the states, one per component.
    pub states: Vec<String>,
}

/// A saved state that can't be restored.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// The format's version differs.
    #[error(
        "The saved device has version {0}, this program reads {VERSION}: save it again with a program of that version"
    )]
    Version(u32),
    /// The device differs.
    #[error("The saved device is a {saved}, not a {expected}: restore it into a device of its kind")]
    Device {
        /// The saved device.
        saved: String,
        /// The expected device.
        expected: &'static str,
    },
    /// The description has another register or state in this place.
    #[error(
        "The saved device has '{0}' where this program has something else: save it again with this program's version"
    )]
    Shape(String),
}

impl Model {
    /// Returns the state that must be preserved.
    pub fn save(&self) -> SavedModel {
        let device = self.device();
        SavedModel {
            version: VERSION,
            device: device.name.to_owned(),
            registers: device
                .numbered()
                .map(|(reg, register)| (register.name.to_owned(), self.graph().value(reg)))
                .collect(),
            states: device
                .components
                .iter()
                .zip(self.graph().states())
                .map(|(component, &state)| component.states[usize::from(state)].to_owned())
                .collect(),
        }
    }

    /// Creates a model in a saved state. No window is validated, and the device doesn't have the state yet.
    ///
    /// # Errors
    /// Version, device or description differ.
    pub fn restore(device: &'static Device, saved: &SavedModel) -> Result<Self, RestoreError> {
        if saved.version != VERSION {
            return Err(RestoreError::Version(saved.version));
        }
        if saved.device != device.name {
            return Err(RestoreError::Device { saved: saved.device.clone(), expected: device.name });
        }
        if saved.registers.len() != device.registers.len() || saved.states.len() != device.components.len() {
            return Err(RestoreError::Shape(format!(
                "{} registers and {} components",
                saved.registers.len(),
                saved.states.len()
            )));
        }
        let mut model = Self::new(device, [0; 6]);
        for ((reg, register), (name, value)) in device.numbered().zip(&saved.registers) {
            if register.name != name || value & !register.mask() != 0 {
                return Err(RestoreError::Shape(format!("{name} = {value:X}h")));
            }
            model.graph_mut().set(reg, *value);
        }
        for ((component, state), name) in
            device.components.iter().zip(&mut model.graph_mut().states).zip(&saved.states)
        {
            *state = component
                .states
                .iter()
                .position(|known| known == name)
                .and_then(|at| u8::try_from(at).ok())
                .ok_or_else(|| RestoreError::Shape(format!("{}={name}", component.name)))?;
        }
        Ok(model)
    }
}

#[cfg(test)]
mod tests {
    use crate::devices;
    use crate::model::Model;
    use crate::saved::RestoreError;

    /// A restored model equals the saved one. A mismatch is an error that names it.
    #[test]
    fn saved_states_come_back_and_others_are_refused() {
        for device in devices::ALL {
            let mut model = Model::new(device, [2, 0, 0, 0, 0, 7]);
            let status = device.interrupts.status;
            model.graph_mut().set(status, 1);
            let saved = model.save();
            let text = serde_json::to_string(&saved).unwrap();
            let restored = Model::restore(device, &serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(restored.graph(), model.graph());

            let mut other = saved.clone();
            other.version += 1;
            assert_eq!(Model::restore(device, &other), Err(RestoreError::Version(2)));
            let mut other = saved.clone();
            other.device = "ne1000".to_owned();
            assert!(matches!(Model::restore(device, &other), Err(RestoreError::Device { .. })));
            let mut other = saved.clone();
            other.states[0] = "confused".to_owned();
            assert!(matches!(Model::restore(device, &other), Err(RestoreError::Shape(_))));
            let mut other = saved;
            other.registers[0].1 = u32::MAX;
            if device.registers[0].width < 4 {
                assert!(matches!(Model::restore(device, &other), Err(RestoreError::Shape(_))));
            }
        }
    }
}
