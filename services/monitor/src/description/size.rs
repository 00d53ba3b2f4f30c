//! Sizes with a unit: `512M`, `1G`, `1.5GiB`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Suffixes and their powers of two.
const UNITS: [(&str, u32); 9] = [
    ("KiB", 10),
    ("MiB", 20),
    ("GiB", 30),
    ("TiB", 40),
    ("K", 10),
    ("M", 20),
    ("G", 30),
    ("T", 40),
    ("B", 0),
];

/// Limit for the digits after the point.
const MAX_FRACTION_DIGITS: usize = 6;

impl FromStr for ByteSize {
    type Err = String;

    /// Parses a decimal number with a binary unit. Refuses a bare number and decimal units (`GB`), because they are ambiguous for memory
    /// sizes.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let refused = |problem: &str| format!("\"{}\" is not a size: {problem}", text.escape_debug());
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim_start();
        if number.is_empty() {
            return Err(refused("write a number and a unit, like 512M or 1G"));
        }
        if unit.is_empty() {
            return Err(refused("the unit is missing; write K, M, G or T, like 512M or 1G"));
        }
        let Some((_, shift)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(refused("units are K, M, G, T or KiB, MiB, GiB, TiB (powers of 1024), and B"));
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.len() > MAX_FRACTION_DIGITS
            || fraction.contains('.')
            || (number.contains('.') && fraction.is_empty())
        {
            return Err(refused("the number is not a decimal one with at most six digits after the point"));
        }
        let too_large = || refused("it doesn't fit into 64 bits");
        let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
        // `whole` may be empty, as in ".5G", which is refused.
        let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| too_large())?;
        if whole.is_empty() {
            return Err(refused("write a digit before the point"));
        }
        let scaled = digits.checked_mul(1 << shift).ok_or_else(too_large)?;
        if scaled % scale != 0 {
            return Err(refused("it is not a whole number of bytes"));
        }
        u64::try_from(scaled / scale).map(Self).map_err(|_| too_large())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("T", 40), ("G", 30), ("M", 20), ("K", 10)] {
            if self.0 >= 1 << shift && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with its unit in quotes, like \"512M\" or \"1G\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::ByteSize;

    #[test]
    fn binary_units_and_fractions_are_understood() {
        for (text, bytes) in [
            ("1G", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("512 M", 512 << 20),
            ("4096B", 4096),
            ("0.25K", 256),
            ("16T", 16 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_can_be_misread_is_refused() {
        for text in [
            "",
            "1",
            "1GB",
            "1g",
            "-1G",
            "1.G",
            ".5G",
            "1..5G",
            "1,5G",
            "0.0001K",
            "99999999999999T",
            "G",
            "1 G x",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_is_written_in_its_largest_whole_unit() {
        assert_eq!(ByteSize(3 << 29).to_string(), "1536M");
        assert_eq!(ByteSize(1 << 40).to_string(), "1T");
        assert_eq!(ByteSize(1025).to_string(), "1025B");
        assert_eq!(ByteSize(0).to_string(), "0B");
    }

    proptest::proptest! {
        #[test]
        fn what_is_written_reads_back(bytes: u64) {
            proptest::prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
