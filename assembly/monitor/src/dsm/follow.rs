//! The follower prefetcher: learns which fault of a vCPU soon follows which, and prefetches the follower's page with the first one.
//!
//! Without it, a vCPU that writes one row and then reads its neighbor's waits for two batches of pages in sequence, in every round.
//! Source: *Prefetching using Markov Predictors* (Joseph and Grunwald, ISCA 1997), with one successor per fault.

use std::collections::HashMap;

use dsm::Page;

/// Longest time between two faults of which the second counts as a follower, ns.
const NEAR: u64 = 2_000_000;
/// Times that a fault must follow another before the prefetcher relies on it.
const SURE: u8 = 2;
/// One prediction in `TRIED` is left out, as a test of whether the fault still follows.
const TRIED: u8 = 8;
/// Limit of remembered faults. At the limit, all are forgotten.
const MAX_REMEMBERED_FAULTS: usize = 4096;

/// A page and whether it is written.
pub(super) type Want = (Page, bool);

/// The learned follower of a fault.
#[derive(Debug, Clone, Copy)]
struct Next {
    want: Want,
    seen: u8,
    turn: u8,
}

/// The follower prefetcher of one vCPU.
#[derive(Debug, Default)]
pub(super) struct Follow {
    after: HashMap<Want, Next>,
    /// The last fault, or its prefetched follower, and its time, ns.
    last: Option<(Want, u64)>,
}

impl Follow {
    /// Learns a fault. Returns its follower if the prefetcher relies on it and it is `worth` a prefetch.
    pub(super) fn fault(&mut self, want: Want, now: u64, worth: impl FnOnce(Want) -> bool) -> Option<Want> {
        if let Some((before, at)) = self.last.replace((want, now))
            && now.saturating_sub(at) <= NEAR
            && before != want
        {
            if self.after.len() >= MAX_REMEMBERED_FAULTS {
                self.after.clear();
            }
            let next = self.after.entry(before).or_insert(Next { want, seen: 0, turn: 0 });
            if next.want == want {
                next.seen = next.seen.saturating_add(1).min(SURE);
            } else {
                *next = Next { want, seen: 1, turn: 0 };
            }
        }
        let next = self.after.get_mut(&want).filter(|next| next.seen >= SURE)?;
        next.turn = (next.turn + 1) % TRIED;
        let found = next.want;
        if next.turn == 0 {
            // The follower must be confirmed by a fault. If another fault comes instead, it replaces the follower.
            next.seen = SURE - 1;
            return None;
        }
        if !worth(found) {
            return None;
        }
        self.last = Some((found, now));
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Want = (1, true);
    const B: Want = (20, false);
    const C: Want = (30, false);

    /// Prefetches of a vCPU that faults on `wants`, except on prefetched ones.
    fn round(follow: &mut Follow, at: u64, wants: &[Want]) -> Vec<Want> {
        let mut ahead = Vec::new();
        for (index, want) in wants.iter().enumerate() {
            if !ahead.contains(want) {
                let now = at + 300_000 * u64::try_from(index).unwrap();
                ahead.extend(follow.fault(*want, now, |_| true));
            }
        }
        ahead
    }

    /// A follower that was confirmed twice is prefetched, except one time in eight.
    #[test]
    fn what_follows_is_asked_for_ahead() {
        let mut follow = Follow::default();
        let all: Vec<_> = (1..80).map(|turn| round(&mut follow, turn * 10_000_000, &[A, B])).collect();
        assert_eq!(all[..2], [vec![], vec![]]);
        let ahead = all.iter().filter(|ahead| **ahead == [B]).count();
        assert!((60..=75).contains(&ahead), "{ahead}");
    }

    /// A fault that doesn't follow any more is prefetched only a few more times. The fault that follows instead replaces it.
    #[test]
    fn what_does_not_follow_any_more_is_forgotten() {
        let mut follow = Follow::default();
        for turn in 1..6 {
            round(&mut follow, turn * 10_000_000, &[A, B]);
        }
        let all: Vec<_> = (6..40).map(|turn| round(&mut follow, turn * 10_000_000, &[A])).collect();
        assert!(all.iter().filter(|ahead| !ahead.is_empty()).count() < 8, "{all:?}");
        assert!(all[10..].iter().all(Vec::is_empty));
        let all: Vec<_> = (40..80).map(|turn| round(&mut follow, turn * 10_000_000, &[A, C])).collect();
        assert!(all[2..].iter().filter(|ahead| **ahead == [C]).count() > 30, "{all:?}");
    }

    /// Faults that are far apart, and pages that aren't worth it, aren't prefetched.
    #[test]
    fn far_and_small_ones_are_not_asked_for() {
        let mut follow = Follow::default();
        for turn in 0..20 {
            assert_eq!(follow.fault(A, turn * 10 * NEAR, |_| true), None);
            assert_eq!(follow.fault(B, turn * 10 * NEAR + NEAR + 1, |_| true), None);
        }
        let mut follow = Follow::default();
        for turn in 0..20 {
            assert_eq!(follow.fault(A, turn * 10 * NEAR, |_| false), None);
            assert_eq!(follow.fault(B, turn * 10 * NEAR + 1, |_| false), None);
        }
    }

    /// The number of remembered faults is bounded.
    #[test]
    fn memory_is_bounded() {
        let mut follow = Follow::default();
        for page in 0..3 * MAX_REMEMBERED_FAULTS as Page {
            follow.fault((page, false), page, |_| true);
        }
        assert!(follow.after.len() <= MAX_REMEMBERED_FAULTS);
    }
}
