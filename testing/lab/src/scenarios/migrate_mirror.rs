//! A guest migrates between two hosts without shared storage, and back, while it writes, zeros and discards on its disk, which migrates
//! with it. The guest verifies the disk by checksums after each migration. At the end, the image equals the guest's disk byte by byte.

use super::migrate::{NET, STEP_TIMEOUT, breaks, steps, works_on};
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
    name: "migrate-mirror",
    about: "a guest that writes its disk moves between two hosts that share no storage, with --mirror; no room there, and a cancel: nothing lost, the disk the same by checksum",
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

/// Port of the waiting monitors. Memory and disks are sent over the first link.
const PORT: u32 = 7100;
/// The cluster key's path on both hosts.
const KEY: &str = "/run/cluster.key";
/// The disk's image, on each host's own storage.
const IMAGE: &str = "/disks/data";
const MIB: u64 = 64;

/// Bridges the second link and the guest's tap. Creates an image of the disk's size with other content, on the host's own storage.
fn prepare(host: &Host, first: bool) -> Result<()> {
    let address = if first { format!("ip addr add {NET}.1/24 dev br0 && ") } else { String::new() };
    host.sh(&format!(
        "umask 077; echo {key} > {KEY}; mke2fs -q -F -t ext4 -O ^has_journal /dev/vdc 1G && mkdir -p /disks /small && mount /dev/vdc /disks && \
         head -c 25165824 /dev/urandom > {IMAGE} && truncate -s {MIB}M {IMAGE} && mount -t tmpfs -o size=8m none /small && truncate -s {MIB}M /small/data && \
         ip link add br0 type bridge && ip addr flush dev x1 && ip link set x1 master br0 && ip link set x1 up && \
         ip tuntap add tap0 mode tap vnet_hdr && ip link set tap0 master br0 && ip link set tap0 up && {address} ip link set br0 up",
        key = "0123456789abcdef".repeat(4)
    ))
    .map(drop)
}

/// Returns the guest's script, which runs until the host opens port 7002. Each step writes, zeros or discards a place of the disk, and
/// verifies an earlier one. At the end it verifies all of them, and prints the whole disk's checksum.
fn script() -> String {
    let mut s = super::net::guest_up(NET);
    s.push_str(&format!(
        r#"mkdir -p /tmp/w; boot=$(cat /proc/sys/kernel/random/boot_id)
zeroes=$(head -c 131072 /dev/zero | sha256sum)
look() {{ [ "$(dd if=/dev/vdb bs=128k count=1 skip=$1 iflag=direct 2>/dev/null | sha256sum)" = "$(cat /tmp/w/sum.$1)" ]; }}
work() {{
  n=0; wrong=0
  while ! socat -u OPEN:/dev/null TCP:{NET}.1:7002 2>/dev/null; do
    n=$((n+1)); place=$((n * 37 % 400)); old=$((n * 53 % 400))
    case $((n % 9)) in
      0) blkdiscard -z -o $((place * 131072)) -l 131072 /dev/vdb || wrong=$((wrong+1)); echo "$zeroes" > /tmp/w/sum.$place;;
      5) rm -f /tmp/w/sum.$place; blkdiscard -o $((place * 131072)) -l 131072 /dev/vdb || wrong=$((wrong+1));;
      *) head -c 131072 /dev/urandom > /tmp/w/new; sha256sum < /tmp/w/new > /tmp/w/sum.$place
         dd if=/tmp/w/new of=/dev/vdb bs=128k count=1 seek=$place conv=notrunc oflag=direct 2>/dev/null || wrong=$((wrong+1));;
    esac
    for at in $place $old; do [ -f /tmp/w/sum.$at ] && {{ look $at || wrong=$((wrong+1)); }}; done
    echo "WORK $n $wrong $boot" | tee /dev/console
  done
  for file in /tmp/w/sum.*; do look ${{file##*.}} || wrong=$((wrong+1)); done
  n=$((n+1)); echo "WORK $n $wrong $boot" | tee /dev/console
}}
work | socat -u - TCP:{NET}.1:7001
sync; echo 3 > /proc/sys/vm/drop_caches
echo "DISK $(sha256sum < /dev/vdb | cut -c1-64)" > /dev/console
"#
    ));
    s
}

fn spec(kernel: &str, image: &str) -> GuestSpec {
    GuestSpec::new("moved", kernel, 2).memory(384).root().disk(image, false).tap("tap0").script(&script())
}

fn address(host: usize) -> String {
    format!("10.77.0.{}:{PORT}", host + 1)
}

/// Starts a monitor that waits on a host, with the disk in this image; returns when it listens.
fn waiting(host: &Host, number: usize, kernel: &str, image: &str, with: &str) -> Result<Guest> {
    let mut spec = spec(kernel, image);
    // With a key, --insecure isn't needed.
    spec.extra.push(format!("--insecure --incoming {}{with}", address(number)));
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
    let moves = options.count.unwrap_or(4);
    let _steps =
        home.spawn("steps", "exec socat -u TCP-LISTEN:7001,reuseaddr OPEN:/tmp/steps,creat,append")?;
    let mut errors = 0;
    let mut guest = Guest::start(home, &spec(kernel, IMAGE), Vmm::Causeway)?;
    guest.expect("WORK 6 ", STEP_TIMEOUT)?;

    // The destination has no room: it reports that, and the guest continues.
    let full = waiting(hosts[1], 1, kernel, "/small/data", "")?;
    let refused =
        home.run(&format!("causeway migrate moved --to {} --mirror --streams 3", address(1)), STEP_TIMEOUT)?;
    report.check(
        refused.code != 0 && refused.stderr.contains("No space left on device"),
        format!("a destination without room was to say so; it said {:?}", refused.stderr),
    );
    full.session.wait(STEP_TIMEOUT)?.context("A destination without room didn't end")?;
    works_on(home, &guest, 2)?;

    // Cancelled during the copy: the guest continues, and the incomplete image isn't used as a disk.
    let idle = waiting(hosts[1], 1, kernel, IMAGE, "")?;
    let cancelled = home.run(
        &format!(
            "(causeway migrate moved --to {} --mirror --downtime 0 --max-throttle 0 >/tmp/cancelled 2>&1; echo $? >/tmp/cancelled.code) & \
             for i in $(seq 200); do causeway --json inspect moved migration/phase | grep -q copying && break; sleep 0.05; done; \
             causeway --json inspect moved migration/disk_bytes_left; causeway migrate moved --cancel; wait; cat /tmp/cancelled.code /tmp/cancelled",
            address(1)
        ),
        STEP_TIMEOUT,
    )?;
    report.check(
        cancelled.stdout.contains("\n1\n") && cancelled.stdout.contains("The migration was cancelled"),
        format!("a migration was to be cancelled: {cancelled:?}"),
    );
    idle.session.wait(STEP_TIMEOUT)?.context("The destination of a cancelled migration didn't end")?;
    let half = Guest::start(hosts[1], &spec(kernel, IMAGE), Vmm::Causeway)?;
    let status = half.session.wait(STEP_TIMEOUT)?.context("A monitor with half a disk didn't end")?;
    report.check(
        status != 0 && half.session.err.text().contains("is incomplete"),
        format!("half a disk was to be refused: status {status}, {:?}", half.session.err.tail(5)),
    );
    works_on(home, &guest, 2)?;

    let (mut bytes, mut copied, mut again) = (0, 0, 0);
    for number in 0..usize::try_from(moves)? {
        let (from, to) = (hosts[number % 2], hosts[(number + 1) % 2]);
        // Every other round trip is encrypted, and names the disk.
        let special = number % 4 >= 2;
        let key = if special { format!(" --incoming-key {KEY}") } else { String::new() };
        let next = waiting(to, (number + 1) % 2, kernel, IMAGE, &key)?;
        let with = if special { format!(" disk1 --key {KEY}") } else { String::new() };
        let output = from.run(
            &format!(
                "causeway --json migrate moved --to {} --downtime 2000 --streams 3 --mirror{with}",
                address((number + 1) % 2)
            ),
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
        let timeline: Value = serde_json::from_str(output.stdout.trim())
            .with_context(|| format!("The timeline is {:?}", output.stdout))?;
        guest.ended(STEP_TIMEOUT)?;
        errors += guest.trouble().len();
        guest = next;
        works_on(home, &guest, 5)?;
        let disk = &timeline["disks"][0];
        let moved = disk["copied"].as_u64().unwrap_or(0);
        report.check(
            disk["name"] == "disk1" && disk["bytes"] == MIB << 20 && moved >= MIB << 20,
            format!("the disk that went along is {disk}"),
        );
        bytes += timeline["bytes"].as_u64().unwrap_or(0);
        copied += moved;
        again += moved.saturating_sub(MIB << 20);
        progress!(
            "move {}/{moves}: to {}{}, {} bytes, {moved} of the disk, {} rounds, pause {} ms (emulated: says nothing)",
            number + 1,
            to.name(),
            if special { ", encrypted" } else { "" },
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len),
            timeline["pause_ms"]
        );
    }

    let _end = home.spawn("end", "exec socat -u TCP-LISTEN:7002,reuseaddr,fork OPEN:/dev/null,append")?;
    let status = guest.script_status(STEP_TIMEOUT)?;
    guest.ended(STEP_TIMEOUT)?;
    errors += guest.trouble().len();
    let console = guest.session.out.text();
    let seen = console.lines().find_map(|line| Some(line.split_once("DISK ")?.1.trim().to_owned()));
    let last = hosts[usize::try_from(moves)? % 2];
    let image = last.sh(&format!("sha256sum < {IMAGE} | cut -c1-64"))?.trim().to_owned();
    let other = hosts[(usize::try_from(moves)? + 1) % 2];
    let before = other.sh(&format!("sha256sum < {IMAGE} | cut -c1-64"))?.trim().to_owned();
    let steps = steps(&home.sh("cat /tmp/steps")?);
    let wrong = steps.last().map_or(1, |step| step.wrong);
    let broken = breaks(&steps);
    errors += broken + usize::try_from(wrong).unwrap_or(usize::MAX);
    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("refused", 1);
    report.figure("cancelled", 1);
    report.figure("steps", steps.len());
    report.figure("wrong_checksums", wrong);
    report.figure("steps_missing_or_repeated", broken);
    report.figure("bytes", bytes);
    report.figure("disk_bytes_copied", copied);
    report.figure("disk_bytes_copied_again", again);
    report.figure("guest_status", status);
    report.check(errors == 0, format!("{errors} errors; steps {:?} to {:?}", steps.first(), steps.last()));
    report.check(
        seen.as_deref() == Some(image.as_str()) && !image.is_empty(),
        format!("the guest saw a disk of {seen:?}, the image is {image}"),
    );
    report.check(image != before, "the image where the guest was before is the same: it wrote nothing");
    report.check(steps.len() as u64 >= u64::from(moves) * 5, format!("only {} steps arrived", steps.len()));
    report.check(status == 0, format!("the guest's script ended with status {status}"));
    Ok(())
}
