//! Requests of users, monitors and daemons to the coordinator.

use super::{Action, Coordinator, MigrationProgress, Record, Stage};
use crate::config::MAX_VMS_PER_MIGRATION;
use crate::names::{Epoch, HostId, MigrationId, Move, VmId};

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Nothing, or too much, is to move.
    #[error("A migration of {0} VMs can't be: name 1 to {MAX_VMS_PER_MIGRATION}")]
    Number(usize),
    /// No such VM.
    #[error("{0} can't move: the cluster doesn't know it, or it was lost with its host")]
    NoSuchVm(VmId),
    /// It is named twice.
    #[error("{0} can't move to two hosts in one migration: name it once")]
    Twice(VmId),
    /// It is there.
    #[error("{0} can't move to {1}: it runs there")]
    There(VmId, HostId),
    /// No such host.
    #[error("{0} can't move to {1}: no such host has reported. See 'causeway cluster hosts'")]
    NoSuchHost(VmId, HostId),
    /// Nobody has heard of that host.
    #[error("{0} can't be forgotten: no such host has reported. See 'causeway cluster hosts'")]
    UnknownHost(HostId),
    /// It moves already.
    #[error("{0} can't be changed now: {1} isn't over, and moves it. Wait for it, or cancel it")]
    Busy(VmId, MigrationId),
    /// A VM of that name is alive.
    #[error("{0} can't be started on {1}: it runs on {2}")]
    Alive(VmId, HostId, HostId),
    /// Two ends of a connection are one.
    #[error("{0} can't be connected to itself over hosts")]
    Itself(VmId),
}

impl Coordinator {
    /// Begins a migration of one VM or a group. All move, or none. Peers of its VMs may be in another migration at the same time: the two switch over one after the other.
    ///
    /// # Errors
    /// When it can't begin. A VM can't move while another migration moves it.
    pub fn migrate(
        &mut self,
        requests: &[(VmId, HostId)],
        actions: &mut Vec<Action>,
    ) -> Result<MigrationId, Refused> {
        if requests.is_empty() || requests.len() > MAX_VMS_PER_MIGRATION {
            return Err(Refused::Number(requests.len()));
        }
        let mut moves: Vec<Move> = Vec::with_capacity(requests.len());
        for (vm, to) in requests.iter().copied() {
            let owner = self.ledger.vms.get(&vm).filter(|owner| owner.alive).ok_or(Refused::NoSuchVm(vm))?;
            if owner.host == to {
                return Err(Refused::There(vm, to));
            }
            if !self.ledger.hosts.contains_key(&to) {
                return Err(Refused::NoSuchHost(vm, to));
            }
            if moves.iter().any(|moved| moved.vm == vm) {
                return Err(Refused::Twice(vm));
            }
            if let Some(other) = self.ledger.migration_of(vm) {
                return Err(Refused::Busy(vm, other));
            }
            let epoch = Epoch(owner.epoch.0.saturating_add(1));
            moves.push(Move { vm, from: owner.host, to, epoch });
        }
        let migration = MigrationId(self.ledger.last.0.saturating_add(1));
        let waiting = moves.iter().map(|moved| moved.to).collect();
        self.write(Record::Begun { migration, moves }, actions);
        self.progress.insert(migration, MigrationProgress::new(Stage::Reserving, waiting));
        self.enter(migration, actions);
        Ok(migration)
    }

    /// A host starts a VM: the epoch that it runs in.
    ///
    /// # Errors
    /// When it runs already: a VM has one owner.
    pub fn started(&mut self, vm: VmId, host: HostId, actions: &mut Vec<Action>) -> Result<Epoch, Refused> {
        let epoch = match self.ledger.vms.get(&vm) {
            Some(owner) if owner.alive => return Err(Refused::Alive(vm, host, owner.host)),
            Some(owner) => Epoch(owner.epoch.0.saturating_add(1)),
            None => Epoch(1),
        };
        if let Some(other) = self.ledger.migration_of(vm) {
            return Err(Refused::Busy(vm, other));
        }
        self.write(Record::Vm { vm, host, epoch }, actions);
        Ok(epoch)
    }

    /// A number of a migration: all migrations of the VM up to it have ended, and no later one concerned the VM yet.
    #[must_use]
    pub fn last_of(&self, vm: VmId) -> MigrationId {
        let bound = self.ledger.migration_of(vm).map(|migration| MigrationId(migration.0.saturating_sub(1)));
        bound.unwrap_or(self.ledger.last)
    }

    /// A VM has ended.
    ///
    /// # Errors
    /// When it isn't known, or moves.
    pub fn ended(&mut self, vm: VmId, actions: &mut Vec<Action>) -> Result<(), Refused> {
        if !self.ledger.vms.contains_key(&vm) {
            return Err(Refused::NoSuchVm(vm));
        }
        if let Some(other) = self.ledger.migration_of(vm) {
            return Err(Refused::Busy(vm, other));
        }
        self.write(Record::VmEnded { vm }, actions);
        Ok(())
    }

    /// Two VMs have a connection that is in use, or none any more.
    ///
    /// # Errors
    /// When one isn't known.
    pub fn linked(
        &mut self,
        one: VmId,
        other: VmId,
        up: bool,
        actions: &mut Vec<Action>,
    ) -> Result<(), Refused> {
        self.relinked([(one, other, up)], actions)
    }

    /// As [`Coordinator::linked`], for many pairs: queued migrations are admitted once, after the last one.
    ///
    /// # Errors
    /// When a VM isn't known; pairs before it are taken.
    pub fn relinked(
        &mut self,
        pairs: impl IntoIterator<Item = (VmId, VmId, bool)>,
        actions: &mut Vec<Action>,
    ) -> Result<(), Refused> {
        let before = actions.len();
        let result = pairs.into_iter().try_for_each(|(one, other, up)| self.relink(one, other, up, actions));
        if actions.len() > before {
            self.admit(actions);
        }
        result
    }

    fn relink(&mut self, one: VmId, other: VmId, up: bool, actions: &mut Vec<Action>) -> Result<(), Refused> {
        let (a, b) = (one.min(other), one.max(other));
        if a == b {
            return Err(Refused::Itself(a));
        }
        for vm in [a, b] {
            if !self.ledger.vms.contains_key(&vm) {
                return Err(Refused::NoSuchVm(vm));
            }
        }
        if up != self.ledger.links.contains(&(a, b)) {
            let record = if up { Record::Linked { a, b } } else { Record::Unlinked { a, b } };
            self.write(record, actions);
        }
        Ok(())
    }
}
