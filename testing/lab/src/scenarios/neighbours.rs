//! Two neighbour guests with mmnet between them, and virtio-net through a bridge as a reference. Runs tools over both, counts their
//! exits, and reloads modules and restarts guests.
//!
//! ```text
//!   guest a  10.79.0.1 virtio-net ── tap ── bridge on the host ── tap ── virtio-net 10.79.0.2  guest b
//!            10.81.0.1 mm0 ─────── windows and rings, causeway host ─────── mm0 10.81.0.2
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
use crate::scenarios::neighbours_disk::{self, FILES};
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::scenarios::neighbours_esp as esp;
use crate::scenarios::neighbours_integrity as integrity;
use crate::scenarios::neighbours_member::{Counts, Member, counter};
use crate::scenarios::neighbours_table;
use crate::scenarios::neighbours_tools::{
    Found, MIB, NAMES, Net, TOOL_TIMEOUT, number, requests, throughput, transfer,
};
use crate::topology::{HostSpec, Topology};
use crate::{progress, recipe};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours",
    about: "two guests with mmnet between them: tools, checksums and copies; iperf3, requests and fio over mmnet and mmblk against virtio through a bridge, exits counted; modules and guests that go and come back",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(3584).neighbours().appliance()),
    run,
    prompt: None,
};

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 640;
/// Time-out of a guest's heartbeat: in an emulated host, one thread runs all CPUs.
const PATIENCE_MS: u64 = 10_000;
/// Time-out of a boot, which takes minutes on a busy machine.
const BOOT: Duration = Duration::from_secs(900);

/// Returns commands that load the modules and wait for the peer.
fn load(number: usize) -> String {
    format!(
        "set -e; insmod /lab/cw_neigh.ko; insmod /lab/mmnet.ko; i=0\n\
         until [ -e /sys/class/net/mm0 ]; do i=$((i+1)); [ $i -gt 1200 ] && {{ dmesg | tail -n 8 >&2; exit 1; }}; sleep 0.1; done\n\
         ip addr add 10.81.0.{number}/24 dev mm0; ip link set mm0 up; i=0\n\
         until [ \"$(cat /sys/class/net/mm0/carrier)\" = 1 ]; do i=$((i+1)); [ $i -gt 1200 ] && {{ dmesg | tail -n 8 >&2; exit 2; }}; sleep 0.1; done"
    )
}

/// Unloads the modules; `rmmod` fails if one is in use.
const UNLOAD: &str = "set -e; rmmod mmnet; rmmod cw_neigh; ! grep -e cw_neigh -e mmnet /proc/modules";

fn boot_script(number: usize) -> String {
    format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run; hostname {name}; mount -t debugfs debugfs /sys/kernel/debug\n\
         for d in /sys/class/net/*; do case $(basename \"$(readlink $d/device/driver)\") in virtio_net)\n\
         ip link set ${{d##*/}} name net0; ip addr add 10.79.0.{number}/24 dev net0; ip link set net0 up;; esac; done\n\
         echo neighbour {number} takes commands\n{}",
        guest_channel::serve(&format!("10.79.0.{number}")),
        name = NAMES.get(number - 1).copied().unwrap_or("?"),
    )
}

fn boot<'a>(host: &'a Host, options: &Options, kernel: &str, number: usize) -> Result<Member<'a>> {
    let (name, peer) = if number == 1 { (NAMES[0], NAMES[1]) } else { (NAMES[1], NAMES[0]) };
    let tap = format!("tap{name}");
    host.sh(&format!(
        "[ -e /sys/class/net/{tap} ] || ip tuntap add {tap} mode tap vnet_hdr; ip link set {tap} master br0 up\n\
         printf '[neighbour]\\ngroup = \"lab\"\\npermit = [\"{peer}\"]\\nhost = \"{DAEMON_SOCKET}\"\\n' > /tmp/{name}.toml"
    ))?;
    let mut spec = GuestSpec::new(name, kernel, options.cpus.first().copied().unwrap_or(2))
        .memory(MEMORY_MIB)
        .root()
        .tap(&format!("{tap},mac=52:54:00:4e:00:0{number}"))
        .script(&boot_script(number))
        .file("agent", std::fs::read(crate::paths::agent()?)?)
        .file("cw_neigh.ko", module(kernel, "cw_neigh")?)
        .file("mmnet.ko", module(kernel, "mmnet")?)
        .file("mmblk.ko", module(kernel, "mmblk")?)
        .disk(FILES.get(number - 1).copied().context("a guest without a disk")?, false)
        // NBD's programs.
        .disk("/dev/vdd", true);
    let images = Images::ready(&[Artifact::Kernels])?;
    let modules = Modules::scan(&images.kernel(kernel).join("modules"))?;
    let mut files: BTreeMap<_, _> = modules.in_order(&["configfs"])?.into_iter().collect();
    for (file, wanted) in
        [(integrity::MODULE_ORDER, &integrity::MODULES[..]), (esp::MODULE_ORDER, &esp::MODULES[..])]
    {
        let needed = modules.in_order(wanted)?;
        let order: Vec<&str> = needed.iter().map(|(module, _)| module.as_str()).collect();
        spec = spec.file(file, order.join(" ").into_bytes());
        files.extend(needed);
    }
    for (module, path) in files {
        spec = spec.file(&format!("{module}.ko"), std::fs::read(path)?);
    }
    spec.extra.push(format!("--vsock cid={},socket={}", number + 2, guest_channel::socket(name)));
    spec.extra.push(format!("/tmp/{name}.toml"));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    Ok(Member { name, guest, host })
}

fn up(member: &Member<'_>) -> Result<()> {
    member.guest.expect("takes commands", BOOT).map(drop)
}

struct Pair<'a> {
    a: Member<'a>,
    b: Member<'a>,
    host: &'a Host,
    kernel: String,
    daemon: Session,
}

impl<'a> Pair<'a> {
    fn start(lab: &'a Lab, options: &Options) -> Result<Self> {
        lab.install_causeway()?;
        let host = lab.host(0)?;
        host.sh("ip link add br0 type bridge; ip link set br0 up; mkdir -p /run/causeway")?;
        neighbours_disk::prepare(host)?;
        let daemon = rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))?;
        let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
        let a = boot(host, options, &kernel, 1)?;
        let b = boot(host, options, &kernel, 2)?;
        up(&a)?;
        up(&b)?;
        Ok(Pair { a, b, host, kernel, daemon })
    }

    fn load(&self) -> Result<()> {
        // Each waits for the other.
        let first = self.a.start(&load(1))?;
        self.b.sh(&load(2))?;
        match first.wait(TOOL_TIMEOUT)? {
            Some(0) => Ok(()),
            code => bail!("Loading the modules in guest a ended with {code:?}: {}", first.err.tail(8)),
        }
    }

    fn ping(&self) -> Result<()> {
        for script in ["ping -q -c 3 -w 30 10.81.0.2", "ping -q -c 3 -w 30 -s 60000 10.81.0.2"] {
            self.a.sh(script)?;
        }
        self.b.sh("ping -q -c 3 -w 30 -s 9000 10.81.0.1").map(drop)
    }
}

/// Transfers bulk data both ways over mmnet, and counts the bytes that the kernel copied.
fn bulk(pair: &Pair<'_>) -> Found {
    let mut found = Map::new();
    for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        let before = to.statistics("mm0")?;
        transfer(Net::Mmnet, from, to)?;
        let after = to.statistics("mm0")?;
        let moved = |name: &str| Ok::<_, anyhow::Error>(counter(&after, name)? - counter(&before, name)?);
        let (by_reference, copied) = (moved("rx_bytes_by_reference")?, moved("rx_bytes_copied")?);
        let frames = json!({
            "bytes": MIB << 20, "bytes_by_reference": by_reference, "bytes_copied": copied, "frames": moved("rx_frames")?,
            "frames_by_reference": moved("rx_by_reference")?, "frames_copied_small": moved("rx_copied_small")?, "frames_copied_held": moved("rx_copied_held")?,
            "frames_copied_pages": moved("rx_copied_pages")?, "frames_copied_busy": moved("rx_copied_busy")?,
        });
        progress!("  to {}: {frames}", to.name);
        // Headers of 66 bytes per 64 KiB are 0.1 %. The margin permits frames that the receiver copies for a slow reader.
        if by_reference < (MIB << 20) * 9 / 10 {
            bail!("only {by_reference} of {} bytes were received without a copy: {frames}", MIB << 20);
        }
        found.insert(format!("to_{}", to.name), frames);
    }
    Ok(found.into())
}

/// A reader that doesn't read keeps its frames. All others continue, and the sender gets the rest of its memory back.
fn slow_reader(pair: &Pair<'_>) -> Found {
    let reader =
        pair.b.start("echo $$ > /tmp/reader; exec socat -u TCP-LISTEN:7002,reuseaddr EXEC:'sleep 1000'")?;
    let script = format!(
        "i=0; until socat -u FILE:/dev/zero,readbytes={} TCP:10.81.0.2:7002 & sleep 3; kill -0 $!; do i=$((i+1)); [ $i -gt 20 ] && exit 1; done\n\
         echo SENDS; wait",
        16 << 20
    );
    let sender = pair.a.start(&script)?;
    sender.wait_for("SENDS", 0, Duration::from_secs(60));
    pair.ping()?;
    transfer(Net::Mmnet, &pair.a, &pair.b)?;
    let out = |s: &Counts| -> Result<u64> {
        Ok(counter(s, "tx_frames")? - counter(s, "tx_returned")? - counter(s, "tx_lost")?)
    };
    let kept = out(&pair.a.statistics("mm0")?)?;
    // A reader that ends releases its frames.
    reader.signal(15)?;
    pair.b.sh("kill -9 $(cat /tmp/reader) 2>/dev/null; true")?;
    sender.wait(Duration::from_secs(30))?;
    let until = Instant::now() + Duration::from_secs(30);
    let left = loop {
        let left = out(&pair.a.statistics("mm0")?)?;
        if left == 0 || Instant::now() > until {
            break left;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    if left > 0 {
        bail!("{left} frames of a did not come back after their reader had ended");
    }
    Ok(json!({"frames_kept_by_the_reader": kept}))
}

/// Unloads the modules under traffic and loads them again, on either side.
fn reload(pair: &Pair<'_>) -> Found {
    for (of, other) in [(&pair.b, &pair.a), (&pair.a, &pair.b)] {
        let traffic = other
            .start(&format!("exec ping -q -i 0.01 -s 30000 -w 20 {}", Net::Mmnet.address(number(of))))?;
        std::thread::sleep(Duration::from_secs(1));
        of.sh(UNLOAD)?;
        other.sh("i=0; until [ \"$(cat /sys/class/net/mm0/carrier)\" = 0 ]; do i=$((i+1)); [ $i -gt 100 ] && exit 1; sleep 0.1; done")?;
        of.sh(&load(number(of)))?;
        traffic.wait(Duration::from_secs(60))?;
        pair.ping()?;
    }
    transfer(Net::Mmnet, &pair.a, &pair.b)?;
    Ok(json!({"reloads": 2}))
}

/// Waits in guest b, whose driver was bound, until its device to a exists and has a carrier.
fn connected() -> String {
    load(2).split_once("mmnet.ko; ").map_or_else(String::new, |(_, rest)| rest.to_owned())
}

/// Unbinds the device from its driver, and binds it again.
fn unbind(pair: &Pair<'_>) -> Found {
    let script = "set -e; cd /sys/bus/pci/drivers/cw_neigh; d=$(basename $(ls -d 0000:*)); echo $d > unbind; [ ! -e /sys/class/net/mm0 ]; echo $d > bind";
    pair.b.sh(script)?;
    pair.b.sh(&format!("set -e; {}", connected()))?;
    pair.ping()?;
    Ok(json!({"unbinds": 1}))
}

/// Kills a guest. The other one detects it in time, and the connection returns with the guest.
fn kill<'a>(pair: &mut Pair<'a>, options: &Options) -> Found {
    let traffic = pair.a.start("iperf3 -c 10.81.0.2 -t 60 > /dev/null 2>&1; exit 0")?;
    // By the host's clock: the guest's carrier is polled from outside, which adds a command's time.
    let seen = pair.a.start(
        "while [ \"$(cat /sys/class/net/mm0/carrier)\" = 1 ]; do :; done; echo GONE $(cut -d' ' -f1 /proc/uptime)",
    )?;
    std::thread::sleep(Duration::from_secs(2));
    let before = pair.a.sh("cut -d' ' -f1 /proc/uptime")?;
    let asked = Instant::now();
    pair.b.guest.session.kill()?;
    let killed = asked.elapsed();
    let line = match seen.wait_for("GONE ", 0, Duration::from_secs(30)) {
        crate::transcript::Waited::Line(line, _) => line,
        _ => bail!(
            "guest a didn't see within 30 s that its neighbour was killed: {}",
            pair.a.sh("dmesg | tail -n 6")?
        ),
    };
    let uptime = |text: &str| text.split_whitespace().last().and_then(|w| w.parse::<f64>().ok());
    let (Some(from), Some(to)) = (uptime(&before), uptime(&line)) else {
        bail!("the guest's clock can't be read: {before:?}, {line:?}")
    };
    traffic.signal(15)?;
    traffic.wait(Duration::from_secs(90))?;
    pair.b.guest.session.wait(Duration::from_secs(30))?;
    pair.b = boot(pair.host, options, &pair.kernel, 2)?;
    up(&pair.b)?;
    pair.b.sh(&load(2))?;
    pair.ping()?;
    transfer(Net::Mmnet, &pair.b, &pair.a)?;
    Ok(json!({"seconds_until_seen_at_most": to - from, "seconds_to_kill": killed.as_secs_f64()}))
}

/// Checks the kernels' logs for complaints.
fn quiet(pair: &Pair<'_>) -> Result<()> {
    [&pair.a, &pair.b]
        .into_iter()
        .try_for_each(|m| kernel_is_content(m.name, &m.guest, |script| m.sh(script)))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let mut pair = Pair::start(lab, options)?;
    pair.load()?;
    let seconds = options.seconds.unwrap_or(8);
    let count = options.count.map_or(2000, u64::from);
    let (mut passed, mut failed) = (0_u32, 0_u32);
    let mut parts = Map::new();
    let mut part = |pair: &mut Pair<'_>, name: &str, what: &dyn Fn(&mut Pair<'_>) -> Found| -> Result<()> {
        if !options.wants(name) {
            return Ok(());
        }
        progress!("{name}");
        let found = what(pair).and_then(|found| quiet(pair).map(|()| found));
        match found {
            Ok(found) => {
                passed += 1;
                progress!("{name}: passed {found}");
                parts.insert(name.into(), found);
            }
            Err(error) => {
                failed += 1;
                report.check(false, format!("{name}: {error:#}"));
                parts.insert(name.into(), json!({"error": format!("{error:#}")}));
                // Without an answer the scenario can't continue.
                for m in [&pair.a, &pair.b] {
                    let log = m.run("ethtool -S mm0; dmesg | tail -n 15", Duration::from_secs(60))?.stdout;
                    progress!("guest {}:\n{log}", m.name);
                }
            }
        }
        Ok(())
    };
    part(&mut pair, "ping", &|p| p.ping().map(|()| json!({})))?;
    part(&mut pair, "bulk", &|p| bulk(p))?;
    part(&mut pair, "throughput", &|p| throughput((&p.a, &p.b), [Net::Mmnet, Net::Virtio], seconds))?;
    part(&mut pair, "requests", &|p| requests((&p.a, &p.b), [Net::Mmnet, Net::Virtio], count))?;
    part(&mut pair, "disk", &|p| {
        neighbours_disk::compare(&p.a, &p.b, [&Net::Virtio.address(2), &Net::Mmnet.address(2)], seconds)
    })?;
    part(&mut pair, "slow-reader", &|p| slow_reader(p))?;
    part(&mut pair, "checksums", &|p| {
        integrity::checksums(&p.a, &p.b).and_then(|found| p.ping().map(|()| found))
    })?;
    part(&mut pair, "esp", &|p| esp::esp(&p.a, &p.b).and_then(|found| p.ping().map(|()| found)))?;
    part(&mut pair, "unbind", &|p| unbind(p))?;
    part(&mut pair, "unbind-held", &|p| {
        integrity::unbind_held(&p.a, &p.b, &connected()).and_then(|found| p.ping().map(|()| found))
    })?;
    part(&mut pair, "reload", &|p| reload(p))?;
    // What runs under `part` has its own lifetime of the pair: the killed guest is replaced here.
    if options.wants("kill") {
        progress!("kill");
        let found = kill(&mut pair, options);
        part(&mut pair, "kill", &|_| match &found {
            Ok(found) => Ok(found.clone()),
            Err(error) => bail!("{error:#}"),
        })?;
    }
    report.check(passed + failed > 0, "no part was run");
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.figure("kernel", pair.kernel.clone());
    let table = neighbours_table::rows(&Value::Object(parts.clone()));
    progress!("exits of both guests\n{}", neighbours_table::text(&table));
    report.figure("table", neighbours_table::json(&table));
    report.figure("parts", parts);
    for m in [&pair.a, &pair.b] {
        let _ = m.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
        m.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&pair.daemon)
}
