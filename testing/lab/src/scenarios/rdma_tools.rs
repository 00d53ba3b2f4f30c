//! Debian's RDMA tools between two guests, each separately: those of rdma-core and perftest, Open MPI over UCX, and `rdma-verify`,
//! which verifies every byte where a tool only moves data.

use crate::channel::Output;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::unfinished::Unfinished;
use anyhow::Result;
use serde_json::{Map, json};
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-tools",
    about: "Debian's RDMA tools, perftest and Open MPI between two guests, data verified (--device rxe to compare)",
    topology: rdma::topology,
    run,
    prompt: Some(rdma::prompt),
};

/// Requirements on the outputs in addition to successful statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Both sides end with status 0, and the client prints this.
    Says(&'static str),
    /// As `Says`, but the time-out may end a server: some never end by themselves.
    ClientSays(&'static str),
    /// The device must refuse a feature that its interface lacks.
    Absent(&'static str),
}

/// One tool with one set of arguments.
#[derive(Debug, Clone)]
struct Tool {
    name: String,
    server: String,
    client: String,
    /// A condition in the server's guest.
    listening: &'static str,
    seconds: u64,
    verdict: Verdict,
}

pub(super) const TCP: &str = "ss -Hltn 'sport = :18515' | grep -q .";
pub(super) const CM: &str = "rdma resource show cm_id | grep -q LISTEN";
pub(super) const CONTROL: &str = "ss -Hltn 'sport = :18601' | grep -q .";
const NOTHING: &str = "true";

/// Returns all tools, with placeholders in braces for device and addresses.
fn tools(device: Device) -> Vec<Tool> {
    let mut all = Vec::new();
    let mut add = |name: &str, listening, seconds, verdict, server: &str, client: &str| {
        all.push(Tool {
            name: name.to_owned(),
            server: server.to_owned(),
            client: client.to_owned(),
            listening,
            seconds,
            verdict,
        });
    };
    add(
        "ibv_devinfo",
        NOTHING,
        60,
        Verdict::Says("PORT_ACTIVE"),
        "ibv_devices; ibv_devinfo -v -d {dev}",
        "ibv_devices | grep {dev} && ibv_devinfo -v -d {dev}",
    );
    for (tool, more) in [
        ("rc", "-c -n 500"),
        ("rc", "-c -n 500 -e"),
        ("rc", "-c -n 500 -s 1"),
        ("rc", "-c -n 20 -s 1048576"),
        ("ud", "-c -n 500 -s 1024"),
        ("ud", "-c -n 500 -s 1024 -e"),
        ("srq", "-c -n 500 -q 4"),
        ("srq", "-c -n 500 -q 4 -e"),
    ] {
        let command = format!("ibv_{tool}_pingpong -d {{dev}} -g {{gid}} {more}");
        add(
            &format!("ibv_{tool}_pingpong {more}"),
            TCP,
            120,
            Verdict::Says("bytes in"),
            &command,
            &format!("{command} {{tcp}}"),
        );
    }
    let uc = match device {
        Device::Rxe => Verdict::Says("bytes in"),
        Device::Pvrdma => Verdict::Absent("the Linux driver refuses unreliable connections"),
    };
    add(
        "ibv_uc_pingpong",
        TCP,
        60,
        uc,
        "ibv_uc_pingpong -d {dev} -g {gid} -c -n 500",
        "ibv_uc_pingpong -d {dev} -g {gid} -c -n 500 {tcp}",
    );
    for more in ["-V -v -C 20", "-V -v -C 5 -S 65535"] {
        add(
            &format!("rping {more}"),
            CM,
            120,
            Verdict::Says("ping data: rdma-ping"),
            &format!("rping -s -a {{addr}} {more}"),
            &format!("rping -c -a {{addr}} {more}"),
        );
    }
    add(
        "ucmatose",
        CM,
        120,
        Verdict::Says("return status 0"),
        "ucmatose -b {addr} -c 4 -C 10 -S 1024",
        "ucmatose -s {addr} -c 4 -C 10 -S 1024",
    );
    add(
        "ucmatose -m",
        CM,
        120,
        Verdict::Says("return status 0"),
        "ucmatose -b {addr} -m",
        "ucmatose -s {addr} -m",
    );
    add(
        "udaddy",
        CM,
        120,
        Verdict::Says("return status 0"),
        "udaddy -b {addr} -c 2 -C 10",
        "udaddy -s {addr} -c 2 -C 10",
    );
    add(
        "cmtime",
        CM,
        120,
        Verdict::ClientSays("connect"),
        "cmtime -b {addr} -c 20",
        "cmtime -s {addr} -c 20",
    );
    add("rdma_client", CM, 60, Verdict::Says("rdma_client: end 0"), "rdma_server", "rdma_client -s {addr}");
    add(
        "rstream",
        CM,
        120,
        Verdict::Says("custom"),
        "rstream -b {addr} -T v -C 10 -S 65536",
        "rstream -s {addr} -T v -C 10 -S 65536",
    );
    for (verb, kind, more) in [
        ("send", "lat", "-a"),
        ("send", "lat", "-s 1"),
        ("send", "lat", "-s 64 -e"),
        ("send", "bw", "-a"),
        ("send", "bw", "-s 4096 -q 4"),
        ("send", "bw", "-s 65536 -q 4 -e"),
        ("send", "bw", "-s 4096 -b"),
        ("send", "bw", "-s 4096 -R"),
        ("write", "lat", "-a"),
        ("write", "lat", "-s 1"),
        ("write", "bw", "-a"),
        ("write", "bw", "-s 4096 -q 4"),
        ("write", "bw", "-s 65536"),
        ("write", "bw", "-s 4096 -b"),
        ("read", "lat", "-a"),
        ("read", "lat", "-s 1"),
        ("read", "lat", "-s 64 -e"),
        ("read", "bw", "-a"),
        ("read", "bw", "-s 4096 -q 4"),
        ("read", "bw", "-s 65536 -e"),
        ("atomic", "lat", "-A FETCH_AND_ADD"),
        ("atomic", "lat", "-A CMP_AND_SWAP"),
        ("atomic", "bw", "-A FETCH_AND_ADD -q 4"),
        ("atomic", "bw", "-A CMP_AND_SWAP"),
        ("atomic", "lat", "-A FETCH_AND_ADD -e"),
        ("send", "lat", "-c UD -a"),
        ("send", "lat", "-c UD -s 64 -e"),
        ("send", "bw", "-c UD -s 1024"),
        ("send", "bw", "-c UD -s 1024 -q 4"),
    ] {
        // Enough iterations to wrap every ring, but no more, on emulated CPUs.
        let n = if more.contains("-a") { 5 } else { 300 };
        let command = format!("ib_{verb}_{kind} -d {{dev}} -x {{gid}} -F -n {n} {more}");
        let says = if more.contains("-A") || more.contains("-s") { "#bytes" } else { "8388608" };
        let says = if more == "-c UD -a" { "1024" } else { says };
        // Connected by the connection manager, which finds the device by its own address.
        let (listening, at) = if more.contains("-R") { (CM, "{addr}") } else { (TCP, "{tcp}") };
        add(
            &format!("ib_{verb}_{kind} {more}"),
            listening,
            240,
            Verdict::Says(says),
            &command,
            &format!("{command} {at}"),
        );
    }
    for more in ["", "--events"] {
        let command = format!("rdma-verify --device {{dev}} --gid {{gid}} {more}");
        add(
            format!("rdma-verify {more}").trim(),
            CONTROL,
            240,
            Verdict::Says("VERIFIED mismatches=0"),
            &command,
            &format!("{command} {{tcp}}"),
        );
    }
    // UCX interprets a received datagram's service level as the packet's type, as on Mellanox's devices. It drops datagrams of others'
    // devices over IPv4, including its own connection set-up, unless that check is off.
    for transport in ["rc_v", "ud_v"] {
        let command = format!(
            "UCX_NET_DEVICES={{dev}}:1 UCX_IB_GID_INDEX={{gid}} UCX_TLS={transport},self UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_LOG_LEVEL=info ucx_perftest -p 18515"
        );
        add(
            &format!("ucx_perftest tag_lat {transport}"),
            TCP,
            120,
            Verdict::Says("Final:"),
            &command,
            &format!("{command} -t tag_lat -s 1024 -n 200 -w 10 {{tcp}}"),
        );
    }
    for (transport, ranks) in [("rc_v", 2), ("ud_v", 2), ("rc_v", 4)] {
        let largest = if transport == "ud_v" { 1 << 20 } else { 8 << 20 };
        let client = format!(
            "{RSH}mpirun.openmpi --allow-run-as-root -H a:{slots},b:{slots} -np {ranks} --map-by node --mca plm_rsh_agent /tmp/rsh \\
             --mca oob_tcp_if_include net0 --mca pml ucx --mca osc ucx --mca btl self --mca coll ^hcoll \\
             -x UCX_NET_DEVICES={{dev}}:1 -x UCX_IB_GID_INDEX={{gid}} -x UCX_TLS={transport},self,sm --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any -x UCX_UD_VERBS_ETH_DGID_CHECK=n -x UCX_LOG_LEVEL=info --timeout 300 mpi-check {largest}",
            slots = ranks / 2
        );
        add(
            &format!("Open MPI over UCX {transport}, {ranks} ranks"),
            "ss -Hltn 'sport = :514' | grep -q .",
            // Each side starts two processes with many libraries, which takes minutes on a busy machine.
            330,
            Verdict::ClientSays("mismatches=0"),
            &format!("{RSH}exec socat TCP-LISTEN:514,fork,reuseaddr EXEC:bash"),
            &client,
        );
    }
    all
}

/// A remote shell without passwords or keys, for mpirun on both sides.
pub(super) const RSH: &str = "printf '#!/bin/sh\\nh=$1; shift; echo \"$*; exit\" | exec socat -t 600 - TCP:$h:514\\n' > /tmp/rsh; chmod +x /tmp/rsh; ";

/// Replaces the placeholders.
fn fill(text: &str, port: &rdma::Port, server: &rdma::Member<'_>) -> String {
    text.replace("{dev}", &port.device)
        .replace("{gid}", &port.gid.to_string())
        .replace("{addr}", &server.port.address)
        .replace("{tcp}", &server.tcp)
}

/// Returns the failure of a tool's run, if any.
pub(super) fn judge(verdict: Verdict, server: &Output, client: &Output) -> Result<(), String> {
    let ended = |who: &str, o: &Output| match o.code {
        0 => Ok(()),
        124 | 137 => Err(format!("the {who} hung")),
        code => Err(format!("the {who} ended with status {code}")),
    };
    let says = |what: &str| {
        if client.stdout.contains(what) { Ok(()) } else { Err(format!("the client didn't say {what:?}")) }
    };
    match verdict {
        Verdict::Says(what) => {
            ended("client", client).and_then(|()| ended("server", server)).and_then(|()| says(what))
        }
        Verdict::ClientSays(what) => ended("client", client).and_then(|()| says(what)),
        Verdict::Absent(_) if client.code == 0 => Err("the device took what its interface lacks".to_owned()),
        Verdict::Absent(_) => Ok(()),
    }
}

pub(super) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n    ")
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let pair = Pair::start(lab, options)?;
    let (passed, _) = run_tools(&pair, options, report)?;
    report.check(passed > 0, "no tool was run");
    pair.finish()
}

/// Runs the selected tools between the guests of a pair; returns the numbers of passed and failed ones. Adds figures and a check to the
/// report.
pub(super) fn run_tools(pair: &Pair<'_>, options: &Options, report: &mut Report) -> Result<(u32, u32)> {
    let (mut passed, mut failed) = (0, 0);
    let mut results = Map::new();
    let mut absent = Map::new();
    for tool in tools(pair.device).into_iter().filter(|t| options.wants(&t.name)) {
        let start = Instant::now();
        let server = fill(&tool.server, &pair.b.port, &pair.b);
        let client = fill(&tool.client, &pair.a.port, &pair.b);
        let ends = matches!(tool.verdict, Verdict::Says(_));
        let run = pair.both(&server, ends, tool.listening, &client, Duration::from_secs(tool.seconds));
        let seconds = (start.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        let verdict = match &run {
            Ok((server, client)) => judge(tool.verdict, server, client),
            Err(e) => Err(format!("{e:#}")),
        };
        match &verdict {
            Ok(()) => {
                progress!("passed  {:44} {seconds:6.1} s", tool.name);
                passed += 1;
                if let Verdict::Absent(why) = tool.verdict {
                    absent.insert(tool.name.clone(), why.into());
                }
            }
            Err(why) => {
                progress!("FAILED  {:44} {seconds:6.1} s: {why}", tool.name);
                failed += 1;
                if !run.as_ref().is_err_and(|e| e.is::<Unfinished>()) {
                    // Immediately: a wrong answer counts, independent of later events.
                    report.check(false, format!("{}: {why}", tool.name));
                }
                if let Ok((server, client)) = &run {
                    progress!(
                        "  client: {client_line}\n    {}\n    {}",
                        tail(&client.stdout, 8),
                        tail(&client.stderr, 12),
                        client_line = fill(&tool.client, &pair.a.port, &pair.b)
                    );
                    progress!("  server:\n    {}\n    {}", tail(&server.stdout, 8), tail(&server.stderr, 12));
                }
                for daemon in pair.daemons() {
                    progress!("  daemon:\n    {}", daemon.err.tail(8).replace('\n', "\n    "));
                }
                for m in [&pair.a, &pair.b] {
                    // After a guest hangs, later results would mean nothing.
                    m.answers()?;
                    progress!("  kernel of {}:\n    {}", m.name, tail(&m.kernel_log(4), 4));
                }
            }
        }
        let entry = match verdict {
            Ok(()) => json!({"ok": true, "seconds": seconds}),
            Err(why) => {
                if run.as_ref().is_err_and(|e| e.is::<Unfinished>()) {
                    // Both guests answer: the tool hangs, and not a guest.
                    report.check(false, format!("{}: {why}", tool.name));
                }
                json!({"ok": false, "seconds": seconds, "why": why})
            }
        };
        results.insert(tool.name, entry);
    }
    report.figure("passed", passed);
    report.figure("ran_again", crate::rdma::ran_again());
    report.figure("failed", failed);
    report.figure("device", pair.device.name());
    report.figure("absent", absent);
    report.figure("tools", results);
    Ok((passed, failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(code: i32, stdout: &str) -> Output {
        Output { code, stdout: stdout.into(), stderr: String::new() }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = tools(Device::Pvrdma).into_iter().map(|t| t.name).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn a_tool_passes_only_when_both_sides_do() {
        let good = output(0, "x bytes in y");
        assert_eq!(judge(Verdict::Says("bytes in"), &good, &good), Ok(()));
        assert!(judge(Verdict::Says("bytes in"), &output(1, ""), &good).is_err());
        assert!(judge(Verdict::Says("bytes in"), &good, &output(0, "")).is_err());
        assert!(
            judge(Verdict::Says("bytes in"), &output(124, ""), &good).unwrap_err().contains("server hung")
        );
        assert!(judge(Verdict::ClientSays("bytes in"), &output(124, ""), &good).is_ok());
        assert!(judge(Verdict::Absent("x"), &good, &good).is_err());
        assert!(judge(Verdict::Absent("x"), &output(1, ""), &output(1, "")).is_ok());
    }
}
