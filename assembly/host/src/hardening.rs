//! What the daemon gives up, and takes, for itself.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A NIC needs about 40 descriptors: sockets, the guest's memory, eventfds.
const DESCRIPTORS: u64 = 65_536;

/// No new privileges by execve, no dump of guests' memory, and room for descriptors as far as the hard limit allows.
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
