//! How busy one device is, and which doorbell mode suits that.

/// So many trapped doorbells within a window ([`super::EngineSetup::busy_window`]) are worth the change to memory.
const MANY: u32 = 32;
/// A program that armed a completion queue this recently waits for events: its arms should be exact, nanoseconds.
const EVENT_DRIVEN: u64 = 500_000_000;
/// No more than this between two looks counts as idle time: when the engine's CPU was taken away for longer, or the whole
/// emulated host's, the guest may have been stopped as well, and where they share a CPU it is the guest that runs then. Nanoseconds.
const LONGEST_GAP: u64 = 100_000;
/// A device that is busy again so soon after it was found idle was found idle too early, nanoseconds.
const TOO_EARLY: u64 = 1_000_000_000;
/// So often the time without work after which a device is idle may double.
const DOUBLINGS: u32 = 4;
/// First and longest sleep between looks at doorbells that are always memory, nanoseconds.
const FIRST_NAP: u64 = 50_000;
/// With contexts of user processes, which expect an answer soon.
const LONGEST_NAP_USERS: u64 = 1_000_000;
/// With the guest kernel's context alone.
const LONGEST_NAP: u64 = 10_000_000;

/// Times are nanoseconds of the engine's clock.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    window_start: u64,
    trapped: u32,
    looked_at: u64,
    /// How long looks have found nothing.
    idle: u64,
    /// When the device was found idle last, and how often too early.
    left_at: Option<u64>,
    doublings: u32,
    /// When a user process armed a completion queue last.
    armed_at: Option<u64>,
    nap: u64,
    next_look: u64,
}

impl Load {
    pub fn new(now: u64) -> Self {
        Self { looked_at: now, ..Self::default() }
    }

    /// A doorbell was trapped; those within `window` are counted together. `true` when they come so often that memory would be better.
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

    /// A user process has armed a completion queue.
    pub fn armed(&mut self, now: u64) {
        self.armed_at = Some(now);
    }

    /// Whether user processes wait for events: then doorbells should be trapped. In memory an arm may be overwritten
    /// before it is seen, so that events come late, or too many.
    pub fn event_driven(&self, now: u64) -> bool {
        self.armed_at.is_some_and(|at| now.saturating_sub(at) < EVENT_DRIVEN)
    }

    /// Doorbells were found, or work was done.
    pub fn worked(&mut self, now: u64) {
        self.looked_at = now;
        self.idle = 0;
        self.nap = 0;
        self.next_look = now;
    }

    /// A look at the doorbells has found nothing.
    pub fn found_nothing(&mut self, now: u64) {
        self.idle = self.idle.saturating_add(now.saturating_sub(self.looked_at).min(LONGEST_GAP));
        self.looked_at = now;
    }

    /// Whether there was no work for `time`, or for longer where that was too short before.
    pub fn idle_for(&self, time: u64) -> bool {
        self.idle >= time.saturating_mul(1 << self.doublings)
    }

    /// The device's doorbells are to be trapped, as it is idle.
    pub fn leaves_memory(&mut self, now: u64) {
        self.left_at = Some(now);
    }

    /// The device's doorbells are to be memory, as it is busy.
    pub fn enters_memory(&mut self, now: u64) {
        let early = self.left_at.is_some_and(|at| now.saturating_sub(at) < TOO_EARLY);
        self.doublings =
            if early { (self.doublings + 1).min(DOUBLINGS) } else { self.doublings.saturating_sub(1) };
    }

    /// A look at doorbells that can't be trapped found nothing, and none came for a while: says when to look again,
    /// later each time.
    pub fn nap(&mut self, now: u64, user_contexts: bool) -> u64 {
        let longest = if user_contexts { LONGEST_NAP_USERS } else { LONGEST_NAP };
        if now >= self.next_look {
            self.nap = (self.nap * 2).clamp(FIRST_NAP, longest);
            self.next_look = now.saturating_add(self.nap);
        }
        self.next_look
    }

    /// When to look again at doorbells that can't be trapped.
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
        // On a host where each takes 2 ms because it is emulated, a longer window says the same.
        assert!((0..40).any(|i| load.trapped(5_000_000_000 + i * 2_000_000, 10 * WINDOW)));
    }

    /// Looks every 10 microseconds.
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
