//! Every order of events of small clusters: the state machines are explored by stateright, with the invariants of
//! `nomad_testbed::check`.
//!
//! The long run is `cargo run --release -p nomad --example check_migration`.

mod model;
mod scenarios;

use model::explore;
use nomad::InjectedBug;
use nomad_testbed::world::{Budget, Setup};
use scenarios::{
    NOTHING, all, budgets, by_service, one_peer, peers_apart, peers_cross, peers_part, swap, two_peers,
};

/// All invariants hold in all clusters, with each budget of lost and repeated messages, kills and early timers: one owner per epoch, and no
/// operation lost or repeated. Queue pairs are open only towards a VM that runs. The source is unharmed before the commit point. Without
/// further faults, each run ends.
#[test]
fn invariants_hold_in_all_clusters() {
    let mut states = 0;
    for cluster in all() {
        for (faults, budget) in budgets() {
            // A path that isn't there can't break.
            let paths: &[bool] = if budget.severs > 0 { &[true] } else { &[true, false] };
            for direct in paths {
                let name = cluster.name;
                let found = explore(Setup { budget, settle: 16, direct: *direct, ..cluster.clone() }, 6_000);
                assert!(found.fault.is_none(), "{name}, {faults}, direct {direct}: {:#?}", found.fault);
                states += found.states;
            }
        }
    }
    assert!(states > 50_000, "{states} states are fewer than there were");
}

/// Without faults the migration is committed in every order of events, and there are few enough orders to see all.
#[test]
fn without_faults_every_migration_commits() {
    let clusters = [one_peer(), swap(), two_peers()];
    for cluster in clusters.clone().into_iter().chain(clusters.map(by_service)) {
        let name = cluster.name;
        let found = explore(Setup { budget: NOTHING, settle: 4, ..cluster }, 300_000);
        assert!(found.fault.is_none(), "{name}: {:#?}", found.fault);
        assert!(found.complete && found.committed && !found.aborted, "{name}: {} states", found.states);
    }
}

/// Two migrations of peers at the same time are both committed, in every order of events.
#[test]
fn without_faults_concurrent_migrations_of_peers_commit() {
    for cluster in [peers_apart(), peers_cross(), peers_part()] {
        let name = cluster.name;
        let found = explore(Setup { budget: NOTHING, settle: 16, ..cluster }, 300_000);
        println!("{name}: {} states, {} transitions, depth {}", found.states, found.transitions, found.depth);
        assert!(found.fault.is_none(), "{name}: {:#?}", found.fault);
        assert!(found.complete && found.both_committed && !found.aborted, "{name}: {} states", found.states);
    }
}

/// A mutation is found, with direct messages and with those that the service passes on.
fn assert_finds(bug: InjectedBug, cluster: Setup, budget: Budget, what: &str) {
    for cluster in [by_service(cluster.clone()), cluster] {
        assert_finds_by(bug, cluster, budget, what);
    }
}

fn assert_finds_by(bug: InjectedBug, cluster: Setup, budget: Budget, what: &str) {
    let setup = Setup { budget, settle: 8, ..cluster };
    let mutated = Setup { config: nomad::Config { injected_bug: bug, ..setup.config }, ..setup.clone() };
    let found = explore(mutated, 400_000);
    let (text, way) = found.fault.unwrap_or_else(|| panic!("{bug:?} isn't found in {} states", found.states));
    println!("{bug:?} is found after {} states, {} steps: {text}", found.states, way.len());
    assert!(text.contains(what), "{bug:?} shows as: {text}");
    let unmutated = explore(setup, found.transitions.max(1_000));
    assert!(unmutated.fault.is_none(), "without it: {:#?}", unmutated.fault);
}

#[test]
fn an_ack_before_queue_pairs_are_suspended_is_found() {
    assert_finds(InjectedBug::AckBeforeSuspended, one_peer(), NOTHING, "which is stopped");
}

#[test]
fn a_stop_before_peers_are_suspended_is_found() {
    assert_finds(InjectedBug::StopBeforePeersSuspended, one_peer(), NOTHING, "which is stopped");
}

/// The source has given up on its own, and runs.
#[test]
fn a_commit_without_the_sources_vote_is_found() {
    assert_finds(
        InjectedBug::CommitWithoutSourceVote,
        one_peer(),
        Budget { timers: 1, ..NOTHING },
        "its owner is",
    );
}

#[test]
fn a_source_that_resumes_after_its_vote_is_found() {
    assert_finds(InjectedBug::RunAfterVote, one_peer(), Budget { timers: 1, ..NOTHING }, "its owner is");
}

#[test]
fn a_peer_that_accepts_an_older_epoch_is_found() {
    assert_finds(
        InjectedBug::NoEpochCheck,
        one_peer(),
        Budget { repeats: 1, more: 1, ..NOTHING },
        "sends to",
    );
}

#[test]
fn peers_that_resume_before_the_commit_are_found() {
    assert_finds(InjectedBug::ResumeBeforeCommit, one_peer(), NOTHING, "which is stopped");
}

#[test]
fn a_decision_that_is_not_written_is_found() {
    assert_finds(
        InjectedBug::DecisionNotWritten,
        one_peer(),
        Budget { coordinator_kills: 1, ..NOTHING },
        "is lost, although",
    );
}

#[test]
fn a_second_decision_is_found() {
    assert_finds(InjectedBug::DecideTwice, one_peer(), Budget { cancels: 1, ..NOTHING }, "VM 1");
}

/// A decided migration keeps its VMs while a host that takes part doesn't return.
#[test]
fn a_coordinator_without_a_settle_timeout_is_found() {
    assert_finds(
        InjectedBug::SettleWithoutTimeout,
        one_peer(),
        Budget { deaths: 1, ..NOTHING },
        "is kept by",
    );
}

/// The commit is written, and on its way.
#[test]
fn a_destination_that_withdraws_its_vote_is_found() {
    assert_finds(InjectedBug::WithdrawVote, one_peer(), Budget { timers: 1, ..NOTHING }, "is lost, although");
}

/// The source's daemon was started again after its vote, and its monitor asks it.
#[test]
fn a_restarted_daemon_that_reports_an_abort_is_found() {
    assert_finds(
        InjectedBug::ForgottenMeansAborted,
        one_peer(),
        Budget { kills: 1, ..NOTHING },
        "the guest of VM 1 runs on",
    );
}

#[test]
fn a_guest_resumed_in_doubt_is_found() {
    assert_finds(
        InjectedBug::ResumeInDoubt,
        one_peer(),
        Budget { resumes: 1, ..NOTHING },
        "the guest of VM 1 runs on",
    );
}

#[test]
fn a_renumbered_daemon_that_withdraws_its_votes_is_found() {
    assert_finds(InjectedBug::RenumberWithdrawsVotes, one_peer(), Budget { renumbers: 1, ..NOTHING }, "VM 1");
}

/// The peer is stopped, and looked for, where it was.
#[test]
fn overlapping_switchovers_of_peers_are_found() {
    assert_finds(InjectedBug::OverlappingSwitchovers, peers_apart(), NOTHING, "VM");
    assert_finds(InjectedBug::OverlappingSwitchovers, peers_cross(), NOTHING, "VM");
}
