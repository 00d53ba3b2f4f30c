//! A client's eventfds, and signalling them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::device::SetInterrupts;

use super::descriptors::{BadDescriptor, Expected, accept};
use super::eventfd_signals::EventfdSignals;

/// A client's eventfd, and the mechanism that signals it: a client may make it blocking and fill its counter.
#[derive(Debug)]
struct Connected {
    fd: OwnedFd,
    signals: &'static EventfdSignals,
}

impl Connected {
    fn new(fd: OwnedFd) -> Result<Self, NotConnected> {
        Ok(Self {
            fd: accept(fd, Expected::EventFd, "an interrupt")?,
            signals: EventfdSignals::of_this_process().map_err(NotConnected::Signals)?,
        })
    }
}

/// Why a client's eventfd isn't used.
#[derive(Debug, thiserror::Error)]
enum NotConnected {
    #[error(transparent)]
    Descriptor(#[from] BadDescriptor),
    #[error(
        "Eventfds can't be signalled without Linux's asynchronous I/O; raise /proc/sys/fs/aio-max-nr, or use a kernel with CONFIG_AIO"
    )]
    Signals(#[source] io::Error),
}

/// The eventfds of one kind of interrupts. Thread-safe; signalling neither blocks nor fails.
#[derive(Debug)]
pub struct EventFds {
    fds: Mutex<Vec<Option<Connected>>>,
    raised: AtomicU64,
    missed: AtomicU64,
    log: GuestLog,
}

impl EventFds {
    /// `count` interrupts, none of them connected.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self {
            fds: Mutex::new((0..count).map(|_| None).collect()),
            raised: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            log: GuestLog::new(),
        }
    }

    fn fds(&self) -> MutexGuard<'_, Vec<Option<Connected>>> {
        self.fds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of interrupts.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.fds().len()).unwrap_or(u32::MAX)
    }

    /// Executes a client's request.
    ///
    /// # Errors
    /// When an interrupt doesn't exist, a descriptor isn't an eventfd, or the request is to mask, which isn't offered.
    pub fn change(&self, start: u32, change: SetInterrupts) -> io::Result<()> {
        let start = usize::try_from(start).map_err(|_| Errno::INVAL)?;
        match change {
            SetInterrupts::Eventfds(new) => {
                let new: Result<Vec<_>, _> =
                    new.into_iter().map(|fd| fd.map(Connected::new).transpose()).collect();
                let new = new.map_err(|error| {
                    telemetry::guest_warn!(
                        self.log,
                        error = &error as &dyn std::error::Error,
                        "A client's interrupts can't be connected"
                    );
                    io::Error::from(Errno::INVAL)
                })?;
                let mut fds = self.fds();
                let end = start.checked_add(new.len()).ok_or(Errno::INVAL)?;
                let places = fds.get_mut(start..end).ok_or(Errno::INVAL)?;
                for (place, fd) in places.iter_mut().zip(new) {
                    *place = fd;
                }
            }
            SetInterrupts::Disable => self.disconnect(),
            SetInterrupts::Trigger(which) => {
                for (number, _) in (start..).zip(which).filter(|(_, wanted)| *wanted) {
                    self.raise(number);
                }
            }
            SetInterrupts::Mask(_) | SetInterrupts::Unmask(_) => return Err(Errno::NOTSUP.into()),
        }
        Ok(())
    }

    /// Disconnects all eventfds.
    pub fn disconnect(&self) {
        self.fds().fill_with(|| None);
    }

    /// Whether an interrupt has a listener.
    #[must_use]
    pub fn is_connected(&self, number: usize) -> bool {
        matches!(self.fds().get(number), Some(Some(_)))
    }

    /// Signals an interrupt; one without a listener is counted and dropped.
    pub fn raise(&self, number: usize) {
        let fds = self.fds();
        let Some(Some(connected)) = fds.get(number) else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        match connected.signals.signal(connected.fd.as_fd()) {
            Ok(()) => {
                self.raised.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                telemetry::guest_warn!(self.log, %error, "A client's interrupt can't be signalled");
            }
        }
    }

    /// Number of interrupts sent, and of interrupts without a listener.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.raised.load(Ordering::Relaxed), self.missed.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::EventFds;
    use rustix::event::{EventfdFlags, eventfd};
    use vfio_user_protocol::device::SetInterrupts;

    fn count(fd: &std::os::fd::OwnedFd) -> u64 {
        let mut value = [0; 8];
        rustix::io::read(fd, &mut value).map_or(0, |_| u64::from_ne_bytes(value))
    }

    #[test]
    fn raising_signals_the_right_eventfd_and_nobody_waits_for_a_full_one() {
        let fds = EventFds::new(3);
        let ours = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        fds.change(1, SetInterrupts::Eventfds(vec![Some(ours.try_clone().unwrap()), None])).unwrap();
        fds.raise(0);
        fds.raise(1);
        fds.raise(7);
        assert_eq!((count(&ours), fds.counts()), (1, (1, 2)));
        rustix::io::write(&ours, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // The client makes it blocking again. If that mattered, the test would hang.
        let flags = rustix::fs::fcntl_getfl(&ours).unwrap();
        rustix::fs::fcntl_setfl(&ours, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        fds.raise(1);
        fds.change(0, SetInterrupts::Disable).unwrap();
        assert!(!fds.is_connected(1));
    }

    #[test]
    fn what_is_no_eventfd_or_no_interrupt_is_refused() {
        let fds = EventFds::new(1);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(fds.change(0, SetInterrupts::Eventfds(vec![Some(pipe)])).is_err());
        let event = || Some(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        assert!(fds.change(1, SetInterrupts::Eventfds(vec![event()])).is_err());
        assert!(fds.change(0, SetInterrupts::Eventfds(vec![event(), event()])).is_err());
        assert!(fds.change(0, SetInterrupts::Mask(vec![true])).is_err());
        assert!(!fds.is_connected(0));
    }
}
