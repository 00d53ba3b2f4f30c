//! Eventfds that a server signals.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pci::interrupt::MsiVector;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Creates an eventfd.
pub(super) fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Whether an eventfd was signaled and not read since.
pub(super) fn is_signalled(event: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().contains(PollFlags::IN)
}

/// Consumes a signal. Returns `false` if there is none. Doesn't block on a blocking eventfd, unless another thread reads it.
pub(super) fn take(event: BorrowedFd<'_>) -> bool {
    is_signalled(event) && rustix::io::read(event, &mut [0; 8]).is_ok()
}

/// The eventfd of one MSI-X vector: KVM's, or, if interrupts aren't delivered by eventfd, one that the watcher reads.
pub(super) struct VectorEvent {
    vector: Arc<dyn MsiVector>,
    own: Option<OwnedFd>,
}

impl VectorEvent {
    pub(super) fn new(vector: Arc<dyn MsiVector>) -> io::Result<Self> {
        let own = if vector.eventfd().is_some() { None } else { Some(new_event()?) };
        Ok(Self { vector, own })
    }

    /// The eventfd for the server to signal.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.own.as_ref().map(AsFd::as_fd).or_else(|| self.vector.eventfd())
    }

    /// The eventfd that the watcher must read, if any.
    pub(super) fn watched(&self) -> Option<BorrowedFd<'_>> {
        self.own.as_ref().map(AsFd::as_fd)
    }

    /// Whether a signal is pending: while the vector is masked, KVM's eventfd isn't read.
    pub(super) fn is_pending(&self) -> bool {
        self.fd().is_some_and(is_signalled)
    }

    /// Discards a signal, while the vector is masked.
    pub(super) fn forget(&self) {
        if let Some(fd) = self.fd() {
            take(fd);
        }
    }
}
