//! Throttled peers: during pre-copy the source's monitor slows the writes of peers into the VM's memory, on the same host and on another
//! one. No queue pair fails.

use crate::common;

use std::time::{Duration, Instant};

use common::adding::{pair, pair_at};
use common::cluster::{Cluster, transport, wait_to_know};
use common::moving::Move;
use common::vm::Vm;
use control_api::host::HostClient;
use control_api::host::proto::move_vm_reply::State;
use host::Daemon;

const LENGTH: u32 = 16 << 10;
/// Limit of writes that are posted before completions are polled.
const MOST_AT_ONCE: usize = 16;
/// Time limit of an expected event, even on a busy machine.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Writes into a peer's buffer for `time`, as often as the send queue accepts. Returns the number of completed writes.
fn write_for(time: Duration, from: &Vm, to: &Vm, outstanding: &mut u64) -> u64 {
    let until = Instant::now() + time;
    let mut done = 0;
    while Instant::now() < until {
        // An engine as fast as this loop always has room for one more request, so a limit keeps the completion queue from an overflow.
        for _ in 0..MOST_AT_ONCE {
            *outstanding += u64::from(from.write(to, 1, LENGTH));
        }
        while let Some(entry) = from.guest.poll(&from.monitor, &from.endpoint) {
            assert_eq!(entry.status.get(), 0, "a write failed");
            done += 1;
        }
        std::thread::yield_now();
    }
    *outstanding -= done;
    done
}

/// Writes until some more are complete.
fn complete_some(from: &Vm, to: &Vm, outstanding: &mut u64) {
    let until = Instant::now() + HANG_LIMIT;
    let mut done = 0;
    // The writes that are outstanding, and one more.
    let wanted = *outstanding + 1;
    while done < wanted {
        assert!(Instant::now() < until, "{done} of {wanted} writes are complete");
        done += write_for(Duration::from_millis(20), from, to, outstanding);
    }
}

/// A counter of a VM's NIC, from `inspect` of its host's daemon.
fn counted(daemon: &Daemon, vm: &str, counter: &str) -> u64 {
    let path = format!("vms/{vm}/nics/rdma0/rdma/counters/{counter}");
    HostClient::new(daemon.socket()).inspect(Some(&path)).unwrap().as_u64().unwrap()
}

#[test]
fn peers_of_a_vm_that_leaves_write_less() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut outstanding = 0;
    // From the other host, then from RAM to RAM.
    for (at, expected, counter) in [(0, "fabric", "rp_cnp_handled"), (1, "local", "throttled")] {
        let sockets = [daemons[at].socket(), daemons[2].socket()];
        assert!(a.monitor.rdma.hold_back(50).is_err(), "it doesn't leave");
        let on_its_way = Move::begin(&mut a, sockets[0], sockets[1], "h3");
        let rdma = &on_its_way.vm.monitor.rdma;
        // This test checks only whether peers are throttled, since rates depend on the machine. Tests of engine and protocol check rates.
        let before = counted(&daemons[1], "b", counter);
        complete_some(&b, on_its_way.vm, &mut outstanding);
        assert_eq!(counted(&daemons[1], "b", counter), before, "{expected}: nobody is held back");
        assert!(rdma.hold_back(99).unwrap());
        let until = Instant::now() + HANG_LIMIT;
        while counted(&daemons[1], "b", counter) == before {
            assert!(Instant::now() < until, "{expected}: nobody holds it back");
            write_for(Duration::from_millis(100), &b, on_its_way.vm, &mut outstanding);
        }
        // Throttled writes still complete, and so do writes after the end of the throttling.
        complete_some(&b, on_its_way.vm, &mut outstanding);
        assert!(rdma.hold_back(0).unwrap());
        complete_some(&b, on_its_way.vm, &mut outstanding);
        assert!(!on_its_way.vm.monitor.ethernet.hold_back(50).unwrap(), "a vmxnet3 has no way to do so");
        // The VM migrates to its peer's host while the peer is throttled.
        rdma.hold_back(99).unwrap();
        let mut on_its_way = if at == 0 {
            assert_eq!(on_its_way.give_up(), State::Stays);
            let on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[1].socket(), "h2");
            on_its_way.vm.monitor.rdma.hold_back(99).unwrap();
            on_its_way
        } else {
            on_its_way
        };
        assert_eq!(on_its_way.converged(), State::Stop);
        on_its_way.stop();
        assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
        on_its_way.land();
        complete_some(&b, &a, &mut outstanding);
        let now = if at == 0 { ("local", 1) } else { ("fabric", 2) };
        assert_eq!(transport(&daemons[now.1], &a, "a"), now.0);
    }
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}

#[test]
fn a_peer_that_was_always_beside_a_vm_waits_while_it_leaves() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2)];
    let (mut a, b) = pair_at(&cluster, [(&daemons[0], 1); 2]);
    wait_to_know(&cluster, &[&daemons[1]]);
    let mut outstanding = 0;
    let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[1].socket(), "h2");
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    // Longer than all retries of the peer's queue pair.
    let long = Duration::from_millis(1_500);
    assert_eq!(write_for(long, &b, on_its_way.vm, &mut outstanding), 0, "nobody takes it");
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    on_its_way.land();
    complete_some(&b, &a, &mut outstanding);
    assert_eq!(transport(&daemons[1], &a, "a"), "fabric");
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}
