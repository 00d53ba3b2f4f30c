//! Whose turn it is to switch over.
//!
//! A switchover stops the hosts of a VM's peers and tells the destination where they are: a peer that changed hosts meanwhile would be stopped, and sent to, in the
//! wrong place. So two migrations of which one moves a peer of a VM of the other are never both in their switchovers. All else of them may happen at the same time.
//!
//! Those that have to wait get their turn in the order of their numbers, as soon as no peer of their VMs is in a switchover, or waits for its turn before them.
//! The first one therefore waits for switchovers only, which end by their deadlines, and none is passed over for ever.

use std::collections::BTreeMap;

use super::{Action, Coordinator, Stage, hosts_of};
use crate::config::Plant;
use crate::names::{MigrationId, VmId};

impl Coordinator {
    /// The peer whose switchover a migration waits for; `None`: it waits for none.
    #[must_use]
    pub fn behind(&self, migration: MigrationId) -> Option<VmId> {
        self.progress.get(&migration).and_then(|progress| progress.behind)
    }

    /// Lets each migration switch over whose turn it is, and notifies the others of the peer that they wait for.
    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        let queued = self.progress.iter().filter(|(_, progress)| progress.stage == Stage::Queued);
        let queued: Vec<MigrationId> = queued.map(|(migration, _)| *migration).collect();
        if queued.is_empty() {
            return;
        }
        let moving = self.queued_or_switching();
        for migration in queued {
            let behind = self.first_obstacle(migration, &moving);
            let Some(stored) = self.ledger.migrations.get(&migration) else { continue };
            let (sources, destinations) = hosts_of(&stored.moves);
            let Some(progress) = self.progress.get_mut(&migration) else { continue };
            let before = std::mem::replace(&mut progress.behind, behind);
            match (behind, before) {
                (None, _) => {
                    progress.stage = Stage::Switching;
                    progress.switched = true;
                    progress.waiting = destinations;
                    progress.unyielded = sources;
                    self.enter(migration, actions);
                }
                (Some(_), None) => self.enter(migration, actions),
                (Some(_), Some(_)) if before != behind => self.say(migration, actions),
                (Some(_), Some(_)) => {}
            }
        }
    }

    /// VMs of migrations that are in a switchover, or wait for their turn.
    fn queued_or_switching(&self) -> BTreeMap<VmId, MigrationId> {
        let concerns = |progress: &super::Progress| progress.switched || progress.stage == Stage::Queued;
        let migrations = self.progress.iter().filter(|(_, progress)| concerns(progress));
        migrations.flat_map(|(of, _)| self.bound_by(*of).map(move |vm| (vm, *of))).collect()
    }

    /// VMs that a migration binds.
    fn bound_by(&self, migration: MigrationId) -> impl Iterator<Item = VmId> {
        let stored = self.ledger.migrations.get(&migration).filter(|stored| stored.binds());
        stored.into_iter().flat_map(|stored| &stored.moves).map(|moved| moved.vm)
    }

    /// A peer of a VM of a migration that is in a switchover, or whose turn is before. Costs a look-up in `moving` per peer.
    fn first_obstacle(&self, migration: MigrationId, moving: &BTreeMap<VmId, MigrationId>) -> Option<VmId> {
        if self.config.plant == Plant::SwitchTogether {
            return None;
        }
        let comes_first = |of: MigrationId| {
            let switched = || self.progress.get(&of).is_some_and(|progress| progress.switched);
            of != migration && (of < migration || switched())
        };
        let peers = self.bound_by(migration).flat_map(|vm| self.ledger.links.peers(vm));
        let obstacle = |peer: VmId| moving.get(&peer).map(|of| (*of, peer));
        peers.filter_map(obstacle).filter(|(of, _)| comes_first(*of)).min().map(|(_, vm)| vm)
    }
}
