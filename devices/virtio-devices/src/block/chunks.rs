//! Sets of a disk's chunks, and the set that a disk's writes are noted in while its content is copied elsewhere.
//!
//! ```text
//! write's data is in the image ─▶ note ─▶ the driver is told       any queue's thread, any number of them
//! take ─▶ read the chunks that were taken                          the thread that copies
//! ```
//!
//! A chunk is noted *after* its data is in the image and before its driver hears of it. So a copy that reads a chunk after it took the set
//! either finds the data, or finds the chunk in a later set: after a last take with nothing in flight, both sides are equal.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

/// Bytes of a chunk; the last one of a disk may be shorter.
pub const CHUNK: u64 = 64 << 10;

/// Some chunks of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chunks {
    words: Vec<u64>,
    /// Bytes of the disk.
    bytes: u64,
}

/// Words of a set for a disk of so many bytes.
fn words(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(CHUNK).div_ceil(64)).unwrap_or(usize::MAX)
}

/// First and last chunk of a range that isn't empty and lies in the disk.
fn span(bytes: u64, start: u64, len: u64) -> Option<(u64, u64)> {
    let end = start.saturating_add(len).min(bytes);
    (start < end).then(|| (start / CHUNK, (end - 1) / CHUNK))
}

fn place(chunk: u64) -> (usize, u64) {
    (usize::try_from(chunk / 64).unwrap_or(usize::MAX), 1 << (chunk % 64))
}

impl Chunks {
    /// None of a disk of so many bytes.
    #[must_use]
    pub fn none(bytes: u64) -> Self {
        Self { words: vec![0; words(bytes)], bytes }
    }

    /// All of them.
    #[must_use]
    pub fn all(bytes: u64) -> Self {
        let mut all = Self::none(bytes);
        all.insert(0, bytes);
        all
    }

    /// Adds the chunks that a range touches; what lies beyond the disk is ignored.
    pub fn insert(&mut self, start: u64, len: u64) {
        let Some((first, last)) = span(self.bytes, start, len) else { return };
        for chunk in first..=last {
            let (word, bit) = place(chunk);
            if let Some(word) = self.words.get_mut(word) {
                *word |= bit;
            }
        }
    }

    /// Adds another set of the same disk.
    pub fn add(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(to, from)| *to |= from);
    }

    /// Whether a chunk is in it.
    #[must_use]
    pub fn contains(&self, chunk: u64) -> bool {
        let (word, bit) = place(chunk);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Bytes of the disk that the set covers.
    #[must_use]
    pub fn covered(&self) -> u64 {
        let chunks: u64 = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
        let short = self.bytes.next_multiple_of(CHUNK) - self.bytes;
        let has_last = self.bytes > 0 && self.contains((self.bytes - 1) / CHUNK);
        chunks * CHUNK - if has_last { short } else { 0 }
    }

    /// Its chunks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let each = |(at, word): (u64, &u64)| {
            let word = *word;
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| at * 64 + bit)
        };
        (0..).zip(&self.words).filter(|(_, word)| **word != 0).flat_map(each)
    }
}

/// Writes that could not be waited for: it isn't known what they changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unknown;

/// Chunks of a disk that were written, while somebody wants to know. Thread-safe.
#[derive(Debug, Default)]
pub(super) struct Written {
    on: AtomicBool,
    words: RwLock<Vec<AtomicU64>>,
    bytes: AtomicU64,
    unknown: AtomicBool,
}

impl Written {
    /// Notes from here on, with nothing noted yet. What is read from the disk afterwards has all that wasn't noted.
    pub(super) fn begin(&self, bytes: u64) {
        let mut words = self.words.write().unwrap_or_else(PoisonError::into_inner);
        *words = (0..self::words(bytes)).map(|_| AtomicU64::new(0)).collect();
        self.bytes.store(bytes, Ordering::SeqCst);
        self.on.store(true, Ordering::SeqCst);
    }

    /// No more.
    pub(super) fn end(&self) {
        self.on.store(false, Ordering::SeqCst);
        *self.words.write().unwrap_or_else(PoisonError::into_inner) = Vec::new();
    }

    /// These bytes may have changed; called when the image has them.
    pub(super) fn note(&self, start: u64, len: u64) {
        if !self.on.load(Ordering::SeqCst) {
            return;
        }
        let words = self.words.read().unwrap_or_else(PoisonError::into_inner);
        let Some((first, last)) = span(self.bytes.load(Ordering::SeqCst), start, len) else { return };
        for chunk in first..=last {
            let (word, bit) = place(chunk);
            if let Some(word) = words.get(word) {
                word.fetch_or(bit, Ordering::SeqCst);
            }
        }
    }

    /// Requests are in flight that nobody waits for.
    pub(super) fn lose(&self) {
        self.unknown.store(true, Ordering::SeqCst);
    }

    /// What was noted since the last call.
    pub(super) fn take(&self) -> Result<Chunks, Unknown> {
        if self.unknown.load(Ordering::SeqCst) {
            return Err(Unknown);
        }
        let words = self.words.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Chunks {
            words: words.iter().map(|word| word.swap(0, Ordering::SeqCst)).collect(),
            bytes: self.bytes.load(Ordering::SeqCst),
        })
    }
}
