//! Measures VM exits per RDMA operation: sends, writes and reads without a pause on an established connection. Meanwhile the exit
//! counters of both guests are read from their monitors, twice, with the operations in between. The same over TCP (virtio-net) and over
//! rxe as a reference.

use crate::channel::Session;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Member, NIC, Pair, Port};
use crate::scenario::{Options, Report, Scenario};
use crate::transcript::Waited;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-exits",
    about: "VM exits per RDMA operation on an established connection, next to TCP over virtio-net and to rxe",
    topology: rdma::topology,
    run,
    prompt: Some(rdma::prompt),
};

/// Default number of operations of each kind; `--count` overrides it.
const COUNT: u64 = 1_000_000;
/// TCP and rxe are slow on emulated CPUs: a twentieth of the operations suffices.
const PEER_SHARE: u64 = 20;
/// With completion events: a tenth.
const EVENT_SHARE: u64 = 10;
const SIZE: u32 = 64;
/// Time for the device to change from asleep to busy, on a slow host.
const SETTLING: Duration = Duration::from_secs(3);
/// Limit of that time, after which the measurement starts in any case.
const LONGEST_SETTLING: Duration = Duration::from_secs(60);
const KINDS: [&str; 3] = ["send", "write", "read"];
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(1800);

/// A guest's counters at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// Exits as KVM counts them, including those that never reach the monitor.
    pub(super) all: u64,
    /// Exits that reached the monitor.
    pub(super) monitor: u64,
    /// Accesses to the served devices' BARs, by range.
    ranges: BTreeMap<String, u64>,
}

impl Counters {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let tree: Value =
            serde_json::from_str(text).context("`causeway inspect … exits --json` printed no JSON")?;
        let number = |v: &Value| v.as_u64().unwrap_or(0);
        let kernel = tree.get("kernel").and_then(|k| k.get("exits")).and_then(Value::as_u64);
        let monitor = tree.get("total").and_then(Value::as_u64).context("The exit table has no total")?;
        let ranges = tree.get("ranges").and_then(Value::as_object).context("The exit table has no ranges")?;
        Ok(Counters {
            all: kernel.context("KVM tells no exit counters on this host")?,
            monitor,
            ranges: ranges.iter().map(|(name, count)| (name.clone(), number(count))).collect(),
        })
    }

    /// Returns accesses to the RDMA device's ranges (registers and doorbells), which must not grow.
    fn data_path(&self) -> u64 {
        self.of(rdma::FUNCTION_RDMA)
    }

    /// Returns accesses to the ranges of its Ethernet function, which has its own traffic.
    fn ethernet(&self) -> u64 {
        self.of(rdma::FUNCTION_ETHERNET)
    }

    fn of(&self, function: &str) -> u64 {
        self.ranges.iter().filter(|(name, _)| is_of(name, function)).map(|(_, count)| count).sum()
    }
}

/// Returns whether a range is one of a function's BARs: `memory:FUNCTION bar2`.
fn is_of(range: &str, function: &str) -> bool {
    range.split([':', ' ']).any(|word| word == function)
}

fn counters(pair: &Pair<'_>) -> Result<[Counters; 2]> {
    let read =
        |name: &str| Counters::parse(&pair.host().sh(&format!("causeway inspect {name} exits --json"))?);
    Ok([read(pair.a.name)?, read(pair.b.name)?])
}

/// Returns how often the daemon has changed the doorbells of both guests between memory and trapped. It traps them after a while
/// without work, which depends on the load of a crowded machine. After each such change, stores exit.
fn mode_switches(pair: &Pair<'_>) -> Result<u64> {
    if pair.device == Device::Rxe {
        return Ok(0);
    }
    parse_switches(&pair.host().sh("causeway inspect host --json")?)
}

/// Waits until the daemon has mapped the doorbells of busy guests as memory, which takes 32 doorbells within
/// [`rdma::DOORBELL_WINDOW_MS`]. The measurement starts then.
fn settle(pair: &Pair<'_>, guests: &[&str]) -> Result<()> {
    for _ in 0..LONGEST_SETTLING.as_millis() / 250 {
        let tree: Value = serde_json::from_str(&pair.host().sh("causeway inspect host --json")?)
            .context("`causeway inspect host --json` printed no JSON")?;
        if guests.iter().all(|guest| tree["vms"][guest]["nics"][NIC]["rdma"]["doorbells"] == "memory") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(250));
    }
    progress!(
        "  the doorbells of {guests:?} haven't all become memory within {} s",
        LONGEST_SETTLING.as_secs()
    );
    Ok(())
}

fn parse_switches(text: &str) -> Result<u64> {
    fn sum(tree: &Value, found: &mut Vec<u64>) {
        match tree {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| match value.as_u64() {
                Some(n) if name == "doorbell_mode_switches" => found.push(n),
                _ => sum(value, found),
            }),
            Value::Array(items) => items.iter().for_each(|i| sum(i, found)),
            _ => {}
        }
    }
    let tree = serde_json::from_str(text).context("`causeway inspect host --json` printed no JSON")?;
    let mut found = Vec::new();
    sum(&tree, &mut found);
    if found.is_empty() {
        bail!("The daemon tells of no doorbell_mode_switches");
    }
    Ok(found.iter().sum())
}

/// The measured cost of one kind of operation.
#[derive(Debug, Clone, Default)]
struct Cost {
    /// Operations between the two readings of the counters, as a lower bound: the first mark follows the first reading, and the last
    /// precedes the last.
    operations: u64,
    /// Exits of both guests between the readings, including those of the readings.
    exits: u64,
    monitor_exits: u64,
    /// Accesses to the RDMA device's ranges before the first reading.
    settling: u64,
    /// Accesses to the RDMA device's ranges between the readings.
    data_path: u64,
    /// The same by range.
    ranges: BTreeMap<String, u64>,
    /// Changes of the doorbells between memory and trapped, between the readings.
    switches: u64,
    /// Accesses to the Ethernet function's ranges between the readings.
    ethernet: u64,
    seconds: f64,
    /// All operations, including those before the first and after the last reading: all are verified.
    verified: u64,
    events: u64,
    interrupts: u64,
    mismatches: u64,
}

impl Cost {
    fn per_operation(&self) -> f64 {
        if self.operations == 0 { 0.0 } else { self.exits as f64 / self.operations as f64 }
    }

    /// Adds a guest's differences between two readings.
    fn between(&mut self, first: &Counters, last: &Counters) {
        self.exits += last.all.saturating_sub(first.all);
        self.monitor_exits += last.monitor.saturating_sub(first.monitor);
        self.data_path += last.data_path().saturating_sub(first.data_path());
        self.ethernet += last.ethernet().saturating_sub(first.ethernet());
        for (name, count) in &last.ranges {
            let moved = count.saturating_sub(first.ranges.get(name).copied().unwrap_or(0));
            if moved > 0 && is_of(name, rdma::FUNCTION_RDMA) {
                *self.ranges.entry(name.clone()).or_default() += moved;
            }
        }
    }

    fn add(&mut self, other: &Cost) {
        self.operations += other.operations;
        self.exits += other.exits;
        self.monitor_exits += other.monitor_exits;
        self.settling += other.settling;
        self.data_path += other.data_path;
        for (name, count) in &other.ranges {
            *self.ranges.entry(name.clone()).or_default() += count;
        }
        self.switches += other.switches;
        self.ethernet += other.ethernet;
        self.seconds += other.seconds;
        self.verified += other.verified;
        self.events += other.events;
        self.interrupts += other.interrupts;
        self.mismatches += other.mismatches;
    }

    fn json(&self) -> Value {
        json!({
            "operations": self.operations, "operations_verified": self.verified, "exits": self.exits, "exits_per_operation": self.per_operation(),
            "exits_to_the_monitor": self.monitor_exits, "settling_exits": self.settling, "data_path_exits": self.data_path, "data_path_exits_by_range": self.ranges,
            "doorbell_mode_switches": self.switches, "ethernet_exits": self.ethernet, "seconds": self.seconds, "mismatches": self.mismatches,
        })
    }
}

/// Returns the value of `name=` in a line of `rdma-loop`.
fn whole(line: &str, name: &str) -> Result<u64> {
    line.split_whitespace()
        .find_map(|w| w.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        .with_context(|| format!("rdma-loop printed no {name} in {line:?}"))
}

fn wait(session: &Session, what: &str, side: &str) -> Result<String> {
    match session.wait_for(what, 0, PROGRAM_TIMEOUT) {
        Waited::Line(line, _) => Ok(line),
        Waited::Ended => bail!(
            "rdma-loop ended on the {side} before it said {what:?}: {}{}",
            session.out.tail(6),
            session.err.tail(4)
        ),
        Waited::Timeout => {
            bail!("rdma-loop on the {side} didn't say {what:?} within {} s", PROGRAM_TIMEOUT.as_secs())
        }
    }
}

/// Runs every kind of operation between two ports, or over TCP without ports.
fn measure(
    pair: &Pair<'_>,
    ports: Option<(&Port, &Port)>,
    more: &str,
    kinds: &[&str],
    count: u64,
) -> Result<BTreeMap<String, Cost>> {
    let arguments = |port: Option<&Port>| {
        let how =
            port.map_or_else(|| "--tcp".to_owned(), |p| format!("--device {} --gid {}", p.device, p.gid));
        format!("exec rdma-loop {how} --step --count {count} --size {SIZE} --ops {} {more}", kinds.join(","))
    };
    let server = pair.b.start(&arguments(ports.map(|p| p.1)))?;
    let client = pair.a.start(&format!("{} {}", arguments(ports.map(|p| p.0)), pair.b.tcp))?;
    let mut costs = BTreeMap::new();
    for kind in kinds {
        wait(&client, &format!("READY {kind}"), "client")?;
        let interrupted = interrupts(pair)?;
        let before = counters(pair)?;
        client.input(b"go\n")?;
        std::thread::sleep(SETTLING);
        if more.is_empty() && ports.is_some_and(|(a, _)| pair.device == Device::Pvrdma && *a == pair.a.port) {
            // Besides the client, only a receiver of messages uses its doorbell.
            settle(pair, if *kind == "send" { &["a", "b"] } else { &["a"] })?;
        }
        let first = counters(pair)?;
        let switched = mode_switches(pair)?;
        client.input(b"mark\n")?;
        let started = Instant::now();
        let from = wait(&client, &format!("FROM {kind} "), "client")?;
        let to = wait(&client, &format!("TO {kind} "), "client")?;
        let seconds = started.elapsed().as_secs_f64();
        let last = counters(pair)?;
        let switches = mode_switches(pair)?.saturating_sub(switched);
        client.input(b"stop\n")?;
        let mine = wait(&client, &format!("LOOP op={kind} "), "client")?;
        let theirs = wait(&server, &format!("LOOP op={kind} "), "server")?;
        let mut cost = Cost {
            operations: whole(&to, "done")?.saturating_sub(whole(&from, "done")?),
            seconds,
            verified: whole(&mine, "count")?,
            events: whole(&mine, "events")? + whole(&theirs, "events")?,
            mismatches: whole(&mine, "mismatches")? + whole(&theirs, "mismatches")?,
            interrupts: interrupts(pair)?.saturating_sub(interrupted),
            switches,
            ..Cost::default()
        };
        for ((before, first), last) in before.iter().zip(&first).zip(&last) {
            cost.settling += first.data_path().saturating_sub(before.data_path());
            cost.between(first, last);
        }
        progress!(
            "{:24} {:>9} operations in {:7.1} s, {:>9} exits ({:.5} each), {} to the monitor; RDMA device: {} while settling, then {} ({} changes of its doorbells); Ethernet NIC: {}; {} mismatches",
            format!("{} {kind} {more}", ports.map_or("tcp", |p| p.0.device.as_str())),
            cost.operations,
            cost.seconds,
            cost.exits,
            cost.per_operation(),
            cost.monitor_exits,
            cost.settling,
            cost.data_path,
            cost.switches,
            cost.ethernet,
            cost.mismatches
        );
        for (name, count) in &cost.ranges {
            progress!("  {name}: {count} exits");
        }
        costs.insert((*kind).to_owned(), cost);
    }
    for (session, side) in [(client, "client"), (server, "server")] {
        match session.wait(Duration::from_secs(120))? {
            Some(0) => {}
            code => bail!(
                "rdma-loop on the {side} ended with {code:?}: {}{}",
                session.out.tail(6),
                session.err.tail(4)
            ),
        }
    }
    Ok(costs)
}

/// Returns the number of the RDMA device's interrupts in both guests.
fn interrupts(pair: &Pair<'_>) -> Result<u64> {
    let read = |m: &Member<'_>| m.sh("cat /proc/interrupts").map(|text| interrupt_sum(&text));
    Ok(read(&pair.a)? + read(&pair.b)?)
}

fn interrupt_sum(text: &str) -> u64 {
    let lines = text.lines().filter(|l| l.contains("pvrdma"));
    lines.flat_map(|l| l.split_whitespace().skip(1).map_while(|w| w.parse::<u64>().ok())).sum()
}

fn sum(costs: &BTreeMap<String, Cost>) -> Cost {
    let mut all = Cost::default();
    costs.values().for_each(|c| all.add(c));
    all
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let pair = Pair::start(lab, options)?;
    let count = options.count.map_or(COUNT, u64::from);
    let costs = measure(&pair, Some((&pair.a.port, &pair.b.port)), "", &KINDS, count)?;
    let ours = sum(&costs);
    for (kind, cost) in &costs {
        report.figure(kind, cost.json());
    }

    let with_events = sum(&measure(
        &pair,
        Some((&pair.a.port, &pair.b.port)),
        "--events",
        &["send"],
        (count / EVENT_SHARE).max(1),
    )?);
    let peers = (count / PEER_SHARE).max(1);
    let tcp = sum(&measure(&pair, None, "", &KINDS, peers)?);
    let (a, b) = pair.add_rxe()?;
    let rxe = match pair.device {
        Device::Rxe => ours.clone(),
        Device::Pvrdma => sum(&measure(&pair, Some((&a, &b)), "", &KINDS, peers)?),
    };
    report.figure("operations", ours.operations);
    report.figure("data_path_exits", ours.data_path);
    report.figure("settling_exits", ours.settling);
    report.figure("doorbell_mode_switches", ours.switches);
    report.figure("ethernet_exits", ours.ethernet);
    report.figure("exits_per_operation", ours.per_operation());
    report.figure("tcp_exits_per_operation", tcp.per_operation());
    report.figure("rxe_exits_per_operation", rxe.per_operation());
    report.figure("bytes_per_operation", SIZE);
    report.figure("device", pair.device.name());
    report.figure("tcp", tcp.json());
    report.figure("rxe", rxe.json());
    report.figure("events", with_events.events);
    report.figure("interrupts", with_events.interrupts);
    let wanted = count * KINDS.len() as u64;
    report.check(
        ours.operations >= wanted,
        format!("{} operations of {wanted} were done between the readings", ours.operations),
    );
    report.check(
        ours.data_path == 0,
        format!(
            "{} accesses to the device's ranges on the data path; its doorbells changed {} times between memory and trapped",
            ours.data_path, ours.switches
        ),
    );
    // A monitor that shows no accesses to the device at all would show no exits on its data path either.
    if pair.device == Device::Pvrdma {
        report.check(
            ours.settling > 0,
            "no access to the RDMA device was counted at all, not even while it settled",
        );
    }
    for (name, cost) in [("verbs", &ours), ("verbs with events", &with_events), ("TCP", &tcp), ("rxe", &rxe)]
    {
        report.check(cost.mismatches == 0, format!("{} messages over {name} were wrong", cost.mismatches));
    }
    if pair.device == Device::Pvrdma {
        report.check(with_events.events > 0, "no completion event was seen");
        // Each side's last arming may be answered after its last operation.
        report.check(
            with_events.interrupts <= with_events.events + 2,
            format!("{} interrupts for {} completion events", with_events.interrupts, with_events.events),
        );
    }
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rdma_functions_ranges_are_the_data_path() {
        let text = r#"{"total":9,"causes":{},"ranges":{"memory:rdma0.1 bar2":2,"memory:rdma0.1 bar1":1,"memory:rdma0.0 bar0":5,"memory:rdma0.10 bar0":7,"memory:net0 bar0":6},"vcpus":[],"kernel":{"exits":70}}"#;
        let c = Counters::parse(text).unwrap();
        assert_eq!((c.all, c.monitor, c.data_path(), c.ethernet()), (70, 9, 3, 5));
        assert!(Counters::parse("{}").is_err());
        assert!(Counters::parse(r#"{"total":9,"ranges":{},"kernel":{}}"#).is_err());
        let mut cost = Cost { operations: 10, ..Cost::default() };
        let mut later = c.clone();
        later.all += 5;
        *later.ranges.get_mut("memory:rdma0.1 bar2").unwrap() += 4;
        cost.between(&c, &later);
        assert_eq!((cost.exits, cost.data_path, cost.ranges["memory:rdma0.1 bar2"]), (5, 4, 4));
        assert_eq!((cost.ranges.len(), cost.per_operation()), (1, 0.5));
    }

    #[test]
    fn switches_of_all_devices_count() {
        let text = r#"{"vms":{"a":{"nics":{"r":{"rdma":{"doorbell_mode_switches":3}}}},"b":{"nics":[{"doorbell_mode_switches":4}]}}}"#;
        assert_eq!(parse_switches(text).unwrap(), 7);
        assert!(parse_switches("{}").is_err() && parse_switches("x").is_err());
    }

    #[test]
    fn lines_of_the_loop_are_read() {
        let line = "LOOP op=send transport=verbs count=1000 size=64 seconds=0.123 events=5 empty_polls=7 mismatches=0";
        assert_eq!(whole(line, "count").unwrap(), 1000);
        assert!(whole(line, "nonsense").is_err());
    }

    #[test]
    fn interrupts_of_all_cpus_and_vectors_count() {
        let text = "           CPU0       CPU1\n 24:          5          1   PCI-MSI 49152-edge      eth0\n 25:         10          2   PCI-MSI 1-edge      vmw_pvrdma\n 26:          0          7   PCI-MSI 2-edge      vmw_pvrdma\n";
        assert_eq!(interrupt_sum(text), 19);
    }
}
