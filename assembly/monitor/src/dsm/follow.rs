//! Which fault of a vCPU comes soon after which: where one is known to follow another, both pages are asked for at once.
//!
//! A vCPU that writes a row and then reads its neighbour's waits for two batches of pages, one after the other, each time round; what it does next is known by then.
//! Source: *Prefetching using Markov Predictors* (Joseph and Grunwald, ISCA 1997), with one successor for each.

use std::collections::HashMap;

use dsm::Page;

/// Two faults that are further apart have nothing to do with each other, nanoseconds.
const NEAR: u64 = 2_000_000;
/// So many times a fault has to follow another before that is relied on.
const SURE: u8 = 2;
/// Of those that are relied on one in so many is left out, to see whether it still comes.
const TRIED: u8 = 8;
/// Faults that are remembered at most; then all are forgotten.
const MAX_REMEMBERED_FAULTS: usize = 4096;

/// A page and whether it is written.
pub(super) type Want = (Page, bool);

/// What follows a fault.
#[derive(Debug, Clone, Copy)]
struct Next {
    want: Want,
    seen: u8,
    turn: u8,
}

/// The faults of one vCPU.
#[derive(Debug, Default)]
pub(super) struct Follow {
    after: HashMap<Want, Next>,
    /// The last one, or what was asked for with it, and when it came, nanoseconds.
    last: Option<(Want, u64)>,
}

impl Follow {
    /// A fault comes now. What follows it, if that is known and `worth` asking for ahead.
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
            // It has to show again: one that doesn't is replaced by what comes instead, or isn't asked for again.
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

    /// What a vCPU that faults on these, but for those that were asked for ahead, has asked for ahead.
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

    /// What followed twice is asked for with what it follows, but for one time in eight, and so is what follows that one.
    #[test]
    fn what_follows_is_asked_for_ahead() {
        let mut follow = Follow::default();
        let all: Vec<_> = (1..80).map(|turn| round(&mut follow, turn * 10_000_000, &[A, B])).collect();
        assert_eq!(all[..2], [vec![], vec![]]);
        let ahead = all.iter().filter(|ahead| **ahead == [B]).count();
        assert!((60..=75).contains(&ahead), "{ahead}");
    }

    /// What doesn't come any more is asked for a few times more only; what comes instead takes its place.
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

    /// Faults that are far apart, and pages that aren't worth it, aren't asked for ahead.
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

    /// However many pages fault, little is remembered.
    #[test]
    fn memory_is_bounded() {
        let mut follow = Follow::default();
        for page in 0..3 * MAX_REMEMBERED_FAULTS as Page {
            follow.fault((page, false), page, |_| true);
        }
        assert!(follow.after.len() <= MAX_REMEMBERED_FAULTS);
    }
}
