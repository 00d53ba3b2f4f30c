//! One frame as an iovec for the kernel: guest buffers (and a spill buffer of the host's) without a copy.
#![allow(unsafe_code)] // Vectored I/O on guest memory: rustix takes Rust slices, which guest memory can't be.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::queue::{GuestIoVecs, Segment};

/// Limit of entries in a vectored call (`UIO_MAXIOV`).
const IOVECS_MAX: usize = 1024;

fn entry(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

fn transferred(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The allocation of a [`FrameSink`], kept between two frames.
#[derive(Default)]
pub struct Storage(Vec<libc::iovec>);

// SAFETY: It is empty: the pointers of the last frame were cleared.
unsafe impl Send for Storage {}

/// Destination of a frame from the host: guest buffers in order, then the host's spill buffer for the rest.
pub struct FrameSink<'a> {
    /// Entry 0 is reserved for the backend's header.
    vecs: Vec<libc::iovec>,
    guest: usize,
    spill: usize,
    /// The guest memory and the spill buffer that `vecs` points into.
    _lent: PhantomData<&'a mut [u8]>,
}

impl<'a> FrameSink<'a> {
    /// Guest buffers `parts` without their first `skip` bytes, then `spill`. `storage` is an allocation to reuse.
    pub fn new(
        storage: Storage,
        parts: impl Iterator<Item = &'a GuestIoVecs>,
        skip: usize,
        spill: &'a mut [u8],
    ) -> Self {
        let mut vecs = storage.0;
        vecs.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
        let (mut skip, mut guest) = (skip, 0);
        // Two entries are reserved for the header and the spill buffer.
        for vec in parts.flat_map(|part| part.as_slice()) {
            if vecs.len() > IOVECS_MAX - 2 {
                break;
            }
            let now = skip.min(vec.iov_len);
            skip -= now;
            if now == vec.iov_len {
                continue;
            }
            // SAFETY: `now` is less than the entry's length, so the result stays inside the same buffer.
            let base = unsafe { vec.iov_base.cast::<u8>().add(now) };
            vecs.push(libc::iovec { iov_base: base.cast(), iov_len: vec.iov_len - now });
            guest += vec.iov_len - now;
        }
        vecs.push(entry(spill));
        Self { vecs, guest, spill: spill.len(), _lent: PhantomData }
    }

    /// Capacity of the guest buffers, bytes; the rest of a frame goes to the spill buffer.
    pub fn guest_capacity(&self) -> usize {
        self.guest
    }

    /// Total capacity, bytes.
    pub fn capacity(&self) -> usize {
        self.guest + self.spill
    }

    /// Reads one message: `header.len()` bytes to `header`, the rest to the buffers. Returns the total number of bytes.
    pub fn read_from(&mut self, fd: BorrowedFd<'_>, header: &mut [u8]) -> io::Result<usize> {
        self.vecs[0] = entry(header);
        let count = libc::c_int::try_from(self.vecs.len()).unwrap_or(0);
        // SAFETY: every entry points to memory that is lent to `self` or is `header`, all valid for writes of
        // its length; guest memory has no Rust references.
        let result = unsafe { libc::readv(fd.as_raw_fd(), self.vecs.as_ptr(), count) };
        self.vecs[0] = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        transferred(result)
    }

    /// Copies a frame from host memory; false, with nothing written, when it doesn't fit.
    pub fn fill(&mut self, frame: &[u8]) -> bool {
        if frame.len() > self.capacity() {
            return false;
        }
        let mut rest = frame;
        for vec in &self.vecs[1..] {
            let (now, later) = rest.split_at(rest.len().min(vec.iov_len));
            // SAFETY: the entry is valid for writes of its length, which `now` doesn't exceed; guest memory
            // and the spill buffer are disjoint from the backend's own buffer that `frame` lies in.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), vec.iov_base.cast(), now.len()) };
            rest = later;
        }
        true
    }

    /// Copies a frame from memory that others may write concurrently; false, with nothing written, when it doesn't fit.
    ///
    /// # Safety
    /// Each part is an address with as many readable bytes during this call, and none is in the guest memory of this sink.
    pub unsafe fn gather(&mut self, parts: &[(*const u8, usize)]) -> bool {
        if parts.iter().map(|(_, len)| *len).sum::<usize>() > self.capacity() {
            return false;
        }
        let mut places = self.vecs[1..].iter();
        let (mut to, mut room) = (std::ptr::null_mut::<u8>(), 0);
        for (from, len) in parts {
            let (mut from, mut len) = (*from, *len);
            while len > 0 {
                if room == 0 {
                    let Some(place) = places.next() else { return false };
                    (to, room) = (place.iov_base.cast(), place.iov_len);
                    continue;
                }
                let now = len.min(room);
                // SAFETY: `now` bytes are readable by the caller's contract, and writable since the entry is lent to `self`; both pointers
                // stay within or at the end of their memory.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, to, now);
                    (from, to) = (from.add(now), to.add(now));
                }
                (len, room) = (len - now, room - now);
            }
        }
        true
    }

    /// Completes a partial checksum. The Internet checksum (RFC 1071) of the `length - start` bytes from `start` on goes to `start +
    /// offset`, where the sender has stored the sum of the pseudo-header. False when that isn't in a frame of `length` bytes.
    pub fn finish_checksum(&mut self, length: usize, start: usize, offset: usize) -> bool {
        let Some(place) =
            start.checked_add(offset).filter(|at| at.checked_add(2).is_some_and(|end| end <= length))
        else {
            return false;
        };
        let mut sum = 0_u64;
        self.walk(start, length, |at, byte| {
            sum += u64::from(*byte) << if (at - start).is_multiple_of(2) { 8 } else { 0 };
        });
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let sum = u16::try_from(sum).unwrap_or(0);
        // All ones is equivalent, and zero means no checksum (UDP).
        let check = if sum == 0xffff { 0xffff } else { !sum };
        let mut bytes = check.to_be_bytes().into_iter();
        self.walk(place, place + 2, |_, byte| {
            if let Some(value) = bytes.next() {
                *byte = value;
            }
        });
        true
    }

    /// Copies the first bytes of the received frame.
    pub fn copy_head(&mut self, out: &mut [u8]) {
        self.walk(0, out.len(), |at, byte| out[at] = *byte);
    }

    /// Visits the frame's bytes in `start..end`, with their offsets.
    fn walk(&mut self, start: usize, end: usize, mut visit: impl FnMut(usize, &mut u8)) {
        let mut at = 0;
        for vec in &self.vecs[1..] {
            let from = start.clamp(at, at + vec.iov_len);
            let to = end.clamp(at, at + vec.iov_len);
            for number in from..to {
                // SAFETY: `number` lies in this entry, which is valid for reads and writes. The guest may write the byte meanwhile, so it
                // is read once, and written once if it was changed.
                unsafe {
                    let place = vec.iov_base.cast::<u8>().add(number - at);
                    let before = place.read_volatile();
                    let mut byte = before;
                    visit(number, &mut byte);
                    if byte != before {
                        place.write_volatile(byte);
                    }
                }
            }
            at += vec.iov_len;
        }
    }

    /// Returns the allocation for reuse.
    pub fn into_storage(mut self) -> Storage {
        self.vecs.clear();
        Storage(self.vecs)
    }
}

/// A frame of the guest, in guest memory.
pub struct FrameSource<'a> {
    frame: &'a GuestIoVecs,
    segments: &'a [Segment],
    length: usize,
}

impl<'a> FrameSource<'a> {
    /// The frame in `frame` and `segments`, which are the same bytes; `None` when it has too many pieces for one call.
    pub fn new(frame: &'a GuestIoVecs, segments: &'a [Segment]) -> Option<Self> {
        (frame.as_slice().len() < IOVECS_MAX).then(|| Self { frame, segments, length: frame.total() })
    }

    /// Its guest memory.
    pub fn segments(&self) -> &[Segment] {
        self.segments
    }

    /// Copies its first bytes; returns their number.
    pub fn copy_head(&self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for vec in self.frame.as_slice() {
            let now = vec.iov_len.min(out.len() - done);
            // SAFETY: `now` bytes lie inside the entry's guest memory, and `out` has room for them. The guest may write meanwhile:
            // the bytes are then any bytes, which a frame may be.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    vec.iov_base.cast::<u8>().cast_const(),
                    out[done..].as_mut_ptr(),
                    now,
                );
            }
            done += now;
        }
        done
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Writes `prefix` and the frame with one call. Returns the number of bytes of both that were accepted.
    pub fn write_to(&self, fd: BorrowedFd<'_>, prefix: &[u8]) -> io::Result<usize> {
        let mut vecs = Vec::with_capacity(1 + self.frame.as_slice().len());
        vecs.push(libc::iovec { iov_base: prefix.as_ptr().cast_mut().cast(), iov_len: prefix.len() });
        vecs.extend_from_slice(self.frame.as_slice());
        let count = libc::c_int::try_from(vecs.len()).unwrap_or(0);
        // SAFETY: the kernel only reads; `prefix` and the guest memory that `frame` holds are valid for reads.
        transferred(unsafe { libc::writev(fd.as_raw_fd(), vecs.as_ptr(), count) })
    }

    /// Writes `prefix` and the frame to a stream socket; a closed reader is an error, not a signal.
    pub fn send_to(&self, fd: BorrowedFd<'_>, prefix: &[u8]) -> io::Result<usize> {
        let mut vecs = Vec::with_capacity(1 + self.frame.as_slice().len());
        vecs.push(libc::iovec { iov_base: prefix.as_ptr().cast_mut().cast(), iov_len: prefix.len() });
        vecs.extend_from_slice(self.frame.as_slice());
        // SAFETY: msghdr is plain data, for which zero is a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vecs.as_mut_ptr();
        message.msg_iovlen = vecs.len();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the kernel only reads; `prefix` and the guest memory that `frame` holds are valid for reads.
        transferred(unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) })
    }

    /// Appends the frame from byte `skip` on to `out`.
    pub fn copy_to(&self, skip: usize, out: &mut Vec<u8>) {
        let mut skip = skip;
        for vec in self.frame.as_slice() {
            let now = skip.min(vec.iov_len);
            skip -= now;
            let (at, count) = (out.len(), vec.iov_len - now);
            out.resize(at + count, 0);
            // SAFETY: `count` bytes from `now` on lie inside the entry's guest memory, and `out` was just grown
            // by as much. The guest may write meanwhile: the bytes are then any bytes, which a frame may be.
            unsafe {
                let from = vec.iov_base.cast::<u8>().cast_const().add(now);
                std::ptr::copy_nonoverlapping(from, out[at..].as_mut_ptr(), count);
            }
        }
    }
}
