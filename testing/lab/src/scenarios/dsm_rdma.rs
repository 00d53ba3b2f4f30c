//! A payload VM of two nodes on separate hosts, whose link uses the hosts' RDMA devices (here Linux's rxe).
//!
//! ```text
//!  host h1: causeway run --node 0 ─ rxe0 ─ x0 ═══ link ═══ x0 ─ rxe0 ─ causeway run --node 1: host h2
//!                  └───────── TCP 10.77.0.1:7000, idle after the handshake ────────┘
//! ```
//! Programs verify their results over `rdma:`, and over `tcp:` for comparison. The devices must have transported the frames, and TCP
//! nothing. No message may have missed a receive buffer. Lost packets are retransmitted. The nodes must report a killed node and a cut
//! link by name. A host without a device reports what is missing.

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

/// Addresses of the nodes. Node 2, if any, is on the host of node 0.
const NODES: [(usize, u16); 3] = [(0, 7000), (1, 7000), (0, 7001)];
/// Time-out of a run. On emulated processors a program may take a minute instead of a second.
const RUN_TIMEOUT: Duration = Duration::from_secs(240);
/// Time-out until a dead or cut-off node is reported. The specified limit is one second; the rest is for the emulated hosts and the
/// lab.
const TOLD: Duration = Duration::from_secs(4);
/// Limit of TCP segments for handshake and end, both ways, including the host's own.
const FEW_SEGMENTS: u64 = 40;

/// Programs with their arguments. Small, as each page takes milliseconds here.
const PROGRAMS: &[(&str, &str)] = &[
    ("dsm_basic", "all 20"),
    ("producer-consumer", "messages=100"),
    ("locks", "times=50"),
    ("jacobi", "n=256 steps=10"),
    // Consecutive pages, which are sent in bursts.
    ("pages", "kind=read pages=500 words=512"),
];

/// A part of the scenario.
type Part = fn(&Lab, &mut Report) -> Result<()>;

fn topology(_: &Options) -> Topology {
    Topology::new().host(HostSpec::new("h1").newer()).host(HostSpec::new("h2").newer()).link("h1", "h2")
}

/// Returns a host's address.
fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, if host == 0 { 1 } else { 2 })
}

/// Returns a node's address as in `--peers` and in the nodes' messages.
fn place(kind: &str, node: usize) -> String {
    let (host, port) = NODES[node];
    format!("{kind}:{}:{port}", address(host))
}

/// Returns the addresses of `nodes` nodes, for `--peers`.
fn peers(kind: &str, nodes: usize) -> String {
    (0..nodes).map(|node| place(kind, node)).collect::<Vec<_>>().join(",")
}

/// Returns the command of a node.
fn command(node: usize, peers: &str, program: &str, arguments: &str, flags: &str) -> String {
    format!(
        "exec causeway {flags} --log-level warn run --name dsm{node} --node {node} --peers {peers} --insecure --payload /share/bin/{program} -- {arguments}"
    )
}

/// Returns the number of TCP segments that a host has sent and received.
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

/// A host device's counters other than packets.
#[derive(Debug, Clone, Copy)]
struct Trouble {
    /// Messages that found no receive buffer, at this and at the other side.
    not_ready: u64,
    /// Counters of [`RECOVERED`].
    recovered: [u64; 4],
}

/// Counters of lost or late packets: retransmissions, duplicates, packets out of order.
const RECOVERED: [&str; 4] =
    ["completer_retry_err", "rcvd_seq_err", "out_of_seq_request", "duplicate_request"];

fn trouble(host: &Host) -> Result<Trouble> {
    let text = host.sh(&format!(
        "cd /sys/class/infiniband/rxe0/ports/1/hw_counters; cat send_rnr_err rcvd_rnr_err {}",
        RECOVERED.join(" ")
    ))?;
    let numbers: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
    match numbers.as_deref() {
        Ok([first, second, rest @ ..]) => match rest.try_into() {
            Ok(recovered) => Ok(Trouble { not_ready: first + second, recovered }),
            Err(_) => bail!("The counters of rxe0 were read as {text:?}"),
        },
        _ => bail!("The counters of rxe0 were read as {text:?}"),
    }
}

/// All running nodes of a VM.
struct Nodes {
    sessions: Vec<Session>,
}

impl Nodes {
    /// Starts the nodes in sequence, so that none connects before another listens, which would add TCP segments.
    fn start(lab: &Lab, commands: &[String]) -> Result<Self> {
        let mut sessions = Vec::new();
        for (node, command) in commands.iter().enumerate() {
            let (host, port) = NODES[node];
            sessions.push(lab.host(host)?.spawn(&format!("node {node}"), command)?);
            // Other nodes connect to it. If it refuses to start, its end shows that.
            if node + 1 < commands.len() {
                let listens = format!(
                    "i=0; until ss -Hltn 'sport = :{port}' | grep -q . || [ $i -ge 100 ]; do i=$((i+1)); sleep 0.05; done"
                );
                lab.host(host)?.sh(&listens)?;
            }
        }
        Ok(Self { sessions })
    }

    /// Waits for all nodes; returns their outputs.
    fn end(&self) -> Result<Vec<Output>> {
        self.sessions.iter().map(|session| session.output(RUN_TIMEOUT)).collect()
    }
}

/// Returns node 0's report about the whole VM.
fn outcome(stdout: &str) -> Option<Value> {
    // The console's lines precede it.
    let at = if stdout.starts_with("{\n") { 0 } else { stdout.find("\n{\n")? };
    serde_json::from_str(&stdout[at..]).ok()
}

/// Runs a program on `nodes` nodes over one kind of link. Returns the counters.
fn run_program(lab: &Lab, kind: &str, nodes: usize, program: &str, arguments: &str) -> Result<Value> {
    let begun = Instant::now();
    let hosts = [lab.host(0)?, lab.host(1)?];
    let look = |host: &Host| anyhow::Ok((packets(host)?, segments(host)?, trouble(host)?));
    let before = [look(hosts[0])?, look(hosts[1])?];
    let peers = peers(kind, nodes);
    let commands: Vec<String> =
        (0..nodes).map(|node| command(node, &peers, program, arguments, "--json")).collect();
    let ended = Nodes::start(lab, &commands)?.end()?;
    let after = [look(hosts[0])?, look(hosts[1])?];
    let said = || {
        let all = ended.iter().enumerate().map(|(node, output)| {
            format!(
                "node {node} ended with status {}: {} {}",
                output.code,
                output.stdout.trim(),
                output.stderr.trim()
            )
        });
        all.collect::<Vec<_>>().join("; ")
    };
    let console = ended.first().map_or("", |zero| zero.stdout.as_str());
    let Some(tree) = outcome(console).filter(|_| ended.iter().all(|output| output.code == 0)) else {
        bail!("{}", said());
    };
    // dsm_basic reports by its exit code only.
    let verified = console.contains("\"verified\":true") || program == "dsm_basic";
    if !verified || console.contains("\"verified\":false") {
        bail!("the result isn't verified: {}", said());
    }
    let sum = |name: &str| -> u64 {
        let nodes = tree["nodes"].as_object().into_iter().flatten();
        nodes.filter_map(|(_, node)| node[name].as_u64()).sum()
    };
    let moved = |of: fn(&([u64; 2], u64, Trouble)) -> u64| {
        [0, 1].map(|host: usize| of(&after[host]).saturating_sub(of(&before[host])))
    };
    let recovered = RECOVERED.iter().enumerate().map(|(index, name)| {
        let each =
            |host: usize| after[host].2.recovered[index].saturating_sub(before[host].2.recovered[index]);
        ((*name).to_owned(), json!([each(0), each(1)]))
    });
    let recovered: Map<String, Value> = recovered.filter(|(_, moved)| *moved != json!([0, 0])).collect();
    Ok(json!({
        "messages": sum("messages"),
        "bytes": sum("bytes"),
        "device_sent": moved(|look| look.0[0]),
        "device_received": moved(|look| look.0[1]),
        "tcp_segments": moved(|look| look.1),
        "not_ready": moved(|look| look.2.not_ready),
        "recovered": recovered,
        "seconds": begun.elapsed().as_secs(),
    }))
}

/// Returns a figure of both hosts.
fn both(figures: &Value, name: &str) -> [u64; 2] {
    [0, 1].map(|host| figures[name][host].as_u64().unwrap_or(0))
}

/// Runs programs over both kinds of link.
fn programs(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let mut all = Map::new();
    for (program, arguments) in PROGRAMS.iter().filter(|(program, _)| options.wants(program)) {
        let mut compared = Map::new();
        for kind in ["rdma", "tcp"] {
            let figures = run_program(lab, kind, 2, program, arguments)
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

/// Three nodes, of which two share a host: each has two links by one device. (Programs that spin at barriers deprive the device's
/// threads of that host's only CPU.)
fn three(lab: &Lab, report: &mut Report) -> Result<()> {
    let mut all = Map::new();
    for (program, arguments) in [("dsm_basic", "all 5"), ("producer-consumer", "messages=50")] {
        let figures = run_program(lab, "rdma", 3, program, arguments)
            .with_context(|| format!("{program} on three nodes"))?;
        progress!("passed  three nodes: {program}: {figures}");
        let refused = both(&figures, "not_ready");
        report.check(refused == [0, 0], format!("{program}: messages found no receive buffer: {refused:?}"));
        all.insert(program.to_owned(), figures);
    }
    report.figure("three_nodes", all);
    Ok(())
}

/// Packets are lost in both directions: the devices retransmit them.
fn losses(lab: &Lab, report: &mut Report) -> Result<()> {
    for host in lab.hosts() {
        host.sh("modprobe sch_netem; tc qdisc replace dev x0 root netem limit 10000 loss 1%")?;
    }
    let results =
        [("jacobi", "n=256 steps=10"), ("producer-consumer", "messages=100")].map(|(program, arguments)| {
            run_program(lab, "rdma", 2, program, arguments)
                .with_context(|| format!("{program} while 1 % of the packets are lost"))
        });
    let mut lost = Vec::new();
    for host in lab.hosts() {
        let shown = host.sh("tc -s qdisc show dev x0; tc qdisc del dev x0 root")?;
        let after = shown.split("dropped ").nth(1).unwrap_or_default();
        lost.push(after.split(',').next().unwrap_or_default().parse::<u64>().unwrap_or(0));
    }
    let [jacobi, producer] = results;
    let figures = [jacobi?, producer?];
    progress!("passed  losses: {lost:?} packets lost: {figures:?}");
    let recovered = |figures: &Value| figures["recovered"].as_object().is_some_and(|all| !all.is_empty());
    report.check(
        lost.iter().sum::<u64>() > 0 && figures.iter().any(recovered),
        format!("the link should lose packets, and the devices send them again: {lost:?}, {figures:?}"),
    );
    report.figure("losses", json!({ "lost": lost, "figures": figures }));
    Ok(())
}

/// Starts an endless program, and waits until it runs on both nodes.
fn endless(lab: &Lab) -> Result<Nodes> {
    let peers = peers("rdma", 2);
    let commands = [0, 1].map(|node| command(node, &peers, "dsm_basic", "endless 1", ""));
    let nodes = Nodes::start(lab, &commands)?;
    match nodes.sessions[0].wait_for("all run", 0, RUN_TIMEOUT) {
        Waited::Line(..) => Ok(nodes),
        other => bail!("the endless program doesn't run: {other:?}; {}", nodes.sessions[0].err.text()),
    }
}

/// Waits for a node's sentence that contains all `parts`. Returns it, and its time in milliseconds.
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
    // All threads are confined: none has a capability, each has a filter. The service threads still have priority (policy 1:
    // SCHED_FIFO).
    let threads = lab.host(0)?.sh(
        "for t in /proc/$(pidof causeway)/task/*; do echo $(cat $t/comm) $(grep -E '^(CapEff|CapPrm|Seccomp):' $t/status | cut -f2) policy $(cut -d')' -f2 $t/stat | cut -d' ' -f40); done",
    )?;
    progress!("threads of node 0: {}", threads.trim().replace('\n', ", "));
    let none = "0000000000000000 0000000000000000 2 policy";
    report.check(
        threads.lines().all(|thread| thread.contains(none)),
        format!("threads aren't confined: {threads}"),
    );
    let first =
        |name: &str| threads.lines().any(|thread| thread.starts_with(name) && thread.ends_with("policy 1"));
    report.check(
        first("dsm-link1") && first("dsm-faults"),
        format!("threads that serve memory are ordinary: {threads}"),
    );
    let since = Instant::now();
    nodes.sessions[1].kill()?;
    let link = place("rdma", 1);
    let (said, after) = told(&nodes.sessions[0], since, &["node 1", &link, "its monitor has died"])?;
    progress!("passed  killed: after {after} ms: {said}");
    let code = nodes.sessions[0].wait(RUN_TIMEOUT)?;
    report.check(code == Some(1), format!("node 0 ended with status {code:?} after node 1 was killed"));
    report.figure("killed", json!({ "told_ms": u64::try_from(after)?, "said": said }));
    Ok(())
}

/// A stopped node: its device acknowledges messages, and no thread answers them.
fn stopped(lab: &Lab, report: &mut Report) -> Result<()> {
    let nodes = endless(lab)?;
    let since = Instant::now();
    nodes.sessions[1].signal(rustix::process::Signal::STOP.as_raw())?;
    let result = told(&nodes.sessions[0], since, &["Node 1 has not been heard from", &place("rdma", 1)]);
    nodes.sessions[1].signal(rustix::process::Signal::CONT.as_raw())?;
    let (said, after) = result?;
    progress!("passed  stopped: after {after} ms: {said}");
    for (node, session) in nodes.sessions.iter().enumerate() {
        let code = session.wait(RUN_TIMEOUT)?;
        report.check(
            code == Some(1),
            format!("node {node} ended with status {code:?} after node 1 was stopped"),
        );
    }
    report.figure("stopped", json!({ "told_ms": u64::try_from(after)?, "said": said }));
    Ok(())
}

fn cut(lab: &Lab, report: &mut Report) -> Result<()> {
    let nodes = endless(lab)?;
    let since = Instant::now();
    lab.host(1)?.sh("ip link set x0 down")?;
    let mut all = Vec::new();
    for (node, peer) in [(0, 1), (1, 0)] {
        let link = place("rdma", peer);
        let (said, after) = told(&nodes.sessions[node], since, &[&format!("ode {peer}"), &link])?;
        progress!("passed  cut: node {node} after {after} ms: {said}");
        all.push(json!({ "node": node, "told_ms": u64::try_from(after)?, "said": said }));
    }
    for (node, session) in nodes.sessions.iter().enumerate() {
        let code = session.wait(RUN_TIMEOUT)?;
        report
            .check(code == Some(1), format!("node {node} ended with status {code:?} after the link was cut"));
    }
    lab.host(1)?.sh("ip link set x0 up")?;
    report.figure("cut", all);
    Ok(())
}

/// Error messages of unsuitable hosts.
fn refusals(lab: &Lab, report: &mut Report) -> Result<()> {
    let host = lab.host(0)?;
    let elsewhere = "rdma:10.77.9.9:7000,rdma:10.77.9.8:7000";
    let output = host.run(&command(0, elsewhere, "dsm_basic", "all 1", ""), RUN_TIMEOUT)?;
    let fine =
        output.code != 0 && ["10.77.9.9", "RoCE", "rxe0"].iter().all(|part| output.stderr.contains(part));
    report.check(fine, format!("no device has 10.77.9.9; node 0 said {:?}", output.stderr.trim()));
    report.figure("no_such_address", output.stderr.trim());
    // One node uses tcp, the other rdma: the first one to notice reports it.
    let commands =
        [0, 1].map(|node| command(node, &peers(["rdma", "tcp"][node], 2), "dsm_basic", "all 1", ""));
    let ended = Nodes::start(lab, &commands)?.end()?;
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
    // Restores the previous installation.
    lab.install_causeway_in_memory()?;
    for (number, host) in lab.hosts().iter().enumerate() {
        host.sh("ip link set x0 up")?;
        rxe_on(host, "x0", address(number))?;
    }
    programs(lab, options, report)?;
    let parts: [(&str, Part); 6] = [
        ("three", three),
        ("losses", losses),
        ("refusals", refusals),
        ("killed", killed),
        ("stopped", stopped),
        ("cut", cut),
    ];
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
        assert_eq!(peers("rdma", 3), "rdma:10.77.0.1:7000,rdma:10.77.0.2:7000,rdma:10.77.0.1:7001");
        assert!(
            command(1, &peers("tcp", 2), "locks", "times=5", "--json")
                .contains("--node 1 --peers tcp:10.77.0.1")
        );
    }
}
