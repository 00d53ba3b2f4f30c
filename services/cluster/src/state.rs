//! What the service knows: the coordinator's ledger, and other facts of hosts and VMs.
//!
//! [`State::apply`] makes all changes, and keeps the indexes of names, addresses and owners with them.

mod named;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use nomad::coordinator::{Ledger, Record};
use nomad::{HostId, VmId};
use serde::{Deserialize, Serialize};

pub use named::{Hosts, Vms};

/// What is the same on all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Bytes of payload per packet between hosts.
    pub mtu: u32,
    /// UDP sockets per host, on consecutive ports.
    pub sockets: u16,
}

impl Default for Settings {
    fn default() -> Self {
        Self { mtu: 1376, sockets: 2 }
    }
}

impl Settings {
    /// Whether hosts can work so.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(self) -> Result<Self, String> {
        if !(256..=4096).contains(&self.mtu) || !self.mtu.is_multiple_of(4) {
            return Err(format!(
                "An mtu of {} isn't possible: a multiple of 4 from 256 to 4096 is",
                self.mtu
            ));
        }
        if !(1..=16).contains(&self.sockets) {
            return Err(format!("{} sockets per host aren't possible: 1 to 16 are", self.sockets));
        }
        Ok(self)
    }
}

/// A host, besides its incarnation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AboutHost {
    /// Its name.
    pub name: String,
    /// Where its daemon takes packets; port 0: nowhere, since the cluster was asked to forget it.
    pub address: SocketAddr,
}

impl AboutHost {
    /// What is left of a host that is gone for good: its name, so that its number stays its own should it come back.
    #[must_use]
    pub fn forgotten(name: &str) -> Self {
        Self { name: name.to_owned(), address: SocketAddr::from(([0, 0, 0, 0], 0)) }
    }

    /// Whether the cluster was asked to forget it.
    #[must_use]
    pub fn is_forgotten(&self) -> bool {
        self.address.port() == 0
    }
}

/// A NIC of a VM.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Nic {
    /// Which VMs it reaches.
    pub segment: String,
    /// Its addresses.
    pub addresses: BTreeSet<[u8; 16]>,
    /// Its MAC.
    pub mac: Option<[u8; 6]>,
}

/// A VM, besides its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AboutVm {
    /// Its name.
    pub name: String,
    /// Its RDMA NICs.
    pub nics: Vec<Nic>,
}

/// A change of the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The coordinator's.
    Ledger(Record),
    /// New settings for all hosts.
    Settings(Settings),
    /// A host is known, or has another address.
    Host(HostId, AboutHost),
    /// A VM is known, or has other NICs.
    Vm(VmId, AboutVm),
    /// A VM has ended. Its number isn't used again.
    VmForgotten(VmId),
}

/// The state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Counts the changes that requests and timers have made; one write may bring many of them.
    pub revision: u64,
    /// What is the same on all hosts.
    pub settings: Settings,
    /// The coordinator's part.
    pub ledger: Ledger,
    /// Registered hosts: names and addresses.
    pub hosts: Hosts,
    /// Registered VMs: names and NICs.
    pub vms: Vms,
    /// The highest number that a VM has had.
    pub last_vm: u32,
}

impl State {
    /// Makes a change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Ledger(record) => self.ledger.apply(record),
            Change::Settings(settings) => self.settings = *settings,
            Change::Host(host, about) => self.hosts.insert(*host, about.clone()),
            Change::Vm(vm, about) => {
                self.last_vm = self.last_vm.max(vm.0);
                self.vms.insert(*vm, about.clone());
            }
            Change::VmForgotten(vm) => self.vms.remove(*vm),
        }
    }

    /// A host by its name.
    #[must_use]
    pub fn host(&self, name: &str) -> Option<(HostId, &AboutHost)> {
        let host = self.hosts.named(name)?;
        self.hosts.get(&host).map(|about| (host, about))
    }

    /// A VM by its name.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<(VmId, &AboutVm)> {
        let vm = self.vms.named(name)?;
        self.vms.get(&vm).map(|about| (vm, about))
    }

    /// The VM that runs and has an address in a segment.
    #[must_use]
    pub fn owner_of(&self, segment: &str, address: &[u8; 16]) -> Option<VmId> {
        let alive = |vm: &VmId| self.ledger.vms.get(vm).is_some_and(|owner| owner.alive);
        self.vms.at(segment, address).find(alive)
    }

    /// A host's name, or its number where it has none.
    #[must_use]
    pub fn host_name(&self, host: HostId) -> String {
        self.hosts.get(&host).map_or_else(|| host.to_string(), |about| about.name.clone())
    }

    /// A VM's name, or its number where it has none.
    #[must_use]
    pub fn vm_name(&self, vm: VmId) -> String {
        self.vms.get(&vm).map_or_else(|| vm.to_string(), |about| about.name.clone())
    }
}

/// Which hosts and VMs changes concern, as watchers see them.
#[must_use]
pub fn touched(changes: &[Change], state: &State) -> (BTreeSet<HostId>, BTreeSet<VmId>) {
    let (mut hosts, mut vms) = (BTreeSet::new(), BTreeSet::new());
    for change in changes {
        match change {
            Change::Host(host, _) => drop(hosts.insert(*host)),
            Change::Vm(vm, _) | Change::VmForgotten(vm) => drop(vms.insert(*vm)),
            Change::Ledger(record) => match record {
                Record::Host { host, lost, .. } => {
                    hosts.insert(*host);
                    vms.extend(lost.iter().copied());
                }
                Record::Vm { vm, .. } | Record::VmEnded { vm } => drop(vms.insert(*vm)),
                Record::Committed { migration } => {
                    let moved = state.ledger.migrations.get(migration).into_iter();
                    vms.extend(moved.flat_map(|stored| &stored.moves).map(|moved| moved.vm));
                }
                Record::Released { lost, .. }
                | Record::HostSettled { lost, .. }
                | Record::Finished { lost, .. } => vms.extend(lost.iter().copied()),
                Record::Linked { .. }
                | Record::Unlinked { .. }
                | Record::Begun { .. }
                | Record::Aborted { .. } => {}
            },
            Change::Settings(_) => {}
        }
    }
    (hosts, vms)
}
