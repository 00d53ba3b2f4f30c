//! A payload VM of two nodes, each on a host of its own, whose link goes by the hosts' RDMA devices (here Linux's rxe).
//!
//! ```text
//!  host h1: causeway run --node 0 ─ rxe0 ─ x0 ═══ link ═══ x0 ─ rxe0 ─ causeway run --node 1: host h2
//!                  └───────── TCP 10.77.0.1:7000, idle after the handshake ────────┘
//! ```
//! Programs verify their results over `rdma:` and, for comparison, over `tcp:`. The devices must have carried the frames, TCP nothing; no message may
//! have found the other side without a buffer. Lost packets are sent again. A node that is killed, and a link that is cut, must be told by name. A host
//! without a device says what it lacks.

use super::rdma_verbs::{packets, rxe_on};
use crate::channel::{Output, Session};
use crate::host::Host;
use crate::lab::Lab;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use crate::transcript::Waited;
use crate::{paths, progress};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "dsm-rdma",
    about: "a payload VM of two nodes on two hosts whose link goes by their RDMA devices (rxe): results, counters of the devices, a killed node, a cut link",
    topology,
    run,
    prompt: None,
};

const PORT: u16 = 7000;
/// Emulated processors: a program that takes a second elsewhere takes up to a minute.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long a dead or cut-off node may go untold. A second is what is promised; the rest is the emulated hosts' and the lab's.
const TOLD: Duration = Duration::from_secs(4);
/// TCP segments of the handshake and the end, both ways: what may be more is the host's own.
const FEW_SEGMENTS: u64 = 60;

/// Programs with their arguments; small, as each page takes milliseconds here.
const PROGRAMS: &[(&str, &str)] = &[
    ("dsm_basic", "all 20"),
    ("producer-consumer", "messages=100"),
    ("locks", "times=50"),
    ("jacobi", "n=256 steps=10"),
];

fn topology(_: &Options) -> Topology {
    Topology::new().host(HostSpec::new("h1").newer()).host(HostSpec::new("h2").newer()).link("h1", "h2")
}

fn address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, if node == 0 { 1 } else { 2 })
}

/// Where both nodes are, for `--peers`.
fn peers(kind: &str) -> String {
    [0, 1].map(|node| format!("{kind}:{}:{PORT}", address(node))).join(",")
}

/// The command of a node.
fn command(node: usize, peers: &str, program: &str, arguments: &str, flags: &str) -> String {
    // On one node the link would matter no more.
    format!(
        "exec causeway {flags} --log-level warn run --name dsm --node {node} --peers {peers} --gather never --payload /share/bin/{program} -- {arguments}"
    )
}

/// TCP segments that a host has sent and received.
fn segments(host: &Host) -> Result<u64> {
    let text = host.sh("cat /proc/net/snmp")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let value = |wanted: &str| {
        let mut both = names.split_whitespace().zip(values.split_whitespace());
        both.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.parse::<u64>().ok())
    };
    let (sent, received) = (value("OutSegs"), value("InSegs"));
    Ok(sent.context("no count of TCP segments")? + received.context("no count of TCP segments")?)
}

/// Messages that a host's device has refused, or had refused, for want of a receive buffer, and those that it sent again.
fn trouble(host: &Host) -> Result<[u64; 3]> {
    let text = host.sh(
        "cd /sys/class/infiniband/rxe0/ports/1/hw_counters; cat send_rnr_err rcvd_rnr_err completer_retry_err",
    )?;
    let mut words = text.split_whitespace().map(str::parse);
    match (words.next(), words.next(), words.next()) {
        (Some(Ok(sent)), Some(Ok(received)), Some(Ok(retried))) => Ok([sent, received, retried]),
        _ => bail!("The counters of rxe0 were read as {text:?}"),
    }
}

/// Both nodes of a VM, running.
struct Nodes {
    sessions: [Session; 2],
}

impl Nodes {
    fn start(lab: &Lab, commands: [String; 2]) -> Result<Self> {
        let [zero, one] = commands;
        let other = lab.host(1)?.spawn("node 1", &one)?;
        Ok(Self { sessions: [lab.host(0)?.spawn("node 0", &zero)?, other] })
    }

    /// What both said.
    fn end(&self) -> Result<[Output; 2]> {
        Ok([self.sessions[0].output(PATIENCE)?, self.sessions[1].output(PATIENCE)?])
    }
}

/// What node 0's output says of the whole VM.
fn outcome(stdout: &str) -> Option<Value> {
    // The console's lines come first.
    let at = if stdout.starts_with("{\n") { 0 } else { stdout.find("\n{\n")? };
    serde_json::from_str(&stdout[at..]).ok()
}

/// Runs a program over one kind of link: what was counted.
fn run_program(lab: &Lab, kind: &str, program: &str, arguments: &str, flags: &str) -> Result<Value> {
    let begun = Instant::now();
    let hosts = [lab.host(0)?, lab.host(1)?];
    let look = |host: &Host| anyhow::Ok((packets(host)?, segments(host)?, trouble(host)?));
    let before = [look(hosts[0])?, look(hosts[1])?];
    let peers = peers(kind);
    let commands = [0, 1].map(|node| command(node, &peers, program, arguments, &format!("--json {flags}")));
    let ended = Nodes::start(lab, commands)?.end()?;
    let after = [look(hosts[0])?, look(hosts[1])?];
    let [zero, one] = &ended;
    let tree = outcome(&zero.stdout);
    let (Some(tree), 0, 0) = (&tree, zero.code, one.code) else {
        bail!(
            "node 0 ended with status {} and node 1 with {}; node 0: {} {}; node 1: {} {}",
            zero.code,
            one.code,
            zero.stdout.trim(),
            zero.stderr.trim(),
            one.stdout.trim(),
            one.stderr.trim()
        );
    };
    // dsm_basic tells by its exit code alone.
    if zero.stdout.contains("\"verified\":false")
        || (program != "dsm_basic" && !zero.stdout.contains("\"verified\":true"))
    {
        bail!("the result isn't verified: {}", zero.stdout.trim());
    }
    let sum = |name: &str| -> u64 {
        let nodes = tree["nodes"].as_object().into_iter().flatten();
        nodes.filter_map(|(_, node)| node[name].as_u64()).sum()
    };
    let moved = |of: fn(&([u64; 2], u64, [u64; 3])) -> u64| {
        [0, 1].map(|host: usize| of(&after[host]) - of(&before[host]))
    };
    Ok(json!({
        "messages": sum("messages"),
        "bytes": sum("bytes"),
        "device_sent": moved(|look| look.0[0]),
        "device_received": moved(|look| look.0[1]),
        "tcp_segments": moved(|look| look.1),
        "not_ready": moved(|look| look.2[0] + look.2[1]),
        "seconds": begun.elapsed().as_secs(),
    }))
}

/// The numbers of both hosts.
fn both(figures: &Value, name: &str) -> [u64; 2] {
    [0, 1].map(|host| figures[name][host].as_u64().unwrap_or(0))
}

/// Programs, over both kinds of link.
fn programs(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let mut all = Map::new();
    for (program, arguments) in PROGRAMS.iter().filter(|(program, _)| options.wants(program)) {
        let mut compared = Map::new();
        for kind in ["rdma", "tcp"] {
            let figures = run_program(lab, kind, program, arguments, "")
                .with_context(|| format!("{program} {arguments} over {kind}"))?;
            progress!("passed  {program} {arguments} over {kind}: {figures}");
            let (sent, received) = (both(&figures, "device_sent"), both(&figures, "device_received"));
            let messages = figures["messages"].as_u64().unwrap_or(0);
            let by_device = sent.iter().chain(&received).all(|count| *count > 0);
            if kind == "rdma" {
                report.check(
                    by_device && sent.iter().sum::<u64>() * 4 >= messages,
                    format!("{program}: {messages} messages, but the devices sent {sent:?} and received {received:?}"),
                );
                let segments = both(&figures, "tcp_segments");
                report.check(
                    segments.iter().all(|count| *count <= FEW_SEGMENTS),
                    format!("{program}: TCP should be idle; there were {segments:?} segments"),
                );
                let refused = both(&figures, "not_ready");
                report.check(
                    refused == [0, 0],
                    format!("{program}: messages found no receive buffer: {refused:?}"),
                );
            } else {
                report.check(sent == [0, 0], format!("{program} over tcp: the devices sent {sent:?}"));
            }
            compared.insert(kind.to_owned(), figures);
        }
        all.insert((*program).to_owned(), compared.into());
    }
    report.figure("programs", all);
    Ok(())
}

/// Some packets are lost, both ways: the devices send them again.
fn losses(lab: &Lab, report: &mut Report) -> Result<()> {
    for host in lab.hosts() {
        host.sh("modprobe sch_netem; tc qdisc replace dev x0 root netem limit 10000 loss 0.5%")?;
    }
    let figures = run_program(lab, "rdma", "producer-consumer", "messages=100", "");
    let mut retried = [0; 2];
    for (host, retried) in lab.hosts().iter().zip(&mut retried) {
        host.sh("tc qdisc del dev x0 root")?;
        *retried = trouble(host)?[2];
    }
    let figures = figures.context("producer-consumer while 0.5 % of the packets are lost")?;
    progress!("passed  losses: {figures}, {retried:?} retries");
    report.figure("losses", json!({ "figures": figures, "retries": retried }));
    Ok(())
}

/// Starts a program that never ends, and waits until it runs on both nodes.
fn endless(lab: &Lab) -> Result<Nodes> {
    let peers = peers("rdma");
    let nodes = Nodes::start(lab, [0, 1].map(|node| command(node, &peers, "dsm_basic", "endless 1", "")))?;
    match nodes.sessions[0].wait_for("all run", 0, PATIENCE) {
        Waited::Line(..) => Ok(nodes),
        other => bail!("the endless program doesn't run: {other:?}; {}", nodes.sessions[0].err.text()),
    }
}

/// Waits for a node's sentence with all of these in it: what it said, and after how many milliseconds.
fn told(session: &Session, since: Instant, parts: &[&str]) -> Result<(String, u128)> {
    let first = parts.first().copied().unwrap_or_default();
    match session.err.wait_for(first, 0, TOLD) {
        Waited::Line(line, _) if parts.iter().all(|part| line.contains(part)) => {
            Ok((line, since.elapsed().as_millis()))
        }
        other => bail!("it should say {parts:?}; it said {other:?} {}", session.err.text()),
    }
}

fn killed(lab: &Lab, report: &mut Report) -> Result<()> {
    let nodes = endless(lab)?;
    let since = Instant::now();
    nodes.sessions[1].kill()?;
    let link = format!("rdma:{}:{PORT}", address(1));
    let (said, after) = told(&nodes.sessions[0], since, &["node 1", &link, "its monitor has died"])?;
    progress!("passed  killed: after {after} ms: {said}");
    let code = nodes.sessions[0].wait(PATIENCE)?;
    report.check(code == Some(1), format!("node 0 ended with status {code:?} after node 1 was killed"));
    report.figure("killed", json!({ "told_ms": u64::try_from(after)?, "said": said }));
    Ok(())
}

fn cut(lab: &Lab, report: &mut Report) -> Result<()> {
    let nodes = endless(lab)?;
    let since = Instant::now();
    lab.host(1)?.sh("ip link set x0 down")?;
    let mut all = Vec::new();
    for (node, peer) in [(0, 1), (1, 0)] {
        let link = format!("rdma:{}:{PORT}", address(peer));
        let (said, after) = told(&nodes.sessions[node], since, &[&format!("ode {peer}"), &link])?;
        progress!("passed  cut: node {node} after {after} ms: {said}");
        all.push(json!({ "node": node, "told_ms": u64::try_from(after)?, "said": said }));
    }
    for (node, session) in nodes.sessions.iter().enumerate() {
        let code = session.wait(PATIENCE)?;
        report
            .check(code == Some(1), format!("node {node} ended with status {code:?} after the link was cut"));
    }
    lab.host(1)?.sh("ip link set x0 up")?;
    report.figure("cut", all);
    Ok(())
}

/// Sentences of hosts that can't.
fn refusals(lab: &Lab, report: &mut Report) -> Result<()> {
    let host = lab.host(0)?;
    let elsewhere = format!("rdma:10.77.9.9:{PORT},rdma:10.77.9.8:{PORT}");
    let output = host.run(&command(0, &elsewhere, "dsm_basic", "all 1", ""), PATIENCE)?;
    let fine =
        output.code != 0 && ["10.77.9.9", "RoCE", "rxe0"].iter().all(|part| output.stderr.contains(part));
    report.check(fine, format!("no device has 10.77.9.9; node 0 said {:?}", output.stderr.trim()));
    report.figure("no_such_address", output.stderr.trim());
    // One means tcp, the other rdma: whoever notices first says so.
    let nodes = Nodes::start(
        lab,
        [0, 1].map(|node| command(node, &peers(["rdma", "tcp"][node]), "dsm_basic", "all 1", "")),
    )?;
    let ended = nodes.end()?;
    let said = ended.iter().any(|output| output.stderr.contains("give all nodes the same --peers"));
    report.check(said, format!("rdma meets tcp: {:?} {:?}", ended[0].stderr.trim(), ended[1].stderr.trim()));
    let doctor = host.sh("causeway doctor --json || true")?;
    report.check(
        doctor.contains("possible with rxe0"),
        "`causeway doctor` doesn't find links by RDMA possible",
    );
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let folder = paths::payload_programs()?;
    for host in lab.hosts() {
        PROGRAMS.iter().try_for_each(|(program, _)| host.install(&folder.join(program)))?;
    }
    // With what was installed before.
    lab.install_causeway_in_memory()?;
    for (number, host) in lab.hosts().iter().enumerate() {
        host.sh("ip link set x0 up")?;
        rxe_on(host, "x0", address(number))?;
    }
    programs(lab, options, report)?;
    let parts: [(&str, fn(&Lab, &mut Report) -> Result<()>); 4] =
        [("losses", losses), ("refusals", refusals), ("killed", killed), ("cut", cut)];
    for (name, part) in parts.iter().filter(|(name, _)| options.wants(name)) {
        part(lab, report).with_context(|| format!("Part {name}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_found_behind_the_console() {
        let text = "{\"program\":\"jacobi\",\"verified\":true}\n{\n  \"outcome\": \"exit\"\n}\n";
        assert_eq!(outcome(text).map(|tree| tree["outcome"].clone()), Some("exit".into()));
        assert_eq!(outcome("{\n\"outcome\": 1}").map(|tree| tree["outcome"].clone()), Some(1.into()));
        assert!(outcome("nothing").is_none());
    }

    #[test]
    fn both_nodes_are_told_the_same_places() {
        assert_eq!(peers("rdma"), "rdma:10.77.0.1:7000,rdma:10.77.0.2:7000");
        assert!(
            command(1, &peers("tcp"), "locks", "times=5", "--json")
                .contains("--node 1 --peers tcp:10.77.0.1")
        );
    }
}
