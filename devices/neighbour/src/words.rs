//! Shared memory as 64-bit words. All that both sides write is one such word, so that none is ever seen half-written.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Memory that this side and its peer share. Words are numbered from the start of the segment: word *n* lies at byte `8 * n`.
/// A word beyond the end reads as 0, and writes to it do nothing: [`Words::count`] is compared once, when a channel is made.
pub trait Words {
    /// How many words there are.
    fn count(&self) -> usize;
    /// Reads a word, without order.
    fn load(&self, word: usize) -> u64;
    /// Reads a word; what its writer wrote before it is seen afterwards.
    fn load_acquire(&self, word: usize) -> u64;
    /// Writes a word, without order.
    fn store(&self, word: usize, value: u64);
    /// Writes a word; whoever reads it sees what was written before.
    fn store_release(&self, word: usize, value: u64);
    /// Puts the writes before it before the reads after it, in the eyes of everybody (sequentially consistent).
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
