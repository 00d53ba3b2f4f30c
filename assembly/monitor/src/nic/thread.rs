//! The thread of a NIC: waits for frames of its tap, or for its card's interrupt.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

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
}

/// The running thread; it ends when this is dropped.
pub(super) struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts it. `readable` is called when the active one of `sources` is, or, with `true`, when the line was lowered; false ends the
    /// thread.
    pub(super) fn start(
        name: &str,
        sources: Sources,
        on_start: ThreadHook,
        readable: impl Fn(bool) -> bool + Send + 'static,
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
            run(&its, &sources, readable);
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

fn run(shared: &Shared, sources: &Sources, readable: impl Fn(bool) -> bool) {
    loop {
        let active = shared.active.load(Ordering::SeqCst);
        let Some(source) = sources.all.get(active) else { return };
        let paused = shared.paused.load(Ordering::SeqCst);
        let lowered = sources.lowered.as_ref();
        let mut fds = [
            PollFd::new(&shared.wake, PollFlags::IN),
            PollFd::new(source, PollFlags::IN),
            PollFd::new(lowered.unwrap_or(&shared.wake), PollFlags::IN),
        ];
        let count = match lowered {
            _ if paused => 1,
            Some(_) => 3,
            None => 2,
        };
        match poll(&mut fds[..count], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "The thread of a NIC can't wait; it ends");
                return;
            }
        }
        let (woken, ready) = (!fds[0].revents().is_empty(), fds[1].revents());
        let was_lowered = lowered.filter(|_| count == 3 && fds[2].revents().contains(PollFlags::IN));
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
        if shared.active.load(Ordering::SeqCst) != active {
            continue;
        }
        if let Some(lowered) = was_lowered {
            let mut count = [0; 8];
            // Whatever was counted.
            let _ = rustix::io::read(lowered, &mut count);
            if !readable(true) {
                return;
            }
        }
        if ready.contains(PollFlags::IN) && !shared.paused.load(Ordering::SeqCst) && !readable(false) {
            return;
        }
        if ready.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            tracing::warn!("What is behind a NIC has gone; the NIC receives nothing any more");
            return;
        }
    }
}
