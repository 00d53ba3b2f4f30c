//! The complete list of failures that a scenario may attribute to the emulator. docs/design/lab.md has the conditions.
//!
//! A fault is excused only if all of these hold:
//! - The error is an [`Unfinished`]: a time-out expired or a host disappeared. A wrong answer is never excused.
//! - None of this repository's programs failed ([`own_faults`]), and no check of the scenario failed before.
//! - The fault's signature appeared during the failed step.
//! - No other fault was excused in this run of the scenario ([`MAX_EXCUSES_PER_RUN`]).

use crate::host::NeverUp;
use crate::own_faults;
use crate::progress;
use crate::topology::Topology;
use crate::unfinished::Unfinished;
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

/// A run with more excuses fails.
pub const MAX_EXCUSES_PER_RUN: usize = 1;

/// Names a file to which each excuse is appended as a line of JSON.
pub const EXCUSES_FILE_VARIABLE: &str = "LAB_EXCUSES";

/// A fault of the emulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmulatorFault {
    /// An emulated host accepted no command within its boot time-out. No program of this repository ran in it yet.
    HostNeverUp,
    /// The emulator died, or a host stopped responding, without a report of the host's kernel.
    HostSilent,
    /// A host's kernel reported that one of its CPUs got no timer interrupt for tens of seconds.
    HostCpuStall,
}

impl EmulatorFault {
    const ALL: [Self; 3] = [Self::HostNeverUp, Self::HostSilent, Self::HostCpuStall];

    /// Returns the name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::HostNeverUp => "host_never_up",
            Self::HostSilent => "host_silent",
            Self::HostCpuStall => "host_cpu_stall",
        }
    }
}

/// State of a host after a failed step.
#[derive(Debug, Clone)]
pub struct HostState {
    /// Its name.
    pub name: String,
    /// Whether it accepts commands.
    pub answers: bool,
    /// Whether SIGKILL ended its emulator, as this machine's out-of-memory killer does.
    pub emulator_killed: bool,
    /// A line that shows a fault of this repository's programs, or of the host's memory.
    pub own_fault: Option<String>,
    /// The lines of its console since the boot.
    pub console: Vec<String>,
    /// The lines that appeared during the failed step.
    pub console_in_step: Vec<String>,
}

/// Returns whether a fault of Causeway can damage a host's memory: the test uses a real card of the host, and its DMA
/// is under test.
pub fn hosts_can_be_damaged(topology: &Topology) -> bool {
    topology.hosts.iter().any(|host| !host.qemu.is_empty())
}

/// Finds the signature of [`EmulatorFault::HostCpuStall`].
///
/// No thread of a program, of any scheduling class, blocks the watchdog or the timer softirq of a CPU for that long. An
/// RCU stall isn't in the list: a `SCHED_FIFO` thread may starve the RCU threads.
fn cpu_stall(console: &[String]) -> Option<String> {
    let signs = ["watchdog: BUG: soft lockup - CPU#", "Possible timer handling issue on cpu="];
    console
        .iter()
        .find(|line| signs.iter().any(|sign| line.contains(sign)))
        .map(|line| line.trim().to_owned())
}

/// Returns whether a kernel reports damage of its own state, or exhausted memory.
fn kernel_died(line: &str) -> bool {
    let signs = ["Kernel panic", "BUG:", "Oops", "general protection fault", "double fault", "corrupted"];
    own_faults::is_own(line) || !line.contains("soft lockup") && signs.iter().any(|sign| line.contains(sign))
}

/// Returns whether the host shows the signature of [`EmulatorFault::HostSilent`].
fn silent(host: &HostState) -> bool {
    !host.answers && !host.emulator_killed && !host.console.iter().any(|line| kernel_died(line))
}

/// Returns the emulator fault that caused a step's failure, and its evidence. `None`: the failure counts.
pub fn found(
    error: &anyhow::Error,
    hosts: &[HostState],
    hosts_can_be_damaged: bool,
) -> Option<(EmulatorFault, String)> {
    error.downcast_ref::<Unfinished>()?;
    if own_faults::found(&format!("{error:#}")).is_some() || hosts.iter().any(|host| host.own_fault.is_some())
    {
        return None;
    }
    if hosts_can_be_damaged {
        return None;
    }
    // A stall may kill a host: that is one fault.
    if let Some(line) = hosts.iter().find_map(|host| cpu_stall(&host.console_in_step)) {
        return Some((EmulatorFault::HostCpuStall, line));
    }
    let host = hosts.iter().find(|host| silent(host))?;
    let line = format!("host {} doesn't answer, and its kernel reported nothing", host.name);
    Some((EmulatorFault::HostSilent, line))
}

/// As [`found`], for an error during boot.
pub fn found_in_boot(error: &anyhow::Error) -> Option<(EmulatorFault, String)> {
    let host = error.downcast_ref::<NeverUp>()?;
    if host.console().lines().any(kernel_died) {
        return None;
    }
    let line = host.console().lines().last().unwrap_or("its console is empty").trim().to_owned();
    Some((EmulatorFault::HostNeverUp, line))
}

/// The excused faults of one run of a scenario.
#[derive(Debug, Default)]
pub struct Excuses {
    faults: Vec<EmulatorFault>,
    file: Option<PathBuf>,
}

impl Excuses {
    /// Starts without excuses. Each one is appended to the file that [`EXCUSES_FILE_VARIABLE`] names.
    pub fn from_environment() -> Self {
        Excuses { faults: Vec::new(), file: std::env::var_os(EXCUSES_FILE_VARIABLE).map(PathBuf::from) }
    }

    /// Excuses a fault, unless the run has reached its limit.
    pub fn excuse(&mut self, scenario: &str, fault: EmulatorFault, line: &str) -> bool {
        if self.faults.len() >= MAX_EXCUSES_PER_RUN {
            progress!("NOT EXCUSED, the run had its {MAX_EXCUSES_PER_RUN}: {} ({line})", fault.name());
            return false;
        }
        // An excuse that can't be recorded isn't granted.
        if let Err(error) = self.append(scenario, fault, line) {
            progress!(
                "NOT EXCUSED: {} ({line}): the file of excuses can't be written: {error}",
                fault.name()
            );
            return false;
        }
        self.faults.push(fault);
        progress!("EMULATOR FAULT, excused: {} ({line}); it is no verdict about the monitor", fault.name());
        true
    }

    fn append(&self, scenario: &str, fault: EmulatorFault, line: &str) -> std::io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let entry = json!({"scenario": scenario, "fault": fault.name(), "line": line}).to_string() + "\n";
        OpenOptions::new().create(true).append(true).open(path)?.write_all(entry.as_bytes())
    }

    /// Returns the number of excuses.
    pub fn total(&self) -> usize {
        self.faults.len()
    }

    /// Returns the number of excuses of each kind.
    pub fn by_kind(&self) -> Value {
        let count = |kind: EmulatorFault| self.faults.iter().filter(|fault| **fault == kind).count();
        let kinds = EmulatorFault::ALL.into_iter();
        kinds.map(|kind| (kind.name().to_owned(), count(kind).into())).collect::<Map<_, _>>().into()
    }
}

#[cfg(test)]
mod tests;
