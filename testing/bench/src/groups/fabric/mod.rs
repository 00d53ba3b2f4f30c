//! Group `fabric`: RDMA between hosts. Two `causeway host` daemons in two network namespaces, connected by a veth pair, transport
//! RDMA writes between two VMs' memory, encrypted and plain. The peers run in turns over the same link: TCP (iperf3, qperf) and UCX
//! over TCP. Each host has one CPU for its daemon and its program, and so have the peers.

mod daemons;

use std::time::Duration;

use anyhow::Context;

use self::daemons::{Daemons, Setup};
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Pairs, Report};
use crate::outside;
use crate::outside::link::Link;
pub use crate::outside::tcp::Bandwidth;
use crate::outside::tcp::{PROGRAMS, Peers};

/// MTU of the link, and payload of the daemons' packets on it.
const LINKS: [(u32, u32); 2] = [(9000, 4096), (1500, 1376)];
const PORT: u16 = 4792;
const ROUNDS: u32 = 20_000;

/// Result of one way to transfer in one turn.
#[derive(Debug, Clone, Copy)]
struct Turn {
    bandwidth: Bandwidth,
    /// Microseconds; absent if not measured.
    round_trip: Option<f64>,
}

/// Measures the group; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let mut conditions = Conditions::now(None, "4 KiB");
    let skip = |reason: String, conditions| Ok(super::skipped("fabric", reason, conditions));
    if !rustix::process::geteuid().is_root() {
        return skip("network namespaces need root".to_owned(), conditions);
    }
    let cpus = match super::two_cpus() {
        Ok(cpus) => cpus,
        Err(reason) => return skip(reason, conditions),
    };
    let missing = outside::missing(&PROGRAMS);
    if !missing.is_empty() {
        return skip(format!("peers are missing: install {}", missing.join(", ")), conditions);
    }
    let program = crate::programs::causeway()?;
    // Not at real-time priority: polling peers would starve the kernel's network threads, for which they wait.
    conditions.scheduling = "ordinary, both sides";
    let mut figures = Vec::new();
    for (mtu, payload) in LINKS {
        let turns = measure(&program, cpus, mtu, payload, quick)
            .with_context(|| format!("Over a link with MTU {mtu}"))?;
        figures.extend(compare(mtu, &turns)?);
    }
    conditions.finish();
    Ok(Report { group: "fabric", skipped: None, conditions, figures, details: serde_json::Value::Null })
}

/// The measured ways, in the order of a turn's results.
const OURS: [&str; 2] = ["plain", "encrypted"];
const PEERS: [&str; 3] = ["iperf3, one TCP stream", "qperf, TCP", "UCX over TCP, tagged messages"];

fn measure(
    program: &std::path::Path,
    cpus: [usize; 2],
    mtu: u32,
    payload: u32,
    quick: bool,
) -> anyhow::Result<Vec<[Turn; 5]>> {
    let link = Link::new(mtu)?;
    let peers = Peers { link: &link, cpus, seconds: 1 };
    let during = Duration::from_millis(if quick { 300 } else { 1000 });
    let rounds = if quick { ROUNDS / 10 } else { ROUNDS };
    let mut turns = Vec::new();
    // The first turn warms up and isn't counted.
    for number in 0..=if quick { 1 } else { 7 } {
        let of = |way: usize| -> anyhow::Result<Turn> {
            // Restarted each time: daemons poll for a while after the last request, which would disturb the next measurement.
            let ours = |encrypted: bool| -> anyhow::Result<Turn> {
                let setup = Setup { encrypted, mtu: payload, port: PORT, cpus };
                let mut daemons = Daemons::start(program, &link, setup)?;
                let round_trip = Some(daemons.round_trip(rounds)?);
                Ok(Turn { bandwidth: daemons.bandwidth(during)?, round_trip })
            };
            match way {
                0 => ours(false),
                1 => ours(true),
                2 => Ok(Turn { bandwidth: peers.iperf3()?, round_trip: None }),
                3 => {
                    let round_trip = Some(peers.qperf_round_trip()?);
                    Ok(Turn { bandwidth: peers.qperf_bandwidth()?, round_trip })
                }
                _ => {
                    let round_trip = Some(peers.ucx_round_trip()?);
                    Ok(Turn { bandwidth: peers.ucx_bandwidth()?, round_trip })
                }
            }
        };
        // Each turn starts with another way.
        let mut turn = [None; 5];
        for step in 0..turn.len() {
            let way = (step + number) % turn.len();
            turn[way] = Some(of(way)?);
        }
        let turn: Vec<Turn> = turn.into_iter().flatten().collect();
        let turn: [Turn; 5] = turn.try_into().ok().context("A turn has five measurements")?;
        let shown = turn.map(|turn| {
            let trip = turn.round_trip.map_or_else(|| "-".to_owned(), |trip| format!("{trip:.1}"));
            let Bandwidth { gigabytes, cpu_per_gib } = turn.bandwidth;
            format!("{gigabytes:.2} GB/s {cpu_per_gib:.2} s/GiB {trip} us")
        });
        eprintln!("bench: fabric: MTU {mtu}, turn {number}: {}", shown.join(" | "));
        if number > 0 {
            turns.push(turn);
        }
    }
    Ok(turns)
}

fn compare(mtu: u32, turns: &[[Turn; 5]]) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (ours, mode) in OURS.into_iter().enumerate() {
        for (at, peer) in PEERS.into_iter().enumerate() {
            let pairs = |of: &dyn Fn(&Turn) -> Option<f64>| -> Option<Pairs> {
                let pair = |turn: &[Turn; 5]| Some((of(turn.get(ours)?)?, of(turn.get(OURS.len() + at)?)?));
                Some(Pairs { pairs: turns.iter().map(pair).collect::<Option<_>>()? })
            };
            let key = peer.split([',', ' ']).next().unwrap_or_default().to_lowercase();
            let what = |what: &str| format!("{what}, {mode}, link MTU {mtu}");
            let mut add =
                |name: &str, figure: &str, unit, better, pairs: Option<Pairs>, aim| -> anyhow::Result<()> {
                    let Some(pairs) = pairs else { return Ok(()) };
                    let name = format!("{name}_{mode}_{mtu}_{key}");
                    let figure = Figure::new(&name, &what(figure), unit, better, peer, &pairs, aim);
                    figures
                        .push(figure.with_context(|| format!("A sample of {name} isn't a positive number"))?);
                    Ok(())
                };
            let bandwidth = pairs(&|turn| Some(turn.bandwidth.gigabytes));
            let text = "RDMA writes of 1 MiB, 8 outstanding";
            add("write_bandwidth_1MiB", text, "GB/s", Better::Higher, bandwidth, Some(1.0))?;
            let trip = pairs(&|turn| turn.round_trip);
            let text = "RDMA write of 8 bytes and one back, program to program";
            let aim = (key == "qperf").then_some(0.6);
            add("round_trip_8B", text, "us", Better::Lower, trip, aim)?;
            let cpu = pairs(&|turn| Some(turn.bandwidth.cpu_per_gib));
            let text = "processor time of both hosts for writes of 1 MiB";
            add("cpu_per_gib", text, "s/GiB", Better::Lower, cpu, None)?;
        }
    }
    Ok(figures)
}
