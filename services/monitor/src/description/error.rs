//! Errors of a description, each in one sentence.

use std::fmt;
use std::path::PathBuf;

/// Path of a key in a description: `disks[1].serial`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// A key of the outermost table.
    pub fn root(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// A key below this one.
    pub fn below(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    /// An item of this key's list.
    pub fn item(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    /// The key that contains this one; `None` for a key of the outermost table.
    pub fn parent(&self) -> Option<Self> {
        let end = self.0.rfind(['.', '['])?;
        Some(Self(self.0[..end].to_owned()))
    }

    /// The key in the outermost table that contains this one: `disks` of `disks[1].serial`.
    pub fn first(&self) -> &str {
        self.0.split(['.', '[']).next().unwrap_or_default()
    }

    /// Index of the list item right below the outermost key: 1 in `disks[1].serial`.
    pub fn first_index(&self) -> Option<usize> {
        let rest = self.0.strip_prefix(self.first())?.strip_prefix('[')?;
        rest.split(']').next()?.parse().ok()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A value that can't be used. The caller adds where it was written (file and line, or flag).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct Invalid {
    /// Key of the value.
    pub key: Key,
    /// The written value, and the allowed ones.
    pub problem: String,
}

impl Invalid {
    /// A problem with the value at `key`.
    pub fn new(key: Key, problem: impl Into<String>) -> Self {
        Self { key, problem: problem.into() }
    }
}

/// A description that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// The file can't be read.
    #[error("VM description {} can't be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Error of `open` or of the read.
        #[source]
        source: std::io::Error,
    },
    /// The file isn't a description.
    #[error("{} is not a VM description: {problem}", path.display())]
    NotADescription {
        /// The file.
        path: PathBuf,
        /// Reason: the file is too long, or isn't UTF-8 text.
        problem: String,
    },
    /// The text isn't TOML, has an unknown key, or a value of the wrong type.
    #[error("{}, line {line}{}: {problem}", path.display(), at(key.as_ref()))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Key at the error, where known.
        key: Option<Key>,
        /// The error, and what is allowed.
        problem: String,
    },
    /// A value can't be used.
    #[error("{}{}, {}: {}", path.display(), on(*line), invalid.key, invalid.problem)]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Line, from 1; `None` when the key isn't in the file.
        line: Option<usize>,
        /// Key and problem.
        invalid: Invalid,
    },
}

fn at(key: Option<&Key>) -> String {
    key.map(|key| format!(", {key}")).unwrap_or_default()
}

fn on(line: Option<usize>) -> String {
    line.map(|line| format!(", line {line}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::Key;

    #[test]
    fn a_key_names_its_place_from_the_outside_in() {
        let key = Key::root("disks").item(12).below("serial");
        assert_eq!(key.to_string(), "disks[12].serial");
        assert_eq!(key.first(), "disks");
        assert_eq!(key.first_index(), Some(12));
        assert_eq!(key.parent(), Some(Key::root("disks").item(12)));
        assert_eq!(key.parent().and_then(|key| key.parent()), Some(Key::root("disks")));
        assert_eq!(Key::root("cpus").parent(), None);
        assert_eq!(Key::root("cpus").first_index(), None);
    }
}
