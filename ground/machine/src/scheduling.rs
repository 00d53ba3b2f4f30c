//! Which threads run first.
#![allow(unsafe_code)] // sched_setscheduler, which no crate of ours wraps.

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

#[cfg(test)]
mod tests {
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
