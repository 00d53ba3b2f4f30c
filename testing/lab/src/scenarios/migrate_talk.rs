//! The communication of migrating guests: `ibv_rc_pingpong` exchanges messages over one connection, from before the first migration
//! until after the last, and verifies them. The daemons report the connected queue pairs.

use super::rdma_fabric;
use super::rdma_tools::TCP;
use super::rdma_verbs;
use crate::channel::Session;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Layout, Member, NIC, Pair};
use crate::scenario::{Options, Report};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// Returns the address of the cluster service on a host.
pub(super) fn listens_at(host: usize) -> String {
    format!("10.77.0.{}:4793", host + 1)
}
/// Time-out of a step of an emulated host: a migration, a boot, the end of a program.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(400);
/// Seconds that the programs run per migration: an emulated host copies memory slowly.
const PER_MOVE: u32 = 120;
/// Messages of the run that measures the rate.
const TRIAL: u32 = 100;

/// Returns the layout of a pair in one cluster: daemons on the first two hosts, guests on these hosts.
pub(super) fn layout(hosts: &[usize]) -> Layout {
    layout_of(hosts, 2)
}

/// As [`layout`], with daemons on `daemons` hosts.
pub(super) fn layout_of(hosts: &[usize], daemons: usize) -> Layout {
    layout_served(hosts, daemons, 0)
}

/// As [`layout_of`], with the cluster service on that host.
pub(super) fn layout_served(hosts: &[usize], daemons: usize, service: usize) -> Layout {
    let service = listens_at(service);
    let daemon = |host: usize| {
        format!(
            "--cluster {service} --name h{0} --fabric-address 10.77.0.{0}:4792 --cluster-key /run/causeway/cluster.key",
            host + 1
        )
    };
    Layout { hosts: hosts.to_vec(), daemons: (0..daemons).map(daemon).collect(), ..rdma_fabric::layout() }
}

/// As [`service_of`], for the usual two hosts. Others are outside of the cluster.
pub(super) fn service(lab: &Lab) -> Result<Session> {
    service_of(lab, 2)
}

/// Prepares the networks of the first `hosts` hosts, which have daemons, and starts the service on the first.
pub(super) fn service_of(lab: &Lab, hosts: usize) -> Result<Session> {
    lab.install_causeway_in_memory()?;
    for (number, host) in lab.hosts().iter().take(hosts).enumerate() {
        rdma_fabric::prepare(host, number)?;
    }
    service_on(lab, 0)
}

/// Starts the service on a host, with its previous state. The switchover limit is long, as times of an emulated host mean nothing.
pub(super) fn service_on(lab: &Lab, number: usize) -> Result<Session> {
    service_with(lab, number, "")
}

/// Lease of a host in seconds: emulated hosts may stall for long under load.
const LEASE: u64 = 30;

/// As [`service_on`], with additional arguments.
pub(super) fn service_with(lab: &Lab, number: usize, more: &str) -> Result<Session> {
    service_kept(lab, number, &format!("--state /run/causeway/cluster.redb {more}"))
}

/// As [`service_with`], with the options of its state.
pub(super) fn service_kept(lab: &Lab, number: usize, kept: &str) -> Result<Session> {
    let host = lab.host(number)?;
    let command = format!(
        "mkdir -p /run/causeway && exec causeway cluster serve --listen {} --switch-limit 120000 --lease {LEASE} {kept}",
        listens_at(number)
    );
    let service = host.spawn("causeway cluster", &command)?;
    let listens =
        "for i in $(seq 200); do ss -Hltn 'sport = :4793' | grep -q . && exit 0; sleep 0.2; done; exit 1";
    if host.run(listens, STEP_TIMEOUT)?.code != 0 {
        bail!("The cluster service doesn't listen: {}", service.err.tail(5));
    }
    Ok(service)
}

/// Returns whether `--only verbs` was given: rxe devices on the segment's bridges carry the guests' connections.
pub(super) fn by_verbs(options: &Options) -> bool {
    !options.only.is_empty() && options.wants("verbs")
}

/// As [`service_of`], with an RDMA device on each host, and all VMs pinned to transport `verbs`. Adds the daemons' options to the
/// layout.
pub(super) fn verbs_of(lab: &Lab, hosts: usize, layout: &mut Layout) -> Result<Session> {
    lab.install_causeway_in_memory()?;
    for (number, host) in lab.hosts().iter().take(hosts).enumerate() {
        rdma_fabric::prepare(host, number)?;
        rdma_verbs::rxe_on(host, "br1", Ipv4Addr::new(10, 77, 0, u8::try_from(number + 1)?))?;
    }
    for daemon in &mut layout.daemons {
        daemon.push_str(" --verbs");
    }
    service_with(lab, 0, "--pin '*=verbs'")
}

/// A guest's connected queue pairs: handle and number.
pub(super) type Names = BTreeSet<(String, u64)>;

/// Returns a guest's queue pairs that are ready to send: handle, number, and transport to the peer.
fn queue_pairs(host: &Host, vm: &str) -> Result<BTreeSet<(String, u64, String)>> {
    let tree = rdma_fabric::tree(host)?;
    let all = tree["vms"][vm]["nics"][NIC]["rdma"]["queue_pairs"].as_object();
    Ok(all
        .into_iter()
        .flatten()
        .filter(|(_, qp)| qp["state"] == "ReadyToSend" && qp["peer"]["gid"].is_string())
        .map(|(handle, qp)| {
            let transport = qp["transport"].as_str().unwrap_or("none").to_owned();
            (handle.clone(), qp["qpn"].as_u64().unwrap_or(0), transport)
        })
        .collect())
}

pub(super) fn pingpong(m: &Member<'_>, count: u32, server: Option<&str>) -> String {
    let to = server.unwrap_or("");
    format!("ibv_rc_pingpong -d {} -g {} -c -s 4096 -n {count} {to}", m.port.device, m.port.gid)
}

/// Returns the duration that a run reports: `300 iters in 1.25 seconds = …`.
fn seconds(said: &str) -> Option<f64> {
    let words: Vec<&str> = said.split_whitespace().collect();
    let at = words.windows(2).position(|pair| pair == ["iters", "in"])?;
    words.get(at + 2)?.parse().ok().filter(|seconds| *seconds > 0.0)
}

/// Returns the number of messages for a duration, from a measured run.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Bounded: floats become whole numbers at the nearest bound.
fn messages(trial: f64, seconds: u32) -> u32 {
    let rate = (f64::from(TRIAL) / trial).clamp(1.0, 100_000.0);
    (rate * f64::from(seconds)) as u32
}

/// For guests that migrate often: freed pages become zero, so a migration sends nearly nothing for them.
pub(super) const SMALL: &str = "init_on_free=1";

/// Drops a guest's file caches. With [`SMALL`], little is left to copy.
pub(super) fn shrink(m: &Member<'_>) -> Result<()> {
    m.sh("sync; echo 3 > /proc/sys/vm/drop_caches").map(drop)
}

/// Name of the files of a guest's only program.
const WORK: &str = "work";

/// Starts a program that survives the connection that started it.
pub(super) fn detach(m: &Member<'_>, command: &str) -> Result<()> {
    detach_as(m, WORK, command)
}

/// As [`detach`], for several programs per guest: output in `/run/NAME.out`, status in `/run/NAME.code`.
pub(super) fn detach_as(m: &Member<'_>, name: &str, command: &str) -> Result<()> {
    m.sh(&format!(
        "rm -f /run/{name}.out /run/{name}.code; setsid sh -c '{command} > /run/{name}.out 2>&1; echo $? > /run/{name}.code' < /dev/null > /dev/null 2>&1 & sleep 1"
    ))
    .map(drop)
}

/// Returns the program's status after its end.
pub(super) fn ended(m: &Member<'_>, patience: Duration) -> Result<(i32, String)> {
    ended_as(m, WORK, patience)
}

/// As [`ended`], of the program with that name.
pub(super) fn ended_as(m: &Member<'_>, name: &str, patience: Duration) -> Result<(i32, String)> {
    let until = Instant::now() + patience;
    loop {
        let text = m.sh(&format!("cat /run/{name}.code 2>/dev/null || true"))?;
        if let Ok(code) = text.trim().parse() {
            return Ok((code, m.sh(&format!("tail -n 6 /run/{name}.out"))?));
        }
        if Instant::now() > until {
            bail!(
                "The program in guest {} doesn't end: {}",
                m.name,
                m.sh(&format!("tail -n 4 /run/{name}.out; dmesg | tail -n 6"))?
            );
        }
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// Returns whether the program still runs.
pub(super) fn works(m: &Member<'_>) -> Result<bool> {
    works_as(m, WORK)
}

/// As [`works`], of the program with that name.
pub(super) fn works_as(m: &Member<'_>, name: &str) -> Result<bool> {
    Ok(m.sh(&format!("[ -e /run/{name}.code ] || echo works"))?.contains("works"))
}

/// Waits for one of a guest's queue pairs to be connected. Returns the connected ones, and the transports to their peers.
pub(super) fn connected(member: &Member<'_>) -> Result<(Names, BTreeSet<String>)> {
    connected_least(member, 1)
}

/// As [`connected`], for at least `least` queue pairs. Returns fewer after a minute.
pub(super) fn connected_least(member: &Member<'_>, least: usize) -> Result<(Names, BTreeSet<String>)> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = queue_pairs(member.host(), member.name)?;
        if found.len() >= least || Instant::now() > until {
            let transports = found.iter().map(|(_, _, transport)| transport.clone()).collect();
            return Ok((found.into_iter().map(|(handle, qpn, _)| (handle, qpn)).collect(), transports));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Waits until the program accepts connections, which takes long on a crowded machine.
fn listens(m: &Member<'_>) -> Result<()> {
    listens_as(m, WORK, TCP)
}

/// As [`listens`], for the program with that name. The command `condition` succeeds once it listens.
pub(super) fn listens_as(m: &Member<'_>, name: &str, condition: &str) -> Result<()> {
    let look = format!("for i in $(seq 300); do {condition} && exit 0; sleep 0.2; done; echo never");
    if m.sh(&look)?.contains("never") {
        bail!("The program in guest {} doesn't listen: {}", m.name, m.sh(&format!("cat /run/{name}.out"))?);
    }
    Ok(())
}

/// Returns the number of messages for this many seconds between two guests, from a short run.
pub(super) fn lasting(server: &Member<'_>, client: &Member<'_>, seconds: u32) -> Result<u32> {
    detach(server, &pingpong(server, TRIAL, None))?;
    listens(server)?;
    detach(client, &pingpong(client, TRIAL, Some(&server.tcp)))?;
    let said = ended(client, STEP_TIMEOUT)?;
    if said.0 != 0 {
        // If the client gave up, the server waits forever.
        bail!("The program in guest {} doesn't work before anything moves: {said:?}", client.name);
    }
    let trial = [said, ended(server, STEP_TIMEOUT)?];
    let [(0, said), (0, _)] = &trial else {
        bail!("The programs don't work before anything moves: {trial:?}");
    };
    let trial = self::seconds(said)
        .with_context(|| format!("ibv_rc_pingpong doesn't say how long it took: {said}"))?;
    let count = messages(trial, seconds);
    progress!("{TRIAL} messages took {trial} s; {count} for {seconds} s");
    Ok(count)
}

/// Starts the message exchange for `moves` migrations; returns the number of messages.
pub(super) fn begin(pair: &Pair<'_>, moves: u32) -> Result<u32> {
    let count = lasting(&pair.b, &pair.a, PER_MOVE * (moves + 1))?;
    let (server, client) = (pingpong(&pair.b, count, None), pingpong(&pair.a, count, Some(&pair.b.tcp)));
    detach(&pair.b, &server)?;
    listens(&pair.b)?;
    detach(&pair.a, &client)?;
    Ok(count)
}

/// Fails if the programs have ended. A failure that is independent of the migration (`ibv_rc_pingpong` gives up after half a second on
/// a crowded machine) is reported separately.
pub(super) fn go_on(pair: &Pair<'_>) -> Result<()> {
    if !works(&pair.a)? || !works(&pair.b)? {
        bail!("The programs had ended before it began: {}", pair.a.sh("cat /run/work.out")?);
    }
    Ok(())
}

/// Waits for the programs' end; returns the number of failures in either guest.
pub(super) fn end(pair: &Pair<'_>, report: &mut Report) -> Result<u32> {
    let goes_on = works(&pair.a)?;
    report.check(goes_on, "the programs had ended before the last move was over: they say less");
    let mut errors = 0;
    let results = [ended(&pair.a, STEP_TIMEOUT * 2)?, ended(&pair.b, STEP_TIMEOUT * 2)?];
    for (code, said) in &results {
        let right = *code == 0 && !said.contains("invalid data") && !said.contains("Failed");
        errors += u32::from(!right);
        report.check(right, format!("a program ended with status {code}: {said}"));
    }
    for member in [&pair.a, &pair.b] {
        errors += complaints(member, report)?;
    }
    pair.a.reaches(&pair.b)?;
    Ok(errors)
}

/// Device counters of failures: requests or receives with an error, exhausted retries, lost completions. `rnr_nak_retry_err` isn't
/// among them. As with mlx5, it counts each attempt to a peer without a posted receive, by which perftest's receiver slows its sender
/// down.
const FAILURES: [&str; 4] =
    ["req_cqe_error", "resp_cqe_error", "req_transport_retries_exceeded", "cq_overruns"];

/// Returns the nonzero failure counters of a guest's device.
pub(super) fn failures(member: &Member<'_>) -> Result<Vec<String>> {
    let tree = rdma_fabric::tree(member.host())?;
    let counters = &tree["vms"][member.name]["nics"][NIC]["rdma"]["counters"];
    let mut found = Vec::new();
    for name in FAILURES {
        let count = counters[name]
            .as_u64()
            .with_context(|| format!("The device has no counter {name}: {counters}"))?;
        if count > 0 {
            found.push(format!("guest {}: {name} {count}", member.name));
        }
    }
    Ok(found)
}

/// Returns the number of failures that a guest's console, its drivers and its device's counters report.
pub(super) fn complaints(member: &Member<'_>, report: &mut Report) -> Result<u32> {
    let trouble = member.guest.trouble();
    report.check(trouble.is_empty(), format!("guest {}: {trouble:?}", member.name));
    // Messages of a driver whose device or queue pair fails.
    let said =
        member.sh("dmesg | grep -i -c -e 'pvrdma.*error' -e 'pvrdma.*fatal' -e 'vmxnet3.*error' || true")?;
    let said: u32 = said.trim().parse().unwrap_or(1);
    report.check(said == 0, format!("guest {}: {}", member.name, member.kernel_log(8)));
    let failures = failures(member)?;
    report.check(failures.is_empty(), format!("{failures:?}"));
    Ok(said.saturating_add(u32::try_from(trouble.len() + failures.len()).unwrap_or(u32::MAX)))
}

/// Runs commands, each on its host, in parallel; returns their outputs.
pub(super) fn at_once(lab: &Lab, commands: &[(usize, String)]) -> Result<Vec<Value>> {
    let outputs: Vec<Result<Value>> = std::thread::scope(|scope| {
        let running: Vec<_> = commands
            .iter()
            .map(|(host, command)| {
                scope.spawn(move || {
                    let output = lab.host(*host)?.run(command, STEP_TIMEOUT)?;
                    if output.code != 0 {
                        bail!("{command:?} on h{}: {}", host + 1, output.stderr);
                    }
                    serde_json::from_str(output.stdout.trim())
                        .with_context(|| format!("{command:?} printed {:?}", output.stdout))
                })
            })
            .collect();
        let joined = running.into_iter().map(|one| match one.join() {
            Ok(result) => result,
            Err(_) => bail!("A thread of this scenario panicked"),
        });
        joined.collect()
    });
    outputs.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_is_asked_for_by_name() {
        let only = |parts: &[&str]| Options {
            only: parts.iter().map(ToString::to_string).collect(),
            ..Options::default()
        };
        assert!(by_verbs(&only(&["verbs"])) && !by_verbs(&only(&[])) && !by_verbs(&only(&["other"])));
    }

    #[test]
    fn the_length_of_a_run_follows_from_a_trial() {
        let said =
            "2457600 bytes in 0.60 seconds = 32.77 Mbit/sec\n300 iters in 1.50 seconds = 2000.00 usec/iter\n";
        assert_eq!(seconds(said), Some(1.5));
        assert_eq!(messages(f64::from(TRIAL) / 200.0, 240), 200 * 240);
        assert_eq!(seconds("nothing"), None);
    }
}
