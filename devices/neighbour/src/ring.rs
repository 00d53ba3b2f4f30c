//! One ring: a producer, a consumer, and the consumer's wakeup.
//!
//! Each entry ends with a *stamp*: the epoch (high 32 bits) and the number of the entry plus one (low 32 bits, counted from 0 at the start
//! of the epoch, wrapping). The consumer polls the stamp of its next entry. There is no index to read, so an entry costs one transfer of a
//! cache line. Entries of an earlier epoch or an earlier round of the ring are never valid. Epoch 0 doesn't exist, and zeroed memory has no
//! valid stamp.
//!
//! Before it sleeps, the consumer *arms*: it stores the stamp that it waits for, passes a fence, and polls again. After it has written
//! entries, the producer passes a fence and reads that word. If the word names one of these entries, the producer signals. So at least one
//! of the two sees the other (Dekker's algorithm; `tests/loom.rs`). There is one signal per sleep, and none while the consumer is awake.
//!
//! ```text
//!  consumer: awake ── no entry ──▶ arm, fence, poll ──┬─ entry ────▶ awake
//!                ▲                                    └─ no entry ──▶ asleep ── signal ──▶ awake
//!  producer: write entries, stamps ──▶ fence, read armed ──▶ signal, if it names one of these
//! ```

use crate::layout::RingPlace;
use crate::words::Words;

/// The stamp of entry `number` in `epoch`.
#[must_use]
pub const fn stamp(epoch: u32, number: u32) -> u64 {
    (epoch as u64) << 32 | number.wrapping_add(1) as u64
}

const fn index(place: &RingPlace, number: u32) -> usize {
    (number & (place.entries - 1)) as usize
}

/// The side of a ring that writes entries of `N` words, of which the last is the stamp. Its owner ensures that there is room.
#[derive(Debug)]
pub struct Producer<const N: usize> {
    place: RingPlace,
    epoch: u32,
    /// Number of the next entry to write.
    tail: u32,
    /// Entries from here to `tail` may have a sleeper that wasn't signaled.
    unannounced: u32,
}

impl<const N: usize> Producer<N> {
    /// At the start of an epoch (not 0).
    #[must_use]
    pub const fn new(place: RingPlace, epoch: u32) -> Self {
        Self { place, epoch, tail: 0, unannounced: 0 }
    }

    /// Continues as if `number` entries had been written and announced.
    #[cfg(test)]
    pub(crate) fn begin_at(&mut self, number: u32) {
        (self.tail, self.unannounced) = (number, number);
    }

    /// Number of entries written in this epoch, wrapping.
    #[must_use]
    pub const fn tail(&self) -> u32 {
        self.tail
    }

    /// Writes `count` entries with the words of `entry(i)`, whose last is replaced by the stamp. The first entry becomes valid last, so the
    /// consumer sees all or none. The caller has ensured that there is room.
    #[inline]
    pub fn write(
        &mut self,
        words: &(impl Words + ?Sized),
        count: u32,
        mut entry: impl FnMut(u32) -> [u64; N],
    ) {
        for at in (0..count).rev() {
            let number = self.tail.wrapping_add(at);
            let first = self.place.first + index(&self.place, number) * N;
            let content = entry(at);
            for (offset, word) in content.iter().enumerate().take(N - 1) {
                words.store(first + offset, *word);
            }
            words.store_release(first + N - 1, stamp(self.epoch, number));
        }
        self.tail = self.tail.wrapping_add(count);
    }

    /// Whether the consumer sleeps for one of the entries written since the last call. The caller must then signal it, once.
    #[must_use]
    #[inline]
    pub fn must_signal(&mut self, words: &(impl Words + ?Sized)) -> bool {
        if self.unannounced == self.tail {
            return false;
        }
        words.fence();
        let (number, epoch) = crate::layout::halves(words.load(self.place.sleeps));
        let behind = number.wrapping_sub(1).wrapping_sub(self.unannounced);
        let wanted = epoch == self.epoch && behind < self.tail.wrapping_sub(self.unannounced);
        self.unannounced = self.tail;
        wanted
    }
}

/// The side of a ring that reads entries.
#[derive(Debug)]
pub struct Consumer<const N: usize> {
    place: RingPlace,
    epoch: u32,
    /// Number of the next entry to read.
    head: u32,
}

impl<const N: usize> Consumer<N> {
    /// At the start of an epoch (not 0).
    #[must_use]
    pub const fn new(place: RingPlace, epoch: u32) -> Self {
        Self { place, epoch, head: 0 }
    }

    /// Number of entries consumed in this epoch, wrapping.
    #[must_use]
    pub const fn head(&self) -> u32 {
        self.head
    }

    fn first_word(&self, ahead: u32) -> usize {
        self.place.first + index(&self.place, self.head.wrapping_add(ahead)) * N
    }

    /// Whether the next entry is valid.
    #[must_use]
    #[inline]
    pub fn ready(&self, words: &(impl Words + ?Sized)) -> bool {
        words.load_acquire(self.first_word(0) + N - 1) == stamp(self.epoch, self.head)
    }

    /// A copy of the entry `ahead` positions after the next one, if it is valid. Reads each word once, and doesn't consume the entry.
    #[must_use]
    #[inline]
    pub fn peek(&self, words: &(impl Words + ?Sized), ahead: u32) -> Option<[u64; N]> {
        if ahead >= self.place.entries {
            return None;
        }
        let first = self.first_word(ahead);
        let wanted = stamp(self.epoch, self.head.wrapping_add(ahead));
        if words.load_acquire(first + N - 1) != wanted {
            return None;
        }
        let mut copy = [0; N];
        for (offset, word) in copy.iter_mut().enumerate().take(N - 1) {
            *word = words.load(first + offset);
        }
        copy[N - 1] = wanted;
        Some(copy)
    }

    /// Consumes the next `count` entries.
    #[inline]
    pub fn advance(&mut self, count: u32) {
        self.head = self.head.wrapping_add(count);
    }

    /// Announces that this side is about to sleep. True: it may sleep, and will be signaled when the next entry is written. False: the
    /// entry is valid already, and a signal may come as well.
    #[must_use]
    #[inline]
    pub fn arm(&self, words: &(impl Words + ?Sized)) -> bool {
        words.store(self.place.sleeps, stamp(self.epoch, self.head));
        words.fence();
        !self.ready(words)
    }
}
