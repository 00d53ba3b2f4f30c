//! Back-off between the connections of one pair. A member that releases each connection at once, or can't map it, is connected again at
//! growing intervals. So neither its peer nor the registry spins, and logs per connection stay bounded. Time is an input, as in
//! [`crate::heartbeat`].
//!
//! ```text
//!  connection     time since the previous one    next connection
//!  first          -                              after FIRST
//!  later          under STEADY                   after twice the last pause, at most MAX_PAUSE
//!  later          STEADY or more                 after FIRST
//! ```
//!
//! Pauses count from the start of a connection. A connection that lasted longer than its pause is renewed at once, as after a VM's restart.

use alloc::collections::BTreeMap;
use core::time::Duration;

use crate::permit::Permit;

/// Shortest time between the starts of two connections of a pair.
pub const FIRST: Duration = Duration::from_millis(50);
/// Longest pause. Pauses double up to it.
pub const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Time without a new connection after which a pair is forgotten. It exceeds [`MAX_PAUSE`], so that waiting for the pause doesn't reset it.
pub const STEADY: Duration = Duration::from_secs(10);
/// Limit of remembered pairs: twice the pairs of the largest neighbourhood. Above it the oldest is forgotten, so members that join under
/// ever new names pay with a join for each.
const MAX_REMEMBERED_PAIRS: usize = 4096;

/// Two VMs, the lesser name first. Names instead of slots, so that a VM that leaves and returns is recognized.
type Names = [Permit; 2];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Last {
    at: Duration,
    pause: Duration,
}

/// The recently connected pairs of a neighbourhood.
#[derive(Debug, Default)]
pub(crate) struct Pauses(BTreeMap<Names, Last>);

fn names(a: Permit, b: Permit) -> Names {
    if a <= b { [a, b] } else { [b, a] }
}

impl Pauses {
    /// No pair has been connected.
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether the pair may be connected at `now`. If so, records that it is.
    pub(crate) fn admit(&mut self, now: Duration, a: Permit, b: Permit) -> bool {
        self.0.retain(|_, last| now.saturating_sub(last.at) < STEADY);
        let key = names(a, b);
        let pause = match self.0.get(&key) {
            None => FIRST,
            Some(last) if now.saturating_sub(last.at) < last.pause => return false,
            Some(last) => (last.pause * 2).min(MAX_PAUSE),
        };
        if self.0.len() >= MAX_REMEMBERED_PAIRS && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, last)| last.at).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.0.remove(&oldest);
            }
        }
        self.0.insert(key, Last { at: now, pause });
        true
    }
}

const _: () = assert!(STEADY.as_nanos() > MAX_PAUSE.as_nanos() && MAX_PAUSE.as_nanos() > FIRST.as_nanos());

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vm(name: usize) -> Permit {
        Permit { vm: name.to_string(), uid: 1 }
    }

    #[test]
    fn who_comes_at_once_waits_longer_each_time_and_who_stays_does_not() {
        let mut pauses = Pauses::new();
        let mut begun = Vec::new();
        for ms in 0..60_000 {
            let now = Duration::from_millis(ms);
            if pauses.admit(now, vm(1), vm(2)) {
                begun.push(ms);
            }
        }
        let gaps: Vec<u64> = begun.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(gaps[..8], [50, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert!(gaps[8..].iter().all(|gap| *gap == 5000));
        // A connection that lasted longer than its pause is renewed at once. After a steady one, the pause is short again.
        let last = Duration::from_millis(*begun.last().unwrap());
        assert!(pauses.admit(last + STEADY, vm(2), vm(1)));
        assert!(!pauses.admit(last + STEADY + FIRST / 2, vm(1), vm(2)));
        assert!(pauses.admit(last + STEADY + FIRST, vm(1), vm(2)));
    }

    #[test]
    fn many_names_take_no_more_than_bounded_memory() {
        let mut pauses = Pauses::new();
        for name in 0..2 * MAX_REMEMBERED_PAIRS {
            assert!(pauses.admit(Duration::from_micros(name as u64), vm(name), vm(name + 1)));
        }
        assert_eq!(pauses.0.len(), MAX_REMEMBERED_PAIRS);
    }

    proptest! {
        /// With any calls, a pair isn't connected more often than pauses that double allow, and other pairs don't delay it.
        #[test]
        fn connections_are_bounded_by_time(asks in prop::collection::vec((0u64..3000, 0usize..3), 1..400)) {
            let mut pauses = Pauses::new();
            let mut begun: [Vec<Duration>; 3] = Default::default();
            let mut now = Duration::ZERO;
            for (ms, pair) in asks {
                now += Duration::from_millis(ms);
                let wait = begun[pair].last().map(|last| now - *last);
                let admitted = pauses.admit(now, vm(pair), vm(pair + 1));
                if wait.is_none_or(|wait| wait >= MAX_PAUSE) {
                    prop_assert!(admitted, "nobody waits longer than MAX_PAUSE");
                }
                if admitted {
                    prop_assert!(wait.is_none_or(|wait| wait >= FIRST));
                    begun[pair].push(now);
                }
            }
            for begun in begun {
                // Any nine consecutive connections take as long as the doubling pauses, unless a steady time is among them.
                for nine in begun.windows(9) {
                    let steady = nine.windows(2).any(|two| two[1] - two[0] >= STEADY);
                    prop_assert!(steady || nine[8] - nine[0] >= Duration::from_millis(50 + 100 + 200 + 400 + 800 + 1600 + 3200 + 5000));
                }
            }
        }
    }
}
