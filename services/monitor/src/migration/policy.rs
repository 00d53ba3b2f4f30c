//! When to stop the guest, when to throttle it, when to abort.

use std::time::Duration;

/// First step of throttling the vCPUs, per cent.
const FIRST_THROTTLE_PERCENT: u8 = 20;
/// Further steps, per cent.
const THROTTLE_STEP_PERCENT: u8 = 10;
/// Assumed time for stop, restore and answers, in the prediction of the blackout.
const SWITCHOVER_ALLOWANCE: Duration = Duration::from_millis(10);

/// The user's limits for a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Limit for the blackout.
    pub downtime: Duration,
    /// Time limit, after which the migration aborts without having stopped the guest.
    pub timeout: Option<Duration>,
    /// Limit for throttling the vCPUs, per cent of the time, below 100.
    pub max_throttle: u8,
    /// Switches to post-copy after this many rounds, or earlier when rounds don't shrink or the time limit has passed. 0: before the
    /// first round. The guest is then never throttled.
    pub post_copy_after: Option<u32>,
}

/// Measurements of one round of copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundEnd {
    /// Number of the round, from 1.
    pub number: u32,
    /// Bytes that were sent.
    pub bytes: u64,
    /// Duration of the round.
    pub took: Duration,
    /// Pages that were copied.
    pub pages: u64,
    /// Pages that were written meanwhile.
    pub dirtied: u64,
    /// Time since the migration began.
    pub elapsed: Duration,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Stop the guest and copy the rest.
    Stop,
    /// Copy the written pages, with vCPUs throttled by this many per cent.
    NextRound(u8),
    /// Stop the guest, and copy the rest while it runs at the destination.
    PostCopy,
    /// Abort; the guest stays at the source.
    Abort,
}

impl RoundEnd {
    /// Bytes per second.
    pub fn rate(&self) -> u64 {
        let micros = self.took.as_micros().max(1);
        u64::try_from(u128::from(self.bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
    }

    /// Predicted blackout if the guest was stopped now. Less than 1 MiB doesn't show the speed: then a gigabyte per second is assumed.
    pub fn predicted_pause(&self) -> Duration {
        let rate = if self.bytes < 1 << 20 { self.rate().max(1 << 30) } else { self.rate().max(1) };
        let left = u128::from(self.dirtied) * 4096;
        let micros = u64::try_from(left * 1_000_000 / u128::from(rate)).unwrap_or(u64::MAX);
        Duration::from_micros(micros).saturating_add(SWITCHOVER_ALLOWANCE)
    }
}

impl Policy {
    /// Decides after a round in which vCPUs were throttled by `throttle` per cent.
    pub fn decide(&self, round: &RoundEnd, throttle: u8) -> Decision {
        if round.predicted_pause() <= self.downtime.max(SWITCHOVER_ALLOWANCE) {
            return Decision::Stop;
        }
        let timed_out = self.timeout.is_some_and(|timeout| round.elapsed >= timeout);
        // A round that leaves more than 7/10 of its pages doesn't converge.
        let shrinks = round.dirtied.saturating_mul(10) < round.pages.saturating_mul(7);
        match self.post_copy_after {
            Some(rounds) if timed_out || !shrinks || round.number >= rounds => return Decision::PostCopy,
            Some(_) => return Decision::NextRound(0),
            None if timed_out => return Decision::Abort,
            None => {}
        }
        let next = match (shrinks, throttle) {
            (true, throttle) => throttle,
            (false, 0) => FIRST_THROTTLE_PERCENT,
            (false, throttle) => throttle.saturating_add(THROTTLE_STEP_PERCENT),
        };
        Decision::NextRound(next.min(self.max_throttle).min(99))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy {
        downtime: Duration::from_millis(300),
        timeout: Some(Duration::from_secs(60)),
        max_throttle: 50,
        post_copy_after: None,
    };

    /// A round of 1 s at 100 MB/s.
    fn round(pages: u64, dirtied: u64, elapsed: u64) -> RoundEnd {
        RoundEnd {
            number: 1,
            bytes: 100_000_000,
            took: Duration::from_secs(1),
            pages,
            dirtied,
            elapsed: Duration::from_secs(elapsed),
        }
    }

    #[test]
    fn the_guest_is_stopped_when_the_rest_fits_the_downtime() {
        // 7,000 pages are 287 ms at this speed, and 10 ms are allowed for the rest.
        assert_eq!(POLICY.decide(&round(20_000, 7_000, 1), 0), Decision::Stop);
        assert_eq!(POLICY.decide(&round(20_000, 7_200, 1), 0), Decision::NextRound(0));
        // Also when the time limit has passed.
        assert_eq!(POLICY.decide(&round(20_000, 7_000, 100), 0), Decision::Stop);
    }

    #[test]
    fn vcpus_are_throttled_step_by_step_while_rounds_do_not_shrink() {
        let stuck = round(20_000, 20_000, 1);
        let mut throttle = 0;
        let mut steps = Vec::new();
        for _ in 0..6 {
            let Decision::NextRound(next) = POLICY.decide(&stuck, throttle) else { panic!() };
            throttle = next;
            steps.push(next);
        }
        assert_eq!(steps, [20, 30, 40, 50, 50, 50]);
        assert_eq!(POLICY.decide(&round(20_000, 10_000, 1), 30), Decision::NextRound(30));
        let never = Policy { max_throttle: 0, ..POLICY };
        assert_eq!(never.decide(&stuck, 0), Decision::NextRound(0));
    }

    #[test]
    fn the_time_limit_aborts_the_migration() {
        assert_eq!(POLICY.decide(&round(20_000, 20_000, 60), 50), Decision::Abort);
        let endless = Policy { timeout: None, ..POLICY };
        assert_eq!(endless.decide(&round(20_000, 20_000, 60_000), 50), Decision::NextRound(50));
    }

    /// Hybrid: a round that leaves little is followed by an ordinary stop, and shrinking rounds continue up to their number. A migration
    /// that doesn't converge, or takes too long, switches to post-copy at once. Nothing is aborted or throttled.
    #[test]
    fn with_post_copy_every_migration_ends() {
        let hybrid = Policy { post_copy_after: Some(3), ..POLICY };
        let nth = |number, dirtied, elapsed| RoundEnd { number, ..round(20_000, dirtied, elapsed) };
        assert_eq!(hybrid.decide(&nth(1, 7_000, 1), 0), Decision::Stop);
        assert_eq!(hybrid.decide(&nth(1, 10_000, 1), 0), Decision::NextRound(0));
        assert_eq!(hybrid.decide(&nth(2, 10_000, 1), 0), Decision::NextRound(0));
        assert_eq!(hybrid.decide(&nth(3, 10_000, 1), 0), Decision::PostCopy);
        assert_eq!(hybrid.decide(&nth(1, 15_000, 1), 0), Decision::PostCopy);
        assert_eq!(hybrid.decide(&nth(1, 10_000, 60), 0), Decision::PostCopy);
    }

    #[test]
    fn an_idle_guest_is_stopped_after_its_first_round() {
        let empty = RoundEnd {
            number: 1,
            bytes: 300,
            took: Duration::from_micros(900),
            pages: 3,
            dirtied: 40,
            elapsed: Duration::ZERO,
        };
        assert_eq!(POLICY.decide(&empty, 0), Decision::Stop);
        let none = RoundEnd { bytes: 0, took: Duration::ZERO, pages: 0, dirtied: 0, ..empty };
        assert_eq!(Policy { downtime: Duration::ZERO, ..POLICY }.decide(&none, 0), Decision::Stop);
    }
}
