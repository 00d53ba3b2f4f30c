//! Announcements: the host that runs a VM notifies the hosts of its peers, and collects their answers.

use std::collections::BTreeSet;

use super::Host;
use crate::event::{Action, Timer};
use crate::fanout::split;
use crate::message::Body;
use crate::names::{Epoch, HostId, MigrationId, Node, Place, VmId};

/// Factor on the retransmission interval after [`crate::Config::fast_retries`] tries.
pub(super) const SLOW_RETRY_FACTOR: u32 = 32;

/// VMs that run here since a migration has ended, and peers' hosts that haven't answered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Announcement {
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
        self.announcements.retain(|_, earlier| {
            earlier.vms.retain(|(vm, _)| !names.contains(vm));
            !earlier.vms.is_empty()
        });
        let waiting = self.hosts_of_peers(&names);
        if waiting.is_empty() {
            return;
        }
        let hosts: Vec<_> = waiting.iter().copied().collect();
        self.announcements.insert(after, Announcement { vms: vms.to_vec(), waiting, tries: 0 });
        for (head, rest) in split(&hosts, self.config.fanout) {
            let body = Body::Running { after, origin: self.id, vms: vms.to_vec(), forward_to: rest };
            self.send(Node::Host(head), body, actions);
        }
        self.set(Timer::Announce(after), self.config.retry_ms, actions);
    }

    pub(super) fn retransmit_announcement(&mut self, after: MigrationId, actions: &mut Vec<Action>) {
        let Some(announcement) = self.announcements.get_mut(&after) else { return };
        // VMs that have moved since, or are in a switchover, aren't announced any more.
        announcement.vms.retain(|(vm, epoch)| {
            self.vms.get(vm).is_some_and(|found| found.epoch == *epoch && found.after == after)
        });
        let names: Vec<_> = announcement.vms.iter().map(|(vm, _)| *vm).collect();
        let vms = announcement.vms.clone();
        // Peers may have moved to other hosts.
        let now = self.hosts_of_peers(&names);
        let Some(announcement) = self.announcements.get_mut(&after) else { return };
        announcement.waiting.retain(|host| now.contains(host));
        if announcement.waiting.is_empty() {
            self.announcements.remove(&after);
            return;
        }
        let slow = announcement.tries >= self.config.fast_retries;
        announcement.tries = announcement.tries.saturating_add(u8::from(!slow));
        if slow {
            // A host that never answers may be lost with its VMs: the coordinator knows.
            let waiting = announcement.waiting.clone();
            for peer in self.peers_on(&waiting, &names) {
                self.send(Node::Coordinator, Body::Where { vm: peer }, actions);
            }
        }
        let Some(announcement) = self.announcements.get(&after) else { return };
        for host in announcement.waiting.clone() {
            let body = Body::Running { after, origin: self.id, vms: vms.clone(), forward_to: Vec::new() };
            self.send(Node::Host(host), body, actions);
        }
        let pause = self.config.retry_ms.saturating_mul(if slow { SLOW_RETRY_FACTOR } else { 1 });
        self.set(Timer::Announce(after), pause, actions);
    }

    /// Peers of these VMs whose last known host is one of these.
    fn peers_on(&self, hosts: &BTreeSet<HostId>, vms: &[VmId]) -> BTreeSet<VmId> {
        let peers = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| vm.peers.keys());
        let there = |peer: &&VmId| self.peer_vms.get(peer).is_some_and(|known| hosts.contains(&known.host));
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
            if let Some(forwarded) = self.resuming.get_mut(&(after, origin)) {
                forwarded.finished(&hosts);
                self.answer_ready((after, origin), actions);
            } else {
                self.send(Node::Host(origin), Body::Ready { after, origin, hosts }, actions);
            }
            return;
        }
        for (vm, found) in &mut self.vms {
            if found.after != after || found.switching.is_some() {
                continue;
            }
            for (peer, open) in found.peers.iter_mut().filter(|(_, open)| !**open) {
                let Some(known) = self.peer_vms.get(peer) else { continue };
                if hosts.contains(&known.host) && known.suspended.is_none() {
                    *open = true;
                    let peer = Place { vm: *peer, host: known.host, epoch: known.stamp.epoch };
                    actions.push(Action::ResumeQps { vm: *vm, peer });
                }
            }
        }
        if let Some(announcement) = self.announcements.get_mut(&after) {
            for host in &hosts {
                announcement.waiting.remove(host);
            }
            if announcement.waiting.is_empty() {
                self.announcements.remove(&after);
            }
        }
    }

    /// A peer's host asks whether a VM runs here. There is no answer while the VM is stopped, or its peers are being
    /// suspended.
    pub(super) fn answer_where(&mut self, from: HostId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(found) = self.vms.get(&vm).filter(|found| found.switching.is_none()) else { return };
        let body = Body::Running {
            after: found.after,
            origin: self.id,
            vms: vec![(vm, found.epoch)],
            forward_to: Vec::new(),
        };
        self.send(Node::Host(from), body, actions);
    }
}
