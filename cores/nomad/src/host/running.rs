//! Announcements: the host that runs a VM notifies the hosts of its peers, and collects their answers.

use std::collections::BTreeSet;

use super::Host;
use crate::event::{Action, Timer};
use crate::fan::split;
use crate::message::Body;
use crate::names::{Epoch, HostId, MigrationId, Node, Place, VmId};

/// Factor on the retransmission interval after [`crate::Config::announcements`] tries.
pub(super) const SLOWER: u32 = 32;

/// VMs that run here since a migration has ended, and peers' hosts that haven't answered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Announcing {
    vms: Vec<(VmId, Epoch)>,
    waiting: BTreeSet<HostId>,
    tries: u8,
}

impl Host {
    /// Announces VMs to the hosts of their peers, along a tree. Until a host has answered, queue pairs between it and
    /// the VMs stay suspended.
    pub(super) fn announce(&mut self, after: MigrationId, vms: &[(VmId, Epoch)], actions: &mut Vec<Action>) {
        let names: Vec<_> = vms.iter().map(|(vm, _)| *vm).collect();
        // This announcement replaces earlier ones of the same VMs.
        self.announcing.retain(|_, earlier| {
            earlier.vms.retain(|(vm, _)| !names.contains(vm));
            !earlier.vms.is_empty()
        });
        let waiting = self.hosts_of_peers(&names);
        if waiting.is_empty() {
            return;
        }
        let hosts: Vec<_> = waiting.iter().copied().collect();
        self.announcing.insert(after, Announcing { vms: vms.to_vec(), waiting, tries: 0 });
        for (head, rest) in split(&hosts, self.config.fan) {
            let body = Body::Running { after, origin: self.id, vms: vms.to_vec(), fan: rest };
            self.tell(Node::Host(head), body, actions);
        }
        self.set(Timer::Announce(after), self.config.retry_ms, actions);
    }

    pub(super) fn announce_again(&mut self, after: MigrationId, actions: &mut Vec<Action>) {
        let Some(announcing) = self.announcing.get_mut(&after) else { return };
        // VMs that have moved since, or are in a switchover, aren't announced any more.
        announcing.vms.retain(|(vm, epoch)| {
            self.vms.get(vm).is_some_and(|found| found.epoch == *epoch && found.after == after)
        });
        let names: Vec<_> = announcing.vms.iter().map(|(vm, _)| *vm).collect();
        let vms = announcing.vms.clone();
        // Peers may have moved to other hosts.
        let now = self.hosts_of_peers(&names);
        let Some(announcing) = self.announcing.get_mut(&after) else { return };
        announcing.waiting.retain(|host| now.contains(host));
        if announcing.waiting.is_empty() {
            self.announcing.remove(&after);
            return;
        }
        let slow = announcing.tries >= self.config.announcements;
        announcing.tries = announcing.tries.saturating_add(u8::from(!slow));
        if slow {
            // A host that never answers may be lost with its VMs: the coordinator knows.
            let waiting = announcing.waiting.clone();
            for peer in self.peers_on(&waiting, &names) {
                self.tell(Node::Coordinator, Body::Where { vm: peer }, actions);
            }
        }
        let Some(announcing) = self.announcing.get(&after) else { return };
        for host in announcing.waiting.clone() {
            let body = Body::Running { after, origin: self.id, vms: vms.clone(), fan: Vec::new() };
            self.tell(Node::Host(host), body, actions);
        }
        let pause = self.config.retry_ms.saturating_mul(if slow { SLOWER } else { 1 });
        self.set(Timer::Announce(after), pause, actions);
    }

    /// Peers of these VMs whose last known host is one of these.
    fn peers_on(&self, hosts: &BTreeSet<HostId>, vms: &[VmId]) -> BTreeSet<VmId> {
        let peers = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| vm.faces.keys());
        let there = |peer: &&VmId| self.known.get(peer).is_some_and(|known| hosts.contains(&known.host));
        peers.filter(there).copied().collect()
    }

    /// Queue pairs at these hosts have resumed: the announced VMs resume theirs towards these hosts.
    pub(super) fn ready(
        &mut self,
        after: MigrationId,
        origin: HostId,
        hosts: Vec<HostId>,
        actions: &mut Vec<Action>,
    ) {
        if origin != self.id {
            if let Some(spread) = self.readying.get_mut(&(after, origin)) {
                spread.finished(&hosts);
                self.answer_ready((after, origin), actions);
            } else {
                self.tell(Node::Host(origin), Body::Ready { after, origin, hosts }, actions);
            }
            return;
        }
        for (vm, found) in &mut self.vms {
            if found.after != after || found.switching.is_some() {
                continue;
            }
            for (peer, open) in found.faces.iter_mut().filter(|(_, open)| !**open) {
                let Some(known) = self.known.get(peer) else { continue };
                if hosts.contains(&known.host) && known.suspended.is_none() {
                    *open = true;
                    let peer = Place { vm: *peer, host: known.host, epoch: known.stamp.epoch };
                    actions.push(Action::Open { vm: *vm, peer });
                }
            }
        }
        if let Some(announcing) = self.announcing.get_mut(&after) {
            for host in &hosts {
                announcing.waiting.remove(host);
            }
            if announcing.waiting.is_empty() {
                self.announcing.remove(&after);
            }
        }
    }

    /// A peer's host asks whether a VM runs here. There is no answer while the VM is stopped, or its peers are being
    /// suspended.
    pub(super) fn asked(&mut self, from: HostId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(found) = self.vms.get(&vm).filter(|found| found.switching.is_none()) else { return };
        let body = Body::Running {
            after: found.after,
            origin: self.id,
            vms: vec![(vm, found.epoch)],
            fan: Vec::new(),
        };
        self.tell(Node::Host(from), body, actions);
    }
}
