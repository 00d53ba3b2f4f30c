//! RDMA between guests of two hosts over a bad link: packets are lost, duplicated, delayed and reordered (tc netem at both ends of the
//! daemons' link). In the end none arrives.
//!
//! Hosts, guests and daemons are those of `rdma-fabric`. The programs' TCP connections use another link without faults.

use super::rdma_fabric::{layout, prepare, topology, tree};
use crate::channel::Output;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::transcript::Waited;
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-netem",
    about: "RDMA between guests of two hosts while packets are lost, repeated, delayed and reordered, then with a peer that disappears (--count N: increments of a counter under each)",
    topology,
    run,
    prompt: None,
};

/// Faults of the link in each direction, and the largest verified message. With 10 ms of jitter packets are reordered continuously, and
/// go-back-N advances by few packets per round trip.
const LINKS: &[(&str, &str, u32)] = &[
    ("loss", "loss 1%", 1 << 20),
    ("reordering", "delay 2ms reorder 5%", 1 << 20),
    ("duplication", "duplicate 5%", 1 << 20),
    ("jitter", "delay 10ms 10ms", 1 << 16),
    ("combined", "delay 10ms 10ms reorder 5% loss 1% duplicate 1%", 1 << 16),
];
/// The part in which the link drops everything.
const SILENCE: &str = "silence";
/// Default number of increments under each fault; `--count` overrides it.
const INCREMENTS: u32 = 5000;
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(600);

/// Configures netem in both directions; `None` drops everything.
fn link(lab: &Lab, netem: Option<&str>) -> Result<()> {
    for host in lab.hosts() {
        host.sh(&match netem {
            Some(words) => {
                format!("modprobe sch_netem; tc qdisc replace dev x0 root netem limit 10000 {words}")
            }
            None => "tc qdisc del dev x0 root".to_owned(),
        })?;
    }
    Ok(())
}

/// Returns a program's command for one side, with its device.
fn program(name: &str, member: &Member<'_>, more: &str) -> String {
    format!("{name} --device {} --gid {} {more}", member.port.device, member.port.gid)
}

/// Runs both sides of a program that ends by itself.
fn both(pair: &Pair<'_>, name: &str, port: u16, more: &str) -> Result<Output> {
    let listening = format!("ss -Hltn 'sport = :{port}' | grep -q .");
    let client = format!("{} {}", program(name, &pair.a, more), pair.b.tcp);
    let server = program(name, &pair.b, more);
    let (at_server, at_client) =
        rdma::both((&pair.b, &pair.a), &server, true, &listening, &client, PROGRAM_TIMEOUT)?;
    if (at_server.code, at_client.code) != (0, 0) {
        progress!(
            "  client: {}{}\n  server: {}{}",
            at_client.stdout,
            at_client.stderr,
            at_server.stdout,
            at_server.stderr
        );
    }
    Ok(at_client)
}

/// Counts of `rdma-counter`'s client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counted {
    operations: u64,
    wrong: u64,
    repeated: u64,
}

impl Counted {
    fn read(output: &str) -> Result<Self> {
        let line = output.lines().find(|line| line.starts_with("COUNTER "));
        let line = line.with_context(|| format!("rdma-counter printed no result: {output:?}"))?;
        let value = |name: &str| -> Result<u64> {
            let word = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            word.with_context(|| format!("no {name} in {line:?}"))?
                .parse()
                .with_context(|| format!("in {line:?}"))
        };
        Ok(Self { operations: value("operations")?, wrong: value("wrong")?, repeated: value("repeated")? })
    }
}

/// Returns the mismatches that `rdma-verify`'s client found.
fn mismatches(output: &str) -> Result<u64> {
    let line = output.lines().find_map(|line| line.strip_prefix("VERIFIED mismatches="));
    line.with_context(|| format!("rdma-verify came to no end: {output:?}"))?
        .trim()
        .parse()
        .context("mismatches")
}

/// Returns protocol counters, summed over the guests of both hosts.
fn retransmissions(lab: &Lab) -> Result<u64> {
    let mut sum = 0;
    for host in lab.hosts() {
        let tree = tree(host)?;
        for vm in tree["vms"].as_object().into_iter().flat_map(|vms| vms.values()) {
            for nic in vm["nics"].as_object().into_iter().flat_map(|nics| nics.values()) {
                let counted = nic["rdma"]["counters"]["retransmitted_packets"].as_u64();
                sum += counted.context("A NIC has no counter retransmitted_packets")?;
            }
        }
    }
    Ok(sum)
}

/// Increments run until no packet arrives: the guest must get the right error.
fn silence(lab: &Lab, pair: &Pair<'_>) -> Result<f64> {
    let more = "--until-failure";
    let server = pair.b.start(&format!("exec timeout 120 {}", program("rdma-counter", &pair.b, more)))?;
    let client = program("rdma-counter", &pair.a, more);
    let client = pair.a.start(&format!("exec timeout 120 {client} {}", pair.b.tcp))?;
    let began = client.wait_for("COUNTING", 0, Duration::from_secs(60));
    if !matches!(began, Waited::Line(..)) {
        bail!("rdma-counter didn't begin: {}{}", client.out.tail(5), client.err.tail(5));
    }
    std::thread::sleep(Duration::from_secs(2));
    link(lab, Some("loss 100%"))?;
    let silent = Instant::now();
    let output = client.output(Duration::from_secs(60));
    link(lab, None)?;
    server.kill()?;
    let output = output?;
    let line = output.stdout.lines().find(|line| line.starts_with("FAILED "));
    let line = line.with_context(|| format!("it didn't fail: {}{}", output.stdout, output.stderr))?;
    progress!("  {line}, seen {:.1} s after the silence began", silent.elapsed().as_secs_f64());
    if !line.contains("status=transport retry counter exceeded") {
        bail!("{line:?}: a peer that is gone must end as exceeded retries");
    }
    let after = line.split_whitespace().find_map(|word| word.strip_prefix("after="));
    let after: f64 = after.context("no time in it")?.parse().context("its time")?;
    // T is 67 ms (code 14), and eight attempts take at least 8 T. Tests with simulated time check the upper bound of 32 T.
    if after < 8.0 * 0.067 {
        bail!("{line:?}: eight tries of 67 ms take longer");
    }
    Ok(after)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("rdma-netem is about Causeway's transport between hosts");
    }
    for (number, host) in lab.hosts().iter().enumerate() {
        prepare(host, number)?;
    }
    let pair = Pair::place(lab, options, layout())?;
    let count = options.count.unwrap_or(INCREMENTS);
    let (mut passed, mut failed, mut sum) = (0, 0, Counted::default());
    for (name, netem, largest) in LINKS.iter().filter(|(name, ..)| options.wants(name)) {
        let before = retransmissions(lab)?;
        link(lab, Some(netem))?;
        let verified = both(&pair, "rdma-verify", 18601, &format!("--no-ud --largest {largest}"))
            .and_then(|output| mismatches(&output.stdout));
        let counted = both(&pair, "rdma-counter", 18602, &format!("--count {count}"))
            .and_then(|output| Counted::read(&output.stdout));
        link(lab, None)?;
        let again = retransmissions(lab)?.saturating_sub(before);
        match (verified, counted) {
            (Ok(mismatches), Ok(counted)) => {
                progress!(
                    "{name} ({netem}): {mismatches} mismatches; {counted:?}; {again} packets sent again"
                );
                sum.operations += counted.operations;
                sum.wrong += counted.wrong + mismatches;
                sum.repeated += counted.repeated;
                // Otherwise the fault had no effect.
                let disturbed = again > 0 || *name == "duplication";
                report.check(
                    disturbed,
                    format!("{name}: no packet was sent again; does netem work on the hosts?"),
                );
                passed += 1;
            }
            (verified, counted) => {
                failed += 1;
                report.check(false, format!("{name} ({netem}): {verified:?}, {counted:?}"));
            }
        }
    }
    if options.wants(SILENCE) {
        match silence(lab, &pair) {
            Ok(after) => {
                passed += 1;
                report.figure("failure_after_s", after);
            }
            Err(e) => {
                failed += 1;
                report.check(false, format!("{SILENCE}: {e:#}"));
            }
        }
    }
    report.figure("operations", sum.operations);
    report.figure("wrong", sum.wrong);
    report.figure("repeated", sum.repeated);
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.check(sum.wrong == 0, format!("{} wrong results", sum.wrong));
    report.check(sum.repeated == 0, format!("{} operations were done twice", sum.repeated));
    report.check(passed > 0, "nothing was run");
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let text = "COUNTING\nCOUNTER operations=5000 wrong=1 repeated=2\n";
        assert_eq!(Counted::read(text).unwrap(), Counted { operations: 5000, wrong: 1, repeated: 2 });
        assert!(
            Counted::read("ERROR No completion within 120 s: x\n").unwrap_err().to_string().contains("ERROR")
        );
        assert_eq!(mismatches("VERIFY op=send\nVERIFIED mismatches=7\n").unwrap(), 7);
        assert!(mismatches("VERIFY op=send\n").is_err());
    }
}
