//! Runs the simulator over many seeds.
//!
//! `cargo run --release -p nomad --example simulate_migrations -- --seeds N [--first S] [--bug NAME]`
//!
//! Progress goes to stderr, one line of JSON to stdout. Exit status 1 when a run wasn't clean; with a bug, when all were.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use nomad::InjectedBug;
use nomad_testbed::simulate::{Report, run};

#[derive(Parser)]
#[command(about = "Runs the simulator of migrations over many seeds")]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// A fault that is put in, and must be found.
    #[arg(long)]
    bug: Option<BugName>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BugName {
    AckBeforeSuspended,
    CommitWithoutSourceVote,
    RunAfterVote,
    NoEpochCheck,
    ResumeBeforeCommit,
    DecisionNotWritten,
    StopBeforePeersSuspended,
    DecideTwice,
    SettleWithoutTimeout,
    WithdrawVote,
    ForgottenMeansAborted,
    ResumeInDoubt,
    RenumberWithdrawsVotes,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let bug = match arguments.bug {
        None => InjectedBug::None,
        Some(BugName::AckBeforeSuspended) => InjectedBug::AckBeforeSuspended,
        Some(BugName::CommitWithoutSourceVote) => InjectedBug::CommitWithoutSourceVote,
        Some(BugName::RunAfterVote) => InjectedBug::RunAfterVote,
        Some(BugName::NoEpochCheck) => InjectedBug::NoEpochCheck,
        Some(BugName::ResumeBeforeCommit) => InjectedBug::ResumeBeforeCommit,
        Some(BugName::DecisionNotWritten) => InjectedBug::DecisionNotWritten,
        Some(BugName::StopBeforePeersSuspended) => InjectedBug::StopBeforePeersSuspended,
        Some(BugName::DecideTwice) => InjectedBug::DecideTwice,
        Some(BugName::SettleWithoutTimeout) => InjectedBug::SettleWithoutTimeout,
        Some(BugName::WithdrawVote) => InjectedBug::WithdrawVote,
        Some(BugName::ForgottenMeansAborted) => InjectedBug::ForgottenMeansAborted,
        Some(BugName::ResumeInDoubt) => InjectedBug::ResumeInDoubt,
        Some(BugName::RenumberWithdrawsVotes) => InjectedBug::RenumberWithdrawsVotes,
    };
    let start = Instant::now();
    let mut total = Report::default();
    let mut violation = None;
    let mut done = 0;
    let mut told = start;
    for seed in arguments.first..arguments.first.saturating_add(arguments.seeds) {
        match run(seed, bug) {
            Ok(report) => total.add(&report),
            Err(found) => {
                violation = Some((seed, found));
                break;
            }
        }
        done += 1;
        if told.elapsed().as_secs() >= 10 {
            told = Instant::now();
            eprintln!("{done} of {} seeds after {} s", arguments.seeds, start.elapsed().as_secs());
        }
    }
    let result = serde_json::json!({
        "seeds": done,
        "first": arguments.first,
        "clean": violation.is_none(),
        "seconds": start.elapsed().as_secs_f64(),
        "seed": violation.as_ref().map(|(seed, _)| seed),
        "violation": violation.as_ref().map(|(_, found)| found),
        "events": total.events,
        "committed": total.committed,
        "aborted": total.aborted,
        "kills": total.kills,
        "coordinator_kills": total.coordinator_kills,
        "partitions": total.partitions,
        "unserved": total.unserved,
        "severed_paths": total.severed,
        "direct_messages": total.direct,
        "passed_on_messages": total.passed_on,
        "deaths": total.deaths,
        "renumbers": total.renumbers,
        "lost_messages": total.lost,
        "repeated_messages": total.repeated,
        "operations": total.operations,
        "vms_lost_with_their_host": total.vms_lost,
    });
    println!("{result}");
    let as_expected = violation.is_some() == arguments.bug.is_some();
    if as_expected { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
