//! A guest with an RDMA NIC migrates between two hosts while it is connected to another guest: to that one's host, away from it, and so
//! on. A program in each exchanges messages over one connection, from before the first migration until after the last, and verifies
//! them.
//!
//! Migrations from the first host name the address of the waiting monitor, those back the host's name in the cluster.
//!
//! ```text
//!  host h1: causeway cluster, causeway host ═══ link ═══ host h2: causeway host
//!  guest a  ──────────────── moves ──────────────────▶  beside guest b, and back
//! ```
//! The guests' network is that of `rdma-fabric`.

use super::migrate_talk::{self as talk, STEP_TIMEOUT};
use super::rdma_fabric;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-rdma",
    about: "a guest with an RDMA NIC moves between two hosts, its connection open and busy: no error, the same queue pairs, every byte right",
    topology: rdma_fabric::topology,
    run,
    prompt: None,
};

/// Port of the waiting monitors. Memory is sent over the first link.
const PORT: u32 = 7100;
/// Options: pre-copy, or with `--only post-copy` one round and then post-copy.
pub(super) const BEFORE: &str = "--downtime 3000 --streams 2";
const AFTER: &str = "--downtime 0 --streams 3 --post-copy-after 1";
const LINK: &str =
    "modprobe sch_tbf && tc qdisc replace dev x0 root tbf rate 100mbit burst 128kb latency 100ms";
const CHANGES: &str = "setsid sh -c 'while :; do head -c 33554432 /dev/urandom > /dev/shm/changes; done' < /dev/null > /dev/null 2>&1 & sleep 1";

/// Migrates the first guest, from the first host to the second by the waiting monitor's address, or back by the host's name. `how` has
/// the command's options.
pub(super) fn step(lab: &Lab, pair: &mut Pair<'_>, to: usize, how: &str) -> Result<Value> {
    let next = awaited(pair, to)?;
    go(lab, pair, next, to, how)
}

fn address(host: usize) -> String {
    format!("10.77.0.{}:{PORT}", host + 1)
}

/// Starts a monitor on a host that waits for the first guest.
pub(super) fn awaited(pair: &Pair<'_>, to: usize) -> Result<Guest> {
    pair.await_guest(0, to, &address(to), STEP_TIMEOUT)
}

/// As [`step`], with a given waiting monitor.
pub(super) fn go(lab: &Lab, pair: &mut Pair<'_>, next: Guest, to: usize, how: &str) -> Result<Value> {
    let from = lab.host(1 - to)?;
    let place = if by_name(to) { host_name(to) } else { address(to) };
    let command = format!("causeway --json migrate a --to {place} {how}");
    let output = from.run(&command, STEP_TIMEOUT)?;
    if output.code != 0 {
        bail!(
            "It failed: {}; source {:?}, destination {:?}, daemons {:?}",
            output.stderr,
            pair.a.guest.session.err.tail(8),
            next.session.err.tail(8),
            pair.daemons().iter().map(|daemon| daemon.err.tail(10)).collect::<Vec<_>>()
        );
    }
    let timeline = serde_json::from_str(output.stdout.trim())
        .with_context(|| format!("The timeline is {:?}", output.stdout))?;
    let before = pair.moved(0, next, to)?;
    before.ended(STEP_TIMEOUT)?;
    Ok(timeline)
}

/// Returns whether migrations to a host use its name.
fn by_name(to: usize) -> bool {
    to == 0
}

/// Returns a host's name in the cluster (the daemons' `--name`).
fn host_name(host: usize) -> String {
    format!("h{}", host + 1)
}

/// Checks two refusals, each with its reason: a host without a waiting monitor, and an unknown host name.
fn refused(lab: &Lab, report: &mut Report) -> Result<()> {
    for (name, word) in [(host_name(1), "waits"), ("h9".to_owned(), "h9")] {
        let output = lab.host(0)?.run(&format!("causeway migrate a --to {name} {BEFORE}"), STEP_TIMEOUT)?;
        let told = output.code != 0 && output.stderr.contains(word);
        report.check(
            told,
            format!("a move to {name} came to status {}: {} {}", output.code, output.stdout, output.stderr),
        );
    }
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-rdma is about Causeway's device");
    }
    let _service = talk::service(lab)?;
    let mut pair = Pair::place(lab, options, talk::layout(&[0, 1]))?;
    let moves = options.count.unwrap_or(2);
    let late = !options.only.is_empty() && options.wants("post-copy");
    let how = if late { AFTER } else { BEFORE };
    let mut asked = 0;
    if late {
        // Dirty pages take seconds, during which the connection makes progress.
        for host in [0, 1] {
            lab.host(host)?.sh(LINK)?;
        }
        pair.a.sh(CHANGES)?;
    }
    let count = talk::begin(&pair, moves)?;
    let (first, _) = talk::connected(&pair.a)?;
    report.check(!first.is_empty(), "no queue pair is connected before the first move");
    refused(lab, report)?;
    let (mut errors, mut named) = (0, 0);
    let mut transports = BTreeSet::new();
    for number in 0..moves {
        let to = if number % 2 == 0 { 1 } else { 0 };
        named += u32::from(by_name(to));
        talk::go_on(&pair)?;
        let timeline = step(lab, &mut pair, to, how).with_context(|| format!("Move {}", number + 1))?;
        // The peer's host suspended the connected queue pairs.
        let held: Vec<&str> = timeline["peers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|peer| peer["host"].as_str())
            .collect();
        report.check(held == ["h2"], format!("who held it in move {}: {timeline}", number + 1));
        let (now, reached_by) = talk::connected(&pair.a)?;
        if now != first {
            errors += 1;
            report.check(
                false,
                format!("queue pairs were {first:?}, and are {now:?} after move {}", number + 1),
            );
        }
        transports.extend(reached_by);
        if late {
            let after = &timeline["post_copy"];
            asked += after["asked_pages"].as_u64().unwrap_or(0);
            progress!(
                "pages after the guest: {}, asked for: {}",
                after["missing_pages"],
                after["asked_pages"]
            );
            let whole = after["missing_pages"].as_u64() > Some(0) && after["left_pages"] == 0;
            report
                .check(whole, format!("move {} wasn't by post-copy, or left pages: {timeline}", number + 1));
        }
        progress!(
            "move {}/{moves}: to h{}, {} bytes, {} rounds, pause {} ms (emulated: says nothing), {transports:?}",
            number + 1,
            to + 1,
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
        // Let the programs run for a while before the next migration.
        std::thread::sleep(Duration::from_secs(5));
    }
    errors += talk::end(&pair, report)?;
    report.figure("moves", moves);
    report.figure("moves_by_name", named);
    report.figure("errors", errors);
    report.figure("messages", count);
    if late {
        report.figure("asked_pages", asked);
    }
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}
