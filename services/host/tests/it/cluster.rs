//! Daemons whose directory is a cluster service: guests reach each other, continue during an outage of the service, and are found at their
//! new hosts.

use crate::common;

use std::path::PathBuf;

use common::cluster::{Cluster, guest, known, transport, wait_to_know};
use common::vm::{Vm, connect};
use common::wait_until;
use control_api::cluster::{Keys, Service, proto};
use control_api::host::HostClient;
use host::{Daemon, DaemonConfig, DirectorySource, FabricConfig};

fn writes(from: &Vm, to: &Vm, first: u64, count: u64) {
    for wr_id in first..first + count {
        from.guest.fill(&from.endpoint.buffer, u8::try_from(wr_id % 251).unwrap());
        assert!(from.write(to, wr_id, 4096));
        assert_eq!(from.poll(wr_id), 0, "write {wr_id}");
        assert_eq!(to.guest.bytes(&to.endpoint.buffer)[..4096], [u8::try_from(wr_id % 251).unwrap(); 4096]);
    }
}

/// New queue pairs of both, connected.
fn connect_anew(a: &mut Vm, b: &mut Vm, uar: u32) {
    a.endpoint = a.guest.endpoint(&a.monitor, uar, 4);
    b.endpoint = b.guest.endpoint(&b.monitor, uar, 4);
    connect(a, b);
}

#[test]
fn guests_of_two_hosts_talk_and_go_on_while_the_service_is_away() {
    let mut cluster = Cluster::new();
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let (mut a, mut b) = (guest(&one, "a", 1), guest(&two, "b", 2));
    // Guests' bindings are the directory's entries, without a file.
    let (of_a, of_b) = (cluster.wait_for("a", 1), cluster.wait_for("b", 2));
    assert_eq!((of_a.epoch, of_b.epoch), (1, 1));
    assert!(of_a.nics[0].addresses.contains(&a.gid.to_vec()));
    wait_to_know(&cluster, &[&one, &two]);
    connect(&a, &b);
    writes(&a, &b, 1, 50);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    // The lower number first; either VM may have registered first.
    let link = proto::Link { vm: of_a.id.min(of_b.id), peer: of_a.id.max(of_b.id) };
    wait_until("the registered list", || cluster.state().links == [link]);
    cluster.stop();
    wait_until("the outage", || known(&one)["connected"] == false && known(&two)["connected"] == false);
    // Existing connections continue, and new ones find the VM in the daemon's view.
    writes(&b, &a, 100, 50);
    connect_anew(&mut a, &mut b, 2);
    writes(&a, &b, 200, 50);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    // A VM that starts meanwhile reaches only its own host, and is registered when the service is back.
    let mut c = guest(&two, "c", 3);
    cluster.resume();
    let of_c = cluster.wait_for("c", 2);
    wait_to_know(&cluster, &[&one, &two]);
    wait_until("the end of the outage", || {
        known(&one)["connected"] == true && known(&two)["connected"] == true
    });
    // No host was restarted: epochs and numbers are as before.
    assert_eq!((cluster.wait_for("a", 1), cluster.wait_for("b", 2)), (of_a, of_b));
    assert_eq!(of_c.id, 3);
    connect_anew(&mut a, &mut c, 3);
    writes(&a, &c, 300, 20);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    // A VM that ends is reported as ended.
    drop(c);
    wait_until("the end of c", || cluster.state().vms.iter().all(|vm| vm.name != "c"));
}

/// The service's pins apply on each host, also during an outage. VMs of one host that are pinned to `fabric` reach each other through their
/// daemon's sockets. A VM that is pinned to a transport which the host lacks isn't connected by another.
#[test]
fn vms_use_the_transport_that_the_service_pins_them_to() {
    let mut cluster = Cluster::pinned(&[("*", "fabric"), ("c", "verbs"), ("d", "verbs")]);
    let one = cluster.daemon(1);
    let (mut a, mut b) = (guest(&one, "a", 1), guest(&one, "b", 2));
    let (c, d) = (guest(&one, "c", 3), guest(&one, "d", 4));
    for name in ["a", "b", "c", "d"] {
        cluster.wait_for(name, 1);
    }
    wait_to_know(&cluster, &[&one]);
    connect(&a, &b);
    writes(&a, &b, 1, 20);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    connect(&c, &d);
    assert!(c.write(&d, 1, 64));
    assert_ne!(c.poll(1), 0, "there is no RDMA device here, and nothing else may carry it");
    let pins = cluster.state().settings.unwrap().pins;
    let shown: Vec<_> = pins.iter().map(|pin| (pin.vm.as_str(), pin.transport.as_str())).collect();
    assert_eq!(shown, [("*", "fabric"), ("c", "verbs"), ("d", "verbs")]);
    cluster.stop();
    connect_anew(&mut a, &mut b, 2);
    writes(&a, &b, 100, 20);
    assert_eq!(transport(&one, &a, "a"), "fabric");
}

#[test]
fn a_daemon_that_is_started_during_an_outage_knows_where_others_are() {
    let mut cluster = Cluster::new();
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let (a, mut b) = (guest(&one, "a", 1), guest(&two, "b", 2));
    let before = cluster.wait_for("a", 1);
    cluster.wait_for("b", 2);
    wait_to_know(&cluster, &[&one, &two]);
    let copy: PathBuf = one.socket().with_extension("d").join("cluster.json");
    wait_until("the copy", || {
        std::fs::read_to_string(&copy).is_ok_and(|text| text.contains("\"name\":\"b\""))
    });
    cluster.stop();
    drop((a, one));
    let one = cluster.daemon(1);
    assert_eq!(known(&one)["connected"], false);
    let mut a = guest(&one, "a", 1);
    connect_anew(&mut a, &mut b, 2);
    writes(&a, &b, 1, 50);
    writes(&b, &a, 100, 50);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    // The service is back and treats the host as restarted; the VM has the same number in the next epoch.
    cluster.resume();
    wait_until("the next epoch", || cluster.wait_for("a", 1).epoch == before.epoch + 1);
    assert_eq!(cluster.wait_for("a", 1).id, before.id);
    wait_to_know(&cluster, &[&one, &two]);
    writes(&a, &b, 200, 50);
    connect_anew(&mut a, &mut b, 3);
    writes(&a, &b, 300, 20);
}

#[test]
fn a_vm_that_is_elsewhere_now_is_found_there_by_new_connections() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = (guest(&daemons[0], "a", 1), guest(&daemons[1], "b", 2));
    cluster.wait_for("a", 1);
    cluster.wait_for("b", 2);
    wait_to_know(&cluster, &[&daemons[0], &daemons[1]]);
    connect(&a, &b);
    writes(&a, &b, 1, 20);
    // While it runs no other VM can have its name: the third host logs that, and its VM isn't reached.
    let impostor = guest(&daemons[2], "b", 2);
    std::thread::sleep(std::time::Duration::from_millis(300));
    cluster.wait_for("b", 2);
    writes(&a, &b, 50, 20);
    drop(impostor);
    drop(b);
    wait_until("the end of b", || cluster.state().vms.iter().all(|vm| vm.name != "b"));
    let mut b = guest(&daemons[2], "b", 2);
    cluster.wait_for("b", 3);
    wait_to_know(&cluster, &[&daemons[0], &daemons[2]]);
    connect_anew(&mut a, &mut b, 2);
    writes(&a, &b, 100, 20);
    let path = format!("vms/a/nics/rdma0/rdma/queue_pairs/{}/connection/host", a.endpoint.qp.0);
    let host = HostClient::new(daemons[0].socket()).inspect(Some(&path)).unwrap();
    assert_eq!(host, format!("127.0.0.3:{}", cluster.port));
}

#[test]
fn a_daemon_without_service_or_copy_or_with_anothers_name_isnt_started() {
    let mut cluster = Cluster::new();
    let one = cluster.daemon(1);
    let _a = guest(&one, "a", 1);
    let a = cluster.wait_for("a", 1);
    // Another host of that name, which is reported.
    let mut config = cluster.config(2);
    if let Some(FabricConfig { directory: DirectorySource::Cluster(cluster), .. }) = &mut config.fabric {
        cluster.name = "h1".to_owned();
    }
    let chain = |config: &DaemonConfig| {
        let error = Daemon::start(config).map(drop).unwrap_err();
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text += &format!(": {cause}");
            source = cause.source();
        }
        text
    };
    let text = chain(&config);
    assert!(text.contains("refuses this host") && text.contains("give this one another --name"), "{text}");
    // A second daemon with the first one's name and address, by mistake, doesn't disturb the first one's registrations.
    let again = DaemonConfig { socket: cluster.folder.path().join("again.sock"), ..cluster.config(1) };
    let text = chain(&again);
    assert!(text.contains(&format!("127.0.0.1:{}", cluster.port)), "{text}");
    assert_eq!(cluster.wait_for("a", 1), a);
    // If a client registers the host as restarted all the same, the host returns as restarted, and its VM in the next epoch.
    let request = proto::RegisterHostRequest {
        name: "h1".to_owned(),
        fabric_address: format!("127.0.0.1:{}", cluster.port),
        incarnation: 0,
    };
    cluster.service.ask("RegisterHost", async |client| client.register_host(request).await).unwrap();
    wait_until("the next epoch", || cluster.wait_for("a", 1).epoch == a.epoch + 1);
    assert_eq!(cluster.state().hosts[0].incarnation, 3);
    cluster.stop();
    let text = chain(&cluster.config(2));
    assert!(
        text.contains("no copy of the directory") && text.contains("No cluster service answers"),
        "{text}"
    );
}

/// Keys for the service and for hosts, made for this test.
fn keys() -> Keys {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    Keys {
        authority: authority.pem().into_bytes(),
        certificate: certificate.pem().into_bytes(),
        key: key.serialize_pem().into_bytes(),
    }
}

/// The sandbox permits TLS each time that the service is back.
#[test]
fn daemons_with_keys_speak_with_a_service_that_has_some_and_others_are_not_answered() {
    let mut cluster = Cluster::with(Some(keys()));
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let (a, b) = (guest(&one, "a", 1), guest(&two, "b", 2));
    cluster.wait_for("a", 1);
    cluster.wait_for("b", 2);
    wait_to_know(&cluster, &[&one, &two]);
    connect(&a, &b);
    writes(&a, &b, 1, 20);
    assert_eq!(transport(&one, &a, "a"), "fabric");
    cluster.stop();
    wait_until("the outage", || known(&one)["connected"] == false);
    cluster.resume();
    wait_until("the end of the outage", || known(&one)["connected"] == true);
    writes(&a, &b, 50, 20);
    let mut config = cluster.config(3);
    if let Some(FabricConfig { directory: DirectorySource::Cluster(config), .. }) = &mut config.fabric {
        config.service = Service::new(&cluster.address.to_string(), None).unwrap();
    }
    assert!(Daemon::start(&config).is_err());
    assert_eq!(cluster.state().hosts.len(), 2);
}
