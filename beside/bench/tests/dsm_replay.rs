//! The simulator, driven by traces of live runs on two nodes, counts what the live nodes have counted. Needs /dev/kvm and userfaultfd; without
//! them the test says so loudly and passes. The nodes are threads of this process, with a monitor each.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

use bench::programs::Programs;
use dsm::Policy;
use dsm::testing::sim::replay::replay;
use dsm::testing::sim::retrace::retrace;
use monitor::dsm::{Ended, NodeAddress, NodeSettings, SpanningVm, Trouble, tuned};
use monitor::payload::PayloadVm;

/// How long a simulated message takes, nanoseconds: less than any live one.
const LATENCY: u64 = 5_000;

/// Runs a program on two nodes and records it.
fn record(programs: &Programs, program: &str, policy: Policy, arguments: &[&str]) -> Vec<Ended> {
    let folder = tempfile::tempdir().unwrap();
    let address = |node: u8| format!("unix:{}", folder.path().join(node.to_string()).display());
    let addresses: Vec<NodeAddress> = (0..2).map(|node| address(node).parse().unwrap()).collect();
    std::thread::scope(|scope| {
        let run = |node: u8| {
            let builder = PayloadVm::from_file(&programs.path(program)).unwrap().vcpus(2).memory(64 << 20);
            let builder = builder.arguments(arguments.iter().copied()).console(std::io::sink());
            let addresses = addresses.clone();
            let settings = NodeSettings {
                node,
                addresses,
                device: None,
                policy,
                record: true,
                checkpoints: None,
                restart: None,
                gather: false,
                trouble: Trouble::default(),
            };
            scope.spawn(move || SpanningVm::join(builder, &settings).unwrap().run().unwrap())
        };
        let threads = [run(0), run(1)];
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Messages, with a page each, by which any two may differ: on a machine so busy that a run has few messages, one is more than 2 %.
const FEW: u64 = 2;

/// Recordings at most of a program whose replay skips faults: on a busy machine its order is another than the nodes' was, and what isn't a fault in that order cost
/// the live nodes something that the simulator can't count. A replay that skips nothing is judged at once.
const RECORDINGS: u32 = 12;

/// Told all that the live nodes were told, in the order in which each was told, the simulated nodes send as many messages and bytes, none more or less: each program,
/// with pages moved only and with updates. With links and deadlines of their own they agree within 2 %, or two messages, where it doesn't matter who was first: for misses
/// and upgrades, and, with pages moved only, for Jacobi, streams and locks. What others come to then is shown: from when on pages are kept by updates depends on who ran when.
#[test]
fn the_simulator_counts_what_live_nodes_count() {
    let name = "the_simulator_counts_what_live_nodes_count";
    for needed in ["/dev/kvm", "/dev/userfaultfd"] {
        if !std::path::Path::new(needed).exists() {
            eprintln!("{name}: SKIPPED: there is no {needed}");
            return;
        }
    }
    let programs = Programs::build().unwrap();
    let mut wrong = Vec::new();
    for (program, arguments) in [
        ("pages", &["kind=read"][..]),
        ("pages", &["kind=upgrade"]),
        ("jacobi", &["n=256", "steps=20"]),
        ("producer-consumer", &["messages=500", "pace=20K"]),
        ("locks", &["times=500", "outside=2K"]),
    ] {
        for (how, policy) in [("invalidate", Policy::IVY), ("update", Policy::OURS)] {
            for recording in 1..=RECORDINGS {
                let ended = record(&programs, program, tuned(policy), arguments);
                assert!(ended.iter().all(|ended| ended.outcome == Ok(0)), "{program}: {ended:?}");
                let count = |what: &str| -> u64 {
                    ended[0].reports.values().map(|node| node[what].as_u64().unwrap()).sum()
                };
                let live = [count("messages"), count("bytes")];
                assert!(live[0] > 20, "{program} has hardly sent anything");
                let traces = || ended.iter().map(|ended| (ended.config, ended.trace.clone())).collect();
                let again = retrace(traces()).unwrap();
                let what = format!("{program} {}, {how}", arguments.join(" "));
                assert_eq!([again.messages, again.bytes], live, "{what}, in the recorded order");
                assert_eq!((again.skipped, again.refused), (0, 0), "{what}, in the recorded order");
                let found = replay(traces(), LATENCY).unwrap();
                assert_eq!(found.refused, 0, "{what}");
                let simulated = [found.messages, found.bytes];
                let counts = format!(
                    "live and in the recorded order ({} events) {live:?}, by itself {simulated:?}; {} events, {} skipped",
                    again.done, found.done, found.skipped
                );
                eprintln!("{name}: {what}, recording {recording}: {counts}");
                let far = |at: usize, few: u64| live[at].abs_diff(simulated[at]) > (live[at] / 50).max(few);
                let by_chance = how == "update" && program != "pages";
                if by_chance || !(far(0, FEW) || far(1, FEW * 4096)) {
                    break;
                }
                if found.skipped == 0 || recording == RECORDINGS {
                    wrong.push(format!("{what}: {counts}"));
                    break;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "further apart than 2 %: {wrong:#?}");
}
