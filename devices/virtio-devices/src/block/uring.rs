//! The io_uring engine: many requests in flight per queue, data moved directly between the image and guest memory.
#![allow(unsafe_code)] // Submissions carry raw pointers.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::disk::Disk;
use super::request::Status;
use super::sync;
use super::task::{Op, Task};

/// Limit of kernel threads that serve one ring where the file system can't do I/O asynchronously.
const KERNEL_WORKERS: u32 = 4;

/// One ring and its requests.
pub(super) struct Uring {
    ring: IoUring,
    /// Indexed by the `user_data` of submissions. A task stays here, at one address, until its completion.
    tasks: Vec<Option<Box<Task>>>,
    free: Vec<usize>,
}

impl Uring {
    /// A ring for `entries` concurrent requests. Fails where the host has no io_uring, forbids it, or lacks an operation that disks need. A
    /// no-op verifies that it works.
    pub(super) fn new(entries: u16) -> io::Result<Self> {
        let mut ring: IoUring = IoUring::builder().dontfork().build(u32::from(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
        ];
        if needed.iter().any(|code| !probe.is_supported(*code)) || !ring.params().is_feature_submit_stable() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring is too old"));
        }
        // Older kernels can't limit their threads; they have a limit of their own.
        let _ = ring.submitter().register_iowq_max_workers(&mut [KERNEL_WORKERS, KERNEL_WORKERS]);
        // SAFETY: a no-op refers to nothing.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }
            .map_err(|_| io::Error::other("a new ring is full"))?;
        ring.submit_and_wait(1)?;
        match ring.completion().next() {
            Some(done) if done.result() >= 0 => {}
            Some(done) => return Err(io::Error::from_raw_os_error(-done.result())),
            None => return Err(io::Error::other("no completion came")),
        }
        Ok(Self { ring, tasks: Vec::new(), free: Vec::new() })
    }

    /// Descriptor that is readable when requests complete.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.tasks.len() - self.free.len()
    }

    /// Whether the kernel refused calls temporarily: call [`Uring::flush`] again soon.
    pub(super) fn stalled(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Queues the next system call of a task; [`Uring::flush`] submits it. A task that needs none goes to `done`.
    pub(super) fn start(
        &mut self,
        task: Box<Task>,
        disk: &Disk,
        done: &mut Vec<(Box<Task>, Status)>,
    ) -> io::Result<()> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.tasks.push(None);
                self.tasks.len() - 1
            }
        };
        self.go_on(task, slot, disk, done)
    }

    /// Queues the next call of the task in `slot`. Executes a call that io_uring lacks directly.
    fn go_on(
        &mut self,
        mut task: Box<Task>,
        slot: usize,
        disk: &Disk,
        done: &mut Vec<(Box<Task>, Status)>,
    ) -> io::Result<()> {
        while let Some(op @ Op::Discard { .. }) = task.op(disk) {
            if let Some(status) = task.advance(disk, sync::perform(op)) {
                self.free.push(slot);
                done.push((task, status));
                return Ok(());
            }
        }
        let pushed = self.push(&task, slot, disk);
        match pushed {
            Ok(()) => self.tasks[slot] = Some(task),
            Err(_) => {
                self.free.push(slot);
                done.push((task, Status::IoError));
            }
        }
        pushed
    }

    fn push(&mut self, task: &Task, slot: usize, disk: &Disk) -> io::Result<()> {
        let op = task.op(disk).ok_or_else(|| io::Error::other("a request has no operation"))?;
        let entry = entry(op).user_data(slot as u64);
        for _ in 0..2 {
            // SAFETY: the pointers in `entry` belong to the task, which stays in `tasks` until its completion is processed (also when this
            // engine is dropped), or to static memory. The disk keeps its files open for longer than any engine (`BlockQueue` drops the
            // engine first).
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            self.flush()?;
        }
        Err(io::Error::other("the submission queue stays full"))
    }

    /// Submits queued system calls to the kernel.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.enter(0)
    }

    /// Waits until a request completes, if any is in flight.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        if self.in_flight() == 0 { Ok(()) } else { self.enter(1) }
    }

    fn enter(&mut self, want: usize) -> io::Result<()> {
        if want == 0 && self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit_and_wait(want) {
            Ok(_) => Ok(()),
            // Interrupted, temporarily out of memory, or completions must be consumed first. The next pass consumes them and submits the
            // queued calls.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Consumes completions. Queues tasks with further calls again; complete ones go to `done`.
    pub(super) fn reap(&mut self, disk: &Disk, done: &mut Vec<(Box<Task>, Status)>) -> io::Result<()> {
        let mut again = Vec::new();
        for completion in self.ring.completion() {
            let slot = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
            let Some(mut task) = self.tasks.get_mut(slot).and_then(Option::take) else { continue };
            let result = completion.result();
            let result = usize::try_from(result).map_err(|_| -result);
            match task.advance(disk, result) {
                Some(status) => {
                    self.free.push(slot);
                    done.push((task, status));
                }
                None => again.push((slot, task)),
            }
        }
        let mut outcome = Ok(());
        for (slot, task) in again {
            if let Err(error) = self.go_on(task, slot, disk, done) {
                outcome = Err(error);
            }
        }
        outcome
    }
}

impl Drop for Uring {
    /// Waits for requests in flight, since the kernel may still write to guest memory for them.
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.ring.submit_and_wait(1).is_err_and(|error| error.raw_os_error() != Some(libc::EINTR)) {
                // They can't be awaited: the memory must stay valid for the rest of the process's life.
                std::mem::forget(std::mem::take(&mut self.tasks));
                return;
            }
            for completion in self.ring.completion() {
                let slot = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
                if let Some(task) = self.tasks.get_mut(slot)
                    && task.take().is_some()
                {
                    self.free.push(slot);
                }
            }
        }
    }
}

fn entry(op: Op) -> squeue::Entry {
    match op {
        Op::Readv { fd, vecs, count, offset } => {
            opcode::Readv::new(types::Fd(fd), vecs, count).offset(offset).build()
        }
        Op::Writev { fd, vecs, count, offset, durable } => opcode::Writev::new(types::Fd(fd), vecs, count)
            .offset(offset)
            .rw_flags(if durable { libc::RWF_DSYNC } else { 0 })
            .build(),
        Op::WriteStatic { fd, data, offset } => {
            opcode::Write::new(types::Fd(fd), data.as_ptr(), u32::try_from(data.len()).unwrap_or(0))
                .offset(offset)
                .build()
        }
        Op::DataSync { fd } => opcode::Fsync::new(types::Fd(fd)).flags(types::FsyncFlags::DATASYNC).build(),
        Op::Fallocate { fd, mode, offset, len } => {
            opcode::Fallocate::new(types::Fd(fd), len).offset(offset).mode(mode).build()
        }
        // `Uring::go_on` executes it.
        Op::Discard { .. } => opcode::Nop::new().build(),
    }
}
