//! Two guests execute operations of five kinds on each other, over several connections and in both directions. One of them migrates
//! back and forth between two hosts: to the other one's host, where connections are local, and away. Each operation must be executed
//! exactly once and in order. The program `rdma-exact` in the guests judges by the data.
//!
//! ```text
//!  host h1: causeway cluster, causeway host ═══ link ═══ host h2: causeway host
//!  guest a  ──────────────── moves ──────────────────▶  beside guest b, and back
//! ```
//! Keys are those that the programs exchanged at the beginning. The program's connections time out after 17 s, which exceeds any pause
//! here: a crowded machine's emulated hosts may stall for seconds.

use super::migrate_rdma;
use super::migrate_talk::{self as talk, STEP_TIMEOUT};
use super::rdma_fabric;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Layout, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-exact",
    about: "numbered SENDs, WRITEs, READs, fetch-and-adds and compare-and-swaps (--count of them; --only short: until a move there and one back) while a guest moves to and fro: each exactly once and in order",
    topology: rdma_fabric::topology,
    run,
    prompt: None,
};

/// Default number of operations; `--count` overrides it.
const OPERATIONS: u32 = 10_000_000;
/// Part that ends after a migration there and one back, however many operations that takes.
const SHORT: &str = "short";
/// Operations after which the programs of [`SHORT`] agree whether to continue.
const SHORT_OPERATIONS: u32 = 3000;
/// Migrations of [`SHORT`].
const SHORT_MOVES: usize = 2;
/// File in the migrating guest; while it exists, the guest's program continues.
const WHILE: &str = "/run/moving";
/// Number of connections between the guests, and operations of a round on one of them in one direction (rdma-exact.c).
const CONNECTIONS: usize = 8;
/// As [`CONNECTIONS`], for [`SHORT`]: fewer polls, so that emulated hosts have time for the migrations.
const SHORT_CONNECTIONS: usize = 2;
const EACH: u64 = 6;
/// Time-out without progress.
const STUCK: Duration = Duration::from_secs(400);

fn command(m: &Member<'_>, connections: usize, rounds: u64, server: Option<&str>) -> String {
    let to = server.map_or_else(String::new, |server| format!("--while {WHILE} {server}"));
    format!(
        "rdma-exact --device {} --gid {} --connections {connections} --count {rounds} {to}",
        m.port.device, m.port.gid
    )
}

/// Returns the numbers of a line such as `EXACT lost=0 repeated=1`: the last line with this prefix.
fn numbers(said: &str, begin: &str) -> Option<BTreeMap<String, u64>> {
    let line = said.lines().rev().find(|line| line.starts_with(begin))?;
    let pair =
        |word: &str| word.split_once('=').and_then(|(name, n)| Some((name.to_owned(), n.parse().ok()?)));
    Some(line.split_whitespace().filter_map(pair).collect())
}

/// Returns the number of completed rounds, as the program reports.
fn done(m: &Member<'_>) -> Result<u64> {
    let said = m.sh("tail -n 3 /run/work.out")?;
    if said.contains("ERROR") {
        bail!("The program in guest {} failed: {said}", m.name);
    }
    Ok(numbers(&said, "DONE").and_then(|n| n.get("rounds").copied()).unwrap_or(0))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-exact is about Causeway's device");
    }
    let short = !options.only.is_empty() && options.wants(SHORT);
    let wanted = u64::from(options.count.unwrap_or(if short { SHORT_OPERATIONS } else { OPERATIONS }));
    let least_moves = if short { SHORT_MOVES } else { 1 };
    let connections = if short { SHORT_CONNECTIONS } else { CONNECTIONS };
    let rounds = wanted.div_ceil(EACH * connections as u64 * 2);
    let _service = talk::service(lab)?;
    let layout = Layout { cmdline: talk::SMALL, ..talk::layout(&[0, 1]) };
    let mut pair = Pair::place(lab, options, layout)?;
    talk::shrink(&pair.a)?;
    if short {
        pair.a.sh(&format!("touch {WHILE}"))?;
    }
    talk::detach(&pair.b, &command(&pair.b, connections, rounds, None))?;
    talk::detach(&pair.a, &command(&pair.a, connections, rounds, Some(&pair.b.tcp)))?;
    let (first, mut transports) = talk::connected_least(&pair.a, connections)?;
    report.check(
        first.len() == connections,
        format!("before the first move {first:?} are connected, not {connections} queue pairs"),
    );
    let (mut moves, mut errors, mut last) = (0_usize, 0_u32, (0, Instant::now()));
    while !(short && moves == SHORT_MOVES) && talk::works(&pair.a)? && talk::works(&pair.b)? {
        let to = (moves + 1) % 2;
        let timeline = migrate_rdma::step(lab, &mut pair, to, migrate_rdma::BEFORE)
            .with_context(|| format!("Move {}", moves + 1))?;
        moves += 1;
        let (now, by) = if talk::works(&pair.a)? { talk::connected(&pair.a)? } else { Default::default() };
        // The program may have ended meanwhile, and its queue pairs with it.
        let goes_on = talk::works(&pair.a)?;
        if goes_on {
            errors += u32::from(now != first);
            report.check(
                now == first,
                format!("queue pairs were {first:?}; after move {moves} they are {now:?}"),
            );
            transports.extend(by.clone());
        }
        let rounds_done = done(&pair.a)?;
        if rounds_done > last.0 {
            last = (rounds_done, Instant::now());
        } else if goes_on && last.1.elapsed() > STUCK {
            bail!("Nothing was done in {} s, after {rounds_done} rounds", STUCK.as_secs());
        }
        progress!(
            "move {moves}: to h{}, {} bytes, {} rounds of memory, pause {} ms (emulated: says nothing), {by:?}; {rounds_done}/{rounds} rounds",
            to + 1,
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
    }
    pair.a.sh(&format!("rm -f {WHILE}"))?;
    report.figure("moves", moves as u64);
    report.figure("transports", transports.iter().cloned().collect::<Vec<_>>());
    let (sums, wrong_programs) = judged(&pair, report)?;
    errors += wrong_programs;
    for (name, sum) in &sums {
        report.figure(name, *sum);
    }
    report.figure("errors", errors);
    report.check(
        sums["operations"] >= wanted,
        format!("{} operations in place of {wanted}", sums["operations"]),
    );
    report.check(
        moves >= least_moves,
        format!("the guest moved {moves} times while the programs worked, not {least_moves} times"),
    );
    let wrong: u64 = sums.iter().filter(|(name, _)| **name != "operations").map(|(_, sum)| sum).sum();
    report.check(errors == 0 && wrong == 0, format!("{errors} errors, {wrong} operations that were wrong"));
    pair.finish()
}

/// Waits for the programs' end. Returns the sums of what both report, and the number of failures.
fn judged(pair: &Pair<'_>, report: &mut Report) -> Result<(BTreeMap<&'static str, u64>, u32)> {
    let mut errors = 0;
    let mut sums: BTreeMap<&'static str, u64> =
        ["operations", "lost", "repeated", "reordered", "corrupt"].map(|name| (name, 0)).into();
    for m in [&pair.a, &pair.b] {
        let (code, said) = talk::ended(m, STEP_TIMEOUT)?;
        let found = numbers(&said, "EXACT");
        errors += u32::from(code != 0);
        report.check(code == 0 && found.is_some(), format!("guest {}: status {code}: {said}", m.name));
        for (name, sum) in &mut sums {
            *sum += found.as_ref().and_then(|found| found.get(*name)).copied().unwrap_or(0);
        }
        progress!("guest {}: {}", m.name, said.lines().last().unwrap_or_default());
        let said = m.sh("grep DONE /run/work.out | cut -d' ' -f2,3 | tail -n 40 | tr '\\n' ';'")?;
        progress!("guest {}: {said}", m.name);
        errors += talk::complaints(m, report)?;
    }
    Ok((sums, errors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The judge of the guests' operations finds injected losses, repetitions, reorderings and corruptions one by one, and reports
    /// nothing for a correct run.
    #[test]
    fn the_judge_finds_what_is_planted() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("judge");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/guest-programs/exact-judge-test.c");
        let built = Command::new("cc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(source)
            .status();
        assert!(built.unwrap().success());
        let judged = Command::new(&program).output().unwrap();
        assert!(judged.status.success(), "{}", String::from_utf8_lossy(&judged.stdout));
    }

    #[test]
    fn the_last_line_of_a_kind_counts() {
        let said = "DONE rounds=3 lost=0\nDONE rounds=5 lost=1\nEXACT operations=48 lost=1\n";
        assert_eq!(numbers(said, "DONE").unwrap()["rounds"], 5);
        assert_eq!(numbers(said, "EXACT").unwrap()["operations"], 48);
        assert_eq!(numbers(said, "ERROR"), None);
    }
}
