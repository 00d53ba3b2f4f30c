//! A guest that writes memory faster than the link migrates between two hosts by post-copy: it runs at the destination before its
//! memory is there. At the end its source is killed while pages are still there. The destination must report the loss.

use super::migrate::{NET, STEP_TIMEOUT, breaks, script, steps, works_on};
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-postcopy",
    about: "a guest that changes its memory without pause moves between two hosts before its memory does, and after copies of it that don't get less: nothing lost; its source killed on the way: said",
    topology: |_| {
        Topology::new()
            .host(HostSpec::new("h1").memory(2048))
            .host(HostSpec::new("h2").memory(2048))
            .link("h1", "h2")
            .link("h1", "h2")
    },
    run,
    prompt: None,
};

/// Port of the waiting monitors. Memory is sent over the first link.
const PORT: u32 = 7100;
/// Rewrites 48 MiB of memory endlessly.
const CHURN: &str =
    "(head -c 50331648 /dev/urandom > /tmp/churn; while true; do cat /tmp/churn > /tmp/churned; done) &\n";

/// Bridges the second link and the guest's tap. The first host has an address on it, too. The first link is limited to 100 Mbit/s.
fn prepare(host: &Host, first: bool) -> Result<()> {
    let address = if first { format!("ip addr add {NET}.1/24 dev br0 && ") } else { String::new() };
    host.sh(&format!(
        "ip link add br0 type bridge && ip addr flush dev x1 && ip link set x1 master br0 && ip link set x1 up && \
         ip tuntap add tap0 mode tap vnet_hdr && ip link set tap0 master br0 && ip link set tap0 up && {address} ip link set br0 up && \
         modprobe sch_netem && tc qdisc replace dev x0 root netem limit 100 rate 100mbit"
    ))
    .map(drop)
}

fn spec(kernel: &str) -> GuestSpec {
    let script = format!("{CHURN}{}", script(false));
    GuestSpec::new("moved", kernel, 2).memory(384).root().tap("tap0").script(&script)
}

/// Returns the address of a host's waiting monitor.
fn address(host: usize) -> String {
    format!("10.77.0.{}:{PORT}", host + 1)
}

/// Starts a monitor on a host that waits for the guest.
fn waiting(host: &Host, number: usize, kernel: &str) -> Result<Guest> {
    let mut spec = spec(kernel);
    spec.extra.push(format!("--insecure --incoming {}", address(number)));
    let next = Guest::start(host, &spec, Vmm::Causeway)?;
    let listens = "for i in $(seq 300); do causeway inspect moved summary | grep -q incoming && exit 0; sleep 0.3; done; exit 1";
    if host.run(listens, STEP_TIMEOUT)?.code != 0 {
        bail!("The monitor on {} doesn't wait for a VM: {}", host.name(), next.session.err.tail(5));
    }
    Ok(next)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.vmm()? != Vmm::Causeway {
        bail!("Only our monitor takes part in this scenario");
    }
    lab.install_causeway()?;
    let hosts = [lab.host(0)?, lab.host(1)?];
    prepare(hosts[0], true)?;
    prepare(hosts[1], false)?;
    let home = hosts[0];
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    // The last migration loses the guest.
    let moves = usize::try_from(options.count.unwrap_or(4))?;
    let _steps =
        home.spawn("steps", "exec socat -u TCP-LISTEN:7001,reuseaddr OPEN:/tmp/steps,creat,append")?;
    let mut errors = 0;

    let mut guest = Guest::start(home, &spec(kernel), Vmm::Causeway)?;
    guest.expect("WORK 2 ", STEP_TIMEOUT)?;
    let (mut missing, mut asked, mut faults, mut bytes, mut rounds) = (0, 0, 0, 0, 0);
    for number in 0..moves {
        let (from, to) = (number % 2, (number + 1) % 2);
        let next = waiting(hosts[to], to, kernel)?;
        // At once, or after rounds that can't converge to a zero blackout.
        let how =
            if number % 2 == 0 { "--post-copy" } else { "--post-copy-after 2 --downtime 0 --streams 4" };
        let command = format!("causeway --json migrate moved --to {} {how}", address(to));
        let output = hosts[from].run(&command, STEP_TIMEOUT)?;
        if output.code != 0 {
            bail!(
                "Move {} failed: {}; source {:?}, destination {:?}",
                number + 1,
                output.stderr,
                guest.session.err.tail(8),
                next.session.err.tail(8)
            );
        }
        let timeline: Value = serde_json::from_str(output.stdout.trim())
            .with_context(|| format!("The timeline is {:?}", output.stdout))?;
        guest.ended(STEP_TIMEOUT)?;
        errors += guest.trouble().len();
        guest = next;
        works_on(home, &guest, 3)?;
        let after = &timeline["post_copy"];
        let part = |name: &str| after[name].as_u64().unwrap_or(0);
        report.check(
            part("missing_pages") > 0 && part("left_pages") == 0,
            format!("move {} wasn't by post-copy, or left pages: {timeline}", number + 1),
        );
        report.check(
            part("asked_pages") + part("pushed_pages") == part("missing_pages"),
            format!("pages of move {} went twice or not at all: {after}", number + 1),
        );
        let there = hosts[to].sh("causeway --json inspect moved post_copy")?;
        report.check(
            there.contains("\"done\"") && there.contains("\"pages_dropped\": 0")
                || there.contains("\"pages_dropped\":0"),
            format!("the destination of move {} says {there}", number + 1),
        );
        missing += part("missing_pages");
        asked += part("asked_pages");
        faults += part("faults");
        bytes += timeline["bytes"].as_u64().unwrap_or(0);
        rounds += timeline["rounds"].as_array().map_or(0, Vec::len);
        progress!(
            "move {}/{moves} to {}: {} rounds, then {} pages after the guest in {:.0} ms, {} asked for; pause {:.0} ms, waits median {} us, worst {} us (emulated: times say nothing)",
            number + 1,
            hosts[to].name(),
            timeline["rounds"].as_array().map_or(0, Vec::len),
            part("missing_pages"),
            after["took_ms"].as_f64().unwrap_or(0.0),
            part("asked_pages"),
            timeline["pause_ms"].as_f64().unwrap_or(0.0),
            part("fault_median_us"),
            part("fault_worst_us"),
        );
    }
    report.check(faults > 0, "no page was ever waited for");
    let before = steps(&home.sh("cat /tmp/steps")?);
    let wrong = before.last().map_or(1, |step| step.wrong);
    let broken = breaks(&before);
    errors += broken + usize::try_from(wrong).unwrap_or(usize::MAX);

    // The source is killed while pages are still there.
    let (from, to) = (moves % 2, (moves + 1) % 2);
    let doomed = waiting(hosts[to], to, kernel)?;
    let killed = hosts[from].run(
        &format!(
            "tc qdisc replace dev x0 root netem limit 100 rate 5mbit; \
             (causeway migrate moved --to {} --post-copy >/tmp/doomed 2>&1; echo $? >/tmp/doomed.code) & \
             for i in $(seq 1000); do causeway --json inspect moved migration/phase | grep -q post-copy && break; sleep 0.05; done; \
             causeway --json inspect moved migration/phase; causeway stop moved --force; \
             kill -9 $(causeway --json inspect moved summary/pid); wait; cat /tmp/doomed.code",
            address(to)
        ),
        STEP_TIMEOUT,
    )?;
    report.check(
        killed.stdout.contains("post-copy") && killed.stderr.contains("of its memory are still here"),
        format!("the source was to be killed in post-copy, and to refuse its end before: {killed:?}"),
    );
    let status =
        doomed.session.wait(STEP_TIMEOUT)?.context("The destination of a killed source didn't end")?;
    let said = doomed.session.err.text();
    report.check(
        status == 1 && said.contains("was lost in post-copy while") && said.contains("10.77.0."),
        format!("the destination was to say that its source is lost, and ended with {status}: {said}"),
    );

    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("killed_sources", 1);
    report.figure("steps", before.len());
    report.figure("wrong_hashes", wrong);
    report.figure("steps_missing_or_repeated", broken);
    report.figure("rounds_before", rounds);
    report.figure("pages_after_the_guest", missing);
    report.figure("pages_asked_for", asked);
    report.figure("pages_waited_for", faults);
    report.figure("bytes", bytes);
    report.check(errors == 0, format!("{errors} errors; steps {:?} to {:?}", before.first(), before.last()));
    report.check(before.len() >= moves * 3, format!("only {} steps arrived", before.len()));
    Ok(())
}
