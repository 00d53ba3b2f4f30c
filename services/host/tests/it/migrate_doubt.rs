//! Every monitor learns its migration's decision, even if daemons restart or hosts are lost. A monitor whose daemon was restarted requests
//! it from the cluster service. A host that is lost for good delays no decision.

use crate::common;

use std::time::Duration;

use common::adding::{Adder, check, pair};
use common::cluster::{Cluster, guest, wait_to_know};
use common::moving::{Move, ask, begin_together, together};
use common::vm::Vm;
use common::wait_until;
use control_api::cluster::proto::RegisterHostRequest;
use control_api::host::proto::ClaimVm;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::{HostClient, NicRequest};
use host::Daemon;
use vfio_user_protocol::migration::DeviceState;

/// Attaches the VM's NIC again, as its monitor does after the daemon's restart.
fn attach_again(daemon: &HostClient) {
    let nic = NicRequest {
        vm: "a".to_owned(),
        name: "rdma0".to_owned(),
        segment: "blue".to_owned(),
        ..NicRequest::default()
    };
    daemon.attach_nic(&nic).unwrap();
}

/// Three hosts, and two connected VMs on the first two.
fn begin() -> (Cluster, [Daemon; 3], Vm, Vm) {
    let cluster = Cluster::new();
    let daemons = [1, 2, 3].map(|number| cluster.daemon(number));
    let (a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    (cluster, daemons, a, b)
}

/// Begins a migration of the VM to the third host, and executes a round of pre-copy.
fn set_out<'a>(vm: &'a mut Vm, from: &Daemon, to: &Daemon) -> Move<'a> {
    let mut on_its_way = Move::begin(vm, from.socket(), to.socket(), "h3");
    on_its_way.round();
    on_its_way
}

/// The source's daemon is restarted after the decision, before its monitor has received it. The new daemon responds that it knows no
/// migration. It forwards the monitor's claim to the service, which responds that the VM has moved. A response that the VM stays would
/// make the source's monitor resume a guest that runs at the destination.
#[test]
fn a_daemon_that_was_started_again_does_not_say_that_the_vm_stays() {
    let (cluster, [one, _two, three], mut a, _b) = begin();
    let mut on_its_way = set_out(&mut a, &one, &three);
    let epochs = [&one, &three]
        .map(|daemon| HostClient::new(daemon.socket()).move_vm("a", Step::Look(true)).unwrap().epoch);
    assert_eq!(epochs, [1, 2], "each side hears in which epoch the VM runs there, or is to");
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    drop(one);
    let one = cluster.daemon(1);
    let source = HostClient::new(one.socket());
    attach_again(&source);
    assert_eq!(ask(&source, "a", Step::Wait(true)), State::Unknown);
    let reply = source.move_vm("a", Step::Claim(ClaimVm { epoch: 1, keeps: true })).unwrap();
    assert_eq!((reply.state(), reply.reason.as_str()), (State::Moved, "host h3 has it, in epoch 2"));
    on_its_way.land();
}

/// The source's daemon is restarted before the decision: the coordinator aborts, and the source has the VM in a new epoch, which no other
/// host gets.
#[test]
fn a_vm_whose_daemon_was_started_again_is_claimed_by_its_monitor() {
    let (cluster, [one, _two, three], mut a, _b) = begin();
    let mut on_its_way = set_out(&mut a, &one, &three);
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    drop(one);
    let one = cluster.daemon(1);
    let source = HostClient::new(one.socket());
    attach_again(&source);
    assert_eq!(ask(&source, "a", Step::Wait(true)), State::Unknown);
    let mut reply = None;
    wait_until("the decision", || {
        let said = source.move_vm("a", Step::Claim(ClaimVm { epoch: 1, keeps: true })).unwrap();
        let decided = said.state() != State::Pending;
        reply = Some(said);
        decided
    });
    let reply = reply.unwrap();
    assert_eq!((reply.state(), reply.epoch), (State::Runs, 2), "{}", reply.reason);
    let vm = cluster.state().vms.into_iter().find(|vm| vm.name == "a").unwrap();
    assert_eq!((vm.alive, vm.host, vm.epoch), (true, 1, 2));
}

/// The destination is lost for good with the VM that has moved there. The service forgets the host on request, once the host is silent.
/// The VM is then started on another host.
#[test]
fn a_vm_of_a_host_that_is_forgotten_is_started_elsewhere() {
    let (cluster, [one, _two, three], mut a, _b) = begin();
    let mut on_its_way = set_out(&mut a, &one, &three);
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    let refused = cluster.service.forget("h3").unwrap_err().to_string();
    assert!(refused.contains("Host h3 can't be forgotten: it was heard of"), "{refused}");
    drop(three);
    drop(on_its_way);
    drop(a);
    let heard = || cluster.state().hosts.iter().any(|host| host.name == "h3" && host.heard);
    wait_until("the silence of host 3", || !heard());
    assert_eq!(cluster.service.forget("h3").unwrap(), ["a"]);
    assert!(cluster.state().hosts.iter().all(|host| host.name != "h3"));
    let a = guest(&one, "a", 1);
    assert_eq!(cluster.wait_for("a", 1).epoch, 3);
    drop(a);
}

/// Stops the VM's devices at the destination, after their complete state has arrived.
fn stand_still(on_its_way: &Move<'_>) {
    for client in [&on_its_way.monitor.ethernet, &on_its_way.monitor.rdma] {
        client.set_device_state(DeviceState::Stop).unwrap();
    }
}

/// Repeats the step until the daemon's response to the VM's monitor has the decision.
fn ended(daemon: &HostClient, vm: &str, step: &Step) -> State {
    let mut state = State::Pending;
    wait_until("the decision", || {
        state = ask(daemon, vm, step.clone());
        matches!(state, State::Runs | State::Moved | State::Stays)
    });
    state
}

/// A false registration under the name of a host whose daemon runs, and has voted for an undecided migration. The service considers the
/// daemon restarted, and the daemon joins again. Its vote stands, and the VM runs where the coordinator decides: the guests continue, and
/// each operation is executed once.
#[test]
fn a_daemon_that_lives_and_counts_as_started_again_keeps_its_vote() {
    let cluster = Cluster::new();
    let daemons = [1, 2, 3, 4].map(|number| cluster.daemon(number));
    let (mut a, mut b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2], &daemons[3]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    let clients = [0, 1, 2, 3].map(|at: usize| HostClient::new(daemons[at].socket()));
    let mut moves = [
        Move::prepare(&mut a, daemons[0].socket(), daemons[2].socket()),
        Move::prepare(&mut b, daemons[1].socket(), daemons[3].socket()),
    ];
    begin_together(&moves, &["h3", "h4"]);
    moves.iter_mut().for_each(Move::round);
    for (one, adder) in moves.iter().zip(&mut adders) {
        adder.work(one.vm, 8);
    }
    assert_eq!(together(&moves, false, &Step::Converged(true)), [State::Stop; 2]);
    moves.iter_mut().for_each(Move::stop);
    // One VM's complete state has arrived, so its source votes. The other VM's hasn't, so the coordinator can't decide.
    stand_still(&moves[0]);
    let destination = clients[2].clone();
    let waits = std::thread::spawn(move || ended(&destination, "a", &Step::Arrived(true)));
    // Time for the vote. If the vote takes longer, the coordinator aborts, and the checks below hold as well.
    std::thread::sleep(Duration::from_millis(500));
    let host = |name: &str| cluster.state().hosts.into_iter().find(|host| host.name == name).unwrap();
    let before = host("h1");
    let request =
        RegisterHostRequest { name: "h1".to_owned(), fabric_address: before.fabric_address, incarnation: 0 };
    cluster.service.ask("RegisterHost", async |client| client.register_host(request.clone()).await).unwrap();
    wait_until("the daemon to join anew", || host("h1").incarnation >= before.incarnation + 2);
    stand_still(&moves[1]);
    let other = ended(&clients[3], "b", &Step::Arrived(true));
    let there = [waits.join().unwrap(), other];
    let here = [0, 1].map(|at: usize| ended(&clients[at], ["a", "b"][at], &Step::Wait(true)));
    let moved = there == [State::Runs; 2];
    let expected = if moved { State::Moved } else { State::Stays };
    assert_eq!(here, [expected; 2], "{there:?}");
    assert!(moved || there == [State::Stays; 2], "one side of each: {there:?}");
    if moved {
        moves.into_iter().for_each(Move::land);
    } else {
        moves.into_iter().for_each(Move::stay);
    }
    wait_until("the operations of both to end", || {
        for (vm, adder) in [&a, &b].into_iter().zip(&mut adders) {
            adder.take(vm);
        }
        adders.iter().all(|adder| adder.done == adder.posted)
    });
    check(&a, &adders[0], &b, &adders[1]);
    let at = if moved { [3, 4] } else { [1, 2] };
    let state = cluster.state();
    let of = |name: &str| state.vms.iter().find(|vm| vm.name == name).unwrap();
    assert_eq!(["a", "b"].map(|name| of(name).host), at);
    assert!(of("a").alive && of("b").alive);
}
