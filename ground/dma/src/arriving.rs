//! Pages of guest memory that are still to come from another host, while devices use the rest (post-copy).
//!
//! Whoever has the memory mapped by itself would find a page that is missing zero, and leave it there for the guest. So what is there is told by a
//! bitmap that the monitor, which gets the pages, shares with this process; missing pages are asked for by a Unix socket.
//!
//! ```text
//! monitor                                     this process
//!   places a page, sets its bit ─ bitmap ─────▶ an access to a page whose bit isn't set fails, and is made again later
//!   fetches it sooner           ◀─── socket ─── asks for the page
//!   counts one up               ─ bitmap ─────▶ whoever waits looks again
//!                               ◀─ bitmap ───── a page that was written as a whole: its bit is set here
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
/// Bytes before the first bit: a word that grows whenever pages have come that were asked for, and one that is not 0 once all are there.
pub const HEAD: u64 = 4096;
/// Pages that one wish can name.
const MOST_PER_WISH: u64 = 4096;
/// Missing pages of a range that are looked for and asked for at once: 16 MiB.
const MOST_ASKED: u64 = 4096;

/// Bytes of a bitmap for so many bytes of memory, with its head, in whole pages.
#[must_use]
pub fn bitmap_size(memory: u64) -> u64 {
    HEAD + memory.div_ceil(PAGE).div_ceil(64).saturating_mul(8).next_multiple_of(PAGE)
}

/// A wish for pages from a guest address on, as it goes through the pipe: 8 bytes in native order.
#[must_use]
pub fn wish(address: u64, pages: u64) -> [u8; 8] {
    (address & !(PAGE - 1) | (pages.clamp(1, MOST_PER_WISH) - 1)).to_ne_bytes()
}

/// What a wish names: an address and a number of pages.
#[must_use]
pub fn wished(wish: [u8; 8]) -> (u64, u64) {
    let word = u64::from_ne_bytes(wish);
    (word & !(PAGE - 1), (word & (PAGE - 1)) + 1)
}

/// A bitmap of pages that are there, as both processes have it. Bits from [`HEAD`] on; the lowest of the first word is the first page.
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
    /// Maps the bitmap of `memory` bytes from `offset` of a file on, which must be sealed against shrinking.
    ///
    /// # Errors
    /// When it isn't sealed, too short, or the kernel refuses.
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

    /// Whether a page is there. Its contents are visible then.
    #[inline]
    #[must_use]
    pub fn has(&self, page: u64) -> bool {
        self.bits(page).is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    /// A page is there now.
    pub fn set(&self, page: u64) {
        if let Some(word) = self.bits(page) {
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    /// Sets 64 pages at once, before anybody else has the bitmap: those of bit word `index`.
    pub fn set_word(&self, index: u64, bits: u64) {
        if let Some(word) = self.bits(index.saturating_mul(64)) {
            word.store(bits, Ordering::Release);
        }
    }

    /// Pages have come that were asked for.
    pub fn came(&self) {
        if let Some(word) = self.word(0) {
            word.fetch_add(1, Ordering::Release);
        }
    }

    /// How often [`Bitmap::came`] was called.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.word(0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// All pages are there.
    pub fn complete(&self) {
        if let Some(word) = self.word(1) {
            word.store(1, Ordering::Release);
        }
        self.came();
    }

    /// Whether all pages are there.
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

/// What is known of a region whose pages are still to come. In effect from [`Late::begin`] until all are there.
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
    /// Pages that were asked for.
    asked: Box<[AtomicU64]>,
    refused: AtomicU64,
}

impl Late {
    pub const fn new() -> Self {
        Self { on: AtomicBool::new(false), arriving: std::sync::OnceLock::new() }
    }

    /// From here on only pages that the bitmap names are there. `host` is where the region of `size` bytes at guest address `address` is mapped. Once per
    /// region.
    pub fn begin(
        &self,
        (address, size): (u64, u64),
        host: *mut u8,
        bitmap: Bitmap,
        wishes: Arc<OwnedFd>,
    ) -> Result<(), MapError> {
        let len = usize::try_from(size).map_err(|_| MapError::Shape { address, size })?;
        // A huge page would come with zeros where pages are missing.
        // SAFETY: the whole mapping of a region; the advice doesn't change its contents.
        unsafe { madvise(host.cast(), len, Advice::LinuxNoHugepage) }
            .or_else(|error| if error == Errno::INVAL { Ok(()) } else { Err(error) })
            .map_err(|source| MapError::Kernel { address, size, source })?;
        let asked = (0..size.div_ceil(PAGE).div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let arriving = Arriving { address, bitmap, wishes, asked, refused: AtomicU64::new(0) };
        self.arriving.set(arriving).map_err(|_| MapError::Overlap { address, size, other: address })?;
        self.on.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// The one that is in effect.
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

    /// Whether pages are still to come.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.now().is_some()
    }

    /// How often pages have come that were asked for.
    pub fn generation(&self) -> Option<u64> {
        self.now().map(|arriving| arriving.bitmap.generation())
    }

    /// How often an access failed as its memory wasn't there.
    pub fn refused(&self) -> u64 {
        self.arriving.get().map_or(0, |arriving| arriving.refused.load(Ordering::Relaxed))
    }

    /// Whether an access to `len` bytes from `offset` on has to wait; what is missing is asked for then. With `write` pages that it covers wholly
    /// needn't be there.
    #[inline]
    pub fn awaits(&self, offset: u64, len: u64, write: bool) -> bool {
        self.now().is_some_and(|arriving| len > 0 && arriving.awaits(offset, len, write))
    }

    /// As [`Late::awaits`], for an access that is refused then.
    #[inline]
    pub fn refuses(&self, offset: u64, len: u64, write: bool) -> bool {
        let refuses = self.awaits(offset, len, write);
        if refuses && let Some(arriving) = self.arriving.get() {
            arriving.refused.fetch_add(1, Ordering::Relaxed);
        }
        refuses
    }

    /// `len` bytes from `offset` on were written.
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
    /// The range lies in the region.
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

    /// Whether a page wasn't asked for before.
    fn note(&self, page: u64) -> bool {
        let word = usize::try_from(page / 64).ok().and_then(|index| self.asked.get(index));
        word.is_some_and(|word| word.fetch_or(1 << (page % 64), Ordering::Relaxed) >> (page % 64) & 1 == 0)
    }

    fn say(&self, start: u64, count: u64) {
        let said = send_without_waiting(&self.wishes, &wish(self.address + start * PAGE, count));
        if said != Ok(8) {
            // The socket is full: whoever waits looks again after a while, and asks again.
            for page in start..start + count {
                let word = usize::try_from(page / 64).ok().and_then(|index| self.asked.get(index));
                if let Some(word) = word {
                    word.fetch_and(!(1 << (page % 64)), Ordering::Relaxed);
                }
            }
        }
    }
}

/// Sends to a stream of Unix sockets; fails where it is full, even if whoever shares it has made it blocking.
fn send_without_waiting(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}
