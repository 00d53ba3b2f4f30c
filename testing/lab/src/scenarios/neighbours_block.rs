//! Three neighbour guests with mmblk between them: a served disk, used over one hop and over two. Counts copies, and exits in
//! comparison with virtio-blk. Removes and restores the export, the serving guest and its module.
//!
//! ```text
//!   files (client) ───────────── d0 ─────────────▶ disks (server): /dev/vdb, a file of the host
//!   files ─── p0 ───▶ raid ───── d1 ─────────────▶ disks: /dev/vdc          p0 is raid's own /dev/mmblkN, served on
//! ```

use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::image::Images;
use crate::kernel::Modules;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::rdma::{self, DAEMON_SOCKET, Runs};
use crate::recipe::Artifact;
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::fio::{self, Job};
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::scenarios::neighbours_member::{CONFIG, Member, counter};
use crate::topology::{HostSpec, Topology};
use crate::{progress, recipe};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-block",
    about: "three guests with mmblk between them: fio with verification over one hop and two, copies and exits counted, an export and a server that go and come back",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(3584).neighbours()),
    run,
    prompt: None,
};

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 448;
const BOOT: Duration = Duration::from_secs(300);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);
/// Time-out of a guest's heartbeat at the daemon: an emulated host may stall for seconds under load. A killed monitor is detected at
/// once.
const PATIENCE_MS: u32 = 20_000;
/// Size of each disk in MiB.
const DISK_MIB: u64 = 96;
/// The guests.
const NAMES: [&str; 3] = ["disks", "raid", "files"];

fn boot<'a>(host: &'a Host, options: &Options, kernel: &str, number: usize) -> Result<Member<'a>> {
    let name = *NAMES.get(number).context("a guest without a name")?;
    let peers: Vec<String> =
        NAMES.iter().filter(|peer| **peer != name).map(|peer| format!("\"{peer}\"")).collect();
    host.sh(&format!(
        "printf '[neighbour]\\ngroup = \"lab\"\\npermit = [{}]\\nhost = \"{DAEMON_SOCKET}\"\\n' > /tmp/{name}.toml",
        peers.join(", ")
    ))?;
    let mut spec = GuestSpec::new(name, kernel, options.cpus.first().copied().unwrap_or(2))
        .memory(MEMORY_MIB)
        .root()
        .script(&format!(
            "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run; hostname {name}\ncd /lab; for m in $(cat order) cw_neigh mmblk; do insmod $m.ko; done\n\
             mount -t configfs none /sys/kernel/config; echo neighbour {number} takes commands\n{}",
            guest_channel::serve(&format!("10.79.0.{number}"))
        ))
        .file("agent", std::fs::read(crate::paths::agent()?)?)
        .file("cw_neigh.ko", module(kernel, "cw_neigh")?)
        .file("mmblk.ko", module(kernel, "mmblk")?);
    let images = Images::ready(&[Artifact::Kernels])?;
    let modules = Modules::scan(&images.kernel(kernel).join("modules"))?.in_order(&["configfs"])?;
    let order: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
    spec = spec.file("order", order.join(" ").into_bytes());
    for (module, path) in &modules {
        spec = spec.file(&format!("{module}.ko"), std::fs::read(path)?);
    }
    let disks: &[&str] = match name {
        "disks" => &["/disks/d0.raw", "/disks/d1.raw"],
        // The reference for mmblk.
        "files" => &["/disks/v.raw"],
        _ => &[],
    };
    for disk in disks {
        spec = spec.disk(disk, false);
    }
    spec.extra.push(format!("--vsock cid={},socket={}", number + 3, guest_channel::socket(name)));
    spec.extra.push(format!("/tmp/{name}.toml"));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    Ok(Member { name, guest, host })
}

struct Trio<'a> {
    disks: Member<'a>,
    raid: Member<'a>,
    files: Member<'a>,
    host: &'a Host,
    kernel: String,
    daemon: Session,
}

impl<'a> Trio<'a> {
    fn start(lab: &'a Lab, options: &Options) -> Result<Self> {
        lab.install_causeway()?;
        let host = lab.host(0)?;
        host.sh(&format!(
            "mkdir -p /run/causeway /disks; mke2fs -q -F /dev/vdc; mount /dev/vdc /disks; truncate -s {DISK_MIB}M /disks/d0.raw /disks/d1.raw /disks/v.raw"
        ))?;
        let daemon = rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))?;
        let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
        let disks = boot(host, options, &kernel, 0)?;
        let raid = boot(host, options, &kernel, 1)?;
        let files = boot(host, options, &kernel, 2)?;
        for member in [&disks, &raid, &files] {
            member.guest.expect("takes commands", BOOT)?;
        }
        Ok(Trio { disks, raid, files, host, kernel, daemon })
    }

    fn all(&self) -> [&Member<'a>; 3] {
        [&self.disks, &self.raid, &self.files]
    }
}

/// Writes at random, reads back and compares, bypassing the page cache. Returns the verified bytes.
fn verify(at: &Member<'_>, disk: &str, mib: u64) -> Result<u64> {
    let text = at.sh(&format!(
        "fio --name=v --filename={disk} --rw=randwrite --bsrange=4k-128k --size={mib}M --verify=crc32c --verify_fatal=1 --direct=1 --ioengine=libaio \
         --iodepth=8 --fsync=64 --eta=never --output-format=json"
    ))?;
    let Job { written, read, .. } = fio::job(&text)?;
    if read < written || written == 0 {
        bail!("fio wrote {written} bytes and verified {read}");
    }
    Ok(read)
}

type Found = Result<Value>;

/// One hop: checks every byte, and counts copies.
fn one_hop(trio: &Trio<'_>) -> Found {
    trio.disks.serve("d0", "/dev/vdb", "files")?;
    let disk = trio.files.attach("disks", "d0")?;
    let verified = verify(&trio.files, &disk, 32)?;
    let client = trio.files.counters("devices/d0")?;
    let server = trio.disks.counters("exports/d0")?;
    let written = counter(&client, "written_bytes")?;
    if counter(&client, "by_reference_bytes")? != written || counter(&server, "by_reference_bytes")? < written
    {
        bail!("not all of {written} written bytes went by reference: client {client:?}, server {server:?}");
    }
    if counter(&server, "copied_bytes")? != 0 {
        bail!("the server copied: {server:?}");
    }
    // A file system, through the page cache.
    trio.files.sh(&format!(
        "set -e; mke2fs -q -F {disk}; mount {disk} /mnt; head -c 8M /dev/urandom > /mnt/x; s=$(sha256sum < /mnt/x); umount /mnt\n\
         mount {disk} /mnt; [ \"$(sha256sum < /mnt/x)\" = \"$s\" ]; rm /mnt/x; umount /mnt; blkdiscard -f -z -o 64M -l 8M {disk}\n\
         [ $(dd if={disk} bs=1M skip=64 count=8 2>/dev/null | tr -d '\\000' | wc -c) = 0 ]; blkdiscard -f -o 64M -l 8M {disk}"
    ))?;
    let reads = counter(&client, "read_bytes")?;
    Ok(
        json!({"bytes_verified": verified, "written_by_reference": written, "read_copied_once": reads, "client_copied": counter(&client, "copied_bytes")?}),
    )
}

/// Two hops: the middle guest passes the same addresses on, without copies.
fn two_hops(trio: &Trio<'_>) -> Found {
    trio.disks.serve("d1", "/dev/vdc", "raid")?;
    let middle = trio.raid.attach("disks", "d1")?;
    trio.raid.serve("p0", &middle, "files")?;
    let disk = trio.files.attach("raid", "p0")?;
    let verified = verify(&trio.files, &disk, 16)?;
    let first = trio.files.counters("devices/p0")?;
    let second = trio.raid.counters("devices/d1")?;
    let server = trio.disks.counters("exports/d1")?;
    let written = counter(&first, "written_bytes")?;
    let forwarded = counter(&second, "forwarded_bytes")?;
    let arrived = counter(&server, "forwarded_bytes")?;
    // Each client copies a read once; the rest belongs to writes.
    let copied = counter(&second, "copied_bytes")?.saturating_sub(counter(&second, "read_bytes")?);
    if written == 0 || forwarded < written || arrived < written || copied != 0 {
        bail!(
            "of {written} written bytes {forwarded} were passed on, {arrived} arrived by reference, {copied} were copied: {second:?} {server:?}"
        );
    }
    Ok(
        json!({"bytes_verified": verified, "written": written, "forwarded": forwarded, "arrived_by_reference": arrived, "copied": copied}),
    )
}

/// Compares exits per MiB of the same writes over mmblk (both guests) and over virtio-blk (one guest).
fn exits(trio: &Trio<'_>) -> Found {
    let mut found = Map::new();
    for (name, disk) in [("mmblk", "mmblk0"), ("virtio", "vdb")] {
        for rw in ["write", "read"] {
            let count = || Ok::<_, anyhow::Error>(trio.files.exits()? + trio.disks.exits()?);
            let before = count()?;
            let text = trio.files.sh(&format!(
                "fio --name=x --filename=/dev/{disk} --rw={rw} --bs=64k --size=32M --direct=1 --ioengine=libaio --iodepth=8 --eta=never --output-format=json"
            ))?;
            let exits = count()? - before;
            let Job { written, read, .. } = fio::job(&text)?;
            let mib = (written + read) as f64 / f64::from(1 << 20);
            let line = json!({"mib": mib, "exits": exits, "exits_per_mib": exits as f64 / mib});
            progress!("  {name} {rw}: {line}");
            found.insert(format!("{name}_{rw}"), line);
        }
    }
    Ok(found.into())
}

/// Removes the export under writes, and restores it: writes wait, and every byte is correct.
fn export_away(trio: &Trio<'_>) -> Found {
    trio.files.sh(&format!("echo 240000 > {CONFIG}/devices/d0/wait_ms"))?;
    let job = trio.files.start(
        "exec fio --name=v --filename=/dev/mmblk0 --rw=randwrite --bs=16k --size=16M --io_size=16M --verify=crc32c --verify_fatal=1 --direct=1 --ioengine=libaio \
         --iodepth=4 --rate=2m --eta=never --output-format=json",
    )?;
    std::thread::sleep(Duration::from_secs(3));
    trio.disks.sh(&format!("echo 0 > {CONFIG}/exports/d0/enable"))?;
    trio.files.until("d0", "waiting", Duration::from_secs(20))?;
    trio.disks.sh(&format!("echo 1 > {CONFIG}/exports/d0/enable"))?;
    let back = trio.files.until("d0", "live", Duration::from_secs(20))?;
    let output = job.output(COMMAND_TIMEOUT)?.success()?;
    let Job { written, read, .. } = fio::job(&output)?;
    Ok(json!({"bytes_verified": read, "written": written, "seconds_until_back": back}))
}

/// Kills the serving guest under writes, and boots it again. Then kills it while requests may not wait.
fn server_dies<'a>(trio: &mut Trio<'a>, options: &Options) -> Found {
    trio.files.sh(&format!("echo 240000 > {CONFIG}/devices/d0/wait_ms"))?;
    let job = trio.files.start(
        "exec fio --name=v --filename=/dev/mmblk0 --rw=randwrite --bs=16k --size=16M --io_size=16M --verify=crc32c --verify_fatal=1 --direct=1 --ioengine=libaio \
         --iodepth=4 --rate=2m --eta=never --output-format=json",
    )?;
    std::thread::sleep(Duration::from_secs(3));
    trio.disks.guest.session.kill()?;
    let seen = trio.files.until("d0", "waiting", Duration::from_secs(20))?;
    trio.disks.guest.session.wait(Duration::from_secs(30))?;
    trio.disks = boot(trio.host, options, &trio.kernel, 0)?;
    trio.disks.guest.expect("takes commands", BOOT)?;
    trio.disks.serve("d0", "/dev/vdb", "files")?;
    trio.files.until("d0", "live", Duration::from_secs(60))?;
    let Job { read: verified, .. } = fio::job(&job.output(COMMAND_TIMEOUT)?.success()?)?;

    trio.files.sh(&format!("echo 0 > {CONFIG}/devices/d0/wait_ms"))?;
    trio.disks.guest.session.kill()?;
    trio.files.until("d0", "failed", Duration::from_secs(20))?;
    let refused =
        trio.files.run("dd if=/dev/zero of=/dev/mmblk0 bs=64k count=1 oflag=direct", COMMAND_TIMEOUT)?;
    if refused.code == 0 {
        bail!("a write to a server that is dead succeeded");
    }
    trio.disks.guest.session.wait(Duration::from_secs(30))?;
    trio.disks = boot(trio.host, options, &trio.kernel, 0)?;
    trio.disks.guest.expect("takes commands", BOOT)?;
    trio.disks.serve("d0", "/dev/vdb", "files")?;
    trio.files.until("d0", "live", Duration::from_secs(60))?;
    trio.files.sh("dd if=/dev/zero of=/dev/mmblk0 bs=64k count=1 oflag=direct")?;
    Ok(json!({"bytes_verified": verified, "seconds_until_seen_at_most": seen}))
}

/// Removes everything: no module is in use.
fn unload(trio: &Trio<'_>) -> Found {
    for member in [&trio.files, &trio.raid, &trio.disks] {
        member.sh(&format!(
            "set -e; for d in {CONFIG}/exports/* {CONFIG}/devices/*; do [ -e $d ] || continue; echo 0 > $d/enable; rmdir $d; done; rmmod mmblk; rmmod cw_neigh"
        ))?;
    }
    Ok(json!({}))
}

/// Checks the kernels' logs for complaints; I/O errors are checked elsewhere.
fn quiet(trio: &Trio<'_>) -> Result<()> {
    trio.all().into_iter().try_for_each(|m| kernel_is_content(m.name, &m.guest, |script| m.sh(script)))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let mut trio = Trio::start(lab, options)?;
    let (mut passed, mut failed) = (0_u32, 0_u32);
    let mut parts = Map::new();
    let mut note = |trio: &Trio<'_>, name: &str, found: Found| match found
        .and_then(|found| quiet(trio).map(|()| found))
    {
        Ok(found) => {
            passed += 1;
            progress!("{name}: passed {found}");
            parts.insert(name.into(), found);
        }
        Err(error) => {
            failed += 1;
            report.check(false, format!("{name}: {error:#}"));
            parts.insert(name.into(), json!({"error": format!("{error:#}")}));
        }
    };
    // Later parts use the first part's device.
    note(&trio, "one-hop", one_hop(&trio));
    for (name, what) in
        [("two-hops", two_hops as fn(&Trio<'_>) -> Found), ("exits", exits), ("export-away", export_away)]
    {
        if options.wants(name) {
            progress!("{name}");
            note(&trio, name, what(&trio));
        }
    }
    if options.wants("server-dies") {
        progress!("server-dies");
        let found = server_dies(&mut trio, options);
        note(&trio, "server-dies", found);
    }
    if options.wants("unload") {
        note(&trio, "unload", unload(&trio));
    }
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.figure("kernel", trio.kernel.clone());
    report.figure("parts", parts);
    for member in trio.all() {
        let _ = member.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
        member.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&trio.daemon)
}
