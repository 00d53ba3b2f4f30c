//! A service of this process over loopback, and what its clients say.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

pub mod changes;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod moving;

use std::path::Path;
use std::time::{Duration, Instant};

use cluster::{Server, ServerConfig};
use control_api::cluster::proto::{self, Speaker};
use control_api::cluster::{ClusterError, Service};

/// A service with its database in `folder`.
pub fn start(folder: &Path) -> (Server, Service) {
    start_with(folder, |_| {})
}

pub fn start_with(folder: &Path, change: impl FnOnce(&mut ServerConfig)) -> (Server, Service) {
    let mut config = ServerConfig::new("127.0.0.1:0".parse().unwrap(), folder.join("cluster.redb"));
    change(&mut config);
    let server = Server::start(&config).unwrap();
    let service = Service::new(&server.address().to_string(), None).unwrap();
    (server, service)
}

/// What hosts and users say, in short.
pub trait Says {
    fn host(&self, name: &str, number: u8, incarnation: u64) -> Result<Speaker, ClusterError>;
    fn heartbeat(&self, speaker: Speaker) -> Result<(), ClusterError>;
    fn vm(&self, speaker: Speaker, name: &str, epoch: u64, address: u8) -> Result<(u32, u64), ClusterError>;
    fn end(&self, speaker: Speaker, vm: u32, epoch: u64) -> Result<(), ClusterError>;
    fn links(&self, speaker: Speaker, links: &[(u32, u32)]) -> Result<(), ClusterError>;
    fn migrate(&self, vm: &str, host: &str) -> Result<u64, ClusterError>;
    fn cancel(&self, migration: u64) -> Result<(), ClusterError>;
}

pub fn gid(last: u8) -> Vec<u8> {
    let mut gid = vec![0; 16];
    gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, last]);
    gid
}

pub fn nic(address: u8) -> proto::Nic {
    proto::Nic { segment: "blue".to_owned(), addresses: vec![gid(address)], mac: None }
}

impl Says for Service {
    fn host(&self, name: &str, number: u8, incarnation: u64) -> Result<Speaker, ClusterError> {
        let (name, fabric_address) = (name.to_owned(), format!("10.77.0.{number}:4792"));
        let request = proto::RegisterHostRequest { name, fabric_address, incarnation };
        let reply = self.ask("RegisterHost", async |client| client.register_host(request).await)?;
        Ok(reply.speaker.unwrap())
    }

    fn heartbeat(&self, speaker: Speaker) -> Result<(), ClusterError> {
        let request = proto::HeartbeatRequest { speaker: Some(speaker), waiting: Vec::new() };
        self.ask("Heartbeat", async |client| client.heartbeat(request).await).map(drop)
    }

    fn vm(&self, speaker: Speaker, name: &str, epoch: u64, address: u8) -> Result<(u32, u64), ClusterError> {
        let (speaker, name) = (Some(speaker), name.to_owned());
        let request = proto::RegisterVmRequest { speaker, name, epoch, nics: vec![nic(address)] };
        let reply = self.ask("RegisterVm", async |client| client.register_vm(request).await)?;
        Ok((reply.vm, reply.epoch))
    }

    fn end(&self, speaker: Speaker, vm: u32, epoch: u64) -> Result<(), ClusterError> {
        let request = proto::EndVmRequest { speaker: Some(speaker), vm, epoch };
        self.ask("EndVm", async |client| client.end_vm(request).await).map(drop)
    }

    fn links(&self, speaker: Speaker, links: &[(u32, u32)]) -> Result<(), ClusterError> {
        let links = links.iter().map(|(vm, peer)| proto::Link { vm: *vm, peer: *peer }).collect();
        let request = proto::ReportLinksRequest { speaker: Some(speaker), links };
        self.ask("ReportLinks", async |client| client.report_links(request).await).map(drop)
    }

    /// The VM's daemon asks; of a VM that isn't there, the first host's.
    fn migrate(&self, vm: &str, host: &str) -> Result<u64, ClusterError> {
        let state = self.state()?;
        let at = state.vms.iter().find(|found| found.name == vm).map_or(1, |found| found.host);
        let own = state.hosts.iter().find(|found| found.id == at);
        let speaker = own.map(|host| Speaker { host: host.id, incarnation: host.incarnation });
        let wishes = vec![proto::Wish { vm: vm.to_owned(), host: host.to_owned() }];
        let request = proto::MigrateRequest { wishes, speaker, ..Default::default() };
        Ok(self.ask("Migrate", async |client| client.migrate(request).await)?.migration)
    }

    fn cancel(&self, migration: u64) -> Result<(), ClusterError> {
        let request = proto::CancelMigrationRequest { migration, ..Default::default() };
        self.ask("CancelMigration", async |client| client.cancel_migration(request.clone()).await).map(drop)
    }
}

pub fn refused<T: std::fmt::Debug>(result: Result<T, ClusterError>, said: &str) {
    let error = result.unwrap_err();
    assert!(error.is_refusal(), "{error:?}");
    assert!(error.to_string().contains(said), "{error} doesn't say {said:?}");
}

/// Waits up to ten seconds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
