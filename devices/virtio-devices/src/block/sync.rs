//! The engine without io_uring: each request is finished before the next one is looked at. Serves
//! qcow2 images always, raw ones where the host refuses io_uring.
#![allow(unsafe_code)] // Vectored I/O straight into guest memory.

use machine::memory::GuestMemory;
use telemetry::guest_warn;

use super::disk::Disk;
use super::image::Backend;
use super::request::Status;
use super::task::{Op, Task};
use crate::queue;

/// Bytes that are copied at once from a qcow2 image.
const BOUNCE: usize = 256 << 10;

/// State of the engine: a buffer for images that can't read into guest memory.
#[derive(Default)]
pub(super) struct Synchronous {
    bounce: Vec<u8>,
}

impl Synchronous {
    /// Serves a request to its end.
    pub(super) fn run(&mut self, task: &mut Task, memory: &GuestMemory, disk: &Disk) -> Status {
        loop {
            let result = match (task.op(disk), disk.backend()) {
                (Some(op), _) => perform(op),
                (None, Backend::Qcow2(image)) => match task.pending_read() {
                    Some((offset, left)) => self.read_qcow2(task, image, offset, left, memory, disk),
                    // Read-only: no other step exists.
                    None => Err(libc::EIO),
                },
                (None, Backend::Raw { .. }) => Ok(0),
            };
            if let Some(status) = task.advance(disk, result) {
                return status;
            }
        }
    }

    fn read_qcow2(
        &mut self,
        task: &Task,
        image: &imago::FormatAccess<imago::file::File>,
        offset: u64,
        left: u64,
        memory: &GuestMemory,
        disk: &Disk,
    ) -> Result<usize, i32> {
        self.bounce.resize(BOUNCE, 0);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(BOUNCE);
        let buffer = &mut self.bounce[..len];
        image.read(&mut *buffer, offset).map_err(|error| {
            guest_warn!(disk.log, "Disk {}: reading {len} bytes at {offset}: {error}", disk.name);
            error
                .raw_os_error()
                .filter(|errno| *errno != libc::EINTR && *errno != libc::EAGAIN)
                .unwrap_or(libc::EIO)
        })?;
        // What was checked as RAM when the chain was popped can only have gone by a change of the memory map.
        queue::write(memory, task.incoming(), offset - task.first_byte(), buffer)
            .map_err(|_| libc::EFAULT)?;
        Ok(len)
    }
}

/// Makes one system call.
fn perform(op: Op) -> Result<usize, i32> {
    let off = |offset: u64| i64::try_from(offset).map_err(|_| libc::EFBIG);
    let count = |count: u32| i32::try_from(count).map_err(|_| libc::EINVAL);
    let result = match op {
        Op::Readv { fd, vecs, count: n, offset } => {
            // SAFETY: the task that `op` came from keeps `vecs` and the guest memory they point to alive, and
            // the disk keeps `fd` open; nothing in this process refers to that memory by reference.
            unsafe { libc::preadv2(fd, vecs, count(n)?, off(offset)?, 0) }
        }
        Op::Writev { fd, vecs, count: n, offset, durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: as for `Readv`.
            unsafe { libc::pwritev2(fd, vecs, count(n)?, off(offset)?, flags) }
        }
        Op::WriteStatic { fd, data, offset } => {
            // SAFETY: `data` is valid for reads of its length, `fd` is open.
            unsafe { libc::pwrite(fd, data.as_ptr().cast(), data.len(), off(offset)?) }
        }
        Op::DataSync { fd } => {
            // SAFETY: `fd` is open; no memory is passed.
            unsafe { libc::fdatasync(fd) as isize }
        }
        Op::Fallocate { fd, mode, offset, len } => {
            // SAFETY: `fd` is open; no memory is passed.
            unsafe { libc::fallocate(fd, mode, off(offset)?, off(len)?) as isize }
        }
    };
    usize::try_from(result).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
