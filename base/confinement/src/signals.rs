//! Signals that a thread leaves to others.
#![allow(unsafe_code)] // Sets of signals are a structure of the C library.

use std::io;

/// Blocks signals on the calling thread, and on threads that it creates from now on. The kernel then delivers signals to the process on
/// another thread.
///
/// # Errors
/// A number is no signal's.
pub fn block(signals: &[libc::c_int]) -> io::Result<()> {
    // SAFETY: a plain structure, emptied next.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a local variable and outlives the call.
    unsafe { libc::sigemptyset(&raw mut set) };
    for &signal in signals {
        // SAFETY: as above; an unknown number is refused.
        if unsafe { libc::sigaddset(&raw mut set, signal) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: as above; the previous set isn't asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
