//! All vCPUs of several nodes increment one word endlessly. No increment is lost, also on one processor, from
//! checkpoints, and when a node fails. The tests need /dev/kvm and userfaultfd; without them each prints that it is
//! skipped.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::nodes::{HANG_TIMEOUT, appears, causeway, children, gone, runtime, text};
use crate::payload_programs::programs;
use rustix::process::{Signal, kill_process};
use serde_json::Value;

/// Returns the program's line and the VM's report from `--json`.
fn line_and_report(output: &Output) -> (Value, Value) {
    assert!(output.status.success(), "{}", text(output));
    let mut all = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    (all.next().unwrap().unwrap(), all.next().unwrap().unwrap())
}

/// Waits until `look` returns a value.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + HANG_TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {HANG_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// No increment is lost, for any number of nodes and vCPUs. Also on one processor, which vCPUs that wait for each other
/// compete for.
#[test]
fn a_contended_word_loses_nothing() {
    let Some(programs) = programs("a_contended_word_loses_nothing") else { return };
    for (nodes, cpus, one_processor) in [(2, "2", false), (2, "4", true), (3, "5", false)] {
        let runtime = runtime();
        let count = nodes.to_string();
        let flags = ["--nodes", &count, "--cpus", cpus, "--json"];
        let mut command = causeway(runtime.path(), &programs.join("storm"), &flags, &["kind=add", "ms=1500"]);
        if one_processor {
            let mut pinned = Command::new("taskset");
            pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
            pinned.env("XDG_RUNTIME_DIR", runtime.path()).stdin(Stdio::null());
            command = pinned;
        }
        let (line, report) = line_and_report(&command.output().unwrap());
        assert_eq!(line["verified"], true, "{nodes} nodes, {cpus} vCPUs: {line}");
        for node in 0..nodes {
            let refused = &report["nodes"][node.to_string()]["protocol"]["refused"];
            assert_eq!(*refused, 0, "{nodes} nodes, {cpus} vCPUs: {report:#}");
        }
        let left: Vec<_> = std::fs::read_dir(runtime.path().join("causeway")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// A node is killed or stopped at any moment while its vCPUs contend for a word. The VM ends and names the node and its
/// link.
#[test]
fn a_node_lost_while_it_contends_for_a_word_is_named() {
    let Some(programs) = programs("a_node_lost_while_it_contends_for_a_word_is_named") else { return };
    for (signal, after_ms) in
        [(Signal::KILL, 200), (Signal::STOP, 300), (Signal::KILL, 450), (Signal::STOP, 600)]
    {
        let runtime = runtime();
        let arguments = ["kind=add", "ms=600000"];
        let mut command = causeway(runtime.path(), &programs.join("storm"), &["--nodes", "2"], &arguments);
        let child = command.spawn().unwrap();
        let other = until("node 1", || children(child.id()).first().copied());
        std::thread::sleep(Duration::from_millis(after_ms));
        kill_process(other, signal).unwrap();
        // The program would run for minutes, so it ends for this reason.
        let output = child.wait_with_output().unwrap();
        let said = text(&output);
        assert!(!output.status.success() && said.contains("ode 1"), "{signal:?} after {after_ms} ms: {said}");
        assert!(said.contains("unix:"), "{signal:?} after {after_ms} ms: no link is named: {said}");
        gone(&[other]);
    }
}

/// Returns the reports of a running VM's nodes.
fn top(runtime: &Path, name: &str) -> Option<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    let output =
        command.env("XDG_RUNTIME_DIR", runtime).args(["--json", "dsm", "top", name]).output().unwrap();
    serde_json::from_slice(&output.stdout).ok()
}

fn number(folder: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(folder.join("checkpoint.json")).ok()?;
    serde_json::from_str::<Value>(&text).ok()?["number"].as_u64()
}

/// Checkpoints are written while all vCPUs contend for the word, and `dsm top` gets responses for both nodes. After the
/// loss of one node, a restart from the last checkpoint loses no increment.
#[test]
fn a_contended_word_is_restored_from_checkpoints() {
    let Some(programs) = programs("a_contended_word_is_restored_from_checkpoints") else { return };
    // The time-stamp counter keeps its value, so the restarted program runs shortly or not at all.
    let arguments = ["kind=add", "ms=10000"];
    let runtime = runtime();
    let folder = runtime.path().join("checkpoints");
    let place = folder.to_str().unwrap();
    let flags = ["--nodes", "2", "--name", "word", "--checkpoint", place, "--checkpoint-every", "0.05"];
    let mut child = causeway(runtime.path(), &programs.join("storm"), &flags, &arguments).spawn().unwrap();
    appears(&folder.join("checkpoint.json"));
    let first = number(&folder).unwrap_or(0);
    until("two more checkpoints", || number(&folder).filter(|number| *number > first + 1));
    until("reports of both nodes", || {
        let report = top(runtime.path(), "word")?;
        let waited = |node: usize| report["nodes"][node]["waited_again_ns"].as_u64();
        (waited(0)? > 0 && waited(1)? > 0).then_some(())
    });
    let others = children(child.id());
    kill_process(others[0], Signal::KILL).unwrap();
    assert!(!child.wait().unwrap().success());
    gone(&others);
    let flags = ["--nodes", "2", "--restart", place, "--json"];
    let output = causeway(runtime.path(), &programs.join("storm"), &flags, &arguments).output().unwrap();
    let (line, _) = line_and_report(&output);
    assert_eq!(line["verified"], true, "{line}");
}
