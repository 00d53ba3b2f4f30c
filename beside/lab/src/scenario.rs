//! What a scenario is: a name, a line of description, a topology, and a function whose figures are the last line.

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

/// What the command line may say about a scenario.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How many times (boots, kills…); each scenario has its own default.
    pub count: Option<u32>,
    /// How long, in seconds, where a scenario runs for a time.
    pub seconds: Option<u64>,
    /// Where randomness begins, in scenarios that have some.
    pub seed: Option<u64>,
    /// Only these kernels.
    pub kernels: Vec<String>,
    /// Only these numbers of vCPUs.
    pub cpus: Vec<u32>,
    /// Only these ways for a guest to end: `poweroff`, `reboot`, `button`.
    pub ends: Vec<String>,
    /// Who runs the guests, where a scenario can try another: `causeway`, `microvm` or `q35`.
    pub monitor: Option<String>,
    /// What guests do RDMA through: `pvrdma` or `rxe`.
    pub device: Option<String>,
    /// Only the parts of a scenario whose names contain one of these.
    pub only: Vec<String>,
}

impl Options {
    /// Who runs the guests.
    pub fn vmm(&self) -> Result<Vmm> {
        Vmm::parse(self.monitor.as_deref().unwrap_or("causeway"))
    }

    /// What guests do RDMA through.
    pub fn rdma_device(&self) -> Result<Device> {
        Device::parse(self.device.as_deref().unwrap_or("pvrdma"))
    }

    /// Whether a part of a scenario is wanted.
    pub fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| part.contains(o.as_str()))
    }

    /// Refuses what no scenario can mean, before anything is booted.
    pub fn check(&self) -> Result<()> {
        self.vmm()?;
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

/// A scenario's figures and whether its checks hold.
#[derive(Debug, Default)]
pub struct Report {
    figures: Map<String, Value>,
    broken: Vec<String>,
    excuses: Excuses,
}

impl Report {
    /// Excuses a fault of the emulator, unless something has failed already or the run has had its number of excuses.
    pub fn excuse(&mut self, scenario: &str, fault: EmulatorFault, line: &str) -> bool {
        self.broken.is_empty() && self.excuses.excuse(scenario, fault, line)
    }

    /// Sets a figure.
    pub fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }

    /// A check: when it doesn't hold, the scenario fails and the text says why.
    pub fn check(&mut self, holds: bool, text: impl Into<String>) {
        if !holds {
            let text = text.into();
            progress!("CHECK FAILED: {text}");
            self.broken.push(text);
        }
    }

    /// The last line on standard output.
    pub fn line(&self) -> String {
        Value::Object(self.figures.clone()).to_string()
    }
}

/// Opens a prompt in the first of a scenario's guests, or in the host of a number beside them; returns the shell's status.
pub type Prompt = fn(&Lab, &Options, Option<usize>) -> Result<i32>;

/// A scenario.
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// The hosts it needs.
    pub topology: fn(&Options) -> Topology,
    /// What it does.
    pub run: fn(&Lab, &Options, &mut Report) -> Result<()>,
    /// What `lab shell --scenario` opens, where the scenario has guests of its own to be there first.
    pub prompt: Option<Prompt>,
}

/// All scenarios.
pub fn all() -> &'static [Scenario] {
    scenarios::ALL
}

/// A scenario by name.
pub fn find(name: &str) -> Result<&'static Scenario> {
    all().iter().find(|s| s.name == name).ok_or_else(|| {
        let names: Vec<&str> = all().iter().map(|s| s.name).collect();
        anyhow!("There is no scenario {name:?}; there are {}", names.join(", "))
    })
}

/// Runs a scenario to its end: figures on stdout, everything else on stderr.
///
/// A scenario begins again, on fresh hosts, only after a fault of the emulator that [`emulator_faults`] excuses. The figures `excused_faults` and
/// `excused_by_kind` count them. Everything else that goes wrong fails the scenario.
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
    /// The scenario came to its end or failed.
    Ended(Result<()>),
    /// A fault of the emulator was excused.
    Excused,
}

/// One attempt, on hosts of its own.
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
            // Before anything else: what is done to look at the hosts isn't part of the failed step.
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
    // A program that failed by itself counts, whatever the scenario came to.
    for line in lab.hosts().iter().filter_map(Host::own_fault) {
        report.check(false, format!("a program of Causeway failed by itself: {line}"));
    }
    match fault {
        Some((fault, line)) if report.excuse(scenario.name, fault, &line) => Attempt::Excused,
        _ => Attempt::Ended(result),
    }
}

/// The states of all hosts after a step failed with an error. Errors of steps that came to an end have no time, and are never excused.
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

    /// What was found before a fault of the emulator counts.
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
