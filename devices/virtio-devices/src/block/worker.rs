//! One queue of a disk and its thread.
//!
//! ```text
//! kick ─▶ pop all ─▶ parse ─▶ engine ─▶ flush ─▶ reap ─▶ status byte, used ring ─▶ one interrupt
//!          ▲                                       │
//!          └── repeat while there are requests ────┘  then enable kicks and sleep
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

/// System calls of this device's threads, besides [`crate::worker::SYSCALLS`].
pub const SYSCALLS: &[i64] = &[
    // uring.rs; a ring is set up again only after its thread panicked.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
    // sync.rs; an ioctl discards on block devices.
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_pwrite64,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ioctl,
    // direct.rs: length of the file.
    libc::SYS_fstat,
    // The qcow2 library.
    libc::SYS_preadv,
    libc::SYS_pread64,
    libc::SYS_lseek,
    // Interrupts through an eventfd.
    libc::SYS_write,
];

const KICK: u64 = 0;
const RING: u64 = 1;

/// The I/O engine of one queue.
pub(super) enum Engine {
    Uring(Box<Uring>),
    Synchronous(Synchronous),
}

/// A queue in use. Belongs to one thread at a time, and works without one.
pub struct BlockQueue {
    // Dropped first: it waits for the kernel, which uses the disk's files.
    pub(super) engine: Engine,
    /// For requests that need a bounce buffer, with either engine.
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

    /// Takes the queue apart. Waits for requests in the kernel; after an error they are not completed to the driver.
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

    /// Serves all available requests, until there are none or `stopping` returns true. Requests in flight at the return complete later
    /// ([`BlockQueue::serve`] again, or [`BlockQueue::finish`]). The error is the reason why the device has failed.
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
            // Limit of requests before completions are processed and the driver is interrupted.
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

    /// Starts a request, once no `O_DIRECT` request conflicts with it.
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
                    // Another queue may wait for this one's requests in flight.
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

    /// Completes all requests in flight; pops no new ones.
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

    /// Submits calls and processes completions; returns whether there were any.
    fn collect(
        &mut self,
        memory: &Arc<GuestMemory>,
        interrupt: &dyn VirtioInterrupt,
    ) -> Result<bool, String> {
        if let Engine::Uring(uring) = &mut self.engine {
            uring.flush().map_err(text)?;
            uring.reap(&self.disk, &mut self.done).map_err(text)?;
            // Remaining calls of requests whose transfer was short.
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
            // The status is written to guest memory if possible, but not to the ring, which is corrupted.
            let _ = task.finish(status, memory, &self.disk);
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Ensures that a queue's thread ends with nothing in flight, for whatever reason: other queues may wait for that.
struct Settling<'a>(&'a mut BlockQueue);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let memory = self.0.space.memory().into_inner();
        // `into_parts` reports a failure.
        let _ = self.0.drain(&memory);
    }
}

/// The queue's thread: serves the queue until it is stopped.
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
    // Requests that became available before the thread waited for kicks.
    queue.serve(interrupt, &stopping)?;
    loop {
        // The kernel was short of memory: retry soon.
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
