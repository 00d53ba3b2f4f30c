//! Not-present pages of guest memory: a post-copy migration has not delivered them yet, while devices already use the rest.
//!
//! A process that maps the memory itself would read a not-present page as zeros, and leave that zero page for the guest. So the monitor,
//! which receives the pages, shares a bitmap of present pages with this process. This process requests not-present pages over a Unix
//! socket.
//!
//! ```text
//! monitor                                     this process
//!   places a page, sets its bit ─ bitmap ─────▶ an access to a page without its bit fails, and is retried later
//!   fetches it with priority    ◀─── socket ─── requests the page
//!   increments the generation   ─ bitmap ─────▶ retries what waits for pages
//!                               ◀─ bitmap ───── sets the bit of a page that it overwrote as a whole
//! ```
//! Nothing here blocks.
#![allow(unsafe_code)] // Maps the bitmap, which both processes change by atomic operations.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::SendFlags;

use crate::map_error::MapError;

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;
/// Bytes before the first bit. The first word is a generation that grows when requested pages arrive; the second is not 0 once all pages
/// are present.
pub const HEAD: u64 = 4096;
/// Limit of pages in one request.
const MOST_PER_WISH: u64 = 4096;
/// How far beyond the first not-present page of an access more pages are requested with it: 16 MiB.
const MOST_ASKED: u64 = 4096;

/// Bytes of a bitmap for `memory` bytes of guest memory, with its head, in whole pages.
#[must_use]
pub fn bitmap_size(memory: u64) -> u64 {
    HEAD + memory.div_ceil(PAGE).div_ceil(64).saturating_mul(8).next_multiple_of(PAGE)
}

/// Encodes a request for pages from a guest address on, as the socket carries it: 8 bytes in native order. `pages` is clamped to 1..=4096.
#[must_use]
pub fn wish(address: u64, pages: u64) -> [u8; 8] {
    (address & !(PAGE - 1) | (pages.clamp(1, MOST_PER_WISH) - 1)).to_ne_bytes()
}

/// Decodes a request: a guest address and a number of pages.
#[must_use]
pub fn wished(wish: [u8; 8]) -> (u64, u64) {
    let word = u64::from_ne_bytes(wish);
    (word & !(PAGE - 1), (word & (PAGE - 1)) + 1)
}

/// The bitmap of present pages that both processes share. Bits begin at [`HEAD`]; the lowest bit of the first word is the first page.
#[derive(Debug)]
pub struct Bitmap {
    base: *mut u8,
    len: usize,
}

// SAFETY: shared memory that lives as long as this does, reached by atomic operations only.
unsafe impl Send for Bitmap {}
// SAFETY: as above.
unsafe impl Sync for Bitmap {}

impl Bitmap {
    /// Maps the bitmap of `memory` bytes of guest memory from `offset` of a file on.
    ///
    /// # Errors
    /// When the file isn't sealed against shrinking, is too short, or the kernel refuses.
    pub fn map(file: &impl AsFd, offset: u64, memory: u64) -> Result<Self, MapError> {
        let file = file.as_fd();
        let kernel = |source| MapError::Kernel { address: offset, size: memory, source };
        let size = bitmap_size(memory);
        let needed = offset.checked_add(size).filter(|_| offset.is_multiple_of(PAGE) && memory > 0);
        let needed = needed.ok_or(MapError::Shape { address: offset, size: memory })?;
        if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(MapError::NotSealed { address: offset });
        }
        let len = u64::try_from(fstat(file).map_err(kernel)?.st_size).unwrap_or(0);
        if len < needed {
            return Err(MapError::TooShort { address: offset, len, needed });
        }
        let bytes = usize::try_from(size).map_err(|_| MapError::Shape { address: offset, size: memory })?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new shared mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset) }
            .map_err(kernel)?;
        Ok(Self { base: base.cast(), len: bytes })
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let offset = index.checked_mul(8)?;
        // SAFETY: 8 aligned bytes within the mapping, which lives as long as `self` and is only reached atomically.
        (offset < self.len).then(|| unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) })
    }

    fn bits(&self, page: u64) -> Option<&AtomicU64> {
        self.word(usize::try_from(HEAD / 8 + page / 64).ok()?)
    }

    /// Whether a page is present. Acquire order: its contents are visible then.
    #[inline]
    #[must_use]
    pub fn has(&self, page: u64) -> bool {
        self.bits(page).is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    /// Marks a page as present, with release order.
    pub fn set(&self, page: u64) {
        if let Some(word) = self.bits(page) {
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    /// Sets the bits of 64 pages, those of bit word `index`. Only before another process or thread has the bitmap.
    pub fn set_word(&self, index: u64, bits: u64) {
        if let Some(word) = self.bits(index.saturating_mul(64)) {
            word.store(bits, Ordering::Release);
        }
    }

    /// Increments the generation: requested pages have arrived.
    pub fn came(&self) {
        if let Some(word) = self.word(0) {
            word.fetch_add(1, Ordering::Release);
        }
    }

    /// How often [`Bitmap::came`] was called, wrapping.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.word(0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Marks all pages as present.
    pub fn complete(&self) {
        if let Some(word) = self.word(1) {
            word.store(1, Ordering::Release);
        }
        self.came();
    }

    /// Whether all pages are present.
    #[inline]
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.word(1).is_some_and(|word| word.load(Ordering::Acquire) != 0)
    }
}

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: made by `map`, and nothing refers to it once it is dropped.
        let unmapped = unsafe { munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping fails only on wrong arguments");
    }
}

/// Post-copy state of a region. In effect from [`Late::begin`] until all pages are present.
#[derive(Debug)]
pub(crate) struct Late {
    on: AtomicBool,
    /// Set once, before `on`.
    arriving: std::sync::OnceLock<Arriving>,
}

#[derive(Debug)]
struct Arriving {
    address: u64,
    bitmap: Bitmap,
    wishes: Arc<OwnedFd>,
    /// A bit per page: a request for it was sent.
    asked: Box<[AtomicU64]>,
    refused: AtomicU64,
}

impl Late {
    pub const fn new() -> Self {
        Self { on: AtomicBool::new(false), arriving: std::sync::OnceLock::new() }
    }

    /// Begins: from here on only pages in the bitmap are present. `host` is where the region of `size` bytes at guest address `address` is
    /// mapped. Once per region.
    pub fn begin(
        &self,
        (address, size): (u64, u64),
        host: *mut u8,
        bitmap: Bitmap,
        wishes: Arc<OwnedFd>,
    ) -> Result<(), MapError> {
        let len = usize::try_from(size).map_err(|_| MapError::Shape { address, size })?;
        // A huge page would be populated with zeros where pages are not present. SAFETY: the whole mapping of a region; the advice doesn't
        // change its contents.
        unsafe { madvise(host.cast(), len, Advice::LinuxNoHugepage) }
            .or_else(|error| if error == Errno::INVAL { Ok(()) } else { Err(error) })
            .map_err(|source| MapError::Kernel { address, size, source })?;
        let asked = (0..size.div_ceil(PAGE).div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let arriving = Arriving { address, bitmap, wishes, asked, refused: AtomicU64::new(0) };
        self.arriving.set(arriving).map_err(|_| MapError::Overlap { address, size, other: address })?;
        self.on.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// The post-copy state, while it is in effect.
    #[inline]
    fn now(&self) -> Option<&Arriving> {
        if self.on.load(Ordering::Relaxed) { self.arriving() } else { None }
    }

    #[cold]
    fn arriving(&self) -> Option<&Arriving> {
        let found = self.arriving.get()?;
        if found.bitmap.is_complete() {
            self.on.store(false, Ordering::SeqCst);
            return None;
        }
        Some(found)
    }

    /// Whether pages are not present.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.now().is_some()
    }

    /// Generation of the bitmap, while pages are not present.
    pub fn generation(&self) -> Option<u64> {
        self.now().map(|arriving| arriving.bitmap.generation())
    }

    /// How many accesses failed at a not-present page.
    pub fn refused(&self) -> u64 {
        self.arriving.get().map_or(0, |arriving| arriving.refused.load(Ordering::Relaxed))
    }

    /// Whether an access to `len` bytes from `offset` on has to wait. Requests the not-present pages. With `write`, a page that the access
    /// covers wholly needn't be present.
    #[inline]
    pub fn awaits(&self, offset: u64, len: u64, write: bool) -> bool {
        self.now().is_some_and(|arriving| len > 0 && arriving.awaits(offset, len, write))
    }

    /// As [`Late::awaits`], and counts the access as failed.
    #[inline]
    pub fn refuses(&self, offset: u64, len: u64, write: bool) -> bool {
        let refuses = self.awaits(offset, len, write);
        if refuses && let Some(arriving) = self.arriving.get() {
            arriving.refused.fetch_add(1, Ordering::Relaxed);
        }
        refuses
    }

    /// Marks the pages that a write of `len` bytes from `offset` on covered wholly as present.
    #[inline]
    pub fn wrote(&self, offset: u64, len: u64) {
        if let Some(arriving) = self.now()
            && len >= PAGE
        {
            let (first, end) = (offset.div_ceil(PAGE), (offset + len) / PAGE);
            (first..end).for_each(|page| arriving.bitmap.set(page));
        }
    }
}

impl Arriving {
    /// As [`Late::awaits`]. The range must lie in the region.
    #[cold]
    fn awaits(&self, offset: u64, len: u64, write: bool) -> bool {
        let end = offset + len;
        let (first, last) = (offset / PAGE, (end - 1) / PAGE);
        let covered = |page: u64| write && page * PAGE >= offset && (page + 1) * PAGE <= end;
        let mut missing = (first..=last).filter(|page| !self.bitmap.has(*page) && !covered(*page));
        let Some(page) = missing.next() else { return false };
        self.ask(page, missing.take_while(|later| *later < page + MOST_ASKED));
        true
    }

    fn ask(&self, first: u64, more: impl Iterator<Item = u64>) {
        let mut run: Option<(u64, u64)> = None;
        for page in std::iter::once(first).chain(more) {
            if !self.note(page) {
                continue;
            }
            run = match run {
                Some((start, count)) if start + count == page => Some((start, count + 1)),
                Some((start, count)) => {
                    self.say(start, count);
                    Some((page, 1))
                }
                None => Some((page, 1)),
            };
        }
        if let Some((start, count)) = run {
            self.say(start, count);
        }
    }

    /// Marks a page as requested. `false` if it was already.
    fn note(&self, page: u64) -> bool {
        let word = usize::try_from(page / 64).ok().and_then(|index| self.asked.get(index));
        word.is_some_and(|word| word.fetch_or(1 << (page % 64), Ordering::Relaxed) >> (page % 64) & 1 == 0)
    }

    fn say(&self, start: u64, count: u64) {
        let said = send_without_waiting(&self.wishes, &wish(self.address + start * PAGE, count));
        if said != Ok(8) {
            // The socket is full. The caller retries the access after a while, and that requests the pages again.
            for page in start..start + count {
                let word = usize::try_from(page / 64).ok().and_then(|index| self.asked.get(index));
                if let Some(word) = word {
                    word.fetch_and(!(1 << (page % 64)), Ordering::Relaxed);
                }
            }
        }
    }
}

/// Sends to a Unix stream socket. Fails when it is full, even if the other process has made the shared socket blocking.
fn send_without_waiting(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}
