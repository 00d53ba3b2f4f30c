//! Concurrent migrations of two connected VMs: both are in pre-copy at the same time, and they switch over one after the other.

use crate::common;
use crate::migrate_group::{finish, work};

use std::time::{Duration, Instant};

use common::adding::{Adder, pair};
use common::cluster::{Cluster, transport, wait_to_know};
use common::moving::Move;
use common::vm::Vm;
use common::wait_until;
use control_api::host::HostClient;
use control_api::host::proto::MoveVmReply;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use host::Daemon;

/// Three hosts, and two connected VMs on hosts 1 and 2. Returns when the service knows the connection.
fn begin(cluster: &Cluster) -> ([Daemon; 3], Vm, Vm, [Adder; 2]) {
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (a, b) = pair(cluster, &daemons[0], &daemons[1]);
    wait_to_know(cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    work([&a, &b], &mut adders);
    wait_until("the connection to be known", || cluster.state().links.len() == 1);
    (daemons, a, b, adders)
}

fn converged(daemon: &HostClient, vm: &str) -> MoveVmReply {
    daemon.move_vm(vm, Step::Converged(true)).unwrap()
}

/// Repeats the step `Converged` until the response names the VM that migrates first.
fn wait_for_turn(daemon: &HostClient, vm: &str) -> String {
    let mut waits_for = String::new();
    wait_until("the VM to wait for its turn", || {
        let reply = converged(daemon, vm);
        assert_eq!(reply.state(), State::Copy, "it isn't its turn");
        waits_for = reply.waits_for;
        !waits_for.is_empty()
    });
    waits_for
}

/// Two hosts are drained at the same time, in both orders. The VM that converges first switches over first. The other VM's monitor learns
/// for which VM it waits, and follows.
#[test]
fn two_peers_are_copied_at_the_same_time_and_switch_over_one_after_the_other() {
    for first in [0, 1] {
        let cluster = Cluster::new();
        let (daemons, mut a, mut b, mut adders) = begin(&cluster);
        let to = daemons[2].socket();
        let mut moves = [
            Some(Move::begin(&mut a, daemons[0].socket(), to, "h3")),
            Some(Move::begin(&mut b, daemons[1].socket(), to, "h3")),
        ];
        assert_eq!(cluster.state().migrations.len(), 2, "a migration each");
        let names = ["a", "b"];
        let second = 1 - first;
        let sources = [HostClient::new(daemons[0].socket()), HostClient::new(daemons[1].socket())];
        {
            let [one, two] = &mut moves;
            let (one, two) = (one.as_mut().unwrap(), two.as_mut().unwrap());
            work([&*one.vm, &*two.vm], &mut adders);
            one.round();
            two.round();
            work([&*one.vm, &*two.vm], &mut adders);
        }
        let mut leaves = moves[first].take().unwrap();
        assert_eq!(leaves.converged(), State::Stop);
        assert_eq!(wait_for_turn(&sources[second], names[second]), names[first]);
        let state = cluster.state();
        let queued = state.migrations.iter().find(|migration| migration.stage == "queued").unwrap();
        let waited_for = state.vms.iter().find(|vm| vm.id == queued.waits_for).unwrap();
        assert_eq!(waited_for.name, names[first]);
        // Many requests are in flight when it stops.
        adders[first].work(leaves.vm, 8);
        adders[second].work(moves[second].as_ref().unwrap().vm, 8);
        leaves.stop();
        assert_eq!(leaves.arrived(), (State::Moved, State::Runs));
        leaves.land();
        let mut follows = moves[second].take().unwrap();
        wait_until("its turn", || follows.converged() == State::Stop);
        adders[second].work(follows.vm, 8);
        follows.stop();
        assert_eq!(follows.arrived(), (State::Moved, State::Runs));
        follows.land();
        work([&a, &b], &mut adders);
        finish([&a, &b], &mut adders);
        assert_eq!((cluster.wait_for("a", 3).epoch, cluster.wait_for("b", 3).epoch), (2, 2));
        assert_eq!(transport(&daemons[2], &a, "a"), "local");
        wait_until("the end of both migrations", || cluster.state().migrations.is_empty());
        assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
    }
}

/// A migration that waits for another is cancelled during its peer's switchover. Its VM continues on its host, and sends its peer nothing
/// until the peer runs again.
#[test]
fn a_vm_that_waits_for_its_turn_can_be_given_up() {
    let cluster = Cluster::new();
    let (daemons, mut a, mut b, mut adders) = begin(&cluster);
    let to = daemons[2].socket();
    let mut first = Move::begin(&mut a, daemons[0].socket(), to, "h3");
    let mut second = Move::begin(&mut b, daemons[1].socket(), to, "h3");
    work([&*first.vm, &*second.vm], &mut adders);
    first.round();
    second.round();
    assert_eq!(first.converged(), State::Stop);
    let source = HostClient::new(daemons[1].socket());
    assert_eq!(wait_for_turn(&source, "b"), "a");
    // Requests that were in flight at the suspension of its queue pairs have completed by then, or complete after their resumption.
    let held = |adder: &mut Adder, vm: &Vm, lasts: Duration| {
        let until = Instant::now() + lasts;
        while Instant::now() < until {
            adder.work(vm, 8);
            std::thread::yield_now();
        }
        adder.done
    };
    let before = held(&mut adders[1], second.vm, Duration::from_millis(300));
    assert_eq!(second.give_up(), State::Stays);
    assert_eq!(held(&mut adders[1], &b, Duration::from_millis(300)), before, "its peer is held");
    first.stop();
    assert_eq!(first.arrived(), (State::Moved, State::Runs));
    first.land();
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    assert_eq!((cluster.wait_for("a", 3).epoch, cluster.wait_for("b", 2).epoch), (2, 1));
    wait_until("the end of both migrations", || cluster.state().migrations.is_empty());
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}
