//! Sets of a disk's chunks, and the log of chunks that a guest writes while a migration copies the disk.
//!
//! ```text
//! write's data is in the image ─▶ note ─▶ the request completes    any queue's thread, concurrently
//! take ─▶ read the chunks in the set                               the thread that copies
//! ```
//!
//! A queue's thread notes a chunk *after* its data is in the image, and before the request completes. A copier that reads a chunk after it
//! took the set finds the data, or finds the chunk in a later set. So after a last take with nothing in flight, both sides are equal.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

/// Size of a chunk, bytes; the last one of a disk may be shorter.
pub const CHUNK: u64 = 64 << 10;

/// Some chunks of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chunks {
    words: Vec<u64>,
    /// Size of the disk, bytes.
    bytes: u64,
}

/// Number of words of a set for a disk of `bytes` bytes.
fn words(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(CHUNK).div_ceil(64)).unwrap_or(usize::MAX)
}

/// First and last chunk of a range; `None` if it is empty or not in the disk.
fn span(bytes: u64, start: u64, len: u64) -> Option<(u64, u64)> {
    let end = start.saturating_add(len).min(bytes);
    (start < end).then(|| (start / CHUNK, (end - 1) / CHUNK))
}

fn place(chunk: u64) -> (usize, u64) {
    (usize::try_from(chunk / 64).unwrap_or(usize::MAX), 1 << (chunk % 64))
}

impl Chunks {
    /// The empty set of a disk of `bytes` bytes.
    #[must_use]
    pub fn none(bytes: u64) -> Self {
        Self { words: vec![0; words(bytes)], bytes }
    }

    /// The set of all chunks.
    #[must_use]
    pub fn all(bytes: u64) -> Self {
        let mut all = Self::none(bytes);
        all.insert(0, bytes);
        all
    }

    /// Adds the chunks of a range; bytes beyond the disk are ignored.
    pub fn insert(&mut self, start: u64, len: u64) {
        let Some((first, last)) = span(self.bytes, start, len) else { return };
        for chunk in first..=last {
            let (word, bit) = place(chunk);
            if let Some(word) = self.words.get_mut(word) {
                *word |= bit;
            }
        }
    }

    /// Adds the chunks of another set of the same disk.
    pub fn add(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(to, from)| *to |= from);
    }

    /// Whether the set has a chunk.
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

    /// The chunks of the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let each = |(at, word): (u64, &u64)| {
            let word = *word;
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| at * 64 + bit)
        };
        (0..).zip(&self.words).filter(|(_, word)| **word != 0).flat_map(each)
    }
}

/// The written chunks are unknown: requests were in flight whose completion could not be awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unknown;

/// Log of a disk's written chunks, while a migration copies it. Thread-safe.
#[derive(Debug, Default)]
pub(super) struct Written {
    on: AtomicBool,
    words: RwLock<Vec<AtomicU64>>,
    bytes: AtomicU64,
    unknown: AtomicBool,
}

impl Written {
    /// Starts the log, empty. Data read from the disk afterwards is current but for the noted chunks.
    pub(super) fn begin(&self, bytes: u64) {
        let mut words = self.words.write().unwrap_or_else(PoisonError::into_inner);
        *words = (0..self::words(bytes)).map(|_| AtomicU64::new(0)).collect();
        self.bytes.store(bytes, Ordering::SeqCst);
        self.on.store(true, Ordering::SeqCst);
    }

    /// Stops the log.
    pub(super) fn end(&self) {
        self.on.store(false, Ordering::SeqCst);
        *self.words.write().unwrap_or_else(PoisonError::into_inner) = Vec::new();
    }

    /// Notes a write of these bytes, which the image has already.
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

    /// Records that requests are in flight whose completion can't be awaited.
    pub(super) fn lose(&self) {
        self.unknown.store(true, Ordering::SeqCst);
    }

    /// Returns and clears the chunks noted since the last call.
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
