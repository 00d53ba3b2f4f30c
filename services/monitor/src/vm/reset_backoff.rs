//! Back-off for a guest that resets its machine repeatedly.
//!
//! ```text
//! delay(n) = min(FIRST_DELAY * 2^(n - 1), MAX_DELAY)    n: resets in a row of a guest that ran for less than STABLE_RUN
//! ```
//!
//! The values are those of Docker's restart policy. A guest that ran longer is restarted at once, as at a reboot.

use std::time::{Duration, Instant};

/// A guest that has run this long is stable: its next reset isn't delayed.
const STABLE_RUN: Duration = Duration::from_secs(10);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(60);

/// Counts the resets of one machine.
#[derive(Debug)]
pub(super) struct ResetBackoff {
    started: Instant,
    resets_in_a_row: u32,
}

impl ResetBackoff {
    /// For a guest that starts `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self { started: now, resets_in_a_row: 0 }
    }

    /// The guest requests a reset `now`: returns the delay of that reset.
    pub(super) fn delay(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.started) >= STABLE_RUN {
            self.resets_in_a_row = 0;
            return Duration::ZERO;
        }
        let doublings = self.resets_in_a_row.min(MAX_DELAY.as_millis().ilog2());
        self.resets_in_a_row = self.resets_in_a_row.saturating_add(1);
        FIRST_DELAY.saturating_mul(1 << doublings).min(MAX_DELAY)
    }

    /// The guest was started again `now`.
    pub(super) fn restarted(&mut self, now: Instant) {
        self.started = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_minute_and_begin_again_after_a_stable_run() {
        let mut now = Instant::now();
        let mut backoff = ResetBackoff::new(now);
        let mut delays = Vec::new();
        for _ in 0..12 {
            let delay = backoff.delay(now + Duration::from_millis(1));
            delays.push(delay.as_millis());
            now += delay;
            backoff.restarted(now);
        }
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000]);
        now += STABLE_RUN;
        assert_eq!(backoff.delay(now), Duration::ZERO);
        backoff.restarted(now);
        assert_eq!(backoff.delay(now), FIRST_DELAY);
    }

    #[test]
    fn no_number_of_resets_is_too_many() {
        let now = Instant::now();
        let mut backoff = ResetBackoff { started: now, resets_in_a_row: u32::MAX };
        assert_eq!(backoff.delay(now), MAX_DELAY);
        assert_eq!(backoff.delay(now), MAX_DELAY);
    }
}
