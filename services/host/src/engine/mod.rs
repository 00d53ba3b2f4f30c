//! The engine's thread: it alone owns all RDMA state of the host, as plain structures. Other threads send it jobs and wait for their
//! results.
//!
//! ```text
//!  vfio-user threads      EngineHandle::call ── bounded channel, eventfd while it sleeps ──▶ job(&mut Worker)
//!  (one per socket)       ◀──────────────────────────── response ──────────────────────────
//!                         EngineHandle::doorbell ── no response ──────────────────────────▶
//!  guests' doorbells in memory  ◀── polled, while a device's doorbells are memory
//! ```
//!
//! When a call returns, its job is complete: the engine doesn't access a destroyed queue pair's memory any more, nor an old table of guest
//! memory.
//!
//! Sleeping and polling, per device (see [`handshake`] and [`load`]):
//!
//! ```text
//!            32 trapped doorbells in 40 ms (`--doorbell-window`), and no program is event-driven: request memory
//!   trapped ──────────────────────────────────────────────────────────────▶ memory: the thread polls
//!      ▲                                                                     │
//!      └── last poll, full scan ◀── client: trapped ◀── no work for 100 ms, or a program arms: request trapped
//! ```
//!
//! When every device is trapped the thread sleeps until a call, a trapped doorbell or a timer of the engine.
//!
//! | module | holds |
//! |---|---|
//! | `worker` | the thread's loop |
//! | `moving` | devices of migrating VMs, and their peers |
//! | `views` | making reports of devices |
//! | `served` | a device, its client's eventfds, its doorbell mode |
//! | `handshake` | changes of the doorbell mode |
//! | `load` | the choice of the doorbell mode |
//! | `report` | types of reports |

mod handshake;
mod late;
mod load;
mod moving;
mod pace;
mod report;
mod served;
mod views;
mod worker;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use hca::names::DeviceId;
use rustix::event::{EventfdFlags, eventfd};

use crate::function::descriptors::signal;
use crate::transport::Transports;

pub use report::{DeviceView, EngineView, LoopCounters};
pub use served::DeviceSetup;
pub(crate) use worker::is_arm;
pub use worker::{Worker, Written};

/// Capacity of the channel, calls and doorbells; senders wait when it is full.
const WAITING: usize = 4096;

/// Settings of the thread.
#[derive(Debug, Clone, Copy)]
pub struct EngineSetup {
    /// CPU that the thread is bound to, if any.
    pub cpu: Option<usize>,
    /// Time without work after which a device's doorbells trap again.
    pub idle: Duration,
    /// Window in which 32 trapped doorbells of a device make its doorbells memory.
    pub busy_window: Duration,
    /// Settings of the HCA engine.
    pub engine: hca::engine::EngineConfig,
}

impl Default for EngineSetup {
    fn default() -> Self {
        Self {
            cpu: None,
            idle: Duration::from_millis(100),
            busy_window: Duration::from_millis(40),
            engine: hca::engine::EngineConfig::default(),
        }
    }
}

/// The engine's thread has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The engine's thread has ended; restart the host daemon")]
pub struct EngineStopped;

/// Why the thread can't be started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// It can't be bound to the CPU.
    #[error(
        "The engine's thread can't be bound to CPU {cpu}; does the host have it, and may this process use it?"
    )]
    Cpu {
        /// The CPU.
        cpu: usize,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// No thread or descriptor is left.
    #[error("The engine's thread can't be started")]
    Start(#[source] io::Error),
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

/// A message to the thread.
enum Message {
    /// A job to execute.
    Job(Job),
    /// A trapped doorbell.
    Doorbell { device: DeviceId, offset: u64, value: u32 },
}

/// State shared by the worker and its senders, besides the channel.
#[derive(Debug)]
struct Wake {
    event: OwnedFd,
    /// The worker sleeps, or checks the channel once more before it does.
    sleeping: AtomicBool,
}

/// Sends calls to the engine's thread. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    messages: Sender<Message>,
    wake: Arc<Wake>,
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EngineHandle").field("waiting", &self.messages.len()).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Makes the engine's thread execute `job`, and waits for its result.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, EngineStopped> {
        let (answer, result) = bounded(1);
        let job: Job = Box::new(move |worker| {
            // The caller waits for it.
            let _ = answer.send(job(worker));
        });
        self.send(Message::Job(job))?;
        result.recv().map_err(|_| EngineStopped)
    }

    /// Passes on a trapped doorbell, in order with other calls of this thread. Doesn't wait for the engine, except for room in its channel.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn doorbell(&self, device: DeviceId, offset: u64, value: u32) -> Result<(), EngineStopped> {
        self.send(Message::Doorbell { device, offset, value })
    }

    fn send(&self, message: Message) -> Result<(), EngineStopped> {
        self.messages.send(message).map_err(|_| EngineStopped)?;
        // The worker sets `sleeping`, then checks the channel: one of the two sees the other's store.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.wake.sleeping.load(Ordering::SeqCst) {
            signal(self.wake.event.as_fd());
        }
        Ok(())
    }
}

/// The running thread. Dropping it ends it, and removes all devices.
#[derive(Debug)]
pub struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Starts the thread, with transports to other hosts if given.
    ///
    /// # Errors
    /// When it can't be bound to its CPU, or the kernel has no thread left.
    pub fn start(setup: EngineSetup, transports: Option<Transports>) -> Result<Self, EngineError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| EngineError::Start(e.into()))?;
        let wake = Arc::new(Wake { event, sleeping: AtomicBool::new(false) });
        let (messages, inbox): (Sender<Message>, Receiver<Message>) = bounded(WAITING);
        let (started, result) = bounded(1);
        let shared = Arc::clone(&wake);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let bound = setup.cpu.map_or(Ok(()), bind);
                let fine = bound.is_ok();
                // The starting thread waits for it.
                let _ = started.send(bound);
                if fine {
                    Worker::new(setup, transports, inbox, shared).run();
                }
            })
            .map_err(EngineError::Start)?;
        match result.recv() {
            Ok(Ok(())) => {}
            Ok(Err(source)) => return Err(EngineError::Cpu { cpu: setup.cpu.unwrap_or_default(), source }),
            Err(_) => return Err(EngineError::Start(io::ErrorKind::BrokenPipe.into())),
        }
        Ok(Self { handle: EngineHandle { messages, wake }, thread: Some(thread) })
    }

    /// A handle for other threads.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        let _ = self.handle.call(Worker::stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The engine's thread panicked; this is a bug");
        }
    }
}

fn bind(cpu: usize) -> io::Result<()> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests;
