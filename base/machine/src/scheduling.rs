//! Real-time scheduling of service threads.
#![allow(unsafe_code)] // sched_setscheduler, which no crate of ours wraps.

use std::io;

/// Real-time priority of a thread. Two threads of one rank on one processor don't preempt each other: one that never sleeps starves the
/// other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Preempts ordinary threads (SCHED_FIFO, lowest priority).
    Early = 1,
    /// Preempts threads of rank [`Self::Early`], too.
    First = 2,
}

/// Gives the calling thread real-time priority, so that it preempts all ordinary threads when it becomes runnable. Threads that it starts
/// are ordinary again. For threads that nearly always sleep and that vCPUs wait for.
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
