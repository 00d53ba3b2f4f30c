//! The groups of `make bench`.

pub mod cluster;
pub mod dsm;
pub mod fabric;
pub mod migration;
pub mod neighbours;
pub mod rdma;
pub mod vm;
pub mod vpio;

use anyhow::Context;
use machine::kvm::{Host, HostError};

use crate::conditions::Conditions;
use crate::figures::Report;

/// A group of benchmarks.
pub struct Group {
    /// Name on the command line and of its file.
    pub name: &'static str,
    /// Short description.
    pub about: &'static str,
    /// Measures the group. With `quick`, takes few samples, as a functional test.
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
        name: "migration",
        about: "the pause of a VM that moves between hosts; the HCA's share, its state, redirecting peers",
        run: migration::run,
    },
    Group {
        name: "neighbours",
        about: "messages between VMs, read in place, against copies, cache lines and sockets",
        run: neighbours::run,
    },
    Group {
        name: "cluster",
        about: "the cluster service with 1,000 hosts against bare gRPC round trips and syncs",
        run: cluster::run,
    },
    Group { name: "vpio", about: "a NIC under its model against trapping every access", run: vpio::run },
    Group {
        name: "dsm",
        about: "programs on two nodes that share memory against one node, and what sharing costs",
        run: dsm::run,
    },
];

/// Returns and prints the report of a group that can't run here.
fn skipped(group: &'static str, reason: String, conditions: Conditions) -> Report {
    eprintln!("bench: group {group} SKIPPED: {reason}");
    Report { group, skipped: Some(reason), conditions, figures: Vec::new(), details: serde_json::Value::Null }
}

/// Returns the first two CPUs that this process may use, or why there aren't two.
fn two_cpus() -> Result<[usize; 2], String> {
    let cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).take(2).collect();
    let few = |cpus: Vec<usize>| format!("two CPUs are needed, and this process may use {}", cpus.len());
    cpus.try_into().map_err(few)
}

/// Returns KVM, or the report of a group that can't run without it.
fn kvm(group: &'static str) -> anyhow::Result<Result<Host, Report>> {
    match Host::open() {
        Ok(host) => Ok(Ok(host)),
        Err(error @ HostError::Absent { .. }) => {
            let reason = format!("no /dev/kvm ({error})");
            Ok(Err(skipped(group, reason, Conditions::now(None, "none"))))
        }
        Err(error) => Err(error).with_context(|| format!("Group {group} needs KVM")),
    }
}

/// Returns KVM and two CPUs, or the report of a group that can't run without them.
fn kvm_and_cpus(group: &'static str) -> anyhow::Result<Result<(Host, [usize; 2]), Report>> {
    let host = match kvm(group)? {
        Ok(host) => host,
        Err(report) => return Ok(Err(report)),
    };
    match two_cpus() {
        Ok(cpus) => Ok(Ok((host, cpus))),
        Err(reason) => Ok(Err(skipped(group, reason, Conditions::now(Some(&host), "none")))),
    }
}
