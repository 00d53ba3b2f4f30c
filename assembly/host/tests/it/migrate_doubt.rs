//! How a migration ended is known to whoever has to know it, however daemons and hosts fare: a monitor whose daemon was started again asks, and a host that is gone for good
//! keeps nobody.

use crate::common;

use common::adding::pair;
use common::cluster::{Cluster, guest, wait_to_know};
use common::moving::{Move, ask};
use common::wait_until;
use control_api::host::proto::ClaimVm;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::{HostClient, NicRequest};

/// A monitor attaches its VM's NIC again to a daemon that was started again.
fn attach_again(daemon: &HostClient) {
    let nic = NicRequest {
        vm: "a".to_owned(),
        name: "rdma0".to_owned(),
        segment: "blue".to_owned(),
        ..NicRequest::default()
    };
    daemon.attach_nic(&nic).unwrap();
}

/// The source's daemon is started again after the decision, before its monitor has heard of it. That daemon knows nothing and says so; by it the service says that the VM has
/// moved. (It said that the VM stays: the source's monitor let its guest go on, which ran at the destination.)
#[test]
fn a_daemon_that_was_started_again_does_not_say_that_the_vm_stays() {
    let cluster = Cluster::new();
    let (one, two, three) = (cluster.daemon(1), cluster.daemon(2), cluster.daemon(3));
    let (mut a, _b) = pair(&cluster, &one, &two);
    wait_to_know(&cluster, &[&three]);
    let mut on_its_way = Move::begin(&mut a, one.socket(), three.socket(), "h3");
    on_its_way.round();
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

/// The source's daemon is started again before the decision: the migration is given up, and the VM is its host's, in a new epoch that nobody else gets.
#[test]
fn a_vm_whose_daemon_was_started_again_is_claimed_by_its_monitor() {
    let cluster = Cluster::new();
    let (one, two, three) = (cluster.daemon(1), cluster.daemon(2), cluster.daemon(3));
    let (mut a, _b) = pair(&cluster, &one, &two);
    wait_to_know(&cluster, &[&three]);
    let mut on_its_way = Move::begin(&mut a, one.socket(), three.socket(), "h3");
    on_its_way.round();
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

/// The destination is gone for good with the VM that has moved there. It is forgotten once it is silent, and the VM is started elsewhere.
#[test]
fn a_vm_of_a_host_that_is_forgotten_is_started_elsewhere() {
    let cluster = Cluster::new();
    let (one, two, three) = (cluster.daemon(1), cluster.daemon(2), cluster.daemon(3));
    let (mut a, _b) = pair(&cluster, &one, &two);
    wait_to_know(&cluster, &[&three]);
    let mut on_its_way = Move::begin(&mut a, one.socket(), three.socket(), "h3");
    on_its_way.round();
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
