//! The APICs of a VM, their nodes, and the resolution of destinations.

use std::collections::BTreeSet;

use crate::message::Destination;

/// A node of a VM that spans hosts.
pub type NodeId = u16;

/// The largest APIC id: logical destinations have 16 bits for the cluster, and 4 bits of the id choose its member.
pub const MAX_APIC_ID: u32 = 0xF_FFFF;
/// Limit of APICs of a VM, over all nodes.
pub const MAX_APICS: usize = 4096;
/// Limit of the timers' tick, in nanoseconds.
pub const MAX_TIMER_TICK_NS: u32 = 1000;

/// An APIC on another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemoteApic {
    /// Its id.
    pub apic_id: u32,
    /// Its node.
    pub node: NodeId,
}

/// Location of the VM's IOAPIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoApicLocation {
    /// On this node.
    Here,
    /// On another node, to which EOIs of level-triggered interrupts are sent.
    Node(NodeId),
}

/// Configuration of a node's controllers. The order of ids has no effect.
#[derive(Debug, Clone)]
pub struct Config {
    /// Ids of this node's APICs, one per vCPU.
    pub local_apic_ids: Vec<u32>,
    /// The APICs of other nodes.
    pub remote_apics: Vec<RemoteApic>,
    /// The APIC of the bootstrap processor, on any node. Only its vCPU runs after a reset.
    pub bootstrap_apic_id: u32,
    /// Location of the IOAPIC.
    pub io_apic: IoApicLocation,
    /// Nanoseconds per tick of the APIC timers before division, 1 to [`MAX_TIMER_TICK_NS`]. KVM's own APICs have 1.
    pub timer_tick_ns: u32,
    /// MSIs and redirection entries have destinations of 15 bits. CPUID must announce this: KVM_FEATURE_MSI_EXT_DEST_ID, bit 15 of EAX in
    /// leaf 0x40000001.
    pub extended_destination_ids: bool,
}

/// An invalid [`Config`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// This node has no local APIC.
    #[error("A node without vCPUs needs no interrupt controllers: give it an APIC id at least")]
    NoLocalApic,
    /// The VM has more than [`MAX_APICS`] APICs.
    #[error("A VM of {count} APICs can't be: use {MAX_APICS} at most")]
    TooManyApics {
        /// Number of APICs of all nodes.
        count: usize,
    },
    /// An id is above [`MAX_APIC_ID`].
    #[error("APIC id {apic_id:#x} can't be: use ids up to {MAX_APIC_ID:#x}")]
    ApicId {
        /// The id.
        apic_id: u32,
    },
    /// Two APICs of the VM have the same id.
    #[error("APIC id {apic_id:#x} was given twice: each vCPU of a VM needs its own")]
    DuplicateApicId {
        /// The id.
        apic_id: u32,
    },
    /// No APIC has the bootstrap processor's id, so no vCPU would boot.
    #[error("There is no APIC with the bootstrap processor's id {apic_id:#x}: use one of the VM's ids")]
    NoBootstrapApic {
        /// The id.
        apic_id: u32,
    },
    /// The tick is 0, or above [`MAX_TIMER_TICK_NS`].
    #[error("A timer tick of {tick_ns} ns can't be: use 1 to {MAX_TIMER_TICK_NS}")]
    TimerTick {
        /// The tick, in nanoseconds.
        tick_ns: u32,
    },
}

/// Resolves destinations to APICs and nodes. Immutable: ids don't change, and logical ids are derived from them.
#[derive(Debug)]
pub(crate) struct Topology {
    /// Ids of this node's APICs, ascending.
    local: Vec<u32>,
    /// By id, ascending.
    remote: Vec<RemoteApic>,
    nodes: Vec<NodeId>,
}

impl Topology {
    pub(crate) fn new(config: &Config) -> Result<Self, ConfigError> {
        let (mut local, mut remote) = (config.local_apic_ids.clone(), config.remote_apics.clone());
        local.sort_unstable();
        remote.sort_unstable();
        let count = local.len() + remote.len();
        if local.is_empty() {
            return Err(ConfigError::NoLocalApic);
        }
        if count > MAX_APICS {
            return Err(ConfigError::TooManyApics { count });
        }
        let mut ids = BTreeSet::new();
        for apic_id in local.iter().copied().chain(remote.iter().map(|apic| apic.apic_id)) {
            if apic_id > MAX_APIC_ID {
                return Err(ConfigError::ApicId { apic_id });
            }
            if !ids.insert(apic_id) {
                return Err(ConfigError::DuplicateApicId { apic_id });
            }
        }
        if !ids.contains(&config.bootstrap_apic_id) {
            return Err(ConfigError::NoBootstrapApic { apic_id: config.bootstrap_apic_id });
        }
        if !(1..=MAX_TIMER_TICK_NS).contains(&config.timer_tick_ns) {
            return Err(ConfigError::TimerTick { tick_ns: config.timer_tick_ns });
        }
        let nodes: BTreeSet<NodeId> = remote.iter().map(|apic| apic.node).collect();
        Ok(Self { local, remote, nodes: nodes.into_iter().collect() })
    }

    /// Ids of this node's APICs, ascending.
    pub(crate) fn local(&self) -> &[u32] {
        &self.local
    }

    pub(crate) fn index_of(&self, apic_id: u32) -> Option<usize> {
        self.local.binary_search(&apic_id).ok()
    }

    /// Indices of this node's APICs that accept it, ascending.
    pub(crate) fn local_targets(&self, destination: Destination) -> impl Iterator<Item = usize> + '_ {
        let range = range_of(&self.local, destination, |id| *id);
        range.filter(move |index| destination.includes(self.local[*index]))
    }

    /// Other nodes' APICs that accept it, by id, ascending.
    pub(crate) fn remote_targets(&self, destination: Destination) -> impl Iterator<Item = RemoteApic> + '_ {
        let range = range_of(&self.remote, destination, |apic| apic.apic_id);
        self.remote[range].iter().copied().filter(move |apic| destination.includes(apic.apic_id))
    }

    /// Nodes with APICs that accept it, each once.
    pub(crate) fn target_nodes(&self, destination: Destination) -> Vec<NodeId> {
        if destination == Destination::All {
            return self.nodes.clone();
        }
        let nodes: BTreeSet<NodeId> = self.remote_targets(destination).map(|apic| apic.node).collect();
        nodes.into_iter().collect()
    }
}

/// Index range of the sorted ids that `destination` may include.
fn range_of<T>(
    sorted: &[T],
    destination: Destination,
    id: impl Fn(&T) -> u32 + Copy,
) -> std::ops::Range<usize> {
    let between = |first: u32, last: u32| {
        let start = sorted.partition_point(|entry| id(entry) < first);
        start..sorted.partition_point(|entry| id(entry) <= last)
    };
    match destination {
        Destination::Physical(apic_id) => between(apic_id, apic_id),
        Destination::Logical(value) => {
            let first = value >> 16 << 4;
            between(first, first | 0xF)
        }
        Destination::All | Destination::AllBut(_) => 0..sorted.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            local_apic_ids: vec![0x11, 0, 1, 0x10],
            remote_apics: vec![
                RemoteApic { apic_id: 0x12, node: 2 },
                RemoteApic { apic_id: 0x13, node: 2 },
                RemoteApic { apic_id: 0x100, node: 5 },
            ],
            bootstrap_apic_id: 0,
            io_apic: IoApicLocation::Here,
            timer_tick_ns: 1,
            extended_destination_ids: false,
        }
    }

    #[test]
    fn destinations_are_resolved_here_and_elsewhere() {
        let topology = Topology::new(&config()).unwrap();
        let local = |destination| {
            topology.local_targets(destination).map(|index| topology.local()[index]).collect::<Vec<_>>()
        };
        assert_eq!(local(Destination::Physical(0x10)), [0x10]);
        assert_eq!(local(Destination::Physical(0x12)), [0u32; 0]);
        assert_eq!(local(Destination::Logical(0x1_000F)), [0x10, 0x11]);
        assert_eq!(local(Destination::AllBut(1)), [0, 0x10, 0x11]);
        assert_eq!(topology.target_nodes(Destination::Logical(0x1_000F)), [2]);
        assert_eq!(topology.target_nodes(Destination::AllBut(0x100)), [2]);
        assert_eq!(topology.target_nodes(Destination::All), [2, 5]);
        assert_eq!(topology.target_nodes(Destination::Physical(0x100)), [5]);
        assert_eq!(topology.target_nodes(Destination::Physical(0)), [0u16; 0]);
    }

    #[test]
    fn what_can_not_be_is_named() {
        let error = |change: fn(&mut Config)| {
            let mut config = config();
            change(&mut config);
            Topology::new(&config).unwrap_err()
        };
        assert_eq!(error(|c| c.local_apic_ids.clear()), ConfigError::NoLocalApic);
        assert_eq!(error(|c| c.local_apic_ids.push(0x100)), ConfigError::DuplicateApicId { apic_id: 0x100 });
        assert_eq!(error(|c| c.local_apic_ids.push(0x10_0000)), ConfigError::ApicId { apic_id: 0x10_0000 });
        assert_eq!(error(|c| c.bootstrap_apic_id = 9), ConfigError::NoBootstrapApic { apic_id: 9 });
        assert_eq!(error(|c| c.timer_tick_ns = 0), ConfigError::TimerTick { tick_ns: 0 });
        assert_eq!(
            error(|c| c.local_apic_ids = (1000..6000).collect()),
            ConfigError::TooManyApics { count: 5003 }
        );
    }
}
