//! A function's address on the root bus.

use super::RootError;

/// Slots of a bus.
pub const SLOTS: u8 = 32;
/// Functions of a slot.
pub const FUNCTIONS: u8 = 8;

/// Slot and function on bus 0 of segment 0. Prints as `00:03.1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionAddress {
    slot: u8,
    function: u8,
}

impl FunctionAddress {
    /// The host bridge, 00:00.0.
    pub const HOST_BRIDGE: Self = Self { slot: 0, function: 0 };

    /// Creates an address from slot (0 to 31) and function (0 to 7).
    ///
    /// # Errors
    /// A number is out of range.
    pub fn new(slot: u8, function: u8) -> Result<Self, RootError> {
        if slot < SLOTS && function < FUNCTIONS {
            Ok(Self { slot, function })
        } else {
            Err(RootError::NoSuchAddress { slot, function })
        }
    }

    /// Converts the low byte of a configuration address: slot in bits 7 to 3, function in bits 2 to 0.
    #[must_use]
    pub fn from_devfn(devfn: u8) -> Self {
        Self { slot: devfn >> 3, function: devfn & 7 }
    }

    /// Slot (device) number, 0 to 31.
    #[must_use]
    pub fn slot(self) -> u8 {
        self.slot
    }

    /// Function number, 0 to 7.
    #[must_use]
    pub fn function(self) -> u8 {
        self.function
    }
}

impl std::fmt::Display for FunctionAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "00:{:02x}.{}", self.slot, self.function)
    }
}
