//! MAC addresses.

use std::fmt;
use std::str::FromStr;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

/// A text that isn't a MAC address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no MAC address; write six bytes like 02:00:00:12:34:56")]
pub struct BadMac(String);

impl MacAddress {
    /// An address for a device without a configured one. It is locally administered, and the same each time for the same machine, interface
    /// and device, so that leases and names survive a restart of the VM. Without `/etc/machine-id` it is random.
    pub fn stable(interface: &str, device: &str) -> Self {
        let mut hash = Fnv::new();
        match std::fs::read("/etc/machine-id") {
            Ok(id) if id.len() >= 32 => hash.add(&id),
            _ => hash.add(&random_bytes()),
        }
        hash.add(interface.as_bytes());
        hash.add(&[0]);
        hash.add(device.as_bytes());
        let [_, _, bytes @ ..] = hash.0.to_be_bytes();
        let mut address = Self(bytes);
        // Locally administered, unicast.
        address.0[0] = address.0[0] & 0xfc | 0x02;
        address
    }

    /// Whether it is a unicast address.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

fn random_bytes() -> [u8; 8] {
    let mut bytes = [0; 8];
    // Never fails for so few bytes once the kernel has started; zero bytes would still be a valid seed.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
}

/// FNV-1a: stable between releases, which the standard library's hasher isn't.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for MacAddress {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let bad = || BadMac(text.to_owned());
        let mut parts = text.split([':', '-']);
        let mut bytes = [0; 6];
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(bad)?;
            if part.is_empty() || part.len() > 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = BadMac;

    fn try_from(text: String) -> Result<Self, BadMac> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_generated_address_is_local_unicast_and_differs_by_interface_and_device() {
        let address = MacAddress::stable("tap0", "net0");
        assert!(address.is_unicast());
        assert_eq!(address.0[0] & 2, 2);
        assert_ne!(address, MacAddress::stable("tap1", "net0"));
        assert_ne!(address, MacAddress::stable("tap0", "net1"));
    }

    proptest! {
        #[test]
        fn text_round_trips(bytes: [u8; 6]) {
            prop_assert_eq!(MacAddress(bytes).to_string().parse(), Ok(MacAddress(bytes)));
        }

        #[test]
        fn any_text_is_an_address_or_an_error(text in "[0-9a-fA-F:+ -]{0,20}") {
            let _ = text.parse::<MacAddress>();
        }
    }
}
