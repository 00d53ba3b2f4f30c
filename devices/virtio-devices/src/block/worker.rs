//! One queue of a disk and the thread that serves it.
//!
//! ```text
//! kick ─▶ pop all ─▶ parse ─▶ engine ─▶ flush ─▶ reap ─▶ status byte, used ring ─▶ one interrupt
//!          ▲                                       │
//!          └── again while anything came ──────────┘  then ask for kicks and sleep
//! ```

use std::sync::Arc;
use std::time::Duration;

use machine::memory::{GuestAddressSpace, GuestMemory, GuestMemorySpace};

use super::disk::Disk;
use super::request::{Request, Status};
use super::sync::Synchronous;
use super::task::{Start, Task};
use super::uring::Uring;
use crate::device::VirtioInterrupt;
use crate::queue::Ring;
use crate::worker::{Interest, Poller, Wake};

/// System calls of this device's threads, beside [`crate::worker::SYSCALLS`].
pub const SYSCALLS: &[i64] = &[
    // uring.rs; a ring is set up again only after a thread that had one died.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
    // sync.rs; block devices are discarded by ioctl.
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_pwrite64,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ioctl,
    // direct.rs: how long the file is.
    libc::SYS_fstat,
    // The qcow2 library.
    libc::SYS_preadv,
    libc::SYS_pread64,
    libc::SYS_lseek,
    // Interrupts by eventfd.
    libc::SYS_write,
];

const KICK: u64 = 0;
const RING: u64 = 1;

/// Who does the I/O of one queue.
pub(super) enum Engine {
    Uring(Box<Uring>),
    Synchronous(Synchronous),
}

/// One queue in use. Belongs to one thread at a time; no thread is needed to use it.
pub struct BlockQueue {
    // Dropped first: it waits for the kernel, which uses the disk's files.
    pub(super) engine: Engine,
    /// For requests that need a bounce buffer, whatever the engine.
    bouncing: Synchronous,
    ring: Ring,
    disk: Arc<Disk>,
    space: GuestMemorySpace,
    done: Vec<(Box<Task>, Status)>,
}

impl BlockQueue {
    pub(super) fn new(ring: Ring, disk: Arc<Disk>, space: GuestMemorySpace, engine: Engine) -> Self {
        Self { engine, bouncing: Synchronous::default(), ring, disk, space, done: Vec::new() }
    }

    /// Takes the queue apart. Requests that the kernel still works on are waited for; after an error they
    /// are not answered.
    pub(super) fn into_parts(mut self) -> (Ring, Engine) {
        let memory = self.space.memory().into_inner();
        if let Err(reason) = self.drain(&memory) {
            self.disk.written.lose();
            tracing::warn!(
                "Disk {}: queue {} could not be drained: {reason}",
                self.disk.name,
                self.ring.index()
            );
        }
        for _ in 0..self.ring.in_flight() {
            self.disk.counters.finished();
        }
        (self.ring, self.engine)
    }

    /// Serves everything that is available, until nothing more is or `stopping` says so. What is in flight at
    /// the return completes later ([`BlockQueue::serve`] again, or [`BlockQueue::finish`]). The error is the
    /// reason why the device has failed.
    pub fn serve(
        &mut self,
        interrupt: &dyn VirtioInterrupt,
        stopping: &dyn Fn() -> bool,
    ) -> Result<(), String> {
        let memory = self.space.memory().into_inner();
        self.ring.check(&memory).map_err(text)?;
        self.disk.flush_if_wanted();
        loop {
            self.ring.disable_kicks(&memory).map_err(text)?;
            let mut progress = false;
            // A queue's worth at most before completions are looked at and the driver is told.
            for _ in 0..self.ring.size() {
                if stopping() {
                    break;
                }
                let Some(chain) = self.ring.pop(&memory).map_err(text)? else { break };
                progress = true;
                self.disk.counters.started();
                let request = Request::parse(&chain, &memory, &self.disk.limits).map_err(text)?;
                match Task::start(request, &memory, &self.disk).map_err(text)? {
                    Start::Done(task, status) => self.done.push((task, status)),
                    Start::Running(task) => self.start(task, &memory, interrupt)?,
                }
            }
            progress |= self.collect(&memory, interrupt)?;
            if stopping() || (!progress && !self.ring.enable_kicks(&memory).map_err(text)?) {
                return Ok(());
            }
        }
    }

    /// Begins to serve a request, once nothing that goes around the page cache is in its way.
    fn start(
        &mut self,
        mut task: Box<Task>,
        memory: &Arc<GuestMemory>,
        interrupt: &dyn VirtioInterrupt,
    ) -> Result<(), String> {
        if let Some(claim) = task.claim(&self.disk) {
            let ticket = match self.disk.gate.try_enter(claim) {
                Some(ticket) => ticket,
                None => {
                    // Another queue may wait for what this one has in flight.
                    self.finish(interrupt)?;
                    self.disk.gate.enter(claim)
                }
            };
            task.hold(ticket);
        }
        let synchronous = match &mut self.engine {
            Engine::Uring(uring) if !task.is_bounced() => {
                return uring.start(task, &self.disk, &mut self.done).map_err(text);
            }
            Engine::Uring(_) => &mut self.bouncing,
            Engine::Synchronous(engine) => engine,
        };
        let status = synchronous.run(&mut task, memory, &self.disk);
        self.done.push((task, status));
        Ok(())
    }

    /// Waits for what is in flight and answers it; takes nothing new.
    pub fn finish(&mut self, interrupt: &dyn VirtioInterrupt) -> Result<(), String> {
        let memory = self.space.memory().into_inner();
        loop {
            self.collect(&memory, interrupt)?;
            match &mut self.engine {
                Engine::Uring(uring) if uring.in_flight() > 0 => uring.wait().map_err(text)?,
                _ => return Ok(()),
            }
        }
    }

    /// Hands over, takes and answers completions; whether there were any.
    fn collect(
        &mut self,
        memory: &Arc<GuestMemory>,
        interrupt: &dyn VirtioInterrupt,
    ) -> Result<bool, String> {
        if let Engine::Uring(uring) = &mut self.engine {
            uring.flush().map_err(text)?;
            uring.reap(&self.disk, &mut self.done).map_err(text)?;
            // Second parts of requests that were cut short.
            uring.flush().map_err(text)?;
        }
        let any = !self.done.is_empty();
        for (task, status) in self.done.drain(..) {
            let (head, written) = task.finish(status, memory, &self.disk).map_err(text)?;
            self.ring.complete(memory, head, written).map_err(text)?;
            self.disk.counters.finished();
        }
        if self.ring.should_interrupt(memory).map_err(text)? {
            interrupt.queue(self.ring.index());
        }
        Ok(any)
    }

    fn drain(&mut self, memory: &Arc<GuestMemory>) -> Result<(), String> {
        while let Engine::Uring(uring) = &mut self.engine
            && uring.in_flight() > 0
        {
            uring.wait().map_err(text)?;
            uring.reap(&self.disk, &mut self.done).map_err(text)?;
        }
        for (task, status) in self.done.drain(..) {
            // Answered in guest memory where possible; the ring is broken, so it isn't told.
            let _ = task.finish(status, memory, &self.disk);
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A queue whose thread ends, for whatever reason, with nothing in flight: other queues may wait for that.
struct Settling<'a>(&'a mut BlockQueue);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let memory = self.0.space.memory().into_inner();
        // A failure is told when the queue is taken apart.
        let _ = self.0.drain(&memory);
    }
}

/// The thread: serves the queue until it is stopped.
pub(super) fn run(
    queue: &mut BlockQueue,
    interrupt: &dyn VirtioInterrupt,
    poller: &Poller,
) -> Result<(), String> {
    let settling = Settling(queue);
    let queue = &mut *settling.0;
    poller.add(queue.ring.kick(), KICK, Interest::READ).map_err(text)?;
    if let Engine::Uring(uring) = &queue.engine {
        poller.add(uring.fd(), RING, Interest::READ).map_err(text)?;
    }
    let mut ready = Vec::new();
    let stopping = || poller.stopping();
    // What became available before the kick was listened to.
    queue.serve(interrupt, &stopping)?;
    loop {
        // The kernel was short of memory: try again soon.
        let stalled = match &mut queue.engine {
            Engine::Uring(uring) => uring.stalled(),
            Engine::Synchronous(_) => false,
        };
        match poller.wait(&mut ready, stalled.then_some(Duration::from_millis(1))).map_err(text)? {
            Wake::Stop => return queue.finish(interrupt),
            Wake::Events => {}
        }
        if ready.iter().any(|event| event.token == KICK) {
            queue.ring.drain_kick();
        }
        queue.serve(interrupt, &stopping)?;
    }
}
