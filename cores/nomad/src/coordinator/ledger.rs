//! The coordinator's durable state, and the records that change it.
//!
//! A record is written before any message that follows from it is sent. The state is the result of all records in order. A coordinator
//! continues its predecessor's work from either.

use std::collections::BTreeMap;

use super::indexes::{Links, Migrations, Owners};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Move, Place, VmId};

/// Who may run a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The host.
    pub host: HostId,
    /// The epoch of this ownership.
    pub epoch: Epoch,
    /// Whether it still runs. `false` after a restart of its host's daemon.
    pub alive: bool,
}

/// The coordinator's decision about a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decision {
    /// The VMs run at their destinations.
    Committed,
    /// The VMs run at their sources.
    Aborted,
}

/// A migration that isn't over at all hosts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoredMigration {
    /// Its VMs, with sources and destinations.
    pub moves: Vec<Move>,
    /// The decision; `None` while it is undecided.
    pub decision: Option<Decision>,
    /// `Some`: its VMs are free again, and the decision is kept for these incarnations of hosts, which haven't settled it. `None`: the
    /// coordinator waits for all participating hosts.
    pub owed: Option<BTreeMap<HostId, Incarnation>>,
}

impl StoredMigration {
    /// A migration that begins.
    #[must_use]
    pub fn new(moves: Vec<Move>) -> Self {
        Self { moves, decision: None, owed: None }
    }

    /// Whether it binds its VMs: none of them may move, end or be started meanwhile.
    #[must_use]
    pub fn binds(&self) -> bool {
        self.owed.is_none()
    }
}

/// A change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Record {
    /// A host's daemon has started: VMs of its earlier incarnation are lost.
    Host {
        /// The host.
        host: HostId,
        /// The new incarnation.
        incarnation: Incarnation,
        /// VMs of the earlier incarnation.
        lost: Vec<VmId>,
    },
    /// A VM is started.
    Vm {
        /// The VM.
        vm: VmId,
        /// The host that runs it.
        host: HostId,
        /// The epoch that it gets.
        epoch: Epoch,
    },
    /// A VM has ended.
    VmEnded {
        /// The VM.
        vm: VmId,
    },
    /// Two VMs have a connection that is in use.
    Linked {
        /// The one with the lower number.
        a: VmId,
        /// The other.
        b: VmId,
    },
    /// They have none any more.
    Unlinked {
        /// The one with the lower number.
        a: VmId,
        /// The other.
        b: VmId,
    },
    /// A migration begins.
    Begun {
        /// Its name.
        migration: MigrationId,
        /// What moves.
        moves: Vec<Move>,
    },
    /// The commit point: the VMs have new owners.
    Committed {
        /// Which migration.
        migration: MigrationId,
    },
    /// The migration is aborted.
    Aborted {
        /// Which migration.
        migration: MigrationId,
    },
    /// Hosts haven't settled the decision in time: the VMs are free, and the decision is kept for these hosts.
    Released {
        /// Which migration.
        migration: MigrationId,
        /// The hosts, and their last known incarnations.
        owed: Vec<(HostId, Incarnation)>,
        /// VMs that their owner doesn't have.
        lost: Vec<VmId>,
    },
    /// One of the hosts for which a decision was kept has settled it. The last one ends the migration.
    HostSettled {
        /// Which migration.
        migration: MigrationId,
        /// The host.
        host: HostId,
        /// VMs that it should have, and doesn't.
        lost: Vec<VmId>,
    },
    /// All hosts have settled the decision.
    Finished {
        /// Which migration.
        migration: MigrationId,
        /// VMs that their owner doesn't have.
        lost: Vec<VmId>,
    },
}

/// The state.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ledger {
    /// Hosts, and their last known incarnations.
    pub hosts: BTreeMap<HostId, Incarnation>,
    /// The owner of each VM that hasn't ended, lost VMs included.
    pub vms: Owners,
    /// Connected VMs.
    pub links: Links,
    /// Migrations that aren't over.
    pub migrations: Migrations,
    /// The last migration's name.
    pub last: MigrationId,
}

impl Ledger {
    /// Makes a change.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::Host { host, incarnation, lost } => {
                self.hosts.insert(*host, *incarnation);
                self.lose(lost);
            }
            Record::Vm { vm, host, epoch } => {
                self.vms.insert(*vm, Owner { host: *host, epoch: *epoch, alive: true });
            }
            Record::VmEnded { vm } => {
                self.vms.remove(*vm);
                self.links.remove_vm(*vm);
            }
            Record::Linked { a, b } => {
                self.links.insert((*a, *b));
            }
            Record::Unlinked { a, b } => {
                self.links.remove((*a, *b));
            }
            Record::Begun { migration, moves } => {
                self.last = self.last.max(*migration);
                self.migrations.insert(*migration, StoredMigration::new(moves.clone()));
            }
            Record::Committed { migration } => {
                let Self { vms, migrations, .. } = self;
                migrations.change(*migration, |stored| {
                    stored.decision = Some(Decision::Committed);
                    for moved in &stored.moves {
                        let owner = Owner { host: moved.to, epoch: moved.epoch, alive: true };
                        vms.insert(moved.vm, owner);
                    }
                });
            }
            Record::Aborted { migration } => {
                self.migrations.change(*migration, |stored| stored.decision = Some(Decision::Aborted));
            }
            Record::Released { migration, owed, lost } => {
                self.migrations.change(*migration, |stored| {
                    // Only a decision can be kept.
                    if stored.decision.is_some() {
                        stored.owed = Some(owed.iter().copied().collect());
                    }
                });
                self.lose(lost);
            }
            Record::HostSettled { migration, host, lost } => {
                let mut all_settled = false;
                self.migrations.change(*migration, |stored| {
                    if let Some(owed) = &mut stored.owed {
                        owed.remove(host);
                        all_settled = owed.is_empty();
                    }
                });
                if all_settled {
                    self.migrations.remove(*migration);
                }
                self.lose(lost);
            }
            Record::Finished { migration, lost } => {
                self.migrations.remove(*migration);
                self.lose(lost);
            }
        }
    }

    fn lose(&mut self, lost: &[VmId]) {
        for vm in lost {
            self.vms.lose(*vm);
        }
    }

    /// The migration that binds a VM: an undecided one, or one of which hosts are waited for.
    #[must_use]
    pub fn migration_of(&self, vm: VmId) -> Option<MigrationId> {
        self.migrations.binding(vm)
    }

    /// The places of a migration's VMs after a decision: the destinations in the new epochs, or the sources in the epochs before.
    #[must_use]
    pub fn places(stored: &StoredMigration, decision: Decision) -> Vec<Place> {
        let place = |moved: &Move| match decision {
            Decision::Committed => Place { vm: moved.vm, host: moved.to, epoch: moved.epoch },
            Decision::Aborted => {
                Place { vm: moved.vm, host: moved.from, epoch: Epoch(moved.epoch.0.saturating_sub(1)) }
            }
        };
        stored.moves.iter().map(place).collect()
    }
}
