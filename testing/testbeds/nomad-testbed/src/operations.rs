//! Operations of VMs on each other: when they may be sent, and that each is carried out once and in order.

use nomad::names::{HostId, VmId};

use super::cluster::{Cluster, Pending};

impl Cluster {
    /// Operations that may be sent now.
    pub fn sends(&self, mut each: impl FnMut(Pending)) {
        for (from, machine) in &self.machines {
            for ((vm, peer), to) in &machine.engine.open {
                let Some(instance) = machine.engine.instances.get(vm).filter(|vm| vm.running) else {
                    continue;
                };
                if !machine.monitors.get(vm).is_some_and(|monitor| monitor.guest) {
                    continue;
                }
                // Towards a VM that is gone they are sent again until the queue pair fails, which isn't modelled.
                if self.is_lost(*peer) || self.broken.contains(vm) || self.broken.contains(peer) {
                    continue;
                }
                let completed = instance.state.completed.get(peer).copied().unwrap_or(0);
                if completed < self.operations {
                    let (vm, peer) = (*vm, *peer);
                    each(Pending::Data { vm, peer, number: completed + 1, from: *from, to: *to });
                }
            }
        }
    }

    /// An operation reaches a host. Whether it was carried out, now or before.
    pub(super) fn executed(&mut self, vm: VmId, peer: VmId, number: u16, to: HostId) -> bool {
        let Some(machine) = self.machines.get_mut(&to) else { return false };
        // Queue pairs that are held take nothing in.
        if !machine.engine.open.contains_key(&(peer, vm)) {
            return false;
        }
        let Some(instance) = machine.engine.instances.get_mut(&peer).filter(|peer| peer.running) else {
            return false;
        };
        let before = instance.state.executed.entry(vm).or_default();
        if number <= *before {
            return true;
        }
        let next = *before + 1;
        *before = number;
        let effects = self.flows.entry((vm, peer)).or_default();
        let expected = effects.effects + 1;
        effects.effects = number;
        if number != next || number != expected {
            self.fail(format!(
                "operation {number} of {vm} on {peer} is carried out where {next} is next for it, and {expected} in truth"
            ));
        }
        true
    }

    pub(super) fn done(&mut self, vm: VmId, peer: VmId, number: u16, to: HostId) {
        let effects = self.flows.get(&(vm, peer)).map_or(0, |flow| flow.effects);
        let Some(machine) = self.machines.get_mut(&to) else { return };
        let Some(instance) = machine.engine.instances.get_mut(&vm).filter(|vm| vm.running) else { return };
        if !machine.engine.open.contains_key(&(vm, peer)) {
            return;
        }
        let completed = instance.state.completed.entry(peer).or_default();
        if number == *completed + 1 {
            *completed = number;
            if effects < number {
                self.fail(format!("operation {number} of {vm} on {peer} is complete and wasn't carried out"));
            }
        }
    }
}
