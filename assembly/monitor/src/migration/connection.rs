//! A stream's socket: reads and writes that end when the migration is stopped, or when nothing moves for too long.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

/// How often a waiting stream looks whether it shall stop.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Says to all streams of a migration that it is over. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends all waiting.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was said.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// One connected stream socket of any family.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    stop: Stop,
    patience: Duration,
}

impl Connection {
    /// Over a connected stream socket; it may block or not. An operation fails when nothing moves for `patience`.
    pub fn new(fd: OwnedFd, stop: Stop, patience: Duration) -> Self {
        Self { fd, stop, patience }
    }

    /// Waits this long from now on.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Listens to another stop from now on.
    pub fn set_stop(&mut self, stop: Stop) {
        self.stop = stop;
    }

    /// The socket.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn wait(&self, events: PollFlags, since: Instant) -> io::Result<()> {
        if self.stop.is_set() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the migration was stopped"));
        }
        if since.elapsed() >= self.patience {
            let text = format!("nothing moved for {} s", self.patience.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        match poll(&mut [PollFd::from_borrowed_fd(self.fd.as_fd(), events)], Some(&LOOK_EVERY)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            match rustix::net::recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                Ok((_, read)) => return Ok(read),
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::IN, since)?,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Write for Connection {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let since = Instant::now();
        loop {
            // A stop must also end a stream that always has room.
            if self.stop.is_set() {
                self.wait(PollFlags::OUT, since)?;
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// Silence ends in an error, and so does a stop, whatever a stream is doing.
    #[test]
    fn waiting_ends_by_patience_or_by_a_stop() {
        let (a, _b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let stop = Stop::default();
        let mut connection = Connection::new(a, stop.clone(), Duration::from_millis(60));
        let error = connection.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        connection.set_patience(Duration::from_secs(600));
        stop.set();
        assert_eq!(connection.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(connection.write(&[0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
