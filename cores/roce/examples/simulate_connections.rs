//! Runs the simulator over many seeds.
//!
//! `cargo run --release -p roce --example simulate_connections -- --seeds N [--first S] [--plant skip-psn|forget-replay|early-ack]`
//!
//! Progress goes to stderr, one line of JSON to stdout. Exit status 1 when a run wasn't clean; with a plant, when all were.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use roce::config::Plant;
use roce_testbed::{Options, Report, run};

#[derive(Parser)]
#[command(about = "Runs the simulator of RoCEv2 connections over many seeds")]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// A fault that is put in, and must be found.
    #[arg(long)]
    plant: Option<Planted>,
    /// Tells of every packet on stderr.
    #[arg(long)]
    trace: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Planted {
    SkipPsn,
    ForgetReplay,
    EarlyAck,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let plant = match arguments.plant {
        None => Plant::None,
        Some(Planted::SkipPsn) => Plant::SkipPsn,
        Some(Planted::ForgetReplay) => Plant::ForgetReplay,
        Some(Planted::EarlyAck) => Plant::EarlyAck,
    };
    let trace: Option<fn(&str)> = if arguments.trace { Some(|line| eprintln!("{line}")) } else { None };
    let options = Options { plant, trace };
    let start = Instant::now();
    let mut total = Report::default();
    let mut violation = None;
    let mut done = 0;
    let mut told = start;
    for seed in arguments.first..arguments.first + arguments.seeds {
        match run(seed, &options) {
            Ok(report) => total.add(&report),
            Err(found) => {
                violation = Some(found);
                break;
            }
        }
        done += 1;
        if told.elapsed().as_secs() >= 10 {
            told = Instant::now();
            eprintln!("{done} of {} seeds after {} s", arguments.seeds, start.elapsed().as_secs());
        }
    }
    let counters: serde_json::Map<_, _> =
        total.counters.list().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let result = serde_json::json!({
        "seeds": done,
        "first": arguments.first,
        "clean": violation.is_none(),
        "seconds": start.elapsed().as_secs_f64(),
        "violation": violation.as_ref().map(|found| found.text.clone()),
        "seed": violation.as_ref().map(|found| found.seed),
        "endpoints": total.endpoints,
        "connections": total.connections,
        "succeeded": total.succeeded,
        "failed": total.failed,
        "delivered": total.delivered,
        "lost": total.lost,
        "disturbed": total.disturbed,
        "restored": total.restored,
        "memory_came": total.came,
        "counters": counters,
    });
    println!("{result}");
    let as_expected = violation.is_some() == arguments.plant.is_some();
    if as_expected { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
