//! Group `migration`: the pause of a VM that moves between two hosts of this machine (`end_to_end`), and of that the HCA's share.
//!
//! The share is measured in three engines of this process that communicate over the loopback interface. Measures its part of the blackout and its state, for 64 active queue pairs among many, with a region and a completion
//! queue each, and with bytes in flight. Also queue pairs migrated per second, and the redirection of connected peers.
//!
//! Peers of the whole pause are published figures of other systems on their hardware. The HCA's share is compared with its aim, and with
//! the same measurement with few queue pairs or nothing in flight: it should depend on neither.

mod converge;
mod end_to_end;

use anyhow::Context;
use host_testbed::moving::Cluster;
use host_testbed::moving::measure::{Sample, beside, blackout, redirected};

use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report};

/// Numbers of queue pairs; each has a region and a completion queue.
const MANY: [u32; 3] = [100, 10_000, 30_000];
const ACTIVE: u32 = 64;
/// MiB in flight.
const IN_FLIGHT: [u64; 3] = [0, 1, 64];
/// Number of redirected queue pairs.
const REDIRECTED: u32 = 10_000;
/// Queue pairs of a VM that migrates from a host with other VMs.
const LEAVING: u32 = 10_000;
/// Operations per direction on each of three connections, while three VMs migrate among three hosts.
const MOVING_OPERATIONS: u64 = 150_000;

/// Aim for the HCA's share of the blackout, in milliseconds.
const SHARE_MS: f64 = 5.0;
/// MigrRDMA's blackout with 16 queue pairs, in milliseconds (SIGCOMM 2025).
const MIGRRDMA_MS: f64 = 150.0;
/// The measured number of queue pairs that is compared with it, which isn't smaller.
const MIGRRDMA_LIKE: u32 = 100;
/// Device-assisted migration of a hardware NIC: restore of 100,000 queue pairs, in seconds.
const DEVICE_ASSISTED_S: f64 = 2.5;
/// Nomad (2006): minimum to free and reallocate resources, in milliseconds.
const NOMAD_MS: f64 = 10.0;

fn float(number: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let float = number as f64;
    float
}

fn milliseconds(sample: &Sample) -> f64 {
    float(sample.source_ns + sample.destination_ns) / 1e6
}

fn take(count: usize, qps: u32, mebibytes: u64) -> Vec<Sample> {
    // The first sample warms up and isn't counted.
    let samples: Vec<Sample> = (0..=count).map(|_| blackout(qps, ACTIVE, mebibytes << 20)).skip(1).collect();
    for sample in &samples {
        eprintln!(
            "bench: migration: {qps} queue pairs, {mebibytes} MiB: source {:.0} us, destination {:.0} us, {} objects, {} bytes; in flight {} bytes",
            float(sample.source_ns) / 1e3,
            float(sample.destination_ns) / 1e3,
            sample.objects,
            sample.bytes,
            sample.in_flight
        );
    }
    samples
}

/// Measures the group; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut conditions = Conditions::now(None, "4 KiB");
    conditions.scheduling = "ordinary, one thread";
    let count = if quick { 1 } else { 9 };
    let many: &[u32] = if quick { &MANY[..2] } else { &MANY };
    let mut figures = Figures::of("migration");
    let against = |samples: &[Sample], peer: f64, of: &dyn Fn(&Sample) -> f64| Pairs {
        pairs: samples.iter().map(|sample| (of(sample), peer)).collect(),
    };
    let converged = converging(&mut figures, quick)?;
    let whole = whole_pause(&mut figures, quick)?;
    let mut first = None;
    for &qps in many {
        for (at, mebibytes) in IN_FLIGHT.into_iter().enumerate() {
            let samples = take(count, qps, mebibytes);
            let name = format!("{qps}qp_{mebibytes}MiB");
            let what =
                format!("{ACTIVE} active of {qps} queue pairs with as many regions, {mebibytes} MiB posted");
            figures.add(Figure::new(
                &format!("blackout_{name}"),
                &format!("HCA's share of the pause: {what}"),
                "ms",
                Better::Lower,
                "the aim",
                &against(&samples, SHARE_MS, &milliseconds),
                Some(1.0),
            ))?;
            figures.add(Figure::new(
                &format!("blackout_{name}_nomad"),
                &format!("The same: {what}"),
                "ms",
                Better::Lower,
                "Nomad, freeing and re-allocating (published)",
                &against(&samples, NOMAD_MS, &milliseconds),
                None,
            ))?;
            figures.add(Figure::new(
                &format!("state_in_pause_{name}"),
                &format!("State left for the pause, per active queue pair: {what}"),
                "bytes",
                Better::Lower,
                "the aim for a queue pair and its completion queue",
                &against(&samples, 512.0, &|sample| float(sample.bytes) / f64::from(ACTIVE)),
                None,
            ))?;
            if let Some(base) = &first {
                let base: &Vec<Sample> = base;
                let pairs =
                    samples.iter().zip(base).map(|(ours, base)| (milliseconds(ours), milliseconds(base)));
                figures.add(Figure::new(
                    &format!("blackout_{name}_independent"),
                    &format!("The same: {what}"),
                    "ms",
                    Better::Lower,
                    "100 queue pairs, nothing in flight, same run",
                    &Pairs { pairs: pairs.collect() },
                    None,
                ))?;
            } else {
                first = Some(samples.clone());
            }
            if at > 0 {
                continue;
            }
            figures.add(Figure::new(
                &format!("bytes_per_qp_{qps}"),
                &format!("Saved state of a queue pair and its completion queue, {qps} of them"),
                "bytes",
                Better::Lower,
                "the aim",
                &against(&samples, 512.0, &|sample| float(sample.bytes_per_qp)),
                Some(1.0),
            ))?;
            figures.add(Figure::new(
                &format!("moved_per_second_{qps}"),
                "Queue pairs moved per second, each with a completion queue and a region: saved and restored",
                "1/s",
                Better::Higher,
                "device-assisted migration, loading 100,000 (published)",
                &against(&samples, 100_000.0 / DEVICE_ASSISTED_S, &|sample| {
                    f64::from(qps) * 1e9 / float(sample.whole_ns)
                }),
                Some(200_000.0 / (100_000.0 / DEVICE_ASSISTED_S)),
            ))?;
        }
    }
    let redirects: Vec<(u64, u64)> = (0..count.min(5)).map(|_| redirected(REDIRECTED)).collect();
    let pairs = |of: fn(&(u64, u64)) -> u64| Pairs {
        pairs: redirects.iter().map(|sample| (float(of(sample)) / 1e6, 10.0)).collect(),
    };
    for (name, what, pairs) in [
        ("hold_10000", "Holding 10,000 connections that face the mover", pairs(|sample| sample.0)),
        ("redirect_10000", "Redirecting 10,000 connections to another host", pairs(|sample| sample.1)),
    ] {
        figures.add(Figure::new(name, what, "ms", Better::Lower, "the aim", &pairs, Some(1.0)))?;
    }
    let worst = neighbours(&mut figures, if quick { 1 } else { 5 })?;
    peers(&mut figures, quick)?;
    conditions.finish();
    let figures = figures.all;
    figures.first().context("Nothing was measured")?;
    let details = serde_json::json!({
        "end_to_end": whole,
        "beside_worst_us": worst,
        "converging": converged,
    });
    Ok(Report { group: "migration", skipped: None, conditions, figures, details })
}

/// Measures the pause of a VM that moves between hosts. Returns each move, or why this machine can't measure it.
fn whole_pause(figures: &mut Figures, quick: bool) -> anyhow::Result<serde_json::Value> {
    if let Some(reason) = end_to_end::missing() {
        eprintln!("bench: migration: the pause of a VM SKIPPED: {reason}");
        return Ok(serde_json::json!({ "skipped": reason }));
    }
    Ok(serde_json::json!(end_to_end::run(figures, quick)?))
}

/// Returns a per mille quantile of a sorted list.
fn per_mille(sorted: &[u64], mille: usize) -> f64 {
    let at = (sorted.len() * mille / 1000).min(sorted.len().saturating_sub(1));
    float(sorted.get(at).copied().unwrap_or(0))
}

/// Measures the effect on uninvolved VMs of the source: one second without a migration, and one second with. Returns the longest
/// times in microseconds of both seconds.
fn neighbours(figures: &mut Figures, runs: usize) -> anyhow::Result<Vec<(f64, f64)>> {
    let samples: Vec<_> =
        (0..runs).map(|_| beside(LEAVING, ACTIVE, std::time::Duration::from_secs(1))).collect();
    for (name, mille) in [("median", 500), ("p99", 990)] {
        let pairs = samples
            .iter()
            .map(|sample| (per_mille(&sample.during, mille) / 1e3, per_mille(&sample.alone, mille) / 1e3));
        figures.add(Figure::new(
            &format!("beside_{name}"),
            &format!(
                "Writes of 64 bytes between two VMs that stay, {name}, in a second in which a third one with {LEAVING} queue pairs leaves their host"
            ),
            "us",
            Better::Lower,
            "a second in which nobody moves, same run",
            &Pairs { pairs: pairs.collect() },
            (mille == 990).then_some(1.05),
        ))?;
    }
    let worst = |sorted: &[u64]| float(sorted.last().copied().unwrap_or(0)) / 1e3;
    let worst = samples.iter().map(|sample| (worst(&sample.alone), worst(&sample.during))).collect();
    eprintln!("bench: migration: longest write beside a migration, us (nobody moves, one leaves): {worst:?}");
    Ok(worst)
}

/// Measures the cost of back-pressure for a peer that writes to a migrating VM faster than the migration's link.
fn converging(figures: &mut Figures, quick: bool) -> anyhow::Result<Vec<converge::Sample>> {
    let samples =
        (0..if quick { 1 } else { 5 }).map(|_| converge::converge()).collect::<anyhow::Result<Vec<_>>>()?;
    for sample in &samples {
        eprintln!(
            "bench: migration: a peer writes {:.0} MB/s before, {:.0} MB/s while the VM is copied over {:.0} MB/s for {:.2} s, {:.0} MB/s after; held back for {:.2} s to {:.0} MB/s: {:.0} MB/s lost; {} rounds, held back by up to {} %, pause {:.0} ms",
            sample.before / 1e6,
            sample.during / 1e6,
            float(sample.link) / 1e6,
            sample.copied_for,
            sample.after / 1e6,
            sample.held_for,
            sample.held / 1e6,
            (sample.before - sample.held) / 1e6,
            sample.rounds,
            sample.held_back,
            sample.pause * 1e3
        );
    }
    for (name, what, of) in [
        (
            "converging_during",
            "What a peer writes by RDMA into a VM that moves over a slower link, while it is copied",
            (|sample| sample.during) as fn(&converge::Sample) -> f64,
        ),
        ("converging_held", "The same, in rounds in which it is held back", |sample| sample.held),
        ("converging_after", "The same, after it has landed", |sample| sample.after),
    ] {
        let pairs = samples.iter().map(|sample| (of(sample) / 1e6, sample.before / 1e6)).collect();
        figures.add(Figure::new(
            name,
            what,
            "MB/s",
            Better::Higher,
            "before the move, same run",
            &Pairs { pairs },
            None,
        ))?;
    }
    Ok(samples)
}

/// Measures the peer pause beyond the blackout.
fn peers(figures: &mut Figures, quick: bool) -> anyhow::Result<()> {
    let mut cluster = Cluster::new(3, 3, 13);
    cluster.watch_peers();
    let operations = if quick { MOVING_OPERATIONS / 10 } else { MOVING_OPERATIONS };
    cluster.run_until(operations, 20_000_000, |_, _| ()).map_err(anyhow::Error::msg)?;
    let pairs: Vec<(f64, f64)> = cluster
        .peers_pauses()
        .iter()
        .map(|pause| ((float(pause.held_ns.saturating_sub(pause.mover_ns)) / 1e6).max(1e-6), 1.0))
        .collect();
    eprintln!("bench: migration: {} pauses of peers", pairs.len());
    let longest = pairs.iter().map(|(extra, _)| *extra).fold(0.0, f64::max);
    for (name, what, pairs) in [
        ("peer_pause_extra", "How much longer a peer is held than the VM stands still, median", pairs),
        ("peer_pause_extra_worst", "The same, the longest of all", vec![(longest, 1.0)]),
    ] {
        figures.add(Figure::new(name, what, "ms", Better::Lower, "the aim", &Pairs { pairs }, Some(1.0)))?;
    }
    Ok(())
}
