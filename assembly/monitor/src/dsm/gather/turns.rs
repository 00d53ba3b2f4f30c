//! Who runs when more vCPUs have come together than there are processors.
//!
//! Programs for several processors spin when they wait: left to the host, a vCPU that spins keeps the one that it waits for from the processor for whole time
//! slices. So as many run as there are processors, the rest waits outside the guest. Who runs is looked at now and then; who spins, or has had its turn,
//! goes behind the others. Looks come often after one that found a vCPU spinning, and seldom after turns that were used. Who says by itself that it waits
//! has longer turns, as it gives them away when it has nothing to do: as long as it isn't found spinning twice in a row. It is looked at the later in its turns the more often it has said so, and soon again
//! after it was found spinning, as a program may wait in two ways. So does who has not waited yet while all others say so. Who works while all that wait for a turn only waited in their last ones has longer turns as
//! well. Each turn costs some 0.2 ms, half of it for caches that have gone cold, and each look half of that.

use std::collections::VecDeque;

/// Time to the first look of a turn, nanoseconds: at least, and at most. It costs the vCPU an exit.
const SOONEST: u64 = 100_000;
const LATEST: u64 = 1_600_000;
/// Longest turn while others wait, nanoseconds.
const TURN: u64 = 6_000_000;
/// A turn in which a vCPU has only waited is no longer than this, nanoseconds.
const IDLE: u64 = 1_000_000;
/// How often turns are doubled at the most while the others only wait.
const DOUBLINGS: u32 = 2;
/// Turn of who says when it waits, nanoseconds.
const LONG: u64 = 8 * TURN;
/// Time to the first look at who says when it waits, nanoseconds, in its first turn.
const POLITE: u64 = 2 * TURN;
/// Who was found spinning so often since it last said that it waits is taken for one that doesn't say so.
const SILENT: u32 = 2;

/// A vCPU that runs.
#[derive(Debug, Clone, Copy)]
struct Running {
    vcpu: usize,
    since: u64,
    /// When to look, and after how long it was.
    look: (u64, u64),
    /// It has been called out.
    called: bool,
}

/// All vCPUs of this host.
#[derive(Debug)]
pub(in crate::dsm) struct Turns {
    processors: usize,
    running: Vec<Running>,
    waiting: VecDeque<usize>,
    /// Time to the first look of the next turn, by vCPU.
    first: Vec<u64>,
    /// Whether a vCPU has ever said that it waits.
    said: Vec<bool>,
    /// How often it was found spinning since it last did.
    silent: Vec<u32>,
    /// Time to the first look of its next turn if it says when it waits.
    polite: Vec<u64>,
    /// How many turns in a row a vCPU has only waited.
    idle: Vec<u32>,
}

impl Turns {
    /// `None` where every vCPU can have a processor.
    pub(in crate::dsm) fn new(processors: usize, vcpus: usize) -> Option<Self> {
        let processors = processors.max(1);
        (vcpus > processors).then(|| Self {
            processors,
            running: Vec::new(),
            waiting: VecDeque::new(),
            first: vec![SOONEST; vcpus],
            said: vec![false; vcpus],
            silent: vec![0; vcpus],
            polite: vec![POLITE; vcpus],
            idle: vec![0; vcpus],
        })
    }

    /// A vCPU is about to run. False: it has to wait, and ask again when [`Turns::looked`] or [`Turns::left`] names it.
    pub(in crate::dsm) fn may_run(&mut self, vcpu: usize, now: u64) -> bool {
        if self.running.iter().any(|running| running.vcpu == vcpu) {
            return true;
        }
        if self.running.len() < self.processors {
            self.waiting.retain(|waiting| *waiting != vcpu);
            self.begin(vcpu, now);
            return true;
        }
        if !self.waiting.contains(&vcpu) {
            self.waiting.push_back(vcpu);
        }
        false
    }

    /// How long a turn of this vCPU is now.
    fn turn(&self, vcpu: usize) -> u64 {
        if self.tells(vcpu) {
            return LONG;
        }
        let idle = self.waiting.iter().map(|vcpu| self.idle.get(*vcpu).copied().unwrap_or(0));
        TURN << idle.min().unwrap_or(0).min(DOUBLINGS)
    }

    /// Whether a vCPU says when it waits, as far as is known; of who hasn't waited yet the others show it, which run the same program.
    fn tells(&self, vcpu: usize) -> bool {
        let said = |vcpu: usize| self.said.get(vcpu) == Some(&true);
        let loud = |vcpu: usize| self.silent.get(vcpu).is_some_and(|times| *times < SILENT);
        let others =
            || !self.waiting.is_empty() && self.waiting.iter().all(|other| said(*other) && loud(*other));
        loud(vcpu) && (said(vcpu) || others())
    }

    fn begin(&mut self, vcpu: usize, now: u64) {
        let first = if self.tells(vcpu) { &self.polite } else { &self.first };
        let first = first.get(vcpu).copied().unwrap_or(SOONEST);
        self.running.push(Running {
            vcpu,
            since: now,
            look: (now.saturating_add(first), first),
            called: false,
        });
    }

    /// vCPUs to be called out of the guest, to be looked at.
    pub(in crate::dsm) fn due(&mut self, now: u64) -> Vec<usize> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let due = self.running.iter_mut().filter(|running| running.look.0 <= now && !running.called);
        due.map(|running| {
            running.called = true;
            running.vcpu
        })
        .collect()
    }

    /// When [`Turns::due`] is worth asking.
    pub(in crate::dsm) fn next_look(&self) -> u64 {
        let looks = self.running.iter().filter(|running| !running.called).map(|running| running.look.0);
        looks.min().filter(|_| !self.waiting.is_empty()).unwrap_or(u64::MAX)
    }

    /// Whether a vCPU was called out to be looked at.
    pub(in crate::dsm) fn is_called(&self, vcpu: usize) -> bool {
        self.running.iter().any(|running| running.vcpu == vcpu && running.called)
    }

    /// A vCPU has been looked at. If its turn is over: who runs in its place.
    pub(in crate::dsm) fn looked(&mut self, vcpu: usize, spins: bool, now: u64) -> Option<usize> {
        let place = self.running.iter().position(|running| running.vcpu == vcpu)?;
        let (turn, tells) = (self.turn(vcpu), self.tells(vcpu));
        let running = self.running.get_mut(place)?;
        running.called = false;
        let ran = now.saturating_sub(running.since);
        let over = ran >= turn;
        if self.waiting.is_empty() || !(spins || over) {
            let latest = if tells { turn.saturating_sub(ran).max(LATEST) } else { LATEST };
            let after = running.look.1.saturating_mul(2).min(latest);
            running.look = (now.saturating_add(after), after);
            return None;
        }
        let after = running.look.1.min(LATEST);
        if let Some(first) = self.first.get_mut(vcpu) {
            *first = if spins { (after / 2).max(SOONEST) } else { LATEST };
        }
        if let (Some(silent), Some(polite)) = (self.silent.get_mut(vcpu), self.polite.get_mut(vcpu))
            && spins
        {
            (*silent, *polite) = (silent.saturating_add(1), LATEST);
        }
        self.goes_behind(place, vcpu, spins, now)
    }

    /// A vCPU says that it waits. Who runs in its place, if anybody waits for a turn.
    pub(in crate::dsm) fn gave_way(&mut self, vcpu: usize, now: u64) -> Option<usize> {
        if let (Some(said), Some(silent)) = (self.said.get_mut(vcpu), self.silent.get_mut(vcpu)) {
            (*said, *silent) = (true, 0);
        }
        let place = self.running.iter().position(|running| running.vcpu == vcpu)?;
        if self.waiting.is_empty() {
            return None;
        }
        if let Some(polite) = self.polite.get_mut(vcpu) {
            *polite = polite.saturating_mul(2).min(LONG);
        }
        self.goes_behind(place, vcpu, true, now)
    }

    fn goes_behind(&mut self, place: usize, vcpu: usize, waits: bool, now: u64) -> Option<usize> {
        let ran = now.saturating_sub(self.running.swap_remove(place).since);
        if let Some(idle) = self.idle.get_mut(vcpu) {
            *idle = if waits && ran <= IDLE { idle.saturating_add(1) } else { 0 };
        }
        self.waiting.push_back(vcpu);
        self.next(now)
    }

    /// A vCPU has ended. Who runs in its place.
    pub(in crate::dsm) fn left(&mut self, vcpu: usize, now: u64) -> Option<usize> {
        self.waiting.retain(|waiting| *waiting != vcpu);
        let place = self.running.iter().position(|running| running.vcpu == vcpu)?;
        self.running.swap_remove(place);
        self.next(now)
    }

    fn next(&mut self, now: u64) -> Option<usize> {
        let next = self.waiting.pop_front()?;
        self.begin(next, now);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who spins goes behind the others at the first look; who works has its turn, and then waits for all others.
    #[test]
    fn spinners_yield_and_workers_have_their_turn() {
        assert!(Turns::new(2, 2).is_none());
        let mut turns = Turns::new(1, 3).unwrap();
        assert!(turns.may_run(0, 0));
        assert_eq!((turns.next_look(), turns.due(u64::MAX)), (u64::MAX, vec![]), "nobody waits");
        assert!(!turns.may_run(1, 0) && !turns.may_run(2, 0) && !turns.may_run(1, 0) && turns.may_run(0, 0));
        assert_eq!(turns.next_look(), SOONEST);
        assert_eq!(turns.due(SOONEST), [0]);
        assert!(turns.is_called(0) && turns.due(SOONEST).is_empty());
        assert_eq!(turns.looked(0, true, SOONEST), Some(1));
        let mut looks = 0;
        let (next, now) = loop {
            let now = turns.next_look();
            assert_eq!(turns.due(now), [1]);
            looks += 1;
            if let Some(next) = turns.looked(1, false, now) {
                break (next, now);
            }
        };
        assert_eq!(next, 2);
        assert!((SOONEST + TURN..SOONEST + TURN + LATEST).contains(&now) && looks < 9, "{now}, {looks}");
        // The next ones, in order; who has worked is looked at later.
        let began = now;
        assert_eq!(turns.looked(2, true, now), Some(0));
        assert_eq!(turns.looked(0, true, now), Some(1));
        assert_eq!(turns.next_look(), began + LATEST);
    }

    /// Who says that it waits goes behind the others at once, and is seldom looked at in its next turns; until it is seen twice to wait without saying so.
    #[test]
    fn who_says_that_it_waits_is_seldom_looked_at() {
        let (mut turns, work) = (Turns::new(1, 2).unwrap(), 2 * IDLE);
        assert!(turns.may_run(0, 0));
        assert_eq!(turns.gave_way(0, work), None, "nobody waits");
        assert!(turns.may_run(0, work) && !turns.may_run(1, work));
        assert_eq!(turns.gave_way(1, work), None, "it doesn't run");
        let mut now = 2 * work;
        assert_eq!(turns.gave_way(0, now), Some(1));
        assert!(!turns.may_run(0, now) && turns.may_run(1, now));
        // The others show what it will do.
        assert_eq!(turns.next_look(), now + POLITE);
        now += work;
        assert_eq!(turns.gave_way(1, now), Some(0));
        // Few looks in a turn, the last of them at its end; the later the more often it has said so.
        for expected in [vec![2 * POLITE, LONG], vec![LONG]] {
            let began = now;
            let mut looks = Vec::new();
            loop {
                now = turns.next_look();
                looks.push(now - began);
                assert_eq!(turns.due(now), [0]);
                if turns.looked(0, false, now) == Some(1) {
                    break;
                }
            }
            assert_eq!(looks, expected);
            for (who, next) in [(1, 0), (0, 1), (1, 0)] {
                now += work;
                assert_eq!(turns.gave_way(who, now), Some(next));
            }
        }
        // A called one that gives way isn't called any more.
        now += LONG;
        assert_eq!(turns.due(now), [0]);
        assert_eq!(turns.gave_way(0, now), Some(1));
        assert!(!turns.is_called(0));
        assert_eq!(turns.gave_way(1, now), Some(0));
        // Found spinning once, it may say so the next time, and is looked at soon; twice, it doesn't.
        for (look, turn) in [(LONG, LONG), (LATEST, TURN), (SOONEST, TURN)] {
            assert!(turns.next_look() >= now + look);
            now += look;
            assert_eq!(turns.looked(0, true, now), Some(1));
            now += LONG - 1;
            assert_eq!(turns.looked(1, false, now), None, "its turn isn't over");
            now += 1;
            assert_eq!(turns.looked(1, false, now), Some(0), "its turn is over");
            assert_eq!(turns.turn(0), turn, "after {look}");
        }
        assert_eq!(turns.gave_way(0, now), Some(1));
        assert_eq!(turns.turn(0), LONG, "it has told last");
    }

    /// A program that waits in two ways is looked at nearly as soon as one that works and doesn't say when it waits: after twice that time at the most.
    #[test]
    fn who_says_so_only_at_times_is_looked_at_soon() {
        let mut turns = Turns::new(1, 2).unwrap();
        assert!(turns.may_run(0, 0) && !turns.may_run(1, 0));
        let mut now = 0;
        for round in 0..10 {
            now += SOONEST;
            assert_eq!(turns.gave_way(0, now), Some(1));
            assert_eq!(turns.gave_way(1, now), Some(0));
            let look = turns.next_look() - now;
            assert!(look <= if round == 0 { 2 * POLITE } else { 2 * LATEST }, "{look} in round {round}");
            now += look;
            assert_eq!(turns.looked(0, true, now), Some(1));
            assert_eq!(turns.gave_way(1, now), Some(0));
        }
    }

    /// Who hasn't waited yet is taken for one that says when it does, if all others do, until it is found not to.
    #[test]
    fn others_show_what_who_has_not_waited_will_do() {
        let mut turns = Turns::new(1, 3).unwrap();
        assert!(turns.may_run(0, 0) && !turns.may_run(1, 0) && !turns.may_run(2, 0));
        let mut now = 2 * TURN;
        assert_eq!(turns.looked(0, false, now), Some(1));
        assert_eq!(turns.gave_way(1, now), Some(2));
        assert!(!turns.tells(0) && !turns.tells(2), "not all of the others");
        assert_eq!(turns.gave_way(2, now), Some(0));
        assert_eq!(turns.next_look(), now + POLITE);
        for tells in [true, false] {
            now = turns.next_look();
            assert_eq!(turns.looked(0, true, now), Some(1));
            assert_eq!(turns.gave_way(1, now), Some(2));
            assert_eq!(turns.gave_way(2, now), Some(0));
            assert_eq!(turns.tells(0), tells);
        }
    }

    /// Turns grow up to four times their length while the others only wait, and are short again as soon as one of these has had something to do.
    #[test]
    fn who_works_has_longer_turns_while_others_only_wait() {
        let mut turns = Turns::new(1, 3).unwrap();
        assert!(turns.may_run(0, 0) && !turns.may_run(1, 0) && !turns.may_run(2, 0));
        let mut now = 10 * TURN;
        assert_eq!(turns.looked(0, false, now), Some(1));
        for long in [2, 4, 4] {
            for (vcpu, next) in [(1, 2), (2, 0)] {
                now += IDLE / 2;
                assert_eq!(turns.looked(vcpu, true, now), Some(next));
            }
            now += long * TURN - 1;
            assert_eq!(turns.looked(0, false, now), None, "{long} turns aren't over");
            now += 1;
            assert_eq!(turns.looked(0, false, now), Some(1));
        }
        now += IDLE + 1;
        assert_eq!(turns.looked(1, true, now), Some(2));
        assert_eq!(turns.looked(2, true, now), Some(0));
        now += TURN;
        assert_eq!(turns.looked(0, false, now), Some(1), "one of the two has worked");
    }

    /// Those that end leave their processor to who waits, and aren't waited for.
    #[test]
    fn who_ends_leaves_its_place() {
        let mut turns = Turns::new(2, 4).unwrap();
        let may: Vec<bool> = (0..4).map(|vcpu| turns.may_run(vcpu, 0)).collect();
        assert_eq!(may, [true, true, false, false]);
        assert_eq!(turns.left(2, 1), None);
        assert_eq!(turns.left(0, 1), Some(3));
        assert!(turns.may_run(3, 1) && turns.may_run(1, 1));
        assert_eq!(turns.next_look(), u64::MAX);
        assert_eq!(turns.left(1, 2), None);
        assert_eq!(turns.looked(1, true, 2), None);
    }
}
