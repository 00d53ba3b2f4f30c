//! Group `dsm`: programs on two nodes of one vCPU each against one node of one vCPU, coherence modes, and the cost of single events.
//!
//! Each node is a process on a CPU of its own, including its service threads. Links are Unix sockets.

mod events;
pub mod nodes;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, median};
use crate::programs::Programs;
use nodes::{Coherence, Late, Ran, run as run_nodes, run_within};

/// Time-out of a program in an unsuitable coherence mode, for comparison. In the default mode it must complete.
const COMPARED: Duration = Duration::from_secs(100);

/// Minimum of pairs per program. On a machine with shared memory bandwidth, runs differ by up to a tenth. With three pairs a median
/// varies by half of that.
const PAIRS: usize = 5;
/// Minimum duration of pairs per program. Five pairs of EP take a few seconds, in which the machine's host may have been busy all the
/// time.
const PAIRS_TIME: Duration = Duration::from_secs(60);

/// Minimum of parallel runs of two, and of their duration.
const AT_ONCE: usize = 3;
const AT_ONCE_TIME: Duration = Duration::from_secs(30);

/// A program, its name, its arguments, those for a quick run, and the required speed-up of two nodes.
struct Job {
    program: &'static str,
    what: &'static str,
    arguments: &'static [&'static str],
    quick: &'static [&'static str],
    aim: f64,
}

const JOBS: &[Job] = &[
    Job { program: "ep", what: "EP, 2^24 pairs", arguments: &["m=24"], quick: &["m=18"], aim: 1.9 },
    Job {
        program: "matrix",
        what: "matrix multiplication, 2048 by 2048",
        arguments: &["n=2048"],
        quick: &["n=128"],
        aim: 1.6,
    },
    Job {
        program: "jacobi",
        what: "Jacobi, 4096 by 4096, 40 steps",
        arguments: &["n=4096", "steps=40"],
        quick: &["n=256", "steps=5"],
        aim: 1.6,
    },
    Job {
        program: "cg",
        what: "CG, 262144 rows of 65, 20 iterations",
        arguments: &["n=256K", "band=32", "iterations=20"],
        quick: &["n=4096", "iterations=5"],
        aim: 1.2,
    },
    Job {
        program: "integer-sort",
        what: "integer sort, 2^22 keys, 10 rounds",
        arguments: &["n=4M", "range=2K", "rounds=10"],
        quick: &["n=128K", "rounds=2"],
        aim: 1.1,
    },
];

/// Measures the group; see [`super::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let (host, cpus) = match super::kvm_and_cpus("dsm")? {
        Ok(both) => both,
        Err(report) => return Ok(report),
    };
    let mut conditions = Conditions::now(Some(&host), "4 KiB, shared by userfaultfd");
    if !std::path::Path::new("/dev/userfaultfd").exists() {
        return Ok(super::skipped("dsm", "there is no /dev/userfaultfd".to_owned(), conditions));
    }
    let awake = crate::peers::keep_awake();
    conditions.scheduling = match awake {
        Some(_) => {
            "each node on a CPU of its own that doesn't idle; its threads for memory before ordinary ones"
        }
        None => "each node on a CPU of its own, which may idle; its threads for memory before ordinary ones",
    };
    let programs = Programs::build()?;
    let mut figures = Figures::of("dsm");
    let mut compared = Vec::new();
    let mut bounds = Vec::new();
    for job in JOBS {
        let arguments = if quick { job.quick } else { job.arguments };
        let path = programs.path(job.program);
        eprintln!("bench: dsm: {}", job.what);
        let mut last = None;
        let (least, time) = if quick { (1, Duration::ZERO) } else { (PAIRS, PAIRS_TIME) };
        let pairs = Pairs::take_for(
            least,
            time,
            || {
                let ran = run_nodes(&cpus, Coherence::SingleWriter, &path, arguments)?;
                let speed = speed(&ran)?;
                last = Some(ran);
                Ok(speed)
            },
            || speed(&run_nodes(&cpus[..1], Coherence::SingleWriter, &path, arguments)?),
        )?;
        figures.add(Figure::new(
            &format!("speed_{}", job.program),
            job.what,
            "runs/s",
            Better::Higher,
            "one node of one vCPU",
            &pairs,
            (!quick).then_some(job.aim),
        ))?;
        let (least, time) = if quick { (1, Duration::ZERO) } else { (AT_ONCE, AT_ONCE_TIME) };
        let allowed = at_once(least, time, &cpus, &path, arguments, &pairs)?;
        bounds.push(json!({
            "program": job.what,
            "two_at_once_by_one": allowed.together,
            "slower_of_two_by_one": allowed.slower,
        }));
        for coherence in Coherence::ALL {
            compared.push(match (coherence, &last) {
                (Coherence::SingleWriter, Some(ran)) => comparison(job.what, coherence, ran)?,
                _ => compare(job.what, coherence, &cpus, &path, arguments)?,
            });
        }
    }
    for (program, what, arguments) in [
        // Slower on two nodes in every coherence mode: too small for a measurement against one node.
        ("search", "breadth-first search, 2^14 vertices, 4 roots", &["scale=14", "roots=4"][..]),
        ("producer-consumer", "producer-consumer, 2000 messages", &["messages=2000", "pace=20K"]),
        ("locks", "ticket lock, 2000 times each", &["times=2000", "outside=2K"]),
        ("false-sharing", "false sharing, 2000 stores each", &["times=2000", "pace=20K"]),
    ] {
        for coherence in Coherence::ALL {
            compared.push(compare(what, coherence, &cpus, &programs.path(program), arguments)?);
        }
    }
    eprintln!("bench: dsm: single events");
    let events = events::all(&programs, &cpus, quick)?;
    println!("{}", events::table(&events));
    println!("{}", comparison_table(&compared));
    println!("{}", bounds_table(&bounds));
    drop(awake);
    conditions.finish();
    let details = json!({ "comparison": compared, "events": events, "bounds": bounds });
    Ok(Report { group: "dsm", skipped: None, conditions, figures: figures.all, details })
}

/// Returns runs per second of the part that the program measures.
fn speed(ran: &Ran) -> anyhow::Result<f64> {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let nanoseconds = ran.number("ns")? as f64;
    Ok(1e9 / nanoseconds)
}

/// The machine's limits: two VMs of one node that each run the whole program in parallel, against one of them alone. They share
/// caches, memory and other processor resources, and nothing else. Medians of some runs, and of the pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Allowed {
    /// Speed-up of the two together.
    together: f64,
    /// Speed-up if both were as slow as the slower one in each run: the limit of a program whose two halves synchronize once, at the
    /// end.
    slower: f64,
}

impl Allowed {
    /// Computes the limits from parallel runs of two and from single runs, all in runs per second.
    fn of(both: &[(f64, f64)], alone: &[f64]) -> Self {
        let middle = |speeds: &mut dyn Iterator<Item = f64>| {
            let mut sorted: Vec<f64> = speeds.collect();
            sorted.sort_unstable_by(f64::total_cmp);
            median(&sorted)
        };
        let one = middle(&mut alone.iter().copied());
        Self {
            together: middle(&mut both.iter().map(|(first, other)| first + other)) / one,
            slower: middle(&mut both.iter().map(|(first, other)| 2.0 * first.min(*other))) / one,
        }
    }
}

/// Measures [`Allowed`]: at least this many runs, and this long.
fn at_once(
    least: usize,
    time: Duration,
    cpus: &[usize],
    program: &Path,
    arguments: &[&str],
    pairs: &Pairs,
) -> anyhow::Result<Allowed> {
    let began = Instant::now();
    let mut both = Vec::new();
    while both.len() < least || began.elapsed() < time {
        let run = |cpu: usize| run_nodes(&cpus[cpu..=cpu], Coherence::SingleWriter, program, arguments);
        both.push(std::thread::scope(|scope| {
            let other = scope.spawn(|| speed(&run(1)?));
            let first = run(0).and_then(|ran| speed(&ran));
            let other = other.join().map_err(|_| anyhow::anyhow!("A thread that measures panicked"))?;
            anyhow::Ok((first?, other?))
        })?);
    }
    let alone: Vec<f64> = pairs.pairs.iter().map(|(_, one)| *one).collect();
    Ok(Allowed::of(&both, &alone))
}

/// Formats [`Allowed`] of all programs as a table.
fn bounds_table(bounds: &[Value]) -> String {
    let mut text = String::from(
        "| program | two at once, each by itself, by one alone | were both as slow as the slower one |\n|---|---|---|\n",
    );
    for row in bounds {
        let number = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        text.push_str(&format!(
            "| {} | {:.2} | {:.2} |\n",
            row["program"].as_str().unwrap_or_default(),
            number("two_at_once_by_one"),
            number("slower_of_two_by_one"),
        ));
    }
    text
}

/// Runs a program in one coherence mode; returns the result.
fn compare(
    what: &str,
    coherence: Coherence,
    cpus: &[usize],
    program: &Path,
    arguments: &[&str],
) -> anyhow::Result<Value> {
    match run_within(COMPARED, cpus, coherence, program, arguments) {
        Ok(ran) => comparison(what, coherence, &ran),
        Err(error) if error.is::<Late>() => Ok(
            json!({ "program": what, "coherence": coherence.name(), "not_ended_after_s": COMPARED.as_secs() }),
        ),
        Err(error) => Err(error),
    }
}

/// Returns a coherence mode's result for one program.
fn comparison(what: &str, coherence: Coherence, ran: &Ran) -> anyhow::Result<Value> {
    let (stalls, stalled) = ran.stalls(&["read", "write", "upgrade", "trapped"]);
    Ok(json!({
        "program": what, "coherence": coherence.name(), "ns": ran.number("ns")?, "stalls": stalls, "stalled_ns": stalled,
        "messages": ran.sum("/messages"), "bytes": ran.sum("/bytes"),
        "trapped": ran.sum("/emulated"), "fetched_ahead": ran.sum("/fetched_ahead"),
    }))
}

/// Formats the comparison as a Markdown table.
fn comparison_table(compared: &[Value]) -> String {
    let mut text = String::from(
        "| program | pages are kept by | time ms | stalls | stalled ms | trapped stores | messages | bytes |\n|---|---|---|---|---|---|---|---|\n",
    );
    for row in compared {
        let number = |name: &str| row[name].as_u64().unwrap_or(0);
        let [program, coherence] =
            ["program", "coherence"].map(|name| row[name].as_str().unwrap_or_default());
        if let Some(after) = row["not_ended_after_s"].as_u64() {
            text.push_str(&format!("| {program} | {coherence} | not ended after {after} s | | | | | |\n"));
            continue;
        }
        text.push_str(&format!(
            "| {program} | {coherence} | {} | {} | {} | {} | {} | {} |\n",
            number("ns") / 1_000_000,
            number("stalls"),
            number("stalled_ns") / 1_000_000,
            number("trapped"),
            number("messages"),
            number("bytes"),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::Allowed;

    /// Two that are each as fast as one alone have a speed-up of two. If one is slower, a program of two halves waits for that one.
    #[test]
    fn what_a_machine_allows() {
        let even = Allowed::of(&[(1.0, 1.0)], &[1.0]);
        assert_eq!(even, Allowed { together: 2.0, slower: 2.0 });
        let uneven = Allowed::of(&[(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)], &[1.0, 1.0, 9.0]);
        assert_eq!(uneven, Allowed { together: 1.5, slower: 1.0 });
    }
}
