//! Detection of dead and hung members. Time is an input, from any clock that doesn't go back, as the duration since a fixed moment.
//!
//! A member's monitor reports once per interval, with the count that the guest's driver increments in its status page (0 without a driver).
//! A dead or stopped monitor sends no reports, and a hung guest's count doesn't change. Both are detected within [`Heartbeat::worst`].

use core::time::Duration;

/// Interval of reports, and timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time between two reports, and between two counts of a driver.
    pub interval: Duration,
    /// Time without a report, or without a change of the driver's count, after which a member isn't alive.
    pub patience: Duration,
}

impl Heartbeat {
    /// Reports every 100 ms, timeout of 600 ms. Peers are notified within a second, and some lost time slices of a busy host have no
    /// effect.
    pub const DEFAULT: Self =
        Self { interval: Duration::from_millis(100), patience: Duration::from_millis(600) };

    /// Longest time from a death to its detection, if [`Watch::verdict`] is called once per interval.
    #[must_use]
    pub fn worst(&self) -> Duration {
        // The last change of the count may be seen one interval late, and the verdict is computed one interval late.
        self.patience + 2 * self.interval
    }
}

/// State of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It reports, and its driver counts, or it has no driver.
    Alive,
    /// Its monitor doesn't report.
    Silent,
    /// Its driver doesn't count any more.
    Hung,
}

/// Supervision of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    heartbeat: Heartbeat,
    heard: Duration,
    count: u64,
    counted: Duration,
}

impl Watch {
    /// For a member that joins at `now`.
    #[must_use]
    pub const fn new(heartbeat: Heartbeat, now: Duration) -> Self {
        Self { heartbeat, heard: now, count: 0, counted: now }
    }

    /// Records a report with the driver's count, 0 without a driver.
    pub fn report(&mut self, now: Duration, count: u64) {
        self.heard = self.heard.max(now);
        if count != self.count || count == 0 {
            self.count = count;
            self.counted = self.counted.max(now);
        }
    }

    /// The state at `now`.
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
        /// A member that reports and counts within the timeout is never considered dead. One that stopped is, in time, whatever it did
        /// before.
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
