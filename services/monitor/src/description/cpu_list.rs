//! Sets of CPU numbers in Linux's format: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A set of CPU numbers below [`CpuList::LIMIT`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuList(BTreeSet<u16>);

impl CpuList {
    /// CPU numbers lie below this limit, the largest that Linux can be built for on x86.
    pub const LIMIT: u16 = 8192;

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set contains `cpu`.
    pub fn contains(&self, cpu: u16) -> bool {
        self.0.contains(&cpu)
    }

    fn insert(&mut self, cpu: u64) -> Result<(), String> {
        match u16::try_from(cpu) {
            Ok(cpu) if cpu < Self::LIMIT => {
                self.0.insert(cpu);
                Ok(())
            }
            _ => Err(format!("CPU number {cpu} is too large; the largest is {}", Self::LIMIT - 1)),
        }
    }
}

impl FromIterator<u16> for CpuList {
    /// Numbers from [`CpuList::LIMIT`] on are ignored.
    fn from_iter<I: IntoIterator<Item = u16>>(cpus: I) -> Self {
        Self(cpus.into_iter().filter(|cpu| *cpu < Self::LIMIT).collect())
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut list = Self::default();
        for part in text.split(',').map(str::trim) {
            let refused =
                || format!("\"{}\" is not a list of CPU numbers; write it like 0-3,8", text.escape_debug());
            let number = |digits: &str| -> Result<u64, String> {
                if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(refused());
                }
                digits.parse().map_err(|_| refused())
            };
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(refused());
            }
            // Checks the range's end before the loop, which a huge end would make long.
            list.insert(last)?;
            for cpu in first..last {
                list.insert(cpu)?;
            }
        }
        Ok(list)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|next| *next == last + 1) {
                last = next;
            }
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl Serialize for CpuList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = CpuList;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("CPU numbers, like \"0-3,8\" or [0, 1]")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<CpuList, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, cpu: i64) -> Result<CpuList, E> {
                let cpu = u64::try_from(cpu)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(cpu), &self))?;
                self.visit_u64(cpu)
            }
            fn visit_u64<E: serde::de::Error>(self, cpu: u64) -> Result<CpuList, E> {
                let mut list = CpuList::default();
                list.insert(cpu).map_err(E::custom)?;
                Ok(list)
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<CpuList, A::Error> {
                let mut list = CpuList::default();
                while let Some(cpu) = seq.next_element::<u64>()? {
                    list.insert(cpu).map_err(serde::de::Error::custom)?;
                }
                Ok(list)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::CpuList;

    #[test]
    fn ranges_and_single_numbers_are_read_and_written_as_linux_does() {
        let list: CpuList = "8, 0-2,3".parse().unwrap();
        assert_eq!(list.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert_eq!(list.to_string(), "0-3,8");
    }

    #[test]
    fn what_is_no_list_is_refused_without_walking_it() {
        for text in ["", ",", "1-", "-1", "3-1", "a", "0-18446744073709551615", "8192", "1 2", "+1"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_written_reads_back(cpus in proptest::collection::btree_set(0_u16..8192, 1..64)) {
            let list: CpuList = cpus.into_iter().collect();
            proptest::prop_assert_eq!(list.to_string().parse(), Ok(list));
        }
    }
}
