//! Messages and bytes per event in the simulator, compared with the design's goals. Reproducible by seed.

use dsm_testbed::sim::costs::Preset;
use dsm_testbed::sim::programs::Pattern;
use dsm_testbed::sim::{Report, Run, run};

fn simulate(preset: Preset, pattern: Pattern, nodes: u8) -> Report {
    let setup = Run { preset, pattern, nodes, rounds: 400, warm_up: 150, pace_ns: 200_000, seed: 1 };
    let report = run(&setup).expect("a configuration");
    assert_eq!(report.fault, None, "{} of {nodes} nodes under {}", pattern.name(), preset.name);
    assert!(report.events > 100, "{} events only", report.events);
    report
}

/// Every pattern ends under every preset, with all values as programs expect. The same seed gives the same run.
#[test]
fn patterns_end_and_repeat() {
    for preset in [Preset::OURS, Preset::IVY, Preset::VNUMA_2009, Preset::GIANTVM_2026] {
        for pattern in Pattern::ALL {
            let (one, two) = (simulate(preset, pattern, 3), simulate(preset, pattern, 3));
            assert_eq!((one.messages, one.bytes, one.time_ns), (two.messages, two.bytes, two.time_ns));
        }
    }
}

/// Many nodes, most of which wait: copies are closed, left and fetched again while the sequencer's role moves. (Regression: a node missed
/// updates when the token overtook its `Leave`.)
#[test]
fn many_nodes_end() {
    for (pattern, nodes, rounds) in [
        (Pattern::Lock, 24, 20),
        (Pattern::Lock, 64, 8),
        (Pattern::Jacobi, 64, 8),
        (Pattern::FalseSharing, 64, 20),
    ] {
        for seed in 1..4 {
            let setup =
                Run { preset: Preset::OURS, pattern, nodes, rounds, warm_up: 0, pace_ns: 200_000, seed };
            let report = run(&setup).expect("a configuration");
            assert_eq!(report.fault, None, "{} of {nodes} nodes, seed {seed}", pattern.name());
            assert_eq!(report.events, u64::from(nodes) * rounds);
        }
    }
}

/// A read miss takes three messages if home, owner and reader differ, two if the home reads.
#[test]
fn a_read_miss_takes_three_messages() {
    for nodes in [3, 8] {
        let report = simulate(Preset::OURS, Pattern::ReadMiss, nodes);
        let (requests, grants) = (report.kinds["request"].0, report.kinds["grant"].0);
        assert!(requests + grants <= 3 * grants, "{requests} requests for {grants} grants");
        assert!(grants >= report.events * 9 / 10, "readers do miss");
    }
}

/// A producer's store costs one message of at most 96 bytes, and no reader waits for another node.
#[test]
fn a_producer_sends_one_message() {
    for nodes in [2, 3, 8] {
        let report = simulate(Preset::OURS, Pattern::ProducerConsumer, nodes);
        let (messages, bytes) = (report.per_event(report.messages), report.per_event(report.bytes));
        assert!(messages <= 1.05 && bytes <= 96.0, "{nodes} nodes: {messages} messages, {bytes} bytes");
        assert_eq!((report.remote_loads, report.pages_moved), (0, 0));
    }
}

/// A hand-off of a contended lock between two nodes takes at most four messages and 512 bytes, and moves no page.
#[test]
fn a_lock_goes_over_with_four_messages() {
    for nodes in [2, 3] {
        let report = simulate(Preset::OURS, Pattern::Lock, nodes);
        let (messages, bytes) = (report.per_event(report.messages), report.per_event(report.bytes));
        println!("{nodes} nodes: {messages} messages, {bytes} bytes");
        assert!(nodes > 2 || (messages <= 4.0 && bytes <= 512.0), "{messages} messages, {bytes} bytes");
        assert_eq!(report.pages_moved, 0);
    }
}

/// False sharing costs at most a twentieth of the bytes that plain Ivy sends for the same stores.
#[test]
fn false_sharing_costs_a_twentieth_of_ivy() {
    for nodes in [2, 4] {
        let ours = simulate(Preset::OURS, Pattern::FalseSharing, nodes);
        let ivy = simulate(Preset::IVY, Pattern::FalseSharing, nodes);
        let part = ours.per_event(ours.bytes) / ivy.per_event(ivy.bytes);
        println!("{nodes} nodes: {part}");
        assert!(part <= 0.05, "{nodes} nodes: {part}");
    }
}
