//! Several instances of the service on a shared store, in one process. One leads, and the others redirect clients to
//! it. When the leader is cut off, ends or loses its lease, another leads with every acknowledged change. The store
//! then refuses changes of the former leader.

use crate::common;
use crate::common::moving;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cluster::{Candidate, Server, ServerConfig};
use cluster_testbed::FakeKv;
use common::{Says as _, wait_until};
use control_api::cluster::proto;
use control_api::cluster::{ClusterError, Service};
use moving::{Host, STEPS, settle, steps};

/// Doesn't expire by accident on a loaded machine, and expires quickly enough for a test.
const LEASE: Duration = Duration::from_secs(2);

struct Instance {
    server: Server,
    /// Cuts this instance off from the store while it is set.
    cut: Arc<AtomicBool>,
    deceived: Arc<AtomicBool>,
    /// A client of this instance alone.
    service: Service,
    address: String,
}

fn instance(kv: &FakeKv) -> Instance {
    let client = kv.clone();
    let (cut, deceived) = (client.switch(), client.deceived());
    let mut config = ServerConfig::new("127.0.0.1:0".parse().unwrap(), "");
    config.metrics = Some("127.0.0.1:0".parse().unwrap());
    let candidate =
        Candidate { prefix: "/causeway".to_owned(), address: String::new(), begin_with: None, lease: LEASE };
    let server = Server::elected(&config, Arc::new(client), &candidate).unwrap();
    let address = server.address().to_string();
    Instance { server, cut, deceived, service: Service::new(&address, None).unwrap(), address }
}

fn role(instance: &Instance) -> proto::Role {
    instance.service.roles().unwrap().remove(0).1.unwrap()
}

/// The leading instance, the following one, and a client of both.
fn two(kv: &FakeKv) -> (Instance, Instance, Service) {
    let first = instance(kv);
    wait_until("a leader", || role(&first).leads);
    let second = instance(kv);
    wait_until("one that stands by", || role(&second).leader == first.address);
    let both = Service::new(&format!("{},{}", second.address, first.address), None).unwrap();
    (first, second, both)
}

/// Sends a request to one instance, whether it leads or not.
fn directly(instance: &Instance, vm: &str, host: proto::Speaker) -> Result<(), ClusterError> {
    let service = Service::new(&instance.address, None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let request = proto::RegisterVmRequest {
        speaker: Some(host),
        name: vm.to_owned(),
        epoch: 0,
        nics: vec![common::nic(9)],
    };
    runtime.block_on(async {
        let mut client = service.connect().await?;
        service.within("RegisterVm", client.register_vm(request)).await.map(drop)
    })
}

#[test]
fn one_leads_and_the_other_says_so() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let h1 = both.host("h1", 1, 0).unwrap();
    assert_eq!(both.vm(h1, "a", 0, 1).unwrap(), (1, 1));
    // A follower answers with an error that has the leader's address, and a client of both follows it.
    match directly(&second, "b", h1).unwrap_err() {
        ClusterError::NotLeading { leader, reason } => {
            assert_eq!(leader.as_ref(), Some(&first.address));
            assert!(reason.contains(&format!("{} does, ask there", first.address)), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let state = second.service.state().unwrap();
    assert_eq!((state.vms.len(), state.role.unwrap().instance), (1, first.address.clone()));
    let (leads, stands_by) = (role(&first), role(&second));
    assert!(
        leads.leads && leads.store_answers && leads.term > 0 && leads.lease_milliseconds > 0,
        "{leads:?}"
    );
    assert!(!stands_by.leads && stands_by.term == leads.term && stands_by.store == "etcd", "{stands_by:?}");
    for (instance, value) in [(&first, 1), (&second, 0)] {
        let text = metrics(&instance.server);
        let line =
            format!("causeway_cluster_leads{{store=\"etcd\",instance=\"{}\"}} {value}", instance.address);
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
        assert_eq!(text.contains("causeway_cluster_vms 1"), value == 1, "the one that leads shows the rest");
    }
}

fn metrics(server: &Server) -> String {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(server.metrics().unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// An instance that ends revokes its lease: the other leads at once, without waiting for its expiry.
#[test]
fn one_that_ends_hands_over() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let h1 = both.host("h1", 1, 0).unwrap();
    both.vm(h1, "a", 0, 1).unwrap();
    drop(first);
    wait_until("the other to lead", || role(&second).leads);
    assert_eq!(both.vm(h1, "a", 1, 1).unwrap(), (1, 1), "nobody who wasn't started again gets a new epoch");
    assert_eq!(both.host("h1", 1, h1.incarnation).unwrap(), h1);
}

/// An instance that is cut off from the store stops answering before its lease expires, and reports why. The other
/// leads with every acknowledged change.
#[test]
fn one_that_is_cut_off_stops_to_lead_before_the_other_begins() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let h1 = both.host("h1", 1, 0).unwrap();
    let mut answered = Vec::new();
    for round in 0..3 {
        let (leads, other) = if round % 2 == 0 { (&first, &second) } else { (&second, &first) };
        let name = format!("vm{round}");
        answered.push((both.vm(h1, &name, 0, round).unwrap(), name));
        leads.cut.store(true, Ordering::SeqCst);
        // At no time do both report that they lead, in whatever order they are asked.
        wait_until("the other to lead", || {
            let before = role(other).leads;
            assert!(!(before && role(leads).leads), "both lead");
            before
        });
        let trouble = role(leads);
        assert!(!trouble.store_answers && trouble.store_error.contains("doesn't answer"), "{trouble:?}");
        let error = directly(leads, "x", h1).unwrap_err().to_string();
        assert!(
            error.contains("No instance of the cluster service leads, as far as this one knows"),
            "{error}"
        );
        leads.cut.store(false, Ordering::SeqCst);
        wait_until("the first to stand by", || role(leads).leader == other.address);
        for ((id, epoch), name) in &answered {
            assert_eq!(both.vm(h1, name, *epoch, 9).map(|vm| vm.0).unwrap_or(*id), *id);
        }
    }
    assert_eq!(both.state().unwrap().vms.len(), 3);
}

/// An instance whose clock is stopped believes that it leads while another one does. The store refuses its changes, and
/// the first refusal ends its term.
#[test]
fn one_whose_clock_stands_still_changes_nothing() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let h1 = both.host("h1", 1, 0).unwrap();
    for round in 0..3_u8 {
        let (leads, other) = if round % 2 == 0 { (&first, &second) } else { (&second, &first) };
        leads.deceived.store(true, Ordering::SeqCst);
        // A renewal may be in flight.
        wait_until("it to believe", || role(leads).lease_milliseconds > 1_000_000);
        kv.advance(LEASE * 2);
        wait_until("the other to lead", || role(other).leads);
        assert!(role(leads).leads, "it should believe that it leads");
        other.service.vm(h1, &format!("vm{round}"), 0, round).unwrap();
        let error = directly(leads, "ghost", h1).unwrap_err();
        assert!(!error.is_refusal(), "{error:?}");
        leads.deceived.store(false, Ordering::SeqCst);
        wait_until("it to stand by", || role(leads).leader == other.address);
        let state = both.state().unwrap();
        assert_eq!(state.vms.len(), usize::from(round) + 1, "{state:?}");
    }
}

/// Without a store no instance leads. A client receives an error with the cause, without hanging. The service recovers
/// with the store.
#[test]
fn without_a_store_nobody_leads_and_nothing_hangs() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let h1 = both.host("h1", 1, 0).unwrap();
    both.vm(h1, "a", 0, 1).unwrap();
    for instance in [&first, &second] {
        instance.cut.store(true, Ordering::SeqCst);
    }
    wait_until("nobody to lead", || !role(&first).leads && !role(&second).leads);
    wait_until("both to know", || !role(&first).store_answers && !role(&second).store_answers);
    let error = both.state().unwrap_err();
    assert!(matches!(error, ClusterError::NoLeader { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("None of the cluster service's instances leads") && text.contains("doesn't answer"),
        "{text}"
    );
    for instance in [&first, &second] {
        instance.cut.store(false, Ordering::SeqCst);
    }
    wait_until("a leader", || both.state().is_ok());
    assert_eq!(both.vm(h1, "a", 1, 1).unwrap(), (1, 1));
}

/// Another instance takes over at each step of a migration. Afterwards one host runs the VM, and hosts received no
/// other decision.
#[test]
fn a_migration_ends_one_way_when_another_takes_over() {
    let kv = FakeKv::default();
    let (first, second, both) = two(&kv);
    let (h1, h2) = (both.host("h1", 1, 0).unwrap(), both.host("h2", 2, 0).unwrap());
    let mut ends = [0, 0];
    for step in 0..=STEPS {
        let (leads, other) = if role(&first).leads { (&first, &second) } else { (&second, &first) };
        let vm = format!("vm{step}");
        let (id, epoch) = both.vm(h1, &vm, 0, u8::try_from(step).unwrap()).unwrap();
        let (mut source, mut destination) = (Host::new(&both, h1), Host::new(&both, h2));
        let migration = both.migrate(&vm, "h2").unwrap();
        let heard = steps(&mut source, &mut destination, migration, step);
        leads.cut.store(true, Ordering::SeqCst);
        wait_until("the other to lead", || role(other).leads);
        leads.cut.store(false, Ordering::SeqCst);
        // Hosts register again when they have lost the service.
        for (host, number) in [(h1, 1), (h2, 2)] {
            assert_eq!(both.host(&format!("h{number}"), number, host.incarnation).unwrap(), host);
        }
        let (mut source, mut destination) = (Host::new(&both, h1), Host::new(&both, h2));
        let over = || !both.state().unwrap().migrations.iter().any(|known| known.id == migration);
        let told = settle(&mut source, &mut destination, migration, over);
        let state = both.state().unwrap();
        let found = state.vms.iter().find(|vm| vm.id == id).unwrap();
        let committed = (found.host, found.epoch) == (h2.host, epoch + 1);
        assert!(committed || (found.host, found.epoch) == (h1.host, epoch), "step {step}: {found:?}");
        assert!(!heard || committed, "step {step}: a host was told of a commit that isn't");
        assert!(told.is_none_or(|told| told == committed), "step {step}: told {told:?}");
        ends[usize::from(committed)] += 1;
        let deadline = Instant::now() + Duration::from_secs(10);
        while role(leads).leader != other.address {
            assert!(Instant::now() < deadline, "the first doesn't stand by");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(ends.iter().all(|times| *times >= 2), "{ends:?}");
}
