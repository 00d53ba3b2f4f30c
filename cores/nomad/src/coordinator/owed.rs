//! Decided migrations that hosts haven't settled: the decisions that these hosts receive, and the answers to monitors in doubt.

use std::collections::BTreeSet;

use super::{Action, Coordinator, Decision, Ledger, Owner, Record, Refused, Stage, StoredMigration, Timer};
use crate::config::InjectedBug;
use crate::message::{AbortReason, Body};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Place, VmId};

/// Whether a VM may run on a host in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MayRun {
    /// The migration isn't decided.
    Undecided(MigrationId),
    /// The VM may run there, in this epoch.
    Here(Epoch),
    /// The VM was lost with its host's daemon, and no other instance was started.
    Lost,
    /// Another host, or a newer epoch, owns the VM.
    Elsewhere(Owner),
    /// The VM has ended.
    Ended,
}

impl Coordinator {
    /// The message that carries a decision to one host. It doesn't name a VM as the host's if the host may not run it any more: the VM was
    /// lost, moved on or was started elsewhere since.
    pub(super) fn decision_body(
        &self,
        host: HostId,
        migration: MigrationId,
        stored: &StoredMigration,
    ) -> Body {
        let decision = stored.decision.unwrap_or(Decision::Aborted);
        let mut places = Ledger::places(stored, decision);
        places.retain(|place| place.host != host || self.is_owner(place));
        match decision {
            Decision::Committed => Body::Commit { migration, places },
            Decision::Aborted => Body::Abort { migration, places },
        }
    }

    fn is_owner(&self, place: &Place) -> bool {
        let owner = self.ledger.vms.get(&place.vm);
        owner.is_some_and(|owner| owner.alive && (owner.host, owner.epoch) == (place.host, place.epoch))
    }

    /// A host has settled a decision.
    pub(super) fn settled(
        &mut self,
        host: HostId,
        migration: MigrationId,
        lost: &[VmId],
        actions: &mut Vec<Action>,
    ) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        let Some(decision) = stored.decision else { return };
        // A host can only lose what it should have.
        let places = Ledger::places(stored, decision);
        let should = |vm: &VmId| {
            places.iter().any(|place| place.vm == *vm && place.host == host && self.is_owner(place))
        };
        let lost: Vec<VmId> = lost.iter().copied().filter(should).collect();
        if stored.owed.as_ref().is_some_and(|owed| owed.contains_key(&host)) {
            self.write(Record::HostSettled { migration, host, lost }, actions);
            return;
        }
        let Some(progress) = self.progress.get_mut(&migration) else { return };
        if progress.stage != Stage::Settling || !progress.waiting.remove(&host) {
            return;
        }
        progress.lost.extend(lost);
        if progress.waiting.is_empty() {
            let lost = progress.lost.iter().copied().collect();
            self.progress.remove(&migration);
            self.write(Record::Finished { migration, lost }, actions);
            self.admit(actions);
        }
    }

    /// Hosts haven't answered a decision in time: the VMs are free, and the decision is kept for these hosts.
    pub(super) fn release(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        if self.config.injected_bug == InjectedBug::SettleWithoutTimeout {
            return;
        }
        let Some(progress) = self.progress.remove(&migration) else { return };
        let start = |host: &HostId| self.ledger.hosts.get(host).copied().unwrap_or_default();
        let owed = progress.waiting.iter().map(|host| (*host, start(host))).collect();
        let lost = progress.lost.into_iter().collect();
        self.write(Record::Released { migration, owed, lost }, actions);
        let (timer, after_ms) = (Timer::Retry(migration), self.config.settle_ms);
        actions.push(Action::Timer { timer, after_ms });
        self.admit(actions);
    }

    /// Whether a migration's decision is kept for hosts that haven't answered it.
    pub(super) fn is_released(&self, migration: MigrationId) -> bool {
        self.ledger.migrations.get(&migration).is_some_and(|stored| !stored.binds())
    }

    /// Retransmits a kept decision to hosts that haven't answered: an answer may have been lost.
    pub(super) fn resend_kept_decision(&self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        for host in stored.owed.iter().flat_map(|owed| owed.keys()) {
            let body = self.decision_body(*host, migration, stored);
            self.send(*host, body, actions);
        }
        let (timer, after_ms) = (Timer::Retry(migration), self.config.settle_ms);
        actions.push(Action::Timer { timer, after_ms });
    }

    /// A host has returned: the coordinator sends it the decisions that are kept for it.
    pub(super) fn send_kept_decisions(&self, host: HostId, actions: &mut Vec<Action>) {
        for (migration, stored) in &self.ledger.migrations {
            if stored.owed.as_ref().is_some_and(|owed| owed.contains_key(&host)) {
                let body = self.decision_body(host, *migration, stored);
                self.send(host, body, actions);
            }
        }
    }

    /// VMs that decisions place on a host that hasn't settled these decisions: whether it has them is for the host to report.
    pub(super) fn unanswered(&self, host: HostId) -> BTreeSet<VmId> {
        let waited_for = |migration: &MigrationId, stored: &StoredMigration| {
            let waiting = self.progress.get(migration).is_some_and(|progress| {
                progress.stage == Stage::Settling && progress.waiting.contains(&host)
            });
            waiting || stored.owed.as_ref().is_some_and(|owed| owed.contains_key(&host))
        };
        let stored =
            self.ledger.migrations.iter().filter(|(migration, stored)| waited_for(migration, stored));
        let places = stored.filter_map(|(_, stored)| Some(Ledger::places(stored, stored.decision?)));
        places.flatten().filter(|place| place.host == host).map(|place| place.vm).collect()
    }

    /// Forgets a host that its user declares gone for good. Its VMs are lost, and may be started elsewhere, in a new epoch. Undecided
    /// migrations from and to the host are aborted. If it returns, its daemon counts as one of an older incarnation, and receives the
    /// decisions.
    ///
    /// # Errors
    /// When there is no such host.
    pub fn forget(&mut self, host: HostId, actions: &mut Vec<Action>) -> Result<(), Refused> {
        let Some(Incarnation(known)) = self.ledger.hosts.get(&host).copied() else {
            return Err(Refused::UnknownHost(host));
        };
        let undecided = self.ledger.migrations.iter().filter(|(_, stored)| {
            stored.decision.is_none()
                && stored.moves.iter().any(|moved| moved.from == host || moved.to == host)
        });
        for migration in undecided.map(|(migration, _)| *migration).collect::<Vec<_>>() {
            self.abort(migration, AbortReason::Timeout, actions);
        }
        let lost = self.ledger.vms.alive_on(host).collect();
        let incarnation = Incarnation(known.saturating_add(1));
        self.write(Record::Host { host, incarnation, lost }, actions);
        Ok(())
    }

    /// Whether a VM may run on a host, for a monitor in doubt. `epoch`: the one in which the VM ran there, or was to run there.
    #[must_use]
    pub fn may_run(&self, vm: VmId, host: HostId, epoch: Epoch) -> MayRun {
        let Some(owner) = self.ledger.vms.get(&vm).copied() else { return MayRun::Ended };
        if owner.host == host && owner.alive && owner.epoch.0.checked_sub(1) == Some(epoch.0) {
            // The host has registered it anew, since its daemon was started again; a VM that had moved and come back would be two epochs further.
            return MayRun::Here(owner.epoch);
        }
        if owner.epoch > epoch {
            return MayRun::Elsewhere(owner);
        }
        let undecided = |migration: &MigrationId| {
            self.ledger.migrations.get(migration).is_some_and(|stored| stored.decision.is_none())
        };
        match self.ledger.migration_of(vm).filter(undecided) {
            Some(migration) => MayRun::Undecided(migration),
            None if (owner.host, owner.epoch) != (host, epoch) => MayRun::Elsewhere(owner),
            None if owner.alive => MayRun::Here(epoch),
            None => MayRun::Lost,
        }
    }

    /// As [`Coordinator::may_run`], for a host that still has the VM: a VM that counts as lost becomes the host's again, in a new epoch,
    /// unless another host has started it.
    #[must_use]
    pub fn claim(&mut self, vm: VmId, host: HostId, epoch: Epoch, actions: &mut Vec<Action>) -> MayRun {
        match self.may_run(vm, host, epoch) {
            MayRun::Lost => {
                let epoch = Epoch(epoch.0.saturating_add(1));
                self.write(Record::Vm { vm, host, epoch }, actions);
                MayRun::Here(epoch)
            }
            other => other,
        }
    }
}
