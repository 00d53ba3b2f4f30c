//! The long exploration by stateright: every small cluster with every kind of fault.
//!
//! `cargo run --release -p nomad --example check_migration -- --states N`
//!
//! Progress goes to stderr, one line of JSON to stdout. Exit status 1 when something is wrong.

#[path = "../tests/it/explore/model.rs"]
mod model;
#[path = "../tests/it/explore/scenarios.rs"]
mod scenarios;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use nomad_testbed::world::Setup;

#[derive(Parser)]
#[command(about = "Explores the migration protocol by model checking")]
struct Arguments {
    /// Distinct states to reach over all clusters.
    #[arg(long, default_value_t = 1_000_000)]
    states: usize,
    /// Most transitions of one cluster with one kind of fault.
    #[arg(long, default_value_t = 400_000)]
    most: usize,
    /// One of so many states is let run to its end without further faults.
    #[arg(long, default_value_t = 64)]
    settle: u64,
}

/// A cluster with direct messages, and with those that the service passes on.
fn both_paths(cluster: Setup) -> [Setup; 2] {
    [cluster.clone(), scenarios::by_service(cluster)]
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let start = Instant::now();
    let (mut states, mut transitions, mut complete, mut machines, mut depth) = (0, 0, 0, 0, 0);
    let mut fault = None;
    'all: for (faults, budget) in scenarios::budgets() {
        for cluster in scenarios::all().into_iter().flat_map(both_paths) {
            if states >= arguments.states {
                break 'all;
            }
            let name = cluster.name;
            let paths = if cluster.direct { "direct" } else { "by the service" };
            let found = model::explore(Setup { budget, settle: arguments.settle, ..cluster }, arguments.most);
            states += found.states;
            transitions += found.transitions;
            complete += usize::from(found.complete);
            machines += 1;
            depth = depth.max(found.depth);
            eprintln!(
                "{name}, {paths}, {faults}: {} states{}, {} s so far",
                found.states,
                if found.complete { ", all" } else { "" },
                start.elapsed().as_secs()
            );
            if found.fault.is_some() {
                fault = found.fault.map(|(what, way)| format!("{name}, {paths}, {faults}: {what}; {way:#?}"));
                break 'all;
            }
        }
    }
    let result = serde_json::json!({
        "states": states,
        "transitions": transitions,
        "clusters": machines,
        "complete": complete,
        "depth": depth,
        "seconds": start.elapsed().as_secs_f64(),
        "fault": fault,
    });
    println!("{result}");
    if fault.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
