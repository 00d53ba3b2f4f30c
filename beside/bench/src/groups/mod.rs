//! The groups of `make bench`.

pub mod fabric;
pub mod neighbours;
pub mod rdma;
pub mod vm;

use crate::figures::Report;

/// A group: measures, and says what it found.
pub struct Group {
    /// Its name on the command line and of its file.
    pub name: &'static str,
    /// What it measures, in a few words.
    pub about: &'static str,
    /// Does it. With `quick`, few samples: to see that it works.
    pub run: fn(quick: bool) -> anyhow::Result<Report>,
}

/// All groups, in the order they run.
pub const ALL: &[Group] = &[
    Group { name: "vm", about: "memory, cache lines and exits in a VM against the host", run: vm::run },
    Group {
        name: "rdma",
        about: "RDMA writes between VMs against memcpy, cache lines and UCX",
        run: rdma::run,
    },
    Group {
        name: "fabric",
        about: "RDMA between hosts against TCP and UCX over the same link",
        run: fabric::run,
    },
    Group {
        name: "neighbours",
        about: "messages between VMs, read in place, against copies, cache lines and sockets",
        run: neighbours::run,
    },
];
