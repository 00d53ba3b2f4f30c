//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// A locally administered unicast address, derived from a VM's name and a device number. It is the same at each start, so that the
    /// guest's network configuration stays valid. It is also the same on every host, so that a VM keeps it when it migrates.
    pub fn derived(vm: &str, device: usize) -> Self {
        // FNV-1a; spreads names well enough. In case of a collision the user writes `mac`.
        let bytes = vm.bytes().chain([b'/']).chain(device.to_le_bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let hash = hash.to_le_bytes();
        Self([0x02, hash[0] ^ hash[5], hash[1] ^ hash[6], hash[2] ^ hash[7], hash[3], hash[4]])
    }

    /// The address of `vm`'s device to its neighbour `peer` in `group`: locally administered, unicast, the same at each start. It is the
    /// 64-bit FNV-1a hash of the three names, each with a zero byte behind it, folded by `hash ^ hash >> 29`. The address has the low 48
    /// bits, the lowest byte first. Its first byte is modified to be unicast and local. docs/design/specs/neighbours-abi.md specifies it.
    pub fn to_neighbour(group: &str, vm: &str, peer: &str) -> Self {
        let bytes = [group, vm, peer].into_iter().flat_map(|name| name.bytes().chain([0]));
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let [a, b, c, d, e, f, ..] = (hash ^ hash >> 29).to_le_bytes();
        Self([a & 0xfc | 0x02, b, c, d, e, f])
    }

    /// The six bytes in the order of transmission.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }

    /// Whether it can be a device's own address: neither a group address nor all zeroes.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || {
            format!(
                "\"{}\" is not an Ethernet address; write six pairs of hexadecimal digits, like 02:00:00:00:00:01",
                text.escape_debug()
            )
        };
        let mut address = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut address {
            let pair = pairs.next().filter(|pair| pair.len() == 2).ok_or_else(refused)?;
            if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(refused());
            }
            *byte = u8::from_str_radix(pair, 16).map_err(|_| refused())?;
        }
        if pairs.next().is_some() {
            return Err(refused());
        }
        Ok(Self(address))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for MacAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::MacAddress;

    /// The example of docs/design/specs/neighbours-abi.md.
    const FILES_TO_DISKS: &str = "96:bb:98:4f:e0:74";

    #[test]
    fn only_six_pairs_of_digits_are_an_address() {
        assert_eq!("02:aB:00:00:00:ff".parse(), Ok(MacAddress([2, 0xab, 0, 0, 0, 0xff])));
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "02-00-00-00-00-01",
            "0g:00:00:00:00:00",
            "+2:0:0:0:0:0",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn derived_addresses_are_local_unicast_stable_and_different() {
        let first = MacAddress::derived("web", 0);
        assert_eq!(first, MacAddress::derived("web", 0));
        assert_ne!(first, MacAddress::derived("web", 1));
        assert_ne!(first, MacAddress::derived("wea", 0));
        assert!(first.is_unicast() && first.0[0] & 2 != 0);
    }

    /// Two appliances on one LAN may have the same slots and the same VM names: their groups make the addresses different.
    #[test]
    fn addresses_to_neighbours_differ_by_group_vm_and_peer() {
        let first = MacAddress::to_neighbour("nas", "files", "disks");
        assert_eq!(first.to_string(), FILES_TO_DISKS);
        assert!(first.is_unicast() && first.0[0] & 3 == 2);
        let others = [
            ("nas2", "files", "disks"),
            ("nas", "disks", "files"),
            ("nas", "files", "raid"),
            ("nasf", "iles", "disks"),
            ("nas", "filesd", "isks"),
        ];
        let mut all: Vec<MacAddress> =
            others.map(|(group, vm, peer)| MacAddress::to_neighbour(group, vm, peer)).to_vec();
        all.extend((0..1000).map(|vm| MacAddress::to_neighbour("nas", &format!("vm{vm}"), "files")));
        all.push(first);
        let count = all.len();
        all.sort_unstable_by_key(|mac| mac.0);
        all.dedup();
        assert_eq!(all.len(), count);
    }

    proptest::proptest! {
        #[test]
        fn what_is_written_reads_back(bytes: [u8; 6]) {
            proptest::prop_assert_eq!(MacAddress(bytes).to_string().parse(), Ok(MacAddress(bytes)));
        }
    }
}
