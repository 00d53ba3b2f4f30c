//! A payload VM as one node of a VM that spans hosts: its interface to the node.

use machine::vcpu::GuestRegisters;
use std::ops::Range;
use std::sync::Arc;

/// The node that a payload VM is part of ([`crate::dsm`]). vCPU threads call it concurrently.
pub trait Whole: Send + Sync {
    /// Number of this node, below [`Whole::nodes`].
    fn node(&self) -> u32;
    /// Number of nodes.
    fn nodes(&self) -> u32;
    /// vCPU `index` (of the whole VM) is about to run; see [`machine::vcpu::VcpuExitHandler::before_run`].
    fn before_run(&self, index: u32, registers: &dyn GuestRegisters);
    /// vCPU `index` has ended, by itself or by an exception. `parked`: the other vCPUs continue.
    fn ended(&self, index: u32, parked: bool);
    /// The program's measurement begins (true) or has ended.
    fn phase(&self, begins: bool);
    /// The vCPUs are about to be stopped: releases all that wait.
    fn before_stop(&self);
}

/// The vCPUs of a node, in a VM with `total` of them. They ascend with the nodes. If the number isn't a multiple, the first nodes have one
/// more.
pub fn vcpus_of(node: u32, nodes: u32, total: u32) -> Range<u32> {
    let nodes = nodes.max(1);
    let (each, more) = (total / nodes, total % nodes);
    let first = |node: u32| node.saturating_mul(each).saturating_add(node.min(more));
    first(node)..first(node.saturating_add(1)).min(total)
}

/// The vCPUs of this process, and the VM that they are part of.
#[derive(Clone)]
pub(super) struct Local {
    /// Ids, and indexes in the whole VM.
    pub(super) vcpus: Vec<(u32, u32)>,
    pub(super) whole: Option<Arc<dyn Whole>>,
}

impl Local {
    /// Index in the whole VM of the vCPU with id `id`.
    pub(super) fn index(&self, id: u32) -> u32 {
        self.vcpus.iter().find(|vcpu| vcpu.0 == id).map_or(0, |vcpu| vcpu.1)
    }

    /// See [`Whole::before_stop`].
    pub(super) fn before_stop(&self) {
        if let Some(whole) = &self.whole {
            whole.before_stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::vcpus_of;

    /// Every vCPU is on exactly one node, ascending, and numbers of vCPUs differ by one at most.
    #[test]
    fn vcpus_are_spread_over_nodes() {
        for (nodes, total) in [(1, 1), (2, 2), (2, 3), (3, 4), (4, 4), (4, 11), (64, 254)] {
            let mut next = 0;
            for node in 0..nodes {
                let here = vcpus_of(node, nodes, total);
                assert_eq!(here.start, next);
                next = here.end;
                assert!(
                    (total / nodes..=total.div_ceil(nodes)).contains(&u32::try_from(here.len()).unwrap())
                );
            }
            assert_eq!(next, total);
        }
    }
}
