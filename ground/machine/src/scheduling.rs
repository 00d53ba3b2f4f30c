//! Which threads run first, and how long they have run.
#![allow(unsafe_code)] // sched_setscheduler and clocks of other threads, which no crate of ours wraps.

use std::io;

/// How early a thread runs that runs before ordinary ones. Two of the same rank on one processor don't interrupt each other: who never sleeps keeps the other out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Before ordinary threads (SCHED_FIFO, lowest priority).
    Early = 1,
    /// Before these, too.
    First = 2,
}

/// Lets the calling thread run as soon as it has something to do, before all threads of ordinary priority; threads that it starts are ordinary again. For threads that sleep
/// nearly always, and that vCPUs wait for.
///
/// # Errors
/// EPERM without CAP_SYS_NICE and with an RLIMIT_RTPRIO below the rank.
pub fn run_before_others(rank: Rank) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: rank as i32 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 is the calling thread; the parameters outlive the call.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Nanoseconds that a thread of this process, by the number that gettid gives, has had a processor.
///
/// # Errors
/// EINVAL for a thread that isn't there.
pub fn thread_time(thread: u32) -> io::Result<u64> {
    // Linux's number for the clock of a thread's time on processors: the thread's complement, then 110 in binary (per thread, as the scheduler counts).
    let thread = i32::try_from(thread).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let clock = (!thread << 3) | 6;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time outlives the call, and an unknown clock is an error.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    Ok(part(time.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(time.tv_nsec)))
}

#[cfg(test)]
mod tests {
    /// A thread that works has run for longer, one that sleeps hasn't, and one that isn't there has none.
    #[test]
    fn time_of_a_thread_is_what_it_has_run() {
        let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let before = super::thread_time(own).unwrap();
        let until = before + 20_000_000;
        while super::thread_time(own).unwrap() < until {}
        let before = super::thread_time(own).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(super::thread_time(own).unwrap() - before < 40_000_000);
        assert!(super::thread_time(u32::MAX).is_err());
    }

    #[test]
    fn a_thread_gets_it_or_is_told_that_it_may_not() {
        for rank in [super::Rank::Early, super::Rank::First] {
            let outcome = std::thread::spawn(move || super::run_before_others(rank)).join().unwrap();
            if let Err(error) = outcome {
                assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
            }
        }
    }
}
