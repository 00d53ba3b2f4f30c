//! Dirty log: which pages this process has written, while another copy of the memory is made (pre-copy).
//!
//! A writer marks a page after it wrote it. So a copier that clears a mark and then copies the page copies the written bytes too. The
//! component that enables the log must ensure that no write is in progress: it runs a function on each writer's thread.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;

/// One bit per page of a range. While the log is off, a write costs one more load of a flag; while it is on, an atomic operation.
#[derive(Debug, Default)]
pub(crate) struct DirtyLog {
    on: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

impl DirtyLog {
    /// Enables the log for a range of `size` bytes, with no page marked; or disables it.
    pub fn set(&self, on: bool, size: u64) {
        if on {
            let words = self.words.get_or_init(|| {
                let pages = size.div_ceil(PAGE);
                (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
            });
            for word in words {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.on.store(on, Ordering::SeqCst);
    }

    /// Marks the pages of a write of `len` bytes from `offset` on, which lies within the range.
    #[inline]
    pub fn mark(&self, offset: u64, len: u64) {
        if self.on.load(Ordering::Relaxed) && len > 0 {
            self.mark_pages(offset / PAGE, (offset + len - 1) / PAGE);
        }
    }

    #[cold]
    fn mark_pages(&self, first: u64, last: u64) {
        let Some(words) = self.words.get() else { return };
        for page in first..=last {
            let word = usize::try_from(page / 64).ok().and_then(|index| words.get(index));
            if let Some(word) = word {
                // Release: a copier that clears the mark sees the bytes.
                word.fetch_or(1 << (page % 64), Ordering::Release);
            }
        }
    }

    /// Returns and clears the marks of `pages` pages from page `first` on, a multiple of 64.
    pub fn take(&self, first: u64, pages: u64) -> Vec<u64> {
        let Some(words) = self.words.get() else { return Vec::new() };
        let start = usize::try_from(first / 64).unwrap_or(usize::MAX);
        let count = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        words.iter().skip(start).take(count).map(|word| word.swap(0, Ordering::AcqRel)).collect()
    }
}
