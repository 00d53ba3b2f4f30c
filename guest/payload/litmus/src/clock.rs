//! Measures the offset between vCPUs' clocks.
//!
//! vCPU 0 answers requests with its time. The answer with the shortest round trip is the most accurate (Cristian, *Probabilistic
//! Clock Synchronization*, 1989).

use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{PAGE, Shared, Team};

/// Words that [`behind`] needs: request, answer, time. Each has its own page, as several nodes may write them.
pub const WORDS: usize = 3 * PAGE / 8;
/// Number of requests per vCPU.
const QUESTIONS: u64 = 12;

/// Returns an estimate of how many nanoseconds this vCPU's clock is behind vCPU 0's; 0 if that is possible. All vCPUs call it.
pub fn behind(team: &Team<'_>, words: Shared<AtomicU64>) -> i64 {
    let words = words.atomics();
    let (question, answer, time) = (&words[0], &words[PAGE / 8], &words[2 * PAGE / 8]);
    let until = |word: &AtomicU64, value| {
        let mut looks = 0;
        while word.load(Ordering::Acquire) != value {
            team.idle(&mut looks);
        }
    };
    let mut least = i64::MIN;
    let mut most = i64::MAX;
    for vcpu in 1..team.count() {
        for number in 1..=QUESTIONS {
            let number = vcpu as u64 * QUESTIONS + number;
            if team.leads() {
                until(question, number);
                time.store(team.nanoseconds(), Ordering::Relaxed);
                answer.store(number, Ordering::Release);
            } else if vcpu == team.index() {
                let before = team.nanoseconds();
                question.store(number, Ordering::Release);
                until(answer, number);
                let after = team.nanoseconds();
                let theirs = time.load(Ordering::Relaxed).cast_signed();
                // It was read between the two.
                least = least.max(theirs - after.cast_signed());
                most = most.min(theirs - before.cast_signed());
            }
        }
        team.wait_patiently();
    }
    if team.leads() || (least..=most).contains(&0) { 0 } else { i64::midpoint(least, most) }
}

#[cfg(test)]
#[allow(unsafe_code)] // The heap is made over memory of the test.
mod tests {
    use super::{WORDS, behind};
    use payload_spmd::{Barrier, Heap, Machine, Team};
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    struct Host(Instant, u64);
    impl Machine for Host {
        fn nanoseconds(&self) -> u64 {
            u64::try_from(self.0.elapsed().as_nanos()).unwrap() + self.1
        }
        fn phase(&self, _: bool) {}
    }

    /// A clock that is an hour ahead is detected, to a tenth of a second. A correct one yields 0.
    #[test]
    fn a_clock_that_is_ahead_is_found_out() {
        const HOUR: u64 = 3_600_000_000_000;
        let mut memory = vec![0_u64; (1 << 20) / 8];
        let (start, bytes) = (memory.as_mut_ptr().expose_provenance(), memory.len() * 8);
        let (barrier, nodes) = (Barrier::new(), [const { AtomicU32::new(0) }; 3]);
        let begun = Instant::now();
        let found: Vec<i64> = std::thread::scope(|scope| {
            let run = |index: usize| {
                let (barrier, nodes) = (&barrier, &nodes);
                scope.spawn(move || {
                    let machine = Host(begun, if index == 2 { HOUR } else { 0 });
                    let team = Team::join(index, 3, 0, nodes, barrier, &machine);
                    // SAFETY: the memory outlives the threads, and only their heaps use it.
                    let mut heap = unsafe { Heap::new(std::ptr::with_exposed_provenance_mut(start), bytes) };
                    behind(&team, heap.array(WORDS).unwrap())
                })
            };
            let threads: Vec<_> = (0..3).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(found[..2], [0, 0]);
        assert!((found[2] + HOUR.cast_signed()).abs() < 100_000_000, "{found:?}");
    }
}
