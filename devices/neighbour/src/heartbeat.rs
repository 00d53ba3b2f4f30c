//! Who is alive. Time is an input: any clock that doesn't go back, as a duration since whenever.
//!
//! A member's monitor reports once per interval, with the number that the guest's driver counts up in its own page while it
//! runs (0 before there is a driver). So a dead monitor (silent), a stopped one (silent) and a frozen guest (its number
//! stands still) are all noticed within [`Heartbeat::worst`].

use core::time::Duration;

/// How often members report, and how long they are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time between reports, and between two counts of a driver.
    pub interval: Duration,
    /// Without a report, or without a driver's count, for this long: not alive.
    pub patience: Duration,
}

impl Heartbeat {
    /// Reports each 100 ms, patience of 600 ms: peers know within a second, and a few lost time slices of a busy host do no harm.
    pub const DEFAULT: Self =
        Self { interval: Duration::from_millis(100), patience: Duration::from_millis(600) };

    /// Longest time from a death to when it is known, if [`Watch::verdict`] is asked each interval.
    #[must_use]
    pub fn worst(&self) -> Duration {
        // The count was seen to move one interval late, and the question comes one interval late.
        self.patience + 2 * self.interval
    }
}

/// What is known of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It reports, and its driver counts (or it has none yet).
    Alive,
    /// Its monitor doesn't report.
    Silent,
    /// Its driver doesn't count any more.
    Hung,
}

/// Watches one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    heartbeat: Heartbeat,
    heard: Duration,
    count: u64,
    counted: Duration,
}

impl Watch {
    /// Of a member that joins at `now`.
    #[must_use]
    pub const fn new(heartbeat: Heartbeat, now: Duration) -> Self {
        Self { heartbeat, heard: now, count: 0, counted: now }
    }

    /// A report came: its driver's number, 0 for none.
    pub fn report(&mut self, now: Duration, count: u64) {
        self.heard = self.heard.max(now);
        if count != self.count || count == 0 {
            self.count = count;
            self.counted = self.counted.max(now);
        }
    }

    /// What is known at `now`.
    #[must_use]
    pub fn verdict(&self, now: Duration) -> Verdict {
        let late = |since: Duration| now.saturating_sub(since) > self.heartbeat.patience;
        if late(self.heard) {
            Verdict::Silent
        } else if late(self.counted) {
            Verdict::Hung
        } else {
            Verdict::Alive
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_default_keeps_the_promise_of_one_second() {
        assert!(Heartbeat::DEFAULT.worst() < Duration::from_secs(1));
    }

    #[test]
    fn a_driver_that_never_was_does_not_hang_and_one_that_stops_does() {
        let mut watch = Watch::new(Heartbeat::DEFAULT, Duration::ZERO);
        for at in 0..50 {
            watch.report(at * 100 * MS, 0);
            assert_eq!(watch.verdict(at * 100 * MS), Verdict::Alive);
        }
        for at in 50..60 {
            watch.report(at * 100 * MS, u64::from(at));
        }
        for at in 60..66 {
            watch.report(at * 100 * MS, 59);
        }
        assert_eq!(watch.verdict(6500 * MS), Verdict::Alive);
        assert_eq!(watch.verdict(6501 * MS), Verdict::Hung);
        watch.report(6600 * MS, 60);
        assert_eq!(watch.verdict(6600 * MS), Verdict::Alive);
        assert_eq!(watch.verdict(7201 * MS), Verdict::Silent);
    }

    proptest! {
        /// A member that reports and counts within the patience is never called dead; one that stopped is, in time, whatever
        /// it did before.
        #[test]
        fn never_too_early_and_never_too_late(gaps in prop::collection::vec(1u32..600, 1..50), hang in any::<bool>()) {
            let heartbeat = Heartbeat::DEFAULT;
            let mut watch = Watch::new(heartbeat, Duration::ZERO);
            let mut now = Duration::ZERO;
            for (count, gap) in (1..).zip(gaps) {
                now += gap * MS;
                prop_assert_eq!(watch.verdict(now), Verdict::Alive);
                watch.report(now, count);
            }
            let died = now;
            let count = watch.count;
            while watch.verdict(now) == Verdict::Alive {
                now += heartbeat.interval;
                if hang {
                    watch.report(now, count);
                }
                prop_assert!(now - died <= heartbeat.worst());
            }
            let expected = if hang { Verdict::Hung } else { Verdict::Silent };
            prop_assert_eq!(watch.verdict(now), expected);
        }
    }
}
