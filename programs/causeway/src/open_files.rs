//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit. The usual soft limit of 1,024 exists for `select`, which this
/// program doesn't use. A daemon has some twenty descriptors per VM, and more per queue. If the limit can't be raised
/// it stays, and a later open reports the failure.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some() && current != maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
