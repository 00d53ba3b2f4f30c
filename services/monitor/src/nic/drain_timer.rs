//! Drains of deferred writes soon after an access. A deferred write may start something (`Register::starts`: the NE2000's command
//! register), after which the guest waits for an interrupt. KVM's ring signals nothing, so the NIC's thread drains it [`FIRST_DRAIN_DELAY`]
//! after any access that exits, and after each drain that finds a write. All writes are in the ring, so they stay in order.
//!
//! A guest may need longer for its next write: with one CPU, each wakeup of the thread delays the guest. So the thread repeats drains that
//! find nothing, with twice the interval up to [`MAX_DRAIN_INTERVAL`], and stops after [`MAX_EMPTY_DRAINS`] of them. This takes some 10 s,
//! longer than drivers wait for an interrupt before they reset their card. An idle guest then costs nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// Time from an access to the first drain. A frame of 1514 bytes takes 1.2 ms on an NE2000's wire. Linux's driver needs a fifth of that, on
/// slow machines, from its last read to the write that sends.
const FIRST_DRAIN_DELAY: Duration = Duration::from_micros(200);
/// Longest interval between drains.
const MAX_DRAIN_INTERVAL: Duration = Duration::from_millis(100);
/// Drains in a row that find nothing, after which they stop.
const MAX_EMPTY_DRAINS: u32 = 110;
/// Value of the counter when no drain is due.
const NO_DRAIN_DUE: u32 = u32::MAX;

/// Interval before a drain that follows `empty` drains that found nothing.
fn drain_delay(empty: u32) -> Duration {
    2_u32
        .checked_pow(empty)
        .and_then(|times| FIRST_DRAIN_DELAY.checked_mul(times))
        .map_or(MAX_DRAIN_INTERVAL, |time| time.min(MAX_DRAIN_INTERVAL))
}

/// The timer, and the number of drains in a row that found nothing, or [`NO_DRAIN_DUE`].
pub(super) struct DrainTimer(pub OwnedFd, AtomicU32);

impl DrainTimer {
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?, AtomicU32::new(NO_DRAIN_DUE)))
    }

    fn set(&self, empty: u32) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(it_value) = Timespec::try_from(drain_delay(empty)) else { return };
        let time = Itimerspec { it_interval: never, it_value };
        if let Err(error) = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &time) {
            tracing::error!(%error, "The timer of a NIC can't be set; the guest's deferred writes may be delayed");
        }
    }

    /// An access occurred: starts the timer, unless a first drain is due already.
    pub fn start(&self) {
        if self.1.swap(0, Ordering::SeqCst) != 0 {
            self.set(0);
        }
    }

    /// Called before the thread drains: later accesses start the timer again. Returns the argument for [`DrainTimer::rearm`].
    pub fn take(&self) -> u32 {
        let mut count = [0; 8];
        // If the thread woke for another reason, the timer hasn't expired. It is set again then.
        let due = rustix::io::read(&self.0, &mut count).is_ok();
        match self.1.swap(NO_DRAIN_DUE, Ordering::SeqCst) {
            NO_DRAIN_DUE => NO_DRAIN_DUE,
            empty => empty + u32::from(due),
        }
    }

    /// Called after a drain that found nothing: sets the timer for the next one, up to [`MAX_EMPTY_DRAINS`] of them.
    pub fn rearm(&self, empty: u32) {
        let free =
            || self.1.compare_exchange(NO_DRAIN_DUE, empty, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if empty < MAX_EMPTY_DRAINS && free() {
            self.set(empty);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(timer: &DrainTimer) -> Duration {
        let time = rustix::time::timerfd_gettime(&timer.0).unwrap().it_value;
        Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
    }

    /// Drains continue for some seconds after the last access, at growing intervals, and then stop. An access starts over.
    #[test]
    fn drains_continue_for_seconds_after_an_access() {
        let timer = DrainTimer::new().unwrap();
        assert!(due(&timer).is_zero());
        let (mut all, mut number) = (Duration::ZERO, 0);
        timer.start();
        let mut empty = 0;
        while empty < MAX_EMPTY_DRAINS {
            let next = due(&timer);
            assert!(next <= drain_delay(empty), "{next:?} after {empty}");
            all += drain_delay(empty);
            // As if the timer had expired.
            assert_eq!(timer.1.swap(NO_DRAIN_DUE, Ordering::SeqCst), empty);
            (empty, number) = (empty + 1, number + 1);
            timer.rearm(empty);
        }
        assert!(
            (Duration::from_secs(9)..Duration::from_secs(12)).contains(&all),
            "{all:?} in {number} looks"
        );
        assert_eq!(timer.1.load(Ordering::SeqCst), NO_DRAIN_DUE, "none is due");
        timer.start();
        assert!(due(&timer) <= FIRST_DRAIN_DELAY);
        // An access during a drain.
        let empty = timer.take();
        timer.start();
        timer.rearm(empty + 5);
        assert_eq!(timer.1.load(Ordering::SeqCst), 0);
    }
}
