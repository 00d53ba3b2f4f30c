//! Waiting monitors are found by the names of their hosts as long as they wait, also after an outage of the service.

use crate::common;

use std::net::SocketAddr;

use common::cluster::Cluster;
use common::wait_until;
use control_api::host::HostClient;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn a_monitor_that_waits_is_found_by_its_hosts_name() {
    let mut cluster = Cluster::new();
    let (one, two) = (cluster.daemon(1), cluster.daemon(2));
    let [h1, h2] = [&one, &two].map(|daemon| HostClient::new(daemon.socket()));
    let waits = h2.await_vm("a", at("0.0.0.0:7100")).unwrap();
    // The service gets the address that other daemons use, for any address of the host.
    assert_eq!((waits.host.as_str(), waits.address.as_str()), ("h2", "127.0.0.2:7100"));
    let other = h2.await_vm("b", at("127.0.0.9:7200")).unwrap();
    assert_eq!(h1.find_waiting("a", "h2").unwrap(), "127.0.0.2:7100");
    assert_eq!(h2.find_waiting("b", "h2").unwrap(), "127.0.0.9:7200");
    let refused = |vm: &str, host: &str| h1.find_waiting(vm, host).unwrap_err().to_string();
    assert!(refused("a", "h1").starts_with("No monitor waits on host h1 for VM a: start one there"));
    assert_eq!(refused("a", "h9"), "The cluster has no host h9; its hosts are: h1, h2");
    let again = h2.await_vm("a", at("0.0.0.0:7300")).unwrap_err().to_string();
    assert_eq!(again, "A monitor waits here for VM a already, at 127.0.0.2:7100");
    assert!(h2.await_vm("../x", at("0.0.0.0:7300")).unwrap_err().to_string().contains("not a VM's name"));
    assert!(h2.await_vm("c", at("10.0.0.1:0")).unwrap_err().to_string().contains("has no port"));

    // A restarted service has lost it, and is notified again.
    cluster.stop();
    cluster.resume();
    wait_until("the monitor to be known again", || h1.find_waiting("a", "h2").is_ok());

    // An arrived VM isn't waited for.
    drop(waits);
    wait_until("the monitor to be forgotten", || {
        h1.find_waiting("a", "h2").is_err_and(|error| error.to_string().starts_with("No monitor waits"))
    });
    assert_eq!(h1.find_waiting("b", "h2").unwrap(), "127.0.0.9:7200");
    drop(other);
    wait_until("the place to be free", || h2.await_vm("b", at("0.0.0.0:7200")).is_ok());
}

/// A daemon without a cluster has no names of hosts.
#[test]
fn without_a_cluster_there_are_only_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = common::start(host::DaemonConfig::new(folder.path().join("host.sock")));
    let client = HostClient::new(daemon.socket());
    for error in [
        client.await_vm("a", at("0.0.0.0:7100")).map(drop).unwrap_err(),
        client.find_waiting("a", "h2").map(drop).unwrap_err(),
    ] {
        assert!(error.to_string().contains("has no cluster service, so hosts have no names"), "{error}");
    }
}
