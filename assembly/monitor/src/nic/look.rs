//! Drains of deferred writes soon after an access. A deferred write may start something (`Register::starts`: the NE2000's command
//! register), after which the guest waits for an interrupt. KVM's ring signals nothing, so the NIC's thread drains it [`AFTER`] after any
//! access that exits, and after each drain that finds a write. All writes are in the ring, so they stay in order.
//!
//! A guest may need longer for its next write: with one CPU, each wakeup of the thread delays the guest. So the thread repeats drains that
//! find nothing, with twice the interval up to [`MAX_POLL_INTERVAL`], and stops after [`LOOKS`] of them. This takes some 10 s, longer than
//! drivers wait for an interrupt before they reset their card. An idle guest then costs nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// Time from an access to the first drain. A frame of 1514 bytes takes 1.2 ms on an NE2000's wire. Linux's driver needs a fifth of that, on
/// slow machines, from its last read to the write that sends.
const AFTER: Duration = Duration::from_micros(200);
/// Longest interval between drains.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Drains in a row that find nothing, after which they stop.
const LOOKS: u32 = 110;
/// Value of the counter when no drain is due.
const NONE: u32 = u32::MAX;

/// Interval before a drain that follows `empty` drains that found nothing.
fn after(empty: u32) -> Duration {
    2_u32
        .checked_pow(empty)
        .and_then(|times| AFTER.checked_mul(times))
        .map_or(MAX_POLL_INTERVAL, |time| time.min(MAX_POLL_INTERVAL))
}

/// The timer, and the number of drains in a row that found nothing, or [`NONE`].
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
            tracing::error!(%error, "The timer of a NIC can't be set; the guest's deferred writes may be delayed");
        }
    }

    /// An access occurred: starts the timer, unless a first drain is due already.
    pub fn begin(&self) {
        if self.1.swap(0, Ordering::SeqCst) != 0 {
            self.set(0);
        }
    }

    /// Called before the thread drains: later accesses start the timer again. Returns the argument for [`Look::again`].
    pub fn over(&self) -> u32 {
        let mut count = [0; 8];
        // If the thread woke for another reason, the timer hasn't expired. It is set again then.
        let due = rustix::io::read(&self.0, &mut count).is_ok();
        match self.1.swap(NONE, Ordering::SeqCst) {
            NONE => NONE,
            empty => empty + u32::from(due),
        }
    }

    /// Called after a drain that found nothing: sets the timer for the next one, up to [`LOOKS`] of them.
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

    /// Drains continue for some seconds after the last access, at growing intervals, and then stop. An access starts over.
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
            // As if the timer had expired.
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
        // An access during a drain.
        let empty = look.over();
        look.begin();
        look.again(empty + 5);
        assert_eq!(look.1.load(Ordering::SeqCst), 0);
    }
}
