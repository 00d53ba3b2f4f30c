//! A VM is lost with its daemon while its peers' queue pairs are suspended. Peers can connect with the VM that replaces it.

use crate::common;

use common::adding::pair;
use common::cluster::{Cluster, guest, wait_to_know};
use common::moving::Move;
use common::vm::connect;
use common::wait_until;
use control_api::host::proto::move_vm_reply::State;

/// The source's daemon ends after the VM's suspension and before the decision. A VM that is started there afterwards has the same
/// addresses. A queue pair that the peer connects with it sends, although queue pairs to these addresses were suspended for the lost VM.
#[test]
fn what_takes_the_place_of_a_lost_vm_is_reached() {
    let cluster = Cluster::new();
    let (one, two, three) = (cluster.daemon(1), cluster.daemon(2), cluster.daemon(3));
    let (mut a, mut b) = pair(&cluster, &one, &two);
    wait_to_know(&cluster, &[&three]);
    assert!(b.write(&a, 1, 64));
    assert_eq!(b.poll(1), 0);
    let mut on_its_way = Move::begin(&mut a, one.socket(), three.socket(), "h3");
    on_its_way.round();
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    drop(one);
    drop(on_its_way);
    drop(a);
    let one = cluster.daemon(1);
    wait_until("the loss of the VM", || cluster.state().vms.iter().all(|vm| vm.name != "a" || !vm.alive));
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    let a = guest(&one, "a", 1);
    cluster.wait_for("a", 1);
    wait_to_know(&cluster, &[&one, &two]);
    b.endpoint = b.guest.endpoint(&b.monitor, 2, 4);
    connect(&a, &b);
    assert!(b.write(&a, 2, 64));
    assert_eq!(b.poll(2), 0);
    assert!(a.write(&b, 3, 64));
    assert_eq!(a.poll(3), 0);
}
