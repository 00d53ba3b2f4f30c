//! A device's own thread: polls eventfds, serves queues, and never ends the process by a panic.
//!
//! ```text
//! spawn ── state moves into the thread ── body(&mut state, &poller) until the stop event
//!   body returns Err(reason) or panics: interrupt.failed(reason), the thread ends
//! stop  ── signals, joins, returns the state, whatever happened
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use telemetry::containment::{self, contain};

use crate::device::VirtioInterrupt;

/// System calls of every worker thread (polling and its own end); a device adds those of its body.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_ctl,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    // The standard library checks descriptors before it closes them, in debug builds.
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_gettid,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_exit,
    libc::SYS_restart_syscall,
    // A driver without MSI-X gets interrupts by a wire, which KVM asserts by KVM_IRQ_LINE.
    libc::SYS_ioctl,
];

/// System calls of a thread that starts and stops workers: the thread that handles the driver's DRIVER_OK and reset (a vCPU thread), and
/// the API thread for a pause.
pub const SPAWN_SYSCALLS: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_eventfd2,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_rt_sigprocmask,
    libc::SYS_futex,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_fcntl,
];

const STOP: u64 = u64::MAX;

/// A new eventfd for notifications: non-blocking, closed on exec.
pub fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Signals an eventfd. A full counter (EAGAIN) means that it is signalled already.
pub fn signal(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Consumes an eventfd's signals; returns whether there were any.
pub fn take(event: impl AsFd) -> bool {
    rustix::io::read(event, &mut [0u8; 8]).is_ok()
}

/// Events to poll for on a file descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Data to read, or a signalled eventfd.
    pub readable: bool,
    /// Room to write.
    pub writable: bool,
}

impl Interest {
    /// Readable only.
    pub const READ: Self = Self { readable: true, writable: false };
    /// Writable only.
    pub const WRITE: Self = Self { readable: false, writable: true };
    /// Readable and writable.
    pub const BOTH: Self = Self { readable: true, writable: true };
    /// Neither: only errors and hang-ups are reported.
    pub const NONE: Self = Self { readable: false, writable: false };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, self.readable);
        flags.set(epoll::EventFlags::OUT, self.writable);
        flags
    }
}

/// An event on a file descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Token from [`Poller::add`].
    pub token: u64,
    /// Data to read, or a signalled eventfd.
    pub readable: bool,
    /// Room to write.
    pub writable: bool,
    /// Error or hang-up.
    pub closed: bool,
}

/// Result of [`Poller::wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There are events (none after the timeout).
    Events,
    /// The device is being stopped: complete requests in flight and return.
    Stop,
}

/// The request to stop: a flag, and an event that wakes the thread.
struct Stop {
    asked: AtomicBool,
    event: OwnedFd,
}

impl Stop {
    fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        signal(&self.event);
    }
}

/// Polls several file descriptors and the stop event (level-triggered epoll).
pub struct Poller {
    epoll: OwnedFd,
    stop: Arc<Stop>,
}

impl Poller {
    fn new(stop: Arc<Stop>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &stop.event, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        Ok(Self { epoll, stop })
    }

    /// Adds a file descriptor. [`Ready`] contains `token`; `u64::MAX` is reserved.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        debug_assert_ne!(token, STOP, "this token is the stop event's");
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())?)
    }

    /// Changes the polled events.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())?)
    }

    /// Removes a file descriptor (before it is closed).
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Waits for events or until `timeout` expires; replaces the contents of `ready`.
    /// Returns [`Wake::Stop`] every time after the thread was stopped.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<Wake> {
        ready.clear();
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut buffer: [std::mem::MaybeUninit<epoll::Event>; 32] = [std::mem::MaybeUninit::uninit(); 32];
        let events = match epoll::wait(&self.epoll, &mut buffer, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(Wake::Events),
            Err(error) => return Err(error.into()),
        };
        let mut wake = Wake::Events;
        for event in events {
            let (flags, token) = (event.flags, event.data.u64());
            if token == STOP {
                wake = Wake::Stop;
                continue;
            }
            ready.push(Ready {
                token,
                readable: flags.contains(epoll::EventFlags::IN),
                writable: flags.contains(epoll::EventFlags::OUT),
                closed: flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP),
            });
        }
        Ok(wake)
    }

    /// Whether the thread is being stopped. Doesn't wait and needs no system call: for loops that a guest can keep busy.
    pub fn stopping(&self) -> bool {
        self.stop.asked.load(Ordering::Acquire)
    }
}

/// A running thread that owns the state `S`.
pub struct Worker<S> {
    name: String,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<S>>,
}

impl<S: Send + 'static> Worker<S> {
    /// Starts a thread called `name` (the kernel shows its first 15 bytes). `body` returns after [`Wake::Stop`] from [`Poller::wait`], or
    /// earlier with the reason why the device has failed.
    pub fn spawn<F>(name: &str, interrupt: Arc<dyn VirtioInterrupt>, state: S, body: F) -> io::Result<Self>
    where
        F: FnOnce(&mut S, &Poller) -> Result<(), String> + Send + 'static,
    {
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), event: new_event()? });
        let poller = Poller::new(Arc::clone(&stop))?;
        let thread_name: String = name.chars().filter(|c| *c != '\0').collect();
        let thread = std::thread::Builder::new().name(thread_name).spawn(move || {
            let mut state = state;
            let outcome = contain(|| body(&mut state, &poller));
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => interrupt.failed(&reason),
                Err(panic) => {
                    interrupt.failed(&format!("its thread panicked ({panic}); this is a bug"));
                }
            }
            state
        })?;
        Ok(Self { name: name.to_owned(), stop, thread: Some(thread) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stops the thread and waits for its end. Returns its state, even if the device had failed. `None` only if the thread panicked while
    /// it reported a failure.
    pub fn stop(mut self) -> Option<S> {
        self.join()
    }

    fn join(&mut self) -> Option<S> {
        let thread = self.thread.take()?;
        self.stop.ask();
        match thread.join() {
            Ok(state) => Some(state),
            Err(panic) => {
                tracing::error!("Worker {} panicked at its end: {}", self.name, containment::text(&*panic));
                None
            }
        }
    }
}

impl<S> Drop for Worker<S> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.ask();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_devices_testbed::MockInterrupt;

    fn interrupt() -> (Arc<MockInterrupt>, Arc<dyn VirtioInterrupt>) {
        let mock = MockInterrupt::new();
        (Arc::clone(&mock), mock)
    }

    #[test]
    fn a_panic_fails_the_device_and_the_state_comes_back() {
        let (mock, interrupt) = interrupt();
        let worker = Worker::spawn("test", interrupt, vec![1], |state: &mut Vec<i32>, _| {
            assert!(containment::is_contained(), "the program's panic hook would end the process");
            state.push(2);
            panic!("on purpose");
        })
        .unwrap();
        let reason = mock.wait_failure().unwrap();
        assert!(reason.contains("on purpose"), "{reason}");
        assert_eq!(worker.stop(), Some(vec![1, 2]));
    }

    #[test]
    fn an_error_fails_the_device_with_its_text() {
        let (mock, interrupt) = interrupt();
        let worker =
            Worker::spawn("test", interrupt, (), |(), _| Err("the ring is broken".to_owned())).unwrap();
        assert_eq!(mock.wait_failure().as_deref(), Some("the ring is broken"));
        assert_eq!(worker.stop(), Some(()));
    }

    #[test]
    fn a_stop_wakes_a_sleeping_thread_and_is_no_failure() {
        let (mock, interrupt) = interrupt();
        let worker = Worker::spawn("test", interrupt, 0, |wakes: &mut i32, poller| {
            let mut ready = Vec::new();
            while poller.wait(&mut ready, None).map_err(|error| error.to_string())? != Wake::Stop {
                *wakes += 1;
            }
            assert!(poller.stopping());
            Ok(())
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(worker.stop(), Some(0));
        assert_eq!(mock.failure(), None);
    }

    #[test]
    fn events_come_with_their_tokens_and_time_runs_out_without_any() {
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), event: new_event().unwrap() });
        let poller = Poller::new(stop).unwrap();
        let (first, second) = (new_event().unwrap(), new_event().unwrap());
        poller.add(&first, 7, Interest::READ).unwrap();
        poller.add(&second, 8, Interest::NONE).unwrap();
        let mut ready = Vec::new();
        poller.wait(&mut ready, Some(Duration::from_millis(1))).unwrap();
        assert!(ready.is_empty());
        signal(&first);
        signal(&second);
        poller.wait(&mut ready, None).unwrap();
        assert_eq!(ready.iter().map(|event| event.token).collect::<Vec<_>>(), [7]);
        assert!(take(&first) && !take(&first));
        poller.modify(&second, 8, Interest::READ).unwrap();
        poller.wait(&mut ready, None).unwrap();
        assert_eq!(ready.iter().map(|event| event.token).collect::<Vec<_>>(), [8]);
        poller.remove(&second).unwrap();
        poller.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert!(ready.is_empty());
    }
}
