//! One request in progress: its next system call, and the meaning of the result. Independent of io_uring and threads; both engines drive
//! it.
//!
//! ```text
//! Task::start ─▶ Running(task) ── op() ─▶ engine executes ─▶ advance(result) ─▶ None: next op()
//!            └─▶ Done(status)                                                └─▶ Some(status)
//! ```

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use machine::memory::{GuestAddress, GuestMemory};
use telemetry::guest_warn;

use super::disk::Disk;
use super::gate::{Claim, Ticket};
use super::image::Backend;
use super::request::{ID_BYTES, Operation, Range, Request, Status};
use crate::queue::{self, GuestIoVecs, RingError, Segment, mark_written, total_len};

/// Bytes of a page of the page cache.
const PAGE_BYTES: u64 = 4096;
/// Limit of entries in a vectored request (`UIO_MAXIOV`).
const MAX_VECS: usize = 1024;
/// Zeroes to write where a file system can't zero a range.
static ZEROES: [u8; 256 << 10] = [0; 256 << 10];
/// Limit of interruptions of a call in a row, after which it has failed.
const MAX_RETRIES: u32 = 1000;

/// A system call on a raw image. Pointers and descriptors stay valid while the task lives.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Readv {
        fd: RawFd,
        vecs: *const libc::iovec,
        count: u32,
        offset: u64,
    },
    Writev {
        fd: RawFd,
        vecs: *const libc::iovec,
        count: u32,
        offset: u64,
        durable: bool,
    },
    /// A write from static memory.
    WriteStatic {
        fd: RawFd,
        data: &'static [u8],
        offset: u64,
    },
    DataSync {
        fd: RawFd,
    },
    Fallocate {
        fd: RawFd,
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// BLKDISCARD of a block device, which io_uring lacks on older kernels.
    Discard {
        fd: RawFd,
        offset: u64,
        len: u64,
    },
}

/// The rest of a request that needs a bounce buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    /// First byte of the disk.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of this rest in the guest's buffers, bytes.
    pub done: u64,
    /// `None`: a read. `Some`: a write, and whether it is durable before it completes.
    pub write: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Read {
        offset: u64,
    },
    /// Read zeroes behind the image's content.
    Pad {
        offset: u64,
    },
    Write {
        offset: u64,
        durable: bool,
    },
    Sync,
    /// Deallocate space by the device's own discard; may fail silently.
    Discard {
        range: Range,
    },
    /// Punch a hole; may fail silently unless `zeroing`.
    Punch {
        range: Range,
        zeroing: bool,
    },
    Zero {
        range: Range,
    },
    /// Zero by writing, from `start + done` on.
    Overwrite {
        range: Range,
        done: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Other,
}

/// A request in progress.
pub(super) struct Task {
    head: u16,
    status: GuestAddress,
    kind: Kind,
    /// First byte on the disk, and length in bytes, for the log.
    place: (u64, u64),
    /// First byte, and byte after the last one, of all ranges of the request.
    hull: (u64, u64),
    /// Guest buffers for a read.
    incoming: Vec<Segment>,
    /// Guest buffers of a write that needs a bounce buffer.
    outgoing: Vec<Segment>,
    /// Needs a bounce buffer: `O_DIRECT`, and not aligned.
    bounced: bool,
    /// Its claim in the disk's gate.
    ticket: Option<Ticket>,
    /// Guest memory that is still to be moved.
    vecs: Option<GuestIoVecs>,
    /// Remaining steps, the next one last.
    steps: Vec<Step>,
    retries: u32,
    /// Length of the writable buffers before the status byte, bytes.
    writable: u32,
}

/// Result of starting a chain.
pub(super) enum Start {
    /// System calls follow.
    Running(Box<Task>),
    /// Only [`Task::finish`] is left.
    Done(Box<Task>, Status),
}

impl Task {
    /// A task without steps.
    fn new(head: u16, status: GuestAddress, writable: u32) -> Self {
        Self {
            head,
            status,
            kind: Kind::Other,
            place: (0, 0),
            hull: (0, 0),
            incoming: Vec::new(),
            outgoing: Vec::new(),
            bounced: false,
            ticket: None,
            vecs: None,
            steps: Vec::new(),
            retries: 0,
            writable,
        }
    }

    /// Starts a parsed request.
    pub(super) fn start(
        request: Request,
        memory: &Arc<GuestMemory>,
        disk: &Disk,
    ) -> Result<Start, RingError> {
        let mut task = Box::new(Self::new(request.head, request.status, request.writable));
        let done = |task, status| Ok(Start::Done(task, status));
        match request.operation {
            Operation::Read { offset, data } => {
                task.kind = Kind::Read;
                task.place = (offset, total_len(&data));
                if task.place.1 > 0 {
                    if matches!(disk.backend(), Backend::Raw { .. }) {
                        task.set_vecs(GuestIoVecs::new(memory, &data)?, disk);
                    }
                    task.steps.push(Step::Read { offset });
                }
                task.incoming = data;
            }
            Operation::Write { offset, data } => {
                task.kind = Kind::Write;
                task.place = (offset, total_len(&data));
                if task.place.1 > 0 {
                    task.set_vecs(GuestIoVecs::new(memory, &data)?, disk);
                    task.steps.push(Step::Write { offset, durable: disk.write_through() });
                }
                task.outgoing = data;
            }
            Operation::Flush => {
                task.kind = Kind::Flush;
                // A read-only disk has no writes to flush.
                if !disk.limits.read_only {
                    task.steps.push(Step::Sync);
                }
            }
            Operation::Discard(ranges) => {
                task.kind = Kind::Discard;
                let ranges = match disk.image.device_discard {
                    Some(unit) => whole_units(ranges, unit),
                    None => ranges,
                };
                task.set_ranges(ranges, disk, |range| match disk.image.device_discard {
                    Some(_) => Step::Discard { range },
                    None => Step::Punch { range, zeroing: false },
                });
            }
            Operation::WriteZeroes(ranges) => {
                task.kind = Kind::WriteZeroes;
                let punch = disk.image.can_punch;
                let write = disk.zeroes_by_writing();
                task.set_ranges(ranges, disk, |range| match range.unmap && punch {
                    true => Step::Punch { range, zeroing: true },
                    false if write => Step::Overwrite { range, done: 0 },
                    false => Step::Zero { range },
                });
            }
            Operation::GetId { data } => {
                task.write_serial(&data, memory, disk)?;
                return done(task, Status::Ok);
            }
            Operation::Refuse { status, reason } => {
                guest_warn!(disk.log, "Disk {}: a request was refused: {reason}", disk.name);
                return done(task, status);
            }
        }
        if task.steps.is_empty() { done(task, Status::Ok) } else { Ok(Start::Running(task)) }
    }

    /// Writes the disk's serial number into the guest's buffer, cut to its length.
    fn write_serial(&mut self, data: &[Segment], memory: &GuestMemory, disk: &Disk) -> Result<(), RingError> {
        let len = usize::try_from(total_len(data)).unwrap_or(usize::MAX).min(disk.serial.len());
        queue::write(memory, data, 0, &disk.serial[..len])?;
        if total_len(data) > disk.serial.len() as u64 {
            // There is a gap before the status byte, so `finish` reports only the bytes before the gap.
            self.writable = u32::try_from(ID_BYTES).unwrap_or(1).saturating_sub(1);
        }
        Ok(())
    }

    fn set_vecs(&mut self, vecs: GuestIoVecs, disk: &Disk) {
        let (offset, len) = self.place;
        self.hull = (offset, offset + len);
        self.bounced = disk.direct().is_some_and(|direct| !direct.takes(vecs.as_slice(), offset));
        self.vecs = Some(vecs);
    }

    fn set_ranges(&mut self, ranges: Vec<Range>, disk: &Disk, step: impl Fn(Range) -> Step) {
        self.place = (
            ranges.first().map_or(0, |range| range.start),
            ranges.iter().map(|range| range.len).fold(0, u64::saturating_add),
        );
        let ends = ranges.iter().map(|range| range.start + range.len);
        self.hull = (ranges.iter().map(|range| range.start).min().unwrap_or(0), ends.max().unwrap_or(0));
        // Zeroes are written through the page cache; none of their pages may be written back later over data of `O_DIRECT`.
        let cached = self.kind == Kind::WriteZeroes && disk.direct().is_some() && disk.zeroes_by_writing();
        if (disk.write_through() || cached) && !ranges.is_empty() {
            self.steps.push(Step::Sync);
        }
        self.steps.extend(ranges.into_iter().rev().map(step));
    }

    /// The claim that the request needs in [`Disk::gate`] while it is in progress, if the disk uses `O_DIRECT`.
    pub(super) fn claim(&self, disk: &Disk) -> Option<Claim> {
        let direct = disk.direct()?;
        let exclusive = match self.kind {
            Kind::Write => self.bounced,
            Kind::Discard => false,
            Kind::WriteZeroes => disk.zeroes_by_writing(),
            Kind::Read | Kind::Flush | Kind::Other => return None,
        };
        let (begin, end) = direct.blocks(self.hull.0, self.hull.1 - self.hull.0);
        // Writes through the page cache affect whole pages.
        let page = if exclusive { PAGE_BYTES } else { 1 };
        Some(Claim { begin: begin / page * page, end: end.next_multiple_of(page), exclusive })
    }

    /// Keeps the ticket of [`Task::claim`] until the request is complete.
    pub(super) fn hold(&mut self, ticket: Ticket) {
        self.ticket = Some(ticket);
    }

    /// Whether the request needs a bounce buffer.
    pub(super) fn is_bounced(&self) -> bool {
        self.bounced
    }

    /// The next part of a request that needs a bounce buffer; `None` for other requests and steps.
    pub(super) fn transfer(&self) -> Option<Transfer> {
        let (offset, write) = match *self.steps.last()? {
            Step::Read { offset } => (offset, None),
            Step::Write { offset, durable } => (offset, Some(durable)),
            _ => return None,
        };
        let done = offset - self.place.0;
        self.bounced.then_some(Transfer { offset, len: self.place.1 - done, done, write })
    }

    /// The next system call on a raw image; `None` for other images.
    pub(super) fn op(&self, disk: &Disk) -> Option<Op> {
        let Backend::Raw { file, direct } = disk.backend() else { return None };
        let fd = file.as_raw_fd();
        let vectored = |offset| {
            let vecs = self.vecs.as_ref().map_or(&[][..], GuestIoVecs::as_slice);
            let vecs = &vecs[..vecs.len().min(MAX_VECS)];
            let fd = match direct {
                // The rest after a short read or write may be unaligned.
                Some(direct) if direct.takes(vecs, offset) => direct.file.as_raw_fd(),
                _ => fd,
            };
            (fd, vecs.as_ptr(), u32::try_from(vecs.len()).unwrap_or(0))
        };
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        Some(match *self.steps.last()? {
            Step::Read { offset } => {
                let (fd, vecs, count) = vectored(offset);
                Op::Readv { fd, vecs, count, offset }
            }
            Step::Write { offset, durable } => {
                let (fd, vecs, count) = vectored(offset);
                Op::Writev { fd, vecs, count, offset, durable }
            }
            Step::Pad { .. } => {
                let (_, vecs, count) = vectored(0);
                Op::Readv { fd: disk.image.padding.as_ref()?.as_raw_fd(), vecs, count, offset: 0 }
            }
            Step::Sync => Op::DataSync { fd },
            Step::Discard { range } => Op::Discard { fd, offset: range.start, len: range.len },
            Step::Punch { range, .. } => {
                Op::Fallocate { fd, mode: punch, offset: range.start, len: range.len }
            }
            Step::Zero { range } => Op::Fallocate { fd, mode: zero, offset: range.start, len: range.len },
            Step::Overwrite { range, done } => overwrite(fd, range, done),
        })
    }

    /// The rest of a read: its offset on the disk and in [`Task::incoming`]. For images that aren't raw.
    pub(super) fn pending_read(&self) -> Option<(u64, u64)> {
        match self.steps.last()? {
            Step::Read { offset } => Some((*offset, self.place.0 + self.place.1 - offset)),
            _ => None,
        }
    }

    /// Guest buffers for a read's data.
    pub(super) fn incoming(&self) -> &[Segment] {
        &self.incoming
    }

    /// Guest buffers with a write's data.
    pub(super) fn outgoing(&self) -> &[Segment] {
        &self.outgoing
    }

    /// First byte on the disk.
    pub(super) fn first_byte(&self) -> u64 {
        self.place.0
    }

    /// Processes the result of the last [`Task::op`]: bytes or zero, or an errno. `None`: more calls follow.
    pub(super) fn advance(&mut self, disk: &Disk, result: Result<usize, i32>) -> Option<Status> {
        let status = self.after(disk, result);
        if status.is_some() {
            self.ticket = None;
        }
        status
    }

    fn after(&mut self, disk: &Disk, result: Result<usize, i32>) -> Option<Status> {
        let Some(step) = self.steps.last().copied() else { return Some(Status::Ok) };
        // A failed call may have changed a part as well.
        match step {
            Step::Write { offset, .. } => disk.written.note(offset, self.place.0 + self.place.1 - offset),
            Step::Punch { range, .. }
            | Step::Discard { range }
            | Step::Zero { range }
            | Step::Overwrite { range, .. } => {
                disk.written.note(range.start, range.len);
            }
            Step::Read { .. } | Step::Pad { .. } | Step::Sync => {}
        }
        let moved = match result {
            Ok(moved) => moved,
            Err(libc::EINTR | libc::EAGAIN) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                return None;
            }
            // EINVAL: not possible at this offset, as on a device with a granularity of its own.
            Err(errno @ (libc::EOPNOTSUPP | libc::EINVAL))
                if matches!(step, Step::Punch { .. } | Step::Zero { .. } | Step::Discard { .. }) =>
            {
                return self.without_fallocate(disk, step, errno);
            }
            Err(errno) => return Some(self.failed(disk, errno)),
        };
        self.retries = 0;
        match step {
            Step::Read { offset } | Step::Pad { offset } | Step::Write { offset, .. } => {
                let end = self.place.0 + self.place.1;
                let moved = u64::try_from(moved).unwrap_or(u64::MAX).min(end - offset);
                if moved == 0 {
                    if matches!(step, Step::Read { .. })
                        && disk.image.padding.is_some()
                        && offset >= disk.image.content_bytes
                    {
                        return self.replace(Step::Pad { offset });
                    }
                    // The image was truncated by another process.
                    return Some(self.failed(disk, libc::EIO));
                }
                if offset + moved < end {
                    if let Some(vecs) = &mut self.vecs {
                        vecs.advance(usize::try_from(moved).unwrap_or(usize::MAX));
                    }
                    let offset = offset + moved;
                    let rest = match step {
                        Step::Write { durable, .. } => Step::Write { offset, durable },
                        Step::Pad { .. } => Step::Pad { offset },
                        _ => Step::Read { offset },
                    };
                    return self.replace(rest);
                }
            }
            Step::Overwrite { range, done } => {
                if moved == 0 {
                    return Some(self.failed(disk, libc::EIO));
                }
                let done = done.saturating_add(u64::try_from(moved).unwrap_or(u64::MAX));
                if done < range.len {
                    return self.replace(Step::Overwrite { range, done });
                }
            }
            Step::Sync | Step::Punch { .. } | Step::Discard { .. } | Step::Zero { .. } => {}
        }
        self.next()
    }

    fn replace(&mut self, step: Step) -> Option<Status> {
        self.steps.pop();
        self.steps.push(step);
        None
    }

    fn next(&mut self) -> Option<Status> {
        self.steps.pop();
        self.steps.is_empty().then_some(Status::Ok)
    }

    fn without_fallocate(&mut self, disk: &Disk, step: Step, errno: i32) -> Option<Status> {
        match step {
            Step::Punch { range, zeroing: true } => self.replace(Step::Zero { range }),
            Step::Zero { range } => {
                if errno == libc::EOPNOTSUPP {
                    disk.zero_by_writing();
                }
                self.replace(Step::Overwrite { range, done: 0 })
            }
            // A discard is a hint.
            _ => self.next(),
        }
    }

    fn failed(&self, disk: &Disk, errno: i32) -> Status {
        let (offset, len) = self.place;
        guest_warn!(
            disk.log,
            "Disk {}: {:?} of {len} bytes at {offset} failed: {}",
            disk.name,
            self.kind,
            std::io::Error::from_raw_os_error(errno)
        );
        Status::IoError
    }

    /// Completes the request: writes the status byte, marks written buffers as dirty, and counts. Returns the used element: the head of the
    /// chain and the number of bytes written to it.
    pub(super) fn finish(
        &self,
        status: Status,
        memory: &GuestMemory,
        disk: &Disk,
    ) -> Result<(u16, u32), RingError> {
        mark_written(memory, &self.incoming, total_len(&self.incoming));
        queue::write(memory, &[Segment { address: self.status, len: 1 }], 0, &[status as u8])?;
        let counters = &disk.counters;
        let bytes = self.place.1;
        match (status, self.kind) {
            (Status::Ok, Kind::Read) => {
                counters.reads_completed.increment();
                counters.read_bytes.add(bytes);
            }
            (Status::Ok, Kind::Write) => {
                counters.writes_completed.increment();
                counters.written_bytes.add(bytes);
            }
            (Status::Ok, Kind::Flush) => counters.flushes.increment(),
            (Status::Ok, Kind::Discard) => counters.discards.increment(),
            (Status::Ok, Kind::WriteZeroes) => counters.write_zeroes.increment(),
            (Status::Ok, Kind::Other) => {}
            _ => counters.errors.increment(),
        }
        // Virtio 1.2, 2.7.8: the length counts from the first writable byte. It includes the status byte only if all bytes before it were
        // written as well.
        let whole = status == Status::Ok || self.writable == 0;
        Ok((self.head, if whole { self.writable.saturating_add(1) } else { 0 }))
    }
}

fn overwrite(fd: RawFd, range: Range, done: u64) -> Op {
    let left = usize::try_from(range.len.saturating_sub(done)).unwrap_or(usize::MAX);
    Op::WriteStatic { fd, data: &ZEROES[..left.min(ZEROES.len())], offset: range.start + done }
}

/// The whole units in each range; a device refuses a discard of partial ones.
fn whole_units(ranges: Vec<Range>, unit: u64) -> Vec<Range> {
    let whole = |range: Range| {
        let start = range.start.next_multiple_of(unit);
        let end = (range.start + range.len) / unit * unit;
        (start < end).then(|| Range { start, len: end - start, ..range })
    };
    ranges.into_iter().filter_map(whole).collect()
}
