//! The server side: serves one device on one socket, to one client at a time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::device::{Device, Peer};
use crate::region_info::RegionError;
use crate::session::{Refusal, Session};
use crate::socket::{Message, Socket, SocketError, Wait};
use crate::wire::{FLAG_ERROR, FLAG_REPLY, HEADER, Header, MAX_MESSAGE, command, wire_len};

/// Time-out for a client to read a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A server can't listen or serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket can't be created.
    #[error(
        "A vfio-user server can't listen at {path}; is the folder there, and the path shorter than 108 bytes?"
    )]
    Bind {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another server listens there.
    #[error("A vfio-user server is running at {path} already; stop it or use another path")]
    Taken {
        /// The socket's path.
        path: PathBuf,
    },
    /// Accepting a client failed.
    #[error("A vfio-user server can't accept clients")]
    Accept(#[source] io::Error),
    /// The device offers an invalid region.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// The reason for a connection's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The client closed it.
    Disconnected,
    /// The client sent an invalid message or didn't read replies, or the socket failed.
    Failed,
    /// The device refused this peer.
    Refused,
    /// The stop signal arrived.
    Stopped,
}

/// A listening socket. Dropping it removes its file.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: Option<PathBuf>,
}

impl Server {
    /// Listens at `path`. Replaces a socket file without a listener. The permissions of file and directory (the umask
    /// applies) and [`Device::authorize`] decide which clients may connect.
    ///
    /// # Errors
    /// The path can't be used, or another server listens there.
    pub fn bind(path: &Path) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Bind { path: path.to_owned(), source };
        let listener = match UnixListener::bind(path) {
            Ok(listener) => listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => match UnixStream::connect(path) {
                Ok(_) => return Err(ServerError::Taken { path: path.to_owned() }),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(failed)?;
                    UnixListener::bind(path).map_err(failed)?
                }
                Err(error) => return Err(failed(error)),
            },
            Err(error) => return Err(failed(error)),
        };
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, path: Some(path.to_owned()) })
    }

    /// Uses a listening socket, whose file it doesn't remove.
    ///
    /// # Errors
    /// The socket can't be made non-blocking.
    pub fn from_listener(listener: UnixListener) -> Result<Self, ServerError> {
        listener.set_nonblocking(true).map_err(ServerError::Accept)?;
        Ok(Self { listener, path: None })
    }

    /// Returns the socket's path if this server created the file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Serves one client after the other until `stop` (an eventfd, or any descriptor) becomes readable. It accepts the
    /// next client after [`Device::disconnected`] has returned for the previous one.
    ///
    /// # Errors
    /// The listening socket fails, or the device offers regions that the protocol can't express.
    pub fn serve(&self, device: &Arc<dyn Device>, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(ServerError::Accept(error.into())),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if passing(&error) => continue,
                Err(error) if no_descriptors(&error) => {
                    tracing::error!(%error, "A vfio-user client waits: no file descriptor is left for it");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
                Err(error) => return Err(ServerError::Accept(error)),
            };
            if serve_stream(stream, device.as_ref(), stop)? == Ended::Stopped {
                return Ok(());
            }
        }
    }
}

/// Returns whether the client disconnected before it was accepted, or no client came.
fn passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

fn no_descriptors(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS].iter().any(|e| Some(e.raw_os_error()) == code)
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // It may already be gone, with its directory.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves one client on a connected stream until it ends or `stop` becomes readable. Calls [`Device::authorize`]. If
/// the peer was authorized, calls [`Device::disconnected`] at the end.
///
/// # Errors
/// The device offers regions that the protocol can't express.
pub fn serve_stream(
    stream: UnixStream,
    device: &dyn Device,
    stop: BorrowedFd<'_>,
) -> Result<Ended, ServerError> {
    let peer = match rustix::net::sockopt::socket_peercred(&stream) {
        Ok(credentials) => Peer {
            uid: credentials.uid.as_raw(),
            gid: credentials.gid.as_raw(),
            pid: credentials.pid.as_raw_pid(),
        },
        Err(error) => {
            tracing::warn!(%error, "a vfio-user client without credentials is refused");
            return Ok(Ended::Refused);
        }
    };
    if !device.authorize(&peer) {
        tracing::warn!(?peer, "a vfio-user client isn't authorized");
        return Ok(Ended::Refused);
    }
    let mut session = Session::new(device)?;
    let socket = Socket::new(stream);
    let ended = converse(&socket, &mut session, stop);
    socket.shutdown();
    device.disconnected();
    Ok(match ended {
        SocketError::Closed => Ended::Disconnected,
        SocketError::Stopped => Ended::Stopped,
        error => {
            tracing::warn!(?peer, error = &error as &dyn std::error::Error, "a vfio-user client failed");
            Ended::Failed
        }
    })
}

/// Handles messages until the connection ends. Returns the reason.
fn converse(socket: &Socket, session: &mut Session<'_>, stop: BorrowedFd<'_>) -> SocketError {
    loop {
        let message = match socket.receive(MAX_MESSAGE, &Wait { stop: Some(stop), deadline: None }) {
            Ok(message) => message,
            Err(error) => return error,
        };
        let Message { header, body, fds, too_many_fds } = message;
        if !header.is_command() {
            // A reply without a command: the server sends no commands.
            tracing::debug!(?header, "a vfio-user client sent no command");
            continue;
        }
        let mut result = if too_many_fds {
            Err(Refusal::Error(Errno::TOOBIG.into()))
        } else {
            session.handle(header.command, &body, fds)
        };
        let fatal = matches!(result, Err(Refusal::Fatal(_)));
        if let Err(refusal) = &result {
            tracing::debug!(command = header.command, ?refusal, "a vfio-user command was refused");
        }
        if header.no_reply() && header.command != command::VERSION {
            continue;
        }
        let reply = Header { id: header.id, command: header.command, ..Header::default() };
        let wait = Wait { stop: Some(stop), deadline: Instant::now().checked_add(REPLY_TIMEOUT) };
        let sent = match &mut result {
            Ok(encoded) => {
                let fds: Vec<BorrowedFd<'_>> = encoded.fds.iter().map(|fd| fd.as_fd()).collect();
                let size = wire_len(HEADER + encoded.body.len());
                socket.send(&Header { size, flags: FLAG_REPLY, ..reply }, &[&encoded.body], &fds, &wait)
            }
            Err(refusal) => {
                let header = Header {
                    size: wire_len(HEADER),
                    flags: FLAG_REPLY | FLAG_ERROR,
                    error: refusal.errno(),
                    ..reply
                };
                socket.send(&header, &[], &[], &wait)
            }
        };
        match (sent, result) {
            (Err(error), _) => return error,
            (Ok(()), Err(Refusal::Fatal(error))) if fatal => return SocketError::Io(error),
            (Ok(()), _) => {}
        }
    }
}
