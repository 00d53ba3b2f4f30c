//! The secret key that all hosts of a cluster share.
//!
//! Host daemons encrypt their messages with it, and monitors encrypt migration streams. A file contains the key: 32
//! bytes, or the same in hexadecimal. Only the file's owner may be able to read it. [`stream`] seals byte streams with it.

pub mod stream;

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Length of a cluster key in bytes.
pub const KEY: usize = 32;
/// Limit of a key file in bytes: 64 digits with white space around them fit.
const LONGEST_FILE: u64 = 256;

/// The secret that all hosts of a cluster share. A process with the key can speak for any host.
#[derive(Clone)]
pub struct ClusterKey([u8; KEY]);

impl fmt::Debug for ClusterKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ClusterKey")
    }
}

/// A cluster key can't be loaded or created.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file can't be read.
    #[error("The cluster key {} can't be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Other users may have read the key.
    #[error(
        "The cluster key {} has mode {mode:03o}, so that others than its owner may use it: make a new one, or at least `chmod 600` it",
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Another user owns the file.
    #[error("The cluster key {} belongs to user {owner}; it must be root's or that of the daemon's user", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The owner's user ID.
        owner: u32,
    },
    /// The content isn't a key.
    #[error("The cluster key {} isn't 32 bytes or 64 hexadecimal digits that somebody drew at random; `causeway key FILE` makes one", path.display())]
    Content {
        /// The file.
        path: PathBuf,
    },
    /// A new key can't be written.
    #[error("The cluster key {} can't be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl ClusterKey {
    /// Creates a key from bytes. Returns `None` if all bytes are equal, which no source of random numbers yields.
    #[must_use]
    pub fn new(bytes: [u8; KEY]) -> Option<Self> {
        bytes.iter().any(|byte| *byte != bytes[0]).then_some(Self(bytes))
    }

    /// Loads a key file: 32 bytes, or the same in hexadecimal.
    ///
    /// # Errors
    /// The file can't be read, isn't a key, or users other than root and the daemon's user may read or change it.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let unreadable = |source| KeyError::Read { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(unreadable)?;
        // Of the open file: the path may lead to another file a moment later.
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

    /// Parses the content of a key file.
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

    /// Generates a key and writes it to a new file in hexadecimal, readable by its owner only.
    ///
    /// # Errors
    /// The file already exists or can't be written.
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

    /// Returns the secret bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8; KEY] {
        &self.0
    }
}

/// Fills `bytes` with random bytes from the kernel.
///
/// # Errors
/// The kernel has no random bytes.
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
