//! What a scenario is: a name, a line of description, a topology, and a function whose figures are the last line.

use crate::guest::Vmm;
use crate::host::{Host, NeverUp};
use crate::lab::Lab;
use crate::qemu::Emulator;
use crate::rdma::Device;
use crate::recipe::KERNELS;
use crate::topology::Topology;
use crate::{progress, scenarios};
use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

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
}

impl Report {
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

/// How often a scenario may be begun: again only when the emulation failed.
const ATTEMPTS: u32 = 3;

/// Runs a scenario to its end: figures on stdout, everything else on stderr.
///
/// When a host's emulator dies or hangs, or a host doesn't come up, or a guest that stands still goes on as soon as its vCPU threads get a
/// signal that does nothing ([`Host::wakes_by_signal`]), or a host's kernel says that its CPU stood still ([`Host::stood_still`]), or a guest died of an
/// interrupt that came twice ([`Host::second_delivery`]), what was seen
/// says nothing about the monitor: the scenario begins again on fresh hosts, and the figure `emulator_failures` says how often that happened.
/// Nothing else is tried again: not what has found something wrong, nor a program of ours that panicked or was ended by its sandbox.
pub fn run(scenario: &Scenario, options: &Options) -> Result<()> {
    options.check()?;
    progress!("{}: {}", scenario.name, scenario.about);
    let mut emulator_failures = 0;
    let emulator = Emulator::chosen()?;
    loop {
        let topology = (scenario.topology)(options);
        let lab = match Lab::boot_with(&topology, &emulator) {
            Ok(lab) => lab,
            Err(e) if e.is::<NeverUp>() && emulator_failures + 1 < ATTEMPTS => {
                emulator_failures += 1;
                progress!("EMULATOR FAILURE {emulator_failures}: {e:#}");
                continue;
            }
            Err(e) => return Err(e),
        };
        let mut report = Report::default();
        let result = (scenario.run)(&lab, options, &mut report);
        if let Err(e) = &result {
            progress!("{} failed: {e:#}", scenario.name);
            let lost_wakeup = lab.hosts().iter().any(|host| host.answers() && host.wakes_by_signal());
            eprint!("{}", lab.tails());
            lab.hold()?;
            let own = lab.hosts().iter().find_map(Host::own_failure);
            // What was found before counts, whatever came after it.
            let found = own.is_some() || !report.broken.is_empty();
            if let Some(line) = own {
                report.check(false, format!("a program of Causeway failed by itself: {line}"));
            }
            let why = if found {
                None
            } else if lost_wakeup {
                Some(
                    "a wake-up of a vCPU was lost between the emulator and the emulated host's KVM"
                        .to_owned(),
                )
            } else if let Some(line) = lab.hosts().iter().find_map(Host::stood_still) {
                Some(format!("a CPU of a host stood still ({line})"))
            } else if let Some(line) = lab.hosts().iter().find_map(Host::second_delivery) {
                Some(format!("a guest got an injected interrupt twice (its kernel's double fault: {line})"))
            } else if !lab.hosts().iter().all(Host::answers) {
                Some("a host died under the scenario".to_owned())
            } else {
                None
            };
            if let Some(why) = why {
                emulator_failures += 1;
                progress!(
                    "EMULATOR FAILURE {emulator_failures}: {why}; that is no verdict about the monitor"
                );
                if emulator_failures < ATTEMPTS {
                    continue;
                }
            }
        }
        report.figure("scenario", scenario.name);
        report.figure("emulator", lab.emulator());
        report.figure("emulator_failures", emulator_failures);
        report.figure("ok", result.is_ok() && report.broken.is_empty());
        drop(lab);
        println!("{}", report.line());
        result?;
        if !report.broken.is_empty() {
            bail!("{}: {}", scenario.name, report.broken.join("; "));
        }
        return Ok(());
    }
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
