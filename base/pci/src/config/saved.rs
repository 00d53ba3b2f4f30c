//! Saved state of a configuration space: the registers that differ from their power-on value.

use super::{ConfigError, ConfigSpace};
use crate::registers::CONFIG_SPACE_SIZE;

const VERSION: u32 = 1;

/// Saved state of a [`ConfigSpace`], without the INTx status bit: the device publishes it again.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedConfig {
    /// Version of this type, 1.
    pub version: u32,
    /// Vendor ID (low half) and device ID, to detect a state of another device.
    pub identity: u32,
    /// Offset and value of each dword that differs from its power-on value, ascending.
    pub registers: Vec<(u16, u32)>,
}

impl ConfigSpace {
    /// Saves the state that a guest or the device can change.
    #[must_use]
    pub fn save(&self) -> SavedConfig {
        let mut stable = self.clone();
        stable.set_interrupt_status(false);
        let registers = dword_offsets()
            .filter(|offset| stable.u32(*offset) != stable.power_on_u32(*offset))
            .map(|offset| (offset, stable.u32(offset)))
            .collect();
        SavedConfig { version: VERSION, identity: self.u32(0), registers }
    }

    /// Restores the state into a newly built configuration space of the same device.
    ///
    /// # Errors
    /// Device or version differ, or constant bits do.
    pub fn restore(mut self, saved: &SavedConfig) -> Result<Self, ConfigError> {
        if saved.version != VERSION {
            return Err(ConfigError::Version { found: saved.version, known: VERSION });
        }
        let expected = self.u32(0);
        if saved.identity != expected {
            return Err(ConfigError::OtherDevice { found: saved.identity, expected });
        }
        self.reset();
        for &(offset, found) in &saved.registers {
            if offset % 4 != 0 || usize::from(offset) >= CONFIG_SPACE_SIZE {
                return Err(ConfigError::Offset { offset });
            }
            let changeable = self.changeable_u32(offset);
            let constant = self.power_on_u32(offset) & !changeable;
            if found & !changeable != constant {
                return Err(ConfigError::Constant { offset, found, constant });
            }
            self.device_write(offset, &found.to_le_bytes());
        }
        Ok(self)
    }

    fn power_on_u32(&self, offset: u16) -> u32 {
        let at = usize::from(offset);
        u32::from_le_bytes(std::array::from_fn(|i| self.template.power_on[at + i]))
    }

    fn changeable_u32(&self, offset: u16) -> u32 {
        let at = usize::from(offset);
        u32::from_le_bytes(std::array::from_fn(|i| self.template.masks.changeable(at + i)))
    }
}

fn dword_offsets() -> impl Iterator<Item = u16> {
    (0..=u16::MAX).step_by(4).take(CONFIG_SPACE_SIZE / 4)
}
