//! Waits between attempts to reach a service.

use std::time::Duration;

/// Exponential back-off with jitter. Clients that lost a service at the same moment come back spread over the wait, and
/// not all at once.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max_delay: Duration,
    next: Duration,
}

impl Backoff {
    /// Begins with waits of at most `first`. Each further wait has twice the limit of the one before, up to `max_delay`.
    #[must_use]
    pub fn new(first: Duration, max_delay: Duration) -> Self {
        Self { first, max_delay, next: first }
    }

    /// Begins anew, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// Returns how long to wait before the next attempt: a random time between half of the limit and the limit.
    pub fn wait(&mut self) -> Duration {
        let limit = self.next;
        self.next = (limit * 2).min(self.max_delay);
        limit.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that fail together don't come back together, and none waits longer than the limit, or shorter than half.
    #[test]
    fn clients_that_fail_together_retry_spread() {
        let (first, max_delay) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut clients: Vec<Backoff> = (0..1_000).map(|_| Backoff::new(first, max_delay)).collect();
        for limit_ms in [100_u32, 200, 400, 800, 1_600, 2_000, 2_000] {
            let limit = Duration::from_millis(limit_ms.into());
            let waits: Vec<Duration> = clients.iter_mut().map(Backoff::wait).collect();
            assert!(waits.iter().all(|wait| (limit / 2..=limit).contains(wait)), "{limit:?}");
            // Of ten parts of the range, none has more than a fifth of the clients: the mean is a tenth.
            let part = |wait: &Duration| (*wait - limit / 2).as_nanos() / (limit.as_nanos() / 20 + 1);
            for tenth in 0..10 {
                let there = waits.iter().filter(|wait| part(wait) == tenth).count();
                assert!(there < 200, "{there} of 1000 clients come back in part {tenth} of {limit:?}");
            }
        }
        let mut one = clients.pop().unwrap();
        one.reset();
        assert!(one.wait() <= first);
    }
}
