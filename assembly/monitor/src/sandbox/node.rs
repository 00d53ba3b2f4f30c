//! A node of a VM that spans several: it makes its connections, its machine and its checkpoints while it is confined, so it may do more than a VM of one node.

use std::collections::BTreeSet;
use std::path::PathBuf;

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
    /// It has started other nodes, which it ends where they don't end by themselves.
    pub has_children: bool,
}

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
