//! The Unix sockets of the host's side: the one for connections from the host's programs, and those for guest connections.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};

/// Limit of connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Limit of a socket path, bytes: `struct sockaddr_un` less the terminator and the `_<port>` of guest connections.
pub const PATH_MAX: usize = 107 - 11;

/// Why the socket can't be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path is too long.
    #[error("Socket path {path} has {length} bytes; at most {PATH_MAX} are possible, choose a shorter one")]
    TooLong {
        /// The path.
        path: String,
        /// Its length, bytes.
        length: usize,
    },
    /// Another process listens there.
    #[error("Socket {path} is in use by another process; stop that VM or choose another path")]
    InUse {
        /// The path.
        path: String,
    },
    /// The file there isn't a socket.
    #[error("{path} exists and is no socket; remove it or choose another path")]
    NotASocket {
        /// The path.
        path: String,
    },
    /// The kernel refused an operation.
    #[error("Socket {path} can't be {what}")]
    Host {
        /// The path.
        path: String,
        /// The failed operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A listening Unix socket, whose file is removed when it is dropped.
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file, so that no other file is removed.
    identity: Option<(u64, u64)>,
}

fn stream() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

impl Listener {
    /// Listens at `path`. Replaces a socket that a dead process left.
    pub fn open(path: &Path) -> Result<Self, SocketError> {
        let shown = || path.display().to_string();
        let length = path.as_os_str().len();
        if length > PATH_MAX {
            return Err(SocketError::TooLong { path: shown(), length });
        }
        let failed = |what, source: io::Error| SocketError::Host { path: shown(), what, source };
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("looked at", error)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NotASocket { path: shown() });
            }
            Ok(_) => match connect_to(path) {
                // EAGAIN: another process listens and is busy.
                Ok(_) => return Err(SocketError::InUse { path: shown() }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(SocketError::InUse { path: shown() });
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    tracing::info!(
                        "Socket {} was left by a process that is gone; it is replaced",
                        path.display()
                    );
                    std::fs::remove_file(path).map_err(|error| failed("replaced", error))?;
                }
                Err(error) => return Err(failed("probed for another user", error)),
            },
        }
        let address = SocketAddrUnix::new(path).map_err(|error| failed("named", error.into()))?;
        let fd = stream().map_err(|error| failed("created", error))?;
        bind(&fd, &address).map_err(|error| match error {
            rustix::io::Errno::ADDRINUSE => SocketError::InUse { path: shown() },
            error => failed("bound", error.into()),
        })?;
        let identity = std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()));
        let listener = Self { fd, path: path.to_owned(), identity };
        listen(&listener.fd, BACKLOG).map_err(|error| failed("listened at", error.into()))?;
        Ok(listener)
    }

    /// Descriptor that is readable when a program connects.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection; `WouldBlock` when there is none.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        Ok(accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
    }

    /// Connects to the program that serves guest connections to `port`: `<path>_<port>`. Never blocks.
    pub fn connect_to_port(&self, port: u32) -> io::Result<OwnedFd> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        connect_to(Path::new(&path))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let present = std::fs::symlink_metadata(&self.path).ok().map(|found| (found.dev(), found.ino()));
        if present.is_some() && present == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = stream()?;
    connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn the_file_goes_with_the_listener() {
        let folder = folder();
        let path = folder.path().join("vm.sock");
        let listener = Listener::open(&path).unwrap();
        assert!(path.exists());
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let folder = folder();
        let path = folder.path().join("vm.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard library leaves it behind");
        let living = Listener::open(&path).unwrap();
        let text = Listener::open(&path).err().unwrap().to_string();
        assert_eq!(
            text,
            format!(
                "Socket {} is in use by another process; stop that VM or choose another path",
                path.display()
            )
        );
        drop(living);
        Listener::open(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = folder();
        let path = folder.path().join("precious");
        std::fs::write(&path, "text").unwrap();
        assert!(matches!(Listener::open(&path), Err(SocketError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
    }

    #[test]
    fn the_file_of_a_successor_survives() {
        let folder = folder();
        let path = folder.path().join("vm.sock");
        let first = Listener::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::open(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_does_not_fit_and_a_missing_folder_are_sentences() {
        let long = "/tmp/".to_owned() + &"x".repeat(100);
        assert!(matches!(Listener::open(Path::new(&long)), Err(SocketError::TooLong { length: 105, .. })));
        let text = Listener::open(Path::new("/nonexistent/vm.sock")).err().unwrap().to_string();
        assert_eq!(text, "Socket /nonexistent/vm.sock can't be bound");
    }
}
