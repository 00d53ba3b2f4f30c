//! What must hold, after each step and in the end.

use std::collections::BTreeMap;

use nomad::coordinator::StoredMigration;
use nomad::names::{HostId, VmId};

use super::cluster::{Cluster, Pending};
use super::monitors::MonitorState;

impl Cluster {
    /// Checks what must hold always; what doesn't goes into `violation`.
    pub(super) fn check(&mut self) {
        if self.violation.is_none()
            && let Some(wrong) = self.wrong()
        {
            self.violation = Some(wrong);
        }
    }

    fn wrong(&self) -> Option<String> {
        self.wrong_guest().or_else(|| self.wrong_device())
    }

    /// One guest: whatever its devices do, a VM's vCPUs run in one monitor, and on the host and in the epoch that is written.
    fn wrong_guest(&self) -> Option<String> {
        let mut runs: BTreeMap<VmId, HostId> = BTreeMap::new();
        for (host, machine) in &self.machines {
            for (vm, monitor) in machine.monitors.iter().filter(|(_, monitor)| monitor.guest) {
                if let Some(other) = runs.insert(*vm, *host) {
                    return Some(format!("the guest of {vm} runs on {other} and on {host}"));
                }
                let owner = self.disk.vms.get(vm)?;
                if monitor.state == MonitorState::Running
                    && (owner.host, owner.epoch) != (*host, monitor.epoch)
                {
                    return Some(format!(
                        "the guest of {vm} runs on {host} in epoch {}; its owner is {} in epoch {}",
                        monitor.epoch.0, owner.host, owner.epoch.0
                    ));
                }
            }
        }
        None
    }

    fn wrong_device(&self) -> Option<String> {
        // One owner: a VM runs on the host, and in the epoch, that is written.
        for (host, machine) in &self.machines {
            for (vm, instance) in machine.engine.instances.iter().filter(|(_, instance)| instance.running) {
                let owner = self.disk.vms.get(vm)?;
                if (owner.host, owner.epoch) != (*host, instance.epoch) {
                    return Some(format!(
                        "{vm} runs on {host} in epoch {}; its owner is {} in epoch {}",
                        instance.epoch.0, owner.host, owner.epoch.0
                    ));
                }
            }
            // Open queue pairs lead to where their peer runs.
            for ((vm, peer), to) in &machine.engine.open {
                match self.where_runs(*peer) {
                    Some(at) if at != *to => {
                        return Some(format!("{vm} on {host} sends to {peer} on {to}; it runs on {at}"));
                    }
                    None if !self.is_lost(*peer) => {
                        return Some(format!("{vm} on {host} sends to {peer}, which is stopped"));
                    }
                    _ => {}
                }
            }
        }
        // Nothing is lost but with its host.
        let lost = |vm: &&VmId| self.is_lost(**vm) && !self.may_be_lost.contains(vm);
        self.disk.vms.keys().find(lost).map(|vm| format!("{vm} is lost, although its host wasn't killed"))
    }

    /// Where a VM runs.
    #[must_use]
    pub fn where_runs(&self, vm: VmId) -> Option<HostId> {
        self.machines.iter().find(|(_, machine)| machine.engine.runs(vm)).map(|(host, _)| *host)
    }

    /// Whether a VM's owner doesn't have it.
    #[must_use]
    pub fn is_lost(&self, vm: VmId) -> bool {
        self.disk.vms.get(&vm).is_none_or(|owner| {
            self.machines.get(&owner.host).is_none_or(|machine| !machine.engine.instances.contains_key(&vm))
                || !self.is_monitored(owner.host, vm)
        })
    }

    /// Whether a migration's decision is only kept for hosts that don't return.
    #[must_use]
    pub fn is_over(&self, stored: &StoredMigration) -> bool {
        stored.owed.as_ref().is_some_and(|owed| owed.keys().all(|host| self.dead.contains(host)))
    }

    /// Whether the cluster is at rest: no migration, no work or reserved room of a daemon, and no monitor to which an answer is due.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.disk.migrations.values().all(|stored| self.is_over(stored))
            && self.can_learn_outcome().is_empty()
            && self.coordinator.ledger() == &self.disk
            && self
                .machines
                .values()
                .all(|machine| machine.host.is_idle() && machine.engine.reservations.is_empty())
    }

    /// Delivers everything, without faults, until the cluster is at rest. Then it checks the final state, with all operations complete.
    ///
    /// # Errors
    /// The invariant that doesn't hold, or the work that doesn't end, in words.
    pub fn settle(&mut self, in_flight: Vec<Pending>) -> Result<(), String> {
        let mut queue: std::collections::VecDeque<_> = in_flight.into();
        let (mut timers, mut out, mut idle) = (Vec::new(), Vec::new(), 0);
        for _ in 0..200 {
            // All but timers first, in order; then what may be sent; then timers, deadlines only when the others change nothing.
            let mut steps = 0;
            while let Some(pending) = queue.pop_front() {
                if matches!(pending, Pending::Timer(..) | Pending::Deadline(..)) {
                    timers.push(pending);
                    continue;
                }
                self.deliver(pending, &mut out);
                queue.extend(out.drain(..));
                steps += 1;
                if steps > 10_000 {
                    return Err("messages go round without end".to_owned());
                }
            }
            if let Some(violation) = &self.violation {
                return Err(violation.clone());
            }
            self.poll_decisions(|_| false, &mut out);
            queue.extend(out.drain(..));
            self.sends(|data| queue.push_back(data));
            timers.retain(|timer| self.matters(timer));
            timers.sort_unstable();
            timers.dedup();
            if queue.is_empty() && self.is_idle() && timers.is_empty() {
                return self.ended_well();
            }
            idle += 1;
            if idle == 40 {
                // By now hosts that live need none that does not; queue pairs connected to VMs of the others wait for an operator.
                self.is_free()?;
                self.forget_dead(&mut out);
                queue.extend(out.drain(..));
            }
            let late = idle % 4 == 0;
            let is_deadline = |timer: &Pending| match timer {
                Pending::Timer(_, _, timer, _) => timer.is_deadline(),
                Pending::Deadline(_, timer, _) => matches!(timer, nomad::coordinator::Timer::Deadline(..)),
                _ => false,
            };
            let (fire, keep): (Vec<_>, Vec<_>) =
                std::mem::take(&mut timers).into_iter().partition(|timer| late || !is_deadline(timer));
            timers = keep;
            queue.extend(fire);
            // Timers that expire are delivered here: the loop above would put them back among those that wait.
            for timer in queue.split_off(0) {
                match timer {
                    Pending::Timer(..) | Pending::Deadline(..) => self.deliver(timer, &mut out),
                    other => out.push(other),
                }
            }
            queue.extend(out.drain(..));
        }
        Err(self.stuck())
    }

    /// The error of a cluster that doesn't come to rest: its migrations, and the hosts that still work.
    pub(super) fn stuck(&self) -> String {
        let busy: Vec<_> =
            self.machines.values().map(|machine| &machine.host).filter(|host| !host.is_idle()).collect();
        format!("it doesn't end: {:?}, {busy:?}", self.disk.migrations)
    }

    /// No VM is kept by a migration that waits for a host that doesn't return.
    ///
    /// # Errors
    /// Which one is.
    pub(super) fn is_free(&self) -> Result<(), String> {
        let kept = self.disk.vms.keys().find_map(|vm| Some((vm, self.disk.migration_of(*vm)?)));
        kept.map_or(Ok(()), |(vm, migration)| Err(format!("{vm} is kept by {migration}, which doesn't end")))
    }

    /// Checks the final state of a cluster at rest.
    pub(super) fn ended_well(&self) -> Result<(), String> {
        self.is_free()?;
        if let Some((host, vm)) = self.in_doubt().into_iter().chain(self.voted()).next() {
            return Err(format!("the monitor of {vm} on {host} never hears how its migration ended"));
        }
        for (vm, owner) in &self.disk.vms {
            let at = self.where_runs(*vm);
            let lost = self.is_lost(*vm);
            if !lost && at != Some(owner.host) {
                return Err(format!("{vm} doesn't run in the end, although {} has it", owner.host));
            }
            let orphan =
                self.monitor(owner.host, *vm).is_some_and(|monitor| monitor.state == MonitorState::Orphan);
            if lost && owner.alive && !orphan && !self.dead.contains(&owner.host) {
                return Err(format!("{vm} is lost, and the coordinator doesn't know"));
            }
            let copies = self.machines.values().filter(|machine| machine.engine.instances.contains_key(vm));
            if copies.count() > usize::from(!lost) {
                return Err(format!("a copy of {vm} is left behind"));
            }
        }
        let gone = |vm: &VmId| self.is_lost(*vm) || self.broken.contains(vm);
        for (vm, peer) in self.flows.keys().filter(|(vm, peer)| !gone(vm) && !gone(peer)) {
            let Some(machine) = self.where_runs(*vm).and_then(|host| self.machines.get(&host)) else {
                continue;
            };
            let completed = machine.engine.instances.get(vm).and_then(|vm| vm.state.completed.get(peer));
            if completed.copied().unwrap_or(0) != self.operations {
                return Err(format!("operations of {vm} on {peer} stand still at {completed:?}"));
            }
        }
        Ok(())
    }
}
