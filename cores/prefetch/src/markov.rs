//! The follower prefetcher: learns which fault of a vCPU soon follows which, and prefetches the follower's page with the first one.
//!
//! Without it, a vCPU that writes one row and then reads its neighbor's waits for two batches of pages in sequence, in every round.
//! Source: *Prefetching using Markov Predictors* (Joseph and Grunwald, ISCA 1997), with one successor per fault.

use std::collections::HashMap;

use crate::PageRequest;

/// Longest time between two faults of which the second counts as a follower, ns.
const MAX_FOLLOW_NS: u64 = 2_000_000;
/// Times that a fault must follow another before the prefetcher relies on it.
const MIN_CONFIRMATIONS: u8 = 2;
/// One prediction in `TEST_ONE_IN` is left out, as a test of whether the fault still follows.
const TEST_ONE_IN: u8 = 8;
/// Limit of remembered faults. At the limit, all are forgotten.
const MAX_REMEMBERED_FAULTS: usize = 4096;

/// The learned follower of a fault.
#[derive(Debug, Clone, Copy)]
struct Next {
    request: PageRequest,
    confirmations: u8,
    predictions: u8,
}

/// The follower prefetcher of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct MarkovPrefetcher {
    after: HashMap<PageRequest, Next>,
    /// The last fault, or its prefetched follower, and its time, ns.
    last: Option<(PageRequest, u64)>,
}

impl MarkovPrefetcher {
    /// Learns a fault. Returns its follower if the prefetcher relies on it and `is_worthwhile` accepts it.
    pub(crate) fn fault(
        &mut self,
        request: PageRequest,
        now: u64,
        is_worthwhile: impl FnOnce(PageRequest) -> bool,
    ) -> Option<PageRequest> {
        if let Some((before, at)) = self.last.replace((request, now))
            && now.saturating_sub(at) <= MAX_FOLLOW_NS
            && before != request
        {
            if self.after.len() >= MAX_REMEMBERED_FAULTS {
                self.after.clear();
            }
            let next = self.after.entry(before).or_insert(Next { request, confirmations: 0, predictions: 0 });
            if next.request == request {
                next.confirmations = next.confirmations.saturating_add(1).min(MIN_CONFIRMATIONS);
            } else {
                *next = Next { request, confirmations: 1, predictions: 0 };
            }
        }
        let next = self.after.get_mut(&request).filter(|next| next.confirmations >= MIN_CONFIRMATIONS)?;
        next.predictions = (next.predictions + 1) % TEST_ONE_IN;
        let found = next.request;
        if next.predictions == 0 {
            // The follower must be confirmed by a fault. If another fault comes instead, it replaces the follower.
            next.confirmations = MIN_CONFIRMATIONS - 1;
            return None;
        }
        if !is_worthwhile(found) {
            return None;
        }
        self.last = Some((found, now));
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Page;

    const A: PageRequest = (1, true);
    const B: PageRequest = (20, false);
    const C: PageRequest = (30, false);

    /// Prefetches of a vCPU that faults on `wants`, except on prefetched ones.
    fn round(follow: &mut MarkovPrefetcher, at: u64, wants: &[PageRequest]) -> Vec<PageRequest> {
        let mut prefetched = Vec::new();
        for (index, request) in wants.iter().enumerate() {
            if !prefetched.contains(request) {
                let now = at + 300_000 * u64::try_from(index).unwrap();
                prefetched.extend(follow.fault(*request, now, |_| true));
            }
        }
        prefetched
    }

    /// A follower that was confirmed twice is prefetched, except one time in eight.
    #[test]
    fn followers_are_prefetched() {
        let mut follow = MarkovPrefetcher::default();
        let all: Vec<_> = (1..80).map(|turn| round(&mut follow, turn * 10_000_000, &[A, B])).collect();
        assert_eq!(all[..2], [vec![], vec![]]);
        let prefetched = all.iter().filter(|prefetched| **prefetched == [B]).count();
        assert!((60..=75).contains(&prefetched), "{prefetched}");
    }

    /// A fault that doesn't follow any more is prefetched only a few more times. The fault that follows instead replaces it.
    #[test]
    fn faults_that_follow_no_more_are_forgotten() {
        let mut follow = MarkovPrefetcher::default();
        for turn in 1..6 {
            round(&mut follow, turn * 10_000_000, &[A, B]);
        }
        let all: Vec<_> = (6..40).map(|turn| round(&mut follow, turn * 10_000_000, &[A])).collect();
        assert!(all.iter().filter(|prefetched| !prefetched.is_empty()).count() < 8, "{all:?}");
        assert!(all[10..].iter().all(Vec::is_empty));
        let all: Vec<_> = (40..80).map(|turn| round(&mut follow, turn * 10_000_000, &[A, C])).collect();
        assert!(all[2..].iter().filter(|prefetched| **prefetched == [C]).count() > 30, "{all:?}");
    }

    /// Faults that are far apart, and pages that aren't worth it, aren't prefetched.
    #[test]
    fn distant_faults_and_unworthy_pages_are_not_prefetched() {
        let mut follow = MarkovPrefetcher::default();
        for turn in 0..20 {
            assert_eq!(follow.fault(A, turn * 10 * MAX_FOLLOW_NS, |_| true), None);
            assert_eq!(follow.fault(B, turn * 10 * MAX_FOLLOW_NS + MAX_FOLLOW_NS + 1, |_| true), None);
        }
        let mut follow = MarkovPrefetcher::default();
        for turn in 0..20 {
            assert_eq!(follow.fault(A, turn * 10 * MAX_FOLLOW_NS, |_| false), None);
            assert_eq!(follow.fault(B, turn * 10 * MAX_FOLLOW_NS + 1, |_| false), None);
        }
    }

    /// The number of remembered faults is bounded.
    #[test]
    fn memory_is_bounded() {
        let mut follow = MarkovPrefetcher::default();
        for page in 0..3 * MAX_REMEMBERED_FAULTS as Page {
            follow.fault((page, false), page, |_| true);
        }
        assert!(follow.after.len() <= MAX_REMEMBERED_FAULTS);
    }
}
