//! Confinement of a node of a VM that spans several. It connects, creates its machine and writes checkpoints while confined, so it may do
//! more than a VM of one node.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Resources outside of a node's sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePlaces {
    /// Directories in which it creates, connects to and removes sockets. It removes the directory, too, at the end.
    pub sockets: BTreeSet<PathBuf>,
    /// Directories in which it writes and reads checkpoints.
    pub checkpoints: BTreeSet<PathBuf>,
    /// Directories in which it reads checkpoints.
    pub restarts: BTreeSet<PathBuf>,
    /// TCP ports on which it listens.
    pub listens: BTreeSet<u16>,
    /// TCP ports to which it connects.
    pub connects: BTreeSet<u16>,
    /// File of the RDMA device for its links. With one, the node keeps no capability: the kernel serves only threads with the credentials
    /// that opened the device, so no thread may drop a capability later.
    pub rdma: Option<PathBuf>,
    /// The node started other nodes, and ends those that don't end by themselves.
    pub has_children: bool,
}

/// Raises limits for links by RDMA, while the process has its privileges: for pinned memory, and for real-time priority of service threads
/// without a capability. If a limit can't be raised, continues; the operation that needs more reports it.
pub fn raise_limits_for_rdma() {
    for (limit, wanted) in [
        (Resource::Memlock, Rlimit { current: None, maximum: None }),
        // For SCHED_FIFO; see `machine::scheduling`.
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

/// Highest real-time priority of a node's threads.
const FIRST: u64 = machine::scheduling::Rank::First as u64;

/// Drops the calling thread's capabilities, after it has used CAP_SYS_NICE. Threads that it creates from then on have none.
pub fn privileges_used() {
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    if let Err(error) = rustix::thread::set_capabilities(None, none) {
        tracing::warn!(%error, "A thread's capabilities can't be dropped");
    }
}

/// Connections between nodes, building the machine, checkpoints, ending other nodes. Landlock checks files and ports.
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
    // Nodes that this one has started.
    libc::SYS_kill,
];
