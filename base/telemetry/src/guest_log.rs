//! Rate-limits log lines that a guest or a peer can trigger, so that neither fills the host's disk.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Permits a burst, then one line per interval, and counts suppressed lines. Use one per device, not per line.
#[derive(Debug)]
pub struct GuestLog {
    state: Mutex<State>,
    burst: u32,
    refill_every: Duration,
}

#[derive(Debug)]
struct State {
    tokens: u32,
    refilled: Instant,
    suppressed: u64,
}

impl GuestLog {
    /// Permits ten lines at once, then one per second.
    pub fn new() -> Self {
        Self::with_limits(10, Duration::from_secs(1))
    }

    /// Permits `burst` lines at once, then one per `refill_every`.
    pub fn with_limits(burst: u32, refill_every: Duration) -> Self {
        Self {
            state: Mutex::new(State { tokens: burst, refilled: Instant::now(), suppressed: 0 }),
            burst,
            refill_every,
        }
    }

    /// Returns `Some(n)` if a line may be written now; `n` lines were suppressed since the last one.
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let periods = now.duration_since(state.refilled).as_nanos() / self.refill_every.as_nanos().max(1);
        if periods > 0 {
            let gained = u32::try_from(periods).unwrap_or(u32::MAX);
            state.tokens = state.tokens.saturating_add(gained).min(self.burst);
            state.refilled = now;
        }
        if state.tokens == 0 {
            state.suppressed += 1;
            return None;
        }
        state.tokens -= 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

impl Default for GuestLog {
    fn default() -> Self {
        Self::new()
    }
}

/// `guest_warn!(log, "text {}", value)`: a `tracing::warn!` if the [`GuestLog`] permits it.
#[macro_export]
macro_rules! guest_warn {
    ($log:expr, $($arg:tt)+) => { $crate::guest_line!(warn, $log, $($arg)+) };
}

/// As [`guest_warn!`], for a normal event: a `tracing::info!`.
#[macro_export]
macro_rules! guest_info {
    ($log:expr, $($arg:tt)+) => { $crate::guest_line!(info, $log, $($arg)+) };
}

/// As [`guest_warn!`], for the end of a device or a connection: a `tracing::error!`.
#[macro_export]
macro_rules! guest_error {
    ($log:expr, $($arg:tt)+) => { $crate::guest_line!(error, $log, $($arg)+) };
}

/// A line of any level if the [`GuestLog`] permits it; see [`guest_warn!`].
#[doc(hidden)]
#[macro_export]
macro_rules! guest_line {
    ($level:ident, $log:expr, $($arg:tt)+) => {
        if let Some(suppressed) = $log.admit() {
            if suppressed == 0 {
                $crate::reexport::tracing::$level!($($arg)+);
            } else {
                $crate::reexport::tracing::$level!(suppressed, $($arg)+);
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::GuestLog;
    use std::time::{Duration, Instant};

    #[test]
    fn a_burst_passes_then_one_per_interval_with_a_count_of_the_rest() {
        let log = GuestLog::with_limits(2, Duration::from_secs(1));
        let now = Instant::now();
        assert_eq!(log.admit_at(now), Some(0));
        assert_eq!(log.admit_at(now), Some(0));
        assert_eq!(log.admit_at(now), None);
        assert_eq!(log.admit_at(now), None);
        assert_eq!(log.admit_at(now + Duration::from_secs(2)), Some(2));
    }
}
