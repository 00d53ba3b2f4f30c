//! Collections of the ledger, each with the index that look-ups need. A collection changes its index with its content: nothing else can.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use super::ledger::{Owner, StoredMigration};
use crate::names::{HostId, MigrationId, VmId};

/// Pairs of connected VMs, the lower number first. A VM's peers are found without a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Links {
    pairs: BTreeSet<(VmId, VmId)>,
    /// The same pairs, the higher number first.
    reversed: BTreeSet<(VmId, VmId)>,
}

impl Links {
    /// Adds a pair; returns whether it is new.
    pub fn insert(&mut self, (low, high): (VmId, VmId)) -> bool {
        self.reversed.insert((high, low));
        self.pairs.insert((low, high))
    }

    /// Removes a pair; returns whether it was there.
    pub fn remove(&mut self, (low, high): (VmId, VmId)) -> bool {
        self.reversed.remove(&(high, low));
        self.pairs.remove(&(low, high))
    }

    /// Removes all pairs of a VM.
    pub fn remove_vm(&mut self, vm: VmId) {
        for peer in self.peers(vm).collect::<Vec<_>>() {
            self.remove((vm, peer));
            self.remove((peer, vm));
        }
    }

    /// Returns whether a pair is there.
    #[must_use]
    pub fn contains(&self, pair: &(VmId, VmId)) -> bool {
        self.pairs.contains(pair)
    }

    /// Returns the pairs in order.
    pub fn iter(&self) -> impl Iterator<Item = &(VmId, VmId)> {
        self.pairs.iter()
    }

    /// Returns the VMs that are connected to a VM.
    pub fn peers(&self, vm: VmId) -> impl Iterator<Item = VmId> {
        let of_vm = (vm, VmId(0))..=(vm, VmId(u32::MAX));
        self.pairs.range(of_vm.clone()).chain(self.reversed.range(of_vm)).map(|(_, peer)| *peer)
    }

    /// Returns the number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Returns whether there is no pair.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }
}

/// VMs with their owners. A host's VMs are found without a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owners {
    all: BTreeMap<VmId, Owner>,
    by_host: BTreeSet<(HostId, VmId)>,
}

impl Owners {
    /// Sets a VM's owner.
    pub fn insert(&mut self, vm: VmId, owner: Owner) {
        self.remove(vm);
        self.by_host.insert((owner.host, vm));
        self.all.insert(vm, owner);
    }

    /// Removes a VM.
    pub fn remove(&mut self, vm: VmId) {
        if let Some(before) = self.all.remove(&vm) {
            self.by_host.remove(&(before.host, vm));
        }
    }

    /// Marks a VM as lost with its host.
    pub fn lose(&mut self, vm: VmId) {
        if let Some(owner) = self.all.get_mut(&vm) {
            owner.alive = false;
        }
    }

    /// Returns the VMs of a host that are alive.
    pub fn alive_on(&self, host: HostId) -> impl Iterator<Item = VmId> {
        let of_host = self.by_host.range((host, VmId(0))..=(host, VmId(u32::MAX)));
        of_host.map(|(_, vm)| *vm).filter(|vm| self.all.get(vm).is_some_and(|owner| owner.alive))
    }
}

impl Deref for Owners {
    type Target = BTreeMap<VmId, Owner>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

/// Migrations that aren't over. The migration that binds a VM is found without a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Migrations {
    all: BTreeMap<MigrationId, StoredMigration>,
    /// VMs of migrations that bind them.
    bound: BTreeSet<(VmId, MigrationId)>,
}

impl Migrations {
    /// Adds a migration, in place of one with its number.
    pub fn insert(&mut self, migration: MigrationId, stored: StoredMigration) {
        self.remove(migration);
        self.bind(migration, &stored);
        self.all.insert(migration, stored);
    }

    /// Removes a migration.
    pub fn remove(&mut self, migration: MigrationId) {
        if let Some(before) = self.all.remove(&migration) {
            for moved in &before.moves {
                self.bound.remove(&(moved.vm, migration));
            }
        }
    }

    /// Changes a migration; returns whether it exists.
    pub fn change(&mut self, migration: MigrationId, change: impl FnOnce(&mut StoredMigration)) -> bool {
        let Some(mut stored) = self.all.remove(&migration) else { return false };
        for moved in &stored.moves {
            self.bound.remove(&(moved.vm, migration));
        }
        change(&mut stored);
        self.bind(migration, &stored);
        self.all.insert(migration, stored);
        true
    }

    fn bind(&mut self, migration: MigrationId, stored: &StoredMigration) {
        if stored.binds() {
            self.bound.extend(stored.moves.iter().map(|moved| (moved.vm, migration)));
        }
    }

    /// Returns the migration that binds a VM; the first one if a damaged ledger has several.
    #[must_use]
    pub fn binding(&self, vm: VmId) -> Option<MigrationId> {
        let of_vm = (vm, MigrationId(0))..=(vm, MigrationId(u64::MAX));
        self.bound.range(of_vm).next().map(|(_, migration)| *migration)
    }
}

impl Deref for Migrations {
    type Target = BTreeMap<MigrationId, StoredMigration>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl<'a> IntoIterator for &'a Owners {
    type Item = (&'a VmId, &'a Owner);
    type IntoIter = std::collections::btree_map::Iter<'a, VmId, Owner>;

    fn into_iter(self) -> Self::IntoIter {
        self.all.iter()
    }
}

impl<'a> IntoIterator for &'a Migrations {
    type Item = (&'a MigrationId, &'a StoredMigration);
    type IntoIter = std::collections::btree_map::Iter<'a, MigrationId, StoredMigration>;

    fn into_iter(self) -> Self::IntoIter {
        self.all.iter()
    }
}
