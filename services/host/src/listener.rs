//! The daemon's sockets: never stolen from a running daemon, replaced if a dead one left them, removed at the end.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Limit of a Unix socket's path, bytes.
pub const LONGEST_PATH: usize = 107;

/// Why a socket can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon uses it.
    #[error("A host daemon runs at {} already; stop it, or give this one another --socket", path.display())]
    Taken {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path is too long.
    #[error("The socket {} has a longer path than Unix sockets take, {LONGEST_PATH} bytes", path.display())]
    TooLong {
        /// Path of the socket.
        path: PathBuf,
    },
    /// A file system error.
    #[error("The socket {} can't be {what}; use another --socket, or make its folder writable", path.display())]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// The failed operation.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A daemon's exclusive right to a socket path, and the folder beside it. Released when this is dropped, or when the process dies.
#[derive(Debug)]
pub struct Place {
    socket: PathBuf,
    folder: PathBuf,
    _lock: File,
}

impl Place {
    /// Acquires the path for this daemon. Creates the folder `PATH.d` (without `.sock`) beside it, and removes what a dead daemon left
    /// there, except for its record of NICs.
    ///
    /// # Errors
    /// When another daemon has it, or the file system refuses.
    pub fn take(socket: &Path) -> Result<Self, ListenError> {
        let failed = |what| move |source| ListenError::Io { path: socket.to_owned(), what, source };
        if socket.as_os_str().len() > LONGEST_PATH {
            return Err(ListenError::TooLong { path: socket.to_owned() });
        }
        if let Some(parent) = socket.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(failed("given a folder"))?;
        }
        let folder = socket.with_extension("d");
        std::fs::create_dir_all(&folder).map_err(failed("given a folder beside it"))?;
        // Other users may find the NICs' sockets; each connection's credentials are checked.
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755))
            .map_err(failed("given a folder beside it"))?;
        let lock = File::create(folder.join("lock")).map_err(failed("locked"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ListenError::Taken { path: socket.to_owned() }),
            Err(error) => return Err(failed("locked")(error.into())),
        }
        for entry in std::fs::read_dir(&folder).map_err(failed("given a clean folder"))? {
            let entry = entry.map_err(failed("given a clean folder"))?;
            let left_behind =
                entry.file_type().is_ok_and(|kind| std::os::unix::fs::FileTypeExt::is_socket(&kind));
            if left_behind {
                std::fs::remove_file(entry.path()).map_err(failed("given a clean folder"))?;
            }
        }
        Ok(Self { socket: socket.to_owned(), folder, _lock: lock })
    }

    /// The service's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Folder for the sockets of NICs and the daemon's record of them.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Listens at the service's socket.
    ///
    /// # Errors
    /// When another process listens there (not a daemon, which would hold the lock), or the file system refuses.
    pub fn listen(&self) -> Result<Listening, ListenError> {
        listen(&self.socket)
    }
}

/// A listening socket. Its file is removed when this is dropped, unless another process has replaced it.
#[derive(Debug)]
pub struct Listening {
    /// The socket, in non-blocking mode.
    pub listener: UnixListener,
    file: SocketFile,
}

impl Listening {
    /// Separates listener and file: keep the latter while the former is in use.
    #[must_use]
    pub fn into_parts(self) -> (UnixListener, SocketFile) {
        (self.listener, self.file)
    }
}

/// The file of a listening socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "The socket {} could not be removed", self.path.display());
        }
    }
}

/// Listens at `path`. Any process may connect; each connection's credentials are checked.
///
/// # Errors
/// When another process listens there, or the file system refuses.
pub fn listen(path: &Path) -> Result<Listening, ListenError> {
    let failed = |what| move |source| ListenError::Io { path: path.to_owned(), what, source };
    if path.as_os_str().len() > LONGEST_PATH {
        return Err(ListenError::TooLong { path: path.to_owned() });
    }
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Ok(_) => return Err(ListenError::Taken { path: path.to_owned() }),
                Err(error) => return Err(failed("looked at")(error)),
            }
            std::fs::remove_file(path).map_err(failed("replaced"))?;
            UnixListener::bind(path)
        }
        bound => bound,
    };
    let listener = listener.map_err(failed("bound"))?;
    listener.set_nonblocking(true).map_err(failed("made non-blocking"))?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).map_err(failed("opened to others"))?;
    let metadata = std::fs::symlink_metadata(path).map_err(failed("looked at"))?;
    Ok(Listening {
        listener,
        file: SocketFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) },
    })
}

#[cfg(test)]
mod tests {
    use super::{ListenError, Place};

    #[test]
    fn a_second_daemon_is_refused_and_a_dead_ones_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sub/host.sock");
        let place = Place::take(&path).unwrap();
        assert_eq!(place.folder(), directory.path().join("sub/host.d"));
        let listening = place.listen().unwrap();
        let error = Place::take(&path).unwrap_err();
        assert!(matches!(error, ListenError::Taken { .. }), "{error}");
        // As after a crash: the files stay.
        let (listener, file) = listening.into_parts();
        drop(listener);
        std::mem::forget(file);
        drop(place);
        let left =
            std::os::unix::net::UnixListener::bind(directory.path().join("sub/host.d/vm:nic.0")).unwrap();
        drop(left);
        let place = Place::take(&path).unwrap();
        assert!(!directory.path().join("sub/host.d/vm:nic.0").exists());
        let listening = place.listen().unwrap();
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let path = std::path::PathBuf::from(format!("/tmp/{}/host.sock", "a".repeat(120)));
        assert!(matches!(Place::take(&path), Err(ListenError::TooLong { .. })));
    }
}
