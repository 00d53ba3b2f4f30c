//! The thread of a NIC: waits for frames of its tap, or for its card's interrupt.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::vm::ThreadHook;

/// State shared by the NIC and its thread.
struct Shared {
    /// Wakes the thread to check the flags.
    wake: OwnedFd,
    stop: AtomicBool,
    paused: AtomicBool,
    /// Index of the active source.
    active: AtomicUsize,
    /// Jobs to run on the thread, whose sandbox permits access to cards.
    jobs: Mutex<Vec<Job>>,
}

type Job = Box<dyn FnOnce() + Send>;

/// Timeout of a job.
const JOB_TIMEOUT: Duration = Duration::from_secs(10);

/// Descriptors that the thread waits for.
pub(super) struct Sources {
    /// Frames of a tap, a card's interrupt. One is active.
    pub all: Vec<OwnedFd>,
    /// Index of the active source.
    pub active: usize,
    /// The guest's line was lowered.
    pub lowered: Option<OwnedFd>,
    /// Eventfds of signaled writes. The callback empties them.
    pub signaled: Vec<OwnedFd>,
}

/// Why the thread woke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeCause {
    /// The active source is readable.
    Source,
    /// The line was lowered.
    Lowered,
    /// The guest has signaled a write.
    Signaled,
    /// The requested interval has passed.
    Time,
}

/// What the thread does next: ends, or waits, at most for the given interval.
pub(super) enum Next {
    End,
    Wait(Option<Duration>),
}

/// The NIC's thread. Dropping it ends the thread.
pub(super) struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts the thread. It calls `woken` for each wakeup by `sources`.
    pub(super) fn start(
        name: &str,
        sources: Sources,
        on_start: ThreadHook,
        on_wake: impl Fn(WakeCause) -> Next + Send + 'static,
    ) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            wake,
            stop: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            active: AtomicUsize::new(sources.active),
            jobs: Mutex::default(),
        });
        let its = Arc::clone(&shared);
        // Linux shows 15 bytes.
        let name = name.chars().take(15).collect();
        let handle = std::thread::Builder::new().name(name).spawn(move || {
            on_start();
            run(&its, &sources, on_wake);
        })?;
        Ok(Self { shared, handle: Some(handle) })
    }

    /// Makes the thread ignore its source, or not. A call of `woken` in progress continues, so callers must also take its locks.
    pub(super) fn pause(&self, paused: bool) {
        self.shared.paused.store(paused, Ordering::SeqCst);
        self.wake();
    }

    /// Runs `job` on the thread and waits for its result, up to [`JOB_TIMEOUT`]. `None` if the thread has ended or doesn't respond.
    pub(super) fn call<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        let (answer, result) = sync_channel(1);
        let job: Job = Box::new(move || {
            // The caller may have timed out.
            let _ = answer.send(job());
        });
        self.shared.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job);
        self.wake();
        result.recv_timeout(JOB_TIMEOUT).ok()
    }

    /// Activates another source. Events of the previous one stay pending until it is active again.
    pub(super) fn activate(&self, active: usize) {
        self.shared.active.store(active, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // A full counter wakes the thread as well.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(handle) = self.handle.take()
            // The thread itself may briefly hold the last reference.
            && handle.thread().id() != std::thread::current().id()
            && handle.join().is_err()
        {
            tracing::error!("The thread of a NIC panicked; this is a bug");
        }
    }
}

/// Resets an eventfd. Its count doesn't matter.
fn clear(eventfd: &OwnedFd) {
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

fn run(shared: &Shared, sources: &Sources, call: impl Fn(WakeCause) -> Next) {
    let mut interval = None;
    loop {
        let active = shared.active.load(Ordering::SeqCst);
        let Some(source) = sources.all.get(active) else { return };
        let paused = shared.paused.load(Ordering::SeqCst);
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        if !paused {
            let others = sources.lowered.iter().chain(&sources.signaled);
            fds.extend(std::iter::once(source).chain(others).map(|fd| PollFd::new(fd, PollFlags::IN)));
        }
        let timeout =
            interval.filter(|_| !paused).and_then(|interval: Duration| Timespec::try_from(interval).ok());
        let mut nothing = false;
        match poll(&mut fds, timeout.as_ref()) {
            Ok(ready) => nothing = ready == 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "The thread of a NIC can't wait; it ends");
                return;
            }
        }
        let (woken, rest) = fds.split_at(1);
        let (woken, ready) =
            (!woken[0].revents().is_empty(), rest.first().map_or(PollFlags::empty(), PollFd::revents));
        let is_readable = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        let mut others = rest.iter().skip(1);
        let was_lowered = sources.lowered.as_ref().filter(|_| others.next().is_some_and(is_readable));
        let was_signaled = others.any(is_readable);
        if woken {
            clear(&shared.wake);
        }
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let jobs = std::mem::take(&mut *shared.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        for job in jobs {
            job();
        }
        if shared.active.load(Ordering::SeqCst) != active || shared.paused.load(Ordering::SeqCst) {
            continue;
        }
        let mut what = Vec::new();
        if let Some(lowered) = was_lowered {
            clear(lowered);
            what.push(WakeCause::Lowered);
        }
        if ready.contains(PollFlags::IN) {
            what.push(WakeCause::Source);
        }
        if was_signaled {
            what.push(WakeCause::Signaled);
        }
        if nothing {
            what.push(WakeCause::Time);
        }
        for what in what {
            match call(what) {
                Next::End => return,
                Next::Wait(next) => interval = next,
            }
        }
        if ready.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            tracing::warn!("The backend of a NIC has ended; the NIC receives nothing any more");
            return;
        }
    }
}
