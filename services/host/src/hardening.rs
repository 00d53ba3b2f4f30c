//! Privileges that the daemon drops, and limits that it raises, for itself.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limit of descriptors. A NIC needs about 40: sockets, the guest's memory, eventfds.
const DESCRIPTORS: u64 = 65_536;

/// Forbids new privileges by execve and dumps of guests' memory, and raises the limit of descriptors as far as the hard limit permits.
pub(crate) fn prepare() {
    if let Err(error) = rustix::thread::set_no_new_privs(true) {
        tracing::warn!(%error, "The daemon may still gain privileges by execve");
    }
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(DESCRIPTORS).min(DESCRIPTORS);
    if limit.current.is_some_and(|current| current < most) {
        let wanted = Rlimit { current: Some(most), maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, wanted) {
            tracing::warn!(%error, most, "The limit of file descriptors can't be raised");
        }
    }
    let none = Rlimit { current: Some(0), maximum: getrlimit(Resource::Core).maximum };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "A core dump of this process could hold guests' memory");
    }
}
