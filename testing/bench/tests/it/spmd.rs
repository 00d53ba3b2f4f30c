//! The SPMD workloads as payloads in real VMs of one node, with 1, 2 and 4 vCPUs. Needs /dev/kvm; without it each test prints that it
//! is skipped.

use crate::programs::{Output, programs};
use bench::programs::Programs;
use monitor::payload::PayloadVm;
use serde_json::Value;
use std::time::Duration;

/// Time-out of a hang. vCPUs that outnumber the processors wait for each other by whole time slices.
const HANG_LIMIT: Duration = Duration::from_secs(300);

/// Returns exit code and output of a program on this many vCPUs.
fn run(programs: &Programs, name: &str, vcpus: u32, arguments: &[&str]) -> (u32, String) {
    let output = Output::default();
    let builder = PayloadVm::from_file(&programs.path(name)).unwrap();
    let mut vm =
        builder.vcpus(vcpus).arguments(arguments.iter().copied()).console(output.clone()).build().unwrap();
    vm.start().unwrap();
    let code = vm.wait_for(HANG_LIMIT).unwrap();
    let text = output.text();
    (code.unwrap_or_else(|| panic!("{name} still runs after {HANG_LIMIT:?}: {text}")), text)
}

/// Returns the line of a run, which must be correct.
fn right(programs: &Programs, name: &str, vcpus: u32, arguments: &[&str]) -> Value {
    let (code, text) = run(programs, name, vcpus, arguments);
    assert_eq!(code, 0, "{name} {arguments:?} on {vcpus} vCPUs: {text}");
    let line: Value = serde_json::from_str(text.trim_end()).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(line["program"], name);
    assert_eq!(line["vcpus"], vcpus);
    assert_eq!(line["nodes"], 1);
    assert_eq!(line["verified"], true);
    assert!(line["ns"].as_u64().unwrap() > 0 && line["events"].as_u64().unwrap() > 0, "{line}");
    line
}

/// Runs a program on 1, 2 and 4 vCPUs. The figure `same` must not depend on their number.
fn everywhere(test: &str, name: &str, arguments: &[&str], same: &str) {
    let Some(programs) = programs(test) else { return };
    let lines = [1, 2, 4].map(|vcpus| right(programs, name, vcpus, arguments));
    assert!(!lines[0][same].is_null(), "{}", lines[0]);
    assert!(lines.iter().all(|line| line[same] == lines[0][same]), "{lines:?}");
}

#[test]
fn ep_is_right() {
    everywhere("ep_is_right", "ep", &["m=16"], "sum_x");
}

#[test]
fn matrix_is_right() {
    everywhere("matrix_is_right", "matrix", &["n=96"], "checksum");
}

#[test]
fn jacobi_is_right() {
    everywhere("jacobi_is_right", "jacobi", &["n=130", "steps=9"], "checksum");
}

#[test]
fn cg_is_right() {
    everywhere("cg_is_right", "cg", &["n=2000", "iterations=5"], "checksum");
}

#[test]
fn integer_sort_is_right() {
    everywhere("integer_sort_is_right", "integer-sort", &["n=32K", "rounds=2"], "checksum");
}

#[test]
fn search_is_right() {
    everywhere("search_is_right", "search", &["scale=10", "roots=2"], "events");
}

#[test]
fn locks_let_one_in() {
    let Some(programs) = programs("locks_let_one_in") else { return };
    for kind in ["kind=ticket", "kind=queue"] {
        for (vcpus, times) in [(1, "times=2000"), (2, "times=2000"), (4, "times=50")] {
            right(programs, "locks", vcpus, &[kind, times]);
        }
    }
}

#[test]
fn messages_arrive() {
    let Some(programs) = programs("messages_arrive") else { return };
    for kind in ["kind=watch", "kind=ring"] {
        for (vcpus, messages) in [(2, "messages=5000"), (4, "messages=300")] {
            right(programs, "producer-consumer", vcpus, &[kind, messages, "words=7"]);
        }
    }
    let (code, text) = run(programs, "producer-consumer", 1, &[]);
    assert_eq!(code, 2);
    assert_eq!(text.lines().count(), 1);
    assert!(text.contains("needs from 2 to 254 vCPUs, and this VM has 1"), "{text}");
}

#[test]
fn nothing_is_lost_where_all_write() {
    let Some(programs) = programs("nothing_is_lost_where_all_write") else { return };
    for vcpus in [1, 2, 4] {
        right(programs, "false-sharing", vcpus, &["times=20K"]);
        for kind in ["kind=store", "kind=add", "kind=move", "kind=cross"] {
            right(programs, "storm", vcpus, &[kind, "ms=40"]);
        }
    }
}

/// Each error in arguments and memory yields one sentence and exit code 2.
#[test]
fn nonsense_is_refused_in_one_sentence() {
    let Some(programs) = programs("nonsense_is_refused_in_one_sentence") else { return };
    for (arguments, words) in [
        (&["n=abc"][..], "n=abc is not possible; give a number from 1 to 8192"),
        (&["m=3"], "'m=3' is none of this program's; give name=value with one of: n, seed"),
        (&["n=4K"], "choose a smaller problem"),
    ] {
        let (code, text) = run(programs, "matrix", 2, arguments);
        assert_eq!(code, 2, "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(words), "{text}");
    }
}
