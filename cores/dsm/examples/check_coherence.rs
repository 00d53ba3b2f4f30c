//! Explores the protocol with the model checker: every order of events of small machines, and of larger ones up to a limit of states.
//!
//! `cargo run --release -p dsm --example check_coherence -- --states N [--threads N] [--plant NAME] [--each N]`
//!
//! Progress goes to stderr, one line of JSON to stdout. Exit status 1: a check failed, or, with `--plant`, no check found the injected bug.

#[path = "../tests/it/explore/model.rs"]
mod model;
#[path = "../tests/it/explore/scenarios.rs"]
mod scenarios;

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use dsm::Plant;
use dsm_testbed::world::Setup;

#[derive(Parser)]
#[command(about = "Explores all orders of events of small machines that share memory")]
struct Arguments {
    /// How many distinct states to look at, in all.
    #[arg(long, default_value_t = 1_000_000)]
    states: usize,
    /// Most transitions of one machine; a state takes about 8 bytes of memory, an open one a few kilobytes.
    #[arg(long, default_value_t = 8_000_000)]
    each: usize,
    /// Number of threads that explore states.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// A fault that is put in, and must be found.
    #[arg(long)]
    plant: Option<Planted>,
    /// Only machines whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum Planted {
    DropAckStamp,
    ApplyTwice,
    ReleaseEarly,
    SkipAcks,
    NeverYield,
    ForgetEarly,
    ForgetOwners,
    HostClockAges,
}

impl Planted {
    const fn plant(self) -> Plant {
        match self {
            Self::DropAckStamp => Plant::DropAckStamp,
            Self::ApplyTwice => Plant::ApplyTwice,
            Self::ReleaseEarly => Plant::ReleaseEarly,
            Self::SkipAcks => Plant::SkipAcks,
            Self::NeverYield => Plant::NeverYield,
            Self::ForgetEarly => Plant::ForgetEarly,
            Self::ForgetOwners => Plant::ForgetOwners,
            Self::HostClockAges => Plant::HostClockAges,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let plant = arguments.plant.map_or(Plant::None, Planted::plant);
    let start = Instant::now();
    let (mut states, mut transitions, mut depth) = (0, 0, 0);
    let (mut machines, mut complete) = (0, 0);
    let mut fault = None;
    for scenario in scenarios::all().into_iter().filter(|scenario| scenario.name.contains(&arguments.only)) {
        if states >= arguments.states {
            break;
        }
        let begin = Instant::now();
        let setup = Setup { plant, ..scenario.setup };
        let found = model::explore(setup, None, arguments.each, arguments.threads);
        states += found.states;
        transitions += found.transitions;
        depth = depth.max(found.depth);
        machines += 1;
        complete += usize::from(found.complete);
        let how = if found.complete { "all" } else { "cut" };
        let seconds = begin.elapsed().as_secs_f64();
        eprintln!(
            "{:>10} states ({how}), {:>10} transitions, {seconds:>7.1} s: {}",
            found.states, found.transitions, scenario.name
        );
        if let Some((text, way)) = found.fault {
            eprintln!("{text}");
            for step in &way {
                eprintln!("    {step}");
            }
            fault = Some(serde_json::json!({ "machine": scenario.name, "text": text, "steps": way.len() }));
            break;
        }
    }
    let result = serde_json::json!({
        "states": states,
        "transitions": transitions,
        "machines": machines,
        "explored_completely": complete,
        "longest_run": depth,
        "seconds": start.elapsed().as_secs_f64(),
        "fault": fault,
    });
    println!("{result}");
    if fault.is_some() == arguments.plant.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
