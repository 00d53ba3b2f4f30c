//! Who takes part.

use crate::Barrier;
use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

/// What a team asks of the machine below it.
pub trait Machine: Sync {
    /// Nanoseconds since some moment. Only times of one vCPU may be subtracted.
    fn nanoseconds(&self) -> u64;
    /// The measured part begins or has ended; called by vCPU 0.
    fn phase(&self, begins: bool);
    /// Gives the processor to others for a moment, where that can be done.
    fn pause(&self) {
        core::hint::spin_loop();
    }
}

/// Looks at a barrier before the processor is given away: as long as that takes.
const MAX_BARRIER_POLLS: u32 = 2_000;
/// The same after a wait in which another one had the processor meanwhile, which it will have in the next one, too.
const LITTLE_PATIENCE: u32 = 50;
/// A processor that was given away for longer was taken by another one, nanoseconds.
const LONG: u64 = 150_000;

/// One vCPU's view of all that run the program with it.
#[derive(Clone)]
pub struct Team<'a> {
    index: usize,
    count: usize,
    /// Absent for one that works alone.
    barrier: Option<&'a Barrier>,
    /// One more than the node of each vCPU; 0 while it hasn't said so.
    nodes: &'a [AtomicU32],
    machine: &'a dyn Machine,
    /// Looks before the processor is given away.
    patience: Cell<u32>,
}

impl<'a> Team<'a> {
    /// Joins vCPU `index` of `count`, which runs on node `node`, and waits until all have joined. All pass the same table, zero at first
    /// and with a place for each vCPU, and the same barrier.
    ///
    /// # Panics
    /// When the table is too short.
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

    /// A team of one, for computing serially what others are compared with.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self { index: 0, count: 1, barrier: None, ..self.clone() }
    }

    /// This vCPU, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many take part.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether this is vCPU 0, which prints and measures.
    pub fn leads(&self) -> bool {
        self.index == 0
    }

    /// The node that a vCPU runs on.
    pub fn node_of(&self, vcpu: usize) -> Option<u32> {
        self.nodes.get(vcpu)?.load(Ordering::Acquire).checked_sub(1)
    }

    /// Waits until all have come here. What was written before it is seen after it, by all.
    pub fn wait(&self) {
        if let Some(barrier) = self.barrier {
            barrier.wait(u32::try_from(self.count).unwrap_or(u32::MAX));
        }
    }

    /// The same where vCPUs may outnumber processors: who has waited for long gives its processor to others.
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

    /// One look at something that hasn't come yet, of so many: gives the processor away after many.
    pub fn idle(&self, looks: &mut u32) {
        *looks = looks.saturating_add(1);
        if *looks >= MAX_BARRIER_POLLS {
            self.machine.pause();
        } else {
            core::hint::spin_loop();
        }
    }

    /// The part of `0..length` that is this vCPU's: parts are contiguous, ascend with vCPUs, and differ by one at most.
    pub fn part(&self, length: usize) -> Range<usize> {
        self.part_of(self.index, length)
    }

    /// The same for another vCPU.
    pub fn part_of(&self, vcpu: usize, length: usize) -> Range<usize> {
        let each = length / self.count;
        let more = length % self.count;
        let start = vcpu * each + vcpu.min(more);
        start..start + each + usize::from(vcpu < more)
    }

    /// Runs the measured part: all begin together, and vCPU 0's clock says how many nanoseconds it took until all had ended. Who waits for others does so patiently.
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

    /// Runs something on this vCPU and says how many nanoseconds it took.
    pub fn time(&self, part: impl FnOnce()) -> u64 {
        let begun = self.machine.nanoseconds();
        part();
        self.machine.nanoseconds().saturating_sub(begun)
    }

    /// The machine's clock.
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

    /// Everyone learns everyone's node, parts cover everything once and in order, and the phase is told once.
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

    /// Who has given its processor away, and had it taken, does so after few looks the next time, until nobody takes it any more.
    #[test]
    fn patience_is_short_where_others_take_the_processor() {
        /// Its clock goes on by `pause` with each pause; the other one comes to the barrier in the third.
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
        // The four barriers of the measured part give way, too (and would never be passed here if they didn't).
        team.measure(|| ());
        assert_eq!(machine.pauses.load(Ordering::Relaxed), 8 * 3);
    }
}
