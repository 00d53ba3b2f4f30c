//! Who holds the device next: round robin among the guests that asked, each for a time slice. Time comes in as nanoseconds of a clock
//! that never goes back.

use std::collections::VecDeque;

use crate::guest::GuestId;

/// The scheduler of one device.
#[derive(Debug, Clone)]
pub struct Scheduler {
    slice: u64,
    waiting: VecDeque<GuestId>,
    holder: Option<(GuestId, u64)>,
}

impl Scheduler {
    /// A scheduler that leaves the device with a guest for at least `slice` nanoseconds while others wait.
    pub fn new(slice: u64) -> Self {
        Self { slice, waiting: VecDeque::new(), holder: None }
    }

    /// A guest asks for the device.
    pub fn demand(&mut self, guest: GuestId) {
        let holds = self.holder.is_some_and(|(holder, _)| holder == guest);
        if !holds && !self.waiting.contains(&guest) {
            self.waiting.push_back(guest);
        }
    }

    /// The guest that should get the device now; `None`: nothing changes. The device stays with its holder as long as nobody asks.
    pub fn next(&self, now: u64) -> Option<GuestId> {
        let due = self.holder.is_none_or(|(_, since)| now.saturating_sub(since) >= self.slice);
        if due { self.waiting.front().copied() } else { None }
    }

    /// The device went to `guest`.
    pub fn switched(&mut self, guest: GuestId, now: u64) {
        self.waiting.retain(|&waiting| waiting != guest);
        self.holder = Some((guest, now));
    }

    /// A guest has gone, or doesn't want the device any more.
    pub fn forget(&mut self, guest: GuestId) {
        self.waiting.retain(|&waiting| waiting != guest);
        self.holder = self.holder.filter(|&(holder, _)| holder != guest);
    }

    /// When [`Self::next`] may say something else than now, if somebody waits.
    pub fn due(&self) -> Option<u64> {
        self.waiting.front()?;
        Some(self.holder.map_or(0, |(_, since)| since.saturating_add(self.slice)))
    }
}

#[cfg(test)]
mod tests {
    use super::Scheduler;
    use crate::guest::GuestId;

    /// Everybody who asks gets the device, in order, and nobody loses it before the slice is over or while nobody asks.
    #[test]
    fn slices_go_round() {
        let (a, b, c) = (GuestId(0), GuestId(1), GuestId(2));
        let mut scheduler = Scheduler::new(100);
        assert_eq!(scheduler.next(0), None);
        scheduler.demand(a);
        assert_eq!(scheduler.next(0), Some(a));
        scheduler.switched(a, 0);
        assert_eq!((scheduler.next(1000), scheduler.due()), (None, None), "nobody asks");
        scheduler.demand(b);
        scheduler.demand(c);
        scheduler.demand(b);
        assert_eq!(scheduler.next(99), None);
        assert_eq!(scheduler.due(), Some(100));
        assert_eq!(scheduler.next(100), Some(b));
        scheduler.switched(b, 100);
        scheduler.demand(a);
        assert_eq!(scheduler.next(200), Some(c));
        scheduler.switched(c, 200);
        assert_eq!(scheduler.next(300), Some(a));
        scheduler.demand(b);
        scheduler.forget(a);
        assert_eq!(scheduler.next(299), None);
        scheduler.forget(c);
        assert_eq!(scheduler.next(299), Some(b), "nobody has it");
    }
}
