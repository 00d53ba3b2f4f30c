//! Whole messages with descriptors over a stream socket. Each wait ends with a deadline, a stop signal or the end of
//! the connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{HEADER, Header, MAX_FDS, MAX_MESSAGE};

/// Conditions that end a wait early.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wait<'a> {
    /// Becomes readable to end the wait.
    pub stop: Option<BorrowedFd<'a>>,
    /// Deadline of the wait.
    pub deadline: Option<Instant>,
}

/// A message can't be sent or received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("The vfio-user connection broke")]
    Io(#[source] io::Error),
    #[error("The vfio-user peer closed the connection")]
    Closed,
    #[error("The vfio-user peer closed the connection within a message")]
    Cut,
    #[error(
        "A vfio-user message says it has {size} bytes; at least {HEADER} and at most {limit} are possible"
    )]
    Size { size: u32, limit: usize },
    #[error("The vfio-user peer didn't answer in time")]
    TimedOut,
    #[error("Stopped")]
    Stopped,
}

impl From<Errno> for SocketError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            error => Self::Io(error.into()),
        }
    }
}

/// A received message.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// The message had more descriptors than the limit; the excess ones are closed.
    pub too_many_fds: bool,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket(UnixStream);

impl Socket {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.0
    }

    /// Closes the connection in both directions, which wakes all waiting threads.
    pub(crate) fn shutdown(&self) {
        // Fails only if the peer has already closed.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }

    /// Waits until the socket is ready for `flags` (or broken).
    fn wait(&self, flags: PollFlags, wait: &Wait<'_>) -> Result<(), SocketError> {
        loop {
            let timeout = match wait.deadline {
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(SocketError::TimedOut);
                    }
                    Some(Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 }))
                }
                None => None,
            };
            let stop = wait.stop.unwrap_or_else(|| self.0.as_fd());
            let stop_flags = if wait.stop.is_some() { PollFlags::IN } else { PollFlags::empty() };
            let mut fds =
                [PollFd::from_borrowed_fd(self.0.as_fd(), flags), PollFd::from_borrowed_fd(stop, stop_flags)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if wait.stop.is_some() && !fds[1].revents().is_empty() {
                return Err(SocketError::Stopped);
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
        }
    }

    /// Sends one message, whose parts are concatenated.
    pub(crate) fn send(
        &self,
        header: &Header,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        wait: &Wait<'_>,
    ) -> Result<(), SocketError> {
        let mut slices = Vec::with_capacity(1 + parts.len());
        slices.push(IoSlice::new(header.as_bytes()));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        let mut rest: &mut [IoSlice<'_>] = &mut slices;
        let mut fds = fds;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        while !rest.is_empty() {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(SocketError::Io(io::ErrorKind::InvalidInput.into()));
            }
            match sendmsg(&self.0, rest, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => {
                    // Descriptors travel with the first byte.
                    fds = &[];
                    IoSlice::advance_slices(&mut rest, sent);
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, wait)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Fills `data`, and adds descriptors that accompany it to `fds`.
    fn fill(
        &self,
        data: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        too_many_fds: &mut bool,
        wait: &Wait<'_>,
    ) -> Result<(), SocketError> {
        let mut done = 0;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        while done < data.len() {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut data[done..])],
                &mut control,
                RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
            );
            let received = match received {
                Ok(received) => received,
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, wait)?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    for fd in rights {
                        if fds.len() < MAX_FDS {
                            fds.push(fd);
                        } else {
                            *too_many_fds = true;
                        }
                    }
                }
            }
            *too_many_fds |= received.flags.contains(ReturnFlags::CTRUNC);
            if received.bytes == 0 {
                return Err(if done == 0 { SocketError::Closed } else { SocketError::Cut });
            }
            done += received.bytes;
        }
        Ok(())
    }

    /// Receives one message of at most `limit` bytes. After [`SocketError::Size`] the stream is unusable.
    pub(crate) fn receive(&self, limit: usize, wait: &Wait<'_>) -> Result<Message, SocketError> {
        let limit = limit.min(MAX_MESSAGE);
        // Wait first: a peer that never pauses must not hide the stop signal, and a reply is rarely there already.
        self.wait(PollFlags::IN, wait)?;
        let mut bytes = [0; HEADER];
        let mut fds = Vec::new();
        let mut too_many_fds = false;
        self.fill(&mut bytes, &mut fds, &mut too_many_fds, wait)?;
        let header = Header::read_from_bytes(&bytes).map_err(|_| SocketError::Cut)?;
        let body = usize::try_from(header.size)
            .ok()
            .filter(|size| *size <= limit)
            .and_then(|size| size.checked_sub(HEADER))
            .ok_or(SocketError::Size { size: header.size, limit })?;
        let mut body = vec![0; body];
        self.fill(&mut body, &mut fds, &mut too_many_fds, wait).map_err(|error| match error {
            SocketError::Closed => SocketError::Cut,
            error => error,
        })?;
        Ok(Message { header, body, fds, too_many_fds })
    }
}
