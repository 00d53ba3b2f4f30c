//! The thread of a NIC: waits for frames of its tap, or for its card's interrupt.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::vm::ThreadHook;

/// What the NIC and its thread share.
struct Shared {
    /// Wakes the thread to look at the flags.
    wake: OwnedFd,
    stop: AtomicBool,
    paused: AtomicBool,
    /// Which source counts.
    active: AtomicUsize,
    /// What others want done in the thread, which may do what its sandbox lets it.
    jobs: Mutex<Vec<Job>>,
}

type Job = Box<dyn FnOnce() + Send>;

/// How long a job may take.
const JOB: Duration = Duration::from_secs(10);

/// What the thread waits for.
pub(super) struct Sources {
    /// Frames of a tap, a card's interrupt: one of them counts.
    pub all: Vec<OwnedFd>,
    /// Which.
    pub active: usize,
    /// The guest's line was lowered.
    pub lowered: Option<OwnedFd>,
    /// The guest has written what it only tells of. Whoever is called takes what is in them.
    pub told: Vec<OwnedFd>,
}

/// What the thread woke for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woken {
    /// The active source is readable.
    Source,
    /// The line was lowered.
    Lowered,
    /// The guest has told of something.
    Told,
    /// The time is over that was asked for.
    Time,
}

/// What the thread does then: it ends, or goes on, with another look after a time where nothing happens.
pub(super) enum Next {
    End,
    Wait(Option<Duration>),
}

/// The running thread; it ends when this is dropped.
pub(super) struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts it. `woken` is called when any of `sources` wakes it.
    pub(super) fn start(
        name: &str,
        sources: Sources,
        on_start: ThreadHook,
        woken: impl Fn(Woken) -> Next + Send + 'static,
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
            run(&its, &sources, woken);
        })?;
        Ok(Self { shared, handle: Some(handle) })
    }

    /// Lets it look at its source, or not. A call of `readable` that has begun goes on: lock what it locks.
    pub(super) fn pause(&self, paused: bool) {
        self.shared.paused.store(paused, Ordering::SeqCst);
        self.wake();
    }

    /// Has something done in the thread. `None` where it has ended, or doesn't answer.
    pub(super) fn call<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        let (answer, result) = sync_channel(1);
        let job: Job = Box::new(move || {
            // Whoever asked may have gone.
            let _ = answer.send(job());
        });
        self.shared.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job);
        self.wake();
        result.recv_timeout(JOB).ok()
    }

    /// Another source counts. What the one before has still to tell is told when that counts again.
    pub(super) fn activate(&self, active: usize) {
        self.shared.active.store(active, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // A counter that is full wakes as well.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(handle) = self.handle.take()
            // The thread itself may hold the last reference for a moment.
            && handle.thread().id() != std::thread::current().id()
            && handle.join().is_err()
        {
            tracing::error!("The thread of a NIC panicked; this is a bug");
        }
    }
}

fn run(shared: &Shared, sources: &Sources, call: impl Fn(Woken) -> Next) {
    let mut again = None;
    loop {
        let active = shared.active.load(Ordering::SeqCst);
        let Some(source) = sources.all.get(active) else { return };
        let paused = shared.paused.load(Ordering::SeqCst);
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        if !paused {
            let others = sources.lowered.iter().chain(&sources.told);
            fds.extend(std::iter::once(source).chain(others).map(|fd| PollFd::new(fd, PollFlags::IN)));
        }
        let timeout = again.filter(|_| !paused).and_then(|again: Duration| Timespec::try_from(again).ok());
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
        let came = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        let mut others = rest.iter().skip(1);
        let was_lowered = sources.lowered.as_ref().filter(|_| others.next().is_some_and(came));
        let was_told = others.any(came);
        if woken {
            let mut count = [0; 8];
            // Whatever was counted.
            let _ = rustix::io::read(shared.wake.as_fd(), &mut count);
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
            let mut count = [0; 8];
            // Whatever was counted.
            let _ = rustix::io::read(lowered, &mut count);
            what.push(Woken::Lowered);
        }
        if ready.contains(PollFlags::IN) {
            what.push(Woken::Source);
        }
        if was_told {
            what.push(Woken::Told);
        }
        if nothing {
            what.push(Woken::Time);
        }
        for what in what {
            match call(what) {
                Next::End => return,
                Next::Wait(next) => again = next,
            }
        }
        if ready.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            tracing::warn!("What is behind a NIC has gone; the NIC receives nothing any more");
            return;
        }
    }
}
