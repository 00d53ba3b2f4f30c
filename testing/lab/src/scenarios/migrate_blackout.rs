//! Compares the blackout of a migrating guest without RDMA under disk (fio) and TCP (iperf3) load, between Causeway and QEMU. Both run
//! one after the other on the same emulated host, with the same kernel, initramfs, disk, network and blackout limit.
//!
//! The host pings the guest every 20 ms. The blackout of a migration is the longest time between two answers, from its start until the
//! guest runs at the destination. The longest time between two answers without a migration is reported, too. Absolute times of an
//! emulated host mean nothing; only the comparison does.

use super::migrate::{NET, STEP_TIMEOUT, prepare};
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-blackout",
    about: "the blackout of a guest that moves under fio and iperf3 (--count moves, 10), with our monitor and with QEMU on the same host",
    topology: |_| Topology::new().host(HostSpec::new("host").memory(4096)),
    run,
    prompt: None,
};

/// Blackout limit of both, in milliseconds. An emulated host copies some megabytes per second.
const DOWNTIME: u32 = 1000;
/// Seconds of pings before the first migration.
const QUIET: u64 = 20;

/// fio and iperf3 without end, at rates that an emulated host sustains.
fn script(vmm: Vmm) -> String {
    let mut script = super::net::guest_up(NET);
    script.push_str(&format!(
        "mkdir -p /tmp/w; while :; do fio --name=w --filename=/dev/vdb --rw=randrw --bs=4k --size=48m --direct=1 --ioengine=psync --rate_iops=40 --time_based \
         --runtime=3600 > /tmp/w/fio 2>&1 || echo BROKEN fio; done &\n\
         while :; do iperf3 -c {NET}.1 -p {} -t 3600 -b 2M > /tmp/w/iperf 2>&1 || echo BROKEN iperf3; sleep 1; done &\n\
         sleep 3; echo WORKS; wait\n",
        iperf_port(vmm)
    ));
    script
}

fn spec(vmm: Vmm, kernel: &str, number: u32) -> GuestSpec {
    let mut spec = GuestSpec::new(&format!("place{number}"), kernel, 1)
        .memory(256)
        .root()
        .disk("/disks/data", false)
        .tap(&format!("tap{}", number % 2))
        .cmdline(["init_on_free=1"])
        .script(&script(vmm));
    if number > 0 {
        let incoming = match vmm {
            Vmm::Causeway => format!("--incoming 127.0.0.1:{}", port(number)),
            _ => format!("-incoming tcp:127.0.0.1:{}", port(number)),
        };
        spec.extra.push(incoming);
    }
    spec
}

/// Returns a separate server port per monitor: a server whose guest was killed keeps waiting for it.
fn iperf_port(vmm: Vmm) -> u32 {
    if matches!(vmm, Vmm::Causeway) { 5201 } else { 5202 }
}

fn port(number: u32) -> u32 {
    7100 + number
}

/// Returns the times of answers in seconds, as `ping -D` prints them.
fn answers(said: &str) -> Vec<f64> {
    let time = |line: &str| line.strip_prefix('[')?.split(']').next()?.parse().ok();
    said.lines().filter(|line| line.contains("bytes from")).filter_map(time).collect()
}

/// Returns the longest time between two answers that overlaps a span, in milliseconds. `None` if no answer came after its end.
fn longest(answers: &[f64], (from, to): (f64, f64)) -> Option<f64> {
    if answers.last().is_none_or(|last| *last < to) {
        return None;
    }
    let touches = |pair: &&[f64]| pair[1] >= from && pair[0] <= to;
    let gap = answers.windows(2).filter(touches).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    Some((gap * 1000.0).round())
}

/// Returns a percentile.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let at = (sorted.len() * percent).div_ceil(100).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

fn now(host: &Host) -> Result<f64> {
    host.sh("date +%s.%N")?.trim().parse().context("The host's clock can't be read")
}

/// Results of one monitor's migrations.
struct Outcome {
    blackouts: Vec<f64>,
    /// The blackout as the source reports it.
    said: Vec<f64>,
    quiet: f64,
}

fn moves(lab: &Lab, vmm: Vmm, kernel: &str, moves: u32, report: &mut Report) -> Result<Outcome> {
    let host = lab.host(0)?;
    let mut guest = Guest::start(host, &spec(vmm, kernel, 0), vmm)?;
    guest.expect("WORKS", STEP_TIMEOUT * 2)?;
    let ping = host.start(&format!("exec ping -n -D -i 0.02 {NET}.2"), None, None)?;
    let begun = now(host)?;
    std::thread::sleep(Duration::from_secs(QUIET));
    let mut spans = vec![(begun + 2.0, now(host)?)];
    let mut said = Vec::new();
    for number in 0..moves {
        let place = number + 1;
        let next = Guest::start(host, &spec(vmm, kernel, place), vmm)?;
        let listens = format!(
            "for i in $(seq 300); do ss -Hltn 'sport = :{}' | grep -q . && exit 0; sleep 0.3; done; exit 1",
            port(place)
        );
        if host.run(&listens, STEP_TIMEOUT)?.code != 0 {
            bail!("{} doesn't wait for a VM: {}", vmm.name(), next.session.err.tail(6));
        }
        let command = match vmm {
            Vmm::Causeway => format!(
                "causeway --json migrate place{number} --to 127.0.0.1:{} --downtime {DOWNTIME} --streams 2",
                port(place)
            ),
            _ => format!(
                "python3 /tmp/qemu-migrate.py /tmp/place{number}.qmp 127.0.0.1:{} {DOWNTIME}",
                port(place)
            ),
        };
        let from = now(host)?;
        let output = host.run(&command, STEP_TIMEOUT * 2)?;
        if output.code != 0 {
            bail!(
                "Move {place} by {} failed: {} {}; source {}, destination {}",
                vmm.name(),
                output.stdout,
                output.stderr,
                guest.session.err.tail(6),
                next.session.err.tail(6)
            );
        }
        spans.push((from, now(host)?));
        let told: Value = serde_json::from_str(output.stdout.trim())
            .with_context(|| format!("What moved it said {:?}", output.stdout))?;
        let pause = [&told["pause_ms"], &told["downtime"]].into_iter().find_map(Value::as_f64);
        said.push(pause.context("Whatever moved it doesn't say how long the pause was")?.round());
        guest.ended(STEP_TIMEOUT)?;
        guest = next;
        progress!("{}: move {place}/{moves}, it says a pause of {:?} ms", vmm.name(), said.last());
        std::thread::sleep(Duration::from_secs(3));
    }
    std::thread::sleep(Duration::from_secs(2));
    ping.signal(2)?;
    ping.wait(STEP_TIMEOUT)?;
    let answers = answers(&ping.out.text());
    let broken = guest.session.out.find("BROKEN");
    report.check(broken.is_empty(), format!("under {} a program in the guest ended: {broken:?}", vmm.name()));
    report.check(guest.trouble().is_empty(), format!("under {}: {:?}", vmm.name(), guest.trouble()));
    guest.session.kill()?;
    guest.session.wait(STEP_TIMEOUT)?;
    let mut gaps = Vec::new();
    for (number, span) in spans.into_iter().enumerate() {
        gaps.push(
            longest(&answers, span)
                .with_context(|| format!("The guest didn't answer after move {number}"))?,
        );
    }
    Ok(Outcome { quiet: gaps.remove(0), blackouts: gaps, said })
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    prepare(host)?;
    std::fs::write(host.share().join("qemu-migrate.py"), include_str!("../../assets/qemu-migrate.py"))?;
    host.sh("cp /share/qemu-migrate.py /tmp/")?;
    let server = |vmm| {
        host.spawn("iperf3", &format!("while :; do iperf3 -s -1 -p {} > /dev/null; done", iperf_port(vmm)))
    };
    let _servers = [server(Vmm::Causeway)?, server(Vmm::QemuQ35)?];
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let count = options.count.unwrap_or(10);
    report.figure("moves", count);
    for (vmm, name) in [(Vmm::Causeway, "causeway"), (Vmm::QemuQ35, "qemu")] {
        if !options.wants(name) {
            continue;
        }
        let mut outcome = moves(lab, vmm, kernel, count, report)?;
        progress!(
            "{name}: blackouts {:?} ms, said {:?}, while nothing moved {}",
            outcome.blackouts,
            outcome.said,
            outcome.quiet
        );
        outcome.blackouts.sort_by(f64::total_cmp);
        outcome.said.sort_by(f64::total_cmp);
        for percent in [50, 99] {
            report.figure(&format!("{name}_p{percent}_ms"), percentile(&outcome.blackouts, percent));
            report.figure(&format!("{name}_said_p{percent}_ms"), percentile(&outcome.said, percent));
        }
        report.figure(&format!("{name}_longest_while_nothing_moved_ms"), outcome.quiet);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_silence_of_a_span_is_found() {
        let said = "PING x\n[10.000000] 64 bytes from 10.78.0.2: icmp_seq=1\n[10.020000] 64 bytes from\n[10.5] 64 bytes from\n[10.6] no answer\n[10.52] 64 bytes from\n";
        let answers = answers(said);
        assert_eq!(answers, [10.0, 10.02, 10.5, 10.52]);
        assert_eq!(longest(&answers, (10.1, 10.2)), Some(480.0));
        assert_eq!(longest(&answers, (10.51, 10.52)), Some(20.0));
        // A guest that never answers again has no blackout.
        assert_eq!(longest(&answers, (10.51, 11.0)), None);
        assert_eq!(longest(&[], (1.0, 2.0)), None);
    }

    #[test]
    fn percentiles_are_of_what_was_seen() {
        let ten: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!((percentile(&ten, 50), percentile(&ten, 99)), (5.0, 10.0));
        assert_eq!(percentile(&[7.0], 50), 7.0);
        assert!(percentile(&[], 50).is_nan());
    }
}
