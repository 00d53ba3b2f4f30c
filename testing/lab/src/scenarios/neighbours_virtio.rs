//! Two guests without Causeway's modules. Each has a virtio-net device whose frames go to neighbours, and one through a bridge as a
//! reference.
//!
//! ```text
//!   guest a  10.79.0.1 virtio-net ── tap ── bridge on the host ── tap ── virtio-net 10.79.0.2  guest b
//!            10.82.0.1 virtio-net ── monitor ── windows and rings ── monitor ── virtio-net 10.82.0.2
//! ```

use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::rdma::{self, DAEMON_SOCKET, Runs};
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::scenarios::neighbours_member::Member;
use crate::scenarios::neighbours_tools::{Found, NAMES, Net, listens, requests, throughput, transfer};
use crate::topology::{HostSpec, Topology};
use crate::{progress, recipe};
use anyhow::{Context, Result, bail};
use serde_json::{Map, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-virtio",
    about: "two unmodified guests whose virtio-net devices go to each other without a tap: ping, checksums, iperf3 and requests beside a bridge, exits counted; a guest that is killed and comes back",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(3072).neighbours()),
    run,
    prompt: None,
};

/// RAM of each guest in MiB.
const MEMORY_MIB: u32 = 512;
/// Time-out of a guest's heartbeat in an emulated host.
const PATIENCE_MS: u64 = 10_000;
const BOOT: Duration = Duration::from_secs(900);

/// Returns the MAC of a guest's device to neighbours.
fn mac(number: usize) -> String {
    format!("52:54:00:4e:01:0{number}")
}

fn boot_script(number: usize) -> String {
    format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run; hostname {name}\n\
         for d in /sys/class/net/*; do case $(cat $d/address) in\n\
         52:54:00:4e:00:*) ip link set ${{d##*/}} name net0; ip addr add 10.79.0.{number}/24 dev net0; ip link set net0 up;;\n\
         52:54:00:4e:01:*) ip link set ${{d##*/}} name lan0; ip addr add 10.82.0.{number}/24 dev lan0; ip link set lan0 up;; esac; done\n\
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
        .file("agent", std::fs::read(crate::paths::agent()?)?);
    spec.extra.push(format!("--net neighbours,mac={}", mac(number)));
    spec.extra.push(format!("--vsock cid={},socket={}", number + 2, guest_channel::socket(name)));
    spec.extra.push(format!("/tmp/{name}.toml"));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    Ok(Member { name, guest, host })
}

struct Pair<'a> {
    a: Member<'a>,
    b: Member<'a>,
    host: &'a Host,
    kernel: String,
    daemon: Session,
}

impl Pair<'_> {
    fn both(&self) -> [&Member<'_>; 2] {
        [&self.a, &self.b]
    }

    /// Pings with small packets, long ones, and the MTU's limit.
    fn ping(&self) -> Found {
        for (from, to) in [(&self.a, 2), (&self.b, 1)] {
            for size in [56, 9000, 65_000] {
                from.sh(&format!("ping -q -c 3 -w 60 -s {size} {}", Net::Direct.address(to)))?;
            }
            let mtu = from.sh("cat /sys/class/net/lan0/mtu")?;
            if mtu.trim() != "65520" {
                bail!("guest {} has an MTU of {}", from.name, mtu.trim());
            }
        }
        Ok(json!({}))
    }

    fn transfers(&self) -> Found {
        transfer(Net::Direct, &self.a, &self.b)?;
        transfer(Net::Direct, &self.b, &self.a)?;
        // Settings in the guest that make it copy and checksum every frame.
        for member in self.both() {
            member.sh("ethtool -K lan0 tx off rx off")?;
        }
        transfer(Net::Direct, &self.a, &self.b)?;
        for member in self.both() {
            member.sh("ethtool -K lan0 tx on rx on")?;
        }
        // The host's network isn't involved: frames to neighbours pass none of its interfaces.
        let bridged = self.host.sh("cat /sys/class/net/br0/statistics/rx_bytes")?;
        Ok(json!({"bridge_rx_bytes": bridged.trim().parse::<u64>().context("the bridge's counter")?}))
    }

    /// Checks the monitors' reports.
    fn inspected(&self) -> Found {
        let text = self.host.sh("causeway inspect a --json")?;
        if !text.contains("neighbours of lab (b)") {
            bail!("`causeway inspect a` doesn't say with whom its device is connected: {text}");
        }
        Ok(json!({}))
    }
}

/// Kills a guest under traffic. The other one continues, and reaches it again after its return.
fn kill(pair: &mut Pair<'_>, options: &Options) -> Found {
    let server = pair.b.start("iperf3 -s -1 > /dev/null 2>&1; exit 0")?;
    pair.b.sh(&format!("until {}; do sleep 0.1; done", listens(5201)))?;
    let traffic = pair.a.start("iperf3 -c 10.82.0.2 -t 60 > /dev/null 2>&1; exit 0")?;
    std::thread::sleep(Duration::from_secs(3));
    pair.b.guest.session.kill()?;
    pair.b.guest.session.wait(Duration::from_secs(30))?;
    server.wait(Duration::from_secs(60))?;
    // The survivor's device returns its buffers and continues to send, without a receiver.
    pair.a.sh("ping -q -c 2 -w 10 10.82.0.2; [ $? = 1 ]")?;
    traffic.signal(15)?;
    traffic.wait(Duration::from_secs(90))?;
    pair.b = boot(pair.host, options, &pair.kernel, 2)?;
    pair.b.guest.expect("takes commands", BOOT)?;
    pair.ping()?;
    transfer(Net::Direct, &pair.b, &pair.a)?;
    Ok(json!({}))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    host.sh("ip link add br0 type bridge; ip link set br0 up; mkdir -p /run/causeway")?;
    let daemon = rdma::start_daemon(host, &format!("--neighbour-patience {PATIENCE_MS}"))?;
    let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str).to_owned();
    let (a, b) = (boot(host, options, &kernel, 1)?, boot(host, options, &kernel, 2)?);
    for member in [&a, &b] {
        member.guest.expect("takes commands", BOOT)?;
    }
    let mut pair = Pair { a, b, host, kernel, daemon };
    let (seconds, count) = (options.seconds.unwrap_or(8), options.count.map_or(1000, u64::from));
    let (mut passed, mut failed) = (0_u32, 0_u32);
    let mut parts = Map::new();
    type Part<'p> = (&'p str, &'p dyn Fn(&mut Pair<'_>) -> Found);
    let nets = [Net::Direct, Net::Virtio];
    let list: [Part<'_>; 6] = [
        ("ping", &|pair| pair.ping()),
        ("inspect", &|pair| pair.inspected()),
        ("transfers", &|pair| pair.transfers()),
        ("throughput", &|pair| throughput((&pair.a, &pair.b), nets, seconds)),
        ("requests", &|pair| requests((&pair.a, &pair.b), nets, count)),
        ("kill", &|pair| kill(pair, options)),
    ];
    for (name, what) in list.into_iter().filter(|(name, _)| options.wants(name)) {
        progress!("{name}");
        let found = what(&mut pair).and_then(|found| {
            for member in pair.both() {
                kernel_is_content(member.name, &member.guest, |script| member.sh(script))?;
            }
            Ok(found)
        });
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
            }
        }
    }
    report.check(passed + failed > 0, "no part was run");
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.figure("kernel", pair.kernel.clone());
    report.figure("parts", parts);
    for member in pair.both() {
        let _ = member.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
        member.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&pair.daemon)
}
