//! A cluster service and daemons that use it.

use std::net::SocketAddr;
use std::path::Path;

use cluster::{Server, ServerConfig};
use control_api::cluster::{Keys, Service, proto};
use control_api::host::HostClient;
use host::cluster::ClusterConfig;
use host::{Daemon, DaemonConfig, DirectorySource, FabricConfig};

use super::vm::{Vm, vm};
use super::wait_until;

/// A service, and hosts that use it.
pub struct Cluster {
    pub folder: tempfile::TempDir,
    pub server: Option<Server>,
    pub address: SocketAddr,
    pub service: Service,
    pub port: u16,
    pub keys: Option<Keys>,
}

impl Cluster {
    pub fn new() -> Self {
        Self::with(None)
    }

    pub fn with(keys: Option<Keys>) -> Self {
        Self::made(|config| config.keys = keys)
    }

    /// A cluster whose service pins VMs to transports.
    pub fn pinned(pins: &[(&str, &str)]) -> Self {
        let own = |(vm, transport): &(&str, &str)| ((*vm).to_owned(), (*transport).to_owned());
        Self::made(|config| config.pins = pins.iter().map(own).collect())
    }

    fn made(change: impl FnOnce(&mut ServerConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(folder.path(), "127.0.0.1:0".parse().unwrap());
        change(&mut config);
        let keys = config.keys.clone();
        let server = Server::start(&config).unwrap();
        let address = server.address();
        let service = Service::new(&address.to_string(), keys.clone()).unwrap();
        let port = facilities::ports::free(1);
        Self { folder, server: Some(server), address, service, port, keys }
    }

    pub fn config(&self, number: u8) -> DaemonConfig {
        let mut config = DaemonConfig::new(self.folder.path().join(format!("h{number}/host.sock")));
        let service = self.service.clone();
        config.fabric = Some(FabricConfig {
            directory: DirectorySource::Cluster(ClusterConfig { service, name: format!("h{number}") }),
            address: format!("127.0.0.{number}:{}", self.port).parse().unwrap(),
            cluster_key: None,
            verbs: false,
        });
        config
    }

    /// A daemon in its sandbox.
    pub fn daemon(&self, number: u8) -> Daemon {
        super::start(self.config(number))
    }

    pub fn stop(&mut self) {
        drop(self.server.take());
    }

    /// Restarts the service with the same file and address.
    pub fn resume(&mut self) {
        let mut config = config(self.folder.path(), self.address);
        config.keys = self.keys.clone();
        self.server = Some(Server::start(&config).unwrap());
    }

    pub fn state(&self) -> proto::State {
        self.service.state().unwrap()
    }

    /// Waits until a VM runs with an address on a host.
    pub fn wait_for(&self, name: &str, host: u32) -> proto::Vm {
        let mut found = None;
        wait_until(&format!("VM {name} on host {host}"), || {
            let vms = self.state().vms;
            let runs = |vm: &proto::Vm| {
                vm.name == name
                    && vm.alive
                    && vm.host == host
                    && vm.nics.iter().any(|nic| !nic.addresses.is_empty())
            };
            found = vms.into_iter().find(runs);
            found.is_some()
        });
        found.unwrap()
    }
}

fn config(folder: &Path, listen: SocketAddr) -> ServerConfig {
    let mut config = ServerConfig::new(listen, folder.join("cluster.redb"));
    (config.mtu, config.sockets) = (Some(1376), Some(1));
    config.switch_limit = std::time::Duration::from_secs(8);
    config
}

pub fn guest(daemon: &Daemon, name: &str, last: u8) -> Vm {
    let mut vm = vm(daemon.socket(), name, last, true);
    // A quarter of a second: a busy machine may take longer than a millisecond.
    vm.guest.timeout = 16;
    vm
}

pub fn known(daemon: &Daemon) -> serde_json::Value {
    HostClient::new(daemon.socket()).inspect(Some("daemon/cluster")).unwrap()
}

/// Waits until the daemons have the service's state: not every transaction causes an event.
pub fn wait_to_know(cluster: &Cluster, daemons: &[&Daemon]) {
    let revision = cluster.state().shown_revision;
    for daemon in daemons {
        wait_until("the daemon's view", || known(daemon)["revision"].as_u64().unwrap() >= revision);
    }
}

/// The remote path from a daemon to the peer of a VM's newest queue pair.
pub fn transport(daemon: &Daemon, vm: &Vm, name: &str) -> serde_json::Value {
    let path = format!("vms/{name}/nics/rdma0/rdma/queue_pairs/{}", vm.endpoint.qp.0);
    HostClient::new(daemon.socket()).inspect(Some(&path)).unwrap()["transport"].clone()
}
