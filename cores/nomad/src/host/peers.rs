//! A peers' host: queue pairs connected to a VM are suspended for its switchover, and resume when the host that runs it
//! announces it.

use super::{Host, PeerVm};
use crate::config::{InjectedBug, MAX_HOSTS, MAX_VMS_PER_MIGRATION};
use crate::event::{Action, Timer};
use crate::fanout::{ForwardedMessage, split};
use crate::message::Body;
use crate::names::{Epoch, HostId, MigrationId, Node, Place, Stamp, VmId};

impl Host {
    /// Whether queue pairs connected to a VM have been suspended for a migration, or for a later one.
    #[must_use]
    pub fn has_suspended(&self, migration: MigrationId, vm: VmId) -> bool {
        self.peer_vms.get(&vm).is_some_and(|known| known.suspended.is_some_and(|last| last >= migration))
    }

    pub(super) fn suspend(
        &mut self,
        from: HostId,
        migration: MigrationId,
        origin: HostId,
        vms: Vec<VmId>,
        forward_to: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if vms.len() > MAX_VMS_PER_MIGRATION || forward_to.len() > MAX_HOSTS {
            return;
        }
        for (head, rest) in split(&forward_to, self.config.fanout) {
            let body = Body::Suspend { migration, origin, vms: vms.clone(), forward_to: rest };
            self.send(Node::Host(head), body, actions);
        }
        for vm in &vms {
            self.suspend_qps(migration, *vm, actions);
        }
        let own_done = vms.iter().all(|vm| !self.is_suspending(migration, *vm));
        let own_done = own_done || self.config.injected_bug == InjectedBug::AckBeforeSuspended;
        let waiting = forward_to.into_iter().collect();
        let forwarded = ForwardedMessage { parent: from, own_done, waiting, done: [self.id].into() };
        Self::insert_forwarded(&mut self.suspending, (migration, origin), forwarded);
        self.answer_suspend((migration, origin), actions);
    }

    /// Suspends queue pairs connected to a VM, unless a later migration suspends them or this one has ended.
    fn suspend_qps(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(known) = self.peer_vms.get_mut(&vm) else { return };
        if known.stamp.after >= migration || known.suspended.is_some_and(|suspended| suspended >= migration) {
            return;
        }
        known.suspended = Some(migration);
        known.qps_suspended = false;
        for found in self.vms.values_mut() {
            found.peers.entry(vm).and_modify(|open| *open = false);
        }
        actions.push(Action::SuspendQps { migration, vm });
        self.set(Timer::Locate(vm), self.config.retry_ms.saturating_mul(2), actions);
    }

    fn is_suspending(&self, migration: MigrationId, vm: VmId) -> bool {
        self.peer_vms.get(&vm).is_some_and(|known| known.suspended == Some(migration) && !known.qps_suspended)
    }

    pub(super) fn qps_suspended(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        match self.peer_vms.get_mut(&vm) {
            Some(known) if known.suspended == Some(migration) => known.qps_suspended = true,
            _ => return,
        }
        let left =
            self.peer_vms.values().any(|known| known.suspended == Some(migration) && !known.qps_suspended);
        if left {
            return;
        }
        let keys: Vec<_> = self.suspending.keys().filter(|key| key.0 == migration).copied().collect();
        for key in keys {
            if let Some(forwarded) = self.suspending.get_mut(&key) {
                forwarded.own_done = true;
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
            self.peers_suspended(migration, &hosts, actions);
        } else if let Some(forwarded) = self.suspending.get_mut(&(migration, origin)) {
            forwarded.finished(&hosts);
            self.answer_suspend((migration, origin), actions);
        } else {
            self.send(Node::Host(origin), Body::Suspended { migration, origin, hosts }, actions);
        }
    }

    fn answer_suspend(&mut self, key: (MigrationId, HostId), actions: &mut Vec<Action>) {
        if !self.suspending.get(&key).is_some_and(ForwardedMessage::is_complete) {
            return;
        }
        let Some(forwarded) = self.suspending.remove(&key) else { return };
        let hosts = forwarded.done.into_iter().collect();
        let body = Body::Suspended { migration: key.0, origin: key.1, hosts };
        self.send(Node::Host(forwarded.parent), body, actions);
    }

    /// A host announces VMs that it runs.
    pub(super) fn announced(
        &mut self,
        from: HostId,
        after: MigrationId,
        origin: HostId,
        vms: Vec<(VmId, Epoch)>,
        forward_to: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if vms.len() > MAX_VMS_PER_MIGRATION || forward_to.len() > MAX_HOSTS {
            return;
        }
        for (head, rest) in split(&forward_to, self.config.fanout) {
            let body = Body::Running { after, origin, vms: vms.clone(), forward_to: rest };
            self.send(Node::Host(head), body, actions);
        }
        let mut own_done = true;
        for (vm, epoch) in &vms {
            let place = Place { vm: *vm, host: origin, epoch: *epoch };
            self.runs(place, after, actions);
            own_done &= self.is_open_to(*vm);
        }
        let forwarded = ForwardedMessage {
            parent: from,
            own_done,
            waiting: forward_to.into_iter().collect(),
            done: [self.id].into(),
        };
        Self::insert_forwarded(&mut self.resuming, (after, origin), forwarded);
        self.answer_ready((after, origin), actions);
    }

    /// A VM runs at a place since migration `after` has ended.
    fn runs(&mut self, place: Place, after: MigrationId, actions: &mut Vec<Action>) {
        let Some(known) = self.peer_vms.get_mut(&place.vm) else { return };
        let stamp = Stamp { epoch: place.epoch, after };
        let accepts_any_epoch = self.config.injected_bug == InjectedBug::NoEpochCheck;
        if stamp >= known.stamp || accepts_any_epoch {
            known.stamp = stamp;
            known.host = place.host;
        } else {
            return;
        }
        // An announcement that is older than the present suspension doesn't end it.
        if known.suspended.is_some_and(|suspended| suspended > after) && !accepts_any_epoch {
            return;
        }
        known.suspended = None;
        known.qps_suspended = false;
        for (vm, found) in &mut self.vms {
            if found.switching.is_some() {
                continue;
            }
            if let Some(open) = found.peers.get_mut(&place.vm)
                && (!*open || accepts_any_epoch)
            {
                *open = true;
                actions.push(Action::ResumeQps { vm: *vm, peer: place });
            }
        }
    }

    /// Whether all VMs here that have this peer may send to it; VMs that are still moving here may not.
    fn is_open_to(&self, vm: VmId) -> bool {
        let is_incoming = self.incoming.values().any(|incoming| incoming.has_peer(vm));
        let closed = self.vms.values().any(|found| found.peers.get(&vm).is_some_and(|open| !open));
        !is_incoming && !closed
    }

    pub(super) fn answer_ready(&mut self, key: (MigrationId, HostId), actions: &mut Vec<Action>) {
        if !self.resuming.get(&key).is_some_and(ForwardedMessage::is_complete) {
            return;
        }
        let Some(forwarded) = self.resuming.remove(&key) else { return };
        let hosts = forwarded.done.into_iter().collect();
        self.send(Node::Host(forwarded.parent), Body::Ready { after: key.0, origin: key.1, hosts }, actions);
    }

    /// A decision names a VM's host. The VM may not run there yet.
    pub(super) fn record_place(&mut self, place: Place) {
        if let Some(known) = self.peer_vms.get_mut(&place.vm)
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
    pub(super) fn located(&mut self, place: Place) {
        if let Some(known) = self.peer_vms.get_mut(&place.vm)
            && known.suspended.is_some()
            && known.stamp.epoch <= place.epoch
        {
            known.host = place.host;
        }
    }

    pub(super) fn locate(&mut self, vm: VmId, actions: &mut Vec<Action>) {
        let Some(host) = self.peer_vms.get(&vm).map(|known| known.host) else { return };
        self.send(Node::Coordinator, Body::Where { vm }, actions);
        self.send(Node::Host(host), Body::Where { vm }, actions);
        self.set(Timer::Locate(vm), self.config.retry_ms.saturating_mul(2), actions);
    }

    pub(super) fn peer_lost(&mut self, vm: VmId, epoch: Epoch, actions: &mut Vec<Action>) {
        let over = self.peer_vms.get(&vm).is_some_and(|known| known.stamp.epoch <= epoch);
        if !over || self.vms.contains_key(&vm) {
            return;
        }
        self.peer_vms.remove(&vm);
        for found in self.vms.values_mut() {
            found.peers.remove(&vm);
        }
        actions.push(Action::Lost { peer: vm });
    }

    /// Records the places of a received VM's peers.
    pub(super) fn record_peers(&mut self, peers: &[Place]) {
        for place in peers {
            let known = self.peer_vms.entry(place.vm).or_insert_with(|| PeerVm::new(*place));
            if known.stamp.epoch < place.epoch && known.suspended.is_none() {
                known.host = place.host;
                known.stamp.epoch = place.epoch;
            }
        }
    }
}
