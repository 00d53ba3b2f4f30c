//! A look at late writes soon after an access. Where a late write may start something (`Register::starts`: the NE2000's command register), a
//! guest may make it and then wait for an interrupt; what waits in KVM's ring is told to nobody. So after any access of the NIC that leaves the
//! guest, or that was late itself, its thread looks once more, [`AFTER`] later: the order of writes stays what it was, as all of them are in
//! that ring, and a guest that does nothing costs nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// How long after. A frame of 1514 bytes takes an NE2000's wire 1.2 ms; Linux's driver needs a fifth of that from its last read to the write
/// that sends, on slow machines.
const AFTER: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// The timer, and whether it runs.
pub(super) struct Look(pub OwnedFd, AtomicBool);

impl Look {
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?, AtomicBool::new(false)))
    }

    /// There was an access. Nothing where a look is due already.
    pub fn begin(&self) {
        if !self.1.swap(true, Ordering::SeqCst) {
            let never = Timespec { tv_sec: 0, tv_nsec: 0 };
            let time = Itimerspec { it_interval: never, it_value: AFTER };
            if let Err(error) = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &time) {
                tracing::error!(%error, "The timer of a NIC can't be set; what its guest writes late may wait");
            }
        }
    }

    /// The thread looks now: accesses from here on want another look.
    pub fn over(&self) {
        let mut count = [0; 8];
        // Not over yet where the thread woke for something else: the timer is set anew then.
        let _ = rustix::io::read(&self.0, &mut count);
        self.1.store(false, Ordering::SeqCst);
    }
}
