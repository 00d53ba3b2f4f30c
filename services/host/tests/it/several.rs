//! Daemons of a cluster whose service has two instances: they follow the leader, through its loss and another's, in their sandboxes.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cluster::{Candidate, Server, ServerConfig};
use cluster_testbed::FakeKv;
use common::adding::{Adder, Peer, check, pair};
use common::cluster::{Cluster, known, wait_to_know};
use common::moving::{Move, ask};
use common::wait_until;
use control_api::cluster::Service;
use control_api::host::HostClient;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use host::Daemon;

struct Instance {
    server: Server,
    /// Whether it is cut off from the store that the instances share.
    cut: Arc<AtomicBool>,
}

fn instance(kv: &FakeKv) -> Instance {
    let client = kv.clone();
    let cut = client.switch();
    let mut config = ServerConfig::new("127.0.0.1:0".parse().unwrap(), "");
    config.sockets = Some(1);
    config.switch_limit = Duration::from_secs(8);
    let lease = Duration::from_secs(2);
    let candidate =
        Candidate { prefix: "/causeway".to_owned(), address: String::new(), begin_with: None, lease };
    Instance { server: Server::elected(&config, Arc::new(client), &candidate).unwrap(), cut }
}

impl Instance {
    fn leads(&self) -> bool {
        let service = Service::new(&self.server.address().to_string(), None).unwrap();
        service.roles().unwrap().remove(0).1.is_ok_and(|role| role.leads)
    }
}

fn several() -> (Cluster, [Instance; 2]) {
    let kv = FakeKv::default();
    let instances = [instance(&kv), instance(&kv)];
    wait_until("a leader", || instances.iter().any(Instance::leads));
    let addresses = instances.each_ref().map(|instance| instance.server.address());
    let service = Service::new(&addresses.map(|address| address.to_string()).join(","), None).unwrap();
    let port = facilities::ports::free(1);
    let folder = tempfile::tempdir().unwrap();
    (Cluster { folder, server: None, address: addresses[0], service, port, keys: None }, instances)
}

/// Cuts the leader off from the store until the other instance leads and the daemons follow it.
fn take_over(cluster: &Cluster, instances: &[Instance; 2], daemons: &[Daemon], mut work: impl FnMut()) {
    let (leads, other) = match instances[0].leads() {
        true => (&instances[0], &instances[1]),
        false => (&instances[1], &instances[0]),
    };
    leads.cut.store(true, Ordering::SeqCst);
    wait_until("the other to lead", || {
        work();
        other.leads()
    });
    leads.cut.store(false, Ordering::SeqCst);
    wait_until("daemons to follow it", || {
        work();
        let heard = cluster.state().hosts.iter().all(|host| host.heard);
        heard && daemons.iter().all(|daemon| known(daemon)["connected"] == true)
    });
    wait_to_know(cluster, &daemons.iter().collect::<Vec<_>>());
}

/// A VM migrates, the leader is cut off from the store, the VM migrates again under the other leader, and once more back. Its guest runs
/// all the while, and counts exactly. No VM's number or epoch changes by the take-over.
#[test]
fn vms_move_by_the_word_of_whichever_instance_leads() {
    let (cluster, instances) = several();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let (mut of_a, of_b) = (Adder::new(&b), Adder::new(&a));
    let peer = Peer::start(b, of_b);
    let mut at = 0_usize;
    for (number, to) in (1_u64..).zip([2_usize, 0, 2]) {
        let (from_socket, to_socket) = (daemons[at].socket(), daemons[to].socket());
        let mut on_its_way = Move::begin(&mut a, from_socket, to_socket, &format!("h{}", to + 1));
        for _ in 0..2 {
            for _ in 0..20 {
                of_a.work(on_its_way.vm, 8);
            }
            peer.wait_for_more();
            on_its_way.round();
        }
        assert_eq!(on_its_way.converged(), State::Stop);
        on_its_way.stop();
        assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
        on_its_way.land();
        at = to;
        let before = cluster.wait_for("a", u32::try_from(to + 1).unwrap());
        assert_eq!(before.epoch, number + 1);
        wait_until("the end of the migration", || cluster.state().migrations.is_empty());
        take_over(&cluster, &instances, &daemons, || of_a.work(&a, 8));
        let after = cluster.wait_for("a", u32::try_from(to + 1).unwrap());
        assert_eq!((after.id, after.epoch), (before.id, before.epoch));
    }
    // Without a decision at the take-over, the new leader aborts the migration, and the VM stays where it runs. A later one succeeds.
    let (from, to) = (daemons[at].socket(), daemons[0].socket());
    let source = HostClient::new(from);
    let mut on_its_way = Move::begin(&mut a, from, to, "h1");
    on_its_way.round();
    take_over(&cluster, &instances, &daemons, || of_a.work(on_its_way.vm, 8));
    wait_until("the VM to stay", || {
        of_a.work(on_its_way.vm, 8);
        ask(&source, "a", Step::Wait(true)) == State::Stays
    });
    on_its_way.stay();
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    assert_eq!(cluster.wait_for("a", u32::try_from(at + 1).unwrap()).epoch, 4);
    of_a.finish(&a);
    let (b, of_b) = peer.end();
    check(&a, &of_a, &b, &of_b);
}
