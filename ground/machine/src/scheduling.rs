//! Which threads run first.
#![allow(unsafe_code)] // sched_setscheduler, which no crate of ours wraps.

use std::io;

/// Lets the calling thread run as soon as it has something to do, before all threads of ordinary priority (SCHED_FIFO, lowest priority;
/// threads that it starts are ordinary again). For threads that sleep nearly always, and that vCPUs wait for.
///
/// # Errors
/// EPERM without CAP_SYS_NICE and with an RLIMIT_RTPRIO of 0.
pub fn run_before_others() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 is the calling thread; the parameters outlive the call.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_gets_it_or_is_told_that_it_may_not() {
        let outcome = std::thread::spawn(super::run_before_others).join().unwrap();
        if let Err(error) = outcome {
            assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
        }
    }
}
