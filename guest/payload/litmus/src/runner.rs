//! Runs a test many times and counts its outcomes.
//!
//! A round consists of many instances of the test, each with its own locations. All vCPUs initialize a part of them, synchronize, run
//! their thread for every instance in turn, synchronize, and count a part of the outcomes. The mapping of threads to vCPUs changes
//! from round to round. Within a round, threads may synchronize before each instance ([`Meeting::Each`]), which makes them run in
//! parallel. Or they don't ([`Meeting::Round`]), which needs less communication, and is possible if vCPUs outnumber processors.
//! [`Meeting::Mixed`] alternates. With [`Meeting::Clock`] each instance has a start time for its threads. So they run in parallel
//! without communication, also on several nodes. A late thread starts without waiting.
//!
//! Outcomes are counted separately for rounds with every thread on a node of its own.
//!
//! The idea is that of the tool `litmus7` (Alglave, Maranget and others, *Litmus: Running Tests against Hardware*, TACAS 2011).

#![allow(unsafe_code)] // Calls code that the host wrote, and sets up memory for it.

use crate::clock;
use crate::table::{Placement, Record};
use crate::{MOST_LOCATIONS, MOST_OBSERVED, MOST_THREADS};
use core::arch::asm;
use core::fmt;
use core::hint::{black_box, spin_loop};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{Heap, PAGE, Random, Refused, Shared, Team};

/// One thread of one instance: arguments are the addresses of the locations and the buffer for the registers.
pub type Code = unsafe extern "sysv64" fn(*const [u64; MOST_LOCATIONS], *mut [u64; MOST_OBSERVED]);

/// Number of values of an outcome: registers of all threads, then locations.
pub const VALUES: usize = MOST_THREADS * MOST_OBSERVED + MOST_LOCATIONS;

/// When threads synchronize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// Before each instance.
    Each,
    /// Before and after each round.
    Round,
    /// Before each instance in every 32nd round, otherwise as in [`Meeting::Round`].
    Mixed,
    /// Never. Each instance has a start time, this many nanoseconds after the previous one.
    Clock(u64),
}

impl Meeting {
    /// Returns whether threads synchronize before each instance of a round.
    const fn each(self, round: u64) -> bool {
        match self {
            Self::Each => true,
            Self::Round | Self::Clock(_) => false,
            Self::Mixed => round.is_multiple_of(32),
        }
    }
}

/// A test ready to run.
#[derive(Debug, Clone, Copy)]
pub struct Test<'a> {
    /// The test's record in the table.
    pub record: &'a Record,
    /// Code of each thread.
    pub code: [Option<Code>; MOST_THREADS],
}

/// Nanoseconds from a round's synchronization to its first instance: all threads must see that the others have arrived.
const LEAD: u64 = 300_000;
/// The same with threads on several nodes.
const FAR_LEAD: u64 = 2_000_000;

/// Size in words of a histogram entry: the values and a count.
const ENTRY: usize = VALUES + 1;
/// Limit of different outcomes: tests of 2 to 4 threads have far fewer.
const MOST_OUTCOMES: usize = 256;

/// Memory for runs of tests in sequence.
#[derive(Debug, Clone, Copy)]
pub struct Bench {
    instances: usize,
    /// Distance of instances in bytes, if each has a cache line of its own or locations share none.
    step: usize,
    /// Distance in bytes between the memory of two locations that don't share pages.
    array: usize,
    locations: Shared<AtomicU64>,
    registers: Shared<AtomicU64>,
    /// Each vCPU's registers during a run. No other vCPU uses them, so their pages stay on its node.
    own_registers: Shared<AtomicU64>,
    histograms: Shared<AtomicU64>,
    meeting: Shared<AtomicU64>,
    /// Nanoseconds that this vCPU's clock is behind vCPU 0's.
    behind: i64,
}

/// Words of one vCPU's histogram: number of entries, number of lost outcomes, entries; whole pages.
const HISTOGRAM: usize = (2 + MOST_OUTCOMES * ENTRY).next_multiple_of(PAGE / 8);
/// Size of a cache line in bytes.
const LINE: usize = 64;
/// Size of a location in bytes: the widest access.
const WIDEST: usize = 8;

impl Bench {
    /// Allocates memory for rounds of `instances` instances. `crossing`: the tests' locations cross pages, which takes a page for
    /// each.
    ///
    /// # Errors
    /// There isn't enough memory.
    pub fn new(heap: &mut Heap, team: &Team<'_>, instances: usize, crossing: bool) -> Result<Self, Refused> {
        // One page more, as the last location across pages ends there.
        let array = if crossing { (instances + 1) * PAGE } else { (instances * LINE).next_multiple_of(PAGE) };
        // Nodes transfer whole pages, independent of cache lines. More instances per page mean fewer transfers per instance.
        let step = if several(team) { WIDEST } else { LINE };
        let behind = clock::behind(team, heap.array(clock::WORDS)?);
        Ok(Self {
            instances,
            step,
            array,
            locations: heap.array(MOST_LOCATIONS * array / 8)?,
            registers: heap.array(instances * MOST_OBSERVED * MOST_THREADS)?,
            own_registers: heap.array(own_words(instances) * team.count())?,
            histograms: heap.array(HISTOGRAM * 2 * team.count())?,
            meeting: heap.array(2)?,
            behind,
        })
    }

    /// Returns the address of location `location` of an instance.
    fn address(&self, record: &Record, instance: usize, location: usize) -> *mut u8 {
        let array = location * self.array;
        let offset = match record.placement {
            Placement::Line => instance * self.step.max(MOST_LOCATIONS * WIDEST) + location * WIDEST,
            Placement::Page => {
                // Each location has a quarter of a page.
                let (quarter, within) = (PAGE / MOST_LOCATIONS, instance * self.step);
                within / quarter * PAGE + location * quarter + within % quarter
            }
            Placement::Pages => array + instance * self.step,
            Placement::Cross => array + (instance + 1) * PAGE - record.width as usize / 2,
        };
        self.locations.address().cast::<u8>().wrapping_add(offset)
    }

    /// Returns the start of a vCPU's own registers of all instances.
    fn own_registers(&self, vcpu: usize) -> *mut u64 {
        self.own_registers.address().cast::<u64>().wrapping_add(vcpu * own_words(self.instances))
    }

    /// Copies the registers of a vCPU's thread to the memory in which outcomes are counted. (Locations aren't initialized this way:
    /// their pages wouldn't be write-update pages when threads run, so an order violation there would be missed.)
    fn show(&self, vcpu: usize, record: &Record, thread: usize) {
        let to = self.registers(record, thread, 0).cast::<u8>();
        let bytes = self.instances * shown(record, thread) * 8;
        // SAFETY: both have room for this thread's registers of all instances. No other code uses them until all vCPUs have
        // synchronized.
        unsafe { copy(self.own_registers(vcpu).cast(), to, bytes) };
    }

    /// Returns the place in which a thread's registers of an instance are counted. Only observed registers have room.
    fn registers(&self, record: &Record, thread: usize, instance: usize) -> *mut [u64; MOST_OBSERVED] {
        let words = thread * self.instances * MOST_OBSERVED + instance * shown(record, thread);
        self.registers.address().cast::<u64>().wrapping_add(words).cast()
    }

    /// Runs at least `iterations` instances of a test. All vCPUs call it, and there must be one per thread. The outcomes are valid
    /// until the next run.
    ///
    /// # Safety
    /// The code must be as [`Code`] says: it uses the locations, and writes only the registers in its record.
    pub unsafe fn run<'a>(
        &self,
        team: &Team<'a>,
        test: &Test<'_>,
        meeting: Meeting,
        iterations: u64,
    ) -> Outcomes<'a> {
        let record = test.record;
        let threads = record.threads as usize;
        let rounds = iterations.div_ceil(self.instances as u64);
        for apart in [false, true] {
            self.histogram(team.index(), apart)
                .iter()
                .take(2)
                .for_each(|word| word.store(0, Ordering::Relaxed));
        }
        if team.leads() {
            self.meeting.atomics()[0].store(0, Ordering::Relaxed);
        }
        let mut random = Random::new(team.index() as u64);
        let mut met_before = 0;
        let mut apart_rounds = 0;
        for round in 0..rounds {
            self.set_up(record, team.part(self.instances));
            team.wait_patiently();
            if team.leads() {
                let begin = team.nanoseconds() + if several(team) { FAR_LEAD } else { LEAD };
                self.meeting.atomics()[1].store(begin, Ordering::Release);
            }
            team.wait_patiently();
            let begin = self.meeting.atomics()[1].load(Ordering::Acquire).saturating_add_signed(-self.behind);
            // Threads move to the next vCPU each round.
            let shift = usize::try_from(round % team.count() as u64).unwrap_or(0);
            let thread = (team.index() + shift) % team.count();
            if thread < threads
                && let Some(code) = test.code.get(thread).copied().flatten()
            {
                let (own, shown) = (self.own_registers(team.index()), shown(record, thread));
                for instance in 0..self.instances {
                    let mut addresses = [0; MOST_LOCATIONS];
                    for (location, address) in addresses.iter_mut().enumerate() {
                        *address = self.address(record, instance, location).expose_provenance() as u64;
                    }
                    let registers = own.wrapping_add(instance * shown).cast();
                    if meeting.each(round) {
                        met_before += threads as u64;
                        self.meet(met_before);
                        // The last arrival is ahead of the others. A small random delay compensates that.
                        for step in 0..random.below(48) {
                            black_box(step);
                        }
                    } else if let Meeting::Clock(interval) = meeting {
                        let chance = random.below(interval / 4 + 1);
                        let at = begin.saturating_add(instance as u64 * interval + chance);
                        while team.nanoseconds() < at {
                            spin_loop();
                        }
                    }
                    // SAFETY: the caller's promise; the addresses are in the bench's memory.
                    unsafe { code(&raw const addresses, registers) };
                }
                self.show(team.index(), record, thread);
            } else if meeting.each(round) {
                met_before += (threads * self.instances) as u64;
            }
            let apart = self.apart(team, threads, shift);
            apart_rounds += u64::from(apart);
            team.wait_patiently();
            let histogram = self.histogram(team.index(), apart);
            for instance in team.part(self.instances) {
                self.count(record, instance, histogram);
            }
            team.wait_patiently();
        }
        let of = |rounds| rounds * self.instances as u64;
        Outcomes {
            bench: *self,
            team: team.clone(),
            record: *record,
            iterations: of(rounds),
            apart: of(apart_rounds),
        }
    }

    /// Waits until this many threads have arrived.
    fn meet(&self, all: u64) {
        let met = &self.meeting.atomics()[0];
        met.fetch_add(1, Ordering::AcqRel);
        while met.load(Ordering::Acquire) < all {
            spin_loop();
        }
    }

    /// Returns whether each thread of a round with this shift has a node of its own.
    fn apart(&self, team: &Team<'_>, threads: usize, shift: usize) -> bool {
        let node = |thread: usize| team.node_of((thread + team.count() - shift) % team.count());
        (0..threads).all(|thread| (0..thread).all(|other| node(thread) != node(other)))
    }

    /// Initializes the locations of these instances.
    fn set_up(&self, record: &Record, part: Range<usize>) {
        for (location, value) in record.initial.iter().enumerate().take(record.locations as usize) {
            let mut first = part.start;
            while first < part.end {
                let count = self.evenly(record, first).min(part.end - first);
                let start = self.address(record, first, location);
                let step = self.address(record, first + 1, location).addr().wrapping_sub(start.addr());
                // SAFETY: inside the locations; no other code uses these instances now.
                unsafe { store_each(start, step, count, *value) };
                first += count;
            }
        }
    }

    /// Returns the number of instances from this one on with equal distances.
    fn evenly(&self, record: &Record, first: usize) -> usize {
        match record.placement {
            Placement::Page => {
                let quarter = PAGE / MOST_LOCATIONS / self.step;
                quarter - first % quarter
            }
            Placement::Line | Placement::Pages | Placement::Cross => usize::MAX,
        }
    }

    fn histogram(&self, vcpu: usize, apart: bool) -> &[AtomicU64] {
        let which = vcpu * 2 + usize::from(apart);
        &self.histograms.atomics()[which * HISTOGRAM..(which + 1) * HISTOGRAM]
    }

    /// Counts the outcome of an instance.
    fn count(&self, record: &Record, instance: usize, histogram: &[AtomicU64]) {
        let mut values = [0; VALUES];
        let mut place = values.iter_mut();
        for (thread, described) in record.thread.iter().enumerate().take(record.threads as usize) {
            let registers = self.registers(record, thread, instance).cast::<u64>();
            for (register, place) in (0..described.observed as usize).zip(&mut place) {
                // SAFETY: inside the registers' memory; the thread has ended.
                *place = unsafe { registers.add(register).read() };
            }
        }
        for (location, place) in (0..record.locations as usize).zip(&mut place) {
            // SAFETY: inside the locations; all threads have ended.
            *place = unsafe { self.address(record, instance, location).cast::<u64>().read_unaligned() };
        }
        add(histogram, &values, 1);
    }
}

/// Returns whether a team spans several nodes.
fn several(team: &Team<'_>) -> bool {
    team.node_of(0) != team.node_of(team.count() - 1)
}

/// Returns the number of a thread's observed registers.
fn shown(record: &Record, thread: usize) -> usize {
    record.thread.get(thread).map_or(0, |thread| thread.observed as usize)
}

/// Returns the words of one vCPU's own registers, in whole pages.
const fn own_words(instances: usize) -> usize {
    (instances * MOST_OBSERVED).next_multiple_of(PAGE / 8)
}

/// Stores a value at `count` places, `step` bytes apart.
///
/// The loop contains no loads. On a write-update page, a monitor may emulate the stores after a trapped one together with it, each as
/// a separate update, while they need only registers. In a compiler's loop each would trap.
///
/// # Safety
/// Eight bytes at each place must be writable, and no other code uses them.
unsafe fn store_each(start: *mut u8, step: usize, count: usize, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "test {count}, {count}",
            "jz 3f",
            "2:",
            "mov qword ptr [{place}], {value}",
            "add {place}, {step}",
            "dec {count}",
            "jnz 2b",
            "3:",
            place = inout(reg) start => _,
            step = in(reg) step,
            count = inout(reg) count => _,
            value = in(reg) value,
            options(nostack),
        );
    };
}

/// Copies with a string instruction. On a write-update page a monitor would emulate each plain store. For a string instruction it
/// fetches the page instead.
///
/// # Safety
/// The bytes must be readable and writable, and must not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; the direction flag is clear, as everywhere.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    };
}

/// Adds to the count of an outcome.
fn add(histogram: &[AtomicU64], values: &[u64; VALUES], count: u64) {
    // Only the histogram's own vCPU writes it.
    let load = |at: usize| histogram[at].load(Ordering::Relaxed);
    let entries = usize::try_from(load(0)).unwrap_or(0);
    for entry in 0..entries {
        let at = 2 + entry * ENTRY;
        if values.iter().enumerate().all(|(index, value)| load(at + index) == *value) {
            histogram[at + VALUES].store(load(at + VALUES) + count, Ordering::Relaxed);
            return;
        }
    }
    if entries == MOST_OUTCOMES {
        histogram[1].store(load(1) + count, Ordering::Relaxed);
        return;
    }
    let at = 2 + entries * ENTRY;
    for (index, value) in values.iter().enumerate() {
        histogram[at + index].store(*value, Ordering::Relaxed);
    }
    histogram[at + VALUES].store(count, Ordering::Relaxed);
    histogram[0].store(entries as u64 + 1, Ordering::Relaxed);
}

/// A test's outcomes on all vCPUs.
#[derive(Debug)]
pub struct Outcomes<'a> {
    bench: Bench,
    team: Team<'a>,
    record: Record,
    iterations: u64,
    apart: u64,
}

impl Outcomes<'_> {
    /// Returns the number of runs.
    pub fn iterations(&self) -> u64 {
        self.iterations
    }

    /// Returns the number of runs with every thread on a node of its own.
    pub fn apart(&self) -> u64 {
        self.apart
    }

    fn histograms(&self) -> impl Iterator<Item = (bool, &[AtomicU64])> {
        let which = move |vcpu| [false, true].map(|apart| (apart, self.bench.histogram(vcpu, apart)));
        (0..self.team.count()).flat_map(which)
    }

    /// Returns the number of outcomes without room; if it isn't 0, the counts are invalid.
    pub fn lost(&self) -> u64 {
        self.histograms().map(|(_, histogram)| histogram[1].load(Ordering::Acquire)).sum()
    }

    /// Calls `each` with values and count of every outcome of every vCPU, and whether every thread was on a node of its own. The same
    /// outcome may occur several times.
    pub fn for_each(&self, mut each: impl FnMut(&[u64], u64, bool)) {
        let observed: u32 =
            self.record.thread.iter().take(self.record.threads as usize).map(|thread| thread.observed).sum();
        let used = (observed + self.record.locations) as usize;
        for (apart, histogram) in self.histograms() {
            let entries = usize::try_from(histogram[0].load(Ordering::Acquire)).unwrap_or(0);
            for entry in 0..entries {
                let mut values = [0; VALUES];
                let at = 2 + entry * ENTRY;
                for (value, word) in values.iter_mut().zip(&histogram[at..]) {
                    *value = word.load(Ordering::Relaxed);
                }
                each(&values[..used], histogram[at + VALUES].load(Ordering::Relaxed), apart);
            }
        }
    }
}

/// Formats JSON: `[[[values…],count,apart],…]`.
impl fmt::Display for Outcomes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        let mut result = f.write_str("[");
        self.for_each(|values, count, apart| {
            let mut show = || {
                write!(f, "{}[[", if first { "" } else { "," })?;
                for (index, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if index == 0 { "" } else { "," })?;
                }
                write!(f, "],{count},{apart}]")
            };
            if result.is_ok() {
                result = show();
            }
            first = false;
        });
        result?;
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::{Bench, Code, Meeting, Test};
    use crate::table::{Placement, Record, Thread, name_bytes};
    use crate::{MOST_LOCATIONS, MOST_OBSERVED};
    use payload_spmd::{Barrier, Heap, Machine, Team};
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;

    struct Host(std::time::Instant);
    impl Machine for Host {
        fn nanoseconds(&self) -> u64 {
            self.0.elapsed().as_nanos().try_into().unwrap()
        }
        fn phase(&self, _: bool) {}
    }

    /// x = 0x11223344; observes x before.
    unsafe extern "sysv64" fn writes(at: *const [u64; MOST_LOCATIONS], out: *mut [u64; MOST_OBSERVED]) {
        // SAFETY: the runner's promise.
        unsafe {
            let x = std::ptr::with_exposed_provenance_mut::<u32>((*at)[0] as usize);
            (*out)[0] = x.read_unaligned().into();
            x.write_unaligned(0x1122_3344);
        }
    }

    /// y = 5, by both threads.
    unsafe extern "sysv64" fn other(at: *const [u64; MOST_LOCATIONS], _: *mut [u64; MOST_OBSERVED]) {
        // SAFETY: the runner's promise.
        unsafe { std::ptr::with_exposed_provenance_mut::<u32>((*at)[1] as usize).write_unaligned(5) };
    }

    /// Outcomes with their counts and whether threads were apart; iterations; those apart; JSON.
    type Found = (BTreeMap<(Vec<u64>, bool), u64>, u64, u64, String);

    fn run(placement: Placement, meeting: Meeting) -> Found {
        let record = Record {
            name: name_bytes("test").unwrap(),
            placement,
            width: 4,
            threads: 2,
            locations: 2,
            initial: [7, 8, 0, 0],
            thread: [
                Thread { code: 0, observed: 1 },
                Thread::default(),
                Thread::default(),
                Thread::default(),
            ],
        };
        let mut memory = vec![0_u64; (2 << 20) / 8];
        let (start, bytes) = (memory.as_mut_ptr().expose_provenance(), memory.len() * 8);
        let (barrier, nodes) = (Barrier::new(), [const { AtomicU32::new(0) }; 3]);
        let found = Mutex::new((BTreeMap::new(), 0, 0, String::new()));
        let machine = Host(std::time::Instant::now());
        // Three vCPUs on two nodes for two threads: each is idle in every third round, and in another one both threads are on the
        // same node.
        std::thread::scope(|scope| {
            for index in 0..3 {
                let (barrier, nodes, record, found, machine) = (&barrier, &nodes, &record, &found, &machine);
                scope.spawn(move || {
                    let team = Team::join(index, 3, u32::from(index == 2), nodes, barrier, machine);
                    // SAFETY: the memory outlives the threads, and only their heaps use it.
                    let mut heap = unsafe { Heap::new(std::ptr::with_exposed_provenance_mut(start), bytes) };
                    let bench =
                        Bench::new(&mut heap, &team, 50, record.placement == Placement::Cross).unwrap();
                    let code = [Some(writes as Code), Some(other as Code), None, None];
                    // SAFETY: the code above fulfils the contract.
                    let outcomes = unsafe { bench.run(&team, &Test { record, code }, meeting, 120) };
                    assert_eq!(outcomes.lost(), 0);
                    if team.leads() {
                        let mut found = found.lock().unwrap();
                        outcomes.for_each(|values, count, apart| {
                            *found.0.entry((values.to_vec(), apart)).or_insert(0) += count;
                        });
                        (found.1, found.2) = (outcomes.iterations(), outcomes.apart());
                        found.3 = outcomes.to_string();
                    }
                });
            }
        });
        found.into_inner().unwrap()
    }

    /// Every instance is initialized, run by both threads and counted once, for any placement of its locations. They don't overlap.
    #[test]
    fn every_instance_is_run_once() {
        for placement in Placement::ALL {
            for meeting in [Meeting::Each, Meeting::Round, Meeting::Mixed, Meeting::Clock(1000)] {
                let (outcomes, iterations, apart, text) = run(placement, meeting);
                assert_eq!((iterations, apart), (150, 100));
                let values = vec![7, 0x1122_3344, 5];
                let expected = BTreeMap::from([((values.clone(), false), 50), ((values, true), 100)]);
                assert_eq!(outcomes, expected, "{placement:?}");
                assert!(text.starts_with("[[[7,287454020,5],") && text.ends_with("]]"), "{text}");
            }
        }
    }
}
