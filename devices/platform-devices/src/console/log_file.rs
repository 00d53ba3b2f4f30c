//! A log file for a console's output, with a limit and one older file.
//!
//! ```text
//! console.log + next output > limit ──▶ content moves to console.log.1 ──▶ console.log restarts empty
//! ```
//!
//! Both files are open from the start. Content is copied rather than renamed, since a sandboxed process can neither
//! create nor rename a file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::ConsoleError;

/// Size in bytes of a copy step.
const COPY_BYTES: usize = 64 * 1024;

/// The open file. One thread uses it. Other processes may append to it or truncate it meanwhile.
pub(super) struct LogFile {
    /// Opened for append: a write goes to the current end, even if another process has moved it.
    current: File,
    /// `None` for a terminal, pipe or other file that can't be truncated.
    older: Option<File>,
    limit_bytes: u64,
}

impl LogFile {
    /// Opens `path` for append, and creates it if necessary. A regular file has at most `limit_bytes`, and so has the
    /// older file (`path` with `.1`).
    pub(super) fn open(path: &Path, limit_bytes: u64) -> Result<Self, ConsoleError> {
        let failed = |verb: &str, path: &Path| {
            let what = format!("{verb} the file {} for its output", path.display());
            move |source: io::Error| ConsoleError::host(what, source)
        };
        let length = match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                let current = File::options().append(true).open(path).map_err(failed("open", path))?;
                return Ok(Self { current, older: None, limit_bytes });
            }
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        };
        let create = || {
            let mut options = File::options();
            options.read(true).append(true).create(true).open(path).map_err(failed("create or open", path))
        };
        let mut current = create()?;
        // The older file is next to the file itself, not to a link to it.
        let real = std::fs::canonicalize(path).map_err(failed("find", path))?;
        let older_path = older_path(&real);
        if std::fs::symlink_metadata(&older_path).is_ok_and(|metadata| !metadata.is_file()) {
            let why = "older output is to be moved there, and something that is no file is there";
            return Err(ConsoleError::Taken { path: older_path, why });
        }
        if length > limit_bytes {
            // Written under another limit: keep it whole.
            std::fs::rename(&real, &older_path).map_err(failed("rename", path))?;
            current = create()?;
        }
        let older = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&older_path)
            .map_err(failed("create or open", &older_path))?;
        Ok(Self { current, older: Some(older), limit_bytes })
    }

    /// Appends. If the file would exceed its limit, it restarts empty first.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(older) = &self.older {
            let length = u64::try_from(rustix::fs::fstat(&self.current)?.st_size).unwrap_or(0);
            if length > 0 && length.saturating_add(bytes.len() as u64) > self.limit_bytes {
                self.begin_anew(older, length)?;
            }
        }
        Ok(rustix::io::write(&self.current, bytes)?)
    }

    /// Moves the last [`LogFile::limit_bytes`] of content to the older file.
    fn begin_anew(&self, older: &File, length: u64) -> io::Result<()> {
        rustix::fs::ftruncate(older, 0)?;
        let mut buffer = vec![0; COPY_BYTES];
        let begin = length.saturating_sub(self.limit_bytes);
        let mut at = begin;
        while at < length {
            let part = usize::try_from(length - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
            match self.current.read_at(&mut buffer[..part], at) {
                // Another process has truncated it meanwhile.
                Ok(0) => break,
                Ok(count) => {
                    older.write_all_at(&buffer[..count], at - begin)?;
                    at += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(rustix::fs::ftruncate(&self.current, 0)?)
    }
}

impl AsFd for LogFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.current.as_fd()
    }
}

fn older_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    PathBuf::from(name)
}
