//! Receive filter of a device.

use std::collections::HashSet;

use crate::frame::{destination, vlan_tag};
use crate::mac::MacAddress;
use crate::registers::rx_mode;

/// Receive mode, group addresses and VLANs from the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RxFilter {
    pub mode: u32,
    pub groups: HashSet<MacAddress>,
    /// A bit per VLAN; bit 0 is for frames without a tag.
    pub vlans: [u32; 128],
}

impl RxFilter {
    /// Whether a device with address `station` accepts a frame that begins with `head`.
    pub fn accepts(&self, head: &[u8], station: MacAddress) -> bool {
        if self.mode & rx_mode::PROMISCUOUS != 0 {
            return true;
        }
        let to = destination(head);
        let wanted = if to == MacAddress::BROADCAST {
            self.mode & rx_mode::BROADCAST != 0
        } else if to.is_group() {
            self.mode & rx_mode::ALL_MULTICAST != 0
                || self.mode & rx_mode::MULTICAST != 0 && self.groups.contains(&to)
        } else {
            self.mode & rx_mode::UNICAST != 0 && to == station
        };
        let vlan = usize::from(vlan_tag(head).unwrap_or(0) & 0xFFF);
        wanted && self.vlans[vlan / 32] & 1 << (vlan % 32) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(to: [u8; 6], vlan: Option<u16>) -> Vec<u8> {
        let mut frame = to.to_vec();
        frame.extend([2, 0, 0, 0, 0, 9]);
        if let Some(vlan) = vlan {
            frame.extend([0x81, 0]);
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend([8, 0, 0, 0]);
        frame
    }

    #[test]
    fn each_mode_bit_lets_in_its_own_kind() {
        let station = MacAddress([2, 0, 0, 0, 0, 1]);
        let group = [1, 0, 0x5e, 0, 0, 1];
        let mut vlans = [0; 128];
        vlans[0] = 1;
        let filter = |mode| RxFilter { mode, groups: HashSet::from([MacAddress(group)]), vlans };
        let kinds = [station.0, [2, 0, 0, 0, 0, 2], group, [1, 0, 0x5e, 0, 0, 2], [0xFF; 6]];
        let taken = |mode| kinds.map(|to| u8::from(filter(mode).accepts(&frame(to, None), station)));
        assert_eq!(taken(0), [0, 0, 0, 0, 0]);
        assert_eq!(taken(rx_mode::UNICAST), [1, 0, 0, 0, 0]);
        assert_eq!(taken(rx_mode::MULTICAST), [0, 0, 1, 0, 0]);
        assert_eq!(taken(rx_mode::BROADCAST), [0, 0, 0, 0, 1]);
        assert_eq!(taken(rx_mode::ALL_MULTICAST), [0, 0, 1, 1, 0]);
        assert_eq!(taken(rx_mode::PROMISCUOUS), [1, 1, 1, 1, 1]);
    }

    #[test]
    fn vlans_are_let_in_one_by_one_and_the_priority_bits_do_not_matter() {
        let station = MacAddress([2, 0, 0, 0, 0, 1]);
        let mut vlans = [0; 128];
        vlans[100 / 32] = 1 << (100 % 32);
        let filter = RxFilter { mode: rx_mode::UNICAST, groups: HashSet::new(), vlans };
        assert!(filter.accepts(&frame(station.0, Some(0xE000 | 100)), station));
        assert!(!filter.accepts(&frame(station.0, Some(101)), station));
        assert!(!filter.accepts(&frame(station.0, None), station));
    }
}
