//! The key that all hosts of a cluster share.
//!
//! Daemons encrypt what they say to each other with it, and monitors the VMs that move between them. A file has it, 32 bytes or as many in hexadecimal, that
//! nobody but its owner may read.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Bytes of a cluster key.
pub const KEY: usize = 32;
/// No key file is longer: 64 digits with white space around them.
const LONGEST_FILE: u64 = 256;

/// The secret that all hosts of a cluster share. Whoever has it can speak for any host.
#[derive(Clone)]
pub struct ClusterKey([u8; KEY]);

impl fmt::Debug for ClusterKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ClusterKey")
    }
}

/// A cluster key can't be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file can't be read.
    #[error("The cluster key {} can't be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Others could have read it.
    #[error(
        "The cluster key {} has mode {mode:03o}, so that others than its owner may use it: make a new one, or at least `chmod 600` it",
        path.display()
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// It belongs to somebody else.
    #[error("The cluster key {} belongs to user {owner}; it must be root's or that of the daemon's user", path.display())]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// It isn't a key.
    #[error("The cluster key {} isn't 32 bytes or 64 hexadecimal digits that somebody drew at random; `causeway key FILE` makes one", path.display())]
    Content {
        /// Which.
        path: PathBuf,
    },
    /// A new one can't be written.
    #[error("The cluster key {} can't be written", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ClusterKey {
    /// A key as bytes; `None` where all of them are the same, which no source of random numbers gives.
    #[must_use]
    pub fn new(bytes: [u8; KEY]) -> Option<Self> {
        bytes.iter().any(|byte| *byte != bytes[0]).then_some(Self(bytes))
    }

    /// Reads a file: 32 bytes, or as many in hexadecimal.
    ///
    /// # Errors
    /// When it can't be read, others than root and the daemon's user may read or change it, or it is no key.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let unreadable = |source| KeyError::Read { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(unreadable)?;
        // Of the open file: a name may lead elsewhere a moment later.
        let about = file.metadata().map_err(unreadable)?;
        let mode = about.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyError::Open { path: path.to_owned(), mode });
        }
        let owner = about.uid();
        if owner != 0 && owner != rustix::process::geteuid().as_raw() {
            return Err(KeyError::Foreign { path: path.to_owned(), owner });
        }
        let mut bytes = Vec::new();
        file.take(LONGEST_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        Self::parse(&bytes).ok_or_else(|| KeyError::Content { path: path.to_owned() })
    }

    /// A key as a file has it.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if let Ok(raw) = <[u8; KEY]>::try_from(bytes) {
            return Self::new(raw);
        }
        if bytes.len() > usize::try_from(LONGEST_FILE).unwrap_or(0) {
            return None;
        }
        let (digits, rest) = bytes.trim_ascii().as_chunks::<2>();
        if digits.len() != KEY || !rest.is_empty() {
            return None;
        }
        let mut key = [0; KEY];
        for (byte, [high, low]) in key.iter_mut().zip(digits) {
            let digit = |ascii: u8| char::from(ascii).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Self::new(key)
    }

    /// Draws a key and writes it to a new file, in hexadecimal, for its owner only.
    ///
    /// # Errors
    /// When the file is there already or can't be written.
    pub fn create(path: &Path) -> Result<(), KeyError> {
        use std::io::Write as _;
        let failed = |source| KeyError::Write { path: path.to_owned(), source };
        let mut bytes = [0; KEY];
        fill_random(&mut bytes).map_err(failed)?;
        let mut text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        text.push('\n');
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)
    }

    /// The secret itself.
    #[must_use]
    pub fn bytes(&self) -> &[u8; KEY] {
        &self.0
    }
}

/// Random bytes of the kernel.
///
/// # Errors
/// When it has none.
pub fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn file(folder: &Path, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_key_is_read_raw_and_in_hexadecimal_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let raw: [u8; KEY] = std::array::from_fn(|at| u8::try_from(at * 7).unwrap());
        let hex: String = raw.iter().map(|byte| format!("{byte:02X}")).collect();
        for bytes in [raw.to_vec(), hex.clone().into_bytes(), format!(" {hex}\n").into_bytes()] {
            let key = ClusterKey::load(&file(folder.path(), "key", &bytes, 0o600)).unwrap();
            assert_eq!(key.bytes(), &raw);
        }
        let wrong = [
            Vec::new(),
            raw[1..].to_vec(),
            vec![0; KEY],
            "0".repeat(64).into_bytes(),
            hex.as_bytes()[1..].to_vec(),
            hex.replace('7', "g").into_bytes(),
            format!("{hex}00").into_bytes(),
            format!("{hex}{}", " ".repeat(300)).into_bytes(),
        ];
        for bytes in wrong {
            let error = ClusterKey::load(&file(folder.path(), "key", &bytes, 0o600)).unwrap_err();
            assert!(matches!(error, KeyError::Content { .. }), "{bytes:?}: {error}");
        }
    }

    #[test]
    fn a_key_that_others_may_read_or_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        ClusterKey::create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(ClusterKey::create(&path), Err(KeyError::Write { .. })), "never over another one");
        let first = ClusterKey::load(&path).unwrap();
        for mode in [0o604, 0o640, 0o602, 0o666] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = ClusterKey::load(&path).unwrap_err();
            assert!(error.to_string().contains(&format!("{mode:03o}")), "{error}");
        }
        let other = folder.path().join("other");
        ClusterKey::create(&other).unwrap();
        assert_ne!(ClusterKey::load(&other).unwrap().bytes(), first.bytes());
        assert_eq!(format!("{first:?}"), "ClusterKey", "secrets aren't printed");
    }
}
