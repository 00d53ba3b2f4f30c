//! Copying to and from lists of guest buffers, and passing them to the kernel without a copy.
#![allow(unsafe_code)] // An iovec is a raw pointer; `Send` for it needs a promise.

use std::sync::Arc;

use machine::memory::{Address, Bitmap, Bytes, GuestMemory, GuestMemoryBackend};

use super::chain::{Segment, part, total_len};
use super::error::RingError;

/// Copies `out.len()` bytes from `offset` of a list of guest buffers. Reads each byte once.
pub fn read(
    memory: &GuestMemory,
    segments: &[Segment],
    offset: u64,
    out: &mut [u8],
) -> Result<(), RingError> {
    let parts = exactly(segments, offset, out.len())?;
    let mut rest = out;
    for segment in parts {
        let (now, later) = rest.split_at_mut(usize::try_from(segment.len).unwrap_or(usize::MAX));
        memory
            .read_slice(now, segment.address)
            .map_err(|_| RingError::MemoryGone { address: segment.address.raw_value() })?;
        rest = later;
    }
    Ok(())
}

/// Copies `data` to `offset` of a list of guest buffers and marks the pages dirty.
pub fn write(memory: &GuestMemory, segments: &[Segment], offset: u64, data: &[u8]) -> Result<(), RingError> {
    let parts = exactly(segments, offset, data.len())?;
    let mut rest = data;
    for segment in parts {
        let (now, later) = rest.split_at(usize::try_from(segment.len).unwrap_or(usize::MAX));
        memory
            .write_slice(now, segment.address)
            .map_err(|_| RingError::MemoryGone { address: segment.address.raw_value() })?;
        rest = later;
    }
    Ok(())
}

fn exactly(segments: &[Segment], offset: u64, len: usize) -> Result<Vec<Segment>, RingError> {
    let len = u64::try_from(len).unwrap_or(u64::MAX);
    part(segments, offset, len)
        .ok_or_else(|| RingError::Short { have: total_len(segments).saturating_sub(offset), want: len })
}

/// Marks the first `len` bytes of a list of guest buffers as dirty, after the kernel wrote them through [`GuestIoVecs`]. Skips buffers that
/// aren't RAM any more, which a migration needn't copy.
pub fn mark_written(memory: &GuestMemory, segments: &[Segment], len: u64) {
    let mut left = len;
    for segment in segments {
        if left == 0 {
            return;
        }
        let now = left.min(u64::from(segment.len));
        left -= now;
        for slice in
            GuestMemoryBackend::get_slices(memory, segment.address, usize::try_from(now).unwrap_or(0))
        {
            let Ok(slice) = slice else { break };
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }
}

/// A list of guest buffers as an iovec (`readv`, io_uring). It holds the guest memory, so its pointers stay mapped while it lives.
#[derive(Debug)]
pub struct GuestIoVecs {
    vecs: Vec<libc::iovec>,
    /// Never read: keeps the mapping alive.
    _memory: Arc<GuestMemory>,
}

// SAFETY: The pointers are to guest RAM, which is shared with the guest's CPUs anyway and is mapped for as
// long as `_memory` is held; nothing in this process makes Rust references to it.
unsafe impl Send for GuestIoVecs {}

impl GuestIoVecs {
    /// Translates a list of buffers. A buffer that crosses from one memory region to the next becomes several entries.
    pub fn new(memory: &Arc<GuestMemory>, segments: &[Segment]) -> Result<Self, RingError> {
        let mut vecs = Vec::with_capacity(segments.len());
        for segment in segments {
            let gone = RingError::MemoryGone { address: segment.address.raw_value() };
            let Ok(len) = usize::try_from(segment.len) else { return Err(gone) };
            for slice in GuestMemoryBackend::get_slices(&**memory, segment.address, len) {
                let Ok(slice) = slice else { return Err(gone) };
                let base = slice.ptr_guard_mut().as_ptr();
                vecs.push(libc::iovec { iov_base: base.cast(), iov_len: slice.len() });
            }
        }
        Ok(Self { vecs, _memory: Arc::clone(memory) })
    }

    /// The entries. They point to guest memory: only the kernel may access it, while `self` lives.
    pub fn as_slice(&self) -> &[libc::iovec] {
        &self.vecs
    }

    /// Number of remaining bytes.
    pub fn total(&self) -> usize {
        self.vecs.iter().map(|vec| vec.iov_len).sum()
    }

    /// Drops the first `done` bytes, to continue after a short read or write.
    pub fn advance(&mut self, done: usize) {
        let mut left = done;
        let mut whole = 0;
        for vec in &mut self.vecs {
            if left < vec.iov_len {
                // SAFETY: `left` is less than the entry's length, so the result stays inside its RAM.
                vec.iov_base = unsafe { vec.iov_base.cast::<u8>().add(left) }.cast();
                vec.iov_len -= left;
                break;
            }
            left -= vec.iov_len;
            whole += 1;
        }
        self.vecs.drain(..whole);
    }
}
