//! Write-update pages. Operations go to the sequencer. It executes each, gives it a place in the total order of updates, and sends the
//! change to every copy. An instruction retires when its own node has applied the order up to there.

use super::local::{Sequencer, Stalled, Want, WantKind};
use super::{Context, Node};
use crate::config::{Order, Plant};
use crate::event::Action;
use crate::message::{Body, Intent, Request, Seq, Stamp, Token, UNKNOWN_CHANGE};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority, Vcpu};
use crate::operation::{Change, Operation};
use crate::pages::Pages;
use crate::wire::MAX_UPDATE_PAGES;

impl Node {
    /// The monitor has decoded a trapped instruction of this node.
    pub(super) fn operate<P: Pages>(
        &mut self,
        vcpu: Vcpu,
        page: Page,
        operation: Operation,
        cx: &mut Context<'_, P>,
    ) {
        let size = cx.pages.size();
        let me = self.config.me;
        let Some(state) = self.vcpu(vcpu).filter(|state| !state.operating && state.waiting.is_none()) else {
            self.counters.refused += 1;
            return;
        };
        if !operation.is_valid(size) {
            self.counters.refused += 1;
            return;
        }
        if state.priority.is_none() {
            self.begin_instruction(vcpu, cx.now);
        }
        let Some(state) = self.vcpu(vcpu) else { return };
        cx.recheck.extend(&state.held);
        if !self.local(page).traps() {
            // The mode has changed meanwhile: the instruction faults again and then gets the rights that it needs.
            cx.actions.push(Action::Resume { vcpu });
            return;
        }
        let weak = self.config.policy.order == Order::PerWriter;
        if weak && self.local(page).mode == Mode::Update && !operation.is_atomic() {
            self.operate_weakly(vcpu, page, &operation, cx);
            return;
        }
        if let Some(state) = self.vcpu(vcpu) {
            state.operating = true;
        }
        self.counters.operations += 1;
        let body = Body::Operate { requester: me, vcpu, operation };
        let to = if self.state.token.is_some() { me } else { self.state.token_at };
        self.send(to, page, body, cx);
    }

    /// An operation arrives at the sequencer, or at an earlier one, which forwards it.
    pub(super) fn sequence_or_forward<P: Pages>(
        &mut self,
        requester: NodeId,
        vcpu: Vcpu,
        page: Page,
        operation: Operation,
        cx: &mut Context<'_, P>,
    ) {
        let size = cx.pages.size();
        let Some(token) = &mut self.state.token else {
            self.forward_to_token(page, Body::Operate { requester, vcpu, operation }, cx);
            return;
        };
        if requester.0 >= self.config.nodes || !operation.is_valid(size) {
            self.counters.refused += 1;
            return;
        }
        // A vCPU has one operation at a time, which bounds the queue.
        token.stalled.retain(|other| (other.requester, other.vcpu) != (requester, vcpu));
        let stalled = Stalled { requester, vcpu, page, operation };
        if token.stalled.is_empty() {
            if let Some(stalled) = self.sequence(stalled, cx)
                && let Some(token) = &mut self.state.token
            {
                self.counters.stalled += 1;
                token.stalled.push_back(stalled);
            }
        } else {
            token.stalled.push_back(stalled);
        }
        self.after_operation(requester, page, cx);
    }

    /// Executes an operation. Returns it unexecuted if a copy is too far behind.
    fn sequence<P: Pages>(&mut self, stalled: Stalled, cx: &mut Context<'_, P>) -> Option<Stalled> {
        let Stalled { requester, vcpu, page, ref operation } = stalled;
        let me = self.config.me;
        let window = self.config.policy.update_window.max(1);
        let local = self.local(page);
        if !local.owner || !local.mode.is_update() || local.is_changing() || local.reverting {
            self.send(requester, page, Body::Refuse { vcpu }, cx);
            return None;
        }
        let targets = local.copies.with(NodeSet::one(requester)).without(NodeSet::one(me));
        let token = self.state.token.as_mut()?;
        let unacked = |node: NodeId| token.unacked.get(node.index()).copied().unwrap_or(0);
        if targets.iter().any(|node| unacked(node) >= window) {
            return Some(stalled);
        }
        let mut content = Vec::with_capacity(cx.pages.size());
        cx.pages.read(page, &mut content);
        let effect = operation.effect(&content);
        let Some(change) = effect.change else {
            self.send(requester, page, Body::Done { vcpu, old: effect.old }, cx);
            return None;
        };
        if operation.is_atomic() {
            self.local(page).mode = Mode::SingleWriter;
        }
        for (offset, bytes) in change.runs() {
            cx.pages.write(page, offset, bytes);
        }
        let seq = self.state.seen.saturating_add(1);
        (self.state.seen, self.state.proven) = (seq, seq);
        self.counters.sequenced += 1;
        for node in targets.iter() {
            let Some(token) = &mut self.state.token else { break };
            let Some(last) = token.last.get_mut(node.index()) else { continue };
            let stamp = Stamp { seq, need: std::mem::replace(last, seq) };
            if let Some(unacked) = token.unacked.get_mut(node.index()) {
                *unacked = unacked.saturating_add(1);
            }
            let done = (node == requester).then_some((vcpu, effect.old));
            self.send_stamped(node, page, stamp, Body::Update { change: change.clone(), done }, cx);
        }
        if requester == me {
            self.completed(vcpu, effect.old, cx);
        }
        None
    }

    /// Updates the statistics after an operation: ends write-update or moves the sequencer's role by the policy's thresholds.
    fn after_operation<P: Pages>(&mut self, requester: NodeId, page: Page, cx: &mut Context<'_, P>) {
        let policy = self.config.policy;
        if policy.adapt {
            let local = self.local(page);
            let (count, since) = &mut local.operations;
            if cx.now.saturating_sub(*since) > policy.window_ns {
                (*count, *since) = (0, cx.now);
                local.turns.0 = 0;
            }
            *count += 1;
            if local.turns.1 != requester {
                local.turns = (local.turns.0 + 1, requester);
            }
            let turns = local.turns.0;
            let in_turns = turns >= 4 && *count / turns > policy.turn;
            if (*count > policy.storm || in_turns) && local.mode == Mode::Update {
                self.counters.storms += 1;
                self.begin_revert(page, cx);
            }
        }
        let Some(token) = self.state.token.as_mut().filter(|_| policy.token_votes > 0) else { return };
        let (candidate, votes) = &mut token.candidate;
        if *candidate == requester {
            *votes = (*votes + 1).min(policy.token_votes * 2);
        } else if *votes == 0 {
            (*candidate, *votes) = (requester, 1);
        } else {
            *votes -= 1;
        }
        token.foreign = if requester == self.config.me { 0 } else { token.foreign.saturating_add(1) };
        // The role goes to the node that leads all others, or, if the sequencer operates no more itself, to the next node that does.
        let (candidate, votes) = token.candidate;
        if candidate != self.config.me && votes >= policy.token_votes {
            self.move_token(candidate, cx);
        } else if token.foreign >= policy.token_votes.saturating_mul(2) {
            self.move_token(requester, cx);
        }
    }

    /// An update arrives, after its predecessor.
    pub(super) fn updated<P: Pages>(
        &mut self,
        page: Page,
        _seq: Seq,
        change: &Change,
        done: Option<(Vcpu, u64)>,
        cx: &mut Context<'_, P>,
    ) {
        self.counters.updated += 1;
        let local = self.local(page);
        // Without a copy, or after leaving, there is nothing to write. A page in flight is safe: its own place in the order is after all
        // updates that it contains, and before all that it lacks.
        let has = local.mode.is_update() && !local.owner;
        if has && usize::from(change.offset) + change.bytes.len() <= cx.pages.size() {
            for (offset, bytes) in change.runs() {
                cx.pages.write(page, offset, bytes);
            }
            self.count_unread(page, cx);
            if self.config.plant == Plant::ApplyTwice {
                if let Some((page, change)) = self.state.again.take() {
                    for (offset, bytes) in change.runs() {
                        cx.pages.write(page, offset, bytes);
                    }
                }
                self.state.again = Some((page, change.clone()));
            }
        }
        if let Some((vcpu, old)) = done {
            self.completed(vcpu, old, cx);
        }
        self.state.since_applied += 1;
        if self.state.since_applied >= (self.config.policy.update_window / 2).max(1) {
            let (node, count) = (self.config.me, std::mem::take(&mut self.state.since_applied));
            self.send(self.state.token_at, 0, Body::Applied { node, count }, cx);
        }
    }

    /// Closes a copy that the guest may not read any more. If no fault opens it, leaves.
    fn count_unread<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let first = self.config.policy.probe_updates;
        let local = self.local(page);
        let (unread, look) = &mut local.unread;
        *look = (*look).max(first);
        *unread = unread.saturating_add(1);
        if first == 0 || *unread < *look || local.leaving.is_some() {
            return;
        }
        *unread = 0;
        if local.access == Access::Read {
            let idle = local.holds.is_empty() && local.waiting.is_empty() && local.invalidation.is_none();
            if idle {
                let mode = local.mode;
                self.set(page, mode, Access::None, cx);
            }
        } else if local.is_closed() && !self.state.incoming.contains(&page) {
            self.counters.left += 1;
            self.ask_to_leave(page, cx);
        }
    }

    /// An operation of this node is complete.
    pub(super) fn completed<P: Pages>(&mut self, vcpu: Vcpu, old: u64, cx: &mut Context<'_, P>) {
        let Some(state) = self.vcpu(vcpu).filter(|state| state.operating) else {
            self.counters.refused += 1;
            return;
        };
        state.operating = false;
        cx.actions.push(Action::Completed { vcpu, old });
        self.retired(vcpu, cx);
    }

    /// The page of an operation isn't write-update any more.
    pub(super) fn refused_operation<P: Pages>(&mut self, vcpu: Vcpu, _page: Page, cx: &mut Context<'_, P>) {
        let Some(state) = self.vcpu(vcpu).filter(|state| state.operating) else {
            self.counters.refused += 1;
            return;
        };
        state.operating = false;
        cx.recheck.extend(&state.held);
        cx.actions.push(Action::Resume { vcpu });
    }

    /// A node reports applied updates: stalled operations may continue.
    pub(super) fn applied<P: Pages>(&mut self, node: NodeId, count: u64, cx: &mut Context<'_, P>) {
        let Some(token) = &mut self.state.token else {
            self.forward_to_token(0, Body::Applied { node, count }, cx);
            return;
        };
        let Some(unacked) = token.unacked.get_mut(node.index()) else {
            self.counters.refused += 1;
            return;
        };
        *unacked = unacked.saturating_sub(count);
        while let Some(stalled) = self.state.token.as_mut().and_then(|token| token.stalled.pop_front()) {
            if let Some(stalled) = self.sequence(stalled, cx) {
                if let Some(token) = &mut self.state.token {
                    token.stalled.push_front(stalled);
                }
                return;
            }
        }
    }

    /// Another mode is requested, at the home or at the sequencer.
    pub(super) fn advise<P: Pages>(&mut self, page: Page, mode: Mode, cx: &mut Context<'_, P>) {
        if self.state.token.is_none() {
            let home = self.config.home(page) == self.config.me;
            let known = self.state.homes.get(&page).map_or(Mode::Invalidate, |home| home.mode);
            if !home || known.is_update() != mode.is_update() {
                self.forward_to_token(page, Body::Advise { mode }, cx);
            }
        } else if mode.is_update() {
            self.begin_convert(page, cx);
        } else {
            self.begin_revert(page, cx);
        }
    }

    pub(super) fn begin_convert<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let full = self.state.token.as_ref().is_none_or(|token| token.pages.len() >= MAX_UPDATE_PAGES);
        let local = self.local(page);
        if full || local.mode.is_update() || local.reverting {
            return;
        }
        if let Some(want) = &local.want {
            // The sequencer's own vCPUs already requested the page, perhaps in the requests that the home counted.
            local.convert_next = want.kind == WantKind::Remote;
            return;
        }
        // No instruction waits for this request, so it is younger than all of them.
        let priority = Priority { time: Priority::NO_INSTRUCTION, node: self.config.me, vcpu: 0 };
        let request = Request {
            requester: self.config.me,
            intent: Intent::Write,
            priority,
            held: None,
            as_update: false,
            convert: true,
            atomic: false,
            changed: UNKNOWN_CHANGE,
        };
        let versions = self.config.policy.versions;
        let local = self.local(page);
        let held = (versions && local.kept).then_some(local.version);
        local.want = Some(own_want(WantKind::Convert, priority, None));
        self.busy(1);
        self.send(self.config.home(page), page, Body::Request(Request { held, ..request }), cx);
    }

    fn busy(&mut self, more: u32) {
        if let Some(token) = &mut self.state.token {
            token.busy += more;
        }
    }

    /// All other nodes have dropped the page: it is write-update from now on.
    pub(super) fn begin_updates<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let nodes = usize::from(self.config.nodes);
        if let Some(token) = &mut self.state.token {
            token.pages.insert(page);
            token.busy = token.busy.saturating_sub(1);
        }
        self.counters.conversions += 1;
        let local = self.local(page);
        local.owner = true;
        local.version = local.version.wrapping_add(1);
        local.kept = false;
        local.copies = NodeSet::EMPTY;
        local.operations = (0, cx.now);
        local.counters = vec![0; nodes];
        // Stores that were granted now trap, which also is progress for their instructions.
        self.set(page, Mode::Update, Access::Read, cx);
    }

    fn begin_revert<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let priority = Priority { time: Priority::NO_INSTRUCTION, node: self.config.me, vcpu: 0 };
        let local = self.local(page);
        if !local.owner || !local.mode.is_update() || local.want.is_some() {
            return;
        }
        let copies = local.copies;
        local.want = Some(own_want(WantKind::Revert, priority, Some(copies)));
        self.busy(1);
        self.invalidate_copies(page, self.config.me, copies, priority, true, cx);
        self.finish_want(page, cx);
    }

    /// All nodes have dropped their write-update copies: ends the mode.
    pub(super) fn end_updates<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        if let Some(token) = &mut self.state.token {
            token.pages.remove(&page);
        }
        self.counters.reversions += 1;
        self.local(page).reverting = true;
        let access = self.local(page).access.min(Access::Read);
        self.set(page, Mode::Invalidate, access, cx);
        self.make_writable(page, cx);
        self.send(self.config.home(page), page, Body::Reverted, cx);
    }

    /// The home has recorded the end of write-update.
    pub(super) fn reverted_ack<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        if !std::mem::take(&mut self.local(page).reverting) {
            self.counters.refused += 1;
            return;
        }
        if let Some(token) = &mut self.state.token {
            token.busy = token.busy.saturating_sub(1);
        }
        self.go(page, cx);
        self.serve(page, cx);
    }

    /// Moves the sequencer's role to another node, if this one has it and no change of mode or stalled operation binds it. Returns whether
    /// it moved.
    pub(super) fn move_token<P: Pages>(&mut self, to: NodeId, cx: &mut Context<'_, P>) -> bool {
        let me = self.config.me;
        let Some(token) = &self.state.token else { return false };
        let free = token.busy == 0 && token.stalled.is_empty();
        if !free || to == me || to.0 >= self.config.nodes {
            return false;
        }
        let pages: Vec<Page> = token.pages.iter().copied().collect();
        // The sequencer has a copy of every write-update page. The link delivers these copies before the token.
        for page in &pages {
            if !self.local(*page).copies.has(to) {
                self.give_copy_with_updates(*page, to, Intent::ReadOwn, cx);
            }
        }
        let both = NodeSet::one(to);
        let list = pages.iter().map(|page| {
            let local = self.local(*page);
            let copies = std::mem::take(&mut local.copies).with(NodeSet::one(me)).without(both);
            local.owner = false;
            (*page, local.mode, copies)
        });
        let pages: Vec<_> = list.collect();
        let Some(token) = self.state.token.take() else { return false };
        // The token has a place of its own in the order. By it this node later recognizes its own requests of before as old.
        let seq = self.state.seen.saturating_add(1);
        (self.state.seen, self.state.proven) = (seq, seq);
        let need = token.last.get(to.index()).copied().unwrap_or(seq);
        self.state.token_at = to;
        self.state.asked = 0;
        self.counters.tokens += 1;
        let body = Body::Token(Token { last: token.last, unacked: token.unacked, pages: pages.clone() });
        self.send_stamped(to, 0, Stamp { seq, need }, body, cx);
        for (page, ..) in pages {
            for request in std::mem::take(&mut self.local(page).queue) {
                self.forward_to_token(page, Body::Request(Request { as_update: true, ..request }), cx);
            }
        }
        true
    }

    /// The token arrives: this node becomes the sequencer.
    pub(super) fn take_token<P: Pages>(&mut self, from: NodeId, token: Token, cx: &mut Context<'_, P>) {
        let nodes = usize::from(self.config.nodes);
        if self.state.token.is_some() || token.last.len() != nodes || token.unacked.len() != nodes {
            self.counters.refused += 1;
            return;
        }
        let me = self.config.me;
        self.state.token_at = me;
        self.state.since_applied = 0;
        self.state.seen = self.state.seen.max(self.state.proven);
        self.state.proven = self.state.seen;
        let Token { mut last, mut unacked, pages } = token;
        // The previous sequencer has applied all updates.
        for (values, value) in [(&mut last, self.state.seen), (&mut unacked, 0)] {
            for node in [me, from] {
                if let Some(entry) = values.get_mut(node.index()) {
                    *entry = value;
                }
            }
        }
        let all = NodeSet::first(self.config.nodes);
        let mut owned = std::collections::BTreeSet::new();
        for (page, mode, copies) in pages {
            if page >= self.config.pages {
                self.counters.refused += 1;
                continue;
            }
            let local = self.local(page);
            if !mode.is_update() || !local.mode.is_update() || local.owner {
                self.counters.refused += 1;
                continue;
            }
            owned.insert(page);
            local.owner = true;
            local.leaving = None;
            local.copies = NodeSet(copies.0 & all.0).without(NodeSet::one(me));
            self.set(page, mode, Access::Read, cx);
        }
        self.state.token = Some(Sequencer {
            last,
            unacked,
            stalled: std::collections::VecDeque::new(),
            candidate: (me, 0),
            foreign: 0,
            since: cx.now,
            pages: owned.clone(),
            busy: 0,
        });
        for page in owned {
            self.go(page, cx);
        }
    }
}

fn own_want(kind: WantKind, priority: Priority, needed: Option<NodeSet>) -> Want {
    Want {
        kind,
        intent: Intent::Write,
        priority,
        needed,
        acked: NodeSet::EMPTY,
        granted: None,
        hurried: None,
    }
}
