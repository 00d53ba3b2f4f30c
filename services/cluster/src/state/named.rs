//! Hosts and VMs by number, each with the indexes that look-ups need. A collection changes its indexes with its content: nothing else can.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Deref;

use nomad::{HostId, VmId};

use super::{AboutHost, AboutVm};

/// Hosts, found by name and address without a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts {
    all: BTreeMap<HostId, AboutHost>,
    by_name: BTreeMap<String, BTreeSet<HostId>>,
    by_address: BTreeMap<SocketAddr, BTreeSet<HostId>>,
}

impl Hosts {
    /// Adds a host, or replaces what is known of it.
    pub fn insert(&mut self, host: HostId, about: AboutHost) {
        if let Some(before) = self.all.remove(&host) {
            remove(&mut self.by_name, &before.name, host);
            remove(&mut self.by_address, &before.address, host);
        }
        self.by_name.entry(about.name.clone()).or_default().insert(host);
        self.by_address.entry(about.address).or_default().insert(host);
        self.all.insert(host, about);
    }

    /// Returns the host with a name; the lowest number if a damaged state has several.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<HostId> {
        self.by_name.get(name)?.first().copied()
    }

    /// Returns the hosts at an address.
    pub fn at(&self, address: SocketAddr) -> impl Iterator<Item = HostId> {
        self.by_address.get(&address).into_iter().flatten().copied()
    }
}

impl Deref for Hosts {
    type Target = BTreeMap<HostId, AboutHost>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

/// VMs, found by name and address without a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vms {
    all: BTreeMap<VmId, AboutVm>,
    by_name: BTreeMap<String, BTreeSet<VmId>>,
    /// By segment, then by address.
    by_address: BTreeMap<String, BTreeMap<[u8; 16], BTreeSet<VmId>>>,
}

impl Vms {
    /// Adds a VM, or replaces what is known of it.
    pub fn insert(&mut self, vm: VmId, about: AboutVm) {
        self.remove(vm);
        self.by_name.entry(about.name.clone()).or_default().insert(vm);
        for nic in about.nics.iter().filter(|nic| !nic.addresses.is_empty()) {
            let segment = self.by_address.entry(nic.segment.clone()).or_default();
            for address in &nic.addresses {
                segment.entry(*address).or_default().insert(vm);
            }
        }
        self.all.insert(vm, about);
    }

    /// Removes a VM.
    pub fn remove(&mut self, vm: VmId) {
        let Some(before) = self.all.remove(&vm) else { return };
        remove(&mut self.by_name, &before.name, vm);
        for nic in &before.nics {
            let Some(segment) = self.by_address.get_mut(&nic.segment) else { continue };
            for address in &nic.addresses {
                remove(segment, address, vm);
            }
            if segment.is_empty() {
                self.by_address.remove(&nic.segment);
            }
        }
    }

    /// Returns the VM with a name; the lowest number if a damaged state has several.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<VmId> {
        self.by_name.get(name)?.first().copied()
    }

    /// Returns the VMs with an address in a segment, in order. Several if VMs that were lost had it as well.
    pub fn at(&self, segment: &str, address: &[u8; 16]) -> impl Iterator<Item = VmId> {
        self.by_address.get(segment).and_then(|segment| segment.get(address)).into_iter().flatten().copied()
    }
}

impl Deref for Vms {
    type Target = BTreeMap<VmId, AboutVm>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

/// Removes one of the numbers under a key, and the key with its last number.
fn remove<K: Ord, N: Ord>(index: &mut BTreeMap<K, BTreeSet<N>>, key: &K, number: N) {
    if let Some(numbers) = index.get_mut(key) {
        numbers.remove(&number);
        if numbers.is_empty() {
            index.remove(key);
        }
    }
}
