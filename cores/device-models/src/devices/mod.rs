//! The devices.

pub mod ne2000;
pub mod rtl8139;

use crate::describe::Device;

/// All devices that are described.
pub const ALL: &[&Device] = &[&ne2000::NE2000, &rtl8139::RTL8139];

/// The device with a short name.
pub fn named(name: &str) -> Option<&'static Device> {
    ALL.iter().copied().find(|device| device.name == name)
}
