//! Load of one device, and the doorbell mode that suits it.

/// Trapped doorbells within a window ([`super::EngineSetup::busy_window`]) from which on doorbells in memory are better.
const MANY: u32 = 32;
/// A program that armed a completion queue within this time is event-driven, and needs exact arms; nanoseconds.
const EVENT_DRIVEN: u64 = 500_000_000;
/// Limit of the idle time counted between two polls, nanoseconds. A longer gap means that the engine, or an emulated host, didn't run. The
/// guest may have been stopped as well; or, on a shared CPU, the guest ran instead.
const LONGEST_GAP: u64 = 100_000;
/// A device that is busy again within this time after it was found idle was found idle too early; nanoseconds.
const TOO_EARLY: u64 = 1_000_000_000;
/// Limit of doublings of the time without work after which a device is idle.
const DOUBLINGS: u32 = 4;
/// First interval of polling doorbells that are always memory, nanoseconds; it doubles.
const FIRST_NAP: u64 = 50_000;
/// Limit of that interval with contexts of user processes, which expect a quick response.
const LONGEST_NAP_USERS: u64 = 1_000_000;
/// Limit of that interval with the guest kernel's context alone.
const LONGEST_NAP: u64 = 10_000_000;

/// Load of a device. Times are nanoseconds of the engine's clock.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    window_start: u64,
    trapped: u32,
    looked_at: u64,
    /// Time without work, as far as polls have measured it.
    idle: u64,
    /// When the device was last found idle, and how often too early.
    left_at: Option<u64>,
    doublings: u32,
    /// When a user process last armed a completion queue.
    armed_at: Option<u64>,
    nap: u64,
    next_look: u64,
}

impl Load {
    pub fn new(now: u64) -> Self {
        Self { looked_at: now, ..Self::default() }
    }

    /// Counts a trapped doorbell, together with others within `window`. `true` when doorbells in memory would be better.
    #[must_use]
    pub fn trapped(&mut self, now: u64, window: u64) -> bool {
        if now.saturating_sub(self.window_start) > window {
            self.window_start = now;
            self.trapped = 0;
        }
        self.trapped = self.trapped.saturating_add(1);
        self.worked(now);
        self.trapped >= MANY && !self.event_driven(now)
    }

    /// Records that a user process has armed a completion queue.
    pub fn armed(&mut self, now: u64) {
        self.armed_at = Some(now);
    }

    /// Whether user processes are event-driven, so that doorbells should trap. In memory an arm may be overwritten before the engine reads
    /// it, so that events come late, or too often.
    pub fn event_driven(&self, now: u64) -> bool {
        self.armed_at.is_some_and(|at| now.saturating_sub(at) < EVENT_DRIVEN)
    }

    /// Records that doorbells were found, or work was done.
    pub fn worked(&mut self, now: u64) {
        self.looked_at = now;
        self.idle = 0;
        self.nap = 0;
        self.next_look = now;
    }

    /// Records a poll of the doorbells that found nothing.
    pub fn found_nothing(&mut self, now: u64) {
        self.idle = self.idle.saturating_add(now.saturating_sub(self.looked_at).min(LONGEST_GAP));
        self.looked_at = now;
    }

    /// Whether there was no work for `time`, or for a longer time if that was too short before.
    pub fn idle_for(&self, time: u64) -> bool {
        self.idle >= time.saturating_mul(1 << self.doublings)
    }

    /// Records that the device is idle, so its doorbells should trap.
    pub fn leaves_memory(&mut self, now: u64) {
        self.left_at = Some(now);
    }

    /// Records that the device is busy, so its doorbells should be memory.
    pub fn enters_memory(&mut self, now: u64) {
        let early = self.left_at.is_some_and(|at| now.saturating_sub(at) < TOO_EARLY);
        self.doublings =
            if early { (self.doublings + 1).min(DOUBLINGS) } else { self.doublings.saturating_sub(1) };
    }

    /// Returns the time of the next poll of doorbells that can't trap, after a poll that found nothing; later each time.
    pub fn nap(&mut self, now: u64, user_contexts: bool) -> u64 {
        let longest = if user_contexts { LONGEST_NAP_USERS } else { LONGEST_NAP };
        if now >= self.next_look {
            self.nap = (self.nap * 2).clamp(FIRST_NAP, longest);
            self.next_look = now.saturating_add(self.nap);
        }
        self.next_look
    }

    /// Time of the next poll of doorbells that can't trap.
    pub fn next_look(&self) -> u64 {
        self.next_look
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_NAP, LONGEST_NAP_USERS, Load};

    const WINDOW: u64 = 40_000_000;

    #[test]
    fn many_doorbells_in_a_short_time_are_a_load_and_few_are_none() {
        let mut load = Load::new(0);
        assert!((0..1000).all(|i| !load.trapped(i * 2_000_000, WINDOW)));
        assert!((0..40).any(|i| load.trapped(3_000_000_000 + i * 1000, WINDOW)));
        // On an emulated host each takes 2 ms; with a longer window the result is the same.
        assert!((0..40).any(|i| load.trapped(5_000_000_000 + i * 2_000_000, 10 * WINDOW)));
    }

    /// Polls every 10 microseconds.
    fn look(load: &mut Load, from: u64, to: u64) {
        (from..=to).step_by(10_000).for_each(|now| load.found_nothing(now));
    }

    #[test]
    fn only_time_in_which_somebody_looked_is_idle_time() {
        let mut load = Load::new(0);
        look(&mut load, 0, 49_000_000);
        assert!(!load.idle_for(50_000_000));
        // The engine didn't run for a second.
        load.found_nothing(1_049_000_000 - 10_000);
        assert!(!load.idle_for(51_000_000));
        look(&mut load, 1_049_000_000, 1_052_000_000);
        assert!(load.idle_for(50_000_000));
        load.worked(1_052_000_000);
        assert!(!load.idle_for(1));
    }

    #[test]
    fn who_is_busy_again_at_once_is_waited_for_longer() {
        let mut load = Load::new(0);
        for now in (1..=10).map(|i| i * 100_000_000) {
            load.leaves_memory(now);
            load.enters_memory(now + 50_000_000);
        }
        load.worked(2_000_000_000);
        look(&mut load, 2_000_000_000, 2_790_000_000);
        assert!(!load.idle_for(50_000_000));
        look(&mut load, 2_790_000_000, 2_810_000_000);
        assert!(load.idle_for(50_000_000), "sixteen times as long at most");
        for i in 0..10 {
            load.leaves_memory(i * 10_000_000_000);
            load.enters_memory(i * 10_000_000_000 + 5_000_000_000);
        }
        load.worked(200_000_000_000);
        look(&mut load, 200_000_000_000, 200_051_000_000);
        assert!(load.idle_for(50_000_000), "forgotten when it is really idle in between");
    }

    #[test]
    fn a_program_that_waits_for_events_keeps_its_doorbells_trapped() {
        let mut load = Load::new(0);
        load.armed(0);
        assert!((0..100).all(|i| !load.trapped(i * 1000, WINDOW)) && load.event_driven(100_000));
        assert!((0..100).any(|i| load.trapped(600_000_000 + i * 1000, WINDOW)));
    }

    #[test]
    fn naps_grow_and_end_with_work() {
        let mut load = Load::new(0);
        let (mut now, mut looks) = (0, 0);
        while now < 1_000_000_000 {
            now = load.nap(now, true);
            looks += 1;
        }
        assert!((1000..1020).contains(&looks), "{looks}");
        load.worked(now);
        assert!(load.nap(now, false) - now < 100_000);
        let mut last = 0;
        while now < 3_000_000_000 {
            let next = load.nap(now, false);
            last = next - now;
            now = next;
        }
        assert_eq!((last, LONGEST_NAP > LONGEST_NAP_USERS), (LONGEST_NAP, true));
    }
}
