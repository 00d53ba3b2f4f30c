//! A VM with an RDMA NIC migrates between daemons, as the coordinator decides, while guests run: operations are counted by fetch-and-add,
//! and each count is exact.

use crate::common;

use std::time::{Duration, Instant};

use common::adding::{Adder, Peer, check, pair};
use common::cluster::{Cluster, guest, transport, wait_to_know};
use common::moving::Move;
use common::wait_until;
use control_api::host::HostClient;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;

/// To another host, to its peer's host (from the network to RAM), away from it (from RAM to the network), and back, twice. Numbers, keys
/// and order are kept, and each page that a daemon wrote is marked.
#[test]
fn a_vm_moves_with_its_connection_open() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let (mut of_a, of_b) = (Adder::new(&b), Adder::new(&a));
    let before = (a.endpoint.qp.0, a.endpoint.qp.1, a.endpoint.buffer.rkey);
    let peer = Peer::start(b, of_b);
    let (mut at, mut by_daemon) = (0_usize, 0);
    for (number, to) in (1_u64..).zip([2_usize, 1, 2, 0, 1, 0, 2, 0]) {
        let (from_socket, to_socket) = (daemons[at].socket(), daemons[to].socket());
        let mut on_its_way = Move::begin(&mut a, from_socket, to_socket, &format!("h{}", to + 1));
        for _ in 0..3 {
            for _ in 0..20 {
                of_a.work(on_its_way.vm, 8);
            }
            peer.wait_for_more();
            on_its_way.round();
        }
        for _ in 0..20 {
            of_a.work(on_its_way.vm, 8);
        }
        assert_eq!(on_its_way.converged(), State::Stop);
        // Longer than all retries of a queue pair, so that one that isn't suspended fails. First the monitor is slow to stop the VM, which
        // continues meanwhile; then the rest takes long.
        let slow = if number < 4 { Duration::from_millis(1_700) } else { Duration::ZERO };
        let asked = Instant::now();
        while asked.elapsed() < slow {
            of_a.work(on_its_way.vm, 8);
            std::thread::yield_now();
        }
        on_its_way.stop();
        std::thread::sleep(slow);
        assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
        // The peer's host reports its pause: from before the stop until the VM runs, or a little later.
        let held = on_its_way.peers_held();
        let [(host, held)] = held.as_slice() else { panic!("{held:?} after move {number}") };
        let most = asked.elapsed() + Duration::from_secs(1);
        assert!(host == "h2" && (2 * slow..most).contains(held), "{host} {held:?} of {most:?}");
        by_daemon += on_its_way.by_daemon;
        on_its_way.land();
        at = to;
        let vm = cluster.wait_for("a", u32::try_from(to + 1).unwrap());
        assert_eq!(vm.epoch, number + 1);
        for _ in 0..20 {
            of_a.work(&a, 8);
        }
        of_a.finish(&a);
        peer.wait_for_more();
        let expected = if to == 1 { "local" } else { "fabric" };
        assert_eq!(transport(&daemons[to], &a, "a"), expected, "after move {number}");
        assert_eq!(cluster.state().migrations.len(), 0);
    }
    let (b, of_b) = peer.end();
    check(&a, &of_a, &b, &of_b);
    assert_eq!(before, (a.endpoint.qp.0, a.endpoint.qp.1, a.endpoint.buffer.rkey));
    assert!(by_daemon > 0, "the peer's additions are the daemon's writes");
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}

/// Post-copy: the VM runs before any of its memory is present, except what its NIC needs. To another host, to its peer's host and away from
/// it: each count is exact, and no queue pair fails.
#[test]
fn a_vm_runs_before_its_memory_is_there() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let (mut of_a, of_b) = (Adder::new(&b), Adder::new(&a));
    let counted = a.endpoint.buffer.page_of(0) / 4096;
    let peer = Peer::start(b, of_b);
    let mut at = 0_usize;
    for to in [2_usize, 1, 2, 0] {
        let (from_socket, to_socket) = (daemons[at].socket(), daemons[to].socket());
        let mut on_its_way = Move::begin(&mut a, from_socket, to_socket, &format!("h{}", to + 1));
        for _ in 0..20 {
            of_a.work(on_its_way.vm, 8);
        }
        on_its_way.round();
        of_a.work(on_its_way.vm, 8);
        assert_eq!(on_its_way.converged(), State::Stop);
        let late = on_its_way.stop_late();
        assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
        on_its_way.land();
        at = to;
        for _ in 0..20 {
            of_a.work(&a, 8);
        }
        of_a.finish(&a);
        peer.wait_for_more();
        let asked = late.end();
        assert!(asked.contains(&counted), "nobody needed the buffer: {asked:?}");
        of_a.work(&a, 8);
        of_a.finish(&a);
        peer.wait_for_more();
        wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    }
    let (b, of_b) = peer.end();
    check(&a, &of_a, &b, &of_b);
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}

/// Aborts after its devices have stopped, and before: the source resumes, so does its peer, and the next migration succeeds.
#[test]
fn a_migration_that_is_given_up_leaves_the_source_unharmed() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let (mut of_a, of_b) = (Adder::new(&b), Adder::new(&a));
    let peer = Peer::start(b, of_b);
    for stopped in [false, true, false, true] {
        let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[2].socket(), "h3");
        of_a.work(on_its_way.vm, 8);
        on_its_way.round();
        if stopped {
            assert_eq!(on_its_way.converged(), State::Stop);
            on_its_way.stop();
        }
        assert_eq!(on_its_way.give_up(), State::Stays);
        of_a.finish(&a);
        peer.wait_for_more();
        wait_until("the end of the migration", || cluster.state().migrations.is_empty());
        assert_eq!(cluster.wait_for("a", 1).epoch, 1);
    }
    let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[2].socket(), "h3");
    on_its_way.round();
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    on_its_way.land();
    of_a.work(&a, 8);
    of_a.finish(&a);
    peer.wait_for_more();
    let (b, of_b) = peer.end();
    check(&a, &of_a, &b, &of_b);
}

/// The destination's daemon dies when the VM is suspended and the rest has arrived: the VM resumes at the source, and its peer continues.
#[test]
fn a_destination_that_dies_before_the_commit_costs_nothing() {
    let cluster = Cluster::new();
    let (one, two, three) = (cluster.daemon(1), cluster.daemon(2), cluster.daemon(3));
    let (mut a, b) = pair(&cluster, &one, &two);
    wait_to_know(&cluster, &[&three]);
    let (mut of_a, of_b) = (Adder::new(&b), Adder::new(&a));
    let peer = Peer::start(b, of_b);
    let mut on_its_way = Move::begin(&mut a, one.socket(), three.socket(), "h3");
    of_a.work(on_its_way.vm, 8);
    on_its_way.round();
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    drop(three);
    // The source gets no message: the switchover's time-out expires.
    let source = HostClient::new(one.socket());
    let began = Instant::now();
    assert_eq!(common::moving::ask(&source, "a", Step::Wait(true)), State::Stays);
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    on_its_way.stay();
    of_a.work(&a, 8);
    of_a.finish(&a);
    peer.wait_for_more();
    let (b, of_b) = peer.end();
    check(&a, &of_a, &b, &of_b);
    assert_eq!(cluster.wait_for("a", 1).epoch, 1);
}

/// Both monitors die during the copy: the migration is over, the VM has ended, and its peer detects that by its own timers.
#[test]
fn monitors_that_die_end_the_migration_and_the_vm() {
    let cluster = Cluster::new();
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let (mut a, b) = pair(&cluster, &one, &two);
    let on_its_way = Move::begin(&mut a, one.socket(), two.socket(), "h2");
    assert_eq!(cluster.state().migrations.len(), 1);
    drop(on_its_way);
    drop(a);
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    wait_until("the end of the VM", || cluster.state().vms.iter().all(|vm| vm.name != "a"));
    // The name is free, and the host accepts a VM with it again.
    let a = guest(&two, "a", 1);
    cluster.wait_for("a", 2);
    drop((a, b));
}

/// An impossible migration is refused with a sentence, and nothing is stopped.
#[test]
fn what_cannot_move_is_refused_with_a_sentence() {
    let cluster = Cluster::new();
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let (a, b) = pair(&cluster, &one, &two);
    let source = HostClient::new(one.socket());
    let refused =
        |vm: &str, host: &str| source.move_vm(vm, Step::Begin(host.to_owned())).unwrap_err().to_string();
    let text = refused("a", "h9");
    assert!(text.contains("no such host has reported"), "{text}");
    let text = refused("nobody", "h2");
    assert!(text.contains("nobody"), "{text}");
    // No monitor waits there.
    match source.move_vm("a", Step::Begin("h2".to_owned())) {
        Ok(reply) => assert_eq!(State::try_from(reply.state).unwrap(), State::Stays, "{}", reply.reason),
        Err(error) => assert!(error.to_string().contains("--incoming"), "{error}"),
    }
    // A daemon without the service.
    let folder = tempfile::tempdir().unwrap();
    let alone = common::daemon(folder.path());
    let c = guest(&alone, "c", 3);
    let text =
        HostClient::new(alone.socket()).move_vm("c", Step::Begin("h2".to_owned())).unwrap_err().to_string();
    assert!(text.contains("--cluster"), "{text}");
    drop(c);
    let (mut of_a, _) = (Adder::new(&b), ());
    for _ in 0..50 {
        of_a.work(&a, 8);
    }
    of_a.finish(&a);
}
