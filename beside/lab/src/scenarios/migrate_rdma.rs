//! A guest with an RDMA NIC moves between two hosts while it is connected with another guest: to the host of that one, away from it, and so on. A
//! program in each keeps messages going over one connection from before the first move until after the last, and compares what arrived.
//!
//! ```text
//!  host h1: causeway cluster, causeway host ═══ link ═══ host h2: causeway host
//!  guest a  ──────────────── moves ──────────────────▶  beside guest b, and back
//! ```
//! The network of the guests is that of `rdma-fabric`.

use super::rdma_fabric;
use crate::channel::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Layout, Member, NIC, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-rdma",
    about: "a guest with an RDMA NIC moves between two hosts, its connection open and busy: no error, the same queue pairs, every byte right",
    topology: rdma_fabric::topology,
    run,
    prompt: None,
};

const SERVICE: &str = "10.77.0.1:4793";
/// Where monitors wait; memory goes over the first link.
const PORT: u32 = 7100;
const PATIENCE: Duration = Duration::from_secs(400);
/// How long the programs are to go on per move, seconds: an emulated host copies memory slowly.
const PER_MOVE: u32 = 120;
/// Messages of the run that says how fast they are here.
const TRIAL: u32 = 100;

fn layout() -> Layout {
    let daemon = |host: usize| {
        format!(
            "--cluster {SERVICE} --name h{0} --fabric-address 10.77.0.{0}:4792 --cluster-key /run/causeway/cluster.key",
            host + 1
        )
    };
    Layout { daemons: vec![daemon(0), daemon(1)], ..rdma_fabric::layout() }
}

/// The service; times of an emulated host say nothing, so a switch-over may take long.
fn service(host: &Host) -> Result<Session> {
    let command = format!(
        "mkdir -p /run/causeway && exec causeway cluster serve --listen {SERVICE} --state /run/causeway/cluster.redb --switch-limit 120000"
    );
    let service = host.spawn("causeway cluster", &command)?;
    let listens =
        "for i in $(seq 200); do ss -Hltn 'sport = :4793' | grep -q . && exit 0; sleep 0.2; done; exit 1";
    if host.run(listens, PATIENCE)?.code != 0 {
        bail!("The cluster service doesn't listen: {}", service.err.tail(5));
    }
    Ok(service)
}

/// The queue pairs of a guest that are ready to send: handle, number, and how their peers are reached.
fn queue_pairs(host: &Host, vm: &str) -> Result<BTreeSet<(String, u64, String)>> {
    let tree = rdma_fabric::tree(host)?;
    let all = tree["vms"][vm]["nics"][NIC]["rdma"]["queue_pairs"].as_object();
    Ok(all
        .into_iter()
        .flatten()
        .filter(|(_, qp)| qp["state"] == "ReadyToSend" && qp["peer"]["gid"].is_string())
        .map(|(handle, qp)| {
            let transport = qp["transport"].as_str().unwrap_or("none").to_owned();
            (handle.clone(), qp["qpn"].as_u64().unwrap_or(0), transport)
        })
        .collect())
}

fn pingpong(m: &Member<'_>, count: u32, server: Option<&str>) -> String {
    let to = server.unwrap_or("");
    format!("ibv_rc_pingpong -d {} -g {} -c -s 4096 -n {count} {to}", m.port.device, m.port.gid)
}

/// How long a run says that it took: `300 iters in 1.25 seconds = …`.
fn seconds(said: &str) -> Option<f64> {
    let words: Vec<&str> = said.split_whitespace().collect();
    let at = words.windows(2).position(|pair| pair == ["iters", "in"])?;
    words.get(at + 2)?.parse().ok().filter(|seconds| *seconds > 0.0)
}

/// Messages that last over so many moves, where the trial took so long.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Bounded: floats become whole numbers at the nearest bound.
fn messages(trial: f64, moves: u32) -> u32 {
    let rate = (f64::from(TRIAL) / trial).clamp(1.0, 100_000.0);
    (rate * f64::from(PER_MOVE) * f64::from(moves + 1)) as u32
}

/// Starts a program that goes on without the connection that started it.
fn detach(m: &Member<'_>, command: &str) -> Result<()> {
    m.sh(&format!(
        "rm -f /run/work.*; setsid sh -c '{command} > /run/work.out 2>&1; echo $? > /run/work.code' < /dev/null > /dev/null 2>&1 & sleep 1"
    ))
    .map(drop)
}

/// The status of the program, once it has ended.
fn ended(m: &Member<'_>, patience: Duration) -> Result<(i32, String)> {
    let until = Instant::now() + patience;
    loop {
        let text = m.sh("cat /run/work.code 2>/dev/null || true")?;
        if let Ok(code) = text.trim().parse() {
            return Ok((code, m.sh("tail -n 6 /run/work.out")?));
        }
        if Instant::now() > until {
            bail!(
                "The program in guest {} doesn't end: {}",
                m.name,
                m.sh("tail -n 4 /run/work.out; dmesg | tail -n 6")?
            );
        }
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// Whether the program goes on.
fn works(m: &Member<'_>) -> Result<bool> {
    Ok(m.sh("[ -e /run/work.code ] || echo works")?.contains("works"))
}

/// One move of the first guest.
fn step(lab: &Lab, pair: &mut Pair<'_>, to: usize) -> Result<Value> {
    let address = format!("10.77.0.{}:{PORT}", to + 1);
    let (from, there) = (pair.a.host(), lab.host(to)?);
    let next: Guest = pair.await_first(to, &address)?;
    let listens = "for i in $(seq 400); do causeway inspect a summary | grep -q incoming && exit 0; sleep 0.3; done; exit 1";
    if there.run(listens, PATIENCE)?.code != 0 {
        bail!("The monitor on {} doesn't wait for a VM: {}", there.name(), next.session.err.tail(8));
    }
    // What fails by itself on a crowded machine (ibv_rc_pingpong gives up after half a second) isn't the move's doing, and is said apart.
    if !works(&pair.a)? || !works(&pair.b)? {
        bail!("The programs had ended before it began: {}", pair.a.sh("cat /run/work.out")?);
    }
    let command = format!("causeway --json migrate a --to {address} --downtime 3000 --streams 2");
    let output = from.run(&command, PATIENCE)?;
    if output.code != 0 {
        bail!(
            "It failed: {}; source {:?}, destination {:?}, daemons {:?} and {:?}",
            output.stderr,
            pair.a.guest.session.err.tail(8),
            next.session.err.tail(8),
            pair.daemons().first().map(|daemon| daemon.err.tail(10)),
            pair.daemons().get(1).map(|daemon| daemon.err.tail(10))
        );
    }
    let timeline = serde_json::from_str(output.stdout.trim())
        .with_context(|| format!("The timeline is {:?}", output.stdout))?;
    let before = pair.first_moved(next, to)?;
    before.ended(PATIENCE)?;
    Ok(timeline)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-rdma is about Causeway's device");
    }
    lab.install_causeway()?;
    for (number, host) in lab.hosts().iter().enumerate() {
        rdma_fabric::prepare(host, number)?;
    }
    let _service = service(lab.host(0)?)?;
    let mut pair = Pair::place(lab, options, layout())?;
    let moves = options.count.unwrap_or(2);

    // How fast messages are.
    let (server, client) = (pingpong(&pair.b, TRIAL, None), pingpong(&pair.a, TRIAL, Some(&pair.b.tcp)));
    detach(&pair.b, &server)?;
    detach(&pair.a, &client)?;
    let trial = [ended(&pair.a, PATIENCE)?, ended(&pair.b, PATIENCE)?];
    let [(0, said), (0, _)] = &trial else {
        bail!("The programs don't work before anything moves: {trial:?}");
    };
    let seconds =
        seconds(said).with_context(|| format!("ibv_rc_pingpong doesn't say how long it took: {said}"))?;
    let count = messages(seconds, moves);
    progress!("{TRIAL} messages took {seconds} s; {count} for {moves} moves");

    let (server, client) = (pingpong(&pair.b, count, None), pingpong(&pair.a, count, Some(&pair.b.tcp)));
    detach(&pair.b, &server)?;
    detach(&pair.a, &client)?;
    let connected = |pair: &Pair<'_>| -> Result<BTreeSet<(String, u64, String)>> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let found = queue_pairs(pair.a.host(), "a")?;
            if !found.is_empty() || Instant::now() > until {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    };
    let first = connected(&pair)?;
    report.check(!first.is_empty(), "no queue pair is connected before the first move");
    let mut errors = 0;
    let mut transports = BTreeSet::new();
    for number in 0..moves {
        let to = if number % 2 == 0 { 1 } else { 0 };
        let timeline = step(lab, &mut pair, to).with_context(|| format!("Move {}", number + 1))?;
        let now = connected(&pair)?;
        let names = |all: &BTreeSet<(String, u64, String)>| -> BTreeSet<(String, u64)> {
            all.iter().map(|(handle, qpn, _)| (handle.clone(), *qpn)).collect()
        };
        if names(&now) != names(&first) {
            errors += 1;
            report.check(
                false,
                format!("queue pairs were {first:?}, and are {now:?} after move {}", number + 1),
            );
        }
        transports.extend(now.into_iter().map(|(_, _, transport)| transport));
        progress!(
            "move {}/{moves}: to h{}, {} bytes, {} rounds, pause {} ms (emulated: says nothing), {transports:?}",
            number + 1,
            to + 1,
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
        // It goes on for a while before the next one.
        std::thread::sleep(Duration::from_secs(5));
    }
    let goes_on = works(&pair.a)?;
    report.check(goes_on, "the programs had ended before the last move was over: they say less");
    let results = [ended(&pair.a, PATIENCE * 2)?, ended(&pair.b, PATIENCE * 2)?];
    for (code, said) in &results {
        let right = *code == 0 && !said.contains("invalid data") && !said.contains("Failed");
        errors += u32::from(!right);
        report.check(right, format!("a program ended with status {code}: {said}"));
    }
    for member in [&pair.a, &pair.b] {
        let trouble = member.guest.trouble();
        errors += u32::try_from(trouble.len()).unwrap_or(u32::MAX);
        report.check(trouble.is_empty(), format!("guest {}: {trouble:?}", member.name));
        // What a driver says when its device or a queue pair fails.
        let complaints = member
            .sh("dmesg | grep -i -c -e 'pvrdma.*error' -e 'pvrdma.*fatal' -e 'vmxnet3.*error' || true")?;
        let complaints: u32 = complaints.trim().parse().unwrap_or(1);
        errors += complaints;
        report.check(complaints == 0, format!("guest {}: {}", member.name, member.kernel_log(8)));
    }
    pair.a.reaches(&pair.b)?;
    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("messages", count);
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_run_follows_from_a_trial() {
        let said =
            "2457600 bytes in 0.60 seconds = 32.77 Mbit/sec\n300 iters in 1.50 seconds = 2000.00 usec/iter\n";
        assert_eq!(seconds(said), Some(1.5));
        assert_eq!(messages(f64::from(TRIAL) / 200.0, 1), 200 * PER_MOVE * 2);
        assert_eq!(seconds("nothing"), None);
    }
}
