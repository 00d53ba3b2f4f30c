//! A host's part as a source: from pre-copy to the decision.
//!
//! ```text
//! Copying ─Switch─▶ Suspending ─all peers─▶ Stopping ─all VMs─▶ Handing ─all destinations─▶ Yielded ─Commit─▶ forgotten
//!    │                  │                      │                   │                           │
//!    └──────────────────┴── failure, deadline ─┴───────────────────┘      only the coordinator ┴──Abort──▶ runs on
//! ```

use std::collections::BTreeSet;

use super::Host;
use super::announcement::SLOW_RETRY_FACTOR;
use crate::config::{Config, InjectedBug, MAX_MIGRATIONS_PER_HOST, MAX_VMS_PER_MIGRATION};
use crate::event::{Action, Timer};
use crate::fanout::split;
use crate::message::{AbortReason, Body};
use crate::names::{Epoch, HostId, MigrationId, Move, Node, Place, VmId};

/// VMs that a migration moves away from this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct OutgoingMigration {
    moves: Vec<Move>,
    phase: SourcePhase,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum SourcePhase {
    /// VMs that haven't converged.
    Copying(BTreeSet<VmId>),
    /// Peers' hosts that haven't suspended their queue pairs.
    Suspending(BTreeSet<HostId>),
    /// VMs that haven't stopped.
    Stopping(BTreeSet<VmId>),
    /// Destinations that haven't voted.
    Handing(BTreeSet<HostId>),
    /// The source has voted, and only the coordinator decides. Retransmissions of the vote at the short interval, up to
    /// `announcements`.
    Yielded(u8),
}

impl OutgoingMigration {
    pub fn is_retransmitted(&self) -> bool {
        !matches!(self.phase, SourcePhase::Stopping(_))
    }

    pub fn has_deadline(&self, config: &Config) -> bool {
        match self.phase {
            SourcePhase::Copying(_) => false,
            SourcePhase::Yielded(_) => config.injected_bug == InjectedBug::RunAfterVote,
            _ => true,
        }
    }

    fn vms(&self) -> Vec<VmId> {
        self.moves.iter().map(|moved| moved.vm).collect()
    }

    pub fn includes(&self, vm: VmId) -> bool {
        self.moves.iter().any(|moved| moved.vm == vm)
    }

    pub fn has_voted(&self) -> bool {
        matches!(self.phase, SourcePhase::Yielded(_))
    }
}

impl Host {
    /// Whether a migration of this host as a source is in its switchover: the source has asked its peers to suspend.
    #[must_use]
    pub fn is_switching_over(&self, migration: MigrationId) -> bool {
        self.outgoing
            .get(&migration)
            .is_some_and(|outgoing| !matches!(outgoing.phase, SourcePhase::Copying(_)))
    }

    /// Starts pre-copy, or answers a duplicate of `Begin`.
    pub(super) fn begin(&mut self, migration: MigrationId, moves: Vec<Move>, actions: &mut Vec<Action>) {
        if let Some(outgoing) = self.outgoing.get(&migration) {
            let converged = !matches!(&outgoing.phase, SourcePhase::Copying(left) if !left.is_empty());
            if converged {
                self.send(Node::Coordinator, Body::Converged { migration }, actions);
            }
            return;
        }
        let here = |moved: &Move| {
            moved.from == self.id
                && self.vms.get(&moved.vm).is_some_and(|vm| {
                    // The migration hasn't been aborted before, and no newer epoch is known.
                    vm.after < migration && vm.epoch.0.checked_add(1) == Some(moved.epoch.0)
                })
        };
        let taken = |moved: &Move| {
            self.outgoing.values().any(|other| other.moves.iter().any(|other| other.vm == moved.vm))
        };
        let reason = match () {
            () if moves.is_empty() || moves.len() > MAX_VMS_PER_MIGRATION || !moves.iter().all(here) => {
                AbortReason::NotHere
            }
            () if moves.iter().any(taken) || self.outgoing.len() >= MAX_MIGRATIONS_PER_HOST => {
                AbortReason::Busy
            }
            () => {
                for moved in &moves {
                    actions.push(Action::Copy { migration, vm: moved.vm, to: moved.to });
                }
                let left = moves.iter().map(|moved| moved.vm).collect();
                self.outgoing
                    .insert(migration, OutgoingMigration { moves, phase: SourcePhase::Copying(left) });
                self.set(Timer::Outgoing(migration), self.config.precopy_retry_ms, actions);
                return;
            }
        };
        self.send(Node::Coordinator, Body::Failed { migration, reason }, actions);
    }

    pub(super) fn converged(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        if let Some(OutgoingMigration { phase: SourcePhase::Copying(left), .. }) =
            self.outgoing.get_mut(&migration)
            && left.remove(&vm)
            && left.is_empty()
        {
            self.send(Node::Coordinator, Body::Converged { migration }, actions);
            // Written pages accumulate from now on: the next retransmission is due after the short interval.
            self.set(Timer::Outgoing(migration), self.config.retry_ms, actions);
        }
    }

    /// All sources have converged, and a peer's switchover goes first.
    pub(super) fn queued(&mut self, migration: MigrationId, waits_for: VmId, actions: &mut Vec<Action>) {
        let outgoing = self.outgoing.get(&migration);
        if outgoing
            .is_some_and(|outgoing| matches!(&outgoing.phase, SourcePhase::Copying(left) if left.is_empty()))
        {
            actions.push(Action::Queued { migration, waits_for });
        }
    }

    /// Starts the switchover: suspends the peers, then stops the VMs.
    pub(super) fn switch(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.get(&migration) else {
            // This host aborted on its own, or its daemon restarted: the coordinator hasn't received that.
            self.send(Node::Coordinator, Body::Failed { migration, reason: AbortReason::Timeout }, actions);
            return;
        };
        if !matches!(&outgoing.phase, SourcePhase::Copying(left) if left.is_empty()) {
            return;
        }
        let vms = outgoing.vms();
        // A peer that has moved and hasn't announced itself can't be suspended: its host isn't known. The coordinator
        // retransmits `Switch`.
        if self.has_suspended_qps(&vms, Some(migration)) {
            return;
        }
        let hosts = self.hosts_of_peers(&vms);
        if let Some(outgoing) = self.outgoing.get_mut(&migration) {
            outgoing.phase = SourcePhase::Suspending(hosts.clone());
        }
        let hosts: Vec<_> = hosts.into_iter().collect();
        for (head, rest) in split(&hosts, self.config.fanout) {
            let body = Body::Suspend { migration, origin: self.id, vms: vms.clone(), forward_to: rest };
            self.send(Node::Host(head), body, actions);
        }
        self.set(Timer::Outgoing(migration), self.config.retry_ms, actions);
        self.set(Timer::Switch(migration), self.config.switch_ms, actions);
        if hosts.is_empty() || self.config.injected_bug == InjectedBug::StopBeforePeersSuspended {
            self.stop(migration, actions);
        }
    }

    pub(super) fn peers_suspended(
        &mut self,
        migration: MigrationId,
        hosts: &[HostId],
        actions: &mut Vec<Action>,
    ) {
        if let Some(OutgoingMigration { phase: SourcePhase::Suspending(left), .. }) =
            self.outgoing.get_mut(&migration)
        {
            for host in hosts {
                left.remove(host);
            }
            if left.is_empty() {
                self.stop(migration, actions);
            }
        }
    }

    fn stop(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.get_mut(&migration) else { return };
        let vms = outgoing.vms();
        outgoing.phase = SourcePhase::Stopping(vms.iter().copied().collect());
        for vm in vms {
            if let Some(found) = self.vms.get_mut(&vm) {
                found.switching = Some(migration);
                found.peers.values_mut().for_each(|open| *open = false);
            }
            actions.push(Action::Stop { migration, vm });
        }
    }

    pub(super) fn stopped(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.get_mut(&migration) else { return };
        let SourcePhase::Stopping(left) = &mut outgoing.phase else { return };
        if !left.remove(&vm) || !left.is_empty() {
            return;
        }
        outgoing.phase = SourcePhase::Handing(outgoing.moves.iter().map(|moved| moved.to).collect());
        for moved in outgoing.moves.clone() {
            actions.push(Action::Finish { migration, vm: moved.vm, to: moved.to });
        }
        self.hand_over(migration, actions);
        self.set(Timer::Outgoing(migration), self.config.retry_ms, actions);
    }

    fn hand_over(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(OutgoingMigration { moves, phase: SourcePhase::Handing(left) }) =
            self.outgoing.get(&migration)
        else {
            return;
        };
        let moves: Vec<_> = moves.iter().filter(|moved| left.contains(&moved.to)).copied().collect();
        for moved in moves {
            let peers = self.vms.get(&moved.vm).into_iter().flat_map(|vm| vm.peers.keys());
            let peers = peers.filter_map(|peer| {
                let known = self.peer_vms.get(peer)?;
                Some(Place { vm: *peer, host: known.host, epoch: known.stamp.epoch })
            });
            let body = Body::Handover { migration, vm: moved.vm, peers: peers.collect() };
            self.send(Node::Host(moved.to), body, actions);
        }
    }

    /// A destination's vote. After the last one this source votes.
    pub(super) fn loaded(&mut self, from: HostId, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.get_mut(&migration) else { return };
        let SourcePhase::Handing(left) = &mut outgoing.phase else { return };
        if left.remove(&from) && left.is_empty() {
            outgoing.phase = SourcePhase::Yielded(0);
            self.send(Node::Coordinator, Body::Yield { migration }, actions);
        }
    }

    pub(super) fn retransmit_outgoing(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let mut after_ms = self.config.retry_ms;
        if let Some(OutgoingMigration { phase: SourcePhase::Yielded(tries), .. }) =
            self.outgoing.get_mut(&migration)
        {
            // An outage may last: a VM that is suspended for it needn't load the network.
            let slow = *tries >= self.config.fast_retries;
            *tries = tries.saturating_add(u8::from(!slow));
            after_ms = after_ms.saturating_mul(if slow { SLOW_RETRY_FACTOR } else { 1 });
        }
        let Some(outgoing) = self.outgoing.get(&migration) else { return };
        match &outgoing.phase {
            SourcePhase::Copying(left) => {
                after_ms = self.config.precopy_retry_ms;
                let body =
                    if left.is_empty() { Body::Converged { migration } } else { Body::Outcome { migration } };
                self.send(Node::Coordinator, body, actions);
            }
            SourcePhase::Suspending(left) => {
                let vms = outgoing.vms();
                for host in left.clone() {
                    // Sent directly: a host that forwards messages may be the one that failed.
                    let body = Body::Suspend {
                        migration,
                        origin: self.id,
                        vms: vms.clone(),
                        forward_to: Vec::new(),
                    };
                    self.send(Node::Host(host), body, actions);
                }
            }
            SourcePhase::Stopping(_) => return,
            SourcePhase::Handing(_) => self.hand_over(migration, actions),
            SourcePhase::Yielded(_) => self.send(Node::Coordinator, Body::Yield { migration }, actions),
        }
        self.set(Timer::Outgoing(migration), after_ms, actions);
    }

    pub(super) fn switch_timed_out(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let reason = match self.outgoing.get(&migration).map(|outgoing| &outgoing.phase) {
            Some(SourcePhase::Suspending(_)) => AbortReason::Peers,
            Some(_) => AbortReason::Timeout,
            None => return,
        };
        self.abort_before_vote(migration, reason, actions);
    }

    /// The coordinator has aborted the migration. `places` lists the VMs that this host runs. After a vote it resumes
    /// no other VM: the coordinator has declared such a VM lost, and another host may have started it.
    pub(super) fn abort_outgoing(
        &mut self,
        migration: MigrationId,
        places: &[Place],
        actions: &mut Vec<Action>,
    ) {
        let Some(outgoing) = self.outgoing.get(&migration) else { return };
        let named = |moved: &Move| places.iter().any(|place| place.vm == moved.vm && place.host == self.id);
        let others: Vec<Move> = outgoing.moves.iter().filter(|moved| !named(moved)).copied().collect();
        if !outgoing.has_voted() || others.is_empty() {
            return self.roll_back(migration, actions);
        }
        let phase = outgoing.phase.clone();
        if others.len() < outgoing.moves.len() {
            if let Some(outgoing) = self.outgoing.get_mut(&migration) {
                outgoing.moves.retain(|moved| !others.contains(moved));
            }
            self.roll_back(migration, actions);
        }
        self.outgoing.insert(migration, OutgoingMigration { moves: others, phase });
    }

    /// A VM that is suspended after a vote belongs to this host again, in a new epoch. Its part in the migration is
    /// over.
    pub(super) fn reclaimed(&mut self, vm: VmId, epoch: Epoch, actions: &mut Vec<Action>) {
        let of =
            self.outgoing.iter().find(|(_, outgoing)| outgoing.includes(vm)).map(|(migration, _)| *migration);
        if let Some(migration) = of
            && let Some(outgoing) = self.outgoing.get_mut(&migration)
        {
            outgoing.moves.retain(|moved| moved.vm != vm);
            if outgoing.moves.is_empty() {
                self.outgoing.remove(&migration);
            }
        }
        let Some(found) = self.vms.get_mut(&vm) else { return };
        found.epoch = epoch;
        found.after = found.after.max(of.unwrap_or_default());
        let after = found.after;
        if found.switching.take().is_some() {
            actions.push(Action::Run { vm, epoch });
            self.announce(after, &[(vm, epoch)], actions);
        }
    }

    pub(super) fn stream_broke(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let voted = self.outgoing.get(&migration).is_some_and(OutgoingMigration::has_voted);
        if self.outgoing.contains_key(&migration) && !voted {
            self.abort_before_vote(migration, AbortReason::Stream, actions);
        } else if self.incoming.contains_key(&migration) {
            let body = Body::Failed { migration, reason: AbortReason::Stream };
            self.send(Node::Coordinator, body, actions);
        }
    }

    /// Aborts on this host's own decision, which is allowed only before its vote.
    fn abort_before_vote(&mut self, migration: MigrationId, reason: AbortReason, actions: &mut Vec<Action>) {
        self.roll_back(migration, actions);
        self.send(Node::Coordinator, Body::Failed { migration, reason }, actions);
    }

    /// After an abort: resumes the VMs and announces them to their peers.
    pub(super) fn roll_back(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.outgoing.remove(&migration) else { return };
        actions.push(Action::EndCopy { migration });
        let mut announced = Vec::new();
        for vm in outgoing.vms() {
            let Some(found) = self.vms.get_mut(&vm) else { continue };
            found.after = migration;
            if found.switching.take().is_some() {
                actions.push(Action::Run { vm, epoch: found.epoch });
            }
            announced.push((vm, found.epoch));
        }
        // Peers that haven't answered the previous announcement have to answer this one.
        let vms = outgoing.vms();
        if !matches!(outgoing.phase, SourcePhase::Copying(_)) || self.has_suspended_qps(&vms, None) {
            self.announce(migration, &announced, actions);
        }
    }

    /// Whether a VM has suspended queue pairs. Those connected to a peer in migration `but` don't count: that peer's host
    /// has ensured that this host knows its place.
    fn has_suspended_qps(&self, vms: &[VmId], but: Option<MigrationId>) -> bool {
        let peers = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| &vm.peers);
        let mut closed = peers.filter(|(_, open)| !**open).map(|(peer, _)| self.peer_vms.get(peer));
        closed.any(|known| but.is_none() || known.is_none_or(|known| known.suspended != but))
    }
}
