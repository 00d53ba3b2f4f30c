//! Packets with descriptors. Only [`Socket::wait`] blocks, until a deadline.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Limit of a message in bytes.
pub const LARGEST_MESSAGE: usize = 16 << 10;
/// Limit of descriptors per message: more than a valid message has, so that excess ones are detected.
pub const MOST_FDS: usize = 80;

/// A message can't be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The peer has closed the connection.
    #[error("The other side of the neighbours' socket has gone")]
    Closed,
    /// The peer's receive buffer is full.
    #[error("The other side of the neighbours' socket doesn't read")]
    Full,
    /// The peer sent an invalid message.
    #[error("A message on the neighbours' socket can't be understood: {0}")]
    Malformed(String),
    /// A system call failed.
    #[error("The neighbours' socket failed")]
    Io(#[source] io::Error),
}

impl From<Errno> for SocketError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Closed,
            Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS => Self::Full,
            other => Self::Io(other.into()),
        }
    }
}

/// A message with its descriptors, or `None` if there is none now.
pub type Received<T> = Option<(T, Vec<OwnedFd>)>;

/// One end of a connection. Thread-safe: each packet is sent and received as a whole.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Connects to a daemon.
    ///
    /// # Errors
    /// No daemon listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self(fd))
    }

    /// Creates two connected ends, for tests.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The peer has closed the connection, or its receive buffer is full.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let bytes = serde_json::to_vec(message).map_err(|error| SocketError::Io(error.into()))?;
        if bytes.len() > LARGEST_MESSAGE || fds.len() > MOST_FDS {
            return Err(SocketError::Io(io::ErrorKind::InvalidInput.into()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(SocketError::Io(io::ErrorKind::InvalidInput.into()));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one message if there is one.
    ///
    /// # Errors
    /// The peer has closed the connection, or sent an invalid message.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Received<T>, SocketError> {
        let mut bytes = vec![0; LARGEST_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(SocketError::Malformed("it is too long, or has too many descriptors".to_owned()));
        }
        let Some(bytes) = bytes.get(..received.bytes).filter(|bytes| !bytes.is_empty()) else {
            return Err(SocketError::Closed);
        };
        let message =
            serde_json::from_slice(bytes).map_err(|error| SocketError::Malformed(error.to_string()))?;
        Ok(Some((message, fds)))
    }

    /// Waits for one message, at most `patience`.
    ///
    /// # Errors
    /// As for [`Socket::receive`]; [`io::ErrorKind::TimedOut`] if none arrived.
    pub fn wait<T: DeserializeOwned>(&self, patience: Duration) -> Result<(T, Vec<OwnedFd>), SocketError> {
        let deadline = std::time::Instant::now() + patience;
        loop {
            if let Some(message) = self.receive()? {
                return Ok(message);
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return Err(SocketError::Io(io::ErrorKind::TimedOut.into()));
            }
            let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The credentials of the connected process (SO_PEERCRED).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Process ID.
    pub pid: i32,
}

/// A non-blocking listening socket. Its creator removes the file.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at `path`, which must not exist.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&fd, 16)?;
        Ok(Self(fd))
    }

    /// Accepts the next connection, if any, with its credentials.
    ///
    /// # Errors
    /// The system call fails.
    pub fn accept(&self) -> io::Result<Option<(Socket, Caller)>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = match rustix::net::accept_with(&self.0, flags) {
            Ok(fd) => fd,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let peer = rustix::net::sockopt::socket_peercred(&fd)?;
        let caller =
            Caller { uid: peer.uid.as_raw(), gid: peer.gid.as_raw(), pid: peer.pid.as_raw_nonzero().get() };
        Ok(Some((Socket(fd), caller)))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FromDaemon, FromMonitor, Permitted, Piece};
    use proptest::prelude::*;

    #[test]
    fn messages_come_with_their_descriptors_and_an_end_is_an_end() {
        let (a, b) = Socket::pair().unwrap();
        assert!(a.receive::<FromDaemon>().unwrap().is_none());
        let message = FromMonitor::Join {
            vm: "a".to_owned(),
            group: "nas".to_owned(),
            permits: vec![Permitted { vm: "b".to_owned(), uid: Some(3) }],
            ram: vec![Piece { address: 0, size: 4096, file: 0, offset: 0 }],
            slot: None,
            epoch: 0,
        };
        a.send(&message, &[a.as_fd(), b.as_fd()]).unwrap();
        let (got, fds) = b.wait::<FromMonitor>(Duration::from_secs(5)).unwrap();
        assert_eq!((got, fds.len()), (message, 2));
        rustix::io::write(&a.0, b"{\"message\":\"alive\",\"count\":1,\"more\":2}").unwrap();
        assert!(matches!(b.receive::<FromMonitor>(), Err(SocketError::Malformed(_))));
        drop((a, fds));
        assert!(matches!(b.receive::<FromMonitor>(), Err(SocketError::Closed)));
    }

    #[test]
    fn one_who_does_not_read_is_noticed_and_never_waited_for() {
        let (a, _b) = Socket::pair().unwrap();
        let alive = FromMonitor::Alive { count: 1 };
        let error = (0..100_000).find_map(|_| a.send(&alive, &[]).err());
        assert!(matches!(error, Some(SocketError::Full)), "{error:?}");
    }

    proptest! {
        /// Any packet yields a message or an error.
        #[test]
        fn any_packet_is_an_answer(bytes in prop::collection::vec(any::<u8>(), 1..200)) {
            let (a, b) = Socket::pair().unwrap();
            rustix::io::write(&a.0, &bytes).unwrap();
            let result = b.receive::<FromMonitor>();
            prop_assert!(matches!(result, Ok(Some(_)) | Err(SocketError::Malformed(_))));
        }
    }
}
