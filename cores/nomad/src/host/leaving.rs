//! A host's part as a source: from pre-copy to the decision.
//!
//! ```text
//! Copying ─Switch─▶ Suspending ─all peers─▶ Stopping ─all VMs─▶ Handing ─all destinations─▶ Yielded ─Commit─▶ forgotten
//!    │                  │                      │                   │                           │
//!    └──────────────────┴── failure, deadline ─┴───────────────────┘      only the coordinator ┴──Abort──▶ runs on
//! ```

use std::collections::BTreeSet;

use super::Host;
use super::running::SLOWER;
use crate::config::{Config, MAX_MIGRATIONS, MAX_MOVES, Plant};
use crate::event::{Action, Timer};
use crate::fan::split;
use crate::message::{Body, Reason};
use crate::names::{Epoch, HostId, MigrationId, Move, Node, Place, VmId};

/// VMs that a migration moves away from this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Leaving {
    moves: Vec<Move>,
    phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
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

impl Leaving {
    pub fn repeats(&self) -> bool {
        !matches!(self.phase, Phase::Stopping(_))
    }

    pub fn has_deadline(&self, config: &Config) -> bool {
        match self.phase {
            Phase::Copying(_) => false,
            Phase::Yielded(_) => config.plant == Plant::RunAfterYield,
            _ => true,
        }
    }

    fn vms(&self) -> Vec<VmId> {
        self.moves.iter().map(|moved| moved.vm).collect()
    }

    pub fn brings(&self, vm: VmId) -> bool {
        self.moves.iter().any(|moved| moved.vm == vm)
    }

    pub fn has_voted(&self) -> bool {
        matches!(self.phase, Phase::Yielded(_))
    }
}

impl Host {
    /// Whether a migration of this host as a source is in its switchover: the source has asked its peers to suspend.
    #[must_use]
    pub fn switches(&self, migration: MigrationId) -> bool {
        self.leaving.get(&migration).is_some_and(|leaving| !matches!(leaving.phase, Phase::Copying(_)))
    }

    /// Starts pre-copy, or answers a duplicate of `Begin`.
    pub(super) fn begin(&mut self, migration: MigrationId, moves: Vec<Move>, actions: &mut Vec<Action>) {
        if let Some(leaving) = self.leaving.get(&migration) {
            let converged = !matches!(&leaving.phase, Phase::Copying(left) if !left.is_empty());
            if converged {
                self.tell(Node::Coordinator, Body::Converged { migration }, actions);
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
            self.leaving.values().any(|other| other.moves.iter().any(|other| other.vm == moved.vm))
        };
        let reason = match () {
            () if moves.is_empty() || moves.len() > MAX_MOVES || !moves.iter().all(here) => Reason::NotHere,
            () if moves.iter().any(taken) || self.leaving.len() >= MAX_MIGRATIONS => Reason::Busy,
            () => {
                for moved in &moves {
                    actions.push(Action::Copy { migration, vm: moved.vm, to: moved.to });
                }
                let left = moves.iter().map(|moved| moved.vm).collect();
                self.leaving.insert(migration, Leaving { moves, phase: Phase::Copying(left) });
                self.set(Timer::Leaving(migration), self.config.calm_ms, actions);
                return;
            }
        };
        self.tell(Node::Coordinator, Body::Failed { migration, reason }, actions);
    }

    pub(super) fn converged(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        if let Some(Leaving { phase: Phase::Copying(left), .. }) = self.leaving.get_mut(&migration)
            && left.remove(&vm)
            && left.is_empty()
        {
            self.tell(Node::Coordinator, Body::Converged { migration }, actions);
            // Written pages accumulate from now on: the next retransmission is due after the short interval.
            self.set(Timer::Leaving(migration), self.config.retry_ms, actions);
        }
    }

    /// All sources have converged, and a peer's switchover goes first.
    pub(super) fn queued(&mut self, migration: MigrationId, behind: VmId, actions: &mut Vec<Action>) {
        let leaving = self.leaving.get(&migration);
        if leaving.is_some_and(|leaving| matches!(&leaving.phase, Phase::Copying(left) if left.is_empty())) {
            actions.push(Action::Queued { migration, behind });
        }
    }

    /// Starts the switchover: suspends the peers, then stops the VMs.
    pub(super) fn switch(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(leaving) = self.leaving.get(&migration) else {
            // This host aborted on its own, or its daemon restarted: the coordinator hasn't received that.
            self.tell(Node::Coordinator, Body::Failed { migration, reason: Reason::Late }, actions);
            return;
        };
        if !matches!(&leaving.phase, Phase::Copying(left) if left.is_empty()) {
            return;
        }
        let vms = leaving.vms();
        // A peer that has moved and hasn't announced itself can't be suspended: its host isn't known. The coordinator
        // retransmits `Switch`.
        if self.has_closed(&vms, Some(migration)) {
            return;
        }
        let hosts = self.hosts_of_peers(&vms);
        if let Some(leaving) = self.leaving.get_mut(&migration) {
            leaving.phase = Phase::Suspending(hosts.clone());
        }
        let hosts: Vec<_> = hosts.into_iter().collect();
        for (head, rest) in split(&hosts, self.config.fan) {
            let body = Body::Suspend { migration, origin: self.id, vms: vms.clone(), fan: rest };
            self.tell(Node::Host(head), body, actions);
        }
        self.set(Timer::Leaving(migration), self.config.retry_ms, actions);
        self.set(Timer::Switch(migration), self.config.switch_ms, actions);
        if hosts.is_empty() || self.config.plant == Plant::StopBeforeHeld {
            self.stop(migration, actions);
        }
    }

    pub(super) fn peers_stopped(
        &mut self,
        migration: MigrationId,
        hosts: &[HostId],
        actions: &mut Vec<Action>,
    ) {
        if let Some(Leaving { phase: Phase::Suspending(left), .. }) = self.leaving.get_mut(&migration) {
            for host in hosts {
                left.remove(host);
            }
            if left.is_empty() {
                self.stop(migration, actions);
            }
        }
    }

    fn stop(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(leaving) = self.leaving.get_mut(&migration) else { return };
        let vms = leaving.vms();
        leaving.phase = Phase::Stopping(vms.iter().copied().collect());
        for vm in vms {
            if let Some(found) = self.vms.get_mut(&vm) {
                found.switching = Some(migration);
                found.faces.values_mut().for_each(|open| *open = false);
            }
            actions.push(Action::Stop { migration, vm });
        }
    }

    pub(super) fn stopped(&mut self, migration: MigrationId, vm: VmId, actions: &mut Vec<Action>) {
        let Some(leaving) = self.leaving.get_mut(&migration) else { return };
        let Phase::Stopping(left) = &mut leaving.phase else { return };
        if !left.remove(&vm) || !left.is_empty() {
            return;
        }
        leaving.phase = Phase::Handing(leaving.moves.iter().map(|moved| moved.to).collect());
        for moved in leaving.moves.clone() {
            actions.push(Action::Finish { migration, vm: moved.vm, to: moved.to });
        }
        self.hand_over(migration, actions);
        self.set(Timer::Leaving(migration), self.config.retry_ms, actions);
    }

    fn hand_over(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(Leaving { moves, phase: Phase::Handing(left) }) = self.leaving.get(&migration) else {
            return;
        };
        let moves: Vec<_> = moves.iter().filter(|moved| left.contains(&moved.to)).copied().collect();
        for moved in moves {
            let faces = self.vms.get(&moved.vm).into_iter().flat_map(|vm| vm.faces.keys());
            let faces = faces.filter_map(|peer| {
                let known = self.known.get(peer)?;
                Some(Place { vm: *peer, host: known.host, epoch: known.stamp.epoch })
            });
            let body = Body::Handover { migration, vm: moved.vm, faces: faces.collect() };
            self.tell(Node::Host(moved.to), body, actions);
        }
    }

    /// A destination's vote. After the last one this source votes.
    pub(super) fn loaded(&mut self, from: HostId, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(leaving) = self.leaving.get_mut(&migration) else { return };
        let Phase::Handing(left) = &mut leaving.phase else { return };
        if left.remove(&from) && left.is_empty() {
            leaving.phase = Phase::Yielded(0);
            self.tell(Node::Coordinator, Body::Yield { migration }, actions);
        }
    }

    pub(super) fn repeat_leaving(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let mut after_ms = self.config.retry_ms;
        if let Some(Leaving { phase: Phase::Yielded(tries), .. }) = self.leaving.get_mut(&migration) {
            // An outage may last: a VM that is suspended for it needn't load the network.
            let slow = *tries >= self.config.announcements;
            *tries = tries.saturating_add(u8::from(!slow));
            after_ms = after_ms.saturating_mul(if slow { SLOWER } else { 1 });
        }
        let Some(leaving) = self.leaving.get(&migration) else { return };
        match &leaving.phase {
            Phase::Copying(left) => {
                after_ms = self.config.calm_ms;
                let body =
                    if left.is_empty() { Body::Converged { migration } } else { Body::Outcome { migration } };
                self.tell(Node::Coordinator, body, actions);
            }
            Phase::Suspending(left) => {
                let vms = leaving.vms();
                for host in left.clone() {
                    // Sent directly: a host that forwards messages may be the one that failed.
                    let body =
                        Body::Suspend { migration, origin: self.id, vms: vms.clone(), fan: Vec::new() };
                    self.tell(Node::Host(host), body, actions);
                }
            }
            Phase::Stopping(_) => return,
            Phase::Handing(_) => self.hand_over(migration, actions),
            Phase::Yielded(_) => self.tell(Node::Coordinator, Body::Yield { migration }, actions),
        }
        self.set(Timer::Leaving(migration), after_ms, actions);
    }

    pub(super) fn switch_is_late(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let reason = match self.leaving.get(&migration).map(|leaving| &leaving.phase) {
            Some(Phase::Suspending(_)) => Reason::Peers,
            Some(_) => Reason::Late,
            None => return,
        };
        self.give_up(migration, reason, actions);
    }

    /// The coordinator has aborted the migration. `places` lists the VMs that this host runs. After a vote it resumes
    /// no other VM: the coordinator has declared such a VM lost, and another host may have started it.
    pub(super) fn leave_aborted(
        &mut self,
        migration: MigrationId,
        places: &[Place],
        actions: &mut Vec<Action>,
    ) {
        let Some(leaving) = self.leaving.get(&migration) else { return };
        let named = |moved: &Move| places.iter().any(|place| place.vm == moved.vm && place.host == self.id);
        let others: Vec<Move> = leaving.moves.iter().filter(|moved| !named(moved)).copied().collect();
        if !leaving.has_voted() || others.is_empty() {
            return self.run_on(migration, actions);
        }
        let phase = leaving.phase.clone();
        if others.len() < leaving.moves.len() {
            if let Some(leaving) = self.leaving.get_mut(&migration) {
                leaving.moves.retain(|moved| !others.contains(moved));
            }
            self.run_on(migration, actions);
        }
        self.leaving.insert(migration, Leaving { moves: others, phase });
    }

    /// A VM that is suspended after a vote belongs to this host again, in a new epoch. Its part in the migration is
    /// over.
    pub(super) fn reclaimed(&mut self, vm: VmId, epoch: Epoch, actions: &mut Vec<Action>) {
        let of = self.leaving.iter().find(|(_, leaving)| leaving.brings(vm)).map(|(migration, _)| *migration);
        if let Some(migration) = of
            && let Some(leaving) = self.leaving.get_mut(&migration)
        {
            leaving.moves.retain(|moved| moved.vm != vm);
            if leaving.moves.is_empty() {
                self.leaving.remove(&migration);
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
        let voted = self.leaving.get(&migration).is_some_and(Leaving::has_voted);
        if self.leaving.contains_key(&migration) && !voted {
            self.give_up(migration, Reason::Stream, actions);
        } else if self.arriving.contains_key(&migration) {
            let body = Body::Failed { migration, reason: Reason::Stream };
            self.tell(Node::Coordinator, body, actions);
        }
    }

    /// Aborts on this host's own decision, which is allowed only before its vote.
    fn give_up(&mut self, migration: MigrationId, reason: Reason, actions: &mut Vec<Action>) {
        self.run_on(migration, actions);
        self.tell(Node::Coordinator, Body::Failed { migration, reason }, actions);
    }

    /// After an abort: resumes the VMs and announces them to their peers.
    pub(super) fn run_on(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(leaving) = self.leaving.remove(&migration) else { return };
        actions.push(Action::EndCopy { migration });
        let mut announced = Vec::new();
        for vm in leaving.vms() {
            let Some(found) = self.vms.get_mut(&vm) else { continue };
            found.after = migration;
            if found.switching.take().is_some() {
                actions.push(Action::Run { vm, epoch: found.epoch });
            }
            announced.push((vm, found.epoch));
        }
        // Peers that haven't answered the previous announcement have to answer this one.
        let vms = leaving.vms();
        if !matches!(leaving.phase, Phase::Copying(_)) || self.has_closed(&vms, None) {
            self.announce(migration, &announced, actions);
        }
    }

    /// Whether a VM has suspended queue pairs. Those connected to a peer in migration `but` don't count: that peer's host
    /// has ensured that this host knows its place.
    fn has_closed(&self, vms: &[VmId], but: Option<MigrationId>) -> bool {
        let faces = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| &vm.faces);
        let mut closed = faces.filter(|(_, open)| !**open).map(|(peer, _)| self.known.get(peer));
        closed.any(|known| but.is_none() || known.is_none_or(|known| known.suspended != but))
    }
}
