//! A look at late writes soon after an access. Where a late write may start something (`Register::starts`: the NE2000's command register), a
//! guest may make it and then wait for an interrupt; what waits in KVM's ring is told to nobody. So after any access of the NIC that leaves the
//! guest, or that was late itself, its thread looks, [`AFTER`] later: the order of writes stays what it was, as all of them are in
//! that ring.
//!
//! A guest may need longer for its next write: where it has one processor with that thread, each look takes it away from its guest. So looks that find
//! nothing go on, each after twice the time up to [`MAX_POLL_INTERVAL`], until nothing has happened for [`LOOKS`] of them, some 10 s: longer than drivers wait for an
//! interrupt before they reset their card. A guest that does nothing costs nothing then.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// How long after the access. A frame of 1514 bytes takes an NE2000's wire 1.2 ms; Linux's driver needs a fifth of that from its last read to the write
/// that sends, on slow machines.
const AFTER: Duration = Duration::from_micros(200);
/// Between looks that found nothing, at most.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Looks in a row that find nothing.
const LOOKS: u32 = 110;
/// None is due.
const NONE: u32 = u32::MAX;

/// How long after the one before a look comes that follows so many that found nothing.
fn after(empty: u32) -> Duration {
    2_u32
        .checked_pow(empty)
        .and_then(|times| AFTER.checked_mul(times))
        .map_or(MAX_POLL_INTERVAL, |time| time.min(MAX_POLL_INTERVAL))
}

/// The timer, and how many looks before the one that is due found nothing.
pub(super) struct Look(pub OwnedFd, AtomicU32);

impl Look {
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?, AtomicU32::new(NONE)))
    }

    fn set(&self, empty: u32) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(it_value) = Timespec::try_from(after(empty)) else { return };
        let time = Itimerspec { it_interval: never, it_value };
        if let Err(error) = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &time) {
            tracing::error!(%error, "The timer of a NIC can't be set; what its guest writes late may wait");
        }
    }

    /// There was an access: a look is due soon. Nothing where one is already.
    pub fn begin(&self) {
        if self.1.swap(0, Ordering::SeqCst) != 0 {
            self.set(0);
        }
    }

    /// The thread looks now: accesses from here on want another look. What [`Look::again`] is to be given.
    pub fn over(&self) -> u32 {
        let mut count = [0; 8];
        // Where the thread woke for something else the timer hasn't run out: it is set anew then.
        let due = rustix::io::read(&self.0, &mut count).is_ok();
        match self.1.swap(NONE, Ordering::SeqCst) {
            NONE => NONE,
            empty => empty + u32::from(due),
        }
    }

    /// The thread has looked. Where it found nothing, another look comes later, but not for ever.
    pub fn again(&self, empty: u32) {
        let free = || self.1.compare_exchange(NONE, empty, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if empty < LOOKS && free() {
            self.set(empty);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(look: &Look) -> Duration {
        let time = rustix::time::timerfd_gettime(&look.0).unwrap().it_value;
        Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
    }

    /// Looks go on for some seconds after the last access, ever more seldom, and then end; an access begins anew.
    #[test]
    fn looks_go_on_for_a_while() {
        let look = Look::new().unwrap();
        assert!(due(&look).is_zero());
        let (mut all, mut number) = (Duration::ZERO, 0);
        look.begin();
        let mut empty = 0;
        while empty < LOOKS {
            let next = due(&look);
            assert!(next <= after(empty), "{next:?} after {empty}");
            all += after(empty);
            // As if it had run out.
            assert_eq!(look.1.swap(NONE, Ordering::SeqCst), empty);
            (empty, number) = (empty + 1, number + 1);
            look.again(empty);
        }
        assert!(
            (Duration::from_secs(9)..Duration::from_secs(12)).contains(&all),
            "{all:?} in {number} looks"
        );
        assert_eq!(look.1.load(Ordering::SeqCst), NONE, "none is due");
        look.begin();
        assert!(due(&look) <= AFTER);
        // An access while it is looked.
        let empty = look.over();
        look.begin();
        look.again(empty + 5);
        assert_eq!(look.1.load(Ordering::SeqCst), 0);
    }
}
