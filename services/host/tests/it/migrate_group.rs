//! Group migrations, of all VMs or none: to one host, to different hosts, and to each other's hosts. Meanwhile the VMs add to each other's
//! words by atomics without pause.

use crate::common;

use std::cell::Cell;

use common::adding::{Adder, check, pair};
use common::cluster::{Cluster, transport, wait_to_know};
use common::moving::{Move, arrived_together, begin_together, refused_together, together};
use common::vm::Vm;
use common::wait_until;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use host::Daemon;

/// Runs both VMs until each has completed 40 more operations.
pub fn work(vms: [&Vm; 2], adders: &mut [Adder; 2]) {
    let before = [adders[0].done, adders[1].done];
    wait_until("operations of both", || {
        for (vm, adder) in vms.into_iter().zip(adders.iter_mut()) {
            adder.work(vm, 8);
        }
        adders.iter().zip(before).all(|(adder, before)| adder.done > before + 40)
    });
}

/// Waits until the in-flight requests of both VMs are complete, and checks the counts.
pub fn finish(vms: [&Vm; 2], adders: &mut [Adder; 2]) {
    wait_until("the operations of both to end", || {
        for (vm, adder) in vms.into_iter().zip(adders.iter_mut()) {
            adder.take(vm);
        }
        adders.iter().all(|adder| adder.done == adder.posted)
    });
    check(vms[0], &adders[0], vms[1], &adders[1]);
}

/// Begins the migrations of both VMs to their hosts, and executes rounds of pre-copy while the guests run.
fn set_out<'a>(
    vms: (&'a mut Vm, &'a mut Vm),
    daemons: &[Daemon],
    from: [usize; 2],
    to: [usize; 2],
    adders: &mut [Adder; 2],
) -> [Move<'a>; 2] {
    let socket = |at: usize| daemons[at].socket();
    let mut moves = [
        Move::prepare(vms.0, socket(from[0]), socket(to[0])),
        Move::prepare(vms.1, socket(from[1]), socket(to[1])),
    ];
    let hosts = to.map(|to| format!("h{}", to + 1));
    begin_together(&moves, &[&hosts[0], &hosts[1]]);
    for _ in 0..2 {
        work([&*moves[0].vm, &*moves[1].vm], adders);
        moves.iter_mut().for_each(Move::round);
    }
    work([&*moves[0].vm, &*moves[1].vm], adders);
    moves
}

/// Stops both VMs and transfers the rest to the destinations. The guests post before they stop, so that many requests are in flight.
fn stop(moves: &mut [Move<'_>; 2], adders: &mut [Adder; 2]) {
    assert_eq!(together(moves, false, &Step::Converged(true)), [State::Stop; 2]);
    for (one, adder) in moves.iter().zip(adders.iter_mut()) {
        adder.work(one.vm, 8);
    }
    moves.iter_mut().for_each(Move::stop);
}

/// Two connected VMs migrate in groups; each step is one migration, and keeps numbers, keys, order and counts:
/// - from two hosts to a third one, so the transport changes from fabric to local, and back to two hosts;
/// - twice to each other's hosts, so both ends of the connection change hosts at once;
/// - along a chain, one VM to the host that the other leaves.
#[test]
fn connected_vms_move_together_and_change_places() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, mut b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    let names = |vm: &Vm| (vm.endpoint.qp.0, vm.endpoint.qp.1, vm.endpoint.buffer.rkey);
    let before = [names(&a), names(&b)];
    let mut at = [0, 1];
    for (number, to) in (1_u64..).zip([[2, 2], [0, 1], [1, 0], [0, 1], [2, 0], [0, 1]]) {
        let mut moves = set_out((&mut a, &mut b), &daemons, at, to, &mut adders);
        let migrations = cluster.state().migrations;
        assert_eq!((migrations.len(), migrations[0].moves.len()), (1, 2), "one migration of two VMs");
        stop(&mut moves, &mut adders);
        assert_eq!(arrived_together(&moves), (vec![State::Runs; 2], vec![State::Moved; 2]), "move {number}");
        moves.into_iter().for_each(Move::land);
        at = to;
        for (name, to) in ["a", "b"].into_iter().zip(to) {
            let vm = cluster.wait_for(name, u32::try_from(to + 1).unwrap());
            assert_eq!(vm.epoch, number + 1);
        }
        work([&a, &b], &mut adders);
        finish([&a, &b], &mut adders);
        let expected = if to[0] == to[1] { "local" } else { "fabric" };
        assert_eq!(transport(&daemons[to[0]], &a, "a"), expected, "after move {number}");
        assert_eq!(transport(&daemons[to[1]], &b, "b"), expected, "after move {number}");
        wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    }
    assert_eq!([names(&a), names(&b)], before);
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}

/// One member's monitor aborts, during pre-copy and after the suspension. No VM moves, and all continue at the source. The next attempt
/// commits.
#[test]
fn when_one_gives_up_nobody_moves() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, mut b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    for stopped in [false, true] {
        let mut moves = set_out((&mut a, &mut b), &daemons, [0, 1], [1, 2], &mut adders);
        if stopped {
            stop(&mut moves, &mut adders);
        }
        let [one, two] = moves;
        assert_eq!(two.give_up(), State::Stays);
        // The other member's monitor is notified of the abort, although its own VM could have moved.
        let one = [one];
        assert_eq!(together(&one, false, &Step::Wait(true)), [State::Stays]);
        one.into_iter().for_each(Move::stay);
        work([&a, &b], &mut adders);
        finish([&a, &b], &mut adders);
        wait_until("the end of the migration", || cluster.state().migrations.is_empty());
        assert_eq!((cluster.wait_for("a", 1).epoch, cluster.wait_for("b", 2).epoch), (1, 1));
    }
    let mut moves = set_out((&mut a, &mut b), &daemons, [0, 1], [1, 2], &mut adders);
    stop(&mut moves, &mut adders);
    assert_eq!(arrived_together(&moves), (vec![State::Runs; 2], vec![State::Moved; 2]));
    moves.into_iter().for_each(Move::land);
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
}

/// The daemon of one destination ends after the suspension and before the decision. The other VM, whose destination works, doesn't move
/// either.
#[test]
fn a_destination_that_dies_keeps_all_where_they_were() {
    let cluster = Cluster::new();
    let mut daemons = vec![cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, mut b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    let mut moves = set_out((&mut a, &mut b), &daemons, [0, 1], [1, 2], &mut adders);
    stop(&mut moves, &mut adders);
    drop(daemons.pop());
    wait_until("both to stay", || together(&moves, false, &Step::Wait(true)) == [State::Stays; 2]);
    moves.into_iter().for_each(Move::stay);
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    assert_eq!((cluster.wait_for("a", 1).epoch, cluster.wait_for("b", 2).epoch), (1, 1));
}

/// The service refuses a group with a reason, and no VM stops: a member is unknown, is at its destination already, never requests the
/// migration, or has no monitor waiting at its destination.
#[test]
fn a_group_that_cannot_move_is_refused_with_a_sentence() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, mut b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    let client = |at: usize| control_api::host::HostClient::new(daemons[at].socket());
    let attempt = Cell::new(1 << 40);
    let wish = |host: &str, vms: &[&str]| {
        let vms = vms.iter().map(|vm| (*vm).to_owned()).collect();
        attempt.set(attempt.get() + 1);
        let attempt = attempt.get();
        Step::BeginTogether(control_api::host::proto::BeginTogether { host: host.to_owned(), vms, attempt })
    };
    let refused = |step: Step| client(0).move_vm("a", step).unwrap_err().to_string();
    let text = refused(wish("h2", &["a", "nobody"]));
    assert!(text.contains("The cluster has no VM nobody"), "{text}");
    let text = refused(wish("h1", &["a", "b"]));
    assert!(text.contains("VM a can't move to host h1: it runs there"), "{text}");
    let text = refused(wish("h2", &["b"]));
    assert!(text.contains("each named once"), "{text}");
    // The other member never requests the migration: the response names it.
    let reply = client(0).move_vm("a", wish("h3", &["a", "b"])).unwrap();
    assert_eq!(State::try_from(reply.state).unwrap(), State::Pending);
    assert!(reply.reason.contains("waits for VM b"), "{}", reply.reason);
    assert!(cluster.state().migrations.is_empty(), "nothing has begun");
    let reply = client(0).move_vm("a", Step::Broken(true)).unwrap();
    assert_eq!(State::try_from(reply.state).unwrap(), State::Stays);
    // The service has dropped the cancelled request, so the other member's request alone completes no group.
    let moves = [
        Move::prepare(&mut a, daemons[0].socket(), daemons[2].socket()),
        // A monitor waits for it, but not on the named host.
        Move::prepare(&mut b, daemons[1].socket(), daemons[2].socket()),
    ];
    for text in refused_together(&moves, &["h3", "h1"]) {
        assert!(text.contains("room") || text.contains("Stays"), "{text}");
    }
    drop(moves);
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    assert_eq!((cluster.wait_for("a", 1).epoch, cluster.wait_for("b", 2).epoch), (1, 1));
}
