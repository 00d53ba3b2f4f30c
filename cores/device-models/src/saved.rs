//! Saved state of a [`Model`]: a type of its own, with names instead of numbers. Restoring is a constructor. Windows are not part of
//! it: they are validated anew, against the memory of the guest as it is then.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::describe::Device;
use crate::model::Model;

/// Version of the format.
pub const VERSION: u32 = 1;

/// What a guest believes its device to hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedModel {
    /// [`VERSION`].
    pub version: u32,
    /// Name of the device.
    pub device: String,
    /// Names and values of the registers, in the description's order.
    pub registers: Vec<(String, u32)>,
    /// Names of the states, a component each.
    pub states: Vec<String>,
}

/// A saved state that doesn't fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// Another version.
    #[error(
        "The saved device has version {0}, this program reads {VERSION}: save it again with a program of that version"
    )]
    Version(u32),
    /// Another device.
    #[error("The saved device is a {saved}, not a {expected}: restore it into a device of its kind")]
    Device {
        /// What was saved.
        saved: String,
        /// What was asked for.
        expected: &'static str,
    },
    /// A register or state that the description doesn't have in this place.
    #[error(
        "The saved device has '{0}' where this program has something else: save it again with this program's version"
    )]
    Shape(String),
}

impl Model {
    /// What has to be kept.
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

    /// A model in a saved state; nothing is validated yet, and nothing of it is in the device.
    ///
    /// # Errors
    /// The state is of another version, device or description.
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

    /// A restored model is the saved one, and what doesn't fit is named.
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
