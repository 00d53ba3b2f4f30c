//! A second view of guest memory that makes scattered pages contiguous. An RDMA device of the host registers memory by address and length,
//! and so needs it.

#![allow(unsafe_code)] // Maps memory a second time; nothing here hands out a pointer that is dereferenced elsewhere.

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;
/// Limit of runs of contiguous pages in a view. Each run is a mapping while the view exists, and Linux allows a process 65,530 mappings by
/// default.
pub const MOST_RUNS: usize = 32_768;

/// Memory can't be mapped a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AliasError {
    /// This memory isn't mapped from a file.
    #[error("This guest memory isn't mapped from a memfd, so that there can't be a second view of it")]
    NotMapped,
    /// The pieces don't follow each other page by page.
    #[error(
        "The {len:#x} bytes at {address:#x} don't begin and end with pages, as those of a memory region do"
    )]
    Shape {
        /// Guest address of the piece.
        address: u64,
        /// Length of the piece, bytes.
        len: u64,
    },
    /// Part of the memory is not present yet: a device that pinned it would read zeros there.
    #[error("Part of this guest's memory is still to come from the host that it has left")]
    Late,
    /// Not the guest's memory, or not writable.
    #[error("The {len:#x} bytes at {address:#x} aren't memory of the guest that may be written")]
    Fault {
        /// Guest address of the piece.
        address: u64,
        /// Length of the piece, bytes.
        len: u64,
    },
    /// More pieces than [`MOST_RUNS`].
    #[error("The region has {0} runs of contiguous pages; a host's RDMA device is given {MOST_RUNS} at most")]
    TooScattered(usize),
    /// The kernel refused.
    #[error("The kernel refused a second view of {bytes:#x} bytes of guest memory")]
    Kernel {
        /// Size of the view, bytes.
        bytes: usize,
        /// The kernel's error.
        #[source]
        source: Errno,
    },
}

/// The view. Dropping it unmaps it; pages that a device has pinned stay allocated until the device releases them.
#[derive(Debug)]
pub struct Alias {
    base: *mut u8,
    mapped: usize,
    first: usize,
    len: usize,
}

// SAFETY: shared memory that lives as long as the view; accesses through it are raw copies that tolerate concurrent access.
unsafe impl Send for Alias {}

impl Alias {
    /// Maps the pieces (guest address, length) in order. `find` returns the host address of a guest address, and the number of writable
    /// bytes that follow it there. All pieces but the first begin at a page, all but the last end at one.
    pub(crate) fn map(
        pieces: &[(u64, u64)],
        find: impl Fn(u64) -> Option<(*mut u8, u64)>,
    ) -> Result<Self, AliasError> {
        if pieces.len() > MOST_RUNS {
            return Err(AliasError::TooScattered(pieces.len()));
        }
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let (mut len, mut total) = (0u64, 0u64);
        for (index, &(address, piece)) in pieces.iter().enumerate() {
            let shape = AliasError::Shape { address, len: piece };
            let end = address.checked_add(piece).filter(|_| piece > 0).ok_or(shape)?;
            let aligned = (index == 0 || address.is_multiple_of(PAGE))
                && (index + 1 == pieces.len() || end.is_multiple_of(PAGE));
            let from = address - address % PAGE;
            let to = end.checked_next_multiple_of(PAGE).filter(|_| aligned).ok_or(shape)?;
            runs.push((from, to - from));
            len = len.checked_add(piece).ok_or(shape)?;
            total = total.checked_add(to - from).ok_or(shape)?;
        }
        let &(address, _) = pieces.first().ok_or(AliasError::Shape { address: 0, len: 0 })?;
        let shape = AliasError::Shape { address, len };
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| shape);
        let (mapped, first, len) = (size(total)?, size(address % PAGE)?, size(len)?);
        let kernel = |source| AliasError::Kernel { bytes: mapped, source };
        // SAFETY: new pages at an address of the kernel's choice, which no code accesses yet.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE) }
                .map_err(kernel)?;
        // Dropping this unmaps the reservation when a piece fails.
        let alias = Self { base: base.cast(), mapped, first, len };
        let mut at = 0;
        for (mut address, mut left) in runs {
            while left > 0 {
                let fault = AliasError::Fault { address, len: left };
                let (host, room) = find(address).ok_or(fault)?;
                let now = left.min(room);
                let bytes = size(now)?;
                // SAFETY: within what was reserved above.
                let target = unsafe { alias.base.add(at) };
                // SAFETY: an old size of 0 leaves the guest's shared mapping as it is and maps its pages a second time, over pages that
                // are this view's own.
                unsafe { mremap_fixed(host.cast(), 0, bytes, MremapFlags::MAYMOVE, target.cast()) }
                    .map_err(kernel)?;
                at += bytes;
                address += now;
                left -= now;
            }
        }
        Ok(alias)
    }

    /// Host address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.expose_provenance() + self.first
    }

    /// Size, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a view of no pieces can't be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: within the view.
        (end <= self.len).then(|| unsafe { self.base.add(self.first + offset) })
    }

    /// Copies bytes out, from `offset` on. `false`, with nothing copied, when the range doesn't lie within the view.
    #[must_use]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some(from) = self.at(offset, into.len()) else { return false };
        // SAFETY: `len` mapped bytes; the guest may write meanwhile, so they are any mixture.
        unsafe { crate::mapped::copy_out(from, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Copies bytes in, from `offset` on. `false`, with nothing copied, when the range doesn't lie within the view.
    #[must_use]
    pub fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(to) = self.at(offset, from.len()) else { return false };
        // SAFETY: as in `read`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        true
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: made by `map`, and no reference to it is left.
        let unmapped = unsafe { munmap(self.base.cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping fails only on wrong arguments");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;
    use crate::{Dma, HeapMemory, MappedMemory, MemoryRegion};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    fn ram(at: u64, pages: u64) -> MemoryRegion {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, pages * PAGE).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        MemoryRegion::map(at, pages * PAGE, &fd, 0, true).unwrap()
    }

    /// Scattered pages of two regions appear in order, and both views are the same memory.
    #[test]
    fn a_view_is_the_guest_s_memory_in_another_order() {
        let memory = MappedMemory::default().with(ram(0, 8)).unwrap().with(ram(8 * PAGE, 8)).unwrap();
        // The second piece crosses from one region into the other.
        let pieces = [(5 * PAGE + 100, PAGE - 100), (7 * PAGE, 2 * PAGE), (PAGE, 10)];
        let view = memory.alias(&pieces).unwrap();
        let mut offset = 0;
        for (number, (address, len)) in (1u8..).zip(pieces) {
            let len = usize::try_from(len).unwrap();
            memory.write(address, &vec![number; len]).unwrap();
            let mut seen = vec![0; len];
            assert!(view.read(offset, &mut seen) && seen.iter().all(|byte| *byte == number));
            assert!(view.write(offset + len - 1, &[99]));
            let mut last = [0];
            memory.read(address + len as u64 - 1, &mut last).unwrap();
            assert_eq!(last, [99]);
            offset += len;
        }
        assert_eq!(view.len(), offset);
        assert!(!view.write(offset, &[1]), "beyond the end");
        assert_eq!(view.address() % 4096, 100);
        drop(view);
        memory.write(5 * PAGE, &[1]).unwrap();
    }

    #[test]
    fn what_is_no_page_list_of_the_guest_is_refused() {
        let memory = MappedMemory::default().with(ram(0, 8)).unwrap();
        let error = |pieces: &[(u64, u64)]| memory.alias(pieces).unwrap_err();
        for shape in
            [&[][..], &[(0, 0)], &[(0, 100), (PAGE, 1)], &[(0, PAGE), (PAGE + 1, 1)], &[(u64::MAX, 2)]]
        {
            assert!(matches!(error(shape), AliasError::Shape { .. }), "{shape:?}");
        }
        assert!(matches!(error(&[(7 * PAGE, 2 * PAGE)]), AliasError::Fault { .. }));
        assert_eq!(error(&vec![(0, PAGE); MOST_RUNS + 1]), AliasError::TooScattered(MOST_RUNS + 1));
        assert_eq!(HeapMemory::new(10).alias(&[(0, 1)]).unwrap_err(), AliasError::NotMapped);
    }
}
