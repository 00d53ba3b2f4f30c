//! A model of a host's HCA that consists of counters. Operations have numbers per pair of VMs, as packets have PSNs.
//! Both ends' positions are part of a VM's state, and move with it. The daemon owns the HCA, which is lost with it.

use std::collections::{BTreeMap, BTreeSet};

use nomad::monitor::Answer;
use nomad::names::{Epoch, HostId, MigrationId, VmId};

/// The state that moves with a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State {
    /// Per peer: how many operations of this VM are complete.
    pub completed: BTreeMap<VmId, u16>,
    /// Per peer: how many of the peer's operations this VM has executed.
    pub executed: BTreeMap<VmId, u16>,
}

/// A VM's instance on a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instance {
    /// Its memory and queue pairs.
    pub state: State,
    /// Whether its queue pairs work.
    pub running: bool,
    /// The epoch in which it runs.
    pub epoch: Epoch,
}

/// A host's engine, and its daemon's answers to monitors.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Engine {
    /// Instances, stopped ones included.
    pub instances: BTreeMap<VmId, Instance>,
    /// Queue pairs that may send, by VM and peer, with the host to which they send.
    pub open: BTreeMap<(VmId, VmId), HostId>,
    /// Requests to suspend queue pairs connected to a VM, not yet carried out.
    pub suspending: BTreeSet<(MigrationId, VmId)>,
    /// Requests to stop VMs, not yet carried out.
    pub stopping: BTreeSet<(MigrationId, VmId)>,
    /// Capacity reserved per migration, and the VMs whose state was received.
    pub reservations: BTreeMap<MigrationId, BTreeSet<VmId>>,
    /// The daemon's answer about each VM's last migration, and the epoch in which the VM runs here.
    pub phases: BTreeMap<VmId, (Answer, Epoch)>,
}

impl Engine {
    /// Queue pairs connected to a VM reach the end of a segment. Returns whether their suspension is still requested.
    pub fn suspend_qps(&mut self, migration: MigrationId, vm: VmId) -> bool {
        let asked = self.suspending.remove(&(migration, vm));
        if asked {
            self.open.retain(|(_, peer), _| *peer != vm);
        }
        asked
    }

    /// A VM stops. Returns whether that is still requested.
    pub fn stop(&mut self, migration: MigrationId, vm: VmId) -> bool {
        let asked = self.stopping.remove(&(migration, vm));
        if asked {
            self.open.retain(|(own, _), _| *own != vm);
            if let Some(instance) = self.instances.get_mut(&vm) {
                instance.running = false;
            }
        }
        asked
    }

    /// Whether a VM runs here.
    #[must_use]
    pub fn runs(&self, vm: VmId) -> bool {
        self.instances.get(&vm).is_some_and(|instance| instance.running)
    }
}

/// All runs of one direction of a connection, over the whole cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Number of executed operations, by any instance.
    pub effects: u16,
}
