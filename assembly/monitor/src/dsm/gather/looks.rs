//! What vCPUs spend their time with, for [`super::policy`]: the time that they run is asked of the host, and whether they spin is looked at now and then.
//!
//! Who waits for a page is known to the protocol. Who runs is brought out of the guest for a moment; where it is then says what it has done since the look before:
//! it has worked, or spun ([`super::spinning`]). Looks are rare while a node's vCPUs only work, as each costs an exit, and come more often as soon as there is something to see.
//! Who says that it waits for others, which it does again and again until they have come, spins for as long as it gives its processor away, and works when it goes on.

use machine::scheduling::thread_time;
use machine::vcpu::GuestRegisters;

use super::policy::Told;
use super::spinning::{LONGEST, spins};
use crate::dsm::engine::{Core, Engine, now, this_thread};

/// Pause between two looks at a vCPU, nanoseconds. Those of a node whose vCPUs little but work are looked at with its tellings, which are rare then.
const OFTEN: u64 = 8_000_000;
/// Longest time that crossing into the guest and out of it is taken to need, nanoseconds.
const MOST: u64 = 60_000;
/// Longest time that giving the processor away once is taken to last, nanoseconds: what is more, the host had it do nothing.
const AWAY: u64 = 1_000_000;
/// Looks, and tellings, are rare where less than one part in so many of the time is spun or waited: far from what would have a program brought together. A look costs two wakes and an exit.
const LITTLE: u64 = 4;

/// Looks at one vCPU.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::dsm) struct Look {
    /// When the next one is due, nanoseconds; 0 before the first.
    due: u64,
    /// It has been called out for one.
    called: bool,
    /// Its thread, by the number that gettid gives; `None` before the first.
    thread: Option<u32>,
    /// How long that had run when it was last asked, nanoseconds.
    ran: u64,
    /// It span at the last look, and hasn't said since that it waits.
    spun: bool,
    /// Since when it gives its processor away, as it has said that it waits for others, nanoseconds.
    gives_way_since: Option<u64>,
    /// What its thread runs now is none of the program's.
    held: Held,
    /// What its thread has run since that was so, nanoseconds.
    free: u64,
}

/// Why a vCPU isn't in the guest, as far as it matters to whom its thread's time is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Held {
    /// It is in the guest, or could be.
    #[default]
    No,
    /// It waits for a page, which is counted by the clock: what its thread runs meanwhile, to have its registers read, is part of it.
    Page,
    /// One of its instructions is carried out for it: its thread runs, and the program gets nothing of that.
    Trap,
}

impl Look {
    /// It has come to wait for a page, which says what it does.
    pub(in crate::dsm) fn give_up(&mut self) {
        self.called = false;
    }

    /// Whether it is to be looked at before it runs on.
    pub(in crate::dsm) fn is_called(&self) -> bool {
        self.called
    }

    /// How long its thread has run since it was last asked, when it has run so long in all.
    fn since(&mut self, thread: u32, ran: u64) -> u64 {
        let known = self.thread.replace(thread) == Some(thread);
        let before = std::mem::replace(&mut self.ran, ran);
        if known { ran.saturating_sub(before) } else { 0 }
    }

    /// It gives its processor away at a moment, and so much that it has run before has just been counted. How much of that was counted as work and was part of waiting, nanoseconds.
    fn gives_way(&mut self, at: u64, counted: u64) -> u64 {
        self.gives_way_since = Some(at);
        if self.spun { 0 } else { counted.min(MOST) }
    }

    /// It goes on at a moment, if it has given its processor away; its thread has run so long by then. How long it has waited for others, nanoseconds.
    fn goes_on(&mut self, at: u64, thread: u32, ran: u64) -> u64 {
        let Some(since) = self.gives_way_since.take() else { return 0 };
        // What it took to give the processor away is part of it.
        self.since(thread, ran);
        self.spun = false;
        at.saturating_sub(since).min(AWAY)
    }
}

/// What threads that serve memory take from vCPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::dsm) struct Taken {
    /// What vCPUs had spent their time with when that was last asked.
    told: Told,
    /// How long the threads had run then, nanoseconds.
    ran: u64,
    /// Faults by then: on pages that were here before, and on others.
    faults: (u64, u64),
    /// What they had taken by then.
    taken: u64,
}

impl Taken {
    /// Whether much of so many nanoseconds was waited since that was last asked, when so much has been in all.
    fn is_much(&self, waited: u64, of: u64) -> bool {
        waited.saturating_sub(self.told.waited).saturating_mul(LITTLE) >= of
    }

    /// What they have taken from vCPUs by now, nanoseconds: as long as they have run, where vCPUs did nothing that is known of for as long. A program that isn't spread has no such threads: so
    /// it is waited for pages, too. With processors to spare vCPUs run, or wait, all the time, and nothing is taken. As for waits, first pages don't count: the part of the faults that they are is
    /// taken off.
    fn taken(&mut self, told: &Told, ran: u64, faults: (u64, u64)) -> u64 {
        let before = std::mem::replace(&mut self.told, *told);
        let ran_before = std::mem::replace(&mut self.ran, ran);
        let faults_before = std::mem::replace(&mut self.faults, faults);
        let again = u128::from(faults.0.saturating_sub(faults_before.0));
        let all = again + u128::from(faults.1.saturating_sub(faults_before.1));
        if before.vcpus == told.vcpus {
            let whole = told.at.saturating_sub(before.at).saturating_mul(told.vcpus.into());
            let unknown = whole.saturating_sub(told.known().saturating_sub(before.known()));
            let taken = u128::from(unknown.min(ran.saturating_sub(ran_before)));
            let counted = (taken * again).checked_div(all).unwrap_or(0);
            self.taken = self.taken.saturating_add(u64::try_from(counted).unwrap_or(0));
        }
        self.taken
    }
}

impl Core {
    /// Counts what a vCPU's thread has run since it was last asked: for what it did at the last look. How much of it was run in the guest, or on the way.
    fn count_run(&mut self, index: usize, thread: u32) -> u64 {
        let Some(slot) = self.vcpus.get_mut(index) else { return 0 };
        // One that has just ended has run nothing more.
        let Ok(ran) = thread_time(thread) else { return 0 };
        let since = slot.look.since(thread, ran);
        let counted = match slot.look.held {
            Held::Page => return 0,
            Held::Trap => {
                self.counts.waited = self.counts.waited.saturating_add(since);
                return 0;
            }
            Held::No if slot.look.spun => &mut self.counts.spun,
            Held::No => &mut self.counts.ran,
        };
        *counted = counted.saturating_add(since);
        slot.look.free = slot.look.free.saturating_add(since);
        since
    }

    /// A vCPU's thread does something else from here on.
    fn turn(&mut self, index: usize, held: Held) {
        let Some(slot) = self.vcpus.get(index) else { return };
        // Unknown where nobody looks.
        let Some(thread) = slot.look.thread else { return };
        self.count_run(index, thread);
        if let Some(slot) = self.vcpus.get_mut(index) {
            slot.look.held = held;
            slot.look.free = 0;
        }
    }

    /// The vCPU of this thread has come to wait for a page, which was here before (`again`), or never was. What it took to leave the guest, and to enter it before that, is part of the wait.
    pub(in crate::dsm) fn page_is_missed(&mut self, index: usize, thread: u32, again: bool) {
        let since = self.count_run(index, thread);
        let Some(look) = self.vcpus.get(index).map(|slot| slot.look) else { return };
        let counts = &mut self.counts;
        if look.free > 0 {
            let least = counts.crossing.map_or(look.free, |known| known.min(look.free));
            counts.crossing = Some(least);
            // Not more than is new: the rest has been told already.
            let crossing = least.min(MOST).min(since);
            let counted = if look.spun { &mut counts.spun } else { &mut counts.ran };
            *counted = counted.saturating_sub(crossing);
            let waited = if again { &mut counts.waited } else { &mut counts.waited_first };
            *waited = waited.saturating_add(crossing);
        }
        self.turn(index, Held::Page);
    }

    /// The page is here.
    pub(in crate::dsm) fn page_is_here(&mut self, index: usize) {
        self.turn(index, Held::No);
    }

    /// The page is here, but the instruction has to be carried out for the vCPU.
    pub(in crate::dsm) fn trap_begins(&mut self, index: usize) {
        self.turn(index, Held::Trap);
    }

    /// It has been, or can't be.
    pub(in crate::dsm) fn trap_ends(&mut self, index: usize) {
        self.turn(index, Held::No);
    }

    /// A vCPU says that it waits for others, and gives its processor away until [`Core::goes_on`]. On its own thread. What it took to leave the guest, and to enter it before that, is part of the wait.
    pub(super) fn says_that_it_waits(&mut self, index: usize) {
        let since = self.count_run(index, this_thread());
        let Some(slot) = self.vcpus.get_mut(index) else { return };
        let crossing = slot.look.gives_way(now(), since);
        self.counts.ran = self.counts.ran.saturating_sub(crossing);
        self.counts.spun = self.counts.spun.saturating_add(crossing);
    }

    /// A vCPU is about to go on, which has given its processor away, or hasn't. On its own thread.
    pub(in crate::dsm) fn goes_on(&mut self, index: usize) {
        let Some(slot) = self.vcpus.get_mut(index) else { return };
        if slot.look.gives_way_since.is_none() {
            return;
        }
        let thread = this_thread();
        let ran = thread_time(thread).unwrap_or(slot.look.ran);
        self.counts.spun = self.counts.spun.saturating_add(slot.look.goes_on(now(), thread, ran));
    }

    /// Whether there is more to tell than work: much was waited or spun before the last telling, or has been waited since then, of a telling's pause of so many nanoseconds.
    pub(in crate::dsm) fn has_much_to_tell(&self, pause: u64) -> bool {
        self.look_often || self.served.is_much(self.counts.waited, pause)
    }

    /// What this node's vCPUs have spent their time with by now. `servants`: threads that serve memory.
    pub(super) fn spent(&mut self, servants: &[u32]) -> Told {
        let at = now();
        let threads: Vec<_> = self.threads.iter().map(|(thread, index)| (*thread, *index)).collect();
        for (thread, index) in threads {
            if self.vcpus.get(index).is_some_and(|slot| !slot.ended) {
                self.count_run(index, thread);
            }
        }
        let (mut waited, mut first) = (self.counts.waited, self.counts.waited_first);
        for slot in self.vcpus.iter().filter(|slot| !slot.ended) {
            match slot.fault {
                Some(fault) if fault.again => waited += at.saturating_sub(fault.at),
                Some(fault) => first += at.saturating_sub(fault.at),
                None => waited += slot.operating_since.map_or(0, |since| at.saturating_sub(since)),
            }
        }
        let vcpus = self.vcpus.iter().filter(|slot| !slot.ended).count();
        let before = self.served.told;
        let told = Told {
            at,
            ran: self.counts.ran,
            spun: self.counts.spun,
            // Waits that came to nothing (the page was taken again before the vCPU ran) are counted while they last only.
            waited: before.waited.max(waited),
            first: before.first.max(first),
            vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX),
        };
        // Those that have just ended have taken nothing more.
        let served = servants.iter().filter_map(|thread| thread_time(*thread).ok()).sum();
        let again = self.counts.missed_again.saturating_add(self.counts.emulated);
        self.counts.taken = self.served.taken(&told, served, (again, self.counts.missed_first));
        let idle = (told.spun - before.spun).saturating_add(told.waited - before.waited);
        self.look_often = idle.saturating_mul(LITTLE) >= told.ran - before.ran;
        Told { waited: told.waited.saturating_add(self.counts.taken), ..told }
    }
}

impl Engine {
    /// Calls those vCPUs out that are to be looked at. `told`: what they spend their time with has just been told. Returns when to come again, nanoseconds.
    pub(in crate::dsm) fn look_at_vcpus(&self, core: &mut Core, told: bool) -> u64 {
        if !self.gathers || core.standing || core.stopping {
            return u64::MAX;
        }
        let time = now();
        let mut next = u64::MAX;
        for index in 0..core.vcpus.len() {
            let often = core.look_often;
            let Some(slot) = core.vcpus.get_mut(index) else { continue };
            if slot.ended {
                continue;
            }
            // The same whatever it was found to do: what is found stands for the time until the next look.
            if often && slot.look.due > time {
                next = next.min(slot.look.due);
                continue;
            }
            if !often && !told && slot.look.due > 0 {
                continue;
            }
            // Not in step with what the program does: three to five quarters of a pause. (Nor are tellings.)
            slot.look.due = time.saturating_add(OFTEN / 4 * 3).saturating_add(time % (OFTEN / 2));
            if often {
                next = next.min(slot.look.due);
            }
            // What it does is known without a look. One that was called and hasn't come has no processor: what it has run meanwhile is little.
            let waits = slot.fault.is_some() || slot.trap.is_some() || slot.operating;
            if !waits && !slot.outside && !slot.look.called {
                slot.look.called = true;
                self.summon(core, index);
            }
        }
        next
    }

    /// A vCPU was called out to be looked at, and is outside. On its own thread.
    pub(in crate::dsm) fn looked_at(&self, core: &mut Core, index: usize, registers: &dyn GuestRegisters) {
        if let Some(slot) = core.vcpus.get_mut(index) {
            slot.look.called = false;
        }
        let thread = this_thread();
        let Some(found) = self.registers(registers) else { return };
        let spins = is_spinning(core, found.rip);
        if let Some(slot) = core.vcpus.get_mut(index) {
            slot.look.spun = spins;
        }
        core.count_run(index, thread);
    }
}

/// Whether the code at an address only waits, as far as can be seen. Who is wrongly taken for it after all has come together loses a turn.
pub(super) fn is_spinning(core: &Core, rip: u64) -> bool {
    let size = dsm::wire::PAGE_SIZE as u64;
    let mut bytes = [0; 2 * LONGEST];
    let start = rip.saturating_sub(LONGEST as u64);
    let offset = usize::try_from(start % size).unwrap_or(0);
    let Some(len) = core.pages.code(start / size, offset, &mut bytes) else { return false };
    let more = match bytes.get_mut(len..) {
        Some(rest) if !rest.is_empty() => core.pages.code(start / size + 1, 0, rest).unwrap_or(0),
        _ => 0,
    };
    spins(bytes.get(..len + more).unwrap_or_default(), start, rip)
}

#[cfg(test)]
mod tests {
    use super::{AWAY, Look, MOST, Taken};
    use crate::dsm::gather::policy::Told;

    /// What a thread had run before it was first looked at is nobody's, and what it runs between two looks counts once.
    #[test]
    fn time_between_looks_counts_once() {
        let mut look = Look::default();
        let counted = [(7, 1_000), (7, 1_700), (7, 1_700), (8, 90_000), (8, 90_050)];
        let counted = counted.map(|(thread, ran)| look.since(thread, ran));
        assert_eq!(counted, [0, 700, 0, 0, 50]);
    }

    /// Who gives its processor away waits for as long as that lasts, whatever its thread does meanwhile, and not for what it runs after it.
    #[test]
    fn who_goes_on_works() {
        let mut look = Look::default();
        look.since(7, 1_000);
        assert_eq!(look.goes_on(90_000, 7, 1_500), 0, "it hasn't given anything away");
        look.since(7, 2_000);
        look.spun = true;
        assert_eq!(look.gives_way(10_000, 500), 0, "that was counted as spinning");
        assert_eq!(look.goes_on(90_000, 7, 2_300), 80_000);
        assert!(!look.spun);
        assert_eq!(look.since(7, 2_900), 600);
        assert_eq!(look.goes_on(99_000, 7, 3_000), 0, "once");
        assert_eq!(look.since(7, 3_100), 200);
        assert_eq!(look.gives_way(10_000, 100), 100, "it said so again at once");
        assert_eq!(look.gives_way(10_000, 80_000_000), MOST, "it had worked before");
        assert_eq!(look.goes_on(3_000_000_000, 7, 3_200), AWAY, "it stood still for a checkpoint");
    }

    /// A quarter of the time between two tellings has to be waited since the last one for the next to come early; what was told before doesn't count.
    #[test]
    fn little_waiting_is_told_later() {
        let mut served = Taken::default();
        assert!(!served.is_much(24, 100) && served.is_much(25, 100) && served.is_much(u64::MAX, 100));
        served.taken(&Told { at: 1_000, waited: 500, vcpus: 1, ..Told::default() }, 0, (0, 0));
        let much = [0, 500, 524, 525].map(|waited| served.is_much(waited, 100));
        assert_eq!(much, [false, false, false, true]);
    }

    /// Threads that serve memory take what they run while vCPUs do nothing, and no more than that.
    #[test]
    fn what_is_taken_is_what_nobody_else_has_had() {
        let mut served = Taken::default();
        let told = |at, ran, waited| Told { at, ran, waited, vcpus: 2, ..Told::default() };
        // The first says what was before.
        assert_eq!(served.taken(&told(1_000, 500, 0), 300, (0, 5)), 0);
        // Of 2,000 nanoseconds of two vCPUs 1,500 are known.
        assert_eq!(served.taken(&told(2_000, 1_500, 500), 700, (1, 5)), 400);
        assert_eq!(served.taken(&told(3_000, 3_000, 500), 2_000, (2, 5)), 900);
        // All is known: on processors of their own.
        assert_eq!(served.taken(&told(4_000, 4_900, 600), 9_000, (3, 5)), 900);
        // One fault of four was on a page that had been here; none at all.
        assert_eq!(served.taken(&told(5_000, 4_900, 600), 9_800, (4, 8)), 1_100);
        assert_eq!(served.taken(&told(6_000, 4_900, 600), 10_800, (4, 8)), 1_100);
    }
}
