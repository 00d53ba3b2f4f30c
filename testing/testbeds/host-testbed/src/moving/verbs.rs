//! Guests whose connections use the hosts' RDMA devices: a host that suspends them waits until the devices are done, as the daemon's
//! migration thread does.

use hca::names::Gid;
use nomad::{Event, MigrationId, VmId};

use super::{Cluster, OUTSIDE, gid};

/// Which state machine waits for the completion of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    Own(MigrationId, VmId),
    Peers(MigrationId, VmId),
}

impl Drain {
    pub fn is_own(self, of: VmId) -> bool {
        matches!(self, Self::Own(_, vm) if vm == of)
    }

    pub fn is_of_peers(self, of: VmId) -> bool {
        matches!(self, Self::Peers(_, vm) if vm == of)
    }
}

impl Cluster {
    /// As [`Cluster::new`], with all VMs pinned to transport `verbs`: their connections use devices in memory, one per host, with numbers
    /// and keys of their own.
    #[must_use]
    pub fn by_verbs(hosts: usize, vms: u32, seed: u64) -> Self {
        Self::make(hosts, vms, seed, None, true)
    }

    /// Current objects of hosts' devices: connections, registered regions, and bytes of these, per host.
    #[must_use]
    pub fn devices_hold(&self) -> Vec<(usize, usize, u64)> {
        let reports = self.machines.iter().map(|machine| machine.transports.verbs());
        reports.map(|report| (report.connections, report.regions, report.registered_bytes)).collect()
    }

    /// Suspends queue pairs of a VM towards others.
    pub(super) fn hold_own(&mut self, index: usize, vm: VmId) {
        let machine = &mut self.machines[index];
        let (device, now) = (machine.here[&vm], machine.host.now);
        // Peers outside of the cluster are never opened.
        for &peer in self.vms[&vm].ends.keys().filter(|peer| **peer != OUTSIDE) {
            machine.host.engine.hold(device, Gid(gid(peer)));
            machine.transports.hold(device, host::transport::VmId(peer.0), now);
        }
    }

    pub(super) fn drain(&mut self, index: usize, what: Drain) {
        let machine = &mut self.machines[index];
        let now = machine.host.now;
        machine.transports.take_over(&mut machine.host.engine, now);
        let at_rest = match what {
            Drain::Own(_, vm) => machine.transports.at_rest(machine.here[&vm], None).is_ok(),
            Drain::Peers(_, vm) => machine.here.iter().all(|(other, device)| {
                let peer = Some(host::transport::VmId(vm.0));
                *other == vm || machine.transports.at_rest(*device, peer).is_ok()
            }),
        };
        match what {
            _ if !at_rest => self.draining.push((index, what)),
            Drain::Own(migration, vm) => self.stop(index, migration, vm),
            Drain::Peers(migration, vm) => {
                self.answers.push_back((index, Event::QpsSuspended { migration, vm }))
            }
        }
    }

    pub(super) fn look_at_draining(&mut self) {
        for (index, what) in std::mem::take(&mut self.draining) {
            self.drain(index, what);
        }
    }
}
