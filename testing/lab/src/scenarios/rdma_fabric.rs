//! RDMA between guests of two hosts. The scenario runs the tools of `rdma-tools`, and checks what `causeway inspect host` shows of their
//! connections. One guest has peers on its own host and on the other one at the same time.
//!
//! ```text
//!  host h1                                                                    host h2
//!  guest a, c ── virtio-net, br0 ──────────── x1 ═══ link ═══ x1 ──── br0, virtio-net ── guest b
//!     │ vmxnet3 + pvrdma                                                vmxnet3 + pvrdma │
//!  causeway host, segment s0 ── tap, br1 ──── x0 ═══ link ═══ x0 ──── br1, tap ── causeway host, segment s0
//!          └────── UDP 10.77.0.1:4792 ── br1 ─┘                └─ br1 ── UDP 10.77.0.2:4792 ──┘
//! ```
//!
//! The segment's Ethernet (ARP, IP on the guests' vmxnet3) crosses the link through taps and bridges. RDMA crosses it as the daemons'
//! UDP.

use super::rdma_tools;
use crate::channel::Output;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Layout, Member, NIC, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-fabric",
    about: "the tools of rdma-tools between guests of two hosts; then one guest with a peer on its own host and one on the other",
    topology,
    run,
    prompt: None,
};

/// The part about inspect's output for connections to the other host.
const INSPECT: &str = "inspect";
/// The part with a third guest.
const MIXED: &str = "mixed";
/// The daemons' UDP port.
const PORT: u16 = 4792;
const DIRECTORY: &str = "/run/causeway/directory.toml";
/// The daemons' key, unless `LAB_FABRIC=plain` is set.
const KEY: &str = "/run/causeway/cluster.key";
/// Time-out of a program that verifies every byte.
const VERIFY: Duration = Duration::from_secs(300);

/// Two CPUs each: for a guest's polling program, and for the engine. Memory for two guests on the first host and one on the second.
pub(super) fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").memory(4096).rdma())
        .host(HostSpec::new("h2").rdma())
        .link("h1", "h2")
        .link("h1", "h2")
}

/// Returns whether packets between the hosts are unencrypted.
fn plain() -> bool {
    std::env::var_os("LAB_FABRIC").is_some_and(|way| way == "plain")
}

/// Each guest's host.
const HOSTS: [usize; 3] = [0, 1, 0];

pub(super) fn layout() -> Layout {
    let key = if plain() { " --insecure".to_owned() } else { format!(" --cluster-key {KEY}") };
    let daemon =
        |host: usize| format!("--directory {DIRECTORY} --fabric-address 10.77.0.{}:{PORT}{key}", host + 1);
    Layout {
        hosts: HOSTS.to_vec(),
        mtu: 1500,
        uplink: Some("x1"),
        daemons: vec![daemon(0), daemon(1)],
        nic: ",mac=52:54:00:4d:00:0{n},tap=seg0".to_owned(),
        cmdline: "",
    }
}

/// Returns the directory file, the same on both hosts: the guests' hosts and addresses.
fn directory() -> String {
    let mut text = "mtu = 1376\n".to_owned();
    for host in 1..=2 {
        text.push_str(&format!("[[host]]\nname = \"h{host}\"\naddress = \"10.77.0.{host}:{PORT}\"\n"));
    }
    for ((name, number), host) in ["a", "b", "c"].into_iter().zip(1..).zip(HOSTS) {
        text.push_str(&format!(
            "[[vm]]\nname = \"{name}\"\nid = {number}\nhost = \"h{}\"\n[[vm.nic]]\nsegment = \"s0\"\n\
             addresses = [\"10.80.0.{number}\"]\nmac = \"52:54:00:4d:00:0{number}\"\n",
            host + 1
        ));
    }
    text
}

/// Extends the segment's Ethernet to the link, keeps the host's own address on it, and writes the directory file.
pub(super) fn prepare(host: &Host, number: usize) -> Result<()> {
    let address = format!("10.77.0.{}/24", number + 1);
    host.sh(&format!(
        "set -e; ip link add br1 type bridge; ip addr flush dev x0; ip link set x0 master br1 up\n\
         ip tuntap add seg0 mode tap vnet_hdr; ip link set seg0 master br1 up; ip addr add {address} dev br1; ip link set br1 up\n\
         mkdir -p /run/causeway; (umask 077; echo {} > {KEY}); cat > {DIRECTORY} <<'E'\n{}E\n",
        "0123456789abcdef".repeat(4),
        directory()
    ))
    .map(drop)
}

/// Returns a host daemon's inspect tree.
pub(super) fn tree(host: &Host) -> Result<Value> {
    let text = host.sh("causeway inspect host --json")?;
    serde_json::from_str(&text).context("`causeway inspect host --json` printed no JSON")
}

/// Returns a counter of the sockets between hosts.
fn fabric(tree: &Value, name: &str) -> Result<u64> {
    let path = format!("/daemon/fabric/{name}");
    tree.pointer(&path).and_then(Value::as_u64).with_context(|| format!("The daemon's tree has no {path}"))
}

/// A connected queue pair, as its daemon reports it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Connected {
    pub vm: String,
    pub peer: String,
    pub transport: String,
    /// The peer's daemon.
    pub host: Option<String>,
}

/// Returns the queue pairs of a daemon's VMs that are ready to send and have a peer.
pub(super) fn connected(tree: &Value) -> BTreeSet<Connected> {
    let mut found = BTreeSet::new();
    for (vm, shown) in tree["vms"].as_object().into_iter().flatten() {
        let queue_pairs = shown["nics"][NIC]["rdma"]["queue_pairs"].as_object();
        for qp in queue_pairs.into_iter().flat_map(|all| all.values()) {
            if let (Some("ReadyToSend"), Some(peer), Some(transport)) =
                (qp["state"].as_str(), qp["peer"]["gid"].as_str(), qp["transport"].as_str())
            {
                found.insert(Connected {
                    vm: vm.clone(),
                    peer: peer.to_owned(),
                    transport: transport.to_owned(),
                    host: qp["connection"]["host"].as_str().map(str::to_owned),
                });
            }
        }
    }
    found
}

/// Returns the GID of a guest's address, as daemons print it.
fn gid(member: &Member<'_>) -> String {
    format!("::ffff:{}", member.port.address)
}

/// Returns the expected connections of two communicating guests.
fn expected(one: &Member<'_>, other: &Member<'_>) -> [Connected; 2] {
    let remote = one.host().name() != other.host().name();
    [(one, other), (other, one)].map(|(from, to)| {
        let number = if to.host().name() == "h1" { 1 } else { 2 };
        Connected {
            vm: from.name.to_owned(),
            peer: gid(to),
            transport: if remote { "fabric" } else { "local" }.to_owned(),
            host: remote.then(|| format!("10.77.0.{number}:{PORT}")),
        }
    })
}

/// Polls the daemons while a function runs. Returns its result, and all observed connections.
pub(super) fn watched<T>(hosts: &[Host], run: impl FnOnce() -> T) -> Result<(T, BTreeSet<Connected>)> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                for host in hosts {
                    seen.append(&mut connected(&tree(host)?));
                }
                std::thread::sleep(Duration::from_millis(300));
            }
            anyhow::Ok(seen)
        });
        let result = run();
        done.store(true, Ordering::Relaxed);
        match watch.join() {
            Ok(seen) => Ok((result, seen?)),
            Err(_) => bail!("The thread that watches the daemons panicked"),
        }
    })
}

/// Executes every kind of operation between two guests, and verifies every byte.
fn verify(server: &Member<'_>, client: &Member<'_>) -> Result<()> {
    let command = |m: &Member<'_>| format!("rdma-verify --device {} --gid {}", m.port.device, m.port.gid);
    let listening = "ss -Hltn 'sport = :18601' | grep -q .";
    let to = format!("{} {}", command(client), server.tcp);
    let (at_server, at_client) =
        rdma::both((server, client), &command(server), true, listening, &to, VERIFY)?;
    good("rdma-verify", &at_server, &at_client, "VERIFIED mismatches=0")
}

/// Pings over connections of the connection manager, with verified payload.
fn rping(server: &Member<'_>, client: &Member<'_>) -> Result<()> {
    let (address, listening) = (&server.port.address, rdma_tools::CM);
    let (at_server, at_client) = rdma::both(
        (server, client),
        &format!("rping -s -a {address} -V -C 100 -S 1000"),
        true,
        listening,
        &format!("rping -c -a {address} -V -v -C 100 -S 1000"),
        VERIFY,
    )?;
    good("rping", &at_server, &at_client, "ping data: rdma-ping")
}

fn good(what: &str, server: &Output, client: &Output, says: &str) -> Result<()> {
    if (server.code, client.code) == (0, 0) && client.stdout.contains(says) {
        return Ok(());
    }
    let tail = |o: &Output| {
        let lines: Vec<&str> = o.stdout.lines().chain(o.stderr.lines()).collect();
        lines[lines.len().saturating_sub(16)..].join("\n    ")
    };
    progress!("  client:\n    {}\n  server:\n    {}", tail(client), tail(server));
    bail!(
        "{what}: the server ended with status {}, the client with {}; it should say {says:?}",
        server.code,
        client.code
    )
}

/// Parts of the scenario with separate results.
struct Parts<'a> {
    report: &'a mut Report,
    passed: u32,
    failed: u32,
}

impl Parts<'_> {
    fn part(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                progress!("passed  {name}");
                self.passed += 1;
            }
            Err(e) => {
                self.failed += 1;
                self.report.check(false, format!("{name}: {e:#}"));
            }
        }
    }

    /// Checks that the daemons reported all expected connections, and no others.
    fn seen(&mut self, name: &str, seen: &BTreeSet<Connected>, expected: &[Connected]) {
        let missing: Vec<_> = expected.iter().filter(|c| !seen.contains(c)).collect();
        // A connection has no host before its first packet.
        let like = |seen: &Connected, wanted: &Connected| {
            seen == wanted || (seen.host.is_none() && Connected { host: None, ..wanted.clone() } == *seen)
        };
        let strange: Vec<_> = seen.iter().filter(|c| !expected.iter().any(|e| like(c, e))).collect();
        let result = if missing.is_empty() && strange.is_empty() {
            Ok(())
        } else {
            Err(anyhow::anyhow!("the daemons didn't show {missing:?}; they showed {strange:?} that can't be"))
        };
        self.part(name, result);
    }
}

/// Returns a counter of both daemons' sockets.
fn counters(lab: &Lab, name: &str) -> Result<Vec<u64>> {
    lab.hosts().iter().map(|host| fabric(&tree(host)?, name)).collect()
}

/// Checks the daemons' reports about connections between two hosts.
fn inspected(lab: &Lab, pair: &Pair<'_>, parts: &mut Parts<'_>) -> Result<()> {
    let before = [counters(lab, "packets_sent")?, counters(lab, "packets_received")?];
    let (result, seen) = watched(lab.hosts(), || verify(&pair.b, &pair.a))?;
    let after = [counters(lab, "packets_sent")?, counters(lab, "packets_received")?];
    parts.part("inspect: every byte verified", result);
    parts.seen("inspect: both ends show transport fabric", &seen, &expected(&pair.a, &pair.b));
    // At least 8 MiB of reads and writes each way, with 1,024 bytes per packet.
    let least = (8 << 20) / 1024;
    let moved =
        before.iter().flatten().zip(after.iter().flatten()).all(|(b, a)| a.saturating_sub(*b) >= least);
    parts.part(
        "inspect: packets were counted on both hosts, both ways",
        if moved {
            Ok(())
        } else {
            Err(anyhow::anyhow!("sent and received were {before:?}, and are {after:?}"))
        },
    );
    Ok(())
}

/// Starts guest c beside a. a communicates with c alone, then with both at the same time.
fn mixed(lab: &Lab, pair: &mut Pair<'_>, parts: &mut Parts<'_>) -> Result<()> {
    pair.join()?;
    let Some(c) = pair.more().first() else { bail!("Guest c was started, and isn't there") };
    let (a, b) = (&pair.a, &pair.b);

    // Time for the last packets of the connections to the other host.
    std::thread::sleep(Duration::from_secs(3));
    let before = counters(lab, "packets_sent")?;
    let (result, seen) = watched(lab.hosts(), || verify(c, a))?;
    let after = counters(lab, "packets_sent")?;
    parts.part("mixed: a local pair verifies every byte", result);
    parts.seen("mixed: a local pair shows transport local", &seen, &expected(a, c));
    parts.part(
        "mixed: a local pair sends nothing to the other host",
        if before == after {
            Ok(())
        } else {
            Err(anyhow::anyhow!("packets sent were {before:?}, and are {after:?}"))
        },
    );

    type Program = fn(&Member<'_>, &Member<'_>) -> Result<()>;
    let programs: [(&str, Program); 2] = [("rdma-verify", verify), ("rping", rping)];
    for (name, program) in programs {
        let ((remote, local), seen) = watched(lab.hosts(), || {
            std::thread::scope(|scope| {
                let remote = scope.spawn(|| program(b, a));
                let local = program(c, a);
                (remote.join().unwrap_or_else(|_| bail!("The thread of the remote pair panicked")), local)
            })
        })?;
        parts.part(&format!("mixed: {name} with b on the other host, beside c"), remote);
        parts.part(&format!("mixed: {name} with c on the same host, beside b"), local);
        let both: Vec<Connected> = expected(a, b).into_iter().chain(expected(a, c)).collect();
        parts.seen(&format!("mixed: {name} shows fabric and local"), &seen, &both);
    }
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("rdma-fabric is about Causeway's device; rxe between hosts needs no daemon");
    }
    for (number, host) in lab.hosts().iter().enumerate() {
        prepare(host, number)?;
    }
    let mut pair = Pair::place(lab, options, layout())?;
    let (tools_passed, tools_failed) = rdma_tools::run_tools(&pair, options, report)?;
    let mut parts = Parts { report, passed: tools_passed, failed: tools_failed };
    if options.wants(INSPECT) {
        inspected(lab, &pair, &mut parts)?;
    }
    if options.wants(MIXED) {
        mixed(lab, &mut pair, &mut parts)?;
    }
    let Parts { passed, failed, .. } = parts;
    for (host, name) in lab.hosts().iter().zip(["fabric_h1", "fabric_h2"]) {
        let fabric = tree(host)?["daemon"]["fabric"].clone();
        let said = if plain() { "plain" } else { "encrypted" };
        report.check(fabric["encryption"] == said, format!("{name}: the fabric isn't {said}"));
        report.figure(name, fabric);
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
    use serde_json::json;

    #[test]
    fn connections_are_read_from_a_daemon_s_tree() {
        let qp = |state: &str, transport: &str, host: Value| json!({"state": state, "peer": {"gid": "::ffff:10.80.0.2", "qpn": 7}, "transport": transport, "connection": host});
        let tree = json!({"daemon": {"fabric": {"packets_sent": 5}}, "vms": {"a": {"nics": {"rdma0": {"rdma": {"queue_pairs": {
            "1": qp("ReadyToSend", "fabric", json!({"host": "10.77.0.2:4792"})),
            "2": qp("ReadyToSend", "fabric", json!({"host": "10.77.0.2:4792"})),
            "3": qp("Reset", "fabric", Value::Null),
            "4": {"state": "ReadyToSend", "peer": null, "transport": null},
        }}}}}}});
        let seen: Vec<Connected> = connected(&tree).into_iter().collect();
        assert_eq!(
            seen,
            [Connected {
                vm: "a".into(),
                peer: "::ffff:10.80.0.2".into(),
                transport: "fabric".into(),
                host: Some("10.77.0.2:4792".into())
            }]
        );
        assert_eq!(fabric(&tree, "packets_sent").unwrap(), 5);
        assert!(fabric(&tree, "packets_received").is_err());
    }

    #[test]
    fn the_directory_has_what_the_guests_have() {
        let text = directory();
        assert_eq!(text.matches("[[vm]]").count(), HOSTS.len());
        for number in 1..=3 {
            assert!(text.contains(&format!("10.80.0.{number}")));
            let nic = layout().nic.replace("{n}", &number.to_string());
            let mac = nic.split("mac=").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
            assert!(text.contains(mac), "{mac}");
        }
    }
}
