//! A guest migrates while its neighbour writes to its memory by RDMA, faster than the link between the hosts. Without throttling of
//! peers the migration doesn't converge, and is aborted. With throttling it completes. The queue pairs see no error, only a delay.
//!
//! ```text
//!  host h1: guest b ── ib_write_bw, from RAM to RAM ──▶ guest a ═══ 100 Mbit/s ═══▶ host h2
//! ```

use super::migrate_talk::{self as talk, STEP_TIMEOUT, works};
use super::rdma_fabric;
use crate::channel::Output;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-converge",
    about: "a guest moves into which its peer writes by RDMA faster than the link carries: given up without holding the peer back, done with it, no error",
    topology: rdma_fabric::topology,
    run,
    prompt: None,
};

/// Address of the waiting monitors.
const ADDRESS: &str = "10.77.0.2:7100";
/// Bytes of a message; perftest alternates between two of them.
const LENGTH: u32 = 8 << 20;
/// Seconds between two lines of perftest.
const EVERY: u32 = 3;

/// Returns the command of an endless perftest with periodic output.
fn perftest(m: &Member<'_>, server: &str) -> String {
    format!(
        "stdbuf -oL ib_write_bw -d {} -x {} -F -s {LENGTH} -t 4 --run_infinitely -D {EVERY} {server}",
        m.port.device, m.port.gid
    )
}

/// Returns the rates of all lines so far in MB/s, as the client prints them.
fn rates(m: &Member<'_>) -> Result<Vec<f64>> {
    let said = m.sh("cat /run/work.out")?;
    let length = LENGTH.to_string();
    let lines = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    Ok(lines
        .filter(|words| words.first() == Some(&length.as_str()))
        .filter_map(|words| words.get(3)?.parse().ok())
        .collect())
}

fn migrate(pair: &Pair<'_>, how: &str) -> Result<Output> {
    let from = pair.a.host();
    from.run(
        &format!("causeway --json migrate a --to {ADDRESS} --downtime 500 --streams 2 {how}"),
        STEP_TIMEOUT,
    )
}

fn mean(rates: &[f64]) -> f64 {
    let count = u32::try_from(rates.len()).unwrap_or(u32::MAX);
    rates.iter().sum::<f64>() / f64::from(count.max(1))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-converge is about Causeway's device");
    }
    let _service = talk::service(lab)?;
    let mut pair = Pair::place(lab, options, talk::layout(&[0, 0]))?;
    talk::detach(&pair.a, &perftest(&pair.a, ""))?;
    talk::detach(&pair.b, &perftest(&pair.b, &pair.a.tcp))?;
    // The side that only responds never becomes ready to send in perftest.
    let (first, _) = talk::connected(&pair.b)?;
    report.check(!first.is_empty(), "no queue pair is connected before the move");
    // A queue of a tenth of a second, as in a switch. With a longer one, acknowledgements would be late because of the queue.
    let link = "modprobe sch_tbf && tc qdisc replace dev x0 root tbf rate 100mbit burst 128kb latency 100ms";
    lab.host(0)?.sh(link)?;
    std::thread::sleep(Duration::from_secs(15));
    let free = rates(&pair.b)?;
    progress!("{free:?} MB/s unhindered (emulated: says nothing but beside what follows)");

    // Without throttling.
    let next: Guest = pair.await_guest(0, 1, ADDRESS, STEP_TIMEOUT)?;
    let refused = migrate(&pair, "--max-throttle 0 --timeout 60")?;
    report.check(
        refused.code != 0 && refused.stderr.contains("Memory changed too fast"),
        format!("without holding peers back it ended with {}: {}", refused.code, refused.stderr),
    );
    let left = next.session.wait(STEP_TIMEOUT)?;
    report.check(left.is_some_and(|code| code != 0), format!("the monitor that waited ended with {left:?}"));
    report.check(works(&pair.b)? && works(&pair.a)?, "perftest ended with the migration that was given up");

    let before = rates(&pair.b)?.len();
    let next: Guest = pair.await_guest(0, 1, ADDRESS, STEP_TIMEOUT)?;
    let output = migrate(&pair, "--max-throttle 99 --timeout 300")?;
    if output.code != 0 {
        bail!(
            "It failed: {}; source {:?}, daemons {:?}",
            output.stderr,
            pair.a.guest.session.err.tail(8),
            pair.daemons().iter().map(|daemon| daemon.err.tail(10)).collect::<Vec<_>>()
        );
    }
    let held = rates(&pair.b)?.split_off(before);
    let timeline: Value = serde_json::from_str(output.stdout.trim())
        .with_context(|| format!("The timeline is {:?}", output.stdout))?;
    pair.moved(0, next, 1)?.ended(STEP_TIMEOUT)?;
    lab.host(0)?.sh("tc qdisc del dev x0 root")?;
    let after = rates(&pair.b)?.len();
    std::thread::sleep(Duration::from_secs(20));
    let then = rates(&pair.b)?.split_off(after);
    report.check(works(&pair.b)? && works(&pair.a)?, "perftest ended with the migration");
    report.check(!then.is_empty(), "nothing is written after the move");
    report.check(talk::connected(&pair.b)?.0 == first, "queue pairs have other names after the move");
    let throttle: Vec<u64> = timeline["rounds"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|round| round["throttle_percent"].as_u64())
        .collect();
    report.check(throttle.iter().any(|percent| *percent > 0), format!("nobody was held back: {throttle:?}"));
    let mut errors = 0;
    for member in [&pair.a, &pair.b] {
        let said = member.sh("cat /run/work.out; pkill -x ib_write_bw; true")?;
        let failed = said.contains("Completion with error") || said.contains("Failed status");
        let complaints = member.sh("dmesg | grep -i -c -e 'pvrdma.*error' -e 'pvrdma.*fatal' || true")?;
        let trouble = member.guest.trouble();
        errors += u32::from(failed) + complaints.trim().parse::<u32>().unwrap_or(1);
        errors += u32::try_from(trouble.len()).unwrap_or(u32::MAX);
        let counters = if failed { rdma_fabric::tree(member.host())?.to_string() } else { String::new() };
        report.check(!failed, format!("perftest in guest {} failed: {said}; {counters}", member.name));
    }
    report.check(errors == 0, format!("{errors} errors"));
    report.figure("errors", errors);
    report.figure("rounds", throttle.len());
    report.figure("throttle_percent", throttle);
    report.figure("pause_ms", timeline["pause_ms"].clone());
    report.figure("unhindered_mb_per_s", mean(&free));
    report.figure("while_it_moves_mb_per_s", mean(&held));
    report.figure("afterwards_mb_per_s", mean(&then));
    pair.finish()
}
