//! Order of the switchovers of peers' migrations.
//!
//! In a switchover the source suspends the queue pairs of a VM's peers, and passes the peers' hosts to the destination. A peer that changed
//! hosts meanwhile would be suspended at the wrong host. So two migrations that move peers of each other are never both in their switchovers.
//! Their other stages may overlap.
//!
//! Queued migrations are admitted in the order of their numbers, as soon as no peer of their VMs is in a switchover or queued with a lower
//! number. The first one therefore waits for switchovers only, which end by their deadlines, so that none starves.

use std::collections::BTreeMap;

use super::{Action, Coordinator, Stage, hosts_of};
use crate::config::InjectedBug;
use crate::names::{MigrationId, VmId};

impl Coordinator {
    /// The peer whose switchover a migration waits for, if any.
    #[must_use]
    pub fn waits_for(&self, migration: MigrationId) -> Option<VmId> {
        self.progress.get(&migration).and_then(|progress| progress.waits_for)
    }

    /// Admits queued migrations to their switchovers, and notifies the others of the peer that they wait for.
    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        let queued = self.progress.iter().filter(|(_, progress)| progress.stage == Stage::Queued);
        let queued: Vec<MigrationId> = queued.map(|(migration, _)| *migration).collect();
        if queued.is_empty() {
            return;
        }
        let moving = self.queued_or_switching();
        for migration in queued {
            let waits_for = self.first_obstacle(migration, &moving);
            let Some(stored) = self.ledger.migrations.get(&migration) else { continue };
            let (sources, destinations) = hosts_of(&stored.moves);
            let Some(progress) = self.progress.get_mut(&migration) else { continue };
            let before = std::mem::replace(&mut progress.waits_for, waits_for);
            match (waits_for, before) {
                (None, _) => {
                    progress.stage = Stage::Switching;
                    progress.switched = true;
                    progress.waiting = destinations;
                    progress.unvoted_sources = sources;
                    self.enter(migration, actions);
                }
                (Some(_), None) => self.enter(migration, actions),
                (Some(_), Some(_)) if before != waits_for => self.send_requests(migration, actions),
                (Some(_), Some(_)) => {}
            }
        }
    }

    /// VMs of migrations that are queued or in a switchover.
    fn queued_or_switching(&self) -> BTreeMap<VmId, MigrationId> {
        let concerns =
            |progress: &super::MigrationProgress| progress.switched || progress.stage == Stage::Queued;
        let migrations = self.progress.iter().filter(|(_, progress)| concerns(progress));
        migrations.flat_map(|(of, _)| self.bound_by(*of).map(move |vm| (vm, *of))).collect()
    }

    /// VMs that a migration binds.
    fn bound_by(&self, migration: MigrationId) -> impl Iterator<Item = VmId> {
        let stored = self.ledger.migrations.get(&migration).filter(|stored| stored.binds());
        stored.into_iter().flat_map(|stored| &stored.moves).map(|moved| moved.vm)
    }

    /// A peer of the migration's VMs that switches over first. Costs a look-up in `moving` per peer.
    fn first_obstacle(&self, migration: MigrationId, moving: &BTreeMap<VmId, MigrationId>) -> Option<VmId> {
        if self.config.injected_bug == InjectedBug::OverlappingSwitchovers {
            return None;
        }
        let precedes = |of: MigrationId| {
            let switched = || self.progress.get(&of).is_some_and(|progress| progress.switched);
            of != migration && (of < migration || switched())
        };
        let peers = self.bound_by(migration).flat_map(|vm| self.ledger.links.peers(vm));
        let obstacle = |peer: VmId| moving.get(&peer).map(|of| (*of, peer));
        peers.filter_map(obstacle).filter(|(of, _)| precedes(*of)).min().map(|(_, vm)| vm)
    }
}
