//! Runs patterns of memory sharing over simulated hosts and networks.
//!
//! `cargo run --release -p dsm --example simulate_coherence -- --nodes 64 --preset ours|ivy|vnuma-2009|giantvm-2026 [--rtt-us N]
//! [--seed N]`
//!
//! A table per preset goes to stderr, one line of JSON to stdout. Exit status 1: a run failed.

mod plot;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use dsm_testbed::sim::costs::Preset;
use dsm_testbed::sim::programs::Pattern;
use dsm_testbed::sim::{Report, Run, run};

#[derive(Parser)]
#[command(about = "Simulates shared memory of 2 to 64 hosts")]
struct Arguments {
    /// How many hosts, with one virtual CPU each.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    nodes: u8,
    /// Policy and costs: ours, ivy, vnuma-2009, giantvm-2026; without it, all of them.
    #[arg(long, value_parser = |name: &str| Preset::named(name).ok_or("the presets are ours, ivy, vnuma-2009 and giantvm-2026"))]
    preset: Option<Preset>,
    /// Round trip of the network, microseconds, in place of the preset's.
    #[arg(long)]
    rtt_us: Option<u64>,
    /// Only this pattern.
    #[arg(long, default_value = "")]
    pattern: String,
    /// Draws a chart into this SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// What the chart shows, per event.
    #[arg(long, value_enum, default_value_t = Shown::Bytes, requires = "svg")]
    shown: Shown,
    /// Of the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds of each program, of which the first third isn't counted.
    #[arg(long, default_value_t = 600)]
    rounds: u64,
    /// Time of a round, microseconds.
    #[arg(long, default_value_t = 200)]
    pace_us: u64,
}

/// What a chart shows of each event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shown {
    /// Bytes on the network.
    Bytes,
    /// Number of messages on the network.
    Messages,
    /// Simulated time, microseconds.
    Time,
    /// How long a load or store that had to wait did, microseconds, times how many of them an event has.
    Stalls,
}

impl Shown {
    fn title(self) -> &'static str {
        match self {
            Shown::Bytes => "Bytes",
            Shown::Messages => "Messages",
            Shown::Time => "Simulated time, µs,",
            Shown::Stalls => "Time that virtual CPUs wait, µs,",
        }
    }

    fn of(self, report: &Report) -> f64 {
        match self {
            Shown::Bytes => report.per_event(report.bytes),
            Shown::Messages => report.per_event(report.messages),
            Shown::Time => report.per_event(report.time_ns) / 1000.0,
            Shown::Stalls => {
                report.per_event(report.load_stalls.1.saturating_add(report.store_stalls.1)) / 1000.0
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn mean_us((count, nanoseconds): (u64, u64)) -> f64 {
    if count == 0 { 0.0 } else { nanoseconds as f64 / count as f64 / 1000.0 }
}

fn row(name: &str, report: &Report) {
    eprintln!(
        "{name:<18} {:>8} {:>9.2} {:>10.1} {:>8.3} {:>8.3} {:>9.1} {:>8.3} {:>9.1} {:>9.1}",
        report.events,
        report.per_event(report.messages),
        report.per_event(report.bytes),
        report.per_event(report.pages_moved),
        report.per_event(report.load_stalls.0),
        mean_us(report.load_stalls),
        report.per_event(report.store_stalls.0),
        mean_us(report.store_stalls),
        report.per_event(report.time_ns) / 1000.0,
    );
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let all = [Preset::OURS, Preset::IVY, Preset::VNUMA_2009, Preset::GIANTVM_2026];
    let presets = arguments.preset.map_or(all.to_vec(), |preset| vec![preset]);
    let mut results = Vec::new();
    let mut bars = Vec::new();
    let mut failed = false;
    for preset in presets {
        let preset = arguments.rtt_us.map_or(preset, |rtt| preset.with_round_trip(rtt * 1000));
        eprintln!(
            "{}, {} nodes, round trip {} us, seed {}; per event:",
            preset.name,
            arguments.nodes,
            preset.costs.latency_ns * 2 / 1000,
            arguments.seed
        );
        eprintln!(
            "{:<18} {:>8} {:>9} {:>10} {:>8} {:>8} {:>9} {:>8} {:>9} {:>9}",
            "pattern",
            "events",
            "messages",
            "bytes",
            "pages",
            "load",
            "each us",
            "store",
            "each us",
            "time us"
        );
        for pattern in Pattern::ALL.into_iter().filter(|pattern| pattern.name().contains(&arguments.pattern))
        {
            let setup = Run {
                preset,
                pattern,
                nodes: arguments.nodes,
                rounds: arguments.rounds,
                warm_up: arguments.rounds / 3,
                pace_ns: arguments.pace_us * 1000,
                seed: arguments.seed,
            };
            let report = match run(&setup) {
                Ok(report) => report,
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            };
            row(pattern.name(), &report);
            bars.push(plot::Bar {
                group: pattern.name().to_owned(),
                series: preset.name.to_owned(),
                value: arguments.shown.of(&report),
            });
            if let Some(fault) = &report.fault {
                eprintln!("    wrong: {fault}");
                failed = true;
            }
            let counters: serde_json::Map<_, _> = report
                .counters
                .list()
                .filter(|(_, value)| *value > 0)
                .map(|(name, value)| (name.to_owned(), value.into()))
                .collect();
            results.push(serde_json::json!({
                "preset": preset.name,
                "pattern": pattern.name(),
                "nodes": arguments.nodes,
                "round_trip_ns": preset.costs.latency_ns * 2,
                "events": report.events,
                "messages_per_event": report.per_event(report.messages),
                "bytes_per_event": report.per_event(report.bytes),
                "kinds": report.kinds,
                "pages_per_event": report.per_event(report.pages_moved),
                "load_stalls": report.load_stalls.0,
                "remote_loads": report.remote_loads,
                "load_stall_us": mean_us(report.load_stalls),
                "store_stalls": report.store_stalls.0,
                "store_stall_us": mean_us(report.store_stalls),
                "time_ns": report.time_ns,
                "counters": counters,
                "fault": report.fault,
            }));
        }
        eprintln!();
    }
    if let Some(path) = &arguments.svg {
        let place = |bar: &plot::Bar| Pattern::ALL.iter().position(|pattern| pattern.name() == bar.group);
        bars.sort_by_key(place);
        let title = format!(
            "{} per event, {} nodes, seed {}",
            arguments.shown.title(),
            arguments.nodes,
            arguments.seed
        );
        if let Err(error) = std::fs::write(path, plot::bars(&title, &bars)) {
            eprintln!(
                "Can't write the plot to {}: {error}. Name a file in a folder that exists",
                path.display()
            );
            failed = true;
        }
    }
    println!("{}", serde_json::json!({ "seed": arguments.seed, "runs": results }));
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
