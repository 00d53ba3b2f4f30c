//! File descriptors that the monitor's parent left open for it (`--net fd:N`).
#![allow(unsafe_code)] // A number becomes a descriptor here, and only here.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// A duplicate of inherited descriptor `number`, closed on exec.
///
/// # Errors
///
/// When the process has no such descriptor.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: the descriptor is only duplicated; for a number without a descriptor the kernel returns EBADF. The description's validation
    // excludes standard streams.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(rustix::io::fcntl_dupfd_cloexec(borrowed, 3)?)
}
