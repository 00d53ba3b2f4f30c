//! The host's RDMA devices, through libibverbs, which is loaded at run time. On a host without the library or a device, [`Absent`] says
//! what is missing in one sentence; programs that don't use RDMA devices run as before.
//!
//! | module | holds |
//! |---|---|
//! | `abi` | the library's structures and numbers |
//! | `library` | its functions; which device has an address |
//!
//! Queue pairs belong to this crate's users: the host daemon's carry guests' requests, a monitor's are the links between nodes.

pub mod abi;
mod library;

use std::ffi::c_int;
use std::io;

pub use library::{Absent, Found, Functions, PortInfo, Verbs, devices};

/// Converts the return value of a library call that returns 0 or an error number. Call it before anything else sets `errno`.
///
/// # Errors
/// The call's.
pub fn outcome(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        // Some providers return the error number negated, or -1 with errno.
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.saturating_abs())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    /// Providers return error numbers either as they are or negated; both convert to the same error.
    #[test]
    fn error_numbers_are_understood_with_either_sign() {
        outcome(0).unwrap();
        for code in [12, -12] {
            assert_eq!(outcome(code).unwrap_err().raw_os_error(), Some(12));
        }
        assert!(outcome(c_int::MIN).is_err());
    }
}
