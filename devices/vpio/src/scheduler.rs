//! Chooses the resident guest: round robin among the guests that requested the device, each for a time slice. Times are
//! nanoseconds of a monotonic clock.

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
    /// Creates a scheduler that leaves the device with a guest for at least `slice` nanoseconds while other guests
    /// wait.
    pub fn new(slice: u64) -> Self {
        Self { slice, waiting: VecDeque::new(), holder: None }
    }

    /// Notes that a guest requests the device.
    pub fn demand(&mut self, guest: GuestId) {
        let holds = self.holder.is_some_and(|(holder, _)| holder == guest);
        if !holds && !self.waiting.contains(&guest) {
            self.waiting.push_back(guest);
        }
    }

    /// Returns the guest that should get the device now. `None` means no change. The device stays with its holder until
    /// another guest requests it.
    pub fn next(&self, now: u64) -> Option<GuestId> {
        let due = self.holder.is_none_or(|(_, since)| now.saturating_sub(since) >= self.slice);
        if due { self.waiting.front().copied() } else { None }
    }

    /// Notes that `guest` got the device.
    pub fn switched(&mut self, guest: GuestId, now: u64) {
        self.waiting.retain(|&waiting| waiting != guest);
        self.holder = Some((guest, now));
    }

    /// Removes a guest that ended or no longer needs the device.
    pub fn forget(&mut self, guest: GuestId) {
        self.waiting.retain(|&waiting| waiting != guest);
        self.holder = self.holder.filter(|&(holder, _)| holder != guest);
    }

    /// Returns the time at which [`Self::next`] may return another result, if a guest waits.
    pub fn due(&self) -> Option<u64> {
        self.waiting.front()?;
        Some(self.holder.map_or(0, |(_, since)| since.saturating_add(self.slice)))
    }
}

#[cfg(test)]
mod tests {
    use super::Scheduler;
    use crate::guest::GuestId;

    /// Every requesting guest gets the device in order. No guest loses it before its slice ends or without another
    /// guest's request.
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
