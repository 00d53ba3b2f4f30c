//! A counter that costs one relaxed add.

use std::sync::atomic::{AtomicU64, Ordering};

/// A monotonic counter. Many threads may add and read. A read is never torn but may lag.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Creates a counter at zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`, wrapping at 2^64.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Returns the current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::Counter;

    #[test]
    fn counts_what_was_added() {
        let counter = Counter::new();
        counter.increment();
        counter.add(41);
        assert_eq!(counter.get(), 42);
    }
}
