//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one. What starts a program mostly leaves the soft one at 1,024 for the sake of `select`, which nothing here calls;
/// a daemon holds some twenty descriptors per VM and more per queue. Where it can't be raised it stays, and whoever can't open a file says so.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some() && current != maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
