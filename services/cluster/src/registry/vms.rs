//! VMs: which host runs each of them, in which epoch, with which addresses.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::time::Instant;

use control_api::names::check_name;
use nomad::coordinator::Owner;
use nomad::{Epoch, MigrationId, VmId};

use super::{MAX_ADDRESSES, MAX_NICS, MAX_VMS, Registry, Speaker};
use crate::refusal::Refusal;
use crate::state::{AboutVm, Change, Nic};

/// A VM as it was registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// Its number.
    pub vm: VmId,
    /// The epoch in which it runs.
    pub epoch: Epoch,
    /// Addresses that weren't taken over, a sentence each.
    pub refused: Vec<String>,
    /// Migrations up to this one don't concern it any more.
    pub after: MigrationId,
}

impl Registry {
    /// A VM runs on a host: it has just started (`epoch` 0), or the host repeats its registration.
    ///
    /// # Errors
    /// When it runs elsewhere, the epoch is old, or it can't be so.
    pub fn register_vm(
        &mut self,
        speaker: Speaker,
        name: &str,
        epoch: Epoch,
        nics: Vec<Nic>,
        now: Instant,
    ) -> Result<Registered, Refusal> {
        self.check(speaker, now)?;
        check_name("VM", name).map_err(|error| Refusal::Invalid(error.to_string()))?;
        check_nics(name, &nics)?;
        let known = self.state().vm(name).map(|(vm, about)| (vm, about.clone()));
        let Some((vm, before)) = known else {
            if self.state().vms.len() >= MAX_VMS || self.state().last_vm == u32::MAX {
                return Err(Refusal::TooMany(format!(
                    "VM {name} can't be registered: the cluster has {MAX_VMS} VMs, or has had 2^32"
                )));
            }
            let vm = VmId(self.state().last_vm + 1);
            return self.start_vm(speaker, vm, name, nics, None, now);
        };
        let owner = self.state().ledger.vms.get(&vm).copied();
        let Some(owner) = owner.filter(|owner| owner.alive) else {
            if let Some(owner) = owner.filter(|owner| epoch != Epoch(0) && epoch < owner.epoch) {
                return Err(self.old(name, epoch, owner));
            }
            return self.start_vm(speaker, vm, name, nics, Some(&before), now);
        };
        if epoch != Epoch(0) {
            self.check_epoch(speaker, vm, epoch)?;
        }
        if owner.host != speaker.host {
            let refused = nomad::coordinator::Refused::Alive(vm, speaker.host, owner.host);
            return Err(Refusal::of(&refused, self.state()));
        }
        if let Some(migration) = self.state().ledger.migration_of(vm).filter(|_| epoch == Epoch(0)) {
            // Its daemon was started again after its vote: whether the VM is still this host's isn't decided, or hasn't been said.
            return Err(Refusal::of(&nomad::coordinator::Refused::Busy(vm, migration), self.state()));
        }
        let (nics, refused) = self.free_of_others(vm, nics);
        if nics != before.nics {
            let about = AboutVm { name: name.to_owned(), nics };
            self.stage_actions(vec![Change::Vm(vm, about)], Vec::new(), now);
        }
        Ok(Registered { vm, epoch: owner.epoch, refused, after: self.coordinator.last_of(vm) })
    }

    fn start_vm(
        &mut self,
        speaker: Speaker,
        vm: VmId,
        name: &str,
        nics: Vec<Nic>,
        before: Option<&AboutVm>,
        now: Instant,
    ) -> Result<Registered, Refusal> {
        let mut actions = Vec::new();
        let started = self.coordinator.started(vm, speaker.host, &mut actions);
        let epoch = started.map_err(|refused| Refusal::of(&refused, self.state()))?;
        let (nics, refused) = self.free_of_others(vm, nics);
        let about = AboutVm { name: name.to_owned(), nics };
        let changed = before != Some(&about);
        let changes = changed.then_some(Change::Vm(vm, about)).into_iter().collect();
        self.stage_actions(changes, actions, now);
        tracing::info!(
            vm = name,
            id = vm.0,
            host = self.state().host_name(speaker.host),
            epoch = epoch.0,
            "A VM runs"
        );
        Ok(Registered { vm, epoch, refused, after: self.coordinator.last_of(vm) })
    }

    /// A VM has ended.
    ///
    /// # Errors
    /// When it isn't the host's in that epoch, or moves.
    pub fn end_vm(&mut self, speaker: Speaker, vm: VmId, epoch: Epoch, now: Instant) -> Result<(), Refusal> {
        self.check(speaker, now)?;
        self.check_epoch(speaker, vm, epoch)?;
        let mut actions = Vec::new();
        let ended = self.coordinator.ended(vm, &mut actions);
        ended.map_err(|refused| Refusal::of(&refused, self.state()))?;
        let name = self.state().vm_name(vm);
        self.stage_actions(vec![Change::VmForgotten(vm)], actions, now);
        tracing::info!(vm = name, id = vm.0, "A VM has ended");
        Ok(())
    }

    /// Whether a host speaks of a VM in its present epoch.
    pub(super) fn check_epoch(&self, speaker: Speaker, vm: VmId, epoch: Epoch) -> Result<(), Refusal> {
        let Some(owner) = self.state().ledger.vms.get(&vm).copied() else {
            return Err(Refusal::Missing(format!("The cluster has no {vm}: it has ended, or never was")));
        };
        let name = self.state().vm_name(vm);
        if epoch < owner.epoch {
            return Err(self.old(&name, epoch, owner));
        }
        if epoch > owner.epoch {
            return Err(Refusal::Conflict(format!(
                "VM {name} is in epoch {} as far as the service knows, and in epoch {} as host {} says: the service's database is an old copy; restore a newer one",
                owner.epoch.0,
                epoch.0,
                self.state().host_name(speaker.host)
            )));
        }
        if owner.host != speaker.host {
            return Err(Refusal::Conflict(format!(
                "VM {name} isn't host {}'s in epoch {}, but host {}'s",
                self.state().host_name(speaker.host),
                epoch.0,
                self.state().host_name(owner.host)
            )));
        }
        Ok(())
    }

    fn old(&self, name: &str, said: Epoch, owner: Owner) -> Refusal {
        Refusal::old_epoch(name, said, owner.epoch, &self.state().host_name(owner.host))
    }

    /// Without the addresses that other running VMs have.
    fn free_of_others(&self, vm: VmId, mut nics: Vec<Nic>) -> (Vec<Nic>, Vec<String>) {
        let mut refused = Vec::new();
        let mut seen = BTreeSet::new();
        for nic in &mut nics {
            let segment = nic.segment.clone();
            nic.addresses.retain(|address| {
                let other = self.state().owner_of(&segment, address).filter(|other| *other != vm);
                if let Some(other) = other {
                    refused.push(format!(
                        "Address {} of segment {segment} is VM {}'s",
                        Ipv6Addr::from(*address),
                        self.state().vm_name(other)
                    ));
                }
                other.is_none() && seen.insert((segment.clone(), *address))
            });
        }
        (nics, refused)
    }

    pub(super) fn vm_called(&self, name: &str) -> Result<VmId, Refusal> {
        let found = self.state().vm(name).map(|(vm, _)| vm);
        found.ok_or_else(|| {
            Refusal::Missing(format!(
                "The cluster has no VM {}. See 'causeway cluster vms'",
                name.chars().take(64).collect::<String>().escape_debug()
            ))
        })
    }
}

fn check_nics(vm: &str, nics: &[Nic]) -> Result<(), Refusal> {
    if nics.len() > MAX_NICS {
        return Err(Refusal::TooMany(format!(
            "VM {vm} has {} NICs; at most {MAX_NICS} are possible",
            nics.len()
        )));
    }
    for nic in nics {
        check_name("segment", &nic.segment).map_err(|error| Refusal::Invalid(error.to_string()))?;
        if nic.addresses.len() > MAX_ADDRESSES {
            return Err(Refusal::TooMany(format!(
                "A NIC of VM {vm} has {} addresses; at most {MAX_ADDRESSES} are possible",
                nic.addresses.len()
            )));
        }
    }
    Ok(())
}
