//! Runs a test many times and counts its outcomes.
//!
//! A round is many instances of the test, each with locations of its own. All vCPUs set a part of them up, meet, run their thread for every
//! instance in turn, meet, and look at a part of the outcomes. Which vCPU runs which thread changes from round to round. Within a round, threads meet
//! before each instance ([`Meeting::Each`]), which makes them run at the same time, or not at all ([`Meeting::Round`]), which needs less communication
//! and is what vCPUs that outnumber processors can do; [`Meeting::Mixed`] does both in turn. With [`Meeting::Clock`] each instance has a time at which
//! its threads begin, so that they run at the same time without a word, also on several nodes; who is late goes on without waiting.
//!
//! Outcomes are counted apart by whether every thread was on a node of its own.
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

/// One thread of one instance: addresses of the locations, and where the registers go.
pub type Code = unsafe extern "sysv64" fn(*const [u64; MOST_LOCATIONS], *mut [u64; MOST_OBSERVED]);

/// Values of an outcome: registers of all threads, then locations.
pub const VALUES: usize = MOST_THREADS * MOST_OBSERVED + MOST_LOCATIONS;

/// When threads meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// Before each instance.
    Each,
    /// Before and after each round.
    Round,
    /// Before each instance in every 32nd round, otherwise as in [`Meeting::Round`].
    Mixed,
    /// Never, but each instance begins at a time of its own, so many nanoseconds after the one before.
    Clock(u64),
}

impl Meeting {
    /// Whether threads meet before each instance of a round.
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
    /// What the table says.
    pub record: &'a Record,
    /// Code of each thread.
    pub code: [Option<Code>; MOST_THREADS],
}

/// From the meeting before a round to its first instance, nanoseconds: others have to hear that all have come.
const LEAD: u64 = 300_000;
/// The same where they are on other nodes.
const FAR_LEAD: u64 = 2_000_000;

/// Different outcomes of one vCPU's part: `VALUES` words and a count each.
const ENTRY: usize = VALUES + 1;
/// Most different outcomes: 2-to-4-thread tests have far fewer.
const MOST_OUTCOMES: usize = 256;

/// Memory that runs of tests use one after another.
#[derive(Debug, Clone, Copy)]
pub struct Bench {
    instances: usize,
    /// Bytes from an instance to the next, where each has a line of its own or locations share none.
    step: usize,
    /// Bytes between the memory of two locations that don't share pages.
    array: usize,
    locations: Shared<AtomicU64>,
    registers: Shared<AtomicU64>,
    /// Each vCPU's, while it runs; nobody else uses them, so no node needs their pages but its own.
    own_registers: Shared<AtomicU64>,
    histograms: Shared<AtomicU64>,
    meeting: Shared<AtomicU64>,
    /// By how many nanoseconds this vCPU's clock is behind vCPU 0's.
    behind: i64,
}

/// Words of one vCPU's histogram: how many entries, how many didn't fit, entries; whole pages.
const HISTOGRAM: usize = (2 + MOST_OUTCOMES * ENTRY).next_multiple_of(PAGE / 8);
/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a location: the widest access.
const WIDEST: usize = 8;

impl Bench {
    /// For rounds of `instances` of tests whose locations lie across pages (`crossing`), which takes a page for each, or don't.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(heap: &mut Heap, team: &Team<'_>, instances: usize, crossing: bool) -> Result<Self, Refused> {
        // A page more, as the last location across pages ends there.
        let array = if crossing { (instances + 1) * PAGE } else { (instances * LINE).next_multiple_of(PAGE) };
        // Nodes pass on pages, whatever lines are in them: the more instances a page has, the fewer are passed on for each.
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

    /// Where location `location` of an instance lies.
    fn address(&self, record: &Record, instance: usize, location: usize) -> *mut u8 {
        let array = location * self.array;
        let offset = match record.placement {
            Placement::Line => instance * self.step.max(MOST_LOCATIONS * WIDEST) + location * WIDEST,
            Placement::Page => {
                // A page's quarters are the locations'.
                let (quarter, within) = (PAGE / MOST_LOCATIONS, instance * self.step);
                within / quarter * PAGE + location * quarter + within % quarter
            }
            Placement::Pages => array + instance * self.step,
            Placement::Cross => array + (instance + 1) * PAGE - record.width as usize / 2,
        };
        self.locations.address().cast::<u8>().wrapping_add(offset)
    }

    /// Where a vCPU's own registers of all instances begin.
    fn own_registers(&self, vcpu: usize) -> *mut u64 {
        self.own_registers.address().cast::<u64>().wrapping_add(vcpu * own_words(self.instances))
    }

    /// Hands the registers of a thread that a vCPU ran to who counts outcomes. (Locations aren't set up so: a page that is kept by updates would
    /// not be when threads run, and an order that fails there wouldn't be seen.)
    fn show(&self, vcpu: usize, record: &Record, thread: usize) {
        let to = self.registers(record, thread, 0).cast::<u8>();
        let bytes = self.instances * shown(record, thread) * 8;
        // SAFETY: both have room for this thread's registers of all instances; nobody else uses them until all have met.
        unsafe { copy(self.own_registers(vcpu).cast(), to, bytes) };
    }

    /// Where a thread's registers of an instance are counted. Only those that it shows have room.
    fn registers(&self, record: &Record, thread: usize, instance: usize) -> *mut [u64; MOST_OBSERVED] {
        let words = thread * self.instances * MOST_OBSERVED + instance * shown(record, thread);
        self.registers.address().cast::<u64>().wrapping_add(words).cast()
    }

    /// Runs at least `iterations` instances of a test. All vCPUs call it; there must be one for each thread. The outcomes are valid until the next run.
    ///
    /// # Safety
    /// The code is what [`Code`] says: it uses the locations, and writes the registers that its record says, nothing else.
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
            // Threads move on by one vCPU each round.
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
                        // Who came last is told nothing and is ahead; a little chance evens that out.
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
                    // SAFETY: promised by the caller; the addresses lie in the bench's memory.
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

    /// Waits until so many threads have come.
    fn meet(&self, all: u64) {
        let met = &self.meeting.atomics()[0];
        met.fetch_add(1, Ordering::AcqRel);
        while met.load(Ordering::Acquire) < all {
            spin_loop();
        }
    }

    /// Whether each thread of a round with this shift has a node of its own.
    fn apart(&self, team: &Team<'_>, threads: usize, shift: usize) -> bool {
        let node = |thread: usize| team.node_of((thread + team.count() - shift) % team.count());
        (0..threads).all(|thread| (0..thread).all(|other| node(thread) != node(other)))
    }

    /// Gives the locations of these instances their values.
    fn set_up(&self, record: &Record, part: Range<usize>) {
        for (location, value) in record.initial.iter().enumerate().take(record.locations as usize) {
            let mut first = part.start;
            while first < part.end {
                let count = self.evenly(record, first).min(part.end - first);
                let start = self.address(record, first, location);
                let step = self.address(record, first + 1, location).addr().wrapping_sub(start.addr());
                // SAFETY: inside the locations; nobody else uses these instances now.
                unsafe { store_each(start, step, count, *value) };
                first += count;
            }
        }
    }

    /// How many instances from this one on lie at the same distance from each other.
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

/// Whether a team is on several nodes.
fn several(team: &Team<'_>) -> bool {
    team.node_of(0) != team.node_of(team.count() - 1)
}

/// How many registers a thread shows.
fn shown(record: &Record, thread: usize) -> usize {
    record.thread.get(thread).map_or(0, |thread| thread.observed as usize)
}

/// Words of one vCPU's own registers, in whole pages.
const fn own_words(instances: usize) -> usize {
    (instances * MOST_OBSERVED).next_multiple_of(PAGE / 8)
}

/// Stores a value at so many places, each `step` bytes behind the one before.
///
/// In a loop that loads nothing: where nodes keep a page by updates, a monitor may carry out the next stores together with one that traps, each
/// as an update of its own, as long as it needs registers only. In a compiler's loop each would trap.
///
/// # Safety
/// Eight bytes at each place may be written, and nobody else uses them.
unsafe fn store_each(start: *mut u8, step: usize, count: usize, value: u64) {
    // SAFETY: promised by the caller.
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

/// Copies with a string instruction. Where nodes keep a page by updates, its monitor would have to carry out each plain store; this one it
/// doesn't, and has the page come.
///
/// # Safety
/// The bytes may be read and written, and don't overlap.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: promised by the caller; the direction flag is clear, as everywhere.
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
    // Only the vCPU whose histogram it is writes it.
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

/// What came out of a test, on all vCPUs.
#[derive(Debug)]
pub struct Outcomes<'a> {
    bench: Bench,
    team: Team<'a>,
    record: Record,
    iterations: u64,
    apart: u64,
}

impl Outcomes<'_> {
    /// How often the test ran.
    pub fn iterations(&self) -> u64 {
        self.iterations
    }

    /// How often of these every thread was on a node of its own.
    pub fn apart(&self) -> u64 {
        self.apart
    }

    fn histograms(&self) -> impl Iterator<Item = (bool, &[AtomicU64])> {
        let which = move |vcpu| [false, true].map(|apart| (apart, self.bench.histogram(vcpu, apart)));
        (0..self.team.count()).flat_map(which)
    }

    /// Outcomes that had no room; anything but 0 makes the counts worthless.
    pub fn lost(&self) -> u64 {
        self.histograms().map(|(_, histogram)| histogram[1].load(Ordering::Acquire)).sum()
    }

    /// Calls `each` with the values and count of every outcome of every vCPU, and whether every thread was on a node of its own; the same may
    /// come several times.
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

/// As JSON: `[[[values…],count,apart],…]`.
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

    /// x = 0x11223344; shows x before.
    unsafe extern "sysv64" fn writes(at: *const [u64; MOST_LOCATIONS], out: *mut [u64; MOST_OBSERVED]) {
        // SAFETY: as the runner promises.
        unsafe {
            let x = std::ptr::with_exposed_provenance_mut::<u32>((*at)[0] as usize);
            (*out)[0] = x.read_unaligned().into();
            x.write_unaligned(0x1122_3344);
        }
    }

    /// y = 5, by both threads.
    unsafe extern "sysv64" fn other(at: *const [u64; MOST_LOCATIONS], _: *mut [u64; MOST_OBSERVED]) {
        // SAFETY: as the runner promises.
        unsafe { std::ptr::with_exposed_provenance_mut::<u32>((*at)[1] as usize).write_unaligned(5) };
    }

    /// Outcomes with their counts and whether threads were apart, iterations, those apart, JSON.
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
        // Three vCPUs for two threads, on two nodes: each is idle in every third round, and in another one, both are on the same node.
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
                    // SAFETY: the code above does what it should.
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

    /// Every instance is set up, run by both threads and counted once, wherever its locations lie; they don't overlap.
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
