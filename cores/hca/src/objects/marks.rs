//! Marks: which objects of a device were created, changed or destroyed, and so must be copied by a migration.
//!
//! A bit per handle, apart from the objects: setting a mark touches none of their cache lines, and finding marks reads one word for 64
//! objects.

use crate::saved::{Kind, Name};

/// A bit per handle.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<u64>,
    count: usize,
}

impl Bits {
    #[inline]
    fn set(&mut self, handle: u32) {
        let (at, bit) = ((handle / 64) as usize, 1u64 << (handle % 64));
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        self.count += usize::from(self.words[at] & bit == 0);
        self.words[at] |= bit;
    }
}

/// The touched objects. While it is off, a mark costs a load of a flag.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    on: bool,
    kinds: [Bits; Kind::ALL.len()],
}

impl Marks {
    /// Marks an object that was created, changed or destroyed. Its handle was a live one, so the bits stay below the device's limits.
    #[inline]
    pub fn touch(&mut self, kind: Kind, handle: u32) {
        if self.on {
            self.kinds[kind as usize].set(handle);
        }
    }

    /// Begins or ends marking; no object is marked afterwards.
    pub fn set(&mut self, on: bool) {
        *self = Self { on, ..Self::default() };
    }

    pub fn on(&self) -> bool {
        self.on
    }

    /// Number of marked objects.
    pub fn count(&self) -> usize {
        self.kinds.iter().map(|bits| bits.count).sum()
    }

    /// Returns and clears at most `most` marks, each object after those that it refers to.
    pub fn take(&mut self, most: usize, mut each: impl FnMut(Name)) {
        let mut room = most;
        for kind in Kind::ALL {
            let bits = &mut self.kinds[kind as usize];
            for (word, at) in bits.words.iter_mut().zip(0u32..) {
                if bits.count == 0 || room == 0 {
                    break;
                }
                while *word != 0 && room > 0 {
                    each(Name { kind, handle: at * 64 + word.trailing_zeros() });
                    *word &= *word - 1;
                    bits.count -= 1;
                    room -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Taking marks in parts equals taking them at once: each mark once, kinds in order, and the rest is counted.
    #[test]
    fn marks_are_taken_in_parts() {
        let mut marks = Marks::default();
        marks.set(true);
        for handle in [0, 63, 64, 700] {
            marks.touch(Kind::QueuePair, handle);
            marks.touch(Kind::CompletionQueue, handle);
        }
        let mut parts = Vec::new();
        for left in [5, 2, 0] {
            let before = parts.len();
            marks.take(3, |name| parts.push((name.kind, name.handle)));
            assert_eq!(parts.len() - before, 8_usize.saturating_sub(before).min(3));
            assert_eq!(marks.count(), left);
        }
        let expected: Vec<_> = [Kind::CompletionQueue, Kind::QueuePair]
            .into_iter()
            .flat_map(|kind| [0, 63, 64, 700].map(|handle| (kind, handle)))
            .collect();
        assert_eq!(parts, expected);
        marks.touch(Kind::QueuePair, 3);
        marks.take(usize::MAX, |name| assert_eq!((name.kind, name.handle), (Kind::QueuePair, 3)));
        assert_eq!(marks.count(), 0);
    }
}
