//! A host's part as a destination: from the reservation to the decision.

use std::collections::{BTreeMap, BTreeSet};

use super::{Host, Vm};
use crate::config::{InjectedBug, MAX_MIGRATIONS_PER_HOST, MAX_PEERS_PER_VM, MAX_VMS_PER_MIGRATION};
use crate::event::{Action, Timer};
use crate::message::{AbortReason, Body};
use crate::names::{Epoch, HostId, MigrationId, Move, Node, Place, VmId};

/// VMs that a migration moves to this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct IncomingMigration {
    moves: Vec<Move>,
    /// Whether the capacity is reserved.
    granted: bool,
    /// VMs whose stream is complete.
    arrived: BTreeSet<VmId>,
    /// Per VM: its peers, from `Handover`.
    peers: BTreeMap<VmId, Vec<Place>>,
}

impl IncomingMigration {
    /// Whether a VM is a peer of one of the VMs.
    pub fn has_peer(&self, vm: VmId) -> bool {
        self.peers.values().flatten().any(|place| place.vm == vm)
    }

    pub fn is_loaded(&self) -> bool {
        self.granted
            && self
                .moves
                .iter()
                .all(|moved| self.arrived.contains(&moved.vm) && self.peers.contains_key(&moved.vm))
    }

    pub fn has_voted(&self, vm: VmId) -> bool {
        self.is_loaded() && self.includes(vm)
    }

    fn includes(&self, vm: VmId) -> bool {
        self.moves.iter().any(|moved| moved.vm == vm)
    }
}

impl Host {
    pub(super) fn reserve(&mut self, migration: MigrationId, moves: Vec<Move>, actions: &mut Vec<Action>) {
        if let Some(incoming) = self.incoming.get(&migration) {
            if incoming.granted {
                self.send(Node::Coordinator, Body::Reserved { migration }, actions);
            }
            return;
        }
        let fits = !moves.is_empty() && moves.len() <= MAX_VMS_PER_MIGRATION;
        let fits = fits && moves.iter().all(|moved| moved.to == self.id && !self.vms.contains_key(&moved.vm));
        let busy = self.incoming.len() >= MAX_MIGRATIONS_PER_HOST
            || moves.iter().any(|moved| self.incoming.values().any(|other| other.includes(moved.vm)));
        if !fits || busy {
            let reason = if fits { AbortReason::Busy } else { AbortReason::NoRoom };
            self.send(Node::Coordinator, Body::Failed { migration, reason }, actions);
            return;
        }
        actions.push(Action::Reserve { migration, moves: moves.clone() });
        let incoming =
            IncomingMigration { moves, granted: false, arrived: BTreeSet::new(), peers: BTreeMap::new() };
        self.incoming.insert(migration, incoming);
        self.set(Timer::Incoming(migration), self.config.precopy_retry_ms, actions);
    }

    pub(super) fn reservation(&mut self, migration: MigrationId, granted: bool, actions: &mut Vec<Action>) {
        let Some(incoming) = self.incoming.get_mut(&migration) else { return };
        let body = if granted {
            incoming.granted = true;
            Body::Reserved { migration }
        } else {
            self.incoming.remove(&migration);
            Body::Failed { migration, reason: AbortReason::NoRoom }
        };
        self.send(Node::Coordinator, body, actions);
    }

    pub(super) fn arrived(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        if let Some(incoming) = self.incoming.get_mut(&migration)
            && incoming.includes(vm)
            && incoming.arrived.insert(vm)
        {
            self.send_loaded(migration, actions);
        }
    }

    pub(super) fn handover(
        &mut self,
        from: HostId,
        migration: MigrationId,
        vm: VmId,
        peers: Vec<Place>,
        actions: &mut Vec<Action>,
    ) {
        let Some(incoming) = self.incoming.get_mut(&migration) else { return };
        let expected = incoming.moves.iter().any(|moved| moved.vm == vm && moved.from == from);
        if !expected || peers.len() > MAX_PEERS_PER_VM {
            return;
        }
        incoming.peers.insert(vm, peers.clone());
        // From now on an announcement of a peer concerns this VM too.
        self.record_peers(&peers);
        self.send_loaded(migration, actions);
    }

    fn send_loaded(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(incoming) = self.incoming.get(&migration).filter(|incoming| incoming.is_loaded()) else {
            return;
        };
        let sources: BTreeSet<_> = incoming.moves.iter().map(|moved| moved.from).collect();
        if self.config.injected_bug == InjectedBug::ResumeBeforeCommit {
            self.announce_before_commit(migration, actions);
        }
        for source in sources {
            self.send(Node::Host(source), Body::Loaded { migration }, actions);
        }
        self.send(Node::Coordinator, Body::Loaded { migration }, actions);
        // Guests are suspended from now on: retransmissions are due after the short interval.
        self.set(Timer::Incoming(migration), self.config.retry_ms, actions);
    }

    /// [`InjectedBug::ResumeBeforeCommit`]: makes peers resume although nothing is decided.
    fn announce_before_commit(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(incoming) = self.incoming.get(&migration) else { return };
        let vms = incoming.moves.iter().map(|moved| (moved.vm, moved.epoch)).collect::<Vec<_>>();
        let hosts: BTreeSet<_> = incoming.peers.values().flatten().map(|place| place.host).collect();
        for host in hosts {
            let body =
                Body::Running { after: migration, origin: self.id, vms: vms.clone(), forward_to: Vec::new() };
            self.send(Node::Host(host), body, actions);
        }
    }

    pub(super) fn retransmit_incoming(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(incoming) = self.incoming.get(&migration) else { return };
        if incoming.is_loaded() {
            self.send_loaded(migration, actions);
        } else {
            self.send(Node::Coordinator, Body::Outcome { migration }, actions);
            self.set(Timer::Incoming(migration), self.config.precopy_retry_ms, actions);
        }
    }

    /// After a commit: runs the VMs if all their state has been received. Returns the VMs that it runs.
    pub(super) fn commit_incoming(
        &mut self,
        migration: MigrationId,
        places: &[Place],
        actions: &mut Vec<Action>,
    ) -> Option<Vec<(VmId, Epoch)>> {
        let incoming = self.incoming.remove(&migration)?;
        if !incoming.is_loaded() {
            // This daemon restarted after its vote, and an old message made it reserve again: the VMs are lost, and
            // `Settled` reports that.
            actions.push(Action::Release { migration });
            return None;
        }
        let (mut started, mut others) = (Vec::new(), false);
        for (vm, peers) in incoming.peers {
            let epoch =
                places.iter().find(|place| place.vm == vm && place.host == self.id).map(|place| place.epoch);
            let Some(epoch) = epoch else {
                // The coordinator has declared it lost, and another host may have started it.
                others = true;
                continue;
            };
            self.record_peers(&peers);
            let peers = peers.iter().map(|place| (place.vm, false)).collect();
            self.vms.insert(vm, Vm { epoch, after: migration, switching: None, peers });
            actions.push(Action::Run { vm, epoch });
            started.push((vm, epoch));
        }
        if others {
            actions.push(Action::Release { migration });
        }
        Some(started)
    }
}
