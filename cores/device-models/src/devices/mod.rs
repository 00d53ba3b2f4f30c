//! The described devices.

pub mod e1000;
pub mod ne2000;
pub mod rtl8139;

use crate::describe::Device;

/// All devices that VMs can have.
pub const ALL: &[&Device] = &[&ne2000::NE2000, &rtl8139::RTL8139, &e1000::E1000];

/// Returns the device with a short name.
pub fn named(name: &str) -> Option<&'static Device> {
    ALL.iter().copied().find(|device| device.name == name)
}
