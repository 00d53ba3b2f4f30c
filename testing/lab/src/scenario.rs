//! A scenario: a name, a line of description, a topology, and a function. Its figures are the last line of output.

use crate::emulator_faults::{self, EmulatorFault, Excuses, HostState, hosts_can_be_damaged};
use crate::guest::Vmm;
use crate::host::Host;
use crate::lab::Lab;
use crate::qemu::Emulator;
use crate::rdma::Device;
use crate::recipe::KERNELS;
use crate::topology::Topology;
use crate::unfinished::Unfinished;
use crate::{progress, run_record, scenarios};
use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};
use std::time::Instant;

/// Options of a scenario from the command line.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Number of repetitions (boots, kills…). Each scenario has its own default.
    pub count: Option<u32>,
    /// Duration in seconds, for scenarios that run for a time.
    pub seconds: Option<u64>,
    /// Seed of random numbers.
    pub seed: Option<u64>,
    /// Filter: only these kernels.
    pub kernels: Vec<String>,
    /// Filter: only these numbers of vCPUs.
    pub cpus: Vec<u32>,
    /// Filter: only these ends of a guest: `poweroff`, `reboot`, `button`.
    pub ends: Vec<String>,
    /// The guests' monitor, if a scenario supports another: `causeway`, `microvm` or `q35`.
    pub monitor: Option<String>,
    /// Where guests' interrupt controllers are, in scenario `boot`: `kernel` or `monitor`.
    pub interrupts: Option<String>,
    /// The guests' RDMA device: `pvrdma` or `rxe`.
    pub device: Option<String>,
    /// Filter: only the parts of a scenario whose names contain one of these.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the guests' monitor.
    pub fn vmm(&self) -> Result<Vmm> {
        Vmm::parse(self.monitor.as_deref().unwrap_or("causeway"))
    }

    /// Whether guests' interrupt controllers are in their monitor.
    pub fn interrupts_in_monitor(&self) -> Result<bool> {
        match (self.interrupts.as_deref().unwrap_or("kernel"), self.vmm()?) {
            ("kernel", _) => Ok(false),
            ("monitor", Vmm::Causeway) => Ok(true),
            ("monitor", other) => bail!(
                "Interrupt controllers can't be in {}; leave --interrupts or --monitor out",
                other.name()
            ),
            (other, _) => {
                bail!("Interrupt controllers can't be in {other:?}; they can in kernel and monitor")
            }
        }
    }

    /// Returns the guests' RDMA device.
    pub fn rdma_device(&self) -> Result<Device> {
        Device::parse(self.device.as_deref().unwrap_or("pvrdma"))
    }

    /// Returns whether a part of a scenario is selected.
    pub fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| part.contains(o.as_str()))
    }

    /// Rejects invalid values before anything is booted.
    pub fn check(&self) -> Result<()> {
        self.vmm()?;
        self.interrupts_in_monitor()?;
        self.rdma_device()?;
        if let Some(end) = self.ends.iter().find(|e| !["poweroff", "reboot", "button"].contains(&e.as_str()))
        {
            bail!("A guest can't end by {end:?}; it can by poweroff, reboot and button");
        }
        let known: Vec<&str> = KERNELS.iter().map(|k| k.name).collect();
        if let Some(kernel) = self.kernels.iter().find(|k| !known.contains(&k.as_str())) {
            bail!("There is no kernel {kernel:?}; there are {}", known.join(", "));
        }
        if let Some(cpus) = self.cpus.iter().find(|c| !(1..=254).contains(*c)) {
            bail!("A guest can't have {cpus} vCPUs; 1 to 254 are possible");
        }
        if self.count == Some(0) {
            bail!("A count of 0 would show nothing");
        }
        Ok(())
    }
}

/// A scenario's figures, and whether its checks succeeded.
#[derive(Debug, Default)]
pub struct Report {
    figures: Map<String, Value>,
    broken: Vec<String>,
    excuses: Excuses,
}

impl Report {
    /// Excuses an emulator fault, unless a check has failed or the run has reached its limit of excuses.
    pub fn excuse(&mut self, scenario: &str, fault: EmulatorFault, line: &str) -> bool {
        self.broken.is_empty() && self.excuses.excuse(scenario, fault, line)
    }

    /// Sets a figure.
    pub fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }

    /// Checks a condition. If it is false, the scenario fails with this text.
    pub fn check(&mut self, holds: bool, text: impl Into<String>) {
        if !holds {
            let text = text.into();
            progress!("CHECK FAILED: {text}");
            self.broken.push(text);
        }
    }

    /// Returns the last line on standard output.
    pub fn line(&self) -> String {
        Value::Object(self.figures.clone()).to_string()
    }
}

/// Opens a prompt in the first of a scenario's guests, or in the numbered host; returns the shell's status.
pub type Prompt = fn(&Lab, &Options, Option<usize>) -> Result<i32>;

/// A scenario.
pub struct Scenario {
    /// Name on the command line.
    pub name: &'static str,
    /// One line about its purpose.
    pub about: &'static str,
    /// The required hosts.
    pub topology: fn(&Options) -> Topology,
    /// The scenario's function.
    pub run: fn(&Lab, &Options, &mut Report) -> Result<()>,
    /// Boots the scenario's own guests for `lab shell --scenario` and opens a prompt.
    pub prompt: Option<Prompt>,
}

/// Returns all scenarios.
pub fn all() -> &'static [Scenario] {
    scenarios::ALL
}

/// Returns a scenario by name.
pub fn find(name: &str) -> Result<&'static Scenario> {
    all().iter().find(|s| s.name == name).ok_or_else(|| {
        let names: Vec<&str> = all().iter().map(|s| s.name).collect();
        anyhow!("There is no scenario {name:?}; there are {}", names.join(", "))
    })
}

/// Runs a scenario to its end: figures on stdout, everything else on stderr.
///
/// A scenario restarts on new hosts only after an emulator fault that [`emulator_faults`] excuses. The figures `excused_faults` and
/// `excused_by_kind` count these. Any other error fails the scenario.
pub fn run(scenario: &Scenario, options: &Options) -> Result<()> {
    options.check()?;
    let began = Instant::now();
    progress!("{}: {}", scenario.name, scenario.about);
    let emulator = Emulator::chosen()?;
    let mut excuses = Excuses::from_environment();
    let (mut report, result) = loop {
        let mut report = Report { excuses, ..Report::default() };
        let result = match attempt(scenario, options, &emulator, &mut report) {
            Attempt::Ended(result) => result,
            Attempt::Excused => {
                excuses = report.excuses;
                continue;
            }
        };
        break (report, result);
    };
    report.figure("scenario", scenario.name);
    report.figure("excused_faults", report.excuses.total());
    report.figure("excused_by_kind", report.excuses.by_kind());
    report.figure("ok", result.is_ok() && report.broken.is_empty());
    println!("{}", report.line());
    run_record::keep(&Value::Object(report.figures.clone()), began.elapsed())?;
    result?;
    if !report.broken.is_empty() {
        bail!("{}: {}", scenario.name, report.broken.join("; "));
    }
    Ok(())
}

enum Attempt {
    /// The scenario ended, or failed.
    Ended(Result<()>),
    /// An emulator fault was excused.
    Excused,
}

/// Makes one attempt on new hosts.
fn attempt(scenario: &Scenario, options: &Options, emulator: &Emulator, report: &mut Report) -> Attempt {
    let topology = (scenario.topology)(options);
    let lab = match Lab::boot_with(&topology, emulator) {
        Ok(lab) => lab,
        Err(error) => {
            return match emulator_faults::found_in_boot(&error) {
                Some((fault, line)) if report.excuse(scenario.name, fault, &line) => {
                    progress!("{error:#}");
                    Attempt::Excused
                }
                _ => Attempt::Ended(Err(error)),
            };
        }
    };
    report.figure("emulator", lab.emulator());
    let result = (scenario.run)(&lab, options, report);
    let fault = match &result {
        Ok(()) => None,
        Err(error) => {
            progress!("{} failed: {error:#}", scenario.name);
            // First: the examination of the hosts isn't part of the failed step.
            let states = states_at(&lab, error);
            let fault = emulator_faults::found(error, &states, hosts_can_be_damaged(&topology));
            for host in lab.hosts().iter().filter(|host| host.answers()) {
                host.wakes_by_signal();
            }
            eprint!("{}", lab.tails());
            if let Err(error) = lab.hold() {
                progress!("The hosts can't be held: {error:#}");
            }
            fault
        }
    };
    // An own fault counts, independent of the scenario's result.
    for line in lab.hosts().iter().filter_map(Host::own_fault) {
        report.check(false, format!("a program of Causeway failed by itself: {line}"));
    }
    match fault {
        Some((fault, line)) if report.excuse(scenario.name, fault, &line) => Attempt::Excused,
        _ => Attempt::Ended(result),
    }
}

/// Returns the states of all hosts after a failed step. Errors of completed steps have no time, and are never excused.
fn states_at(lab: &Lab, error: &anyhow::Error) -> Vec<HostState> {
    let Some(unfinished) = error.downcast_ref::<Unfinished>() else { return Vec::new() };
    lab.hosts().iter().map(|host| host.state(unfinished.began())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_one_json_object() {
        let mut r = Report::default();
        r.figure("boots", 3);
        r.figure("text", "two\nlines");
        let line = r.line();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["boots"], 3);
    }

    /// A check that failed before an emulator fault counts.
    #[test]
    fn nothing_is_excused_after_a_failed_check() {
        let mut report = Report::default();
        report.check(false, "5 bytes differ");
        assert!(!report.excuse("net", EmulatorFault::HostSilent, "x"));
        assert!(Report::default().excuse("net", EmulatorFault::HostSilent, "x"));
    }

    #[test]
    fn nonsense_is_refused_before_anything_boots() {
        let bad = |o: Options| o.check().unwrap_err().to_string();
        assert!(bad(Options { kernels: vec!["5.10".into()], ..Options::default() }).contains("6.1-cloud"));
        assert!(bad(Options { cpus: vec![0], ..Options::default() }).contains("0 vCPUs"));
        assert!(bad(Options { ends: vec!["unplug".into()], ..Options::default() }).contains("unplug"));
        assert!(bad(Options { monitor: Some("xen".into()), ..Options::default() }).contains("xen"));
        assert!(bad(Options { count: Some(0), ..Options::default() }).contains("0"));
        Options::default().check().unwrap();
    }

    #[test]
    fn names_are_unique_and_unknown_ones_are_refused() {
        let mut names: Vec<&str> = all().iter().map(|s| s.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all().len());
        assert!(find("nonsense").err().unwrap().to_string().contains("boot"));
    }
}
