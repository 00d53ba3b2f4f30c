//! A thread that owns a segment with all its devices and ports, and handles for other threads.
//!
//! ```text
//!  vfio-user thread of a NIC                         segment thread (owns all state, plain &mut)
//!    │ NicHandle::bar_write ── message, eventfd ───────▶│ executes it
//!    │◀────────────────────────────── response ─────────│
//!  guest ── store to a doorbell ── ioeventfd ──────────▶│ Segment::serve
//!  host  ── frame at a tap ─────────────────────────────▶│
//! ```
//!
//! A call returns after the thread has executed it. So when a QUIESCE command, a reset, a change of memory or a drop of the handle returns,
//! all DMA has stopped. A call waits for at most one round of bounded work of each port.

mod handle;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dma::Dma;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::device::Vmxnet3;
use crate::device::Vmxnet3Config;
use crate::interrupts::Interrupts;
use crate::saved::{RestoreError, SavedVmxnet3};
use crate::segment::{AttachError, FramePort, PortId, PortReport, PortRules, Segment, SegmentConfig};

pub use handle::{IoEvent, NicEvents, NicHandle};

/// First and longest interval of retries for frames that wait for buffers without a doorbell (exponential back-off). A stopped guest must
/// not keep the thread busy.
const RETRY: Duration = Duration::from_millis(5);
const RETRY_MAX: Duration = Duration::from_millis(500);
/// Epoll tag of the thread's own eventfd.
const WAKE: u64 = u64::MAX;
/// A port's epoll tag is its index; from this bit on, the kind of the descriptor.
const KIND_SHIFT: u32 = 32;
/// Number of vectors whose unmasking can be an eventfd. Linux uses two with one queue.
const UNMASK_EVENTS: usize = 3;
/// Limit of posted writes of one device in flight, whose completion no thread waits for.
const POSTED_MAX: usize = 32;
/// Number of messages that the thread executes before it serves the segment again.
const MESSAGES_PER_TURN: usize = 64;

/// A request to the segment's thread.
type Job<M> = Box<dyn FnOnce(&mut Worker<M>) + Send>;

/// The segment's thread is gone: it was stopped, or it failed and logged why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The segment's thread has ended; create the segment and its devices anew")]
pub struct SegmentGone;

/// Why a device or port can't be added to a running segment.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// The segment refuses it.
    #[error("It does not fit into the segment")]
    Attach(#[from] AttachError),
    /// The thread is gone.
    #[error("Nothing can be plugged in")]
    Gone(#[from] SegmentGone),
    /// The saved state is damaged.
    #[error("The device can't be restored")]
    Restore(#[from] RestoreError),
    /// The kernel refused.
    #[error("The kernel refused to {what}")]
    Kernel {
        /// The failed operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Sends requests to the thread. Cheap to clone.
struct Mailbox<M> {
    jobs: Sender<Job<M>>,
    wake: Arc<OwnedFd>,
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Self { jobs: self.jobs.clone(), wake: Arc::clone(&self.wake) }
    }
}

impl<M> Mailbox<M> {
    /// Makes the thread execute `job`, and waits for its result.
    fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Worker<M>) -> R + Send + 'static,
    ) -> Result<R, SegmentGone> {
        let (answer, result): (SyncSender<R>, Receiver<R>) = sync_channel(1);
        let job: Job<M> = Box::new(move |worker| {
            // The caller may be gone.
            let _ = answer.send(job(worker));
        });
        self.jobs.send(job).map_err(|_| SegmentGone)?;
        ring(&self.wake);
        result.recv().map_err(|_| SegmentGone)
    }

    /// Makes the thread execute `job` after all earlier requests, without waiting.
    fn post(&self, job: impl FnOnce(&mut Worker<M>) + Send + 'static) {
        // If the thread is gone, so are the registers.
        if self.jobs.send(Box::new(job)).is_ok() {
            ring(&self.wake);
        }
    }
}

/// A running segment. Dropping it stops the thread; handles of its devices then respond like absent devices.
pub struct SegmentThread<M> {
    mailbox: Mailbox<M>,
    name: String,
    thread: Option<JoinHandle<()>>,
}

impl<M: Dma + Send + 'static> SegmentThread<M> {
    /// Starts the thread of an empty segment.
    ///
    /// # Errors
    /// When the kernel has no thread or no descriptor left.
    pub fn start(config: SegmentConfig) -> io::Result<Self> {
        let wake = Arc::new(new_event()?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let (jobs, inbox) = channel();
        let name = config.name.clone();
        let mut worker = Worker {
            segment: Segment::new(config),
            inbox,
            epoll,
            wake: Arc::clone(&wake),
            watched: Vec::new(),
            started: Instant::now(),
            stopping: false,
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(move || {
            if let Err(error) = worker.run() {
                tracing::error!("Segment {} has failed: {error}", worker.name());
            }
        })?;
        Ok(Self { mailbox: Mailbox { jobs, wake }, name, thread: Some(thread) })
    }

    /// Name of the segment, as configured.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a new device.
    ///
    /// # Errors
    /// When its address is in use, the segment is full, or the thread is gone.
    pub fn attach(
        &self,
        config: Vmxnet3Config,
        rules: PortRules,
        interrupts: Box<dyn Interrupts>,
    ) -> Result<NicHandle<M>, PlugError> {
        self.attach_device(Vmxnet3::new(config, interrupts), rules, None)
    }

    /// Adds a device with a saved state. It is suspended until [`NicHandle::set_memory`].
    ///
    /// # Errors
    /// As [`SegmentThread::attach`], and when the state is damaged.
    pub fn attach_restored(
        &self,
        config: Vmxnet3Config,
        rules: PortRules,
        interrupts: Box<dyn Interrupts>,
        state: SavedVmxnet3,
    ) -> Result<NicHandle<M>, PlugError> {
        self.attach_device(Vmxnet3::restore(config, interrupts, state)?, rules, None)
    }

    /// As [`SegmentThread::attach_restored`], with eventfds that were created and passed on before the device.
    ///
    /// # Errors
    /// As there.
    pub fn attach_arrived(
        &self,
        config: Vmxnet3Config,
        rules: PortRules,
        interrupts: Box<dyn Interrupts>,
        state: SavedVmxnet3,
        events: NicEvents,
    ) -> Result<NicHandle<M>, PlugError> {
        self.attach_device(Vmxnet3::restore(config, interrupts, state)?, rules, Some(events))
    }

    fn attach_device(
        &self,
        device: Vmxnet3<M>,
        rules: PortRules,
        events: Option<NicEvents>,
    ) -> Result<NicHandle<M>, PlugError> {
        let events = match events {
            Some(events) => events,
            None => NicEvents::new().map_err(|source| PlugError::Kernel { what: "make eventfds", source })?,
        };
        let (counters, own) = (device.counters(), events.clone());
        let id = self.mailbox.call(move |worker| worker.attach(device, rules, own))??;
        Ok(NicHandle { mailbox: self.mailbox.clone(), id, events, counters, posted: Arc::default() })
    }

    /// Adds a port that isn't a device, for instance a [`crate::tap::Tap`].
    ///
    /// # Errors
    /// When the segment is full, epoll refuses its descriptor, or the thread is gone.
    pub fn attach_port(
        &self,
        name: impl Into<String>,
        port: Box<dyn FramePort>,
        rules: PortRules,
    ) -> Result<PortId, PlugError> {
        let name = name.into();
        self.mailbox.call(move |worker| worker.attach_port(name, port, rules))?
    }

    /// Removes a port that [`SegmentThread::attach_port`] added.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn detach_port(&self, id: PortId) -> Result<(), SegmentGone> {
        self.mailbox.call(move |worker| worker.detach(id))
    }

    /// Reports all ports with their counters.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn report(&self) -> Result<Vec<PortReport>, SegmentGone> {
        self.mailbox.call(|worker| worker.segment.report())
    }
}

impl<M> Drop for SegmentThread<M> {
    fn drop(&mut self) {
        let _ = self.mailbox.call(|worker| worker.stopping = true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The thread of segment {} has panicked", self.name);
        }
    }
}

/// State of the thread.
struct Worker<M> {
    segment: Segment<M>,
    inbox: Receiver<Job<M>>,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    /// Descriptors in the epoll set, by port.
    watched: Vec<Option<Watched>>,
    started: Instant,
    stopping: bool,
}

impl<M: Dma + Send + 'static> Worker<M> {
    fn name(&self) -> &str {
        self.segment.name()
    }

    fn attach(
        &mut self,
        device: Vmxnet3<M>,
        rules: PortRules,
        events: NicEvents,
    ) -> Result<PortId, PlugError> {
        let id = self.segment.attach_device(device, rules)?;
        self.watch(id, Watched::Device(events))
    }

    fn attach_port(
        &mut self,
        name: String,
        port: Box<dyn FramePort>,
        rules: PortRules,
    ) -> Result<PortId, PlugError> {
        let fd = port.fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let fd = fd.map_err(|source| PlugError::Kernel { what: "copy a file descriptor", source })?;
        let id = self.segment.attach_port(name, port, rules)?;
        match fd {
            Some(fd) => self.watch(id, Watched::Port(fd)),
            None => Ok(id),
        }
    }

    /// Adds a port's descriptors to the epoll set; without them the port can't stay.
    fn watch(&mut self, id: PortId, watched: Watched) -> Result<PortId, PlugError> {
        let index = id.0 as u64;
        let result = watched.fds().try_for_each(|(kind, fd)| {
            let data = epoll::EventData::new_u64(index | kind << KIND_SHIFT);
            epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
        });
        if self.watched.len() <= id.0 {
            self.watched.resize_with(id.0 + 1, || None);
        }
        self.watched[id.0] = Some(watched);
        result.map_err(|error| {
            self.detach(id);
            PlugError::Kernel { what: "wait for a port", source: error.into() }
        })?;
        Ok(id)
    }

    /// Removes a port's descriptors from the epoll set.
    fn unwatch(&mut self, id: PortId) -> bool {
        let Some(watched) = self.watched.get_mut(id.0).and_then(Option::take) else { return false };
        for (_, fd) in watched.fds() {
            // Fails for those that `watch` couldn't add.
            let _ = epoll::delete(&self.epoll, fd);
        }
        true
    }

    fn detach(&mut self, id: PortId) {
        self.unwatch(id);
        self.segment.detach(id);
    }

    /// Executes the unmasking that a device's eventfds signal.
    fn take_unmasks(&mut self, id: PortId) {
        let Some(Some(Watched::Device(events))) = self.watched.get(id.0) else { return };
        let Some(device) = self.segment.device(id) else { return };
        for (vector, event) in (0..).zip(&events.unmask) {
            if drain(event) {
                let register = crate::registers::IMR + 8 * vector;
                device.bar_write(crate::pci::BAR_DOORBELL, register, &[0; 4]);
            }
        }
    }

    fn run(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        let mut retry = RETRY;
        loop {
            let mut jobs = 0;
            while jobs < MESSAGES_PER_TURN
                && let Ok(job) = self.inbox.try_recv()
            {
                job(self);
                jobs += 1;
            }
            // The signal of the request may have been consumed already: don't wait for another.
            if self.stopping {
                return Ok(());
            }
            let more = self.segment.serve(self.started.elapsed());
            let timeout = if more || jobs == MESSAGES_PER_TURN {
                Some(Timespec { tv_sec: 0, tv_nsec: 0 })
            } else if self.segment.has_waiting() {
                Some(Timespec { tv_sec: 0, tv_nsec: i64::from(retry.subsec_nanos()) })
            } else {
                None
            };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            retry = if events.is_empty() { (retry * 2).min(RETRY_MAX) } else { RETRY };
            for event in events.drain(..) {
                let flags = event.flags;
                let broken = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
                self.handle(event.data.u64(), broken);
            }
        }
    }

    fn handle(&mut self, tag: u64, broken: bool) {
        if tag == WAKE {
            drain(&self.wake);
            return;
        }
        let (kind, index) = (tag >> KIND_SHIFT, tag & ((1 << KIND_SHIFT) - 1));
        let Ok(index) = usize::try_from(index) else { return };
        let id = PortId(index);
        match self.watched.get(index) {
            Some(Some(Watched::Device(events))) if kind == 0 => {
                drain(&events.kick);
                if let Some(device) = self.segment.device(id) {
                    device.kick();
                }
            }
            Some(Some(Watched::Device(_))) => self.take_unmasks(id),
            Some(Some(Watched::Port(_))) => {
                self.segment.readable(id);
                // A broken descriptor would wake the thread without end.
                if broken && self.unwatch(id) {
                    let segment = self.segment.name();
                    tracing::error!(
                        "A port of segment {segment} is gone (was its tap deleted?); attach it anew"
                    );
                }
            }
            Some(None) | None => {}
        }
    }
}

/// Epoll descriptors of a port.
enum Watched {
    Device(NicEvents),
    Port(OwnedFd),
}

impl Watched {
    /// Each with its kind, for the epoll tag.
    fn fds(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        let fds: Vec<BorrowedFd<'_>> = match self {
            Self::Device(NicEvents { kick, unmask }) => {
                std::iter::once(kick).chain(unmask).map(|fd| fd.as_fd()).collect()
            }
            Self::Port(fd) => vec![fd.as_fd()],
        };
        (0..).zip(fds)
    }
}

fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Signals an eventfd. Fails only if the counter is full, so that it is signalled anyway.
fn ring(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// Consumes the signals of an eventfd; returns whether there were any.
fn drain(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0_u8; 8]).is_ok()
}
