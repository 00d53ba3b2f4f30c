//! Places from which a vCPU goes on from page to page, and how many pages may follow.

use std::ops::Range;

use dsm::Page;

/// Faults in a row before pages are fetched ahead of a stream.
const RUN: u32 = 3;
/// Pages fetched ahead of a stream at first; doubled at every fault right behind them.
const FIRST: u64 = 2;
/// Pages fetched ahead of a stream at most. What is fetched in vain beyond its end costs its owner a fault each.
const MAX_PREFETCH_PAGES: u64 = 128;
/// Places that a vCPU may go on from in turns. A fault looks at all of them, which takes nanoseconds where it takes tens of microseconds.
const STREAMS: usize = 64;

/// The faults of one vCPU of late, by the places that they go on from.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// The one that went on last is the last.
    known: Vec<Stream>,
}

impl Streams {
    /// Pages that were fetched ahead and that the one which faults now shows to be used, and those to fetch behind it.
    pub(super) fn fault(&mut self, page: Page, write: bool) -> (Range<Page>, Range<Page>) {
        let mut stream = match self.known.iter().rposition(|stream| stream.goes_on(page, write)) {
            Some(at) => self.known.remove(at),
            None => {
                if self.known.len() >= STREAMS {
                    self.known.remove(0);
                }
                Stream::default()
            }
        };
        let begin = if stream.run == 0 { page } else { stream.next.saturating_sub(stream.ahead).min(page) };
        let used = begin..page;
        let ahead = stream.fault(page, write);
        self.known.push(stream);
        (used, page + 1..page + 1 + ahead)
    }
}

/// Faults that go on from page to page.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Where the next one goes on.
    next: Page,
    write: bool,
    run: u32,
    /// Pages foreseen at the last one that went on.
    ahead: u64,
}

impl Stream {
    /// Whether a fault there is one more of them. What was fetched may have gone again.
    fn goes_on(&self, page: Page, write: bool) -> bool {
        self.run > 0 && write == self.write && page <= self.next && page + self.ahead >= self.next
    }

    /// See [`Streams::fault`]. Where what was fetched has gone again, or is still on its way, no more is fetched than what was foreseen before: who comes back to the same few
    /// pages, round by round, doesn't want those behind them, and these would cost their owner a fault each.
    fn fault(&mut self, page: Page, write: bool) -> u64 {
        if self.run > 0 && page < self.next {
            return self.next - page - 1;
        }
        self.run = self.run.saturating_add(1);
        self.ahead = match self.run {
            run if run < RUN => 0,
            RUN => FIRST,
            _ => (self.ahead * 2).clamp(FIRST, MAX_PREFETCH_PAGES),
        };
        (self.next, self.write) = (page + 1 + self.ahead, write);
        self.ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many pages are fetched ahead of one that faults.
    fn ahead(streams: &mut Streams, page: Page, write: bool) -> u64 {
        let (_, ahead) = streams.fault(page, write);
        assert_eq!(ahead.start, page + 1);
        ahead.end - ahead.start
    }

    /// Pages are fetched ahead of a vCPU that goes on from page to page, more and more, and not of one that jumps.
    #[test]
    fn streams_are_found_and_jumps_are_not() {
        let mut streams = Streams::default();
        let mut page = 100;
        let mut fetched = Vec::new();
        for _ in 0..10 {
            let ahead = ahead(&mut streams, page, false);
            fetched.push(ahead);
            page += 1 + ahead;
        }
        assert_eq!(fetched, [0, 0, 2, 4, 8, 16, 32, 64, 128, 128]);
        // It comes to a page that has gone again, or isn't there yet: still the same stream, but nothing more is foreseen.
        assert_eq!(ahead(&mut streams, page - 5, false), 4);
        assert_eq!(ahead(&mut streams, page, false), 128);
        page += 129;
        // Another kind, another place, backwards.
        assert_eq!(ahead(&mut streams, page - 4, true), 0);
        assert_eq!(ahead(&mut streams, 5000, true), 0);
        assert_eq!(ahead(&mut streams, 4999, true), 0);
        assert_eq!(ahead(&mut streams, 4998, true), 0);
        assert_eq!(ahead(&mut streams, 4997, true), 0);
    }

    /// Who comes back to the same few pages, round by round, has those fetched and none behind them, wherever in them it faults.
    #[test]
    fn a_stream_that_ends_at_the_same_place_does_not_grow() {
        let mut streams = Streams::default();
        let mut fetched = std::collections::BTreeSet::new();
        for round in 0..50 {
            let mut here = std::collections::BTreeSet::new();
            // One of them is still there at first: it isn't fetched again.
            here.extend((round > 0).then_some(100 + round % 8));
            for page in 100..108 {
                if here.insert(page) {
                    let foreseen = streams.fault(page, false).1;
                    here.extend(foreseen.clone());
                    fetched.extend(foreseen);
                }
            }
        }
        assert!(fetched.last() <= Some(&111), "{fetched:?}");
    }

    /// What was fetched ahead counts as used when the vCPU comes to what lies behind it, and only then.
    #[test]
    fn what_a_stream_has_used_is_known_at_its_next_fault() {
        let mut streams = Streams::default();
        for page in [10, 11] {
            assert!(streams.fault(page, false).0.is_empty());
        }
        assert_eq!(streams.fault(12, false), (12..12, 13..15));
        assert_eq!(streams.fault(15, false), (13..15, 16..20));
        assert_eq!(streams.fault(18, false), (16..18, 19..20));
        assert_eq!(streams.fault(20, false), (16..20, 21..29));
        assert!(streams.fault(500, false).0.is_empty());
    }

    /// Who goes on in several places in turns has a stream in each, up to a number of places; those that went on longest ago are forgotten.
    #[test]
    fn a_vcpu_has_many_streams() {
        let place = |stream: usize| 10_000 * (stream as Page + 1);
        let turns = |streams: &mut Streams, count: usize| -> Vec<u64> {
            let at = |turn: Page| (0..count).map(move |stream| place(stream) + turn);
            (0..3).flat_map(at).map(|page| ahead(streams, page, false)).collect()
        };
        let mut streams = Streams::default();
        let all = turns(&mut streams, STREAMS);
        assert!(all[..2 * STREAMS].iter().all(|ahead| *ahead == 0));
        assert!(all[2 * STREAMS..].iter().all(|ahead| *ahead == FIRST));
        // Another one takes the place of the first, which begins anew.
        assert_eq!(ahead(&mut streams, 1, false), 0);
        assert_eq!(ahead(&mut streams, place(0) + 3 + FIRST, false), 0);
        assert_eq!(ahead(&mut streams, place(STREAMS - 1) + 3 + FIRST, false), 2 * FIRST);
        let one_more = turns(&mut Streams::default(), STREAMS + 1);
        assert!(one_more.iter().all(|ahead| *ahead == 0));
    }
}
