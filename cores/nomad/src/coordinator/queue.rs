//! Whose turn it is to switch over.
//!
//! A switchover stops the hosts of a VM's peers and tells the destination where they are: a peer that changed hosts meanwhile would be stopped, and sent to, in the
//! wrong place. So two migrations of which one moves a peer of a VM of the other are never both in their switchovers. All else of them may happen at the same time.
//!
//! Those that have to wait get their turn in the order of their numbers, as soon as no peer of their VMs is in a switchover, or waits for its turn before them.
//! The first one therefore waits for switchovers only, which end by their deadlines, and none is passed over for ever.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, Coordinator, Stage, hosts_of};
use crate::config::Plant;
use crate::names::{MigrationId, VmId};

impl Coordinator {
    /// The peer whose switchover a migration waits for; `None`: it waits for none.
    #[must_use]
    pub fn behind(&self, migration: MigrationId) -> Option<VmId> {
        self.progress.get(&migration).and_then(|progress| progress.behind)
    }

    /// Lets each migration switch over whose turn it is, and tells the others for whom they wait.
    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        let queued = self.progress.iter().filter(|(_, progress)| progress.stage == Stage::Queued);
        for migration in queued.map(|(migration, _)| *migration).collect::<Vec<_>>() {
            let behind = self.first_obstacle(migration);
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

    /// A peer of a VM of a migration that is in a switchover, or whose turn is before.
    fn first_obstacle(&self, migration: MigrationId) -> Option<VmId> {
        if self.config.plant == Plant::SwitchTogether {
            return None;
        }
        let moved = |of: &MigrationId| {
            let stored = self.ledger.migrations.get(of).filter(|stored| stored.binds());
            stored.into_iter().flat_map(|stored| &stored.moves).map(|moved| moved.vm)
        };
        let comes_first = |(of, progress): &(&MigrationId, &super::Progress)| {
            **of != migration && (progress.switched || progress.stage == Stage::Queued && **of < migration)
        };
        let others: BTreeMap<VmId, MigrationId> = self
            .progress
            .iter()
            .filter(comes_first)
            .flat_map(|(of, _)| moved(of).map(move |vm| (vm, *of)))
            .collect();
        if others.is_empty() {
            return None;
        }
        let own: BTreeSet<VmId> = moved(&migration).collect();
        let obstacle = |(a, b): &(VmId, VmId)| {
            let one = |vm, peer| own.contains(vm).then(|| others.get_key_value(peer)).flatten();
            one(a, b).or_else(|| one(b, a)).map(|(vm, of)| (*of, *vm))
        };
        self.ledger.links.iter().filter_map(obstacle).min().map(|(_, vm)| vm)
    }
}
