//! Saving and restoring a world.

use dsm::names::{Access, NodeId, Page};
use dsm::node::Node;

use super::{Doing, PAGES, SIZE, World};
use std::collections::VecDeque;

impl World {
    /// Whether nothing is in flight between nodes.
    pub(super) fn is_quiet(&self) -> bool {
        self.links.iter().all(VecDeque::is_empty) && self.nodes.iter().all(Node::is_idle)
    }

    /// Saves all nodes, and replaces them by restored ones whose memory has only the contents of the pages that they own.
    pub(super) fn restart(&mut self) {
        let holder = self.nodes.iter().position(Node::has_token).unwrap_or(usize::MAX);
        let token = NodeId(u8::try_from(holder).unwrap_or(u8::MAX));
        let mut owners = [0; PAGES];
        for (node, memory) in self.nodes.iter_mut().zip(&mut self.memories) {
            // An exit from the guest drains the store buffer.
            (0..memory.buffers.len()).for_each(|vcpu| memory.drain(vcpu));
            memory.access = [Access::None; PAGES];
            let restored = node
                .save(token)
                .map_err(|error| error.to_string())
                .and_then(|saved| Node::restore(*node.config(), &saved).map_err(|error| error.to_string()));
            match restored {
                Ok(restored) => *node = restored,
                Err(error) => {
                    self.verdict.get_or_insert(error);
                    return;
                }
            }
            for (page, (owners, content)) in owners.iter_mut().zip(&mut memory.content).enumerate() {
                if node.is_owner(page as Page) {
                    *owners += 1;
                } else {
                    // The saved state doesn't contain this page.
                    *content = [0xee; SIZE];
                }
            }
        }
        if let Some(page) = owners.iter().position(|owners| *owners != 1) {
            self.fail(format!("page {page} has {} owners after a restart", owners[page]));
        }
        for cpu in &mut self.cpus {
            cpu.doing = Doing::Running;
            cpu.held.clear();
            (cpu.grants, cpu.wounds, cpu.unreported, cpu.kicked) = (0, 0, false, false);
        }
    }
}
