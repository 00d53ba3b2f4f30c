//! A disk of guest b, served to guest a by mmblk, by NBD over virtio-net and the host's bridge, and by NBD over mmnet; and a virtio
//! disk of guest a as a reference. Runs fio in guest a, and counts the exits of both guests.

use crate::host::Host;
use crate::progress;
use crate::rdma::Runs;
use crate::scenarios::fio::{self, Job};
use crate::scenarios::neighbours_member::{Member, counter};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Size of each disk in MiB.
const DISK_MIB: u64 = 64;
/// MiB of each bulk job, unless its time ends first.
const BULK_MIB: u64 = 24;
/// Requests of 4 KiB of each job with a queue depth of one.
const REQUESTS: u64 = 600;
const FIO_TIMEOUT: Duration = Duration::from_secs(900);
/// Mount point of the second root disk, with NBD's programs and module.
const TOOLS: &str = "/run/tools";

/// The disks' files in the host, each with [`DISK_MIB`].
pub(super) const FILES: [&str; 2] = ["/disks/a.raw", "/disks/b.raw"];

/// Creates the files in the host.
pub(super) fn prepare(host: &Host) -> Result<()> {
    host.sh(&format!(
        "set -e; mkdir -p /disks; mke2fs -q -F /dev/vdc; mount /dev/vdc /disks; for f in {}; do dd if=/dev/zero of=$f bs=1M count={DISK_MIB} status=none; done",
        FILES.join(" ")
    ))
    .map(drop)
}

/// Guest a's access to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Mmblk,
    NbdVirtio,
    NbdMmnet,
    OwnVirtio,
}

impl Way {
    const ALL: [Way; 4] = [Way::Mmblk, Way::NbdVirtio, Way::NbdMmnet, Way::OwnVirtio];

    fn name(self) -> &'static str {
        match self {
            Way::Mmblk => "mmblk",
            Way::NbdVirtio => "nbd_virtio",
            Way::NbdMmnet => "nbd_mmnet",
            Way::OwnVirtio => "own_virtio",
        }
    }
}

/// A job of fio.
struct Task {
    name: &'static str,
    arguments: String,
    /// Exits are counted per request instead of per MiB.
    per_request: bool,
}

fn tasks() -> [Task; 4] {
    let bulk = format!("--bs=64k --size={BULK_MIB}M --iodepth=8");
    let one = format!("--bs=4k --size={DISK_MIB}M --io_size={}k --iodepth=1", REQUESTS * 4);
    let task = |name, rw: &str, more: &str, per_request| Task {
        name,
        arguments: format!("--rw={rw} {more}"),
        per_request,
    };
    [
        task("write_64k", "write", &bulk, false),
        task("read_64k", "read", &bulk, false),
        task("write_4k_one_at_a_time", "randwrite", &one, true),
        task("read_4k_one_at_a_time", "randread", &one, true),
    ]
}

/// Programs of the second root disk, which Debian's small guest image lacks.
fn tools(at: &Member<'_>) -> Result<()> {
    at.sh(&format!(
        "set -e; mkdir -p {TOOLS}; mount -o ro /dev/vdc {TOOLS}; for d in dev proc sys; do mount --rbind /$d {TOOLS}/$d; done; mount -t tmpfs t {TOOLS}/tmp"
    ))
    .map(drop)
}

fn nbd_attach(a: &Member<'_>, b: &Member<'_>, address: &str) -> Result<&'static str> {
    b.sh(&format!(
        "set -e; printf '[generic]\\nlistenaddr = {address}\\n[b]\\nexportname = /dev/vdb\\nflush = true\\nfua = true\\n' > {TOOLS}/tmp/nbd\n\
         chroot {TOOLS} nbd-server -C /tmp/nbd -p /tmp/nbd.pid; i=0\n\
         until ss -Hltn sport = :10809 | grep -q .; do i=$((i+1)); [ $i -gt 100 ] && exit 1; sleep 0.1; done"
    ))?;
    a.sh(&format!(
        "chroot {TOOLS} modprobe nbd max_part=0 nbds_max=1 && chroot {TOOLS} nbd-client -N b {address} /dev/nbd0 2>&1"
    ))?;
    Ok("/dev/nbd0")
}

fn nbd_detach(a: &Member<'_>, b: &Member<'_>) -> Result<()> {
    a.sh(&format!("chroot {TOOLS} nbd-client -d /dev/nbd0 && rmmod nbd"))?;
    b.sh(&format!(
        "kill $(cat {TOOLS}/tmp/nbd.pid); i=0; while ss -Hltn sport = :10809 | grep -q .; do i=$((i+1)); [ $i -gt 100 ] && exit 1; sleep 0.1; done"
    ))
    .map(drop)
}

/// Runs all jobs over all paths; removes modules and servers at the end. `addresses` are guest b's over virtio-net and over mmnet.
///
/// A job ends after `seconds` at the latest: exits are reported per completed MiB or request.
pub(super) fn compare(a: &Member<'_>, b: &Member<'_>, addresses: [&str; 2], seconds: u64) -> Result<Value> {
    let [virtio, mmnet] = addresses;
    for member in [a, b] {
        tools(member)?;
        member.sh("set -e; insmod /lab/configfs.ko 2>/dev/null || grep -q configfs /proc/filesystems; insmod /lab/mmblk.ko\n\
                   [ -e /sys/kernel/config/mmblk ] || mount -t configfs none /sys/kernel/config")?;
    }
    let mut found = Map::new();
    for way in Way::ALL {
        let disk = match way {
            Way::Mmblk => {
                b.serve("b", "/dev/vdb", a.name)?;
                a.attach(b.name, "b")?
            }
            Way::NbdVirtio => nbd_attach(a, b, virtio)?.to_owned(),
            Way::NbdMmnet => nbd_attach(a, b, mmnet)?.to_owned(),
            Way::OwnVirtio => "/dev/vdb".to_owned(),
        };
        let mut lines = Map::new();
        for task in tasks() {
            lines.insert(task.name.into(), job(a, b, &disk, way, &task, seconds)?);
        }
        let verified = verify(a, &disk)?;
        progress!("  {} verified {verified} bytes", way.name());
        lines.insert("bytes_verified".into(), verified.into());
        match way {
            Way::Mmblk => {
                let server = b.counters("exports/b")?;
                if counter(&server, "copied_bytes")? != 0 {
                    bail!("mmblk's server copied: {server:?}");
                }
                a.take_away("devices/b")?;
                b.take_away("exports/b")?;
            }
            Way::NbdVirtio | Way::NbdMmnet => nbd_detach(a, b)?,
            Way::OwnVirtio => {}
        }
        found.insert(way.name().into(), lines.into());
    }
    for member in [a, b] {
        member.sh(&format!("set -e; rmmod mmblk; umount -R {TOOLS}"))?;
    }
    Ok(found.into())
}

fn job(a: &Member<'_>, b: &Member<'_>, disk: &str, way: Way, task: &Task, seconds: u64) -> Result<Value> {
    let exits = || Ok::<_, anyhow::Error>(a.exits()? + b.exits()?);
    let before = exits()?;
    let text = a
        .run(
            &format!(
                "fio --name=x --filename={disk} {} --runtime={seconds} --direct=1 --ioengine=libaio --eta=never --output-format=json",
                task.arguments
            ),
            FIO_TIMEOUT,
        )?
        .success()
        .with_context(|| format!("{} over {}", task.name, way.name()))?;
    let exits = exits()? - before;
    let Job { written, read, operations, .. } = fio::job(&text)?;
    if operations == 0 {
        bail!("fio did nothing: {} over {}", task.name, way.name());
    }
    let mib = (written + read) as f64 / f64::from(1 << 20);
    let line = if task.per_request {
        json!({"requests": operations, "exits": exits, "exits_per_request": exits as f64 / operations as f64})
    } else {
        json!({"mib": mib, "exits": exits, "exits_per_mib": exits as f64 / mib})
    };
    progress!("  {} {}: {line}", way.name(), task.name);
    Ok(line)
}

/// Writes at random, reads back and compares. Returns the bytes.
fn verify(a: &Member<'_>, disk: &str) -> Result<u64> {
    let text = a
        .run(
            &format!(
                "fio --name=v --filename={disk} --rw=randwrite --bsrange=4k-128k --size=2M --verify=crc32c --verify_fatal=1 --direct=1 --ioengine=libaio \
                 --iodepth=8 --fsync=64 --eta=never --output-format=json"
            ),
            FIO_TIMEOUT,
        )?
        .success()?;
    let Job { written, read, .. } = fio::job(&text)?;
    if read < written || written == 0 {
        bail!("fio wrote {written} bytes and verified {read}");
    }
    Ok(read)
}
