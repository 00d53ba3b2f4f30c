//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

/// An Ethernet address, in the order of the bytes on the wire.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

/// A text that isn't a MAC address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no MAC address; write six bytes like 02:00:00:12:34:56")]
pub struct BadMac(String);

impl MacAddress {
    /// All stations.
    pub const BROADCAST: Self = Self([0xFF; 6]);

    /// Whether it is the address of one station.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    /// Whether it is a group address (broadcast included).
    #[must_use]
    pub fn is_group(self) -> bool {
        self.0[0] & 1 == 1
    }

    /// Bytes 0 to 3 and 4 to 5, in the layout of the device's registers (little-endian).
    #[must_use]
    pub fn to_registers(self) -> (u32, u32) {
        let [a, b, c, d, e, f] = self.0;
        (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0]))
    }

    /// From the device's registers; the upper half of `high` is ignored.
    #[must_use]
    pub fn from_registers(low: u32, high: u32) -> Self {
        let ([a, b, c, d], [e, f, ..]) = (low.to_le_bytes(), high.to_le_bytes());
        Self([a, b, c, d, e, f])
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
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(bad)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = BadMac;

    fn try_from(text: String) -> Result<Self, BadMac> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::MacAddress;

    #[test]
    fn text_and_registers_lead_back_to_the_same_address() {
        let address: MacAddress = "02:0a:ff:12:34:56".parse().unwrap();
        assert_eq!(address.to_string().parse(), Ok(address));
        assert_eq!(address.to_registers(), (0x12ff_0a02, 0x5634));
        let (low, high) = address.to_registers();
        assert_eq!(MacAddress::from_registers(low, high | 0xABCD_0000), address);
        for bad in ["", "02:00:00:00:00", "02:00:00:00:00:00:00", "2:0:0:0:0:0", "02:00:00:00:00:+1"] {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad:?}");
        }
    }
}
