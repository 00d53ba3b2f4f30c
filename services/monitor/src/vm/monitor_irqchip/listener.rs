//! Thread `interrupts`: polls eventfds and timers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::routes::EventfdRoute;
use super::{Shared, new_eventfd, signal, take_signal};
use crate::sandbox::ThreadFilter;

/// System calls of this thread beyond those of every thread.
pub const SYSCALLS: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_ctl];
/// Events per epoll_wait.
const EVENTS_PER_WAIT: usize = 64;
/// Number of the event that ends the thread.
const STOP: u64 = 0;

/// A polled source. Each write to an eventfd is one event (EPOLLET), whether the thread reads it or leaves it.
#[derive(Clone)]
pub(super) enum Source {
    /// A message-signalled interrupt.
    Msi(Weak<EventfdRoute>),
    /// Pulses a pin.
    Edge { pin: u32, fd: Arc<OwnedFd> },
    /// Asserts a pin until its interrupt ends.
    Level { pin: u32, fd: Arc<OwnedFd> },
    /// The timer of the vCPU with this index.
    Timer { index: usize },
}

/// All polled sources.
pub(super) struct Listener {
    epoll: OwnedFd,
    stop: OwnedFd,
    sources: Mutex<Sources>,
    /// Held from the read of a signal to its interrupt.
    delivery: Mutex<()>,
}

struct Sources {
    next: u64,
    by_number: BTreeMap<u64, Source>,
}

impl Listener {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = new_eventfd()?;
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
        let sources = Mutex::new(Sources { next: STOP + 1, by_number: BTreeMap::new() });
        Ok(Self { epoll, stop, sources, delivery: Mutex::new(()) })
    }

    /// Adds `fd` to the polled sources; returns its number, for [`Listener::remove`].
    pub(super) fn add(&self, fd: &impl AsFd, source: Source) -> io::Result<u64> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let number = sources.next;
        epoll::add(&self.epoll, fd, EventData::new_u64(number), EventFlags::IN | EventFlags::ET)?;
        sources.next += 1;
        sources.by_number.insert(number, source);
        Ok(number)
    }

    /// Removes a source. Other processes may still have its descriptor.
    pub(super) fn remove(&self, fd: &impl AsFd, number: u64) {
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            tracing::error!(%error, "An eventfd of an interrupt could not be released");
        }
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).by_number.remove(&number);
    }

    pub(super) fn stop(&self) {
        signal(&self.stop);
    }

    fn find(&self, number: u64) -> Option<Source> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).by_number.get(&number).cloned()
    }
}

/// Starts the thread.
pub(super) fn start(shared: Arc<Shared>, filter: ThreadFilter) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(move || {
        filter.apply_or_end();
        if let Err(error) = listen(&shared) {
            // Without this thread the guest would get no more interrupts from devices.
            tracing::error!(%error, "Eventfds of interrupts can't be waited for; ending");
            std::process::exit(1);
        }
    })
}

fn listen(shared: &Shared) -> io::Result<()> {
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS_PER_WAIT);
    loop {
        events.clear();
        match epoll::wait(&shared.listener.epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            // A copy, because the kernel's structure is packed.
            let data = event.data;
            if data.u64() == STOP {
                return Ok(());
            }
            if let Some(source) = shared.listener.find(data.u64()) {
                deliver(shared, &source);
            }
        }
    }
}

/// Delivers a pending signal, unless another thread has delivered it.
fn deliver(shared: &Shared, source: &Source) {
    let _delivery = shared.listener.delivery.lock().unwrap_or_else(PoisonError::into_inner);
    match source {
        Source::Msi(route) => {
            if let Some(route) = route.upgrade() {
                route.deliver_signal();
            }
        }
        Source::Edge { pin, fd } if take_signal(fd) => shared.pulse(*pin),
        Source::Level { pin, fd } if take_signal(fd) => shared.assert_until_end(*pin),
        Source::Edge { .. } | Source::Level { .. } => {}
        Source::Timer { index } => shared.timer_expired(*index),
    }
}

/// Delivers all signals that are pending now, on the calling thread.
pub(super) fn drain(shared: &Shared) {
    let all: Vec<Source> = {
        let sources = shared.listener.sources.lock().unwrap_or_else(PoisonError::into_inner);
        sources.by_number.values().cloned().collect()
    };
    for source in &all {
        deliver(shared, source);
    }
}
