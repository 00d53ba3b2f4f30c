//! Peers that are other programs: started, pinned and parsed, on this host or between two network namespaces.
//!
//! | file | holds |
//! |---|---|
//! | `process` | a child, its output, its processor time; a server and its client |
//! | `link` | two network namespaces joined by a veth pair |
//! | `network` | network namespaces on one bridge |
//! | `tcp` | iperf3 and qperf over such a link |
//! | `ucx` | UCX's benchmark, over shared memory or a link |
//! | `memif` | DPDK's testpmd over shared memory |

pub mod link;
pub mod memif;
pub mod network;
pub mod process;
pub mod tcp;
pub mod ucx;

use std::process::Command;

/// Returns a command that runs `program` on one CPU of this host.
#[must_use]
pub fn pinned(cpu: usize, program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &cpu.to_string(), program]);
    command
}

/// Returns the packages of those `programs` (name, harmless argument, Debian package) that can't run.
#[must_use]
pub fn missing(programs: &[(&str, &str, &'static str)]) -> Vec<&'static str> {
    let absent = |(program, flag, package): &(&str, &str, &'static str)| {
        Command::new(program).arg(flag).output().is_err().then_some(*package)
    };
    programs.iter().filter_map(absent).collect()
}
