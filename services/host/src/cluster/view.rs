//! A daemon's view of its cluster: built from the service's events, and kept in a file for a start without the service.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::path::Path;

use control_api::cluster::proto;
use hca::names::Gid;
use serde::{Deserialize, Serialize};

use crate::transport::{TransportKind, VmId};

/// Version of the file format.
const VERSION: u32 = 1;
/// Limit of the file's length, bytes.
const LONGEST_FILE: u64 = 256 << 20;

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Address at which its daemon receives packets (UDP) and messages (TCP).
    pub address: SocketAddr,
    /// Which start of its daemon; 0: not known, in a copy of an older build.
    #[serde(default)]
    pub incarnation: u64,
}

/// A VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Number of its host.
    pub host: u32,
    /// Epoch of its placement.
    pub epoch: u64,
    /// Whether it runs.
    pub alive: bool,
    /// Its addresses, by segment.
    pub addresses: BTreeSet<(String, [u8; 16])>,
}

/// The state from the service, as stored in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Version of the file format.
    version: u32,
    /// This host's number; 0: unknown.
    pub own: u32,
    /// Payload per packet between hosts, bytes.
    pub mtu: u32,
    /// Number of UDP sockets per host.
    pub sockets: u16,
    /// Transports to which VMs are pinned, by the VMs' names; `*`: all others.
    #[serde(default)]
    pub pins: BTreeMap<String, TransportKind>,
    /// Hosts by number.
    pub hosts: BTreeMap<u32, Host>,
    /// VMs by number.
    pub vms: BTreeMap<u32, Vm>,
}

/// The service's state, with indices for look-ups.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// The state from the service.
    pub contents: Contents,
    /// Start of the service, and revision, of the state.
    pub place: (u64, u64),
    owners: HashMap<(String, Gid), VmId>,
    names: HashMap<String, VmId>,
}

impl View {
    /// An empty view with these settings.
    #[must_use]
    pub fn new(own: u32, mtu: u32, sockets: u16) -> Self {
        let contents = Contents { version: VERSION, own, mtu, sockets, ..Contents::default() };
        Self { contents, ..Self::default() }
    }

    /// Loads the copy of an earlier daemon.
    ///
    /// # Errors
    /// When the file doesn't exist or is invalid.
    pub fn load(path: &Path) -> io::Result<Self> {
        let reader = io::BufReader::new(io::Read::take(std::fs::File::open(path)?, LONGEST_FILE));
        let contents: Contents = serde_json::from_reader(reader)?;
        if contents.version != VERSION {
            let text = format!("it has version {}, this program knows {VERSION}", contents.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut view = Self { contents, ..Self::default() };
        view.order();
        Ok(view)
    }

    /// Saves the view. A reader finds the old or the new file, even if this process or the host dies.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        crate::remembered::replace(path, &serde_json::to_vec(&self.contents)?)
    }

    /// Replaces the pins. Returns a sentence for each invalid one.
    pub fn set_pins(&mut self, pins: &[proto::Pin]) -> Vec<String> {
        let mut unknown = Vec::new();
        self.contents.pins.clear();
        for proto::Pin { vm, transport } in pins {
            match TransportKind::named(transport) {
                Some(known) => drop(self.contents.pins.insert(vm.clone(), known)),
                None => unknown.push(format!("VM {vm} to transport {transport}")),
            }
        }
        unknown
    }

    /// The transport that a VM's connections are pinned to.
    #[must_use]
    pub fn pin(&self, vm: VmId) -> Option<TransportKind> {
        let pins = &self.contents.pins;
        if pins.is_empty() {
            return None;
        }
        let name = &self.contents.vms.get(&vm.0)?.name;
        pins.get(name).or_else(|| pins.get("*")).copied()
    }

    /// Applies events, in order. Returns VM states that are older than the known ones, and so were ignored.
    pub fn apply(&mut self, events: impl IntoIterator<Item = proto::WatchEvent>) -> Vec<String> {
        let mut old = Vec::new();
        for event in events {
            self.take(event, &mut old);
        }
        self.order();
        old
    }

    fn take(&mut self, event: proto::WatchEvent, old: &mut Vec<String>) {
        let mut before = BTreeMap::new();
        if event.whole {
            before = std::mem::take(&mut self.contents.vms);
            self.contents.hosts.clear();
        }
        for host in event.hosts {
            // The service validates addresses.
            let Ok(address) = host.fabric_address.parse() else { continue };
            self.contents
                .hosts
                .insert(host.id, Host { name: host.name, address, incarnation: host.incarnation });
        }
        for vm in event.vms {
            let known = before.remove(&vm.id).or_else(|| self.contents.vms.get(&vm.id).cloned());
            let (id, new) = (vm.id, Vm::from(vm));
            // A number that has changed its VM comes from another database.
            match known.filter(|known| known.name == new.name && new.epoch < known.epoch) {
                Some(known) => {
                    old.push(format!(
                        "VM {} in epoch {}, which is in epoch {}",
                        known.name, new.epoch, known.epoch
                    ));
                    self.contents.vms.insert(id, known);
                }
                None => drop(self.contents.vms.insert(id, new)),
            }
        }
        for vm in event.gone {
            self.contents.vms.remove(&vm);
        }
        for host in event.gone_hosts {
            self.contents.hosts.remove(&host);
        }
        self.place = (event.instance, event.revision);
    }

    fn order(&mut self) {
        self.owners.clear();
        self.names.clear();
        for (id, vm) in self.contents.vms.iter().filter(|(_, vm)| vm.alive) {
            for (segment, gid) in &vm.addresses {
                self.owners.insert((segment.clone(), Gid(*gid)), VmId(*id));
            }
            if vm.host == self.contents.own {
                self.names.insert(vm.name.clone(), VmId(*id));
            }
        }
    }

    /// Records that a VM runs on another host.
    pub fn moved(&mut self, vm: VmId, host: u32, epoch: u64) {
        if let Some(found) = self.contents.vms.get_mut(&vm.0) {
            (found.host, found.epoch, found.alive) = (host, epoch, true);
            self.order();
        }
    }

    /// The running VM with an address in a segment.
    #[must_use]
    pub fn owner(&self, segment: &str, gid: Gid) -> Option<VmId> {
        // A look-up per connection, not per packet.
        self.owners.get(&(segment.to_owned(), gid)).copied()
    }

    /// Number of a VM that runs on this host.
    #[must_use]
    pub fn own_vm(&self, name: &str) -> Option<VmId> {
        self.names.get(name).copied()
    }

    /// Address of a running VM's host.
    #[must_use]
    pub fn host(&self, vm: VmId) -> Option<SocketAddr> {
        let vm = self.contents.vms.get(&vm.0).filter(|vm| vm.alive)?;
        Some(self.contents.hosts.get(&vm.host)?.address)
    }

    /// Addresses of all hosts.
    #[must_use]
    pub fn hosts(&self) -> Vec<SocketAddr> {
        self.contents.hosts.values().map(|host| host.address).collect()
    }

    /// Number of running VMs.
    #[must_use]
    pub fn running(&self) -> usize {
        self.contents.vms.values().filter(|vm| vm.alive).count()
    }
}

impl From<proto::Vm> for Vm {
    fn from(vm: proto::Vm) -> Self {
        let of_nic = |nic: proto::Nic| {
            let segment = nic.segment;
            nic.addresses.into_iter().filter_map(move |bytes| Some((segment.clone(), bytes.try_into().ok()?)))
        };
        let addresses = vm.nics.into_iter().flat_map(of_nic).collect();
        Self { name: vm.name, host: vm.host, epoch: vm.epoch, alive: vm.alive, addresses }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(id: u32) -> proto::Host {
        let (name, fabric_address) = (format!("h{id}"), format!("10.0.0.{id}:4792"));
        proto::Host { id, name, fabric_address, incarnation: 1, heard: true }
    }

    fn vm(id: u32, host: u32, epoch: u64) -> proto::Vm {
        let addresses = vec![vec![u8::try_from(id).unwrap(); 16]];
        let nics = vec![proto::Nic { segment: "blue".to_owned(), addresses, mac: None }];
        proto::Vm { id, name: format!("vm{id}"), host, epoch, alive: true, nics }
    }

    fn event(revision: u64, vms: Vec<proto::Vm>, gone: Vec<u32>) -> proto::WatchEvent {
        proto::WatchEvent {
            instance: 7,
            revision,
            whole: false,
            hosts: Vec::new(),
            vms,
            gone,
            gone_hosts: Vec::new(),
        }
    }

    fn view() -> View {
        let mut view = View::new(1, 1376, 2);
        let hosts = vec![host(1), host(2)];
        let whole =
            proto::WatchEvent { whole: true, hosts, ..event(1, vec![vm(1, 1, 1), vm(2, 2, 3)], vec![]) };
        assert!(view.apply([whole]).is_empty());
        view
    }

    #[test]
    fn events_change_where_vms_are() {
        let mut view = view();
        let (one, two) = ("10.0.0.1:4792".parse().ok(), "10.0.0.2:4792".parse().ok());
        assert_eq!((view.host(VmId(1)), view.host(VmId(2))), (one, two));
        assert_eq!((view.own_vm("vm1"), view.own_vm("vm2")), (Some(VmId(1)), None));
        assert_eq!(view.owner("blue", Gid([2; 16])), Some(VmId(2)));
        assert_eq!(view.owner("red", Gid([2; 16])), None);
        // One VM moves here, another ends, and another's host restarts.
        view.apply([event(2, vec![vm(2, 1, 4), vm(3, 2, 1)], vec![1])]);
        assert_eq!((view.host(VmId(2)), view.own_vm("vm2")), (one, Some(VmId(2))));
        assert_eq!((view.host(VmId(1)), view.owner("blue", Gid([1; 16]))), (None, None));
        view.apply([event(3, vec![proto::Vm { alive: false, ..vm(3, 2, 1) }], vec![])]);
        assert_eq!((view.host(VmId(3)), view.owner("blue", Gid([3; 16])), view.running()), (None, None, 1));
        assert_eq!(view.place, (7, 3));
    }

    #[test]
    fn an_older_epoch_is_refused_also_in_a_whole_state() {
        let mut view = view();
        let old = view.apply([event(2, vec![vm(2, 1, 2)], vec![])]);
        assert_eq!(old, ["VM vm2 in epoch 2, which is in epoch 3"]);
        let whole = proto::WatchEvent {
            whole: true,
            hosts: vec![host(1), host(2)],
            ..event(2, vec![vm(2, 1, 2)], vec![])
        };
        assert_eq!(view.apply([whole]).len(), 1);
        // A number that is another VM's comes from another database.
        let other = proto::Vm { name: "other".to_owned(), ..vm(2, 1, 1) };
        let whole =
            proto::WatchEvent { whole: true, hosts: vec![host(1), host(2)], ..event(3, vec![other], vec![]) };
        assert_eq!(view.host(VmId(2)), "10.0.0.2:4792".parse().ok());
        assert_eq!(view.host(VmId(1)), None, "not in the whole state");
        assert!(view.apply([whole]).is_empty());
        assert_eq!(view.own_vm("other"), Some(VmId(2)));
    }

    /// Prints the cost of a change for a daemon of a large cluster.
    #[test]
    #[ignore = "measures; run by hand with --nocapture"]
    fn cost_of_an_event() {
        for count in [100_u32, 1_000, 10_000] {
            let vms = (1..=count).map(|id| proto::Vm {
                nics: vec![proto::Nic {
                    segment: "blue".to_owned(),
                    addresses: vec![
                        u128::from(id).to_be_bytes().to_vec(),
                        u128::from(id | 1 << 31).to_be_bytes().to_vec(),
                    ],
                    mac: None,
                }],
                ..vm(1, 1 + id % 64, 1)
            });
            let vms =
                (1..).zip(vms).map(|(id, vm)| proto::Vm { id, name: format!("vm{id}"), ..vm }).collect();
            let mut view = View::new(1, 1376, 2);
            let hosts = (1..=64).map(host).collect();
            view.apply([proto::WatchEvent { whole: true, hosts, ..event(1, vms, vec![]) }]);
            let mut best = std::time::Duration::MAX;
            for revision in 0..20 {
                let began = std::time::Instant::now();
                let mut new = view.clone();
                new.apply([event(revision, vec![vm(1, 2, 2)], vec![])]);
                view = new;
                best = best.min(began.elapsed());
            }
            println!("{count} VMs: {best:?} per batch of events");
        }
    }

    #[test]
    fn a_file_has_what_was_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.json");
        assert!(View::load(&path).is_err());
        let view = view();
        view.save(&path).unwrap();
        let read = View::load(&path).unwrap();
        assert_eq!(read.contents, view.contents);
        assert_eq!((read.own_vm("vm1"), read.place), (Some(VmId(1)), (0, 0)));
        for text in ["", "{", "{\"version\":9,\"own\":1,\"mtu\":1,\"sockets\":1,\"hosts\":{},\"vms\":{}}"] {
            std::fs::write(&path, text).unwrap();
            assert!(View::load(&path).is_err(), "{text}");
        }
    }
}
