//! A spinning barrier.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

/// Blocks vCPUs until all have arrived. Reusable at once. Put it in a `static`.
#[derive(Debug)]
pub struct Barrier {
    arrived: AtomicU32,
    generation: AtomicU32,
}

impl Barrier {
    /// Creates a barrier.
    pub const fn new() -> Self {
        Self { arrived: AtomicU32::new(0), generation: AtomicU32::new(0) }
    }

    /// Waits until `count` vCPUs have called this; all must pass the same `count`. All of them see earlier writes afterwards.
    pub fn wait(&self, count: u32) {
        self.wait_with(count, spin_loop);
    }

    /// Does the same; calls `idle` repeatedly while others are missing.
    pub fn wait_with(&self, count: u32, mut idle: impl FnMut()) {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel).wrapping_add(1) >= count {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        while self.generation.load(Ordering::Acquire) == generation {
            idle();
        }
    }
}

impl Default for Barrier {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// No vCPU passes before all have arrived, in every round.
    #[test]
    fn all_come_before_anybody_goes() {
        let (barrier, came) = (Barrier::new(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=50 {
                        came.fetch_add(1, Ordering::Relaxed);
                        barrier.wait(3);
                        assert_eq!(came.load(Ordering::Relaxed), 3 * round);
                        barrier.wait(3);
                    }
                });
            }
        });
    }
}
