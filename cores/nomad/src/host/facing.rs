//! A peers' host: queue pairs connected to a VM are suspended for its switchover, and resume when the host that runs it
//! announces it.

use super::{Host, Known};
use crate::config::{MAX_HOSTS, MAX_MOVES, Plant};
use crate::event::{Action, Timer};
use crate::fan::{Spread, split};
use crate::message::Body;
use crate::names::{Epoch, HostId, MigrationId, Node, Place, Stamp, VmId};

impl Host {
    /// Whether queue pairs connected to a VM have been suspended for a migration, or for a later one.
    #[must_use]
    pub fn suspends(&self, migration: MigrationId, vm: VmId) -> bool {
        self.known.get(&vm).is_some_and(|known| known.suspended.is_some_and(|last| last >= migration))
    }

    pub(super) fn suspend(
        &mut self,
        from: HostId,
        migration: MigrationId,
        origin: HostId,
        vms: Vec<VmId>,
        fan: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if vms.len() > MAX_MOVES || fan.len() > MAX_HOSTS {
            return;
        }
        for (head, rest) in split(&fan, self.config.fan) {
            let body = Body::Suspend { migration, origin, vms: vms.clone(), fan: rest };
            self.tell(Node::Host(head), body, actions);
        }
        for vm in &vms {
            self.hold(migration, *vm, actions);
        }
        let own = vms.iter().all(|vm| !self.is_to_hold(migration, *vm));
        let own = own || self.config.plant == Plant::AckBeforeHeld;
        let waiting = fan.into_iter().collect();
        let spread = Spread { parent: from, own, waiting, done: [self.id].into() };
        Self::remember(&mut self.suspending, (migration, origin), spread);
        self.answer_suspend((migration, origin), actions);
    }

    /// Suspends queue pairs connected to a VM, unless a later migration suspends them or this one has ended.
    fn hold(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(known) = self.known.get_mut(&vm) else { return };
        if known.stamp.after >= migration || known.suspended.is_some_and(|suspended| suspended >= migration) {
            return;
        }
        known.suspended = Some(migration);
        known.held = false;
        for found in self.vms.values_mut() {
            found.faces.entry(vm).and_modify(|open| *open = false);
        }
        actions.push(Action::Hold { migration, vm });
        self.set(Timer::Ask(vm), self.config.retry_ms.saturating_mul(2), actions);
    }

    fn is_to_hold(&self, migration: MigrationId, vm: VmId) -> bool {
        self.known.get(&vm).is_some_and(|known| known.suspended == Some(migration) && !known.held)
    }

    pub(super) fn held(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        match self.known.get_mut(&vm) {
            Some(known) if known.suspended == Some(migration) => known.held = true,
            _ => return,
        }
        let left = self.known.values().any(|known| known.suspended == Some(migration) && !known.held);
        if left {
            return;
        }
        let keys: Vec<_> = self.suspending.keys().filter(|key| key.0 == migration).copied().collect();
        for key in keys {
            if let Some(spread) = self.suspending.get_mut(&key) {
                spread.own = true;
            }
            self.answer_suspend(key, actions);
        }
    }

    /// Hosts to which this host forwarded the request have suspended, or, at the source, peers' hosts have.
    pub(super) fn suspended(
        &mut self,
        migration: MigrationId,
        origin: HostId,
        hosts: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if origin == self.id {
            self.peers_stopped(migration, &hosts, actions);
        } else if let Some(spread) = self.suspending.get_mut(&(migration, origin)) {
            spread.finished(&hosts);
            self.answer_suspend((migration, origin), actions);
        } else {
            self.tell(Node::Host(origin), Body::Suspended { migration, origin, hosts }, actions);
        }
    }

    fn answer_suspend(&mut self, key: (MigrationId, HostId), actions: &mut Vec<Action>) {
        if !self.suspending.get(&key).is_some_and(Spread::is_complete) {
            return;
        }
        let Some(spread) = self.suspending.remove(&key) else { return };
        let hosts = spread.done.into_iter().collect();
        let body = Body::Suspended { migration: key.0, origin: key.1, hosts };
        self.tell(Node::Host(spread.parent), body, actions);
    }

    /// A host announces VMs that it runs.
    pub(super) fn announced(
        &mut self,
        from: HostId,
        after: MigrationId,
        origin: HostId,
        vms: Vec<(VmId, Epoch)>,
        fan: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if vms.len() > MAX_MOVES || fan.len() > MAX_HOSTS {
            return;
        }
        for (head, rest) in split(&fan, self.config.fan) {
            let body = Body::Running { after, origin, vms: vms.clone(), fan: rest };
            self.tell(Node::Host(head), body, actions);
        }
        let mut own = true;
        for (vm, epoch) in &vms {
            let place = Place { vm: *vm, host: origin, epoch: *epoch };
            self.runs(place, after, actions);
            own &= self.goes_on_with(*vm);
        }
        let spread = Spread { parent: from, own, waiting: fan.into_iter().collect(), done: [self.id].into() };
        Self::remember(&mut self.readying, (after, origin), spread);
        self.answer_ready((after, origin), actions);
    }

    /// A VM runs at a place since migration `after` has ended.
    fn runs(&mut self, place: Place, after: MigrationId, actions: &mut Vec<Action>) {
        let Some(known) = self.known.get_mut(&place.vm) else { return };
        let stamp = Stamp { epoch: place.epoch, after };
        let believes = self.config.plant == Plant::NoEpochCheck;
        if stamp >= known.stamp || believes {
            known.stamp = stamp;
            known.host = place.host;
        } else {
            return;
        }
        // An announcement that is older than the present suspension doesn't end it.
        if known.suspended.is_some_and(|suspended| suspended > after) && !believes {
            return;
        }
        known.suspended = None;
        known.held = false;
        for (vm, found) in &mut self.vms {
            if found.switching.is_some() {
                continue;
            }
            if let Some(open) = found.faces.get_mut(&place.vm)
                && (!*open || believes)
            {
                *open = true;
                actions.push(Action::Open { vm: *vm, peer: place });
            }
        }
    }

    /// Whether all VMs here that have this peer may send to it; VMs that are still moving here may not.
    fn goes_on_with(&self, vm: VmId) -> bool {
        let coming = self.arriving.values().any(|arriving| arriving.faces(vm));
        let closed = self.vms.values().any(|found| found.faces.get(&vm).is_some_and(|open| !open));
        !coming && !closed
    }

    pub(super) fn answer_ready(&mut self, key: (MigrationId, HostId), actions: &mut Vec<Action>) {
        if !self.readying.get(&key).is_some_and(Spread::is_complete) {
            return;
        }
        let Some(spread) = self.readying.remove(&key) else { return };
        let hosts = spread.done.into_iter().collect();
        self.tell(Node::Host(spread.parent), Body::Ready { after: key.0, origin: key.1, hosts }, actions);
    }

    /// A decision names a VM's host. The VM may not run there yet.
    pub(super) fn points_to(&mut self, place: Place) {
        if let Some(known) = self.known.get_mut(&place.vm)
            && known.stamp.epoch < place.epoch
        {
            known.host = place.host;
            if known.suspended.is_none() {
                // No queue pair of this host was in use towards the VM: it would have been suspended.
                known.stamp.epoch = place.epoch;
            }
        }
    }

    /// The coordinator's answer about a VM whose announcement is overdue.
    pub(super) fn at(&mut self, place: Place) {
        if let Some(known) = self.known.get_mut(&place.vm)
            && known.suspended.is_some()
            && known.stamp.epoch <= place.epoch
        {
            known.host = place.host;
        }
    }

    pub(super) fn ask(&mut self, vm: VmId, actions: &mut Vec<Action>) {
        let Some(host) = self.known.get(&vm).map(|known| known.host) else { return };
        self.tell(Node::Coordinator, Body::Where { vm }, actions);
        self.tell(Node::Host(host), Body::Where { vm }, actions);
        self.set(Timer::Ask(vm), self.config.retry_ms.saturating_mul(2), actions);
    }

    pub(super) fn gone(&mut self, vm: VmId, epoch: Epoch, actions: &mut Vec<Action>) {
        let over = self.known.get(&vm).is_some_and(|known| known.stamp.epoch <= epoch);
        if !over || self.vms.contains_key(&vm) {
            return;
        }
        self.known.remove(&vm);
        for found in self.vms.values_mut() {
            found.faces.remove(&vm);
        }
        actions.push(Action::Lost { peer: vm });
    }

    /// Records the places of a received VM's peers.
    pub(super) fn learn(&mut self, faces: &[Place]) {
        for place in faces {
            let known = self.known.entry(place.vm).or_insert_with(|| Known::new(*place));
            if known.stamp.epoch < place.epoch && known.suspended.is_none() {
                known.host = place.host;
                known.stamp.epoch = place.epoch;
            }
        }
    }
}
