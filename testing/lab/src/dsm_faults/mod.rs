//! Fault injection for nodes of a payload VM at random moments: kill, stop, and network cut (`lab dsm-faults`).
//!
//! Runs natively, without emulated hosts. A trial starts a VM that writes checkpoints, and injects a fault at one of
//! its links. Then
//! - the remaining nodes must report the lost node and its link within a second;
//! - no process may remain;
//! - the VM, restarted from its last checkpoint, must reach the result of an undisturbed run: exit code and console.
//!
//! The trials iterate over the links, and at each one over the faults: kill or stop (SIGSTOP) either end, or cut the
//! link. Nodes are processes in network namespaces, with a veth pair per link, which is set down to cut it. Every other
//! trial without a cut uses Unix sockets instead.

mod network;
mod vm;

use crate::{paths, progress};
use anyhow::{Context, Result, bail};
use network::{Ends, Network, links};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vm::{Plan, Vm};

/// Parameters of `lab dsm-faults`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of trials.
    pub count: u32,
    /// Number of the first trial, to continue or repeat.
    pub first: u32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Largest number of nodes per VM; the smallest is 2.
    pub nodes: u8,
}

/// The programs. Each runs for a second or more, and its result depends on the entire run.
const PROGRAMS: [(&str, &[&str]); 5] = [
    ("jacobi", &["n=256", "steps=120"]),
    ("cg", &["n=4096", "iterations=25"]),
    ("dsm_basic", &["all", "60"]),
    ("search", &["scale=12"]),
    ("ep", &["m=26"]),
];
/// Interval of checkpoints in seconds.
const EVERY: &str = "0.1";
/// Time-out of a diagnosis.
const LIMIT: Duration = Duration::from_secs(1);
/// Time-out of the remaining processes' end.
const END: Duration = Duration::from_secs(3);
/// Time-out of a run.
const RUN: Duration = Duration::from_secs(120);
/// Attempts to inject a fault before the program ends.
const TRIES: u32 = 6;

/// An injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill(u8),
    Stop(u8),
    Cut(Ends),
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Kill(_) => "kill",
            Self::Stop(_) => "stop",
            Self::Cut(_) => "cut",
        }
    }

    /// Returns whether a sentence names the node that the speaker lost, and the link.
    fn is_named_by(self, speaker: u8, text: &str) -> bool {
        let names = |node: u8| text.contains(&format!("ode {node} ")) && text.contains("link ");
        match self {
            Self::Kill(node) | Self::Stop(node) => speaker != node && names(node),
            // Node 0 repeats another node's report.
            Self::Cut((low, high)) => names(low) || names(high),
        }
    }
}

/// Returns all faults of links in VMs of 2 to `nodes` nodes.
fn faults(nodes: u8) -> Vec<(u8, Fault)> {
    let of = |nodes: u8| {
        links(nodes).flat_map(move |ends| {
            let (low, high) = ends;
            [Fault::Kill(low), Fault::Cut(ends), Fault::Stop(high), Fault::Kill(high), Fault::Stop(low)]
                .map(|fault| (nodes, fault))
        })
    };
    (2..=nodes).flat_map(of).collect()
}

/// Pseudorandom numbers (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a random part of a duration.
    fn part_of(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX).max(1);
        Duration::from_nanos(self.roll() % most)
    }
}

/// A program's result.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ending {
    status: Option<i32>,
    console: String,
}

/// Returns a console's text without times, which differ between runs.
fn without_times(console: &[u8]) -> String {
    let line = |line: &str| match serde_json::from_str::<Value>(line) {
        Ok(Value::Object(mut fields)) => {
            fields.retain(|name, _| name != "ns" && !name.ends_with("_ns"));
            Value::Object(fields).to_string()
        }
        _ => {
            let words: Vec<&str> = line.split(' ').collect();
            let timed = |at: usize| words.get(at + 1).is_some_and(|next| *next == "ns");
            let kept = words.iter().enumerate().filter(|(at, _)| !timed(*at)).map(|(_, word)| *word);
            kept.collect::<Vec<_>>().join(" ")
        }
    };
    String::from_utf8_lossy(console).lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Results of the trials.
#[derive(Debug, Default)]
struct Tally {
    faults: u32,
    /// Not counted as faults: the program ended with the right result before the fault, or while a link was cut.
    ended_first: u32,
    hangs: u32,
    undiagnosed: u32,
    late: u32,
    left: u32,
    different: u32,
    longest: Duration,
    kinds: BTreeMap<&'static str, u32>,
    /// Sentences about failures.
    wrong: Vec<String>,
}

struct Scenario<'a> {
    causeway: PathBuf,
    programs: PathBuf,
    network: &'a Network,
    /// Result and duration of undisturbed runs, by nodes and program.
    known: BTreeMap<(u8, &'static str), (Ending, Duration)>,
    dice: Dice,
    tally: Tally,
}

/// Runs the trials. The last line on standard output is one JSON object.
pub fn run(options: &Options) -> Result<()> {
    if !Path::new("/dev/kvm").exists() {
        bail!("The trials run payload VMs, and this machine has no /dev/kvm; load kvm_intel or kvm_amd");
    }
    if !(2..=8).contains(&options.nodes) || options.count == 0 {
        bail!(
            "{} trials with up to {} nodes are none; choose 1 or more, and 2 to 8 nodes",
            options.count,
            options.nodes
        );
    }
    let network = Network::new(options.nodes)?;
    let mut scenario = Scenario {
        causeway: paths::causeway()?,
        programs: paths::payload_programs()?,
        network: &network,
        known: BTreeMap::new(),
        dice: Dice(options.seed),
        tally: Tally::default(),
    };
    let faults = faults(options.nodes);
    for trial in options.first..options.first.saturating_add(options.count) {
        // A seed per trial, so that it can be repeated alone.
        scenario.dice = Dice(options.seed ^ u64::from(trial) << 32);
        let index = usize::try_from(trial)? % faults.len();
        let (nodes, fault) = *faults.get(index).context("No faults")?;
        // The program changes with each iteration over all links.
        let round = usize::try_from(trial)? / faults.len() + index;
        let (program, arguments) = PROGRAMS[round % PROGRAMS.len()];
        let unix = round % 2 == 1 && !matches!(fault, Fault::Cut(_));
        scenario
            .trial(trial, nodes, fault, (program, arguments), unix)
            .with_context(|| format!("Trial {trial}: {fault:?} of {nodes} nodes with {program}"))?;
    }
    let Tally { faults, ended_first, hangs, undiagnosed, late, left, different, longest, kinds, wrong } =
        scenario.tally;
    println!(
        "{}",
        json!({
            "scenario": "dsm-faults", "seed": options.seed, "first": options.first, "faults": faults, "ended_first": ended_first, "hangs": hangs, "undiagnosed": undiagnosed, "late": late,
            "processes_left": left, "different_results": different, "longest_diagnosis_ms": longest.as_millis(),
            "kinds": kinds, "ok": wrong.is_empty(),
        })
    );
    if !wrong.is_empty() {
        bail!("{} of {faults} faults went wrong: {}", wrong.len(), wrong.join("; "));
    }
    Ok(())
}

impl Scenario<'_> {
    /// Returns a program's result without a fault.
    fn undisturbed(
        &mut self,
        nodes: u8,
        program: &'static str,
        arguments: &[&str],
    ) -> Result<(Ending, Duration)> {
        if let Some(known) = self.known.get(&(nodes, program)) {
            return Ok(known.clone());
        }
        let begin = Instant::now();
        let ending = self.complete(nodes, program, arguments, false, Vec::new(), &[])?;
        if ending.status != Some(0) {
            bail!("An undisturbed run of {program} ended with {:?}: {}", ending.status, ending.console);
        }
        let known = (ending, begin.elapsed());
        self.known.insert((nodes, program), known.clone());
        Ok(known)
    }

    /// Runs a VM to its end. Its console continues after `before`.
    fn complete(
        &self,
        nodes: u8,
        program: &str,
        arguments: &[&str],
        unix: bool,
        flags: Vec<String>,
        before: &[u8],
    ) -> Result<Ending> {
        let folder = tempfile::tempdir().context("Can't make a folder for sockets")?;
        let mut vm = Vm::start(&Plan {
            causeway: &self.causeway,
            program: self.programs.join(program),
            arguments,
            nodes,
            network: (!unix).then_some(self.network),
            folder: folder.path(),
            flags,
        })?;
        let left = vm.await_end(|_| true, RUN);
        if !left.is_empty() {
            bail!("Nodes {left:?} have not ended within {} s: {:?}", RUN.as_secs(), vm.said());
        }
        let console = [before, &vm.console()].concat();
        let mut text = without_times(&console);
        if vm.status() != Some(0) {
            text.extend(vm.said().into_iter().map(|(node, _, line)| format!("\nnode {node}: {line}")));
        }
        Ok(Ending { status: vm.status(), console: text })
    }

    fn trial(
        &mut self,
        trial: u32,
        nodes: u8,
        fault: Fault,
        (program, arguments): (&'static str, &[&str]),
        unix: bool,
    ) -> Result<()> {
        let (expected, time) = self.undisturbed(nodes, program, arguments)?;
        let name = format!("trial {trial} ({fault:?} of {nodes} nodes, {program})");
        let mut window = time * 3 / 4;
        for _ in 0..TRIES {
            let folder = tempfile::tempdir().context("Can't make a folder for sockets")?;
            let checkpoints = folder.path().join("checkpoints");
            let place = checkpoints.display().to_string();
            let mut vm = Vm::start(&Plan {
                causeway: &self.causeway,
                program: self.programs.join(program),
                arguments,
                nodes,
                network: (!unix).then_some(self.network),
                folder: folder.path(),
                flags: ["--checkpoint", &place, "--checkpoint-every", EVERY].map(str::to_owned).to_vec(),
            })?;
            let list = checkpoints.join("checkpoint.json");
            let until = Instant::now() + RUN;
            while !list.exists() && vm.status().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(self.dice.part_of(window));
            if vm.status().is_some() {
                // The program ended first. Its result still counts.
                let ended = vm.await_end(|_| true, END).is_empty();
                let console = without_times(&vm.console());
                let ending = Ending { status: vm.status(), console };
                if ending != expected || !ended {
                    bail!(
                        "Without a fault, with checkpoints, it came to {ending:?} and not {expected:?}: {:?}",
                        vm.said()
                    );
                }
                window /= 2;
                continue;
            }
            if !self.disturb(&mut vm, &name, fault, &expected)? {
                window /= 2;
                continue;
            }
            let console = vm.console();
            drop(vm);
            let list: Value =
                serde_json::from_slice(&std::fs::read(&list).context("There is no checkpoint")?)?;
            let covered = list["console_bytes"].as_u64().and_then(|bytes| usize::try_from(bytes).ok());
            let before = covered.and_then(|covered| console.get(..covered));
            let before = before.with_context(|| {
                format!(
                    "The checkpoint has more of the console than came out: {list}, {} bytes",
                    console.len()
                )
            })?;
            let flags = ["--restart", &place].map(str::to_owned).to_vec();
            let ending = self.complete(nodes, program, arguments, unix, flags, before)?;
            if ending != expected {
                self.tally.different += 1;
                self.tally.wrong.push(format!("{name}: the restart came to {ending:?} and not {expected:?}"));
            }
            return Ok(());
        }
        self.tally.wrong.push(format!("{name}: the program always ended before the fault came"));
        Ok(())
    }

    /// Injects the fault and checks the nodes' reactions. Returns false if the program ended first. A cut takes
    /// milliseconds, like the nodes' end after the program's. No diagnosis is needed if the whole console was printed
    /// before (with a cut: is printed) and all remaining nodes ended with the right code within the time-out.
    fn disturb(&mut self, vm: &mut Vm, name: &str, fault: Fault, expected: &Ending) -> Result<bool> {
        let had_said_all = without_times(&vm.console()) == expected.console;
        let since = Instant::now();
        match fault {
            Fault::Kill(node) => vm.signal(node, Signal::KILL)?,
            Fault::Stop(node) => vm.signal(node, Signal::STOP)?,
            Fault::Cut(ends) => self.network.set_link(ends, false)?,
        }
        let stopped = match fault {
            Fault::Stop(node) => Some(node),
            _ => None,
        };
        let mut left = vm.await_end(|node| Some(node) != stopped, END);
        let ended_in_time = left.is_empty() && since.elapsed() <= LIMIT;
        if let Some(node) = stopped {
            // A stopped process can't end.
            vm.signal(node, Signal::CONT)?;
            left.extend(vm.await_end(|other| other == node, END));
        }
        if let Fault::Cut(ends) = fault {
            self.network.set_link(ends, true)?;
        }
        let said = vm.said();
        let diagnosis =
            said.iter().filter(|(node, _, text)| fault.is_named_by(*node, text)).map(|(_, at, _)| *at).min();
        let statuses = vm.statuses();
        let whole = without_times(&vm.console()) == expected.console;
        let before = had_said_all || !matches!(fault, Fault::Kill(1..) | Fault::Stop(_));
        let killed = |node: usize| matches!(fault, Fault::Kill(dead) if usize::from(dead) == node);
        let mut living = statuses.iter().enumerate().filter(|(node, _)| !killed(*node));
        let rightly = whole && before && living.all(|(_, one)| *one == expected.status);
        let tally = &mut self.tally;
        if diagnosis.is_none() && ended_in_time && left.is_empty() && rightly {
            tally.ended_first += 1;
            progress!("{name}: the program ended first");
            return Ok(false);
        }
        tally.faults += 1;
        *tally.kinds.entry(fault.name()).or_default() += 1;
        let took = diagnosis.map(|at| at.saturating_duration_since(since));
        let others = || {
            said.iter().map(|(node, _, text)| format!("node {node}: {text}")).collect::<Vec<_>>().join(" | ")
        };
        match took {
            None => {
                tally.undiagnosed += 1;
                tally.wrong.push(format!("{name}: nobody named node and link; nodes ended with {statuses:?}, the console is {}whole: {}", if whole { "" } else { "not " }, others()));
            }
            Some(took) => {
                tally.longest = tally.longest.max(took);
                if took > LIMIT {
                    tally.late += 1;
                    tally.wrong.push(format!("{name}: the diagnosis took {took:?}"));
                }
            }
        }
        if !left.is_empty() {
            tally.hangs += 1;
            tally.left += u32::try_from(left.len()).unwrap_or(u32::MAX);
            tally.wrong.push(format!("{name}: nodes {left:?} were left: {}", others()));
        }
        let told = took.map_or_else(
            || "told by nobody".to_owned(),
            |took| format!("told after {} ms", took.as_millis()),
        );
        progress!("{name}: {told}");
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_of_every_link_has_its_faults() {
        let all = faults(3);
        assert_eq!(all.len(), (1 + 3) * 5);
        for node in 0..3 {
            for fault in [Fault::Kill(node), Fault::Stop(node)] {
                assert!(all.contains(&(3, fault)), "{fault:?}");
            }
        }
        for ends in [(0, 1), (0, 2), (1, 2)] {
            assert!(all.contains(&(3, Fault::Cut(ends))));
        }
    }

    #[test]
    fn a_diagnosis_names_node_and_link_and_comes_from_somebody_else() {
        let text = "causeway: The link unix:/x/1 to node 1 was closed: its monitor has died or was ended";
        assert!(Fault::Kill(1).is_named_by(0, text));
        assert!(!Fault::Kill(1).is_named_by(1, text));
        assert!(!Fault::Kill(2).is_named_by(0, text));
        assert!(!Fault::Kill(1).is_named_by(0, "causeway: Node 1 is gone"));
        assert!(!Fault::Kill(1).is_named_by(0, &text.replace("node 1 ", "node 11 ")));
        let silent = "causeway: Node 2 has not been heard from for 900 ms over the link tcp:10.77.2.2:7000: its host is down";
        assert!(Fault::Cut((0, 2)).is_named_by(0, silent) && !Fault::Cut((0, 1)).is_named_by(0, silent));
    }

    #[test]
    fn results_are_compared_without_times() {
        let json = |ns: u32| format!("{{\"program\":\"x\",\"ns\":{ns},\"serial_ns\":{ns},\"checksum\":7}}\n");
        assert_eq!(without_times(json(1).as_bytes()), without_times(json(2).as_bytes()));
        assert_ne!(without_times(json(1).as_bytes()), without_times(json(1).replace('7', "8").as_bytes()));
        assert_eq!(
            without_times(b"turns: 5 rounds, 77 ns each, 0 wrong\n"),
            "turns: 5 rounds, ns each, 0 wrong"
        );
    }
}
