//! Programs that don't pay on several nodes are brought together on node 0, and come to the same result. Needs /dev/kvm and userfaultfd; without, each test says so
//! loudly and passes.

use crate::payload_programs::programs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn causeway(runtime: &Path, program: &Path, flags: &[&str], arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    command.env("XDG_RUNTIME_DIR", runtime).args(["--log-level", "error", "run", "--payload"]);
    command.arg(program).args(flags).arg("--").args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}

/// The program's line and what nodes counted.
fn said(output: &Output) -> (Value, Value) {
    assert!(output.status.success(), "{}", text(output));
    let mut all = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let (line, report) = (all.next().unwrap().unwrap(), all.next().unwrap().unwrap());
    (line, report)
}

/// A word that all add to: nobody gains from a second node. Nothing that was added is lost on the way, whatever the number of nodes and vCPUs; and on one processor, where
/// those that have come together take turns.
#[test]
fn a_contended_word_is_brought_together_and_loses_nothing() {
    let Some(programs) = programs("a_contended_word_is_brought_together_and_loses_nothing") else { return };
    // Nodes, vCPUs, those of other nodes than 0, one processor.
    for (nodes, cpus, moved, one) in [("2", "2", 1, false), ("2", "4", 2, true), ("3", "5", 3, false)] {
        let runtime = tempfile::tempdir().unwrap();
        let flags = ["--nodes", nodes, "--cpus", cpus, "--json"];
        let arguments = ["kind=add", "ms=5000"];
        let mut command = causeway(runtime.path(), &programs.join("storm"), &flags, &arguments);
        if one {
            let mut pinned = Command::new("taskset");
            pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
            pinned.env("XDG_RUNTIME_DIR", runtime.path()).stdin(Stdio::null());
            command = pinned;
        }
        let (line, report) = said(&command.output().unwrap());
        assert_eq!(line["verified"], true, "{line}");
        println!("{nodes} nodes, {cpus} vCPUs: {line} {}", report["nodes"]["0"]["gathered"]);
        let gathered = &report["nodes"]["0"]["gathered"];
        assert_eq!(gathered["vcpus"], moved, "{nodes}, {cpus}: {report:#}");
        assert!(gathered["pages"].as_u64().unwrap() > 0 && gathered["stood_still_ns"].as_u64().unwrap() > 0);
        assert_eq!(report["nodes"]["0"]["protocol"]["refused"], 0);
        let left: Vec<_> = std::fs::read_dir(runtime.path().join("causeway")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Who was told to stay stays, even with a program that doesn't pay. (That programs that pay stay is for `policy`'s tests and the benchmark: here it is a matter of how
/// much of the processors this process gets.)
#[test]
fn who_is_told_to_stay_stays() {
    let Some(programs) = programs("who_is_told_to_stay_stays") else { return };
    let runtime = tempfile::tempdir().unwrap();
    let flags = ["--nodes", "2", "--json", "--gather", "never"];
    let output = causeway(runtime.path(), &programs.join("storm"), &flags, &["ms=1500"]).output().unwrap();
    let (line, report) = said(&output);
    assert_eq!(line["verified"], true, "{line}");
    assert!(report["nodes"]["0"]["gathered"].is_null(), "{report:#}");
}

/// The children of a process.
fn children(parent: u32) -> Vec<rustix::process::Pid> {
    let text = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Two nodes on one processor: each spins nearly all the time, and so keeps the other, for which it waits, from running. That is seen, though they wait for pages for a
/// small part of the time only.
#[test]
fn who_spins_most_of_the_time_comes_together() {
    let Some(programs) = programs("who_spins_most_of_the_time_comes_together") else { return };
    let runtime = tempfile::tempdir().unwrap();
    let flags = ["--nodes", "2", "--json"];
    let arguments = ["n=64K", "band=32", "iterations=300"];
    let command = causeway(runtime.path(), &programs.join("cg"), &flags, &arguments);
    let mut pinned = Command::new("taskset");
    pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
    pinned.env("XDG_RUNTIME_DIR", runtime.path()).stdin(Stdio::null());
    let (line, report) = said(&pinned.output().unwrap());
    println!("{line} {}", report["nodes"]["0"]["gathered"]);
    assert_eq!(line["verified"], true, "{line}");
    assert_eq!(report["nodes"]["0"]["gathered"]["vcpus"], 1, "{report:#}");
}

/// Who says that it waits, while another vCPU builds a graph alone, has spun and not worked, though no look would find it in a loop with a `pause`.
#[test]
fn who_says_that_it_waits_has_spun() {
    let Some(programs) = programs("who_says_that_it_waits_has_spun") else { return };
    let runtime = tempfile::tempdir().unwrap();
    let arguments = ["scale=18", "degree=16", "roots=1"];
    let command =
        causeway(runtime.path(), &programs.join("search"), &["--nodes", "2", "--json"], &arguments).output();
    let (line, report) = said(&command.unwrap());
    assert_eq!(line["verified"], true, "{line}");
    let nodes = &report["nodes"];
    let [ran, spun] = ["ran_ns", "spun_ns"].map(|name| nodes["1"][name].as_u64().unwrap());
    println!("node 1 ran {ran} ns and span {spun} ns");
    assert!(spun > ran, "{report:#}");
}

/// A node that is lost at any moment around the one at which all comes together, killed or standing still, ends the VM, which names it and its link; nothing hangs.
#[test]
fn a_node_lost_while_all_comes_together_is_told() {
    let Some(programs) = programs("a_node_lost_while_all_comes_together_is_told") else { return };
    for trial in 0..12 {
        let runtime = tempfile::tempdir().unwrap();
        let (arguments, flags) = (["kind=add", "ms=20000"], ["--nodes", "2"]);
        let child = causeway(runtime.path(), &programs.join("storm"), &flags, &arguments).spawn().unwrap();
        let other = until("node 1", || children(child.id()).first().copied());
        std::thread::sleep(Duration::from_millis(200 + 100 * trial));
        let signal =
            if trial % 2 == 0 { rustix::process::Signal::KILL } else { rustix::process::Signal::STOP };
        rustix::process::kill_process(other, signal).unwrap();
        let lost = Instant::now();
        let output = child.wait_with_output().unwrap();
        println!("{signal:?} after {} ms: told and ended in {:?}", 200 + 100 * trial, lost.elapsed());
        let said = text(&output);
        assert!(!output.status.success() && said.contains("ode 1"), "{trial}: {said}");
        assert!(said.contains("unix:"), "{trial}: no link is named: {said}");
        assert!(lost.elapsed() < Duration::from_secs(10), "{trial}: {:?}", lost.elapsed());
    }
}

/// What nodes of a VM say while it runs.
fn asked(runtime: &Path, name: &str) -> Option<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    let output =
        command.env("XDG_RUNTIME_DIR", runtime).args(["--json", "dsm", "top", name]).output().unwrap();
    serde_json::from_slice(&output.stdout).ok()
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within 60 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a VM that is brought together, with checkpoints, and waits until it is.
fn together(runtime: &Path, programs: &Path, folder: &str, arguments: &[&str]) -> Child {
    let flags = ["--nodes", "2", "--name", "word", "--checkpoint", folder, "--checkpoint-every", "0.05"];
    let child = causeway(runtime, &programs.join("storm"), &flags, arguments).spawn().unwrap();
    until("brought together", || {
        let report = asked(runtime, "word")?;
        (!report["nodes"][0]["gathered"].is_null()).then_some(())
    });
    child
}

fn number(folder: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(folder.join("checkpoint.json")).ok()?;
    serde_json::from_str::<Value>(&text).ok()?["number"].as_u64()
}

/// A program that was brought together is saved by checkpoints as it is; after a node was lost, which is told as ever, it goes on from there to its result, also
/// where it is told never to be brought together.
#[test]
fn checkpoints_of_what_came_together_are_gone_on_from() {
    let Some(programs) = programs("checkpoints_of_what_came_together_are_gone_on_from") else { return };
    // Time isn't set back: what is left of it after the restart is short, or nothing.
    let arguments = ["kind=add", "ms=12000"];
    let runtime = tempfile::tempdir().unwrap();
    let folder = runtime.path().join("checkpoints");
    let place = folder.to_str().unwrap();
    let child = together(runtime.path(), programs, place, &arguments);
    let first = number(&folder).unwrap_or(0);
    until("two more checkpoints", || number(&folder).filter(|number| *number > first + 2));
    let other = *children(child.id()).first().unwrap();
    rustix::process::kill_process(other, rustix::process::Signal::KILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success() && text(&output).contains("node 1"), "{}", text(&output));
    for gather in ["never", "auto"] {
        let flags = ["--nodes", "2", "--restart", place, "--json", "--gather", gather];
        let output = causeway(runtime.path(), &programs.join("storm"), &flags, &arguments).output().unwrap();
        let (line, report) = said(&output);
        assert_eq!(line["verified"], true, "{gather}: {line}");
        assert!(!report["nodes"]["0"]["gathered"].is_null(), "{gather}: {report:#}");
    }
}
