//! The participants of an SPMD program.

use crate::Barrier;
use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

/// The machine's services for a team.
pub trait Machine: Sync {
    /// Returns nanoseconds since some moment. Only times of one vCPU may be subtracted.
    fn nanoseconds(&self) -> u64;
    /// Marks the start or end of the measured part; called by vCPU 0.
    fn phase(&self, begins: bool);
    /// Yields the processor briefly, if supported.
    fn pause(&self) {
        core::hint::spin_loop();
    }
}

/// Polls of a barrier before the vCPU yields its processor: about the cost of a yield.
const MAX_BARRIER_POLLS: u32 = 2_000;
/// The same after a wait during which another vCPU got the processor, as will happen again in the next one.
const LITTLE_PATIENCE: u32 = 50;
/// A longer yield means that another vCPU got the processor, in nanoseconds.
const LONG: u64 = 150_000;

/// One vCPU's view of the participants.
#[derive(Clone)]
pub struct Team<'a> {
    index: usize,
    count: usize,
    /// `None` for a team of one.
    barrier: Option<&'a Barrier>,
    /// Node of each vCPU plus one; 0 before it has joined.
    nodes: &'a [AtomicU32],
    machine: &'a dyn Machine,
    /// Polls before the vCPU yields its processor.
    patience: Cell<u32>,
}

impl<'a> Team<'a> {
    /// Joins vCPU `index` of `count`, which runs on node `node`, and waits until all have joined. All pass the same barrier and the
    /// same table, initially zero, with an entry per vCPU.
    ///
    /// # Panics
    /// The table is too short.
    pub fn join(
        index: usize,
        count: usize,
        node: u32,
        nodes: &'a [AtomicU32],
        barrier: &'a Barrier,
        machine: &'a dyn Machine,
    ) -> Self {
        let Some(place) = nodes.get(index).filter(|_| index < count && count <= nodes.len()) else {
            panic!("vCPU {index} of {count} can't join a team with places for {}", nodes.len())
        };
        place.store(node + 1, Ordering::Release);
        let team = Self {
            index,
            count,
            barrier: Some(barrier),
            nodes,
            machine,
            patience: Cell::new(MAX_BARRIER_POLLS),
        };
        team.wait();
        team
    }

    /// Returns a team of one, for the serial reference computation.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self { index: 0, count: 1, barrier: None, ..self.clone() }
    }

    /// Returns this vCPU's index, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of participants.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns whether this is vCPU 0, which prints and measures.
    pub fn leads(&self) -> bool {
        self.index == 0
    }

    /// Returns the node of a vCPU.
    pub fn node_of(&self, vcpu: usize) -> Option<u32> {
        self.nodes.get(vcpu)?.load(Ordering::Acquire).checked_sub(1)
    }

    /// Waits until all have arrived. All see earlier writes afterwards.
    pub fn wait(&self) {
        if let Some(barrier) = self.barrier {
            barrier.wait(u32::try_from(self.count).unwrap_or(u32::MAX));
        }
    }

    /// Does the same if vCPUs may outnumber processors: a vCPU that has polled for long yields its processor.
    pub fn wait_patiently(&self) {
        let Some(barrier) = self.barrier else { return };
        let (mut looks, mut gave_way) = (0_u32, false);
        barrier.wait_with(u32::try_from(self.count).unwrap_or(u32::MAX), || {
            looks = looks.saturating_add(1);
            if looks < self.patience.get() {
                core::hint::spin_loop();
            } else {
                let begun = self.machine.nanoseconds();
                self.machine.pause();
                gave_way |= self.machine.nanoseconds().saturating_sub(begun) > LONG;
            }
        });
        self.patience.set(if gave_way { LITTLE_PATIENCE } else { MAX_BARRIER_POLLS });
    }

    /// Counts one poll for a missing event; yields the processor after many polls.
    pub fn idle(&self, looks: &mut u32) {
        *looks = looks.saturating_add(1);
        if *looks >= MAX_BARRIER_POLLS {
            self.machine.pause();
        } else {
            core::hint::spin_loop();
        }
    }

    /// Returns this vCPU's part of `0..length`: parts are contiguous, ascend with vCPUs, and differ by one at most.
    pub fn part(&self, length: usize) -> Range<usize> {
        self.part_of(self.index, length)
    }

    /// Returns the part of another vCPU.
    pub fn part_of(&self, vcpu: usize, length: usize) -> Range<usize> {
        let each = length / self.count;
        let more = length % self.count;
        let start = vcpu * each + vcpu.min(more);
        start..start + each + usize::from(vcpu < more)
    }

    /// Runs the measured part: all start together. Returns its duration in nanoseconds by vCPU 0's clock, until all have ended.
    /// Waiting vCPUs yield their processors.
    pub fn measure(&self, part: impl FnOnce()) -> u64 {
        self.wait_patiently();
        if self.leads() {
            self.machine.phase(true);
        }
        self.wait_patiently();
        let begun = self.machine.nanoseconds();
        part();
        self.wait_patiently();
        let ended = self.machine.nanoseconds();
        if self.leads() {
            self.machine.phase(false);
        }
        self.wait_patiently();
        ended.saturating_sub(begun)
    }

    /// Runs a function on this vCPU; returns its duration in nanoseconds.
    pub fn time(&self, part: impl FnOnce()) -> u64 {
        let begun = self.machine.nanoseconds();
        part();
        self.machine.nanoseconds().saturating_sub(begun)
    }

    /// Returns the machine's clock.
    pub fn nanoseconds(&self) -> u64 {
        self.machine.nanoseconds()
    }
}

impl core::fmt::Debug for Team<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "vCPU {} of {}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::{LITTLE_PATIENCE, LONG, MAX_BARRIER_POLLS, Machine, Team};
    use crate::Barrier;
    use std::cell::Cell;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    struct Still(Mutex<Vec<bool>>);
    impl Machine for Still {
        fn nanoseconds(&self) -> u64 {
            7
        }
        fn phase(&self, begins: bool) {
            self.0.lock().unwrap().push(begins);
        }
    }

    /// Every vCPU knows every vCPU's node. Parts cover everything once and in order. The phase is reported once.
    #[test]
    fn a_team_knows_its_members_and_shares_the_work() {
        let (barrier, machine) = (Barrier::new(), Still(Mutex::default()));
        let nodes: [AtomicU32; 3] = Default::default();
        std::thread::scope(|scope| {
            for index in 0..3_usize {
                let (barrier, machine, nodes) = (&barrier, &machine, &nodes);
                scope.spawn(move || {
                    let node = u32::from(index == 2);
                    let team = Team::join(index, 3, node, nodes, barrier, machine);
                    assert_eq!(team.node_of(0), Some(0));
                    assert_eq!(team.node_of(2), Some(1));
                    assert_eq!(team.node_of(3), None);
                    for length in [0, 1, 2, 3, 10, 1000] {
                        let parts: Vec<usize> = (0..3).flat_map(|vcpu| team.part_of(vcpu, length)).collect();
                        assert_eq!(parts, (0..length).collect::<Vec<_>>());
                        assert_eq!(team.alone().part(length), 0..length);
                    }
                    assert_eq!(team.measure(|| team.wait()), 0);
                });
            }
        });
        assert_eq!(*machine.0.lock().unwrap(), [true, false]);
    }

    /// After a yield during which another vCPU got the processor, a vCPU polls less in the next wait, until no other gets it any
    /// more.
    #[test]
    fn patience_is_short_where_others_take_the_processor() {
        /// Its clock advances by `pause` with each yield; the other vCPU reaches the barrier in the third.
        struct Taken<'a> {
            barrier: &'a Barrier,
            time: AtomicU64,
            pause: AtomicU64,
            pauses: AtomicU32,
        }
        impl Machine for Taken<'_> {
            fn nanoseconds(&self) -> u64 {
                self.time.load(Ordering::Relaxed)
            }
            fn phase(&self, _begins: bool) {}
            fn pause(&self) {
                self.time.fetch_add(self.pause.load(Ordering::Relaxed), Ordering::Relaxed);
                if self.pauses.fetch_add(1, Ordering::Relaxed) % 3 == 2 {
                    self.barrier.wait(2);
                }
            }
        }
        let (barrier, nodes) = (Barrier::new(), <[AtomicU32; 2]>::default());
        let machine = Taken {
            barrier: &barrier,
            time: AtomicU64::new(0),
            pause: AtomicU64::new(LONG),
            pauses: AtomicU32::new(0),
        };
        let patience = Cell::new(MAX_BARRIER_POLLS);
        let team =
            Team { index: 0, count: 2, barrier: Some(&barrier), nodes: &nodes, machine: &machine, patience };
        let after_wait_with_pauses_of = |time| {
            machine.pause.store(time, Ordering::Relaxed);
            team.wait_patiently();
            team.patience.get()
        };
        assert_eq!(after_wait_with_pauses_of(LONG), MAX_BARRIER_POLLS);
        assert_eq!(after_wait_with_pauses_of(LONG + 1), LITTLE_PATIENCE);
        assert_eq!(after_wait_with_pauses_of(LONG + 1), LITTLE_PATIENCE);
        assert_eq!(after_wait_with_pauses_of(LONG), MAX_BARRIER_POLLS);
        assert_eq!(machine.pauses.load(Ordering::Relaxed), 4 * 3);
        // The four barriers of the measured part yield, too (otherwise they would never be passed here).
        team.measure(|| ());
        assert_eq!(machine.pauses.load(Ordering::Relaxed), 8 * 3);
    }
}
