//! Signals eventfds that a client shares, without ever blocking.
//!
//! A write to an eventfd blocks while its counter is full, unless the open file is non-blocking. The client can fill the counter and change
//! the file's flags at any time, and a write has no flag against blocking. But the kernel itself never blocks when it signals an eventfd:
//! it adds one, or leaves a full counter full. It signals an eventfd at the end of an asynchronous operation that names one
//! (`IOCB_FLAG_RESFD`). So this module submits a read of nothing, which ends at once.
//!
//! Sources: io_submit(2), Linux `fs/aio.c` (`aio_complete`), `fs/eventfd.c` (`eventfd_signal`).
#![allow(unsafe_code)] // Linux's asynchronous I/O has no safe wrapper.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};

/// Number of signals that may be sent before their results, which have no content, are consumed.
const RESULTS: usize = 128;
/// Limit of submissions of one signal while the context is full of results. Each attempt consumes all results first, so the second succeeds
/// unless other threads fill the context meanwhile.
const MAX_SUBMISSIONS: u32 = 1_000;
/// `IOCB_CMD_PREAD`: a positioned read.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`: the operation names an eventfd that its end signals.
const NAMES_AN_EVENTFD: u32 = 1;

/// `struct iocb`, on a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct Operation {
    data: u64,
    key: u32,
    flags_of_file: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    data: u64,
    operation: u64,
    result: i64,
    result2: i64,
}

/// A context of asynchronous I/O, used by all threads of the process.
#[derive(Debug)]
pub(super) struct EventfdSignals {
    context: libc::c_ulong,
    /// The file that is read: an empty file in memory.
    empty: OwnedFd,
}

impl EventfdSignals {
    /// The process's context, created when the first client's eventfd arrives.
    ///
    /// # Errors
    /// When the kernel has no asynchronous I/O, or no context is left (`/proc/sys/fs/aio-max-nr`).
    pub(super) fn of_this_process() -> io::Result<&'static Self> {
        static SHARED: OnceLock<EventfdSignals> = OnceLock::new();
        match SHARED.get() {
            Some(signals) => Ok(signals),
            // If two threads create one, the second is dropped.
            None => {
                let signals = Self::new()?;
                Ok(SHARED.get_or_init(|| signals))
            }
        }
    }

    fn new() -> io::Result<Self> {
        let empty = memfd_create("causeway:empty", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's number to `context`, which has to be zero.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, RESULTS, &raw mut context) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { context, empty }) }
    }

    /// Adds one to an eventfd; a full counter stays full. Doesn't block.
    ///
    /// # Errors
    /// When it isn't an eventfd, or there was no room in [`MAX_SUBMISSIONS`] submissions.
    pub(super) fn signal(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let number = |fd: i32| u32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let operation = Operation {
            opcode: READ,
            fd: number(self.empty.as_raw_fd())?,
            flags: NAMES_AN_EVENTFD,
            eventfd: number(fd.as_raw_fd())?,
            ..Operation::default()
        };
        let operations = [&raw const operation];
        for _ in 0..MAX_SUBMISSIONS {
            // SAFETY: the kernel reads one pointer and the operation that it points to, and copies both. The operation reads no bytes,
            // so no buffer is written.
            let result =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1_usize, operations.as_ptr()) };
            if result == 1 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // The context is full of results.
                Some(libc::EAGAIN) => self.take_results()?,
                Some(libc::EINTR) => {}
                _ => return Err(error),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Makes room by consuming results. Every operation ends when it is submitted. So a full context has results, unless another thread has
    /// just consumed them.
    fn take_results(&self) -> io::Result<()> {
        let mut results = [Completion::default(); RESULTS];
        let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many results as fit, and reads a time-out of zero, with which it doesn't wait.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0_usize,
                RESULTS,
                results.as_mut_ptr(),
                &raw const no_time,
            )
        };
        if taken < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for EventfdSignals {
    fn drop(&mut self) {
        // SAFETY: no thread uses the context any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn count(fd: &OwnedFd) -> u64 {
        let mut value = [0; 8];
        rustix::io::read(fd, &mut value).unwrap();
        u64::from_ne_bytes(value)
    }

    #[test]
    fn signals_of_several_threads_are_counted_and_none_is_lost() {
        let signals = EventfdSignals::of_this_process().unwrap();
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1_000).for_each(|_| signals.signal(fd.as_fd()).unwrap()));
            }
        });
        assert_eq!(count(&fd), 4_000);
    }

    #[test]
    fn a_full_counter_of_a_blocking_eventfd_stops_nobody() {
        let signals = EventfdSignals::of_this_process().unwrap();
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // If it blocked, the test would hang.
        (0..1_000).for_each(|_| signals.signal(fd.as_fd()).unwrap());
        assert!(count(&fd) >= u64::MAX - 1);
        signals.signal(fd.as_fd()).unwrap();
        assert_eq!(count(&fd), 1);
    }

    #[test]
    fn what_is_no_eventfd_is_an_error() {
        let signals = EventfdSignals::of_this_process().unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(signals.signal(pipe.as_fd()).is_err());
    }
}
