//! What a host's HCA does, reduced to counters: operations have numbers per pair of VMs, as packets have PSNs, and both ends' positions are part of a VM's state and
//! move with it. It is the daemon's, and lost with it.

use std::collections::{BTreeMap, BTreeSet};

use crate::monitor::Answer;
use crate::names::{Epoch, HostId, MigrationId, VmId};

/// What moves with a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State {
    /// Per peer: how many operations it has asked for that are complete.
    pub completed: BTreeMap<VmId, u16>,
    /// Per peer: how many of the peer's operations it has carried out.
    pub carried_out: BTreeMap<VmId, u16>,
}

/// A VM on a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instance {
    /// Its memory and queue pairs.
    pub state: State,
    /// Its queue pairs work.
    pub running: bool,
    /// In this epoch.
    pub epoch: Epoch,
}

/// A host's engine, and what its daemon tells monitors.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Engine {
    /// VMs, stopped ones included.
    pub instances: BTreeMap<VmId, Instance>,
    /// Queue pairs that may send, by VM and peer, and to which host they do.
    pub open: BTreeMap<(VmId, VmId), HostId>,
    /// Asked to hold queue pairs that face a VM, and not done.
    pub holding: BTreeSet<(MigrationId, VmId)>,
    /// Asked to stop VMs, and not done.
    pub stopping: BTreeSet<(MigrationId, VmId)>,
    /// Room for migrations, and what has come.
    pub rooms: BTreeMap<MigrationId, BTreeSet<VmId>>,
    /// What monitors are told of their VMs' last migrations, and the epoch in which a VM runs here.
    pub phases: BTreeMap<VmId, (Answer, Epoch)>,
}

impl Engine {
    /// Queue pairs that face a VM reach the end of a segment, if they are still asked to.
    pub fn hold(&mut self, migration: MigrationId, vm: VmId) -> bool {
        let asked = self.holding.remove(&(migration, vm));
        if asked {
            self.open.retain(|(_, peer), _| *peer != vm);
        }
        asked
    }

    /// A VM stands still, if it still is to.
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

    /// Whether a VM works here.
    #[must_use]
    pub fn runs(&self, vm: VmId) -> bool {
        self.instances.get(&vm).is_some_and(|instance| instance.running)
    }
}

/// What a whole run of the cluster has seen of one direction of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Operations carried out, by whatever instance.
    pub effects: u16,
}
