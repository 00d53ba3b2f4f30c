//! Every order of events of small clusters: the state machines are explored by stateright, with the invariants of
//! `nomad_testbed::check`.
//!
//! The long run is `cargo run --release -p nomad --example check_migration`.

mod model;
mod scenarios;

use model::explore;
use nomad::Plant;
use nomad_testbed::world::{Budget, Setup};
use scenarios::{
    NOTHING, all, budgets, by_service, one_peer, peers_apart, peers_cross, peers_part, swap, two_peers,
};

/// All invariants hold in all clusters, with each budget of lost and repeated messages, kills and early timers: one owner per epoch, and no
/// operation lost or repeated. Queue pairs are open only towards a VM that runs. The source is unharmed before the commit point. Without
/// further faults, each run ends.
#[test]
fn all_clusters_hold() {
    let mut states = 0;
    for cluster in all() {
        for (trouble, budget) in budgets() {
            // A path that isn't there can't break.
            let paths: &[bool] = if budget.severs > 0 { &[true] } else { &[true, false] };
            for direct in paths {
                let name = cluster.name;
                let found = explore(Setup { budget, settle: 16, direct: *direct, ..cluster.clone() }, 6_000);
                assert!(found.fault.is_none(), "{name}, {trouble}, direct {direct}: {:#?}", found.fault);
                states += found.states;
            }
        }
    }
    assert!(states > 50_000, "{states} states are fewer than there were");
}

/// Without faults the migration is committed in every order of events, and there are few enough orders to see all.
#[test]
fn without_faults_all_move() {
    let clusters = [one_peer(), swap(), two_peers()];
    for cluster in clusters.clone().into_iter().chain(clusters.map(by_service)) {
        let name = cluster.name;
        let found = explore(Setup { budget: NOTHING, settle: 4, ..cluster }, 300_000);
        assert!(found.fault.is_none(), "{name}: {:#?}", found.fault);
        assert!(found.complete && found.moved && !found.stayed, "{name}: {} states", found.states);
    }
}

/// Two migrations of peers at the same time are both committed, in every order of events.
#[test]
fn without_faults_peers_move_at_the_same_time() {
    for cluster in [peers_apart(), peers_cross(), peers_part()] {
        let name = cluster.name;
        let found = explore(Setup { budget: NOTHING, settle: 16, ..cluster }, 300_000);
        println!("{name}: {} states, {} transitions, depth {}", found.states, found.transitions, found.depth);
        assert!(found.fault.is_none(), "{name}: {:#?}", found.fault);
        assert!(found.complete && found.both_moved && !found.stayed, "{name}: {} states", found.states);
    }
}

/// A mutation is found, with direct messages and with those that the service passes on.
fn finds(plant: Plant, cluster: Setup, budget: Budget, what: &str) {
    for cluster in [by_service(cluster.clone()), cluster] {
        finds_by(plant, cluster, budget, what);
    }
}

fn finds_by(plant: Plant, cluster: Setup, budget: Budget, what: &str) {
    let setup = Setup { budget, settle: 8, ..cluster };
    let planted = Setup { config: nomad::Config { plant, ..setup.config }, ..setup.clone() };
    let found = explore(planted, 400_000);
    let (text, way) =
        found.fault.unwrap_or_else(|| panic!("{plant:?} isn't found in {} states", found.states));
    println!("{plant:?} is found after {} states, {} steps: {text}", found.states, way.len());
    assert!(text.contains(what), "{plant:?} shows as: {text}");
    let sound = explore(setup, found.transitions.max(1_000));
    assert!(sound.fault.is_none(), "without it: {:#?}", sound.fault);
}

#[test]
fn an_answer_before_queue_pairs_are_held_is_found() {
    finds(Plant::AckBeforeHeld, one_peer(), NOTHING, "which is stopped");
}

#[test]
fn a_stop_before_peers_are_held_is_found() {
    finds(Plant::StopBeforeHeld, one_peer(), NOTHING, "which is stopped");
}

/// The source has given up on its own, and runs.
#[test]
fn a_commit_without_the_sources_vote_is_found() {
    finds(Plant::CommitWithoutYield, one_peer(), Budget { timers: 1, ..NOTHING }, "its owner is");
}

#[test]
fn a_source_that_runs_on_after_its_vote_is_found() {
    finds(Plant::RunAfterYield, one_peer(), Budget { timers: 1, ..NOTHING }, "its owner is");
}

#[test]
fn a_peer_that_believes_an_older_epoch_is_found() {
    finds(Plant::NoEpochCheck, one_peer(), Budget { repeats: 1, more: 1, ..NOTHING }, "sends to");
}

#[test]
fn peers_that_go_on_before_the_commit_are_found() {
    finds(Plant::ResumeBeforeCommit, one_peer(), NOTHING, "which is stopped");
}

#[test]
fn a_decision_that_is_not_written_is_found() {
    finds(
        Plant::DecisionNotWritten,
        one_peer(),
        Budget { coordinator_kills: 1, ..NOTHING },
        "is lost, although",
    );
}

#[test]
fn a_second_decision_is_found() {
    finds(Plant::DecideTwice, one_peer(), Budget { cancels: 1, ..NOTHING }, "VM 1");
}

/// A decided migration keeps its VMs while a host that takes part doesn't return.
#[test]
fn a_coordinator_that_waits_for_ever_is_found() {
    finds(Plant::TellForEver, one_peer(), Budget { deaths: 1, ..NOTHING }, "is kept by");
}

/// The commit is written, and on its way.
#[test]
fn a_destination_that_takes_its_vote_back_is_found() {
    finds(Plant::VoteTakenBack, one_peer(), Budget { timers: 1, ..NOTHING }, "is lost, although");
}

/// The source's daemon was started again after its vote, and its monitor asks it.
#[test]
fn a_daemon_that_knows_nothing_and_says_so_as_if_it_did_is_found() {
    finds(Plant::ForgottenIsGivenUp, one_peer(), Budget { kills: 1, ..NOTHING }, "the guest of VM 1 runs on");
}

#[test]
fn a_guest_that_goes_on_in_doubt_is_found() {
    finds(Plant::ResumeInDoubt, one_peer(), Budget { resumes: 1, ..NOTHING }, "the guest of VM 1 runs on");
}

#[test]
fn a_living_daemon_that_takes_its_votes_back_is_found() {
    finds(Plant::RenumberTakesVotesBack, one_peer(), Budget { renumbers: 1, ..NOTHING }, "VM 1");
}

/// The peer is stopped, and looked for, where it was.
#[test]
fn peers_that_switch_over_at_the_same_time_are_found() {
    finds(Plant::SwitchTogether, peers_apart(), NOTHING, "VM");
    finds(Plant::SwitchTogether, peers_cross(), NOTHING, "VM");
}
