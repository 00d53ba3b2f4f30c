//! A storage appliance whose layers are separate guests, as in Fido's case study (USENIX ATC 2009, section 5). mmnet and mmblk connect
//! the network, file system, RAID and storage guests; a client has neither module. The same run compares the same layers over virtio, and
//! in one guest. `appliance_stacks.rs` has the three stacks.
//!
//! Times of an emulated host mean nothing. The scenario checks that every byte is correct, and counts copies and exits.

use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::rdma::{self, DAEMON_SOCKET, Runs};
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::appliance_load::{self, Done};
use crate::scenarios::appliance_stacks::{self as stacks, ARRAY, DISK_MIB, Guests, MEMBERS, Stack};
use crate::scenarios::fio;
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::scenarios::neighbours_member::{Counts, Member, counter, grown};
use crate::topology::{HostSpec, Topology};
use crate::{progress, recipe};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-appliance",
    about: "a storage appliance of four guests with mmnet and mmblk between them, beside the same over virtio and one guest with all layers: a client's fio and kernel tree, copies and exits counted",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(4608).neighbours().appliance()),
    run,
    prompt: None,
};

const BOOT: Duration = Duration::from_secs(900);
/// Time-out of a guest's heartbeat at the daemon: an emulated host may stall for seconds under load.
const PATIENCE_MS: u32 = 20_000;
/// Default MiB that fio writes through each stack; `--count` overrides it.
const MIB: u64 = 16;
/// MiB that fio writes while copies are counted.
const COUNTED_MIB: u64 = 8;

/// A guest: name, RAM in MiB, NICs (name inside, bridge of the host), disks.
struct Part {
    name: &'static str,
    memory: u32,
    nics: &'static [(&'static str, &'static str)],
    disks: &'static [&'static str],
}

/// In the order of their numbers from 2 on, which are the last parts of their addresses.
const PARTS: [Part; 6] = [
    Part { name: "client", memory: 384, nics: &[("lan", "outer")], disks: &[] },
    Part { name: "net", memory: 288, nics: &[("lan", "outer"), ("nas", "inner")], disks: &[] },
    Part { name: "files", memory: 384, nics: &[("nas", "inner")], disks: &[] },
    Part { name: "raid", memory: 320, nics: &[("nas", "inner")], disks: &[] },
    Part {
        name: "disks",
        memory: 320,
        nics: &[("nas", "inner")],
        // Those of the neighbours, those of NBD, and one for the hops.
        disks: &["n0", "n1", "n2", "v0", "v1", "v2", "h"],
    },
    Part { name: "mono", memory: 448, nics: &[("lan", "outer")], disks: &["m0", "m1", "m2"] },
];

/// The neighbour guests. Each permits the others, as it passes their addresses on.
const NEIGHBOURS: [&str; 4] = ["net", "files", "raid", "disks"];

fn boot_script(part: &Part) -> String {
    // The last two parts of a MAC address: the guest's number, and the NIC's.
    let names: String = part
        .nics
        .iter()
        .enumerate()
        .map(|(n, (name, _))| {
            format!("*:0{n}) ip link set ${{d##*/}} name {name}; ip link set {name} mtu 9000;; ")
        })
        .collect();
    let address = if part.name == "client" { "ip addr add 10.83.0.2/24 dev lan\n" } else { "" };
    let up = if part.nics.iter().any(|(name, _)| *name == "lan") { "ip link set lan up\n" } else { "" };
    format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run; mkdir -p /run/lock /run/rpcbind /run/mdadm; echo {name} > /proc/sys/kernel/hostname\n\
         # The kernel asks for modules in the initramfs' root, where there are none: hand it on to this one.\n\
         printf '#!/bin/busybox sh\\nexec /bin/busybox chroot /new /sbin/modprobe \"$@\"\\n' > /proc/1/root/modprobe\n\
         chmod +x /proc/1/root/modprobe; echo /modprobe > /proc/sys/kernel/modprobe\n\
         modprobe configfs; mount -t configfs none /sys/kernel/config\n\
         for d in /sys/class/net/*; do case $(basename \"$(readlink $d/device/driver)\") in virtio_net) case $(cat $d/address) in {names}esac;; esac; done\n\
         {up}{address}echo part {name} takes commands\n{serve}",
        name = part.name,
        serve = guest_channel::serve("127.0.0.1"),
    )
}

fn boot<'a>(host: &'a Host, options: &Options, kernel: &str, index: usize) -> Result<Member<'a>> {
    let part = PARTS.get(index).context("a guest without a description")?;
    let number = index + 2;
    let mut spec = GuestSpec::new(part.name, kernel, options.cpus.first().copied().unwrap_or(1))
        .memory(part.memory)
        // The host's emulated processor claims AVX without XSAVE, and md's parity code would use it.
        .cmdline(["clearcpuid=avx,avx2,avx512f"])
        .disk("/dev/vdd", true)
        .script(&boot_script(part))
        .file("agent", std::fs::read(crate::paths::agent()?)?);
    for (n, (nic, bridge)) in part.nics.iter().enumerate() {
        let tap = format!("{}-{nic}", part.name);
        host.sh(&format!(
            "ip tuntap add {tap} mode tap vnet_hdr; ip link set {tap} mtu 9000 master {bridge} up"
        ))?;
        spec = spec.tap(&format!("{tap},mac=52:54:00:4e:{number:02x}:{n:02x},mtu=9000"));
    }
    for disk in part.disks {
        spec = spec.disk(&format!("/disks/{disk}.raw"), false);
    }
    spec.extra.push(format!("--vsock cid={},socket={}", number + 2, guest_channel::socket(part.name)));
    if NEIGHBOURS.contains(&part.name) {
        for name in ["cw_neigh", "mmnet", "mmblk"] {
            spec = spec.file(&format!("{name}.ko"), module(kernel, name)?);
        }
        let permit: Vec<String> =
            NEIGHBOURS.iter().filter(|peer| **peer != part.name).map(|peer| format!("\"{peer}\"")).collect();
        let name = part.name;
        host.sh(&format!(
            "printf '[neighbour]\\ngroup = \"nas\"\\npermit = [{}]\\nhost = \"{DAEMON_SOCKET}\"\\n' > /tmp/{name}.toml",
            permit.join(", ")
        ))?;
        spec.extra.push(format!("/tmp/{name}.toml"));
    }
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    Ok(Member { name: part.name, guest, host })
}

fn start<'a>(lab: &'a Lab, options: &Options, kernel: &str) -> Result<(Guests<'a>, Session)> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    let disks: Vec<String> = PARTS.iter().flat_map(|p| p.disks).map(|d| format!("/disks/{d}.raw")).collect();
    host.sh(&format!(
        "set -e; mkdir -p /run/causeway /disks; mke2fs -q -F /dev/vdc; mount /dev/vdc /disks; truncate -s {DISK_MIB}M {}\n\
         for b in outer inner; do ip link add $b type bridge; ip link set $b mtu 9000 up; done",
        disks.join(" ")
    ))?;
    let daemon = rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))?;
    let mut members = Vec::new();
    for (index, part) in PARTS.iter().enumerate() {
        if part.name != "mono" || options.wants(Stack::Monolithic.name()) {
            // In sequence: in parallel, they would starve the daemon, as one thread runs all CPUs.
            let member = boot(host, options, kernel, index)?;
            member.guest.expect("takes commands", BOOT)?;
            members.push(member);
        }
    }
    let mut members = members.into_iter();
    let mut next = || members.next().context("a guest is missing");
    let guests = Guests {
        client: next()?,
        net: next()?,
        files: next()?,
        raid: next()?,
        disks: next()?,
        mono: next().ok(),
    };
    Ok((guests, daemon))
}

/// Figures of a part of the scenario.
type Found = Result<Value>;

/// Writes to a disk at random, reads back and compares, bypassing the page cache. Returns the verified bytes.
fn verify(at: &Member<'_>, disk: &str) -> Result<u64> {
    let text = at.sh(&format!(
        "fio --name=v --filename={disk} --rw=randwrite --bsrange=4k-128k --size={COUNTED_MIB}M --verify=crc32c --verify_fatal=1 --direct=1 \
         --ioengine=libaio --iodepth=8 --eta=never --output-format=json"
    ))?;
    let job = fio::job(&text)?;
    if job.read < job.written || job.written == 0 {
        bail!("fio wrote {} bytes and verified {}", job.written, job.read);
    }
    Ok(job.read)
}

/// Returns the bytes of writes that an mmblk device copied: its client copies each read once, and the rest belongs to writes.
fn copied_by_device(of: &Counts) -> Result<u64> {
    Ok(counter(of, "copied_bytes")?.saturating_sub(counter(of, "read_bytes")?))
}

/// A disk that is passed on from guest to guest: the last one's driver gets the first one's pages, over two and over three hops.
///
/// ```text
///   two     files ─▶ raid ─▶ disks          three   net ─▶ files ─▶ raid ─▶ disks
/// ```
fn hops(guests: &Guests<'_>) -> Found {
    let Guests { net, files, raid, disks, .. } = guests;
    disks.serve("h", "/dev/vdh", "raid")?;
    let at_raid = raid.attach("disks", "h")?;
    raid.serve("h2", &at_raid, "files")?;
    let at_files = files.attach("raid", "h2")?;
    let mut found = Map::new();
    let mut hop = |name: &str,
                   first: &Member<'_>,
                   device: &str,
                   disk: &str,
                   middles: &[(&Member<'_>, &str)]| {
        let before: Vec<Counts> = middles.iter().map(|(at, of)| at.counters(of)).collect::<Result<_>>()?;
        let own = first.counters(device)?;
        let verified = verify(first, disk)?;
        let own = grown(&own, &first.counters(device)?);
        let written = counter(&own, "written_bytes")?;
        let mut copied = copied_by_device(&own)?;
        let mut forwarded = Vec::new();
        for ((at, of), before) in middles.iter().zip(&before) {
            let got = grown(before, &at.counters(of)?);
            forwarded.push(counter(&got, "forwarded_bytes")?);
            copied += if of.starts_with("devices") {
                copied_by_device(&got)?
            } else {
                counter(&got, "copied_bytes")?
            };
        }
        let line = json!({"bytes_verified": verified, "written": written, "by_reference_at_each_step": forwarded, "copied": copied});
        progress!("  {name}: {line}");
        if written == 0 || copied != 0 || forwarded.iter().any(|f| *f < written) {
            bail!("not all of the writes over {name} reached the last driver by reference: {line}");
        }
        found.insert(name.into(), line);
        Ok(verified)
    };
    let two: [(&Member<'_>, &str); 2] = [(raid, "devices/h"), (disks, "exports/h")];
    let mut verified = hop("two_hops", files, "devices/h2", &at_files, &two)?;
    files.serve("h3", &at_files, "net")?;
    let at_net = net.attach("files", "h3")?;
    let three: [(&Member<'_>, &str); 4] =
        [(files, "devices/h2"), (raid, "exports/h2"), (raid, "devices/h"), (disks, "exports/h")];
    verified += hop("three_hops", net, "devices/h3", &at_net, &three)?;
    for (at, what) in [
        (net, "devices/h3"),
        (files, "exports/h3"),
        (files, "devices/h2"),
        (raid, "exports/h2"),
        (raid, "devices/h"),
        (disks, "exports/h"),
    ] {
        at.take_away(what)?;
    }
    found.insert("bytes_verified".into(), verified.into());
    Ok(found.into())
}

/// The counters along the pipeline.
struct Pipeline {
    top: Counts,
    array: Counts,
    devices: Vec<Counts>,
    exports: Vec<Counts>,
}

impl Pipeline {
    fn read(guests: &Guests<'_>) -> Result<Self> {
        let each = |at: &Member<'_>, folder: &str| -> Result<Vec<Counts>> {
            MEMBERS.iter().map(|name| at.counters(&format!("{folder}/{name}"))).collect()
        };
        Ok(Pipeline {
            top: guests.files.counters(&format!("devices/{ARRAY}"))?,
            array: guests.raid.counters(&format!("exports/{ARRAY}"))?,
            devices: each(&guests.raid, "devices")?,
            exports: each(&guests.disks, "exports")?,
        })
    }

    fn since(&self, before: &Self) -> Self {
        let all = |before: &[Counts], after: &[Counts]| {
            before.iter().zip(after).map(|(before, after)| grown(before, after)).collect()
        };
        Pipeline {
            top: grown(&before.top, &self.top),
            array: grown(&before.array, &self.array),
            devices: all(&before.devices, &self.devices),
            exports: all(&before.exports, &self.exports),
        }
    }

    /// Returns how each layer passed writes on. Fails if an mmblk or mmnet device copied.
    fn writes(&self) -> Found {
        let sum = |of: &[Counts], name: &str| {
            of.iter().try_fold(0, |sum, c| Ok::<_, anyhow::Error>(sum + counter(c, name)?))
        };
        let mut copied = copied_by_device(&self.top)?;
        copied += counter(&self.array, "copied_bytes")? + sum(&self.exports, "copied_bytes")?;
        for device in &self.devices {
            copied += copied_by_device(device)?;
        }
        let data = counter(&self.top, "written_bytes")?;
        let to_disks = sum(&self.devices, "written_bytes")?;
        let in_place = sum(&self.devices, "forwarded_bytes")?;
        let arrived = sum(&self.exports, "forwarded_bytes")?;
        let line = json!({
            "written_by_files": data,
            "by_reference_at_raid": counter(&self.array, "by_reference_bytes")?,
            "raid_wrote": to_disks,
            "raid_passed_on_in_place": in_place,
            "raid_wrote_of_its_own_memory": to_disks - in_place.min(to_disks),
            "disks_got_of_files_memory": arrived,
            "disks_by_reference": sum(&self.exports, "by_reference_bytes")?,
            "copied_by_mmblk": copied,
        });
        if copied != 0
            || counter(&self.array, "by_reference_bytes")? < data
            || arrived < in_place
            || sum(&self.exports, "by_reference_bytes")? < to_disks
        {
            bail!("mmblk copied writes, or lost count of them: {line}");
        }
        Ok(line)
    }
}

/// Measures md's copies of writes to a RAID-5, with and without `skip_copy`.
fn md_copies(guests: &Guests<'_>, disk: &str) -> Found {
    let mut found = Map::new();
    let mut verified = 0;
    for skip in [0, 1] {
        guests.raid.sh(&format!("echo {skip} > /sys/block/md0/md/skip_copy"))?;
        let before = Pipeline::read(guests)?;
        verified += verify(&guests.files, disk)?;
        let line = Pipeline::read(guests)?.since(&before).writes()?;
        progress!("  skip_copy {skip}: {line}");
        let number = |name: &str| line[name].as_u64().unwrap_or(0);
        let (data, in_place) = (number("written_by_files"), number("raid_passed_on_in_place"));
        // md copies for a stripe that is busy with an earlier write.
        let holds = if skip == 1 { in_place >= data * 9 / 10 } else { in_place == 0 };
        if !holds {
            bail!("with skip_copy {skip}, md passed {in_place} of {data} bytes on in place");
        }
        found.insert(format!("skip_copy_{skip}"), line);
    }
    found.insert("bytes_verified".into(), verified.into());
    Ok(found.into())
}

/// Returns the frames that a guest's mmnet received, by kind.
fn received(of: &Counts) -> Found {
    let mut found = Map::new();
    for name in [
        "rx_frames",
        "rx_by_reference",
        "rx_bytes_by_reference",
        "rx_bytes_copied",
        "rx_copied_small",
        "rx_copied_held",
        "rx_copied_pages",
        "rx_copied_busy",
    ] {
        found.insert(name.into(), counter(of, name)?.into());
    }
    Ok(found.into())
}

/// Runs the appliance of neighbours under its client's load, and counts copies.
fn neighbours(guests: &Guests<'_>, mib: u64, tree: bool) -> Result<(Done, Value)> {
    stacks::start_neighbours(guests, true)?;
    let (outer, inner) = (stacks::mmnet_to(&guests.net, "files")?, stacks::mmnet_to(&guests.files, "net")?);
    let network =
        || Ok::<_, anyhow::Error>((guests.net.statistics(&outer)?, guests.files.statistics(&inner)?));
    let before = (Pipeline::read(guests)?, network()?);
    let done = appliance_load::run(guests, Stack::Neighbours, mib, tree)?;
    let after = (Pipeline::read(guests)?, network()?);
    let writes = after.0.since(&before.0).writes()?;
    let at_files = grown(&before.1.1, &after.1.1);
    let copies = json!({
        "writes": writes,
        "files_received": received(&at_files)?,
        "net_received": received(&grown(&before.1.0, &after.1.0))?,
    });
    let (by_reference, payload) =
        (counter(&at_files, "rx_bytes_by_reference")?, done.write.bytes + done.tree.bytes);
    if by_reference < payload * 9 / 10 {
        bail!("mmnet handed {by_reference} bytes of at least {payload} on without a copy: {copies}");
    }
    let mismatches = stacks::check_parity(&guests.raid)?;
    if mismatches != 0 {
        bail!("md finds {mismatches} sectors whose parity is wrong");
    }
    stacks::stop_neighbours(guests)?;
    Ok((done, copies))
}

/// Returns ratios to another stack. Higher is better for throughput, lower for the others.
fn versus(ours: &Done, theirs: &Done) -> Value {
    let rate = |cost: appliance_load::Cost| cost.bytes as f64 / cost.seconds.max(1e-3);
    json!({
        "write_exits_per_mib": ours.write.exits_per_mib() / theirs.write.exits_per_mib(),
        "read_exits_per_mib": ours.read.exits_per_mib() / theirs.read.exits_per_mib(),
        "exits_per_small_write": ours.small.exits as f64 / theirs.small.exits as f64,
        "emulated_write_throughput": rate(ours.write) / rate(theirs.write),
        "emulated_read_throughput": rate(ours.read) / rate(theirs.read),
        "emulated_small_write_latency": ours.latency / theirs.latency,
    })
}

fn quiet(guests: &Guests<'_>) -> Result<()> {
    guests.all().into_iter().try_for_each(|m| kernel_is_content(m.name, &m.guest, |script| m.sh(script)))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
    let (guests, daemon) = start(lab, options, &kernel)?;
    let result = all(options, &guests, report);
    if result.is_err() {
        // While the guests exist.
        lab.hold()?;
    }
    result?;
    report.figure("kernel", kernel);
    for member in guests.all() {
        let _ = member.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
        member.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&daemon)
}

/// Runs all selected parts.
fn all(options: &Options, guests: &Guests<'_>, report: &mut Report) -> Result<()> {
    let mib = options.count.map_or(MIB, u64::from);
    let tree = options.wants("tree");
    let (mut verified, mut mismatches) = (0, 0);
    let mut done: Vec<(Stack, Done)> = Vec::new();
    let mut figures = Map::new();

    for stack in [Stack::Monolithic, Stack::Virtio] {
        if options.wants(stack.name()) {
            progress!("{}", stack.name());
            let found = match stack {
                Stack::Monolithic => stacks::start_monolithic(guests),
                _ => stacks::start_virtio(guests),
            }
            .and_then(|()| appliance_load::run(guests, stack, mib, tree))
            .and_then(|found| {
                match stack {
                    Stack::Monolithic => stacks::stop_monolithic(guests)?,
                    _ => stacks::stop_virtio(guests)?,
                }
                quiet(guests).map(|()| found)
            })
            .with_context(|| stack.name())?;
            done.push((stack, found));
        }
    }
    stacks::load_modules(guests)?;
    if options.wants("hops") {
        progress!("hops");
        let found = hops(guests).context("hops")?;
        verified += found["bytes_verified"].as_u64().unwrap_or(0);
        figures.insert("hops".into(), found);
    }
    if options.wants("md-copies") {
        progress!("md-copies");
        stacks::start_blocks(guests, false)?;
        let disk = stacks::attach_top(&guests.files)?;
        let found = md_copies(guests, &disk).context("md-copies")?;
        verified += found["bytes_verified"].as_u64().unwrap_or(0);
        figures.insert("md".into(), found);
        stacks::stop_blocks(guests)?;
    }
    if options.wants(Stack::Neighbours.name()) {
        progress!("{}", Stack::Neighbours.name());
        let (found, copies) = neighbours(guests, mib, tree).context("neighbours")?;
        done.push((Stack::Neighbours, found));
        figures.insert("copies".into(), copies);
    }
    quiet(guests)?;
    stacks::unload_modules(guests)?;

    for (stack, found) in &done {
        verified += found.verified;
        mismatches += found.mismatches;
        figures.insert(stack.name().into(), found.json());
    }
    let of = |stack: Stack| done.iter().find(|(s, _)| *s == stack).map(|(_, found)| found);
    for (name, stack) in [("vs_monolithic", Stack::Monolithic), ("vs_virtio", Stack::Virtio)] {
        if let (Some(ours), Some(theirs)) = (of(Stack::Neighbours), of(stack)) {
            report.figure(name, versus(ours, theirs));
        }
    }
    report.check(verified > 0, "nothing was verified");
    report.check(mismatches == 0, format!("{mismatches} files differ from what was written"));
    if let (Some(ours), Some(theirs)) = (of(Stack::Neighbours), of(Stack::Virtio)) {
        let (ours, theirs) = (ours.write.exits_per_mib(), theirs.write.exits_per_mib());
        report.check(ours < theirs, format!("{ours:.0} exits per MiB written, and {theirs:.0} over virtio"));
    }
    report.figure("bytes_verified", verified);
    report.figure("mismatches", mismatches);
    report.figure("stacks", figures);
    Ok(())
}
