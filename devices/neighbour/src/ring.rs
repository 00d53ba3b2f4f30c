//! One ring: a producer, a consumer, and when to wake the consumer.
//!
//! Each entry ends with a *stamp*: the epoch (high 32 bits) and the number of the entry plus one (low 32 bits, counted from 0
//! at the beginning of the epoch, wrapping). The consumer polls the stamp of the entry that it wants next: there is no
//! index to read, so that an entry costs one cache-line transfer, and what was left by an earlier epoch or an earlier
//! round of the ring never looks valid. Epoch 0 doesn't exist, nor does the stamp 0 of zeroed memory.
//!
//! Sleeping (*armed*): the consumer writes the stamp that it waits for into its word, a fence, and looks once more. The
//! producer, after it has written entries, a fence, reads that word, and signals when it names one of them. So one of the
//! two sees the other (Dekker's argument; `tests/loom.rs`), there is one signal per sleep, and none while the consumer is awake.
//!
//! ```text
//!  consumer: awake ── nothing there ──▶ arm, fence, look ──┬─ there is something ──▶ awake
//!                ▲                                         └─ nothing ──▶ asleep ── signal ──▶ awake
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

/// The side of a ring that writes entries of `N` words, the stamp being the last of them. Whether there is room is its
/// owner's affair.
#[derive(Debug)]
pub struct Producer<const N: usize> {
    place: RingPlace,
    epoch: u32,
    /// Entry to write next.
    tail: u32,
    /// Entries from here to the tail may have a sleeper that wasn't woken.
    unannounced: u32,
}

impl<const N: usize> Producer<N> {
    /// At the beginning of an epoch (not 0).
    #[must_use]
    pub const fn new(place: RingPlace, epoch: u32) -> Self {
        Self { place, epoch, tail: 0, unannounced: 0 }
    }

    /// As if `number` entries had been written and seen.
    #[cfg(test)]
    pub(crate) fn begin_at(&mut self, number: u32) {
        (self.tail, self.unannounced) = (number, number);
    }

    /// How many entries were written in this epoch, wrapping.
    #[must_use]
    pub const fn tail(&self) -> u32 {
        self.tail
    }

    /// Writes `count` entries, entry `i` as `entry(i)` says (its last word is replaced by the stamp), so that the consumer sees
    /// either none of them or all: the first becomes valid last. The owner has made sure that there is room.
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

    /// Whether the consumer sleeps for one of the entries written since the last call: then it must be signalled, once.
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
    /// Entry to read next.
    head: u32,
}

impl<const N: usize> Consumer<N> {
    /// At the beginning of an epoch (not 0).
    #[must_use]
    pub const fn new(place: RingPlace, epoch: u32) -> Self {
        Self { place, epoch, head: 0 }
    }

    /// How many entries were taken in this epoch, wrapping.
    #[must_use]
    pub const fn head(&self) -> u32 {
        self.head
    }

    fn first_word(&self, ahead: u32) -> usize {
        self.place.first + index(&self.place, self.head.wrapping_add(ahead)) * N
    }

    /// Whether the next entry is there.
    #[must_use]
    #[inline]
    pub fn ready(&self, words: &(impl Words + ?Sized)) -> bool {
        words.load_acquire(self.first_word(0) + N - 1) == stamp(self.epoch, self.head)
    }

    /// A copy of the entry `ahead` of the next one, if it is there: each word read once. It stays where it is.
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

    /// Goes on to the entry after the next `count`.
    #[inline]
    pub fn advance(&mut self, count: u32) {
        self.head = self.head.wrapping_add(count);
    }

    /// Says that this side is about to sleep. True: it may, and will be signalled when the next entry comes. False: the entry is
    /// there already; whether a signal comes as well is open.
    #[must_use]
    #[inline]
    pub fn arm(&self, words: &(impl Words + ?Sized)) -> bool {
        words.store(self.place.sleeps, stamp(self.epoch, self.head));
        words.fence();
        !self.ready(words)
    }
}
