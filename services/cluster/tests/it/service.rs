//! A service with several clients over loopback: what it accepts, what it refuses, and what watchers receive.

use crate::common;
use crate::common::moving;

use std::time::Duration;

use common::{Says as _, refused, start, start_with, wait_until};
use control_api::cluster::Service;
use control_api::cluster::proto::{self, Speaker, lookup_request::What};
use moving::{Host, envelope, moves};
use nomad::{Body, HostId, MigrationId};

fn lookup(service: &Service, what: What) -> Result<proto::LookupReply, control_api::cluster::ClusterError> {
    let request = proto::LookupRequest { what: Some(what) };
    service.ask("Lookup", async |client| client.lookup(request).await)
}

fn at(address: u8) -> What {
    What::Address(proto::Address { segment: "blue".to_owned(), gid: common::gid(address) })
}

#[test]
fn vms_are_found_by_number_name_and_address() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let (h1, h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    assert_eq!((h1.host, h1.incarnation, h2.host), (1, 1, 2));
    let (a, b) = (service.vm(h1, "a", 0, 1).unwrap(), service.vm(h2, "b", 0, 2).unwrap());
    assert_eq!((a, b), ((1, 1), (2, 1)));
    for what in [What::Id(2), What::Name("b".to_owned()), at(2)] {
        let found = lookup(&service, what).unwrap();
        let (vm, host) = (found.vm.unwrap(), found.host.unwrap());
        assert_eq!((vm.id, vm.name.as_str(), vm.epoch, vm.alive), (2, "b", 1, true));
        assert_eq!((host.name.as_str(), host.fabric_address.as_str()), ("h2", "10.77.0.2:4792"));
    }
    refused(lookup(&service, What::Id(9)), "no VM 9");
    refused(lookup(&service, at(9)), "10.0.0.9");
    // A repeated registration is idempotent; it replaces the VM's addresses.
    assert_eq!(service.vm(h2, "b", 1, 3).unwrap(), b);
    refused(lookup(&service, at(2)), "has no VM");
    assert_eq!(lookup(&service, at(3)).unwrap().vm.unwrap().id, 2);
    // An address of another VM stays with that VM.
    assert_eq!(service.vm(h2, "b", 1, 1).unwrap(), b);
    assert_eq!(lookup(&service, at(1)).unwrap().vm.unwrap().id, 1);
    // A VM's number is never reused, and its addresses are free when it has ended.
    service.end(h1, 1, 1).unwrap();
    assert_eq!(service.vm(h1, "a", 0, 4).unwrap(), (3, 1));
    assert_eq!(service.vm(h2, "b", 1, 1).unwrap(), b);
    assert_eq!(lookup(&service, at(1)).unwrap().vm.unwrap().id, 2);
}

#[test]
fn what_is_older_than_what_is_known_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let (h1, h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    service.vm(h1, "a", 0, 1).unwrap();
    refused(service.vm(h2, "a", 0, 1), "VM a can't be started on host h2: it runs on host h1");
    // The host's daemon restarts: its VMs are lost, and requests of its earlier incarnation are refused.
    let again = service.host("h1", 1, 0).unwrap();
    assert_eq!((again.host, again.incarnation), (1, 2));
    refused(service.heartbeat(h1), "Host h1 was started again since (start 2): what its start 1 says");
    refused(service.vm(h1, "a", 1, 1), "start 1");
    refused(service.host("h1", 1, 1), "start 1");
    assert!(!service.state().unwrap().vms[0].alive);
    // The VM returns in the next epoch; requests of the previous one are refused.
    assert_eq!(service.vm(again, "a", 0, 1).unwrap(), (1, 2));
    refused(
        service.vm(again, "a", 1, 1),
        "VM a is in epoch 2 on host h1: a message of epoch 1 means nothing",
    );
    refused(service.end(again, 1, 1), "epoch 1");
    refused(service.vm(h2, "a", 2, 1), "isn't host h2's in epoch 2, but host h1's");
    refused(service.vm(again, "a", 7, 1), "an old copy");
    // A daemon that lost the service without restarting keeps its incarnation.
    assert_eq!(service.host("h1", 1, 2).unwrap(), again);
    assert_eq!(service.vm(again, "a", 2, 1).unwrap(), (1, 2));
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let h1 = service.host("h1", 1, 0).unwrap();
    refused(service.host("h/1", 3, 0), "\"h/1\" is not a host's name");
    refused(service.host("h3", 1, 0), "10.77.0.1:4792 is host h1's");
    refused(service.host("h1", 3, 0), "give this one another --name");
    refused(service.host("h3", 3, 0).and_then(|h3| service.vm(h3, "../x", 0, 1)), "is not a VM's name");
    refused(service.heartbeat(Speaker { host: 9, incarnation: 1 }), "There is no host 9: register first");
    refused(service.end(h1, 9, 1), "The cluster has no VM 9");
    refused(service.migrate("x", "h1"), "The cluster has no VM x");
    service.vm(h1, "b", 0, 7).unwrap();
    refused(service.migrate("b", "h9"), "can't move to h9: no such host");
    let asked = |request: proto::RegisterHostRequest| {
        service.ask("RegisterHost", async |client| client.register_host(request).await)
    };
    let request = |address: &str| proto::RegisterHostRequest {
        name: "h4".to_owned(),
        fabric_address: address.to_owned(),
        incarnation: 0,
    };
    refused(asked(request("elsewhere")), "\"elsewhere\" is no IP address with a port");
    refused(asked(request("0.0.0.0:4792")), "no address at which host h4 can be reached");
    let nic = |addresses, mac| proto::Nic { segment: "blue".to_owned(), addresses, mac };
    for (nics, said) in [
        (vec![nic(vec![vec![1; 15]], None)], "16 bytes, not 15"),
        (vec![nic(vec![], Some(vec![1; 7]))], "6 bytes, not 7"),
        (vec![nic(vec![], None); 17], "17 NICs"),
        (vec![nic((0..200).map(|n| vec![n; 16]).collect(), None)], "129 addresses"),
        (vec![proto::Nic { segment: "..".to_owned(), ..nic(vec![], None) }], "segment's name"),
    ] {
        let request = proto::RegisterVmRequest { speaker: Some(h1), name: "a".to_owned(), epoch: 0, nics };
        refused(service.ask("RegisterVm", async |client| client.register_vm(request).await), said);
    }
    refused(lookup(&service, What::Name("\u{1b}[2J".to_owned())), "\\u{1b}[2J");
}

#[test]
fn a_host_that_is_silent_is_shown_so_and_keeps_its_vms() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start_with(folder.path(), |config| config.lease = Duration::from_millis(300));
    let (h1, _h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    service.vm(h1, "a", 0, 1).unwrap();
    let heard = || service.state().unwrap().hosts.iter().map(|host| host.heard).collect::<Vec<_>>();
    // h1 renews its lease, h2 doesn't.
    wait_until("the end of h2's lease", || {
        service.heartbeat(h1).unwrap();
        heard() == [true, false]
    });
    refused(service.migrate("a", "h2"), "can't move to host h2: that isn't heard of");
    wait_until("the end of h1's lease", || heard() == [false, false]);
    // The VM may still run there: no other host gets it.
    assert!(service.state().unwrap().vms[0].alive);
    let h2 = service.host("h2", 2, 0).unwrap();
    refused(service.vm(h2, "a", 0, 1), "it runs on host h1");
    // A host at another address may take over the name of a host whose lease has expired.
    wait_until("the end of h1's lease", || service.host("h1", 9, 0).is_ok());
    assert!(!service.state().unwrap().vms[0].alive);
    assert_eq!(service.vm(h2, "a", 0, 1).unwrap(), (1, 2));
}

/// A watcher, as a host's daemon has one.
struct Watcher {
    runtime: tokio::runtime::Runtime,
    stream: tonic::Streaming<proto::WatchEvent>,
}

impl Watcher {
    fn new(service: &Service, instance: u64, revision: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stream = runtime.block_on(async {
            let mut client = service.connect().await.unwrap();
            client.watch(proto::WatchRequest { instance, revision }).await.unwrap().into_inner()
        });
        Self { runtime, stream }
    }

    fn next(&mut self) -> proto::WatchEvent {
        let next = async { tokio::time::timeout(Duration::from_secs(10), self.stream.message()).await };
        self.runtime.block_on(next).unwrap().unwrap().unwrap()
    }
}

#[test]
fn watchers_see_each_change_and_those_who_lost_their_place_get_all_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (server, service) = start(folder.path());
    let h1 = service.host("h1", 1, 0).unwrap();
    let mut watcher = Watcher::new(&service, 0, 0);
    let whole = watcher.next();
    assert_eq!((whole.whole, whole.hosts.len(), whole.vms.len()), (true, 1, 0));
    service.vm(h1, "a", 0, 1).unwrap();
    let event = watcher.next();
    assert_eq!((event.whole, event.revision), (false, whole.revision + 1));
    assert_eq!((event.vms[0].name.as_str(), event.vms[0].nics[0].addresses[0].len()), ("a", 16));
    // Disconnected during three changes, two of which watchers receive.
    drop(watcher);
    service.vm(h1, "b", 0, 2).unwrap();
    service.links(h1, &[(1, 2)]).unwrap();
    service.end(h1, 1, 1).unwrap();
    let mut watcher = Watcher::new(&service, event.instance, event.revision);
    let (mut seen, mut gone, mut last) = (Vec::new(), Vec::new(), 0);
    while gone.is_empty() {
        let event = watcher.next();
        assert!(!event.whole && event.revision > last);
        last = event.revision;
        seen.extend(event.vms.into_iter().map(|vm| vm.name));
        gone.extend(event.gone);
    }
    assert_eq!((seen, gone), (vec!["b".to_owned()], vec![1]));
    // An unknown revision, and a restarted service: the watcher receives the whole state.
    assert!(Watcher::new(&service, event.instance, last + 1000).next().whole);
    drop((watcher, server));
    let (_server, service) = start(folder.path());
    let whole = Watcher::new(&service, event.instance, last).next();
    assert!(whole.whole && whole.instance != event.instance && whole.revision >= last);
    assert_eq!(whole.vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn connections_are_on_the_list_while_one_end_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (server, service) = start(folder.path());
    let (h1, h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    for (host, name, address) in [(h1, "a", 1), (h2, "b", 2), (h2, "c", 3)] {
        service.vm(host, name, 0, address).unwrap();
    }
    let shown = |service: &Service| {
        let links = service.state().unwrap().links;
        links.iter().map(|link| (link.vm, link.peer)).collect::<Vec<_>>()
    };
    // The list also has a link of a VM of another host, and one to an unknown VM: the service ignores them.
    service.links(h1, &[(1, 2), (2, 3), (1, 9)]).unwrap();
    assert_eq!(shown(&service), [(1, 2)]);
    service.links(h2, &[(2, 1), (3, 1)]).unwrap();
    assert_eq!(shown(&service), [(1, 2), (1, 3)]);
    // One end has closed the connection, the other hasn't yet.
    service.links(h1, &[]).unwrap();
    assert_eq!(shown(&service), [(1, 2), (1, 3)]);
    service.links(h2, &[(3, 1)]).unwrap();
    assert_eq!(shown(&service), [(1, 3)]);
    // After a restart of the service the links stay until both hosts have reported.
    drop(server);
    let (_server, service) = start(folder.path());
    assert_eq!(shown(&service), [(1, 3)]);
    service.links(h1, &[]).unwrap();
    assert_eq!(shown(&service), [(1, 3)]);
    service.links(h2, &[]).unwrap();
    assert_eq!(shown(&service), []);
    // A VM's links end with it.
    service.links(h1, &[(1, 2)]).unwrap();
    service.end(h1, 1, 1).unwrap();
    assert_eq!(shown(&service), []);
}

#[test]
fn the_coordinator_moves_vms_and_watchers_see_them_at_their_new_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let (h1, h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    service.vm(h1, "a", 0, 1).unwrap();
    service.vm(h1, "b", 0, 2).unwrap();
    // A host that doesn't take part in migrations could neither move the VM nor receive the decision.
    refused(service.migrate("a", "h2"), "VM a can't move: host h1 doesn't take part in migrations");
    let (mut one, mut two) = (Host::new(&service, h1), Host::new(&service, h2));
    let mut watcher = Watcher::new(&service, 0, 0);
    assert!(watcher.next().whole);
    let migration = service.migrate("a", "h2").unwrap();
    let shown = &service.state().unwrap().migrations[0];
    assert_eq!((shown.id, shown.moves[0].to, shown.decision.as_str()), (migration, 2, ""));
    refused(service.migrate("a", "h2"), "VM a can't be changed now: migration 1 isn't over");
    refused(service.end(h1, 1, 1), "isn't over");
    moves(&mut one, &mut two, migration);
    let event = watcher.next();
    assert_eq!((event.vms[0].id, event.vms[0].host, event.vms[0].epoch), (1, 2, 2));
    wait_until("the end of the migration", || service.state().unwrap().migrations.is_empty());
    // The former host's requests have an old epoch.
    refused(service.vm(h1, "a", 1, 1), "VM a is in epoch 2 on host h2: a message of epoch 1 means nothing");
    refused(service.end(h1, 1, 1), "epoch 1");
    assert_eq!(service.vm(h2, "a", 2, 1).unwrap(), (1, 2));
    // A cancelled migration: the VM stays.
    let migration = service.migrate("b", "h2").unwrap();
    let cancel = proto::CancelMigrationRequest { migration, vm: String::new() };
    service.ask("CancelMigration", async |client| client.cancel_migration(cancel).await).unwrap();
    for host in [&mut one, &mut two] {
        let migration = MigrationId(migration);
        host.until(|body| matches!(body, Body::Abort { migration: of, .. } if *of == migration));
        host.say(Body::Settled { migration, lost: Vec::new() });
    }
    wait_until("the end of the migration", || service.state().unwrap().migrations.is_empty());
    assert_eq!(service.state().unwrap().vms[1].host, 1);
}

/// Only the daemon of a VM's host requests its move: in a migration of another caller no monitor would take part. A
/// client of an older release, with a named group, is refused with the command to use.
#[test]
fn a_move_is_for_the_vms_daemon_to_ask_for() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let (h1, h2) = (service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap());
    service.vm(h1, "a", 0, 1).unwrap();
    let (_one, _two) = (Host::new(&service, h1), Host::new(&service, h2));
    let wish = || proto::Wish { vm: "a".to_owned(), host: "h2".to_owned() };
    let ask = |wishes: Vec<proto::Wish>, speaker: Option<Speaker>| {
        let request = proto::MigrateRequest { wishes, speaker, ..Default::default() };
        service.ask("Migrate", async |client| client.migrate(request.clone()).await)
    };
    refused(ask(vec![wish()], None), "Migrate of VM a doesn't say which host asks");
    refused(ask(vec![wish()], Some(h2)), "VM a can't move by a request of host h2: it runs on host h1");
    let older = Speaker { incarnation: 0, ..h1 };
    refused(ask(vec![wish()], Some(older)), "start 0");
    // A named group of an older client arrives as a request without VMs; a request may not have several either.
    refused(ask(Vec::new(), Some(h1)), "Migrate moves one VM");
    refused(ask(vec![wish(), wish()], Some(h1)), "and not 2");
    let group = service.ask("SetGroup", async |client| client.set_group(proto::SetGroupRequest {}).await);
    refused(group, "SetGroup is gone");
    assert!(service.state().unwrap().migrations.is_empty());
    ask(vec![wish()], Some(h1)).unwrap();
}

#[test]
fn a_strangers_messages_of_the_protocol_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let h1 = service.host("h1", 1, 0).unwrap();
    let coordinate = |first: proto::Envelope| {
        service.ask("Coordinate", async |client| {
            client.coordinate(tonic::codegen::tokio_stream::once(first)).await
        })
    };
    refused(coordinate(proto::Envelope { message: vec![1, 2, 3] }).map(drop), "migration protocol is wrong");
    refused(coordinate(envelope(HostId(7), 1, Body::Hello)).map(drop), "no host 7");
    service.host("h1", 1, 0).unwrap();
    refused(coordinate(envelope(HostId(h1.host), 1, Body::Hello)).map(drop), "start 1");
    assert_eq!(service.state().unwrap().hosts.len(), 1);
}

/// Measures the latency of requests. Each change includes a sync of the disk that has the temporary folder.
#[test]
#[ignore = "measures; run by hand with --nocapture"]
fn cost_of_a_change() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, service) = start(folder.path());
    let host = service.host("h1", 1, 0).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut client = runtime.block_on(service.connect()).unwrap();
    let mut registered = 0_u32;
    for upto in [100_u32, 1_000, 5_000] {
        let mut times: Vec<Duration> = Vec::new();
        while registered < upto {
            registered += 1;
            let addresses = vec![u128::from(registered).to_be_bytes().to_vec()];
            let request = proto::RegisterVmRequest {
                speaker: Some(host),
                name: format!("vm{registered}"),
                epoch: 0,
                nics: vec![proto::Nic { segment: "blue".to_owned(), addresses, mac: None }],
            };
            let began = std::time::Instant::now();
            runtime.block_on(client.register_vm(request)).unwrap();
            times.push(began.elapsed());
        }
        let last = &mut times[..];
        let tail = last.len().saturating_sub(100);
        let last = &mut last[tail..];
        last.sort_unstable();
        println!("{upto} VMs: register {:?} (median of the last 100)", last[last.len() / 2]);
        let mut times: Vec<Duration> = (0..200)
            .map(|_| {
                let request = proto::HeartbeatRequest { speaker: Some(host), waiting: Vec::new() };
                let began = std::time::Instant::now();
                runtime.block_on(client.heartbeat(request)).unwrap();
                began.elapsed()
            })
            .collect();
        times.sort_unstable();
        println!("{upto} VMs: heartbeat {:?} (median of 200)", times[100]);
    }
}

#[test]
fn metrics_are_served() {
    use std::io::{Read as _, Write as _};
    let folder = tempfile::tempdir().unwrap();
    let (server, service) =
        start_with(folder.path(), |config| config.metrics = Some("127.0.0.1:0".parse().unwrap()));
    let h1 = service.host("h1", 1, 0).unwrap();
    service.vm(h1, "a", 0, 1).unwrap();
    let mut stream = std::net::TcpStream::connect(server.metrics().unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    for line in
        ["causeway_cluster_vms 1", "causeway_cluster_host_heard{host=\"h1\"} 1", "causeway_cluster_hosts 1"]
    {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}
