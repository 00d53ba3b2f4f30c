//! Litmus tests in real payload VMs: `lab dsm-litmus`.
//!
//! Runs natively, without emulated hosts. The monitor starts a payload VM per number of threads, in which the program `litmus` prints all
//! outcomes of every test. The model of the crate `litmus` decides which of them x86-TSO allows.

mod kept;
mod tally;

use crate::{paths, progress};
use anyhow::{Context, Result, bail};
use kept::{Conditions, Kept};
use litmus::model::{Order, outcomes};
use litmus::{Test, Variant, corpus, fill};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tally::{Kind, Tally};

/// Parameters of `lab dsm-litmus`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of nodes of the VM.
    pub nodes: u32,
    /// Number of runs per test.
    pub iterations: u64,
    /// Number of runs per test with locked accesses across pages, which may be slow. Default: a thousandth of `iterations`.
    pub split_lock_iterations: Option<u64>,
    /// vCPUs of all nodes. Default: one per thread, and with several nodes at least one more than nodes. Then two threads share a node in
    /// some rounds, and are on different nodes in others.
    pub cpus: Option<u32>,
    /// How threads synchronize: `each`, `round`, `mixed` or `clock`. The default depends on processors and nodes.
    pub meeting: Option<String>,
    /// Nanoseconds between two instances, if threads synchronize by the clock.
    pub interval: Option<u64>,
    /// Instances per round. Default: 4096, which is also the limit for accesses across a boundary, and 256 for locked ones.
    pub round: Option<u64>,
    /// Filter: tests whose names contain one of these, or whose name is one of these. Empty: all.
    pub only: Vec<String>,
    /// Further arguments for `causeway run`.
    pub run_arguments: Vec<String>,
    /// File of results. Tests with a stored result aren't run again.
    pub results: Option<PathBuf>,
}

impl Options {
    fn iterations_of(&self, kind: Kind) -> u64 {
        match kind {
            Kind::SplitLocks => self.split_lock_iterations.unwrap_or((self.iterations / 1000).max(1)),
            Kind::Within | Kind::Across => self.iterations,
        }
    }

    fn chosen<'a>(&self, tests: &'a [Test]) -> Result<Vec<Variant<'a>>> {
        let all: Vec<_> = tests.iter().flat_map(corpus::variants).collect();
        // A complete name selects that test only, and not those that end with it.
        let named: Vec<bool> =
            self.only.iter().map(|part| all.iter().any(|variant| variant.name() == *part)).collect();
        let wanted = |variant: &Variant<'_>| {
            let name = variant.name();
            let is = |(part, named): (&String, &bool)| {
                if *named { name == *part } else { name.contains(part.as_str()) }
            };
            self.only.is_empty() || self.only.iter().zip(&named).any(is)
        };
        let chosen: Vec<_> = all.into_iter().filter(wanted).collect();
        if chosen.is_empty() {
            bail!(
                "No litmus test has {} in its name; `lab dsm-litmus --list` names them",
                self.only.join(" or ")
            );
        }
        Ok(chosen)
    }
}

/// A line of the program `litmus`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Line {
    test: String,
    placement: String,
    nodes: u32,
    iterations: u64,
    /// Of these, runs with every thread on a node of its own.
    apart: u64,
    lost: u64,
    ns: u64,
    /// Values, number of occurrences, and whether every thread was on a node of its own.
    outcomes: Vec<(Vec<u64>, u64, bool)>,
}

impl Line {
    fn is_of(&self, variant: &Variant<'_>) -> bool {
        self.test == variant.test.name && self.placement == variant.placement.name()
    }
}

/// Parameters of one file's run.
#[derive(Debug, Clone, Copy)]
struct Plan<'a> {
    vcpus: u32,
    iterations: u64,
    meeting: &'a str,
    round: u64,
    interval: Option<u64>,
}

impl Plan<'_> {
    /// Returns the conditions of its results.
    fn conditions(&self, files: u64, options: &Options) -> Conditions {
        Conditions {
            files,
            nodes: options.nodes,
            vcpus: self.vcpus,
            iterations: self.iterations,
            meeting: self.meeting.to_owned(),
            round: self.round,
            interval: self.interval,
            run_arguments: options.run_arguments.clone(),
        }
    }

    /// Returns the same with few, widely spaced runs, for nodes that synchronize by the clock. Runs in close succession exceed their
    /// interval, so the threads run in sequence, and one in 10,000 runs interleaves. Widely spaced, one in five interleaves.
    fn spaced(self) -> Self {
        Self {
            iterations: self.iterations.min(SPACED_RUNS),
            round: self.round.min(256),
            interval: Some(SPACED),
            ..self
        }
    }
}

/// Number of spaced runs per test, and their interval in nanoseconds: several times a page's transfer to another node and back.
const SPACED_RUNS: u64 = 1024;
const SPACED: u64 = 1_500_000;

/// Prints the tests and the outcomes that the model allows.
///
/// # Errors
/// No test matches.
pub fn list(options: &Options) -> Result<()> {
    let tests = corpus::all()?;
    for variant in options.chosen(&tests)? {
        let allowed = outcomes(variant.test, Order::Tso, variant.memory());
        let asked = allowed.iter().any(|outcome| variant.test.asks_about(outcome));
        let verdict = if asked { "allowed" } else { "forbidden" };
        let (threads, count) = (variant.test.threads.len(), allowed.len());
        // The reader may have closed the pipe.
        let _ = writeln!(
            std::io::stdout(),
            "{:28} {threads} threads, {count:3} outcomes, the one that is asked about is {verdict}",
            variant.name()
        );
    }
    Ok(())
}

/// Runs the tests; prints one JSON line on stdout.
///
/// # Errors
/// A forbidden outcome, a test that didn't run, no weak outcome of store buffering, or a program that can't be started.
pub fn run(options: &Options) -> Result<()> {
    if options.iterations == 0 || options.split_lock_iterations == Some(0) {
        bail!("0 iterations would show nothing");
    }
    let causeway = paths::causeway()?;
    check_nodes(&causeway, options.nodes)?;
    if !Path::new("/dev/kvm").exists() {
        bail!("The litmus tests run in a VM on this machine, and there is no /dev/kvm");
    }
    let program = program()?;
    let tests = corpus::all()?;
    let chosen = options.chosen(&tests)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let folder = tempfile::tempdir().context("Can't make a folder for the litmus programs")?;
    let mut kept = options.results.as_deref().map(Kept::open).transpose()?;
    let files = match &kept {
        Some(_) => {
            let monitor = std::fs::read(&causeway);
            let monitor = monitor.with_context(|| format!("Can't read {}", causeway.display()))?;
            kept::of(&[&monitor, &program])
        }
        None => 0,
    };
    if let Some(others) = kept.as_ref().map(|kept| kept.of_others(files)).filter(|others| *others > 0) {
        progress!("{others} results of another monitor, or of another litmus program, aren't used");
    }

    let mut groups: BTreeMap<(usize, Kind), Vec<Variant<'_>>> = BTreeMap::new();
    for variant in &chosen {
        groups.entry((variant.test.threads.len(), Kind::of(variant))).or_default().push(*variant);
    }
    let mut tally = Tally::default();
    let mut spaced_iterations = 0;
    let file = folder.path().join("litmus");
    for ((threads, kind), variants) in groups {
        let slow = kind == Kind::SplitLocks;
        let iterations = options.iterations_of(kind);
        let wide = u32::try_from(threads).unwrap_or(u32::MAX);
        let plan = Plan {
            vcpus: options.cpus.unwrap_or(if options.nodes == 1 {
                wide
            } else {
                wide.max(options.nodes + 1)
            }),
            iterations,
            // If threads outnumber processors, each instance would wait for a time slice; on several nodes, for some messages.
            meeting: options.meeting.as_deref().unwrap_or(match options.nodes {
                1 if threads <= processors => "mixed",
                1 => "round",
                _ => "clock",
            }),
            round: match kind {
                Kind::Within => options.round.unwrap_or(4096),
                Kind::Across => options.round.unwrap_or(4096).min(4096),
                Kind::SplitLocks => options.round.unwrap_or(256).min(256),
            },
            interval: options.interval,
        };
        // A chosen interval is used for all runs.
        let spaced = (options.nodes > 1 && plan.meeting == "clock" && options.interval.is_none())
            .then(|| plan.spaced());
        spaced_iterations = spaced_iterations.max(spaced.map_or(0, |plan| plan.iterations));
        for plan in [Some(plan), spaced].into_iter().flatten() {
            let conditions = plan.conditions(files, options);
            let mut left = Vec::new();
            for variant in &variants {
                match kept.as_ref().and_then(|kept| kept.line(&conditions, variant)) {
                    Some(line) => {
                        check(variant, line, &plan, options)
                            .context("A result that was kept can't be used")?;
                        tally.add(variant, line, slow);
                    }
                    None => left.push(*variant),
                }
            }
            if left.len() < variants.len() {
                let known = variants.len() - left.len();
                progress!("{known} of {} tests weren't run: their results were kept", variants.len());
            }
            if left.is_empty() {
                continue;
            }
            std::fs::write(&file, fill(&program, &left)?)
                .with_context(|| format!("Can't write {}", file.display()))?;
            execute(&causeway, &file, &plan, options, |line| {
                let here = left.iter().position(|variant| line.is_of(variant));
                let variant =
                    left.remove(here.with_context(|| format!("Nobody asked for the test {}", line.test))?);
                check(&variant, &line, &plan, options)?;
                tally.add(&variant, &line, slow);
                kept.as_mut().map_or(Ok(()), |kept| kept.add(&conditions, &line))
            })?;
            if let Some(variant) = left.first() {
                bail!("The program ended before it ran {}", variant.name());
            }
        }
    }
    let (interleaved_seen, interleaved_possible) =
        (tally.count(|sum| sum.interleaved.1), tally.count(|sum| sum.interleaved.0));
    println!(
        "{}",
        json!({
            "scenario": "dsm-litmus", "nodes": options.nodes, "tests": tally.tests.len(), "iterations": options.iterations,
            "spaced_iterations": spaced_iterations,
            "split_lock_tests": tally.count(|sum| sum.slow), "split_lock_iterations": options.iterations_of(Kind::SplitLocks),
            "forbidden": tally.forbidden, "weak_seen": tally.count(|sum| sum.weak.1), "weak_possible": tally.count(|sum| sum.weak.0),
            "interleaved_seen": interleaved_seen, "interleaved_possible": interleaved_possible, "ok": tally.broken.is_empty(),
        })
    );
    if !tally.broken.is_empty() {
        bail!("x86-TSO forbids what was seen: {}", tally.broken.join(", "));
    }
    // They come from the processor's own store buffers, which threads on one node show. Without them, these threads never ran in
    // parallel.
    if tally.buffering == (true, false) && options.iterations >= 100_000 && processors > 1 {
        bail!(
            "Store buffering never showed its weak outcome, which every x86 processor has: the threads don't run at the same time"
        );
    }
    if options.nodes > 1 && interleaved_possible > 0 && interleaved_seen == 0 && options.iterations >= 10_000
    {
        bail!(
            "No test showed that its threads on different nodes ran at the same time: all outcomes are those of one thread after the other"
        );
    }
    Ok(())
}

/// Rejects a line that doesn't account for all requested runs.
fn check(variant: &Variant<'_>, line: &Line, plan: &Plan<'_>, options: &Options) -> Result<()> {
    let counted = line.outcomes.iter().fold(0_u64, |all, (_, count, _)| all.saturating_add(*count));
    if line.lost > 0
        || line.iterations < plan.iterations
        || counted != line.iterations
        || line.nodes != options.nodes
    {
        bail!(
            "{} ran {} times on {} nodes, and {counted} outcomes were counted",
            variant.name(),
            line.iterations,
            line.nodes
        );
    }
    Ok(())
}

/// Rejects more nodes than the monitor supports.
fn check_nodes(causeway: &Path, nodes: u32) -> Result<()> {
    match nodes {
        0 => bail!("A VM can't span 0 nodes; give --nodes 1 or more"),
        1 => return Ok(()),
        _ => {}
    }
    let help = Command::new(causeway).args(["run", "--help"]).output();
    let help = help.with_context(|| format!("{} can't be started", causeway.display()))?;
    if !String::from_utf8_lossy(&help.stdout).contains("--nodes") {
        bail!(
            "{} can't run a VM on {nodes} nodes: its `run` has no --nodes; build a newer one, or leave --nodes out",
            causeway.display()
        );
    }
    Ok(())
}

/// Builds the program and returns its file.
fn program() -> Result<Vec<u8>> {
    let path = paths::payload_programs()?.join("litmus");
    std::fs::read(&path).with_context(|| format!("Can't read {}", path.display()))
}

/// Runs a file in a VM, and calls `each` with every line as it arrives.
fn execute(
    causeway: &Path,
    file: &Path,
    plan: &Plan<'_>,
    options: &Options,
    mut each: impl FnMut(Line) -> Result<()>,
) -> Result<()> {
    // The nodes must end with the lab, even if it is killed: setpriv requests that from the kernel.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(causeway);
    command.args(["run", "--memory", "128M", "--cpus", &plan.vcpus.to_string()]);
    if options.nodes > 1 {
        command.args(["--nodes", &options.nodes.to_string()]);
    }
    command.args(&options.run_arguments).arg("--payload").arg(file);
    command.arg(format!("iterations={}", plan.iterations));
    command.args([format!("meeting={}", plan.meeting), format!("round={}", plan.round)]);
    command.args(plan.interval.map(|interval| format!("interval={interval}")));
    let mut child =
        command.stdin(Stdio::null()).stderr(Stdio::inherit()).stdout(Stdio::piped()).spawn().with_context(
            || {
                format!(
                    "setpriv (Debian's util-linux), which is to start {}, can't be started",
                    causeway.display()
                )
            },
        )?;
    let output = child.stdout.take().context("The monitor's output can't be read")?;
    let result = BufReader::new(output).lines().try_for_each(|line| {
        let line = line.context("The monitor's output can't be read")?;
        each(serde_json::from_str(&line).with_context(|| format!("The program printed {line:?}"))?)
    });
    if result.is_err() {
        // It would continue with tests without a reader.
        let _ = child.kill();
    }
    let status = child.wait().context("The monitor's end can't be awaited")?;
    result?;
    if !status.success() {
        bail!("The VM of {} vCPUs with the tests ended with {status}", plan.vcpus);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::tally::{Verdict, judge};
    use super::*;
    use litmus::model::Outcome;
    use payload_litmus::table::Placement;

    /// Nine runs of a test with locations on separate pages.
    pub(super) fn line(test: &str, outcomes: Vec<(Vec<u64>, u64, bool)>) -> Line {
        Line {
            test: test.into(),
            placement: "pages".into(),
            nodes: 2,
            iterations: 9,
            apart: 4,
            lost: 0,
            ns: 1,
            outcomes,
        }
    }

    /// An injected forbidden outcome is found, and a weak one is distinguished from a strong one.
    #[test]
    fn outcomes_are_judged_by_the_model() {
        let tests = corpus::all().unwrap();
        let named = |name: &str| tests.iter().find(|test| test.name == name).unwrap();
        let judged = |name: &str, placement, seen: &[(Outcome, u64)]| {
            let seen: Vec<_> = seen.iter().map(|(values, count)| (values.clone(), *count, true)).collect();
            judge(&Variant { test: named(name), placement }, &seen)
        };
        // Registers 0:EAX, 1:EAX, then x and y.
        let verdict = judged(
            "SB",
            Placement::Pages,
            &[(vec![0, 0, 1, 1], 5), (vec![0, 1, 1, 1], 7), (vec![0, 0, 0, 1], 2)],
        );
        let expected = Verdict {
            forbidden: 2,
            weak: 5,
            weak_possible: 1,
            weak_apart: 5,
            // Neither thread can have been first: the weak ones, both stores before both loads, and one without an explanation.
            interleaved: 7,
            interleaved_possible: 1,
            culprits: vec![vec![0, 0, 0, 1]],
        };
        assert_eq!(verdict, expected);
        let verdict = judged("SB+mfences", Placement::Line, &[(vec![0, 0, 1, 1], 1)]);
        assert_eq!((verdict.forbidden, verdict.weak_possible), (1, 0));
        // Torn: allowed across a boundary only.
        let torn = [(vec![0x0101, 0x0101_0101], 3)];
        assert_eq!(judged("wide-CoRR", Placement::Line, &torn).forbidden, 3);
        let verdict = judged("wide-CoRR", Placement::Cross, &torn);
        assert_eq!((verdict.forbidden, verdict.weak), (0, 3));
    }

    /// A test that runs twice counts once, with the outcomes of both runs.
    #[test]
    fn runs_of_a_test_count_together() {
        let tests = corpus::all().unwrap();
        let test = tests.iter().find(|test| test.name == "SB").unwrap();
        let variant = Variant { test, placement: Placement::Pages };
        let mut tally = Tally::default();
        let line = |outcomes| line("SB", outcomes);
        tally.add(&variant, &line(vec![(vec![0, 1, 1, 1], 9, true)]), false);
        assert_eq!((tally.count(|sum| sum.interleaved.0), tally.count(|sum| sum.interleaved.1)), (1, 0));
        tally.add(&variant, &line(vec![(vec![1, 1, 1, 1], 2, true), (vec![0, 0, 1, 1], 7, false)]), false);
        assert_eq!((tally.count(|sum| sum.interleaved.0), tally.count(|sum| sum.interleaved.1)), (1, 1));
        assert_eq!((tally.count(|sum| sum.weak.0), tally.count(|sum| sum.weak.1)), (1, 1));
        assert_eq!((tally.tests.len(), tally.buffering, tally.broken.len()), (1, (true, true), 0));
    }

    #[test]
    fn nonsense_is_refused_before_anything_runs() {
        let options = |only: &str| Options {
            nodes: 1,
            iterations: 1,
            split_lock_iterations: None,
            cpus: None,
            interval: None,
            meeting: None,
            round: None,
            only: vec![only.into()],
            run_arguments: Vec::new(),
            results: None,
        };
        assert!(
            options("nonsense").chosen(&corpus::all().unwrap()).unwrap_err().to_string().contains("--list")
        );
        let none = Options { iterations: 0, ..options("SB") };
        let none_split = Options { split_lock_iterations: Some(0), ..options("SB") };
        for options in [none, none_split] {
            assert!(run(&options).unwrap_err().to_string().contains("0 iterations"));
        }
        // By default a thousandth, but at least one.
        let split = |iterations, split_lock_iterations| {
            let options = Options { iterations, split_lock_iterations, ..options("SB") };
            (options.iterations_of(Kind::SplitLocks), options.iterations_of(Kind::Across))
        };
        assert_eq!([split(9_000, None), split(9, None), split(9, Some(70))], [(9, 9_000), (1, 9), (70, 9)]);
        let found = |only: &str| options(only).chosen(&corpus::all().unwrap()).unwrap().len();
        assert_eq!(found("SB (pages)"), 1);
        assert_eq!(found("SB (pages"), 3);
        // `true` prints no help, so it has no --nodes.
        let error = check_nodes("/bin/true".as_ref(), 2).unwrap_err().to_string();
        assert!(error.contains("can't run a VM on 2 nodes"), "{error}");
        assert!(check_nodes("/bin/true".as_ref(), 0).is_err());
    }
}
