//! Decided migrations that hosts haven't settled: the decisions that these hosts receive, and the answers to monitors in doubt.

use std::collections::BTreeSet;

use super::{Action, Coordinator, Decision, Ledger, Owner, Record, Refused, Stage, Stored, Timer};
use crate::config::Plant;
use crate::message::{Body, Reason};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Place, VmId};

/// Whether a VM may run on a host in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MayRun {
    /// It isn't decided: to be asked again.
    Undecided(MigrationId),
    /// It may, in this epoch.
    Here(Epoch),
    /// It was lost with its host's daemon, and nothing has taken its place.
    Lost,
    /// It mustn't: this host has it, in a newer epoch.
    Elsewhere(Owner),
    /// It mustn't: it has ended.
    Ended,
}

impl Coordinator {
    /// The message that carries a decision to one host. It doesn't name a VM as the host's if the host may not run it any more: the VM was
    /// lost, moved on or was started elsewhere since.
    pub(super) fn decision_body(&self, host: HostId, migration: MigrationId, stored: &Stored) -> Body {
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

    /// A host has done what was decided.
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
            self.write(Record::Paid { migration, host, lost }, actions);
            return;
        }
        let Some(progress) = self.progress.get_mut(&migration) else { return };
        if progress.stage != Stage::Telling || !progress.waiting.remove(&host) {
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
        if self.config.plant == Plant::TellForEver {
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
    pub(super) fn is_owed(&self, migration: MigrationId) -> bool {
        self.ledger.migrations.get(&migration).is_some_and(|stored| !stored.binds())
    }

    /// Tells hosts that haven't answered again: an answer may have been lost.
    pub(super) fn remind(&self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        for host in stored.owed.iter().flat_map(|owed| owed.keys()) {
            let body = self.decision_body(*host, migration, stored);
            self.send(*host, body, actions);
        }
        let (timer, after_ms) = (Timer::Retry(migration), self.config.settle_ms);
        actions.push(Action::Timer { timer, after_ms });
    }

    /// A host has returned: the coordinator sends it the decisions that are kept for it.
    pub(super) fn tell_owed(&self, host: HostId, actions: &mut Vec<Action>) {
        for (migration, stored) in &self.ledger.migrations {
            if stored.owed.as_ref().is_some_and(|owed| owed.contains_key(&host)) {
                let body = self.decision_body(host, *migration, stored);
                self.send(host, body, actions);
            }
        }
    }

    /// VMs that were to go to a host, or to stay there, by decisions that the host hasn't answered: whether it has them is for the host to say.
    pub(super) fn unanswered(&self, host: HostId) -> BTreeSet<VmId> {
        let waited_for = |migration: &MigrationId, stored: &Stored| {
            let waiting = self
                .progress
                .get(migration)
                .is_some_and(|progress| progress.stage == Stage::Telling && progress.waiting.contains(&host));
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
            self.give_up(migration, Reason::Late, actions);
        }
        let lost = self.ledger.vms.alive_on(host).collect();
        let incarnation = Incarnation(known.saturating_add(1));
        self.write(Record::Host { host, incarnation, lost }, actions);
        Ok(())
    }

    /// Whether a VM may run on a host, for a monitor that has heard nothing of how its migration ended. `epoch`: the one in which it ran there, or was to run there.
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

    /// As [`Coordinator::may_run`], where the host still has the VM: one that was counted as lost is the host's again, in a new epoch, before anybody else starts it.
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
