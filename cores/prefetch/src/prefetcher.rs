//! The prefetchers of one vCPU, and their joint prediction.

use std::ops::Range;

use crate::markov::MarkovPrefetcher;
use crate::spatial::SpatialPrefetcher;
use crate::streams::StreamPrefetcher;
use crate::{Page, PageRequest};

/// Known pages from which on a batch is requested before its first fault. A single page may be about to be used by another node, for
/// example a lock's.
const MIN_BATCH_PAGES: u32 = 4;

/// Prefetcher of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    streams: StreamPrefetcher,
    read: SpatialPrefetcher,
    written: SpatialPrefetcher,
    markov: MarkovPrefetcher,
}

impl Prefetcher {
    /// Predicts from a fault on `page`. `is_present` tells whether a page needs no fetch.
    pub(crate) fn fault(
        &mut self,
        page: Page,
        write: bool,
        now: u64,
        is_present: impl Fn(PageRequest) -> bool,
    ) -> Prediction {
        let (used, stream_pages) = self.streams.fault(page, write);
        let rounds = if write { &mut self.written } else { &mut self.read };
        used.clone().for_each(|page| rounds.requested(page));
        let known = rounds.fault(page, |page| is_present((page, write)));
        let mut known: Vec<PageRequest> = known.into_iter().map(|page| (page, write)).collect();
        let (read, written) = (&self.read, &self.written);
        let batch = |(page, write)| if write { written } else { read }.known(page) >= MIN_BATCH_PAGES;
        if let Some((first, write)) = self.markov.fault((page, write), now, batch) {
            let rounds = if write { &mut self.written } else { &mut self.read };
            let others = rounds.fault(first, |page| is_present((page, write)));
            known.extend(std::iter::once(first).chain(others).map(|page| (page, write)));
        }
        let rounds = if write { &self.written } else { &self.read };
        // A page that is left out as a test must be requested by the vCPU itself.
        let stream_pages = stream_pages.filter(|page| !rounds.is_left_out(*page)).collect();
        Prediction { used, known, stream_pages }
    }

    /// A page was revoked soon after its prefetch.
    pub(crate) fn suspect(&mut self, page: Page) {
        self.read.suspect(page);
        self.written.suspect(page);
    }
}

/// Result of [`Prefetcher::fault`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Prediction {
    /// Prefetched pages that the vCPU has used.
    pub(crate) used: Range<Page>,
    /// Pages that the vCPU needed together with this one before, or soon after it.
    pub(crate) known: Vec<PageRequest>,
    /// Pages that follow in a stream.
    pub(crate) stream_pages: Vec<Page>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream doesn't fetch pages that a round leaves out.
    #[test]
    fn streams_leave_out_what_the_spatial_prefetcher_does() {
        let mut prefetcher = Prefetcher::default();
        prefetcher.written.begin_round(70..78, 73);
        let stream_pages: Vec<_> =
            (70..73).map(|page| prefetcher.fault(page, true, 0, |_| false).stream_pages).collect();
        assert_eq!(stream_pages, [vec![], vec![], vec![74]]);
        // The vCPU has requested it.
        assert_eq!(prefetcher.fault(73, true, 0, |_| false).stream_pages, [74]);
        assert_eq!(prefetcher.fault(75, true, 0, |_| false).stream_pages, [76, 77, 78, 79]);
    }
}
