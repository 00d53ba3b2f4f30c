//! The Unix socket: created with mode 0600, never taken from a running VM, removed at the end.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use control_api::discovery::{SocketState, probe};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ApiError;

/// Limit of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// A socket file. Dropping this removes the file, unless another file has replaced it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "The API socket {} could not be removed", self.path.display());
        }
    }
}

/// Listens on `path` with mode 0600. Replaces a socket that a dead monitor left.
pub(super) fn listen(path: &Path) -> Result<(UnixListener, SocketFile), ApiError> {
    let failed = |what| move |source: io::Error| ApiError::Socket { path: path.to_owned(), what, source };
    // Two monitors that start at once must not both claim the same stale socket.
    let _lock = lock_directory(path).map_err(failed("locked"))?;
    let bound = match bind(path, SocketType::STREAM) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if probe(path) != SocketState::Stale {
                return Err(ApiError::InUse { path: path.to_owned() });
            }
            std::fs::remove_file(path).map_err(failed("replaced"))?;
            bind(path, SocketType::STREAM)
        }
        bound => bound,
    };
    let listener = UnixListener::from(bound.map_err(failed("bound"))?);
    let metadata = std::fs::symlink_metadata(path).map_err(failed("read"))?;
    let file = SocketFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) };
    Ok((listener, file))
}

/// Listens on `path` for connections of packets, with mode 0600, non-blocking. Replaces any socket there: the caller owns the API socket
/// that it belongs to.
pub(crate) fn listen_for_packets(path: &Path) -> Result<(OwnedFd, SocketFile), ApiError> {
    let failed = |what| move |source: io::Error| ApiError::Socket { path: path.to_owned(), what, source };
    let bound = match bind(path, SocketType::SEQPACKET) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            std::fs::remove_file(path).map_err(failed("replaced"))?;
            bind(path, SocketType::SEQPACKET)
        }
        bound => bound,
    };
    let listener = bound.map_err(failed("bound"))?;
    let metadata = std::fs::symlink_metadata(path).map_err(failed("read"))?;
    Ok((listener, SocketFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) }))
}

fn lock_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let fd =
        rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::flock(&fd, FlockOperation::LockExclusive)?;
    Ok(fd)
}

fn bind(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    // bind(2) creates the file with this mode, so the process-wide umask needn't change.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
