//! The engine without io_uring: it completes each request before it starts the next one. Always serves qcow2 images, and raw ones where the
//! host refuses io_uring.
#![allow(unsafe_code)] // Vectored I/O directly to guest memory.

use machine::memory::GuestMemory;
use telemetry::guest_warn;

use super::direct::{AlignedBuffer, BUFFER_BYTES, Direct, Piece};
use super::disk::Disk;
use super::image::Backend;
use super::request::Status;
use super::task::{Op, Task, Transfer};
use crate::queue;

/// Bytes copied at once from a qcow2 image.
const BOUNCE: usize = 256 << 10;

/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// State of the engine: buffers for data that can't be moved directly between image and guest memory.
#[derive(Default)]
pub(super) struct Synchronous {
    /// For images that aren't raw.
    bounce: Vec<u8>,
    /// For unaligned requests with `O_DIRECT`.
    aligned: Option<AlignedBuffer>,
}

impl Synchronous {
    /// Executes a request completely.
    pub(super) fn run(&mut self, task: &mut Task, memory: &GuestMemory, disk: &Disk) -> Status {
        loop {
            let result = match (task.transfer(), disk.backend()) {
                (Some(transfer), Backend::Raw { file, direct: Some(direct) }) => {
                    self.transfer(task, transfer, (direct, file), memory, disk)
                }
                _ => match (task.op(disk), disk.backend()) {
                    (Some(op), _) => perform(op),
                    (None, Backend::Qcow2(_)) => match task.pending_read() {
                        Some((offset, left)) => self.read_qcow2(task, offset, left, memory, disk),
                        // qcow2 images are read-only: no other step exists.
                        None => Err(libc::EIO),
                    },
                    (None, Backend::Raw { .. }) => Ok(0),
                },
            };
            if let Some(status) = task.advance(disk, result) {
                return status;
            }
        }
    }

    fn read_qcow2(
        &mut self,
        task: &Task,
        offset: u64,
        left: u64,
        memory: &GuestMemory,
        disk: &Disk,
    ) -> Result<usize, i32> {
        self.bounce.resize(BOUNCE, 0);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(BOUNCE);
        let buffer = &mut self.bounce[..len];
        disk.image.read(offset, buffer).map_err(|error| {
            guest_warn!(disk.log, "Disk {}: reading {len} bytes at {offset}: {error}", disk.name);
            error
                .raw_os_error()
                .filter(|errno| *errno != libc::EINTR && *errno != libc::EAGAIN)
                .unwrap_or(libc::EIO)
        })?;
        // The buffer was RAM when the chain was popped, so only a change of the memory map can have removed it.
        queue::write(memory, task.incoming(), offset - task.first_byte(), buffer)
            .map_err(|_| libc::EFAULT)?;
        Ok(len)
    }

    /// Moves the next part of a request through the aligned buffer.
    fn transfer(
        &mut self,
        task: &Task,
        transfer: Transfer,
        (direct, file): (&Direct, &std::fs::File),
        memory: &GuestMemory,
        disk: &Disk,
    ) -> Result<usize, i32> {
        let alignment = direct.memory_alignment;
        let buffer = self.aligned.get_or_insert_with(|| AlignedBuffer::new(BUFFER_BYTES, alignment)).bytes();
        let piece = Piece::new(direct, transfer.offset, transfer.len);
        // The buffer was RAM when the chain was popped, so only a change of the memory map can have removed it.
        let gone = |_| std::io::Error::from_raw_os_error(libc::EFAULT);
        let moved = match transfer.write {
            None => piece.read(direct, buffer).and_then(|bytes| {
                queue::write(memory, task.incoming(), transfer.done, bytes).map_err(gone)?;
                Ok(bytes.len())
            }),
            Some(durable) => piece.write(direct, file, durable, buffer, |bytes| {
                queue::read(memory, task.outgoing(), transfer.done, bytes).map_err(gone)
            }),
        };
        disk.counters.bounced.increment();
        moved.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Executes one system call.
pub(super) fn perform(op: Op) -> Result<usize, i32> {
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
        Op::Discard { fd, offset, len } => {
            let range = [offset, len];
            // SAFETY: `fd` is open; the request reads two 64-bit numbers, which live until the return.
            unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) as isize }
        }
    };
    usize::try_from(result).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
