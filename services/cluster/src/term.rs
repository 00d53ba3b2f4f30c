//! How long an instance may take itself for the one that leads.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A term of leadership. Terms of several instances don't overlap in the store, whose guards see to that; this is the instance's own knowledge
/// of when to fall silent, by its monotonic clock.
#[derive(Debug)]
pub struct Term {
    number: u64,
    lease: i64,
    end: Mutex<End>,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Never,
    At(Instant),
    Over,
}

impl Term {
    /// Of an instance that has no others beside it.
    #[must_use]
    pub fn alone() -> Self {
        Self { number: 0, lease: 0, end: Mutex::new(End::Never) }
    }

    /// The term with a number, which is higher than those of terms before, under a lease that can't have ended before `until`.
    #[must_use]
    pub fn new(number: u64, lease: i64, until: Instant) -> Self {
        Self { number, lease, end: Mutex::new(End::At(until)) }
    }

    fn lock(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number: the revision that made the leader's key. 0: there are no terms.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Its lease.
    #[must_use]
    pub fn lease(&self) -> i64 {
        self.lease
    }

    /// For how long it holds without a renewal; `None`: for good. Zero: it is over.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        match *self.lock() {
            End::Never => None,
            End::At(until) => Some(until.saturating_duration_since(Instant::now())),
            End::Over => Some(Duration::ZERO),
        }
    }

    /// Whether this instance leads.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.left() != Some(Duration::ZERO)
    }

    /// Its lease was renewed. A term that is over stays so.
    pub fn extend(&self, until: Instant) {
        let mut end = self.lock();
        if let End::At(before) = *end
            && before > Instant::now()
        {
            *end = End::At(before.max(until));
        }
    }

    /// It is over, for good.
    pub fn end(&self) {
        *self.lock() = End::Over;
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::Term;

    /// Neither a renewal that comes late nor one that comes after the end brings a term back.
    #[test]
    fn a_term_that_is_over_stays_over() {
        let soon = || Instant::now() + Duration::from_secs(60);
        let late = Term::new(3, 1, Instant::now());
        assert!(!late.holds());
        late.extend(soon());
        assert!(!late.holds());
        let ended = Term::new(3, 1, soon());
        assert!(ended.holds());
        ended.end();
        ended.extend(soon());
        assert!(!ended.holds());
        assert!(Term::alone().holds());
    }
}
