//! When a program doesn't pay on several nodes: a decision from numbers alone.
//!
//! Every node tells, some times per second, how long its vCPUs have waited for pages that it had had before. First fetches don't count: they
//! are over some day. Over a window, `s(i)` is these waits' share of the time that node i's vCPUs wait for pages or run. Time in which the host has them do neither doesn't
//! count: that is no matter of the program's. How much the machine then gets done lies between two bounds, in vCPUs:
//!
//! ```text
//! at most   vcpus * (1 - max s)      all wait at the same time, and everybody waits for the slowest at a barrier
//! at least  vcpus * (1 - sum s)      they wait in turns, and who doesn't wait spins until the other has what it waits for
//! ```
//!
//! Spinning can't be told from work here, so the mean of both is taken. If that is less than what node 0's own vCPUs would do alone, the window was a bad one.
//! Some bad windows in a row bring the program together, good ones take that back twice as fast; in between nothing changes.

/// Length of a window, nanoseconds.
const WINDOW: u64 = 100_000_000;
/// Bad windows in a row that decide. A good one is worth two.
const BAD: u32 = 8;
/// A window is bad when less than this many thousandths of node 0's vCPUs' work gets done.
const LOW: u64 = 900;
/// It is good when more than this is done.
const HIGH: u64 = 1_100;
const WHOLE: u64 = 1_000;

/// What a node's vCPUs have waited so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::dsm) struct Waited {
    /// When, nanoseconds of the node's own clock.
    pub(in crate::dsm) at: u64,
    /// How long its vCPUs have had a processor, or waited for pages that they had never had; all together, nanoseconds. Only grows.
    pub(in crate::dsm) ran: u64,
    /// For how long, all its vCPUs together, nanoseconds. Only grows.
    pub(in crate::dsm) waited: u64,
    /// vCPUs that run.
    pub(in crate::dsm) vcpus: u32,
}

impl Waited {
    /// As it goes over a link: time, ran, waited, vCPUs; 8 bytes each, little-endian.
    pub(in crate::dsm) fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        let words = [self.at, self.ran, self.waited, self.vcpus.into()];
        for (into, word) in bytes.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` when it isn't that.
    pub(in crate::dsm) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let [at, ran, waited, vcpus] = <[[u8; 8]; 4]>::try_from(words).ok()?.map(u64::from_le_bytes);
        Some(Self { at, ran, waited, vcpus: u32::try_from(vcpus).ok()? })
    }
}

/// Watches all nodes of a VM. On node 0.
#[derive(Debug, Clone)]
pub(in crate::dsm) struct Watch {
    /// Per node: at the beginning of the window, and the latest.
    nodes: Vec<Option<(Waited, Waited)>>,
    bad: u32,
    /// What was found in the window before, for people.
    last: Found,
}

/// What a window has shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::dsm) struct Found {
    /// What gets done, in thousandths of a vCPU.
    pub(in crate::dsm) done: u64,
    /// The share of time that vCPUs wait, over all nodes, in thousandths.
    pub(in crate::dsm) share: u64,
}

impl Watch {
    pub(in crate::dsm) fn new(nodes: u8) -> Self {
        Self { nodes: vec![None; usize::from(nodes)], bad: 0, last: Found::default() }
    }

    /// What the last window has shown.
    pub(in crate::dsm) fn last(&self) -> Found {
        self.last
    }

    /// A node has told what it waited. True when the program is to be brought together.
    pub(in crate::dsm) fn told(&mut self, node: u8, waited: Waited) -> bool {
        let Some(known) = self.nodes.get_mut(usize::from(node)) else { return false };
        match known {
            // A clock that goes back, or waits that shrink, are nobody's: begin anew.
            Some((first, last))
                if waited.at >= last.at
                    && waited.ran >= last.ran
                    && waited.waited >= last.waited
                    && waited.vcpus == first.vcpus =>
            {
                *last = waited;
            }
            _ => *known = Some((waited, waited)),
        }
        let Some(shares) = self.shares() else { return false };
        for (first, last) in self.nodes.iter_mut().flatten() {
            *first = *last;
        }
        self.judge(&shares)
    }

    /// For each node that has vCPUs: how many, and the share of time that they waited, when all have told enough.
    fn shares(&self) -> Option<Vec<(u64, u64)>> {
        let mut shares = Vec::new();
        for known in &self.nodes {
            let (first, last) = (*known)?;
            if last.at.saturating_sub(first.at) < WINDOW {
                return None;
            }
            let waited = last.waited.saturating_sub(first.waited);
            let ran = last.ran.saturating_sub(first.ran);
            // At least a nanosecond: nothing has been done by who had no processor.
            let all = waited.saturating_add(ran).max(1);
            let share = if last.vcpus > 0 { (waited.saturating_mul(WHOLE) / all).min(WHOLE) } else { 0 };
            shares.push((u64::from(last.vcpus), share));
        }
        Some(shares)
    }

    fn judge(&mut self, shares: &[(u64, u64)]) -> bool {
        let vcpus: u64 = shares.iter().map(|(vcpus, _)| vcpus).sum();
        let own = shares.first().map_or(0, |(vcpus, _)| *vcpus);
        // Nothing to bring together, or nobody to bring it to.
        if own == 0 || own == vcpus {
            self.bad = 0;
            return false;
        }
        let most = shares.iter().map(|(_, share)| *share).max().unwrap_or(0);
        let sum = shares.iter().map(|(_, share)| *share).sum::<u64>().min(WHOLE);
        let done = vcpus * (2 * WHOLE - most - sum) / 2;
        let waited: u64 = shares.iter().map(|(vcpus, share)| vcpus * share).sum();
        self.last = Found { done, share: waited / vcpus };
        if done < own * LOW {
            self.bad += 1;
        } else if done > own * HIGH {
            self.bad = self.bad.saturating_sub(2);
        }
        self.bad >= BAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: u64 = 50_000_000;

    /// Runs beats in which each node waits its share (thousandths) of the time; after how many it is decided.
    fn beats(watch: &mut Watch, from: u64, count: u64, shares: &[u64], vcpus: u32) -> Option<u64> {
        for beat in from..from + count {
            let mut decided = false;
            for (node, share) in (0..).zip(shares) {
                let all = BEAT * u64::from(vcpus);
                let waits = all * share / WHOLE;
                // The host gives them half of their time.
                let (ran, waited) = (beat * (all - waits) / 2, beat * waits / 2);
                let waited = Waited { at: beat * BEAT, ran, waited, vcpus };
                decided |= watch.told(node, waited);
            }
            if decided {
                return Some(beat - from);
            }
        }
        None
    }

    fn decided(shares: &[u64]) -> Option<u64> {
        beats(&mut Watch::new(u8::try_from(shares.len()).unwrap()), 0, 200, shares, 1)
    }

    /// What pays stays apart; what doesn't is brought together within a second, whoever waits.
    #[test]
    fn programs_that_wait_more_than_they_gain_come_together() {
        for pays in [&[0, 0][..], &[100, 100], &[250, 250], &[0, 400], &[400, 0], &[200, 200, 200, 200]] {
            assert_eq!(decided(pays), None, "{pays:?}");
        }
        for pays_not in
            [&[100, 900][..], &[900, 100], &[450, 450], &[900, 900], &[0, 700], &[800, 900, 900, 900]]
        {
            let beats = decided(pays_not).unwrap();
            assert!((16..=20).contains(&beats), "{pays_not:?}: {beats}");
        }
    }

    /// Bad phases that are shorter than good ones decide nothing.
    #[test]
    fn phases_that_pay_take_back_what_others_have_shown() {
        let mut watch = Watch::new(2);
        let mut at = 0;
        for _ in 0..20 {
            assert_eq!(beats(&mut watch, at, 7, &[900, 900], 2), None);
            assert_eq!(beats(&mut watch, at + 7, 9, &[0, 0], 2), None);
            at += 16;
        }
        // Neither good nor bad: what was found stays.
        let mut watch = Watch::new(2);
        assert_eq!(watch.bad, 0);
        for _ in 0..3 {
            assert!(!watch.judge(&[(1, 900), (1, 900)]));
        }
        for _ in 0..10 {
            assert!(!watch.judge(&[(1, 333), (1, 333)]));
        }
        assert_eq!(watch.bad, 3, "neither good nor bad");
        assert!(!watch.judge(&[(1, 100), (1, 100)]));
        assert_eq!(watch.bad, 1);
    }

    /// Nothing is decided without news of all nodes, where node 0 runs nothing, or where the others run nothing.
    #[test]
    fn who_runs_nothing_is_not_waited_for() {
        let mut watch = Watch::new(3);
        assert_eq!(beats(&mut watch, 0, 100, &[900, 900], 1), None);
        for (own, other) in [(0, 1), (1, 0), (0, 0)] {
            let mut watch = Watch::new(2);
            for beat in 0..100 {
                let tell = |vcpus: u32| Waited {
                    at: beat * BEAT,
                    ran: 0,
                    waited: beat * BEAT * u64::from(vcpus),
                    vcpus,
                };
                assert!(!watch.told(0, tell(own)) && !watch.told(1, tell(other)), "{own}, {other}");
            }
        }
        // A node that isn't one.
        assert!(!watch.told(3, Waited::default()));
    }

    /// Numbers that can't be (a clock that goes back, more waits than time) neither panic nor decide by themselves.
    #[test]
    fn numbers_that_can_not_be_are_taken_for_a_new_beginning() {
        let mut watch = Watch::new(2);
        for step in 0..1000u64 {
            let at = if step % 2 == 0 { u64::MAX } else { step };
            assert!(!watch.told(1, Waited { at, ran: u64::MAX, waited: u64::MAX - step, vcpus: u32::MAX }));
            assert!(!watch.told(0, Waited { at: step * BEAT, ran: 0, waited: 0, vcpus: 1 }));
        }
    }
}
