//! A host's part as a destination: from the reservation to the decision.

use std::collections::{BTreeMap, BTreeSet};

use super::{Host, Vm};
use crate::config::{MAX_FACES, MAX_MIGRATIONS, MAX_MOVES, Plant};
use crate::event::{Action, Timer};
use crate::message::{Body, Reason};
use crate::names::{Epoch, HostId, MigrationId, Move, Node, Place, VmId};

/// VMs that a migration moves to this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Arriving {
    moves: Vec<Move>,
    /// Whether the capacity is reserved.
    granted: bool,
    /// VMs whose stream is complete.
    arrived: BTreeSet<VmId>,
    /// Per VM: its peers, from `Handover`.
    faces: BTreeMap<VmId, Vec<Place>>,
}

impl Arriving {
    /// Whether a VM is a peer of one of the VMs.
    pub fn faces(&self, vm: VmId) -> bool {
        self.faces.values().flatten().any(|place| place.vm == vm)
    }

    pub fn is_loaded(&self) -> bool {
        self.granted
            && self
                .moves
                .iter()
                .all(|moved| self.arrived.contains(&moved.vm) && self.faces.contains_key(&moved.vm))
    }

    pub fn has_voted(&self, vm: VmId) -> bool {
        self.is_loaded() && self.brings(vm)
    }

    fn brings(&self, vm: VmId) -> bool {
        self.moves.iter().any(|moved| moved.vm == vm)
    }
}

impl Host {
    pub(super) fn reserve(&mut self, migration: MigrationId, moves: Vec<Move>, actions: &mut Vec<Action>) {
        if let Some(arriving) = self.arriving.get(&migration) {
            if arriving.granted {
                self.tell(Node::Coordinator, Body::Reserved { migration }, actions);
            }
            return;
        }
        let fits = !moves.is_empty() && moves.len() <= MAX_MOVES;
        let fits = fits && moves.iter().all(|moved| moved.to == self.id && !self.vms.contains_key(&moved.vm));
        let busy = self.arriving.len() >= MAX_MIGRATIONS
            || moves.iter().any(|moved| self.arriving.values().any(|other| other.brings(moved.vm)));
        if !fits || busy {
            let reason = if fits { Reason::Busy } else { Reason::NoRoom };
            self.tell(Node::Coordinator, Body::Failed { migration, reason }, actions);
            return;
        }
        actions.push(Action::Reserve { migration, moves: moves.clone() });
        let arriving = Arriving { moves, granted: false, arrived: BTreeSet::new(), faces: BTreeMap::new() };
        self.arriving.insert(migration, arriving);
        self.set(Timer::Arriving(migration), self.config.calm_ms, actions);
    }

    pub(super) fn room(&mut self, migration: MigrationId, granted: bool, actions: &mut Vec<Action>) {
        let Some(arriving) = self.arriving.get_mut(&migration) else { return };
        let body = if granted {
            arriving.granted = true;
            Body::Reserved { migration }
        } else {
            self.arriving.remove(&migration);
            Body::Failed { migration, reason: Reason::NoRoom }
        };
        self.tell(Node::Coordinator, body, actions);
    }

    pub(super) fn arrived(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        if let Some(arriving) = self.arriving.get_mut(&migration)
            && arriving.brings(vm)
            && arriving.arrived.insert(vm)
        {
            self.tell_loaded(migration, actions);
        }
    }

    pub(super) fn handover(
        &mut self,
        from: HostId,
        migration: MigrationId,
        vm: VmId,
        faces: Vec<Place>,
        actions: &mut Vec<Action>,
    ) {
        let Some(arriving) = self.arriving.get_mut(&migration) else { return };
        let expected = arriving.moves.iter().any(|moved| moved.vm == vm && moved.from == from);
        if !expected || faces.len() > MAX_FACES {
            return;
        }
        arriving.faces.insert(vm, faces.clone());
        // From now on an announcement of a peer concerns this VM too.
        self.learn(&faces);
        self.tell_loaded(migration, actions);
    }

    fn tell_loaded(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(arriving) = self.arriving.get(&migration).filter(|arriving| arriving.is_loaded()) else {
            return;
        };
        let sources: BTreeSet<_> = arriving.moves.iter().map(|moved| moved.from).collect();
        if self.config.plant == Plant::ResumeBeforeCommit {
            self.land_planted(migration, actions);
        }
        for source in sources {
            self.tell(Node::Host(source), Body::Loaded { migration }, actions);
        }
        self.tell(Node::Coordinator, Body::Loaded { migration }, actions);
        // Guests are suspended from now on: retransmissions are due after the short interval.
        self.set(Timer::Arriving(migration), self.config.retry_ms, actions);
    }

    /// [`Plant::ResumeBeforeCommit`]: makes peers resume although nothing is decided.
    fn land_planted(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(arriving) = self.arriving.get(&migration) else { return };
        let vms = arriving.moves.iter().map(|moved| (moved.vm, moved.epoch)).collect::<Vec<_>>();
        let hosts: BTreeSet<_> = arriving.faces.values().flatten().map(|place| place.host).collect();
        for host in hosts {
            let body = Body::Running { after: migration, origin: self.id, vms: vms.clone(), fan: Vec::new() };
            self.tell(Node::Host(host), body, actions);
        }
    }

    pub(super) fn repeat_arriving(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(arriving) = self.arriving.get(&migration) else { return };
        if arriving.is_loaded() {
            self.tell_loaded(migration, actions);
        } else {
            self.tell(Node::Coordinator, Body::Outcome { migration }, actions);
            self.set(Timer::Arriving(migration), self.config.calm_ms, actions);
        }
    }

    /// After a commit: runs the VMs if all their state has been received. Returns the VMs that it runs.
    pub(super) fn land(
        &mut self,
        migration: MigrationId,
        places: &[Place],
        actions: &mut Vec<Action>,
    ) -> Option<Vec<(VmId, Epoch)>> {
        let arriving = self.arriving.remove(&migration)?;
        if !arriving.is_loaded() {
            // This daemon restarted after its vote, and an old message made it reserve again: the VMs are lost, and
            // `Settled` reports that.
            actions.push(Action::Release { migration });
            return None;
        }
        let (mut landed, mut others) = (Vec::new(), false);
        for (vm, faces) in arriving.faces {
            let epoch =
                places.iter().find(|place| place.vm == vm && place.host == self.id).map(|place| place.epoch);
            let Some(epoch) = epoch else {
                // The coordinator has declared it lost, and another host may have started it.
                others = true;
                continue;
            };
            self.learn(&faces);
            let faces = faces.iter().map(|place| (place.vm, false)).collect();
            self.vms.insert(vm, Vm { epoch, after: migration, switching: None, faces });
            actions.push(Action::Run { vm, epoch });
            landed.push((vm, epoch));
        }
        if others {
            actions.push(Action::Release { migration });
        }
        Some(landed)
    }
}
