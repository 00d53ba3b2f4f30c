//! Shared memory as 64-bit words. Both sides access it only by whole words, so no word is ever seen half-written.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Memory that this side shares with its peer. Word *n* is at byte `8 * n` of the segment. A word beyond the end reads as 0, and writes to
/// it have no effect: a channel checks [`Words::count`] once, when it is created.
pub trait Words {
    /// Number of words.
    fn count(&self) -> usize;
    /// Reads a word with relaxed order.
    fn load(&self, word: usize) -> u64;
    /// Reads a word with acquire order.
    fn load_acquire(&self, word: usize) -> u64;
    /// Writes a word with relaxed order.
    fn store(&self, word: usize, value: u64);
    /// Writes a word with release order.
    fn store_release(&self, word: usize, value: u64);
    /// A sequentially consistent fence: orders earlier writes before later reads.
    fn fence(&self);
}

impl Words for [AtomicU64] {
    fn count(&self) -> usize {
        self.len()
    }

    #[inline]
    fn load(&self, word: usize) -> u64 {
        self.get(word).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    #[inline]
    fn load_acquire(&self, word: usize) -> u64 {
        self.get(word).map_or(0, |word| word.load(Ordering::Acquire))
    }

    #[inline]
    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.get(word) {
            word.store(value, Ordering::Relaxed);
        }
    }

    #[inline]
    fn store_release(&self, word: usize, value: u64) {
        if let Some(word) = self.get(word) {
            word.store(value, Ordering::Release);
        }
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
