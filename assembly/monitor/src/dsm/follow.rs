//! Which fault of a vCPU comes soon after which: where one is known to follow another, both pages are asked for at once.
//!
//! A vCPU that writes a row and then reads its neighbour's waits for two batches of pages, one after the other, each time round; what it does next is known by then.
//! Source: *Prefetching using Markov Predictors* (Joseph and Grunwald, ISCA 1997), with one successor for each.

use std::collections::HashMap;

use dsm::Page;

use super::ahead::REGION;

/// Two faults that are further apart have nothing to do with each other, nanoseconds.
const NEAR: u64 = 2_000_000;
/// So many times a fault has to follow another before that is relied on.
const SURE: u8 = 2;
/// Of those that are relied on one in so many is left out, to see whether it still comes. Each time that it does there are twice as many to the next, up to [`DOUBLINGS`] times.
const TRIED: u16 = 8;
const DOUBLINGS: u8 = 3;
/// Faults that are remembered at most; then all are forgotten.
const MOST: usize = 4096;

/// A page and whether it is written.
pub(super) type Want = (Page, bool);

/// What follows a fault.
#[derive(Debug, Clone, Copy)]
struct Next {
    want: Want,
    seen: u8,
    /// How often it was asked for since it was left out.
    turn: u16,
    /// It was left out the last time.
    left_out: bool,
    /// How often it came when it had been left out.
    tried: u8,
}

impl Next {
    const fn new(want: Want, seen: u8) -> Self {
        Self { want, seen, turn: 0, left_out: false, tried: 0 }
    }
}

/// The faults of one vCPU.
#[derive(Debug, Default)]
pub(super) struct Follow {
    after: HashMap<Want, Next>,
    /// The last one, or what was asked for with it, and when it came, nanoseconds.
    last: Option<(Want, u64)>,
}

/// Pages that are fetched together as it is ([`super::ahead`]).
fn region((page, write): Want) -> Want {
    (page / REGION, write)
}

impl Follow {
    /// A fault comes now. What follows it, if that is known and `worth` asking for ahead. One of the region of the last fault is no other place to go on to.
    pub(super) fn fault(&mut self, want: Want, now: u64, worth: impl FnOnce(Want) -> bool) -> Option<Want> {
        let near = self.last.filter(|(_, at)| now.saturating_sub(*at) <= NEAR).map(|(before, _)| before);
        if near.is_some_and(|before| before != want && region(before) == region(want)) {
            return None;
        }
        self.last = Some((want, now));
        if let Some(before) = near.filter(|before| *before != want) {
            if self.after.len() >= MOST {
                self.after.clear();
            }
            let next = self.after.entry(before).or_insert(Next::new(want, 0));
            if next.want == want {
                let proven = std::mem::take(&mut next.left_out);
                next.tried = (next.tried + u8::from(proven)).min(DOUBLINGS);
                next.seen = next.seen.saturating_add(1).min(SURE);
            } else {
                *next = Next::new(want, 1);
            }
        }
        let next = self.after.get_mut(&want).filter(|next| next.seen >= SURE)?;
        next.turn = (next.turn + 1) % (TRIED << next.tried);
        let found = next.want;
        if next.turn == 0 {
            // It has to show again: one that doesn't is replaced by what comes instead, or isn't asked for again.
            next.seen = SURE - 1;
            next.left_out = true;
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
    const C: Want = (300, false);

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

    /// What followed twice is asked for with what it follows, but for one time in eight, then in 16, 32, and 64.
    #[test]
    fn what_follows_is_asked_for_ahead() {
        let mut follow = Follow::default();
        let all: Vec<_> = (1..300).map(|turn| round(&mut follow, turn * 10_000_000, &[A, B])).collect();
        let not = all.iter().zip(0..).filter(|(ahead, _)| ahead.is_empty()).map(|(_, turn)| turn);
        let tried = [8, 16, 32, 64, 64, 64].iter().scan(1, |at, turns| {
            *at += turns;
            Some(*at)
        });
        assert_eq!(not.collect::<Vec<usize>>(), [0, 1].into_iter().chain(tried).collect::<Vec<_>>());
        assert!(all.iter().all(|ahead| ahead.is_empty() || *ahead == [B]));
    }

    /// However long it was relied on, it is forgotten when it is left out once and doesn't come.
    #[test]
    fn what_was_long_relied_on_is_forgotten_too() {
        let mut follow = Follow::default();
        for turn in 1..300 {
            round(&mut follow, turn * 10_000_000, &[A, B]);
        }
        let most = usize::from(TRIED << DOUBLINGS);
        let all: Vec<_> = (300..600).map(|turn| round(&mut follow, turn * 10_000_000, &[A])).collect();
        assert!(all[..most].iter().filter(|ahead| !ahead.is_empty()).count() < most);
        assert!(all[most..].iter().all(Vec::is_empty));
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

    /// A page of the same region that is asked for by itself now and then isn't taken for what follows.
    #[test]
    fn what_belongs_to_a_fault_does_not_follow_it() {
        let mut follow = Follow::default();
        let beside = (A.0 + 5, A.1);
        for turn in 1..6 {
            assert_eq!(round(&mut follow, turn * 10_000_000, &[A, beside]), []);
        }
        let all: Vec<_> =
            (6..15).map(|turn| round(&mut follow, turn * 10_000_000, &[A, beside, B])).collect();
        assert!(all[2..].iter().filter(|ahead| **ahead == [B]).count() >= 6, "{all:?}");
        // To read what was written is another matter.
        let read = (A.0, false);
        let all: Vec<_> = (15..25).map(|turn| round(&mut follow, turn * 10_000_000, &[A, read])).collect();
        assert!(all[3..].iter().any(|ahead| *ahead == [read]), "{all:?}");
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
        for page in 0..3 * MOST as Page {
            follow.fault((page, false), page, |_| true);
        }
        assert!(follow.after.len() <= MOST);
    }
}
