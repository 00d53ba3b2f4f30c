//! RDMA between guests of two hosts through the hosts' own RDMA devices (here Linux's rxe): transport `verbs`.
//!
//! ```text
//!  host h1                                                                    host h2
//!  guest a ── virtio-net, br0 ─────────────── x1 ═══ link ═══ x1 ────── br0, virtio-net ── guest b
//!     │ vmxnet3 + pvrdma                                                vmxnet3 + pvrdma │
//!  causeway host, segment s0 ── tap, br1 ──── x0 ═══ link ═══ x0 ──── br1, tap ── causeway host, segment s0
//!          └── rxe0, UDP 10.77.2.1:4792 ───── x2 ═══ link ═══ x2 ───── rxe0, UDP 10.77.2.2:4792 ──┘
//! ```
//!
//! Each tool must pass, the daemons must report its connections as `verbs`, and the hosts' devices must have counted the packets.

use super::rdma_fabric::{self, Connected, connected};
use super::rdma_tools::{CM, CONTROL, TCP};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Layout, NIC, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-verbs",
    about: "perftest and others between guests of two hosts, carried by the hosts' rxe devices; what they can't carry goes by fabric and is shown",
    topology,
    run,
    prompt: None,
};

/// The daemons' UDP port. The rxe devices have the same addresses.
const PORT: u16 = 4792;
const DIRECTORY: &str = "/run/causeway/directory.toml";

/// Three CPUs each: for a guest's polling program, the engine, and rxe.
pub(super) fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").cpus(3).rdma())
        .host(HostSpec::new("h2").cpus(3).rdma())
        .link("h1", "h2")
        .link("h1", "h2")
        .link("h1", "h2")
}

fn layout() -> Layout {
    let daemon = |host: usize| {
        format!("--directory {DIRECTORY} --fabric-address 10.77.2.{}:{PORT} --insecure --verbs", host + 1)
    };
    Layout {
        hosts: vec![0, 1],
        mtu: 1500,
        uplink: Some("x1"),
        daemons: vec![daemon(0), daemon(1)],
        nic: ",mac=52:54:00:4d:00:0{n},tap=seg0".to_owned(),
        cmdline: "",
    }
}

fn directory() -> String {
    let mut text = "mtu = 1376\n".to_owned();
    for number in 1..=2 {
        text.push_str(&format!("[[host]]\nname = \"h{number}\"\naddress = \"10.77.2.{number}:{PORT}\"\n"));
    }
    for (name, number) in [("a", 1), ("b", 2)] {
        text.push_str(&format!(
            "[[vm]]\nname = \"{name}\"\nid = {number}\nhost = \"h{number}\"\ntransport = \"verbs\"\n[[vm.nic]]\nsegment = \"s0\"\n\
             addresses = [\"10.80.0.{number}\"]\nmac = \"52:54:00:4d:00:0{number}\"\n"
        ));
    }
    text
}

/// Creates an RDMA device on the third link.
pub(super) fn rxe(host: &Host, number: usize) -> Result<()> {
    host.sh("ip link set x2 up")?;
    rxe_on(host, "x2", Ipv4Addr::new(10, 77, 2, u8::try_from(number + 1)?))
}

/// Creates an RDMA device on an interface that is up and has this address.
pub(super) fn rxe_on(host: &Host, interface: &str, own: Ipv4Addr) -> Result<()> {
    // A GID ends with the address in hexadecimal.
    let [a, b, c, d] = own.octets();
    let said = host.sh(&format!(
        "set -e; modprobe -a rdma_rxe ib_uverbs; rdma link add rxe0 type rxe netdev {interface}\n\
         i=0; until grep -qsi '{a:02x}{b:02x}:{c:02x}{d:02x}' /sys/class/infiniband/rxe0/ports/1/gids/*; do i=$((i+1)); [ $i -lt 50 ] || {{ echo no GID for {own} >&2; exit 1; }}; sleep 0.1; done; ls /dev/infiniband"
    ))?;
    progress!("{}: {}", host.name(), said.trim().replace('\n', " | "));
    Ok(())
}

/// Prepares the segment's Ethernet, the directory file, and an RDMA device on the third link.
fn prepare(host: &Host, number: usize) -> Result<()> {
    host.sh(&format!(
        "set -e; ip link add br1 type bridge; ip addr flush dev x0; ip link set x0 master br1 up\n\
         ip tuntap add seg0 mode tap vnet_hdr; ip link set seg0 master br1 up; ip link set br1 up\n\
         mkdir -p /run/causeway; cat > {DIRECTORY} <<'E'\n{}E",
        directory()
    ))?;
    rxe(host, number)
}

/// Returns the packets that a host's device has sent and received.
pub(super) fn packets(host: &Host) -> Result<[u64; 2]> {
    let text = host.sh("cd /sys/class/infiniband/rxe0/ports/1/hw_counters; cat sent_pkts rcvd_pkts")?;
    let mut words = text.split_whitespace().map(str::parse);
    match (words.next(), words.next()) {
        (Some(Ok(sent)), Some(Ok(received))) => Ok([sent, received]),
        _ => bail!("The counters of rxe0 were read as {text:?}"),
    }
}

/// A program for both guests, whose connections the devices must carry, and the client's last output.
struct Part {
    name: &'static str,
    server: String,
    client: String,
    listening: &'static str,
    says: &'static str,
    seconds: u64,
}

fn parts() -> Vec<Part> {
    let mut all = Vec::new();
    let mut add = |name, listening, says, seconds, server: &str, client: &str| {
        all.push(Part {
            name,
            server: server.to_owned(),
            client: client.to_owned(),
            listening,
            says,
            seconds,
        });
    };
    let mut same = |name: &'static str, listening, says, seconds, more: &str| {
        let command = format!("{} -d {{dev}} {more}", name.split(' ').next().unwrap_or(name));
        add(name, listening, says, seconds, &command, &format!("{command} {{tcp}}"));
    };
    same("ibv_rc_pingpong", TCP, "bytes in", 120, "-g {gid} -c -n 200");
    same("ibv_rc_pingpong -e", TCP, "bytes in", 120, "-g {gid} -c -n 100 -e");
    same("ib_send_lat", TCP, "t_typical", 180, "-x {gid} -F -n 200 -s 64");
    same("ib_send_bw", TCP, "BW average", 180, "-x {gid} -F -n 200 -s 4096");
    same("ib_send_bw -q 2", TCP, "BW average", 180, "-x {gid} -F -n 100 -s 65536 -q 2");
    same("ib_write_lat", TCP, "t_typical", 180, "-x {gid} -F -n 200 -s 64");
    same("ib_write_bw", TCP, "BW average", 180, "-x {gid} -F -n 200 -s 65536");
    same("ib_write_bw -q 4", TCP, "BW average", 180, "-x {gid} -F -n 100 -s 4096 -q 4");
    same("ib_write_bw -b", TCP, "BW average", 180, "-x {gid} -F -n 200 -s 4096 -b");
    same("ib_read_lat", TCP, "t_typical", 180, "-x {gid} -F -n 200 -s 64");
    same("ib_read_bw", TCP, "BW average", 180, "-x {gid} -F -n 200 -s 4096");
    same("ib_atomic_lat", TCP, "t_typical", 180, "-x {gid} -F -n 200 -A FETCH_AND_ADD");
    same("ib_atomic_bw", TCP, "BW average", 180, "-x {gid} -F -n 200 -A CMP_AND_SWAP");
    same("ibv_srq_pingpong", TCP, "bytes in", 120, "-g {gid} -c -n 200 -q 4");
    same("ib_send_bw --use-srq", TCP, "BW average", 180, "-x {gid} -F -n 200 -s 4096 -q 2 --use-srq");
    let verify = "rdma-verify --device {dev} --gid {gid}";
    add("rdma-verify", CONTROL, "VERIFIED mismatches=0", 300, verify, &format!("{verify} {{tcp}}"));
    add(
        "rping",
        CM,
        "ping data: rdma-ping",
        180,
        "rping -s -a {addr} -V -C 50 -S 1000",
        "rping -c -a {addr} -V -v -C 50 -S 1000",
    );
    all
}

/// Returns why the reported queue pairs aren't carried by the devices.
fn reasons(tree: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for shown in tree["vms"].as_object().into_iter().flat_map(|all| all.values()) {
        let queue_pairs = shown["nics"][NIC]["rdma"]["queue_pairs"].as_object();
        for qp in queue_pairs.into_iter().flat_map(|all| all.values()) {
            if let Some(reason) = qp["connection"]["instead_of_verbs"].as_str() {
                found.insert(reason.to_owned());
            }
        }
    }
    found
}

/// The daemons' reports: connections, and why some use the fabric.
type Shown = (BTreeSet<Connected>, BTreeSet<String>);

/// Polls the daemons while a function runs.
fn watched<T>(hosts: &[Host], run: impl FnOnce() -> T) -> Result<(T, Shown)> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut shown = Shown::default();
            while !done.load(Ordering::Relaxed) {
                for host in hosts {
                    let tree = rdma_fabric::tree(host)?;
                    shown.0.append(&mut connected(&tree));
                    shown.1.append(&mut reasons(&tree));
                }
                std::thread::sleep(Duration::from_millis(300));
            }
            anyhow::Ok(shown)
        });
        let result = run();
        done.store(true, Ordering::Relaxed);
        match watch.join() {
            Ok(shown) => Ok((result, shown?)),
            Err(_) => bail!("The thread that watches the daemons panicked"),
        }
    })
}

/// Runs a part, and returns its failure.
fn run_part(lab: &Lab, pair: &Pair<'_>, part: &Part) -> Result<()> {
    let fill = |text: &str, at: &rdma::Member<'_>| {
        text.replace("{dev}", &at.port.device)
            .replace("{gid}", &at.port.gid.to_string())
            .replace("{addr}", &pair.b.port.address)
            .replace("{tcp}", &pair.b.tcp)
    };
    let (server, client) = (fill(&part.server, &pair.b), fill(&part.client, &pair.a));
    let before = [packets(lab.host(0)?)?, packets(lab.host(1)?)?];
    let timeout = Duration::from_secs(part.seconds);
    let (outcome, (seen, reasons)) =
        watched(lab.hosts(), || pair.both(&server, true, part.listening, &client, timeout))?;
    let (at_server, at_client) = outcome?;
    let after = [packets(lab.host(0)?)?, packets(lab.host(1)?)?];
    if (at_server.code, at_client.code) != (0, 0) || !at_client.stdout.contains(part.says) {
        let tail = |text: &str| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(8)..].join(" / ")
        };
        bail!(
            "the server ended with status {}, the client with {}; the client should say {:?}; client: {} {}; server: {} {}",
            at_server.code,
            at_client.code,
            part.says,
            tail(&at_client.stdout),
            tail(&at_client.stderr),
            tail(&at_server.stdout),
            tail(&at_server.stderr)
        );
    }
    // A connection has no host before its first request.
    let (right, wrong): (Vec<&Connected>, Vec<&Connected>) =
        seen.iter().filter(|seen| seen.host.is_some()).partition(|seen| seen.transport == "verbs");
    if right.is_empty() || !wrong.is_empty() {
        bail!("connections should be shown as verbs; there were {seen:?}");
    }
    let moved = |host: usize, way: usize| after[host][way].saturating_sub(before[host][way]);
    let counted = [moved(0, 0), moved(0, 1), moved(1, 0), moved(1, 1)];
    progress!("        {}: seen {} connections; rxe sent and received {counted:?}", part.name, seen.len());
    if !reasons.is_empty() {
        bail!("a daemon said {reasons:?}");
    }
    if counted.contains(&0) {
        bail!("the hosts' devices counted {counted:?} packets");
    }
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("rdma-verbs is about Causeway's device; rxe is what carries it here");
    }
    for (number, host) in lab.hosts().iter().enumerate() {
        prepare(host, number)?;
    }
    let pair = Pair::place(lab, options, layout())?;
    for host in lab.hosts() {
        let said = host.sh("causeway doctor --json || true")?;
        let possible = said.contains("possible with rxe0");
        report.check(
            possible,
            format!("{}: `causeway doctor` doesn't find transport verbs possible", host.name()),
        );
    }
    let (mut passed, mut failed) = (0, 0);
    for part in parts().iter().filter(|part| options.wants(part.name)) {
        match run_part(lab, &pair, part) {
            Ok(()) => {
                progress!("passed  {}", part.name);
                passed += 1;
            }
            Err(error) => {
                failed += 1;
                report.check(false, format!("{}: {error:#}", part.name));
            }
        }
    }
    for (number, name) in ["verbs_h1", "verbs_h2"].into_iter().enumerate() {
        let host = lab.host(number)?;
        let tree = rdma_fabric::tree(host)?;
        let verbs = tree["daemon"]["verbs"].clone();
        report.check(
            verbs["device"]["device"] == "rxe0",
            format!("{name}: the daemon doesn't use rxe0: {verbs}"),
        );
        let [sent, received] = packets(host)?;
        let fabric = tree["daemon"]["fabric"]["packets_sent"].as_u64().context("no counter of the fabric")?;
        report.figure(
            name,
            json!({"verbs": verbs, "rxe_sent": sent, "rxe_received": received, "fabric_sent": fabric}),
        );
    }
    report.figure("passed", passed);
    report.figure("ran_again", crate::rdma::ran_again());
    report.figure("failed", failed);
    report.check(passed > 0, "nothing was run");
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_guests_are_pinned_and_hosts_have_their_devices_addresses() {
        let text = directory();
        assert_eq!(text.matches("transport = \"verbs\"").count(), 2);
        for (number, daemon) in (1..).zip(layout().daemons) {
            let address = format!("10.77.2.{number}:{PORT}");
            assert!(text.contains(&address) && daemon.contains(&address) && daemon.contains("--verbs"));
        }
        let link = topology(&Options::default()).hosts[0].nics[2].clone();
        assert_eq!((link.name.as_str(), link.address.as_deref()), ("x2", Some("10.77.2.1/24")));
    }

    #[test]
    fn reasons_are_read_from_a_daemon_s_tree() {
        let tree = json!({"vms": {"a": {"nics": {"rdma0": {"rdma": {"queue_pairs": {
            "1": {"connection": {"instead_of_verbs": "it has a shared receive queue"}},
            "2": {"connection": {"instead_of_verbs": null}},
            "3": {"connection": null},
        }}}}}}});
        assert_eq!(reasons(&tree).into_iter().collect::<Vec<_>>(), ["it has a shared receive queue"]);
    }
}
