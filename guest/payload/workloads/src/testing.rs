//! Runs a workload on threads of this machine.

#![allow(unsafe_code)] // The heap lies in memory of the test's.

use payload_spmd::{Barrier, Heap, Machine, Outcome, PAGE, Refused, Settings, Team};
use std::sync::atomic::AtomicU32;
use std::time::Instant;

struct Host(Instant);
impl Machine for Host {
    fn nanoseconds(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap()
    }
    fn phase(&self, _: bool) {}
}

type Run = fn(&Team<'_>, &mut Heap, &Settings) -> Result<Outcome, Refused>;

/// Returns the result of vCPU 0 in a team of `count` threads, with 16 MiB of memory. All must agree whether the workload is refused.
pub fn run(
    run: Run,
    names: &'static [&'static str],
    count: usize,
    arguments: &[&'static str],
) -> Result<Outcome, Refused> {
    let settings = Settings::parse(arguments.iter().copied(), names)?;
    let mut memory = vec![0_u64; (16 << 20) / 8 + PAGE / 8];
    let bytes = memory.len() * 8;
    let start = memory.as_mut_ptr().expose_provenance();
    let barrier = Barrier::new();
    let nodes: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
    let host = Host(Instant::now());
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let (barrier, nodes, host, settings) = (&barrier, &nodes, &host, &settings);
                scope.spawn(move || {
                    let team = Team::join(index, count, 0, nodes, barrier, host);
                    // SAFETY: the memory outlives the threads, and only their heaps use it.
                    let mut heap = unsafe { Heap::new(std::ptr::with_exposed_provenance_mut(start), bytes) };
                    run(&team, &mut heap, settings)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| result.is_ok() == results[0].is_ok()), "{results:?}");
    results[0]
}

/// Does the same for teams of 1, 2 and 3; each result must be correct.
pub fn right(run_it: Run, names: &'static [&'static str], arguments: &[&'static str]) -> Vec<Outcome> {
    (1..=3)
        .map(|count| {
            let outcome = run(run_it, names, count, arguments).unwrap();
            assert!(outcome.verified, "{count}: {outcome:?}");
            assert!(outcome.events > 0, "{outcome:?}");
            outcome
        })
        .collect()
}
