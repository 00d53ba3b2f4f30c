//! Migrations: requested by users, driven by the coordinator, which notifies hosts by messages.

use std::time::Instant;

use nomad::coordinator::{Event as CoordinatorEvent, MayRun};
use nomad::{Epoch, HostId, Message, MigrationId, Node, VmId};

use super::{Registry, Speaker};
use crate::refusal::Refusal;

impl Registry {
    /// Begins a migration: VMs and hosts by name. `listens` says which hosts take the coordinator's messages: without them a migration can't
    /// proceed, and its hosts wouldn't hear of its decision.
    ///
    /// # Errors
    /// When it can't begin.
    pub fn migrate(
        &mut self,
        requests: &[(String, String)],
        listens: &dyn Fn(HostId) -> bool,
        now: Instant,
    ) -> Result<MigrationId, Refusal> {
        self.resync(now)?;
        let named: Vec<(VmId, HostId)> = requests
            .iter()
            .map(|(vm, host)| {
                let host = self.state().host(host).map(|(id, _)| id).ok_or_else(|| {
                    Refusal::Missing(format!(
                        "VM {vm} can't move to {}: no such host has reported. See 'causeway cluster hosts'",
                        host.chars().take(64).collect::<String>().escape_debug()
                    ))
                })?;
                Ok((self.vm_called(vm)?, host))
            })
            .collect::<Result<_, Refusal>>()?;
        if let Some((vm, host)) = named.iter().find(|(_, host)| !self.has_lease(*host)) {
            return Err(Refusal::Conflict(format!(
                "VM {} can't move to host {}: that isn't heard of at present",
                self.state().vm_name(*vm),
                self.state().host_name(*host)
            )));
        }
        for (vm, to) in &named {
            let from = self.state().ledger.vms.get(vm).map(|owner| owner.host);
            if let Some(deaf) = from.into_iter().chain([*to]).find(|host| !listens(*host)) {
                return Err(Refusal::Conflict(format!(
                    "VM {} can't move: host {} doesn't take part in migrations at present",
                    self.state().vm_name(*vm),
                    self.state().host_name(deaf)
                )));
            }
        }
        let mut actions = Vec::new();
        let begun = self.coordinator.migrate(&named, &mut actions);
        let migration = begun.map_err(|refused| Refusal::of(&refused, self.state()))?;
        self.stage_actions(Vec::new(), actions, now);
        Ok(migration)
    }

    /// Whether a VM may ask to move to a host together with others: all of them are known, and it isn't there.
    ///
    /// # Errors
    /// When not.
    pub fn check_group_request(&self, vm: &str, host: &str, together: &[String]) -> Result<(), Refusal> {
        for name in together.iter().take(nomad::config::MAX_VMS_PER_MIGRATION) {
            self.vm_called(name)?;
        }
        let id = self.vm_called(vm)?;
        let at = self.state().ledger.vms.get(&id).map(|owner| owner.host);
        if at.is_some() && at == self.state().host(host).map(|(id, _)| id) {
            return Err(Refusal::Conflict(format!("VM {vm} can't move to host {host}: it runs there")));
        }
        Ok(())
    }

    /// Whether a host may ask for a VM's move: its daemon has the VM's monitor take part. Nobody else has.
    ///
    /// # Errors
    /// When it isn't the VM's host, or the daemon was started again since.
    pub fn check_requester(&mut self, speaker: Speaker, vm: &str, now: Instant) -> Result<(), Refusal> {
        self.check(speaker, now)?;
        let id = self.vm_called(vm)?;
        let at = self.state().ledger.vms.get(&id).map(|owner| owner.host);
        if let Some(at) = at.filter(|at| *at != speaker.host) {
            return Err(Refusal::Conflict(format!(
                "VM {vm} can't move by a request of host {}: it runs on host {}, where `causeway migrate {vm} --to …` moves it",
                self.state().host_name(speaker.host),
                self.state().host_name(at)
            )));
        }
        Ok(())
    }

    /// Gives a migration up, unless it is decided.
    ///
    /// # Errors
    /// When there is none.
    pub fn cancel(&mut self, migration: MigrationId, now: Instant) -> Result<(), Refusal> {
        self.resync(now)?;
        let Some(stored) = self.state().ledger.migrations.get(&migration) else {
            return Err(Refusal::Missing(format!("There is no {migration}: it is over, or never was")));
        };
        if let Some(decision) = stored.decision {
            return Err(Refusal::Conflict(format!("{migration} can't be cancelled: it is {decision:?}")));
        }
        let mut actions = Vec::new();
        self.coordinator.cancel(migration, &mut actions);
        self.stage_actions(Vec::new(), actions, now);
        Ok(())
    }

    /// Whether a VM may run on the speaker's host, for a monitor whose daemon knows nothing of how its migration ended. `epoch`: the one in which it ran there, or was to
    /// run there. `keeps`: the host still has the VM; where it was counted as lost with its daemon, it is the host's again, in a new epoch.
    ///
    /// # Errors
    /// When the host isn't registered, or was started again since.
    pub fn claim_vm(
        &mut self,
        speaker: Speaker,
        name: &str,
        epoch: Epoch,
        keeps: bool,
        now: Instant,
    ) -> Result<MayRun, Refusal> {
        self.check(speaker, now)?;
        let Some((vm, _)) = self.state().vm(name) else { return Ok(MayRun::Ended) };
        if !keeps {
            return Ok(self.coordinator.may_run(vm, speaker.host, epoch));
        }
        let mut actions = Vec::new();
        let claimed = self.coordinator.claim(vm, speaker.host, epoch, &mut actions);
        self.stage_actions(Vec::new(), actions, now);
        Ok(claimed)
    }

    /// A host's message of the migration protocol.
    ///
    /// # Errors
    /// When the host isn't registered, was started again since, or the message isn't one for the coordinator.
    pub fn message(&mut self, message: Message, now: Instant) -> Result<(), Refusal> {
        let (Node::Host(host), Node::Coordinator) = (message.from, message.to) else {
            return Err(Refusal::Invalid("The message isn't one of a host to the coordinator".to_owned()));
        };
        self.check(Speaker { host, incarnation: message.incarnation }, now)?;
        self.renew(host, now);
        self.step(CoordinatorEvent::Message(message), now);
        Ok(())
    }

    /// Whether a message comes from the start of its host that is known.
    ///
    /// # Errors
    /// When it isn't a host's, or one that isn't registered or was started again since.
    pub fn check_sender(&mut self, message: &Message, now: Instant) -> Result<(), Refusal> {
        let Node::Host(host) = message.from else {
            return Err(Refusal::Invalid("The message isn't a host's".to_owned()));
        };
        self.check(Speaker { host, incarnation: message.incarnation }, now)
    }
}
