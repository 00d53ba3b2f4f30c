//! The scheme for stores of the vNUMA paper, for comparison in the simulator: **weak, not for x86 guests**.
//!
//! A store executes at its node and retires at once. It goes to all nodes with the number of stores that its node has made to the page. A
//! page in a message says how many stores of each node it contains. The receiver adds the missing ones that arrived early. Fences don't
//! order such stores: store buffering with fences shows the outcome that x86 forbids.
//!
//! Source: vNUMA (USENIX ATC 2009), sections 3.3 (batched, broadcast stores) and 3.4 (incremental merge).

use super::{Context, Node};
use crate::event::Action;
use crate::message::Body;
use crate::names::{NodeId, NodeSet, Page, Vcpu};
use crate::operation::{Change, Operation};
use crate::pages::Pages;

/// Limit of stores kept for a page in flight. More are refused: correct peers don't send so many within a transfer.
const MOST_EARLY: usize = 4096;

impl Node {
    /// Executes a store here and sends it to all other nodes.
    pub(super) fn operate_weakly<P: Pages>(
        &mut self,
        vcpu: Vcpu,
        page: Page,
        operation: &Operation,
        cx: &mut Context<'_, P>,
    ) {
        let mut content = Vec::new();
        cx.pages.read(page, &mut content);
        let effect = operation.effect(&content);
        self.counters.operations += 1;
        if let Some(change) = effect.change {
            for (offset, bytes) in change.runs() {
                cx.pages.write(page, offset, bytes);
            }
            let (me, nodes) = (self.config.me, self.config.nodes);
            let local = self.local(page);
            local.counters.resize(usize::from(nodes), 0);
            let counter = local.counters[me.index()].saturating_add(1);
            local.counters[me.index()] = counter;
            for node in NodeSet::first(nodes).without(NodeSet::one(me)).iter() {
                self.send(node, page, Body::Weak { counter, change: change.clone() }, cx);
            }
        }
        cx.actions.push(Action::Completed { vcpu, old: effect.old });
        self.retired(vcpu, cx);
    }

    /// A store of another node arrives.
    pub(super) fn weak_update<P: Pages>(
        &mut self,
        from: NodeId,
        page: Page,
        counter: u64,
        change: Change,
        cx: &mut Context<'_, P>,
    ) {
        let nodes = usize::from(self.config.nodes);
        if usize::from(change.offset) + change.bytes.len() > cx.pages.size() {
            self.counters.refused += 1;
            return;
        }
        self.counters.updated += 1;
        let local = self.local(page);
        if local.mode.is_update() {
            local.counters.resize(nodes, 0);
            if counter > local.counters[from.index()] {
                local.counters[from.index()] = counter;
                for (offset, bytes) in change.runs() {
                    cx.pages.write(page, offset, bytes);
                }
            }
        } else if local.want.is_some() && local.early.len() < MOST_EARLY {
            local.early.push((from, counter, change));
        }
    }

    /// The page has arrived: adds the early stores that it lacks.
    pub(super) fn merge_early<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let nodes = usize::from(self.config.nodes);
        let local = self.local(page);
        let early = std::mem::take(&mut local.early);
        local.counters.resize(nodes, 0);
        for (from, counter, change) in early {
            self.weak_update(from, page, counter, change, cx);
        }
    }
}
