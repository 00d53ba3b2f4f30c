//! A guest with an RDMA NIC migrates between two hosts of a cluster while it is connected to a third host. That host has no Causeway,
//! only Linux's rxe. perftest runs on both sides from before the first migration until after the last.
//!
//! ```text
//!  host h1: causeway cluster, causeway host      host h2: causeway host               host h3: rxe, no Causeway
//!  guest a ──────────── moves, and back ─────────▶ a
//!  segment s0: tap, br1 ── x0 ═══ link ═══ x0 ── br1 ── x2 ═══════ link ═══════ x2 10.80.0.9, rxe0
//!  virtio-net:      br0 ── x1 ═══ link ═══ x1 ── br0 ── x3 ═══════ link ═══════ x3 10.79.0.9
//! ```
//! An emulated host's blackout takes seconds, and means nothing. The programs' queue pairs time out after 15 s (perftest's `-u 19`):
//! the peer's own time-out limits the blackout that it tolerates (docs/design/migration.md).

use super::migrate_talk::{self as talk, STEP_TIMEOUT};
use super::rdma_fabric;
use crate::channel::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Coming, Device, Layout, Member, NIC, Port};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-wire",
    about: "a guest with an RDMA NIC moves between two hosts, connected with rxe on a third one outside of the cluster (--count N moves): perftest goes on",
    topology,
    run,
    prompt: None,
};

/// Port of the waiting monitors. Memory is sent over the first link.
const PORT: u32 = 7100;
/// Seconds that the programs run per migration.
const PER_MOVE: f64 = 60.0;
/// Messages of the run that measures the rate.
const TRIAL: u32 = 200;

fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").rdma())
        .host(HostSpec::new("h2").rdma())
        .host(HostSpec::new("h3").memory(1024).rdma())
        .link("h1", "h2")
        .link("h1", "h2")
        .link("h2", "h3")
        .link("h2", "h3")
}

/// Puts the third host's links on the second host's bridges.
const H2: &str = "set -e; for i in x2 x3; do ip addr flush dev $i; done; ip link set x2 master br1 up; ip link set x3 master br0 up";
const H3: &str = "set -e; ip addr flush dev x2; ip addr flush dev x3; ip addr add 10.80.0.9/24 dev x2; ip addr add 10.79.0.9/24 dev x3
ip link set x2 up; ip link set x3 up; modprobe -a rdma_rxe ib_uverbs ib_umad rdma_ucm; rdma link add rxe0 type rxe netdev x2";

fn command(port: &Port, count: u32, server: Option<&str>) -> String {
    let to = server.unwrap_or("");
    format!("ib_send_lat -d {} -x {} -F -s 4096 -u 19 -n {count} {to}", port.device, port.gid)
}

/// Returns the mean of half a round trip in microseconds: the sixth number after the heading.
fn mean(said: &str) -> Option<f64> {
    let line = said.lines().skip_while(|line| !line.contains("#bytes")).nth(1)?;
    line.split_whitespace().nth(5)?.parse().ok().filter(|mean| *mean > 0.0)
}

/// Returns the number of messages for `moves` migrations at this latency.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Bounded: floats become whole numbers at the nearest bound.
fn messages(half_us: f64, moves: u32) -> u32 {
    let rate = (500_000.0 / half_us).clamp(1.0, 100_000.0);
    (rate * PER_MOVE * f64::from(moves + 1)) as u32
}

/// Starts the server at rxe and the client in the guest.
fn start(h3: &Host, peer: &Port, guest: &Member<'_>, count: u32) -> Result<Session> {
    let server = h3.spawn("ib_send_lat", &format!("exec {}", command(peer, count, None)))?;
    let listens =
        "for i in $(seq 200); do ss -Hltn 'sport = :18515' | grep -q . && exit 0; sleep 0.2; done; exit 1";
    if h3.run(listens, STEP_TIMEOUT)?.code != 0 {
        bail!("perftest doesn't listen on h3: {}", server.err.tail(5));
    }
    talk::detach(guest, &command(&guest.port, count, Some("10.79.0.9")))?;
    Ok(server)
}

/// Waits for both ends; returns status and output of client and server.
fn end(server: &Session, guest: &Member<'_>, patience: Duration) -> Result<[(i32, String); 2]> {
    let client = talk::ended(guest, patience)?;
    let code = server.wait(Duration::from_secs(60))?;
    let Some(code) = code else { bail!("perftest on h3 doesn't end: {}", server.err.tail(6)) };
    Ok([client, (code, server.out.text() + &server.err.text())])
}

fn step<'a>(
    lab: &'a Lab,
    layout: &Layout,
    cpus: u32,
    (guest, daemons): (&mut Member<'a>, &[Session]),
    to: usize,
) -> Result<Value> {
    let address = format!("10.77.0.{}:{PORT}", to + 1);
    let from = lab.host(1 - to)?;
    let coming = Coming { member: guest, number: 0, cpus };
    let next: Guest = rdma::await_guest(lab, layout, &coming, (to, &address), STEP_TIMEOUT)?;
    if !talk::works(guest)? {
        bail!("perftest had ended before the move began: {}", guest.sh("cat /run/work.out")?);
    }
    let command = format!("causeway --json migrate a --to {address} --downtime 3000 --streams 2");
    let output = from.run(&command, STEP_TIMEOUT)?;
    if output.code != 0 {
        bail!(
            "It failed: {}; source {:?}, destination {:?}, daemons {:?}",
            output.stderr,
            guest.guest.session.err.tail(8),
            next.session.err.tail(8),
            daemons.iter().map(|daemon| daemon.err.tail(10)).collect::<Vec<_>>()
        );
    }
    let timeline = serde_json::from_str(output.stdout.trim())
        .with_context(|| format!("The timeline is {:?}", output.stdout))?;
    guest.moved(next, lab.host(to)?).ended(STEP_TIMEOUT)?;
    Ok(timeline)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-wire is about Causeway's device; its peer has rxe");
    }
    let service = talk::service(lab)?;
    let layout = talk::layout(&[0]);
    let (h2, h3) = (lab.host(1)?, lab.host(2)?);
    h3.sh(H3)?;
    // The daemon's start creates the first bridge.
    h2.sh("[ -e /sys/class/net/br0 ] || ip link add br0 type bridge; ip link set br0 up")?;
    h2.sh(H2)?;
    let cpus = options.cpus.first().copied().unwrap_or(2);
    let (mut guest, daemons) = rdma::alone_among(lab, options, &layout)?;
    let peer = rdma::find_port(h3, Device::Rxe)?;
    guest.sh(&format!("ping -q -c 2 -w 20 10.79.0.9 && ping -q -c 2 -w 20 {}", peer.address))?;

    let server = start(h3, &peer, &guest, TRIAL)?;
    let trial = end(&server, &guest, STEP_TIMEOUT)?;
    let [(0, said), (0, _)] = &trial else {
        bail!("perftest doesn't work before anything moves: {trial:?}");
    };
    let half = mean(said).with_context(|| format!("ib_send_lat doesn't say how long it took: {said}"))?;
    let moves = options.count.unwrap_or(2);
    let count = messages(half, moves);
    progress!("half a round trip takes {half} us; {count} messages for {moves} moves");
    let server = start(h3, &peer, &guest, count)?;
    let (first, by) = talk::connected(&guest)?;
    report.check(
        !first.is_empty() && by.iter().eq(["wire"]),
        format!("before the first move {first:?} are connected by {by:?}, not by wire alone"),
    );
    let (mut errors, mut received) = (0, Vec::new());
    for number in 0..moves {
        let to = if number % 2 == 0 { 1 } else { 0 };
        let timeline = step(lab, &layout, cpus, (&mut guest, &daemons), to)
            .with_context(|| format!("Move {}", number + 1))?;
        let (now, by) = talk::connected(&guest)?;
        let same = now == first && by.iter().eq(["wire"]);
        errors += u32::from(!same);
        report.check(same, format!("queue pairs were {first:?}, and are {now:?} by {by:?}"));
        // The counters start at the guest's arrival.
        let wire = rdma_fabric::tree(guest.host())?["vms"]["a"]["nics"][NIC]["rdma"]["wire"].clone();
        received.push(wire["packets_received"].clone());
        progress!(
            "move {}/{moves}: to h{}, {} bytes, pause {} ms (emulated: says nothing); {wire}",
            number + 1,
            to + 1,
            timeline["bytes"],
            timeline["pause_ms"]
        );
        std::thread::sleep(Duration::from_secs(5));
    }
    let goes_on = talk::works(&guest)?;
    report.check(goes_on, "perftest had ended before the last move was over: it says less");
    for (code, said) in end(&server, &guest, STEP_TIMEOUT * 2)? {
        let right = code == 0 && !said.contains("ailed") && !said.contains("rror");
        errors += u32::from(!right);
        report.check(right, format!("perftest ended with status {code}: {said}"));
    }
    let trouble = guest.guest.trouble();
    errors += u32::try_from(trouble.len()).unwrap_or(u32::MAX);
    report.check(trouble.is_empty(), format!("guest a: {trouble:?}"));
    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("messages", count);
    report.figure("packets_received_after_each_move", received);
    report.check(errors == 0, format!("{errors} errors"));
    rdma::end(&[&guest], &daemons)?;
    drop(service);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_run_follows_from_a_trial() {
        let said = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\n\
                    4096    200          501.77         3000.14      900.84               1000.0            1.55\n";
        assert_eq!(mean(said), Some(1000.0));
        assert_eq!(messages(1000.0, 1), 60_000);
        assert_eq!(mean("nothing"), None);
    }
}
