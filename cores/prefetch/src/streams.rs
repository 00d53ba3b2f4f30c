//! The stream prefetcher: detects places in which a vCPU advances page by page, and predicts the pages that follow.

use std::ops::Range;

use crate::Page;

/// Consecutive faults from which on a stream is prefetched.
const MIN_STREAM_FAULTS: u32 = 3;
/// Pages of a stream's first prefetch. The number doubles with every fault just behind the prefetched pages.
const FIRST_PREFETCH_PAGES: u64 = 2;
/// Limit of prefetched pages per stream. Pages beyond the stream's end cost their owner a fault each.
const MAX_PREFETCH_PAGES: u64 = 128;
/// Streams per vCPU. A fault searches all of them, which takes nanoseconds where the fault takes tens of microseconds.
const MAX_STREAMS: usize = 64;

/// Recent faults of one vCPU, by stream.
#[derive(Debug, Default)]
pub(crate) struct StreamPrefetcher {
    /// Streams, the one with the latest fault last.
    known: Vec<Stream>,
}

impl StreamPrefetcher {
    /// Processes a fault. Returns the prefetched pages that the vCPU has used before it, and the pages to prefetch.
    pub(crate) fn fault(&mut self, page: Page, write: bool) -> (Range<Page>, Range<Page>) {
        let mut stream = match self.known.iter().rposition(|stream| stream.continues_at(page, write)) {
            Some(at) => self.known.remove(at),
            None => {
                if self.known.len() >= MAX_STREAMS {
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

/// A stream: faults on consecutive pages.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The page whose fault continues the stream.
    next: Page,
    write: bool,
    run: u32,
    /// Pages predicted at the last fault that continued it.
    ahead: u64,
}

impl Stream {
    /// Whether a fault continues the stream. Prefetched pages may have been revoked since, so it may be one of them.
    fn continues_at(&self, page: Page, write: bool) -> bool {
        self.run > 0 && write == self.write && page <= self.next && page + self.ahead >= self.next
    }

    /// Returns the number of pages to prefetch behind `page`. If the fault is on a prefetched page, which was revoked or is in flight, the
    /// prediction doesn't grow. A vCPU that returns to the same few pages in each round doesn't need those behind them, which would cost
    /// their owner a fault each.
    fn fault(&mut self, page: Page, write: bool) -> u64 {
        if self.run > 0 && page < self.next {
            return self.next - page - 1;
        }
        self.run = self.run.saturating_add(1);
        self.ahead = match self.run {
            run if run < MIN_STREAM_FAULTS => 0,
            MIN_STREAM_FAULTS => FIRST_PREFETCH_PAGES,
            _ => (self.ahead * 2).clamp(FIRST_PREFETCH_PAGES, MAX_PREFETCH_PAGES),
        };
        (self.next, self.write) = (page + 1 + self.ahead, write);
        self.ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of pages that a fault prefetches.
    fn ahead(streams: &mut StreamPrefetcher, page: Page, write: bool) -> u64 {
        let (_, ahead) = streams.fault(page, write);
        assert_eq!(ahead.start, page + 1);
        ahead.end - ahead.start
    }

    /// A vCPU that advances page by page gets more and more pages prefetched; one that jumps gets none.
    #[test]
    fn streams_are_found_and_jumps_are_not() {
        let mut streams = StreamPrefetcher::default();
        let mut page = 100;
        let mut fetched = Vec::new();
        for _ in 0..10 {
            let ahead = ahead(&mut streams, page, false);
            fetched.push(ahead);
            page += 1 + ahead;
        }
        assert_eq!(fetched, [0, 0, 2, 4, 8, 16, 32, 64, 128, 128]);
        // A fault on a prefetched page that was revoked, or is in flight: the same stream, with an unchanged prediction.
        assert_eq!(ahead(&mut streams, page - 5, false), 4);
        assert_eq!(ahead(&mut streams, page, false), 128);
        page += 129;
        // The other access, another place, and backwards.
        assert_eq!(ahead(&mut streams, page - 4, true), 0);
        assert_eq!(ahead(&mut streams, 5000, true), 0);
        assert_eq!(ahead(&mut streams, 4999, true), 0);
        assert_eq!(ahead(&mut streams, 4998, true), 0);
        assert_eq!(ahead(&mut streams, 4997, true), 0);
    }

    /// A vCPU that returns to the same few pages in each round has them prefetched and none behind them, at whichever page a round begins.
    #[test]
    fn a_stream_that_ends_at_the_same_place_does_not_grow() {
        let mut streams = StreamPrefetcher::default();
        let mut fetched = std::collections::BTreeSet::new();
        for round in 0..50 {
            let mut here = std::collections::BTreeSet::new();
            // One page is still here at first, so it isn't fetched again.
            here.extend((round > 0).then_some(100 + round % 8));
            for page in 100..108 {
                if here.insert(page) {
                    let prediction = streams.fault(page, false).1;
                    here.extend(prediction.clone());
                    fetched.extend(prediction);
                }
            }
        }
        assert!(fetched.last() <= Some(&111), "{fetched:?}");
    }

    /// Prefetched pages count as used at a fault behind them, and not before.
    #[test]
    fn what_a_stream_has_used_is_known_at_its_next_fault() {
        let mut streams = StreamPrefetcher::default();
        for page in [10, 11] {
            assert!(streams.fault(page, false).0.is_empty());
        }
        assert_eq!(streams.fault(12, false), (12..12, 13..15));
        assert_eq!(streams.fault(15, false), (13..15, 16..20));
        assert_eq!(streams.fault(18, false), (16..18, 19..20));
        assert_eq!(streams.fault(20, false), (16..20, 21..29));
        assert!(streams.fault(500, false).0.is_empty());
    }

    /// A vCPU that advances in several places has a stream in each, up to `MAX_STREAMS`. The stream with the oldest fault is replaced.
    #[test]
    fn a_vcpu_has_many_streams() {
        let place = |stream: usize| 10_000 * (stream as Page + 1);
        let turns = |streams: &mut StreamPrefetcher, count: usize| -> Vec<u64> {
            let at = |turn: Page| (0..count).map(move |stream| place(stream) + turn);
            (0..3).flat_map(at).map(|page| ahead(streams, page, false)).collect()
        };
        let mut streams = StreamPrefetcher::default();
        let all = turns(&mut streams, MAX_STREAMS);
        assert!(all[..2 * MAX_STREAMS].iter().all(|ahead| *ahead == 0));
        assert!(all[2 * MAX_STREAMS..].iter().all(|ahead| *ahead == FIRST_PREFETCH_PAGES));
        // A new stream replaces the first, which starts over.
        assert_eq!(ahead(&mut streams, 1, false), 0);
        assert_eq!(ahead(&mut streams, place(0) + 3 + FIRST_PREFETCH_PAGES, false), 0);
        assert_eq!(
            ahead(&mut streams, place(MAX_STREAMS - 1) + 3 + FIRST_PREFETCH_PAGES, false),
            2 * FIRST_PREFETCH_PAGES
        );
        let one_more = turns(&mut StreamPrefetcher::default(), MAX_STREAMS + 1);
        assert!(one_more.iter().all(|ahead| *ahead == 0));
    }
}
