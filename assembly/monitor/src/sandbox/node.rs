//! A node of a VM that spans several: it makes its connections, its machine and its checkpoints while it is confined, so it may do more than a VM of one node.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Where a node reaches out of its sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePlaces {
    /// Folders in which it makes sockets, connects to others' and removes them; at the end the folder too.
    pub sockets: BTreeSet<PathBuf>,
    /// Folders in which it writes and reads checkpoints.
    pub checkpoints: BTreeSet<PathBuf>,
    /// Folders in which it reads checkpoints.
    pub restarts: BTreeSet<PathBuf>,
    /// TCP ports at which it listens.
    pub listens: BTreeSet<u16>,
    /// TCP ports to which it connects.
    pub connects: BTreeSet<u16>,
    /// The file of the RDMA device that its links go by. A node that has one keeps no capability: the kernel serves only threads with the credentials that opened
    /// it, so none may drop any later.
    pub rdma: Option<PathBuf>,
    /// It has started other nodes, which it ends where they don't end by themselves.
    pub has_children: bool,
}

/// Prepares this process for links by RDMA, while it has its privileges: memory may be pinned, and threads that serve shared memory may run before others without a capability.
/// Where a limit can't be raised things go on with what there is, and whoever needs more says so.
pub fn raise_limits_for_rdma() {
    for (limit, wanted) in [
        (Resource::Memlock, Rlimit { current: None, maximum: None }),
        // Of SCHED_FIFO; see `machine::scheduling`.
        (Resource::Rtprio, Rlimit { current: Some(FIRST), maximum: Some(FIRST) }),
    ] {
        let now = getrlimit(limit);
        let enough =
            |have: Option<u64>| have.is_none_or(|have| wanted.current.is_some_and(|wanted| have >= wanted));
        if !enough(now.current)
            && let Err(error) = setrlimit(limit, wanted)
        {
            tracing::info!(%error, ?limit, "A limit stays as it is");
        }
    }
}

/// Highest real-time priority that a node's threads have.
const FIRST: u64 = machine::scheduling::Rank::First as u64;

/// A node's thread has done what it needed CAP_SYS_NICE for: it drops what capabilities it has. Threads that it makes from now on have none.
pub fn privileges_used() {
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    if let Err(error) = rustix::thread::set_capabilities(None, none) {
        tracing::warn!(%error, "A thread's capabilities can't be dropped");
    }
}

/// Connections between nodes, making the machine, checkpoints, other nodes' ends. Files and ports are Landlock's to allow.
pub(super) const SYSCALLS: &[i64] = &[
    libc::SYS_socket,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    // The machine: memory, KVM.
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_sched_setscheduler,
    // Dropping the last capability.
    libc::SYS_capset,
    // Checkpoints.
    libc::SYS_rename,
    libc::SYS_mkdir,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_getdents64,
    // Other nodes that it has started.
    libc::SYS_kill,
];
