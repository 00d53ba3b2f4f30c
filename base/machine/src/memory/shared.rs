//! Guest RAM with rights per page. An access beyond the rights becomes an event for the monitor (a page of distributed shared memory).
//!
//! RAM is mapped twice. The guest uses one mapping, registered with userfaultfd; the monitor uses the other, which never faults. Four
//! calls change a page's rights. They take effect on running vCPUs before they return, because KVM follows them by its MMU notifier:
//!
//! ```text
//!            UFFDIO_CONTINUE (write-protected)        MADV_DONTNEED and UFFDIO_CONTINUE
//!      None ──────────────────────────────────▶ Read ──────────────────────────────────▶ Write
//!       ▲ ──────────────── UFFDIO_CONTINUE ──────────────────────────────────────────────▶ │
//!       └────────── MADV_DONTNEED ──────────────┴─◀────────── UFFDIO_WRITEPROTECT on ──────┘
//! ```
//!
//! `UFFDIO_WRITEPROTECT` off allows writes, but the host's page table entry stays read-only until the first one. KVM then maps the page
//! read-only too, which costs the guest a second fault. KVM also can't map such a page ahead with its neighbours, as it maps up to eight
//! writable pages in a row. So a page becomes writable by a new mapping. (Measured, conjugate gradients: 3 faults per page and step, 17
//! µs each.)
//!
//! Sources: docs/design/specs/x86-tso-and-dsm.md; Linux, admin-guide/mm/userfaultfd.
#![allow(unsafe_code)] // madvise, and accesses to memory that the guest changes at the same time.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::mm::Advice;
use vm_memory::MmapRegion;

use super::userfault::{
    CONTINUE_DONTWAKE, CONTINUE_WP, Range as Watched, Userfault, UserfaultError, feature, register,
};
use super::{AtomicBitmap, GuestRam};
use crate::slots::{HostMapping, SlotError};

/// Bytes of a page.
pub const PAGE: usize = 4096;
const PAGE_64: u64 = 4096;

/// Accesses to a page that don't fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageRights {
    /// None: loads and stores fault.
    None,
    /// Loads; stores fault.
    Read,
    /// Loads and stores.
    Write,
}

/// A page fault; the thread that caused it is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageFault {
    /// Guest-physical address divided by the page size.
    pub page: u64,
    /// Offset in bytes of the first accessed byte in the page.
    pub offset: u16,
    /// The access is a store.
    pub write: bool,
    /// The thread's id, as gettid returns it.
    pub thread: u32,
}

/// Shared RAM could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SharedRamError {
    /// No userfaultfd that reports faults of the kernel, or one that lacks a feature (Linux older than 6.4, say).
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// The host refused an operation on a piece of RAM.
    #[error("Guest RAM at {start:#x} with {len:#x} bytes could not be {what}")]
    Refused {
        /// Guest-physical address of the piece.
        start: u64,
        /// Bytes of the piece.
        len: u64,
        /// What was tried.
        what: &'static str,
        /// The kernel's error, or `InvalidInput` if an address overflows.
        #[source]
        source: io::Error,
    },
    /// The second mapping was refused.
    #[error("Guest RAM could not be mapped a second time")]
    Mapping(#[from] SlotError),
}

/// A contiguous range of guest-physical addresses.
struct Piece {
    start: u64,
    guest: Arc<HostMapping>,
    /// Owns the monitor's mapping, which begins at `at`.
    _alias: Arc<MmapRegion<AtomicBitmap>>,
    at: usize,
}

/// RAM with rights per page. Thread-safe; callers must serialize changes to the rights of one page.
pub struct SharedRam {
    uffd: Userfault,
    pieces: Vec<Piece>,
}

const FEATURES: u64 = feature::PAGEFAULT_FLAG_WP
    | feature::MISSING_SHMEM
    | feature::THREAD_ID
    | feature::MINOR_SHMEM
    | feature::EXACT_ADDRESS
    | feature::WP_HUGETLBFS_SHMEM;

impl SharedRam {
    /// Maps RAM from guest-physical address `from` (a multiple of the page size) a second time, for the guest. All its pages have
    /// [`PageRights::None`]. RAM below `from` isn't shared. The monitor's mapping is that of `ram`.
    pub fn new(ram: &GuestRam, from: u64) -> Result<Self, SharedRamError> {
        Self::with(Self::userfault()?, ram, from)
    }

    /// Opens the descriptor for [`SharedRam::with`]. To be called while the process still has its privileges.
    ///
    /// # Errors
    /// When the kernel refuses, or lacks a feature.
    pub fn userfault() -> Result<Userfault, SharedRamError> {
        Ok(Userfault::open(FEATURES)?)
    }

    /// Works as [`SharedRam::new`], with a descriptor of [`SharedRam::userfault`].
    ///
    /// # Errors
    /// When memory can't be mapped or registered.
    pub fn with(uffd: Userfault, ram: &GuestRam, from: u64) -> Result<Self, SharedRamError> {
        let mut pieces = Vec::new();
        for region in ram.regions() {
            let skip = from.saturating_sub(region.range.start).min(region.range.size);
            let (start, len) = (region.range.start + skip, region.range.size - skip);
            if len == 0 {
                continue;
            }
            let guest =
                HostMapping::new("shared RAM", region.file.as_fd(), region.file_offset + skip, len, true)?;
            let alias = Arc::clone(region.mapping());
            let refused =
                |what: &'static str| move |source| SharedRamError::Refused { start, len, what, source };
            let at = usize::try_from(skip).ok().and_then(|skip| region.host_address.checked_add(skip));
            let at = at.ok_or_else(|| refused("addressed")(io::ErrorKind::InvalidInput.into()))?;
            for address in [at, guest.as_ptr().addr()] {
                super::userfault::no_huge_pages(address, len).map_err(refused("kept from huge pages"))?;
            }
            let range = Watched { start: guest.as_ptr().addr() as u64, len };
            let modes = register::MISSING | register::WP | register::MINOR;
            uffd.register(range, modes).map_err(refused("watched for faults"))?;
            pieces.push(Piece { start, guest, _alias: alias, at });
        }
        Ok(Self { uffd, pieces })
    }

    /// Guest-physical addresses and the mappings for the guest's memslots.
    pub fn mappings(&self) -> impl Iterator<Item = (u64, &Arc<HostMapping>)> {
        self.pieces.iter().map(|piece| (piece.start, &piece.guest))
    }

    /// Readable when there are faults.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.uffd.fd()
    }

    /// Reads pending faults without blocking, and appends them to `into`.
    pub fn faults(&self, into: &mut Vec<PageFault>) -> io::Result<()> {
        for fault in self.uffd.faults()? {
            let page = self.pieces.iter().find_map(|piece| {
                let base = piece.guest.as_ptr().addr() as u64;
                let offset = fault.address.checked_sub(base).filter(|offset| *offset < piece.guest.len())?;
                Some((piece.start + offset) / PAGE_64)
            });
            let Some(page) = page else { continue };
            let offset = u16::try_from(fault.address % PAGE_64).unwrap_or(0);
            into.push(PageFault { page, offset, write: fault.write, thread: fault.thread });
        }
        Ok(())
    }

    /// Ends the registration of all RAM: waiting threads resume, and there are no more faults. The guest may then access every page with
    /// its content on this host. Logs an error for a piece that the host refuses to release.
    pub fn release(&self) {
        for piece in &self.pieces {
            let range = Watched { start: piece.guest.as_ptr().addr() as u64, len: piece.guest.len() };
            if let Err(error) = self.uffd.unregister(range) {
                tracing::error!(%error, start = piece.start, "Shared RAM could not be released");
            }
        }
    }

    /// Changes the rights of a page. Threads that wait for it stay blocked until [`SharedRam::wake`].
    ///
    /// # Errors
    /// For a page that isn't shared, and when the host refuses.
    pub fn set(&self, page: u64, from: PageRights, to: PageRights) -> io::Result<()> {
        self.set_all(page..page.saturating_add(1), from, to)
    }

    /// Works as [`SharedRam::set`] for a range of pages that all have the rights `from`, with as few calls as for one.
    ///
    /// # Errors
    /// As [`SharedRam::set`]. Some of the pages may have changed then.
    pub fn set_all(&self, pages: Range<u64>, from: PageRights, to: PageRights) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        let mut rest = pages;
        while !rest.is_empty() {
            let (guest, alias, most) = self.piece_of(rest.start)?;
            let count = most.min(rest.end - rest.start);
            self.set_some(guest, alias, count, from, to)?;
            rest.start += count;
        }
        Ok(())
    }

    /// Changes `count` pages of one piece; `guest` and `alias` are the first page's addresses in the two mappings.
    fn set_some(
        &self,
        guest: usize,
        alias: usize,
        count: u64,
        from: PageRights,
        to: PageRights,
    ) -> io::Result<()> {
        let range = Watched { start: guest as u64, len: count * PAGE_64 };
        let bytes = usize::try_from(range.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        match (from, to) {
            (PageRights::Write, PageRights::Read) => return self.uffd.write_protect(range, true),
            (PageRights::None, _) => {}
            // Removes the pages from the guest's mapping, for good or for a new mapping.
            // SAFETY: pages of the guest's mapping, which is shared: their content stays in the file.
            _ => unsafe { rustix::mm::madvise(guest as *mut _, bytes, Advice::LinuxDontNeed) }?,
        }
        if to == PageRights::None {
            return Ok(());
        }
        for page in (alias..alias + bytes).step_by(PAGE) {
            // The load allocates the page, if the file has a hole there.
            // SAFETY: a byte of the monitor's mapping, which lives as long as `self`; the guest may change it meanwhile.
            unsafe { AtomicU8::from_ptr(page as *mut u8) }.load(Ordering::Relaxed);
        }
        let wp = if to == PageRights::Read { CONTINUE_WP } else { 0 };
        let map = |range| self.uffd.map_existing(range, wp | CONTINUE_DONTWAKE);
        let is_there = |error: &io::Error| error.raw_os_error() == Some(libc::EEXIST);
        match map(range) {
            Err(error) if is_there(&error) => {
                for page in (0..count).map(|page| range.start + page * PAGE_64) {
                    let one = Watched { start: page, len: PAGE_64 };
                    match map(one) {
                        Err(error) if is_there(&error) => {
                            self.uffd.write_protect(one, to == PageRights::Read)?;
                        }
                        result => result?,
                    }
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Wakes the threads that wait for a page; they retry their access.
    pub fn wake(&self, page: u64) -> io::Result<()> {
        let (guest, _) = self.addresses(page)?;
        self.uffd.wake(Watched { start: guest as u64, len: PAGE_64 })
    }

    /// Appends the content of a page.
    pub fn read(&self, page: u64, into: &mut Vec<u8>) -> io::Result<()> {
        let (_, alias) = self.addresses(page)?;
        // SAFETY: the words of a page of the monitor's mapping, which lives as long as `self`. The guest may write meanwhile, so they are
        // atomics.
        let words = unsafe { std::slice::from_raw_parts(alias as *const AtomicU64, PAGE / 8) };
        let mut content = [[0; 8]; PAGE / 8];
        for (to, word) in content.iter_mut().zip(words) {
            *to = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        into.extend_from_slice(content.as_flattened());
        Ok(())
    }

    /// Copies bytes of a page; leaves those of `into` beyond its end unchanged. Returns the number of copied bytes.
    pub fn read_at(&self, page: u64, offset: usize, into: &mut [u8]) -> io::Result<usize> {
        let (_, alias) = self.addresses(page)?;
        let len = into.len().min(PAGE.saturating_sub(offset));
        for (at, byte) in into.iter_mut().take(len).enumerate() {
            // SAFETY: a byte inside the page: `offset + len` is at most its size.
            *byte = unsafe { AtomicU8::from_ptr((alias + offset + at) as *mut u8) }.load(Ordering::Relaxed);
        }
        Ok(len)
    }

    /// Writes bytes into a page, and drops those beyond its end. Each aligned group of 2, 4 and 8 bytes becomes visible atomically.
    pub fn write(&self, page: u64, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let (_, alias) = self.addresses(page)?;
        let mut at = offset;
        let mut rest = bytes.get(..bytes.len().min(PAGE.saturating_sub(offset))).unwrap_or_default();
        if at.is_multiple_of(8) {
            let (words, tail) = rest.as_chunks::<8>();
            for word in words {
                // SAFETY: an aligned word inside the page, whose mapping lives as long as `self`.
                unsafe { AtomicU64::from_ptr((alias + at) as *mut u64) }
                    .store(u64::from_ne_bytes(*word), Ordering::Release);
                at += 8;
            }
            rest = tail;
        }
        while !rest.is_empty() {
            // The widest aligned group that both address and length allow.
            let width =
                [8, 4, 2, 1].into_iter().find(|width| at.is_multiple_of(*width) && rest.len() >= *width);
            let (group, tail) = rest.split_at(width.unwrap_or(1));
            let address = alias + at;
            // SAFETY: aligned for the width, and inside the page, whose mapping lives as long as `self`.
            unsafe {
                match *group {
                    [a, b, c, d, e, f, g, h] => AtomicU64::from_ptr(address as *mut u64)
                        .store(u64::from_ne_bytes([a, b, c, d, e, f, g, h]), Ordering::Release),
                    [a, b, c, d] => AtomicU32::from_ptr(address as *mut u32)
                        .store(u32::from_ne_bytes([a, b, c, d]), Ordering::Release),
                    [a, b] => AtomicU16::from_ptr(address as *mut u16)
                        .store(u16::from_ne_bytes([a, b]), Ordering::Release),
                    _ => AtomicU8::from_ptr(address as *mut u8).store(group[0], Ordering::Release),
                }
            }
            at += group.len();
            rest = tail;
        }
        Ok(())
    }

    /// Address of an aligned word of 1, 2, 4 or 8 bytes in the monitor's mapping.
    fn word(&self, page: u64, offset: usize, width: usize) -> io::Result<usize> {
        if !matches!(width, 1 | 2 | 4 | 8) || !offset.is_multiple_of(width) || offset >= PAGE {
            let text = format!("there is no word of {width} bytes at {offset:#x} of a page");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(self.addresses(page)?.1 + offset)
    }

    /// Loads an aligned word of 1, 2, 4 or 8 bytes atomically (sequentially consistent).
    ///
    /// # Errors
    /// For other words, and for pages that aren't shared.
    pub fn load(&self, page: u64, offset: usize, width: usize) -> io::Result<u64> {
        let at = self.word(page, offset, width)?;
        // SAFETY: aligned for the width and inside the page, whose mapping lives as long as `self`; the guest may change it meanwhile.
        Ok(unsafe {
            match width {
                1 => AtomicU8::from_ptr(at as *mut u8).load(Ordering::SeqCst).into(),
                2 => AtomicU16::from_ptr(at as *mut u16).load(Ordering::SeqCst).into(),
                4 => AtomicU32::from_ptr(at as *mut u32).load(Ordering::SeqCst).into(),
                _ => AtomicU64::from_ptr(at as *mut u64).load(Ordering::SeqCst),
            }
        })
    }

    /// Atomically replaces an aligned word of 1, 2, 4 or 8 bytes by the result of `change`, truncated to the width. `None` leaves it
    /// unchanged. Returns the value before. `change` may be called several times.
    ///
    /// # Errors
    /// As [`SharedRam::load`].
    pub fn update(
        &self,
        page: u64,
        offset: usize,
        width: usize,
        change: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> io::Result<u64> {
        let at = self.word(page, offset, width)?;
        macro_rules! update {
            ($atomic:ty, $word:ty) => {{
                // SAFETY: as in `load`.
                let word = unsafe { <$atomic>::from_ptr(at as *mut $word) };
                #[expect(clippy::cast_possible_truncation, reason = "what doesn't fit is cut off")]
                let changed = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| {
                    change(u64::from(old)).map(|new| new as $word)
                });
                u64::from(changed.unwrap_or_else(|old| old))
            }};
        }
        Ok(match width {
            1 => update!(AtomicU8, u8),
            2 => update!(AtomicU16, u16),
            4 => update!(AtomicU32, u32),
            _ => {
                // SAFETY: as in `load`.
                let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
                word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).unwrap_or_else(|old| old)
            }
        })
    }

    /// Addresses of a page in the guest's mapping and in the monitor's.
    fn addresses(&self, page: u64) -> io::Result<(usize, usize)> {
        self.piece_of(page).map(|(guest, alias, _)| (guest, alias))
    }

    /// These addresses, and the number of pages from this one to the end of its piece.
    fn piece_of(&self, page: u64) -> io::Result<(usize, usize, u64)> {
        let found = self.pieces.iter().find_map(|piece| {
            let offset = page.checked_mul(PAGE_64)?.checked_sub(piece.start)?;
            let left = piece.guest.len().checked_sub(offset).filter(|left| *left > 0)?;
            let offset = usize::try_from(offset).ok()?;
            Some((piece.guest.as_ptr().addr() + offset, piece.at + offset, left.div_ceil(PAGE_64)))
        });
        found.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("page {page:#x} is not shared"))
        })
    }
}

#[cfg(test)]
mod tests;
