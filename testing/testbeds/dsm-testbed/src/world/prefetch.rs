//! Prefetch contexts: the node's vCPU after the last one faults on a page that no program needs, and its instruction retires as soon as the
//! page arrives, as the monitor does it (crate `prefetch`). The checker takes every page at every moment for predicted.

use dsm::event::{Event, Fault};
use dsm::names::{Access, Page, Vcpu};

use super::{Setup, Step, World, vcpu_id};

/// Number of a node's vCPUs without its context.
pub(super) fn vcpus(setup: &Setup, node: usize) -> usize {
    setup.places.iter().filter(|place| usize::from(**place) == node).count()
}

impl World {
    /// Adds all prefetches that may begin: of pages that aren't here with these rights. A write-update page needs no copy to be written.
    pub(super) fn prefetches(&self, steps: &mut Vec<Step>) {
        for node in (0..self.nodes.len()).filter(|node| self.prefetched[*node].is_none()) {
            for (page, access) in (0_u8..).zip(self.memories[node].access) {
                if self.nodes[node].mode(page.into()).is_update() {
                    continue;
                }
                let missing = [(false, Access::Read), (true, Access::Write)].into_iter();
                let missing = missing.filter(|(_, needed)| access < *needed);
                steps.extend(missing.map(|(write, _)| Step::Prefetch(node, page, write)));
            }
        }
    }

    /// The context of a node faults.
    pub(super) fn prefetch(&mut self, setup: &Setup, node: usize, page: u8, write: bool) {
        self.budget.prefetches -= 1;
        self.prefetched[node] = Some(page);
        let fault = if write { Fault::Write } else { Fault::Read };
        let vcpu = vcpu_id(vcpus(setup, node));
        self.feed(setup, node, Event::Fault { vcpu, page: Page::from(page), fault }, 0);
    }

    /// Ends the node's context, if the action is for it. Returns whether it is. The node may resume and kick it in one step, before it
    /// hears that the context's instruction has retired: `again`.
    pub(super) fn end_context(&mut self, setup: &Setup, node: usize, vcpu: Vcpu, again: bool) -> bool {
        if usize::from(vcpu) != vcpus(setup, node) || setup.budget.prefetches == 0 {
            return false;
        }
        if self.prefetched[node].take().is_none() && !again {
            self.fail(format!("the context of node {node} resumed, and didn't wait"));
        }
        true
    }
}
