//! When to connect to a host again: exponential back-off with jitter, so that hosts don't all connect at the same moment after an outage.

use std::time::Duration;

const FIRST_INTERVAL: Duration = Duration::from_millis(100);
const LAST_INTERVAL: Duration = Duration::from_secs(10);

/// Failed attempts so far.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The interval after another failed attempt: `FIRST_INTERVAL` · 2^failures, at most `LAST_INTERVAL`, times a factor from 0.5 to 1.5
    /// that `random` chooses.
    pub fn next(&mut self, random: u32) -> Duration {
        let factor = 2_u32.saturating_pow(self.failures);
        self.failures = self.failures.saturating_add(1);
        let interval = FIRST_INTERVAL.saturating_mul(factor).min(LAST_INTERVAL);
        interval / 2 + interval.mul_f64(f64::from(random) / f64::from(u32::MAX))
    }

    /// An attempt has succeeded.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_double_to_a_limit_and_vary() {
        let mut backoff = Backoff::default();
        let intervals: Vec<Duration> = (0..40).map(|_| backoff.next(u32::MAX / 2)).collect();
        let near =
            |interval: Duration, expected: Duration| interval.abs_diff(expected) < Duration::from_millis(1);
        assert!(
            near(intervals[0], FIRST_INTERVAL) && near(intervals[3], FIRST_INTERVAL * 8),
            "{intervals:?}"
        );
        assert!(near(intervals[39], LAST_INTERVAL), "{intervals:?}");
        assert_eq!(backoff.next(0), LAST_INTERVAL / 2);
        assert_eq!(backoff.next(u32::MAX), LAST_INTERVAL / 2 * 3);
        backoff.reset();
        assert_eq!(backoff.next(0), FIRST_INTERVAL / 2);
    }
}
