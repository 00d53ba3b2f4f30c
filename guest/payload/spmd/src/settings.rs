//! Arguments: `name=value` each.

use core::fmt;
use core::ops::RangeInclusive;

/// Limit of arguments.
const MAX_ARGUMENTS: usize = 16;

/// The reason why a program can't start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// An argument that isn't `name=value` with a known name.
    Argument {
        /// The argument.
        text: &'static str,
        /// The known names.
        names: &'static [&'static str],
    },
    /// There are more arguments than [`Settings`] holds.
    TooMany {
        /// The limit.
        most: usize,
    },
    /// A value that isn't a number or is out of range.
    Number {
        /// The argument's name.
        name: &'static str,
        /// Its value.
        text: &'static str,
        /// The minimum.
        least: u64,
        /// The maximum.
        most: u64,
    },
    /// A word that isn't among the possible ones.
    Word {
        /// The argument's name.
        name: &'static str,
        /// Its value.
        text: &'static str,
        /// The possible words.
        words: &'static [&'static str],
    },
    /// Too little free memory.
    Memory {
        /// Bytes needed for the next array.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// Too few or too many vCPUs.
    Vcpus {
        /// What the program does.
        what: &'static str,
        /// The minimum.
        least: usize,
        /// The maximum.
        most: usize,
        /// The actual number.
        count: usize,
    },
    /// Another reason, in the program's words.
    Other(&'static str),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, words: &[&str]| {
            words.iter().enumerate().try_for_each(|(index, word)| {
                f.write_str(if index == 0 { "" } else { ", " })?;
                f.write_str(word)
            })
        };
        match *self {
            Self::Argument { text, names } => {
                write!(f, "The argument '{text}' is none of this program's; give name=value with one of: ")?;
                list(f, names)
            }
            Self::TooMany { most } => write!(f, "There are too many arguments; give {most} at most"),
            Self::Number { name, text, least, most } => write!(
                f,
                "The argument {name}={text} is not possible; give a number from {least} to {most}, such as 4096, 0x1000 or 4K"
            ),
            Self::Word { name, text, words } => {
                write!(f, "The argument {name}={text} is not possible; give one of: ")?;
                list(f, words)
            }
            Self::Memory { needed, left } => write!(
                f,
                "An array of {needed} bytes is needed and {left} bytes of memory are left; give the VM more with --memory, or choose a smaller problem"
            ),
            Self::Vcpus { what, least, most, count } => {
                write!(
                    f,
                    "{what} needs from {least} to {most} vCPUs, and this VM has {count}; choose with --cpus"
                )
            }
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// A program's arguments, all with known names.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    given: [(&'static str, &'static str); MAX_ARGUMENTS],
    count: usize,
}

impl Settings {
    /// Parses the arguments after the program's name; `names` are the known names.
    ///
    /// # Errors
    /// An argument isn't `name=value`, its name is unknown, or there are too many.
    pub fn parse(
        arguments: impl IntoIterator<Item = &'static str>,
        names: &'static [&'static str],
    ) -> Result<Self, Refused> {
        let mut this = Self { given: [("", ""); MAX_ARGUMENTS], count: 0 };
        for text in arguments {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            if value.is_empty() || !names.contains(&name) {
                return Err(Refused::Argument { text, names });
            }
            let Some(slot) = this.given.get_mut(this.count) else {
                return Err(Refused::TooMany { most: MAX_ARGUMENTS });
            };
            *slot = (name, value);
            this.count += 1;
        }
        Ok(this)
    }

    /// Returns the last value of a name.
    pub fn text(&self, name: &str) -> Option<&'static str> {
        self.given.iter().take(self.count).rev().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    /// Returns a number within a range, or `default`.
    ///
    /// # Errors
    /// The value isn't a number or is out of range.
    pub fn number(
        &self,
        name: &'static str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64, Refused> {
        let Some(text) = self.text(name) else { return Ok(default) };
        parse_number(text).filter(|number| range.contains(number)).ok_or(Refused::Number {
            name,
            text,
            least: *range.start(),
            most: *range.end(),
        })
    }

    /// Returns a number of objects in memory, or `default`.
    ///
    /// # Errors
    /// As for [`Settings::number`].
    pub fn size(
        &self,
        name: &'static str,
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Result<usize, Refused> {
        let range = *range.start() as u64..=*range.end() as u64;
        Ok(usize::try_from(self.number(name, default as u64, range)?).unwrap_or(default))
    }

    /// Returns the value's index in `words`, or 0 if it is absent.
    ///
    /// # Errors
    /// The value isn't among them.
    pub fn word(&self, name: &'static str, words: &'static [&'static str]) -> Result<usize, Refused> {
        let Some(text) = self.text(name) else { return Ok(0) };
        words.iter().position(|word| *word == text).ok_or(Refused::Word { name, text, words })
    }
}

/// Parses a decimal or `0x` hexadecimal number, with the suffixes K, M and G.
pub fn parse_number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (text.strip_suffix('K')?, 10),
        b'M' => (text.strip_suffix('M')?, 20),
        b'G' => (text.strip_suffix('G')?, 30),
        _ => (text, 0),
    };
    let number = match digits.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok()?,
        None => digits.parse().ok()?,
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::{Settings, parse_number};

    const NAMES: &[&str] = &["n", "kind"];

    #[test]
    fn what_is_given_is_found_and_what_is_not_has_a_default() {
        let settings = Settings::parse(["n=4K", "kind=queue", "n=0x10"], NAMES).unwrap();
        assert_eq!(settings.number("n", 1, 1..=100), Ok(16));
        assert_eq!(settings.size("n", 1, 1..=100), Ok(16));
        assert_eq!(settings.word("kind", &["ticket", "queue"]), Ok(1));
        let none = Settings::parse([], NAMES).unwrap();
        assert_eq!(none.number("n", 7, 1..=100), Ok(7));
        assert_eq!(none.word("kind", &["ticket", "queue"]), Ok(0));
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_one_sentence() {
        let told = |result: Result<u64, super::Refused>, words: &str| {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(words) && !text.contains('\n'), "{text}");
        };
        let parse = |arguments: &[&'static str]| Settings::parse(arguments.iter().copied(), NAMES).map(|_| 0);
        told(parse(&["m=1"]), "'m=1' is none of this program's; give name=value with one of: n, kind");
        told(parse(&["n"]), "'n'");
        told(parse(&["n="]), "'n='");
        told(parse(&["n=1"; 17]), "16 at most");
        let settings = Settings::parse(["n=101", "kind=x"], NAMES).unwrap();
        told(settings.number("n", 1, 1..=100), "n=101 is not possible; give a number from 1 to 100");
        told(settings.word("kind", &["a", "b"]).map(|_| 0), "give one of: a, b");
        let settings = Settings::parse(["n=-1"], NAMES).unwrap();
        told(settings.number("n", 1, 0..=100), "n=-1");
    }

    #[test]
    fn numbers_have_suffixes() {
        assert_eq!(parse_number("0x10K"), Some(16 << 10));
        assert_eq!(parse_number("3G"), Some(3 << 30));
        for wrong in ["", "K", "1T", "x", "99999999999999999999", "0xffffffffffffffffG"] {
            assert_eq!(parse_number(wrong), None, "{wrong}");
        }
    }
}
