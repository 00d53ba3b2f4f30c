//! The invariants of a world.

use dsm::message::Body;
use dsm::names::{Access, NodeId, Page};
use dsm::node::Node;
use dsm::operation::Change;

use super::{PAGES, Setup, World};
use crate::litmus::{Litmus, Outcome};

impl World {
    /// Checks the invariants.
    pub(super) fn check(&mut self, setup: &Setup) {
        for page in 0..PAGES {
            let access: Vec<Access> = self.memories.iter().map(|memory| memory.access[page]).collect();
            let writers = access.iter().filter(|access| **access == Access::Write).count();
            let readers = access.iter().filter(|access| **access >= Access::Read).count();
            if writers > 1 || (writers == 1 && readers > 1) {
                self.fail(format!("page {page} has {writers} writers and {readers} nodes that can read"));
            }
            self.check_copies(page, &access);
        }
        if self.is_done(setup) {
            let outcome = self.outcome();
            if !setup_allows(setup, &outcome) {
                self.fail(format!("{}: the outcome {outcome:?} is forbidden", setup.litmus.name));
            }
        }
    }

    /// Checks: write-invalidate copies are equal, and a write-update copy with its updates in flight equals the sequencer's.
    fn check_copies(&mut self, page: usize, access: &[Access]) {
        let name = page as Page;
        let plain = |node: &usize| access[*node] >= Access::Read && !self.nodes[*node].mode(name).is_update();
        let mut contents = (0..self.nodes.len()).filter(plain).map(|node| self.memories[node].content[page]);
        if let Some(first) = contents.next()
            && contents.any(|other| other != first)
        {
            self.fail(format!("copies of page {page} differ"));
            return;
        }
        let Some(holder) = self.nodes.iter().position(Node::has_token) else { return };
        if !self.nodes[holder].mode(name).is_update() || !self.nodes[holder].is_owner(name) {
            return;
        }
        for node in self.nodes[holder].copies(name).iter().map(NodeId::index) {
            if node == holder || !self.nodes[node].mode(name).is_update() {
                continue;
            }
            let count = self.nodes.len();
            let under_way = (0..count).flat_map(|from| &self.links[from * count + node]);
            let held = self.nodes[node].held_back(name);
            let mut content = self.memories[node].content[page];
            let mut updates: Vec<(u64, &Change)> = Vec::new();
            let mut coming = false;
            for message in under_way.chain(held).filter(|message| message.page == name) {
                match &message.body {
                    Body::Update { change, .. } => updates.push((message.stamp.seq, change)),
                    Body::Grant(_) => coming = true,
                    _ => {}
                }
            }
            updates.sort_by_key(|(seq, _)| *seq);
            for (offset, bytes) in updates.iter().flat_map(|(_, change)| change.runs()) {
                content[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            if !coming && content != self.memories[holder].content[page] {
                self.fail(format!("node {node} has or gets another page {page} than the sequencer has"));
                return;
            }
        }
    }
}

fn setup_allows(setup: &Setup, outcome: &Outcome) -> bool {
    // Computed once per program, since there are many worlds.
    thread_local! {
        static KNOWN: std::cell::RefCell<Option<(Litmus, bool, std::collections::BTreeSet<Outcome>)>> =
            const { std::cell::RefCell::new(None) };
    }
    KNOWN.with_borrow_mut(|known| {
        let fits = |(litmus, buffered, _): &(Litmus, bool, _)| {
            *litmus == setup.litmus && *buffered == setup.buffered
        };
        if !known.as_ref().is_some_and(fits) {
            let allowed = setup.litmus.allowed(setup.buffered);
            *known = Some((setup.litmus.clone(), setup.buffered, allowed));
        }
        known.as_ref().is_some_and(|(.., allowed)| allowed.contains(outcome))
    })
}
