//! Which pages this process has written, while somebody asks: another copy of the memory is being made.
//!
//! A page is marked after it was written, so a mark that is taken away means that whoever copies the page now copies the bytes too. Whoever
//! switches the log on must see to it that writers are not in the middle of a write: it asks them on their own threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;

/// One bit per page of a range. Off until it is asked for; then a write costs a look at a flag more, and an atomic operation.
#[derive(Debug, Default)]
pub(crate) struct DirtyLog {
    on: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

impl DirtyLog {
    /// Begins to note writes to a range of `size` bytes, with none noted; or ends it.
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

    /// `len` bytes from `offset` on were written. They lie within the range.
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
                // Release: who takes the mark sees the bytes.
                word.fetch_or(1 << (page % 64), Ordering::Release);
            }
        }
    }

    /// Takes the marks of `pages` pages from page `first` on, which is a multiple of 64.
    pub fn take(&self, first: u64, pages: u64) -> Vec<u64> {
        let Some(words) = self.words.get() else { return Vec::new() };
        let start = usize::try_from(first / 64).unwrap_or(usize::MAX);
        let count = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        words.iter().skip(start).take(count).map(|word| word.swap(0, Ordering::AcqRel)).collect()
    }
}
