//! A stream's socket: reads and writes end when the migration is stopped, or when no byte moves for too long.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use cluster_key::stream::{Opening, Sealing};

/// Interval at which a waiting stream checks whether it is to stop.
const STOP_POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Signals all streams of a migration that it is over. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    over: AtomicBool,
    /// The reason, unless a user stopped it.
    reason: OnceLock<String>,
}

impl Stop {
    /// Ends all waits.
    pub fn set(&self) {
        self.0.over.store(true, Ordering::Release);
    }

    /// As [`Stop::set`], for a reason other than the user's request. Only the first reason is kept.
    pub fn abort(&self, reason: String) {
        if !self.is_set() {
            let _ = self.0.reason.set(reason);
        }
        self.set();
    }

    /// The reason, unless a user stopped it.
    pub fn reason(&self) -> Option<&str> {
        self.0.reason.get().map(String::as_str)
    }

    /// Whether the migration is over.
    pub fn is_set(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }
}

/// One connected stream socket of any family, encrypted if both sides use a key.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    crypt: Crypt,
}

#[derive(Debug)]
enum Crypt {
    Plain,
    /// Another connection may send instead ([`Connection::sender`]).
    Sealed(Option<Box<Sealing>>, Box<Opening>),
    /// Sends only.
    SendOnly(Box<Sealing>),
}

/// The socket itself.
#[derive(Debug)]
struct Socket {
    fd: OwnedFd,
    stop: Stop,
    timeout: Duration,
}

impl Connection {
    /// Uses a connected stream socket, blocking or not. An operation fails when no byte moves for `timeout`.
    pub fn new(fd: OwnedFd, stop: Stop, timeout: Duration) -> Self {
        Self { socket: Socket { fd, stop, timeout }, crypt: Crypt::Plain }
    }

    /// Encrypts both directions from here on.
    pub(super) fn encrypt(&mut self, sealing: Sealing, opening: Opening) {
        self.crypt = Crypt::Sealed(Some(Box::new(sealing)), Box::new(opening));
    }

    /// Creates a connection for the same socket, which sends from here on; this one then only receives.
    ///
    /// # Errors
    /// When no descriptor is left, or this connection doesn't send.
    pub fn sender(&mut self, stop: Stop, timeout: Duration) -> io::Result<Self> {
        let fd = rustix::io::fcntl_dupfd_cloexec(self.socket.fd.as_fd(), 0)?;
        let crypt = match &mut self.crypt {
            Crypt::Plain => Crypt::Plain,
            Crypt::Sealed(sealing, _) => match sealing.take() {
                Some(sealing) => Crypt::SendOnly(sealing),
                None => return Err(io::Error::other("another connection sends already")),
            },
            Crypt::SendOnly(_) => return Err(io::Error::other("it receives nothing")),
        };
        Ok(Self { socket: Socket { fd, stop, timeout }, crypt })
    }

    /// Waits for N bytes, and returns whether they are equal to `bytes`. Leaves them in the socket's buffer.
    pub(super) fn begins_with<const N: usize>(&mut self, bytes: [u8; N]) -> io::Result<bool> {
        let since = Instant::now();
        let mut first = [0; N];
        loop {
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::net::recv(&self.socket.fd, &mut first, flags) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // Fewer bytes are enough to see a difference.
                Ok((_, read)) if read == N || first.get(..read) != bytes.get(..read) => {
                    return Ok(first == bytes);
                }
                Ok(_) => {
                    std::thread::sleep(Duration::from_millis(1));
                    self.socket.check(since)?;
                }
                Err(Errno::AGAIN | Errno::INTR) => self.socket.wait(PollFlags::IN, since)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sets the time-out for waits that begin from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.socket.timeout = timeout;
    }

    /// Replaces the stop signal from now on.
    pub fn set_stop(&mut self, stop: Stop) {
        self.socket.stop = stop;
    }
}

impl Socket {
    fn check_stop(&self) -> io::Result<()> {
        if self.stop.is_set() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the migration was stopped"));
        }
        Ok(())
    }

    /// Fails if the migration was stopped or the time-out has passed.
    fn check(&self, since: Instant) -> io::Result<()> {
        self.check_stop()?;
        if since.elapsed() >= self.timeout {
            let text = format!("nothing moved for {} s", self.timeout.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        Ok(())
    }

    fn wait(&self, events: PollFlags, since: Instant) -> io::Result<()> {
        self.check(since)?;
        match poll(&mut [PollFd::from_borrowed_fd(self.fd.as_fd(), events)], Some(&STOP_POLL_INTERVAL)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            // A stop must also end a stream whose peer never pauses.
            self.check_stop()?;
            match rustix::net::recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                Ok((_, read)) => return Ok(read),
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::IN, since)?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            // A stop must also end a stream that is always writable.
            self.check_stop()?;
            match rustix::net::send(&self.fd, from, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(written) => return Ok(written),
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::OUT, since)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.crypt {
            Crypt::Plain => self.socket.read(into),
            Crypt::Sealed(_, opening) => opening.read(into, &mut self.socket),
            Crypt::SendOnly(_) => Err(io::Error::other("it receives nothing")),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.crypt {
            Crypt::Plain => self.socket.write(from),
            Crypt::Sealed(Some(sealing), _) | Crypt::SendOnly(sealing) => {
                sealing.write(from, &mut self.socket)
            }
            Crypt::Sealed(None, _) => Err(io::Error::other("another connection sends")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// A silent peer ends a wait with an error, and so does a stop, whatever the stream is doing.
    #[test]
    fn waiting_ends_by_timeout_or_by_a_stop() {
        let (a, _b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let stop = Stop::default();
        let mut connection = Connection::new(a, stop.clone(), Duration::from_millis(60));
        let error = connection.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        connection.set_timeout(Duration::from_secs(600));
        stop.set();
        assert_eq!(connection.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(connection.write(&[0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }

    /// A peer whose bytes never run out can't hold a stopped stream.
    #[test]
    fn a_stop_ends_reads_while_bytes_arrive() {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let stop = Stop::default();
        let mut peer = Connection::new(b, Stop::default(), Duration::from_secs(60));
        let mut connection = Connection::new(a, stop.clone(), Duration::from_secs(60));
        peer.write_all(&[1; 64]).unwrap();
        assert_eq!(connection.read(&mut [0]).unwrap(), 1);
        stop.set();
        assert_eq!(connection.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
