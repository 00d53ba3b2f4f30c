//! As `migrate-rdma`, with the guests' connections on the hosts' own RDMA devices (here Linux's rxe): transport `verbs`, to which the
//! cluster service pins all VMs.
//!
//! ```text
//!  host h1: causeway cluster --pin *=verbs                    host h2
//!  guest a ─ causeway host ─ rxe0 ─ x2 ═══ link ═══ x2 ─ rxe0 ─ causeway host ─ guest b
//!     └───────────────── moves ─────────────────▶ beside b: both ends are rxe0's of h2 ─▶ and back
//! ```
//! At each suspension the devices must have completed every request. At each host, new queue pairs of its device replace the previous
//! ones, and the guests' regions are registered with it. The guests see the same queue pairs and keys, and no error.

use super::migrate_rdma::{BEFORE, step};
use super::migrate_talk as talk;
use super::{rdma_fabric, rdma_verbs};
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Layout, NIC, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-verbs",
    about: "a guest whose connections the hosts' RDMA devices (rxe) carry moves between two hosts while they are busy: no error, the same queue pairs",
    topology: rdma_verbs::topology,
    run,
    prompt: None,
};

/// Daemons of a cluster, with the addresses of their hosts' RDMA devices.
fn layout() -> Layout {
    let base = talk::layout(&[0, 1]);
    let daemons = base.daemons.iter().zip(1..).map(|(daemon, host)| {
        let (before, after) =
            (format!("--fabric-address 10.77.0.{host}:"), format!("--fabric-address 10.77.2.{host}:"));
        format!("{} --verbs", daemon.replace(&before, &after))
    });
    Layout { daemons: daemons.collect(), ..base }
}

/// Returns the device numbers of a guest's connected queue pairs.
fn numbers(lab: &Lab, host: usize, vm: &str) -> Result<BTreeSet<u64>> {
    let tree = rdma_fabric::tree(lab.host(host)?)?;
    let all = tree["vms"][vm]["nics"][NIC]["rdma"]["queue_pairs"].as_object();
    Ok(all.into_iter().flatten().filter_map(|(_, qp)| qp["connection"]["verbs"]["number"].as_u64()).collect())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-verbs is about Causeway's device; rxe is what carries it here");
    }
    lab.install_causeway()?;
    for (number, host) in lab.hosts().iter().enumerate() {
        rdma_fabric::prepare(host, number)?;
        rdma_verbs::rxe(host, number)?;
    }
    let _service = talk::service_with(lab, 0, "--pin '*=verbs'")?;
    let mut pair = Pair::place(lab, options, layout())?;
    let moves = options.count.unwrap_or(3);
    let count = talk::begin(&pair, moves)?;
    let (first, _) = talk::connected(&pair.a)?;
    report.check(!first.is_empty(), "no queue pair is connected before the first move");
    let (mut errors, mut transports, mut hosts_numbers) = (0, BTreeSet::new(), Vec::new());
    for number in 0..moves {
        let to = if number % 2 == 0 { 1 } else { 0 };
        talk::go_on(&pair)?;
        hosts_numbers.push((1 - to, numbers(lab, 1 - to, "a")?));
        let timeline = step(lab, &mut pair, to, BEFORE).with_context(|| format!("Move {}", number + 1))?;
        // Let the programs run for a while: the first request creates the connection.
        let before = rdma_verbs::packets(lab.host(to)?)?;
        std::thread::sleep(Duration::from_secs(5));
        let after = rdma_verbs::packets(lab.host(to)?)?;
        let (now, reached_by) = talk::connected(&pair.a)?;
        if now != first {
            errors += 1;
            report.check(
                false,
                format!("queue pairs were {first:?}, and are {now:?} after move {}", number + 1),
            );
        }
        report.check(
            after[0] > before[0],
            format!(
                "h{}'s RDMA device sent nothing after move {}: {before:?}, {after:?}",
                to + 1,
                number + 1
            ),
        );
        transports.extend(reached_by);
        hosts_numbers.push((to, numbers(lab, to, "a")?));
        progress!(
            "move {}/{moves}: to h{}, {} bytes, {} rounds, pause {} ms (emulated: says nothing), {transports:?}; packets {before:?} to {after:?}",
            number + 1,
            to + 1,
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
    }
    progress!("numbers that the hosts' devices gave the guest's queue pairs: {hosts_numbers:?}");
    let shown = hosts_numbers.iter().all(|(_, numbers)| !numbers.is_empty());
    report.check(shown, format!("a device had no queue pair of the guest: {hosts_numbers:?}"));
    errors += talk::end(&pair, report)?;
    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("messages", count);
    let only_verbs = transports.iter().all(|transport| transport == "verbs");
    report.check(only_verbs, format!("connections went by {transports:?}"));
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_have_the_addresses_of_their_devices() {
        for (number, daemon) in (1..).zip(layout().daemons) {
            assert!(daemon.contains(&format!("--fabric-address 10.77.2.{number}:4792")), "{daemon}");
            assert!(daemon.contains("--cluster 10.77.0.1:") && daemon.ends_with(" --verbs"), "{daemon}");
        }
    }
}
