//! The monitor is killed at random moments while a guest writes. No write that was acknowledged as durable may be lost.

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use crate::{paths, progress, records};
use anyhow::{Context, Result, bail};
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "block-crash",
    about: "fio verify and a record writer on virtio-block; SIGKILL of the monitor at random moments loses no acknowledged flush",
    topology: |_| Topology::new().host(HostSpec::new("host").memory(4096)),
    run,
    prompt: None,
};

const GUEST_TIMEOUT: Duration = Duration::from_secs(150);

/// Creates two disks, one for the records and one for fio, in a real file system on the host's scratch disk.
fn prepare(host: &Host) -> Result<()> {
    host.sh(
        "mke2fs -q -F -t ext4 -O ^has_journal /dev/vdc 1G && mkdir -p /disks && mount /dev/vdc /disks && \
         truncate -s 128M /disks/records && dd if=/dev/zero of=/disks/fio bs=1M count=64 2>/dev/null && sync",
    )
    .map(drop)
}

fn guest(run: u64, kernel: &str) -> Result<GuestSpec> {
    let tool = fs::read(paths::agent()?)?;
    // fio works on its own disk meanwhile, so that other requests are in flight at each kill.
    let script = format!(
        "fio --name=load --filename=/dev/vdc --rw=randwrite --bs=8k --ioengine=psync --fsync=8 --rate_iops=60 --verify=crc32c --do_verify=0 --time_based --runtime=600 --size=64m >/dev/null 2>&1 &\n\
         exec /lab/tool records-write /dev/vdb {run}"
    );
    Ok(GuestSpec::new("crash", kernel, 2)
        .root()
        .disk("/disks/records", false)
        .disk("/disks/fio", false)
        .script(&script)
        .file("tool", tool))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let vmm = options.vmm()?;
    if vmm == Vmm::Causeway {
        lab.install_causeway()?;
    }
    let host = lab.host(0)?;
    prepare(host)?;
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let kills = options.count.unwrap_or(20);
    let mut seed =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| u64::from(d.subsec_nanos()) | 1);
    let (mut lost, mut records_seen) = (0, 0);
    for n in 1..=kills {
        let run = u64::from(n);
        host.forget_consoles();
        let g = Guest::start(host, &guest(run, kernel)?, vmm)?;
        g.expect(&format!("ACK {run} "), GUEST_TIMEOUT)?;
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        std::thread::sleep(Duration::from_millis(100 + seed % 4000));
        if let Some(code) = g.session.try_wait() {
            bail!("The monitor ended by itself with status {code} before it could be killed");
        }
        g.session.kill()?;
        g.session.wait(GUEST_TIMEOUT)?.context("The monitor outlived SIGKILL by minutes")?;
        let last =
            records::last_ack(&g.session.out.text(), run).context("No acknowledgement on the console")?;
        let check =
            host.run(&format!("/share/.lab/lab records-check /disks/records {run} {last}"), GUEST_TIMEOUT)?;
        let missing: u64 = check
            .stdout
            .split_whitespace()
            .nth(1)
            .and_then(|w| w.parse().ok())
            .with_context(|| format!("The checker failed: {}", check.stderr))?;
        lost += missing;
        records_seen += last + 1;
        progress!("kill {n}/{kills}: {} records acknowledged, {missing} lost", last + 1);
    }
    report.figure("kills", kills);
    report.figure("lost_flushes", lost);
    report.figure("records", records_seen);
    report.figure("monitor", vmm.name());
    report.check(lost == 0, format!("{lost} acknowledged records were lost"));
    // The same disks are used further: fio writes and verifies to the end.
    host.forget_consoles();
    let fio = "fio --eta=never --name=v --filename=/dev/vdc --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --size=8m --verify=crc32c --do_verify=1 --verify_fatal=1 --fsync=32 --output-format=terse >/tmp/o 2>&1; r=$?; tail -c 600 /tmp/o | grep -v '^3;'; exit $r";
    let spec = GuestSpec { script: Some(format!("#!/bin/sh\n{fio}\n")), ..guest(0, kernel)? };
    let g = Guest::start(host, &spec, vmm)?;
    let status = g.script_status(Duration::from_secs(240))?;
    report.figure("fio_verify_status", status);
    report.check(status == 0, format!("fio's verification ended with status {status}"));
    g.ended(GUEST_TIMEOUT)
}
