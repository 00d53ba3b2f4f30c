//! Names of VMs and NICs, and addresses derived from them.

pub use control_api::names::{BadName, MAX_NAME_BYTES, check_name};

/// Default MAC address of a NIC: the same each time, unicast, locally administered.
#[must_use]
pub fn mac_of(vm: &str, nic: &str) -> [u8; 6] {
    // FNV-1a, 64 bits: spreads short names well, and is the same in every version of this program.
    let mut hash: u64 = 0xCBF2_9CE4_8422_2325;
    for byte in vm.bytes().chain([0]).chain(nic.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    let [a, b, c, d, e, f, ..] = (hash ^ hash >> 29).to_le_bytes();
    [a & 0xFC | 0x02, b, c, d, e, f]
}

/// EUI-64 of a MAC address (RFC 4291, appendix A), big-endian: the node GUID of RDMA devices.
#[must_use]
pub fn eui64(mac: [u8; 6]) -> [u8; 8] {
    let [a, b, c, d, e, f] = mac;
    [a ^ 0x02, b, c, 0xFF, 0xFE, d, e, f]
}

/// Whether a device may have this MAC address: unicast and not zero.
#[must_use]
pub fn is_unicast(mac: [u8; 6]) -> bool {
    mac[0] & 1 == 0 && mac != [0; 6]
}

/// The usual notation.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::{check_name, eui64, is_unicast, mac_of, mac_text};

    #[test]
    fn names_that_could_leave_a_folder_are_refused() {
        for name in ["", ".", "..", "a/b", "-a", "a:b", "a\0", "ä", &"a".repeat(65)] {
            assert!(check_name("VM", name).is_err(), "{name:?}");
        }
        for name in ["a", "web-1.x_y", "7", &"a".repeat(64)] {
            assert!(check_name("VM", name).is_ok(), "{name:?}");
        }
    }

    #[test]
    fn made_addresses_are_stable_local_and_differ_between_nics() {
        let mac = mac_of("vm1", "rdma0");
        assert_eq!(mac, mac_of("vm1", "rdma0"));
        assert_eq!((mac[0] & 3, is_unicast(mac)), (2, true));
        let mut all: Vec<_> = (0..1000)
            .flat_map(|vm| (0..4).map(move |nic| mac_of(&format!("vm{vm}"), &format!("rdma{nic}"))))
            .collect();
        all.push(mac_of("vm1r", "dma0"));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4001);
    }

    #[test]
    fn a_guid_is_the_modified_eui_64() {
        assert_eq!(eui64([0x02, 1, 2, 3, 4, 5]), [0, 1, 2, 0xFF, 0xFE, 3, 4, 5]);
        assert_eq!(mac_text([0x02, 1, 2, 0xAB, 4, 5]), "02:01:02:ab:04:05");
    }
}
