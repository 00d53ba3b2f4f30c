//! Rate limit for log lines that a guest can trigger. `telemetry` has the general one, but is on this crate's own
//! layer.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

const BURST: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(1);

/// Permits ten lines at once, then one per second. Counts suppressed lines.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    tokens: u32,
    refilled: Instant,
    suppressed: u64,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { tokens: BURST, refilled: Instant::now(), suppressed: 0 }))
    }

    /// Returns `Some(n)` if a line may be written now; `n` lines were suppressed since the last one.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.0);
        let periods = now.saturating_duration_since(state.refilled).as_secs() / INTERVAL.as_secs();
        if periods > 0 {
            let gained = u32::try_from(periods).unwrap_or(u32::MAX);
            state.tokens = state.tokens.saturating_add(gained).min(BURST);
            state.refilled = now;
        }
        let Some(left) = state.tokens.checked_sub(1) else {
            state.suppressed = state.suppressed.saturating_add(1);
            return None;
        };
        state.tokens = left;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST, LogLimit};
    use std::time::{Duration, Instant};

    #[test]
    fn a_burst_passes_then_one_a_second_with_a_count_of_the_rest() {
        let limit = LogLimit::new();
        let now = Instant::now();
        for _ in 0..BURST {
            assert_eq!(limit.admit_at(now), Some(0));
        }
        assert_eq!(limit.admit_at(now), None);
        assert_eq!(limit.admit_at(now), None);
        assert_eq!(limit.admit_at(now + Duration::from_secs(2)), Some(2));
    }
}
