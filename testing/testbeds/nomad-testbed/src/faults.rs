//! What can go wrong: hosts and the coordinator that are killed, fail or count as started again, and what is lost.

use std::collections::BTreeSet;

use nomad::config::InjectedBug;
use nomad::coordinator::{self, Coordinator};
use nomad::event::Event;
use nomad::host::Host;
use nomad::message::{Body, Message};
use nomad::monitor::Answer;
use nomad::names::{HostId, Incarnation, Node, VmId};

use super::cluster::{Cluster, Pending, Work};
use super::engine::Engine;
use super::monitors::{Monitor, MonitorState};

impl Cluster {
    /// A host's daemon is killed, and starts again with nothing. Its monitors live.
    pub fn kill(&mut self, id: HostId, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.get_mut(&id) else { return };
        let owned = self.disk.vms.iter().filter(|(_, owner)| owner.host == id).map(|(vm, _)| *vm);
        self.may_be_lost.extend(owned);
        let voted = self.disk.vms.keys().filter(|vm| machine.host.has_voted(**vm));
        self.may_be_lost.extend(voted);
        let incarnation = Incarnation(machine.host.incarnation().0 + 1);
        machine.host = Host::new(id, incarnation, self.config);
        machine.engine = Engine::default();
        machine.monitors.values_mut().for_each(Monitor::lose_devices);
        self.host(id, Event::Start, out);
    }

    /// A host fails with all that is on it, and never returns.
    pub fn die(&mut self, id: HostId, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.remove(&id) else { return };
        let owned = self.disk.vms.iter().filter(|(_, owner)| owner.host == id).map(|(vm, _)| *vm);
        self.may_be_lost.extend(owned);
        let voted = self.disk.vms.keys().filter(|vm| machine.host.has_voted(**vm));
        self.may_be_lost.extend(voted);
        self.dead.insert(id);
        out.push(Pending::Silence(id));
    }

    /// Its user has the cluster forget hosts that don't return.
    pub fn forget_dead(&mut self, out: &mut Vec<Pending>) {
        for host in self.dead.clone() {
            let mut actions = Vec::new();
            if let Err(refused) = self.coordinator.forget(host, &mut actions) {
                self.fail(format!("{refused}"));
            }
            self.execute(actions, out);
        }
    }

    /// The service takes a living daemon for one that was started again: somebody has registered its host, and isn't there. VMs that it hasn't voted for are counted as
    /// those of a daemon that was killed.
    pub fn renumber(&mut self, id: HostId, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.get_mut(&id) else { return };
        let believes = self.config.injected_bug == InjectedBug::RenumberWithdrawsVotes;
        let host = &machine.host;
        let bound = |vm: &VmId| host.has_yielded(*vm) || host.has_voted(*vm);
        let owned = self.disk.vms.iter().filter(|(vm, owner)| owner.host == id && !bound(vm));
        self.may_be_lost.extend(owned.map(|(vm, _)| *vm));
        let Engine { phases, instances, reservations, .. } = &mut machine.engine;
        for (vm, monitor) in &mut machine.monitors {
            if bound(vm) && !believes {
                continue;
            }
            instances.remove(vm);
            match (monitor.state, phases.get_mut(vm)) {
                // What is decided, and not heard by the monitor, stays said.
                (MonitorState::Stopped(_) | MonitorState::Voted(_), Some(said))
                    if said.0 == Answer::Pending =>
                {
                    *said = (Answer::Aborted, monitor.epoch);
                }
                (MonitorState::Stopped(_) | MonitorState::Voted(_), _) => {}
                _ => monitor.lose_devices(),
            }
        }
        reservations.retain(|_, vms| !vms.is_empty() && vms.iter().all(|vm| instances.contains_key(vm)));
        let kept: BTreeSet<VmId> = instances.keys().copied().collect();
        machine.engine.open.retain(|(vm, _), _| kept.contains(vm));
        machine.engine.suspending.clear();
        machine.engine.stopping.clear();
        let incarnation = Incarnation(host.incarnation().0 + 1);
        machine.host.renumber(id, incarnation);
        self.host(id, Event::Start, out);
    }

    /// The coordinator is killed, and starts again with what it has written. Hosts say hello to the new one, as to any new stream.
    pub fn kill_coordinator(&mut self, out: &mut Vec<Pending>) {
        self.starts += 1;
        self.coordinator = Coordinator::new(self.config, self.disk.clone());
        self.coordinator(coordinator::Event::Start, out);
        for (host, machine) in &self.machines {
            let (from, to) = (Node::Host(*host), Node::Coordinator);
            let incarnation = machine.host.incarnation();
            out.push(Pending::Message(Message { from, incarnation, to, body: Body::Hello }));
        }
    }

    /// Something is lost. Streams tell their sender, the rest doesn't.
    pub fn lose(&mut self, pending: Pending, out: &mut Vec<Pending>) {
        if let Pending::Stream { migration, from, .. } = pending
            && let Some(machine) = self.machines.get(&from)
        {
            out.push(Pending::Work(from, machine.host.incarnation(), Work::Break(migration)));
        }
    }
}
