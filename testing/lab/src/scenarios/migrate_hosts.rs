//! A guest migrates between two hosts and back under load, with its network. Its disk is read-only and the same on both hosts. The
//! scenario `migrate` has a writable disk.

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
    name: "migrate-hosts",
    about: "a working guest moves between two hosts, there and back, with its address and one open TCP connection: nothing lost",
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

/// The cluster key's path on both hosts.
const KEY: &str = "/run/cluster.key";

/// Bridges the second link and the guest's tap. The first host has an address on it, too.
fn prepare(host: &Host, first: bool) -> Result<()> {
    let address = if first { format!("ip addr add {NET}.1/24 dev br0 && ") } else { String::new() };
    host.sh(&format!(
        "ip link add br0 type bridge && ip addr flush dev x1 && ip link set x1 master br0 && ip link set x1 up && \
         ip tuntap add tap0 mode tap vnet_hdr && ip link set tap0 master br0 && ip link set tap0 up && {address} ip link set br0 up"
    ))
    .map(drop)
}

fn spec(kernel: &str) -> GuestSpec {
    GuestSpec::new("moved", kernel, 2).memory(384).root().tap("tap0").script(&script(false))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.vmm()? != Vmm::Causeway {
        bail!("Only our monitor takes part in this scenario");
    }
    lab.install_causeway()?;
    let hosts = [lab.host(0)?, lab.host(1)?];
    prepare(hosts[0], true)?;
    prepare(hosts[1], false)?;
    for host in hosts {
        host.sh(&format!("umask 077; echo {} > {KEY}", "0123456789abcdef".repeat(4)))?;
    }
    let home = hosts[0];
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let moves = options.count.unwrap_or(4);
    let _steps =
        home.spawn("steps", "exec socat -u TCP-LISTEN:7001,reuseaddr OPEN:/tmp/steps,creat,append")?;
    let mut errors = 0;

    let mut guest = Guest::start(home, &spec(kernel), Vmm::Causeway)?;
    guest.expect("WORK 2 ", STEP_TIMEOUT)?;
    let ping = home.spawn("ping", &format!("exec ping -n -i 0.5 {NET}.2"))?;
    let mut bytes = 0;
    for number in 0..usize::try_from(moves)? {
        let (from, to) = (hosts[number % 2], hosts[(number + 1) % 2]);
        let address = format!("10.77.0.{}:{PORT}", (number + 1) % 2 + 1);
        let mut waits = spec(kernel);
        // Every other round trip is encrypted.
        let encrypted = number % 4 >= 2;
        let waits_with = if encrypted { format!(" --incoming-key {KEY}") } else { " --insecure".to_owned() };
        waits.extra.push(format!("--incoming {address}{waits_with}"));
        let next = Guest::start(to, &waits, Vmm::Causeway)?;
        let listens = "for i in $(seq 300); do causeway inspect moved summary | grep -q incoming && exit 0; sleep 0.3; done; exit 1";
        if to.run(listens, STEP_TIMEOUT)?.code != 0 {
            bail!("The monitor on {} doesn't wait for a VM: {}", to.name(), next.session.err.tail(5));
        }
        // The way back uses `causeway drain`, as this VM is the host's only one.
        let emptied = number % 2 == 1;
        let with = if encrypted { format!(" --key {KEY}") } else { String::new() };
        let which = if emptied { "drain" } else { "migrate moved" };
        let output = from.run(
            &format!("causeway --json {which} --to {address} --downtime 2000 --streams 4{with}"),
            STEP_TIMEOUT,
        )?;
        if output.code != 0 {
            bail!(
                "Move {} failed: {}; source {:?}, destination {:?}",
                number + 1,
                output.stderr,
                guest.session.err.tail(8),
                next.session.err.tail(8)
            );
        }
        let said: Value = serde_json::from_str(output.stdout.trim())
            .with_context(|| format!("The timeline is {:?}", output.stdout))?;
        let timeline = if emptied { &said["vms"][0]["timeline"] } else { &said };
        if timeline["bytes"].as_u64().is_none() {
            bail!("Move {} has no timeline: {said}", number + 1);
        }
        guest.ended(STEP_TIMEOUT)?;
        errors += guest.trouble().len();
        guest = next;
        works_on(home, &guest, 3)?;
        bytes += timeline["bytes"].as_u64().unwrap_or(0);
        progress!(
            "move {}/{moves}: to {} by {which}{}, {} bytes, {} rounds, pause {} ms (emulated: says nothing)",
            number + 1,
            to.name(),
            if encrypted { ", encrypted" } else { "" },
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
    }

    let _end = home.spawn("end", "exec socat -u TCP-LISTEN:7002,reuseaddr,fork OPEN:/dev/null,append")?;
    let status = guest.script_status(STEP_TIMEOUT)?;
    guest.ended(STEP_TIMEOUT)?;
    errors += guest.trouble().len();
    ping.signal(2)?;
    ping.wait(STEP_TIMEOUT)?;
    let steps = steps(&home.sh("cat /tmp/steps")?);
    let wrong = steps.last().map_or(1, |step| step.wrong);
    let broken = breaks(&steps);
    let pinged = ping.out.text();
    let answers = pinged.lines().filter(|line| line.contains("bytes from")).count();
    let repeated = pinged.lines().filter(|line| line.contains("DUP!")).count();
    errors += broken + repeated + usize::try_from(wrong).unwrap_or(usize::MAX);
    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("steps", steps.len());
    report.figure("wrong_hashes", wrong);
    report.figure("steps_missing_or_repeated", broken);
    report.figure("bytes", bytes);
    report.figure("pings_answered", answers);
    report.figure("pings_repeated", repeated);
    report.figure("guest_status", status);
    report.check(errors == 0, format!("{errors} errors; steps {:?} to {:?}", steps.first(), steps.last()));
    report.check(steps.len() as u64 >= u64::from(moves) * 3, format!("only {} steps arrived", steps.len()));
    report.check(status == 0, format!("the guest's script ended with status {status}"));
    Ok(())
}
