//! Replay protection: received counters in a sliding window, after RFC 6479 (IPsec anti-replay without bit shifting).

/// Number of words of the window.
const WORDS: u64 = 128;
/// How far behind the newest counter an older one can still be distinguished from a repeated one.
pub(super) const REACH: u64 = (WORDS - 1) * 64;

/// The counters received on one lane.
#[derive(Debug, Clone)]
pub(super) struct Window {
    /// One more than the greatest accepted counter.
    next: u64,
    /// A ring: bit `counter % 64` of word `counter / 64 % WORDS`.
    words: Box<[u64]>,
}

impl Default for Window {
    fn default() -> Self {
        // Allocated with its session, so that no packet allocates.
        Self { next: 0, words: vec![0; usize::try_from(WORDS).unwrap_or(0)].into_boxed_slice() }
    }
}

fn place(counter: u64) -> (usize, u64) {
    (usize::try_from(counter / 64 % WORDS).unwrap_or(0), 1 << (counter % 64))
}

impl Window {
    /// Whether a counter is new. It isn't recorded yet: first its packet must prove to be authentic.
    pub fn is_new(&self, counter: u64) -> bool {
        if counter >= self.next {
            return true;
        }
        let (word, bit) = place(counter);
        self.next - counter <= REACH && self.words.get(word).is_some_and(|word| word & bit == 0)
    }

    /// Records a counter; `false` if it was not new.
    pub fn take(&mut self, counter: u64) -> bool {
        if !self.is_new(counter) || counter == u64::MAX {
            return false;
        }
        if counter >= self.next {
            // Words that enter the window; all of them after a great leap.
            let newest = self.next.wrapping_sub(1) / 64;
            let first = if self.next == 0 { 0 } else { newest + 1 };
            let last = counter / 64;
            for word in first.max(last.saturating_sub(WORDS - 1))..=last {
                if let Some(word) = self.words.get_mut(place(word * 64).0) {
                    *word = 0;
                }
            }
            self.next = counter + 1;
        }
        let (word, bit) = place(counter);
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Against a set of all accepted counters: none is accepted twice, and any that is new and not too old is accepted.
        #[test]
        fn a_counter_is_taken_once(steps in prop::collection::vec((0u64..4, 0u64..20_000), 1..400)) {
            let mut window = Window::default();
            let mut seen = BTreeSet::new();
            let mut newest = 0u64;
            for (kind, by) in steps {
                let counter = match kind {
                    0 => newest + 1,
                    1 => newest + by,
                    2 => newest.saturating_sub(by % 200),
                    _ => newest.saturating_sub(by),
                };
                let too_old = !seen.is_empty() && newest + 1 - counter.min(newest) > REACH;
                let expected = !seen.contains(&counter) && !too_old;
                prop_assert_eq!(window.is_new(counter), expected);
                prop_assert_eq!(window.take(counter), expected);
                if expected {
                    seen.insert(counter);
                    newest = newest.max(counter);
                }
            }
        }
    }

    #[test]
    fn the_greatest_counters_are_no_trap() {
        let mut window = Window::default();
        assert!(window.take(5) && window.take(u64::MAX - 1) && !window.take(u64::MAX - 1));
        assert!(!window.take(u64::MAX) && !window.take(5) && window.take(u64::MAX - 2));
    }
}
