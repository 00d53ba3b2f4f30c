//! Copies of pages: how they arrive, and how they are dropped.

use super::local::{Invalidation, WantKind};
use super::{Context, Node};
use crate::config::Plant;
use crate::message::{Body, Grant, Intent, Seq, UNKNOWN_CHANGE};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority};
use crate::pages::Pages;
use crate::payload::{Payload, changed_bytes};

impl Node {
    /// A page arrives.
    pub(super) fn granted<P: Pages>(
        &mut self,
        from: NodeId,
        page: Page,
        grant: Grant,
        cx: &mut Context<'_, P>,
    ) {
        if grant.mode.is_update() {
            self.granted_with_updates(page, &grant, cx);
            return;
        }
        let me = NodeSet::one(self.config.me);
        let all = NodeSet::first(self.config.nodes);
        let local = self.local(page);
        let expected = local.want.as_ref().is_some_and(|want| {
            want.needed.is_none() && matches!(want.kind, WantKind::Remote | WantKind::Convert)
        });
        let kept = local.kept;
        if !expected || from == self.config.me || (grant.payload == Payload::Same && !kept) {
            self.counters.refused += 1;
            return;
        }
        let changed = self.changed(page, &grant.payload, cx);
        // Readable bytes are never replaced: a node with a copy already has the version. An owner that sends the data wastes it.
        let local = self.local(page);
        if !(local.kept && local.version == grant.version) {
            self.set(page, Mode::Invalidate, Access::None, cx);
            if !grant.payload.install(page, cx.pages) {
                self.counters.refused += 1;
                return;
            }
        }
        let local = self.local(page);
        local.changed = changed;
        local.version = grant.version;
        local.kept = true;
        let copies = NodeSet(grant.copies.0 & all.0).without(me);
        if let Some(want) = &mut local.want {
            want.granted = Some((grant.intent, copies));
            let needed = if grant.intent == Intent::Write { copies } else { NodeSet::EMPTY };
            want.needed = Some(needed);
            let priority = want.priority;
            if self.config.policy.serial_invalidation {
                self.invalidate_copies(page, self.config.me, needed, priority, false, cx);
            }
        }
        self.finish_want(page, cx);
    }

    /// Bytes that an arriving page changes here; [`UNKNOWN_CHANGE`] unless older content was kept.
    fn changed<P: Pages>(&mut self, page: Page, payload: &Payload, cx: &mut Context<'_, P>) -> u16 {
        let local = self.local(page);
        let (before, kept) = (local.changed, local.kept);
        let learns = self.config.policy.adapt || self.config.policy.migratory;
        let bytes = match payload {
            Payload::Same => return before,
            Payload::Difference(runs) => runs.iter().map(|(_, bytes)| bytes.len()).sum(),
            Payload::Zero | Payload::Raw(_) if !kept || !learns => return UNKNOWN_CHANGE,
            Payload::Zero | Payload::Raw(_) => {
                let mut old = Vec::new();
                cx.pages.read(page, &mut old);
                match payload {
                    Payload::Raw(new) => changed_bytes(&old, new),
                    _ => old.iter().filter(|byte| **byte != 0).count(),
                }
            }
        };
        u16::try_from(bytes).unwrap_or(UNKNOWN_CHANGE)
    }

    /// A copy of a write-update page arrives: the answer to a request, or a copy that the sequencer sends ahead of the token.
    fn granted_with_updates<P: Pages>(&mut self, page: Page, grant: &Grant, cx: &mut Context<'_, P>) {
        let local = self.local(page);
        let other = local.want.as_ref().is_some_and(|want| want.kind != WantKind::Remote);
        if local.owner || other || grant.payload == Payload::Same {
            self.counters.refused += 1;
            return;
        }
        // A copy that goes ahead of the token answers no request. A request in flight is answered later, and until then this node sends no
        // other: with two requests in flight it couldn't match the answers.
        let answers = grant.intent != Intent::ReadOwn;
        if local.mode.is_update() && local.leaving.is_none() {
            // The sequencer served the request after the copy had arrived ahead of the token. The copy has had all updates.
            if answers {
                local.want = None;
            }
            self.go(page, cx);
            return;
        }
        self.set(page, Mode::Invalidate, Access::None, cx);
        if !grant.payload.install(page, cx.pages) {
            self.counters.refused += 1;
            return;
        }
        let local = self.local(page);
        local.mode = grant.mode;
        local.version = grant.version;
        local.unread = (0, 0);
        local.convert_next = false;
        local.kept = false;
        if answers {
            local.want = None;
        }
        local.hurry = None;
        local.leaving = None;
        local.counters.clone_from(&grant.counters);
        self.merge_early(page, cx);
        for request in std::mem::take(&mut self.local(page).queue) {
            self.send(self.config.home(page), page, Body::Request(request), cx);
        }
        self.state.incoming.insert(page);
    }

    /// A write-update copy becomes readable.
    pub(super) fn open<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let mode = self.local(page).mode;
        if mode.is_update() && self.local(page).access == Access::None {
            self.set(page, mode, Access::Read, cx);
        }
        self.go(page, cx);
        self.try_invalidate(page, cx);
    }

    /// Completes the pending request once the grant and all `InvalidateAck` have arrived.
    pub(super) fn finish_want<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let skip = self.config.plant == Plant::SkipAcks;
        let local = self.local(page);
        let Some(want) = &local.want else { return };
        let Some(needed) = want.needed else { return };
        if !needed.is_within(want.acked) && !skip {
            return;
        }
        let (kind, granted) = (want.kind, want.granted);
        local.want = None;
        match (kind, granted) {
            (WantKind::Upgrade, _) | (WantKind::Remote, Some((Intent::Write, _))) => {
                self.make_writable(page, cx);
            }
            (WantKind::Remote, Some((Intent::ReadOwn, copies))) => {
                local.owner = true;
                local.copies = copies;
                self.set(page, Mode::Invalidate, Access::Read, cx);
            }
            (WantKind::Remote, _) => self.set(page, Mode::Invalidate, Access::Read, cx),
            (WantKind::Convert, _) => self.begin_updates(page, cx),
            (WantKind::Revert, _) => self.end_updates(page, cx),
        }
        self.go(page, cx);
        self.serve(page, cx);
        self.try_invalidate(page, cx);
        if std::mem::take(&mut self.local(page).convert_next) {
            self.begin_convert(page, cx);
        }
    }

    /// A node has dropped its copy.
    pub(super) fn invalidated<P: Pages>(&mut self, from: NodeId, page: Page, cx: &mut Context<'_, P>) {
        let serial = self.config.policy.serial_invalidation;
        let Some(want) = &mut self.local(page).want else {
            self.counters.refused += 1;
            return;
        };
        want.acked = want.acked.with(NodeSet::one(from));
        let (rest, priority) = (want.needed.unwrap_or_default().without(want.acked), want.priority);
        if serial {
            self.invalidate_copies(page, self.config.me, rest, priority, false, cx);
        }
        self.finish_want(page, cx);
    }

    /// A writer invalidates the copy of this node.
    pub(super) fn invalidate<P: Pages>(
        &mut self,
        page: Page,
        writer: NodeId,
        priority: Priority,
        cx: &mut Context<'_, P>,
    ) {
        if self.local(page).owner || writer == self.config.me || writer.0 >= self.config.nodes {
            self.counters.refused += 1;
            return;
        }
        self.local(page).invalidation = Some(Invalidation { writer, priority });
        self.try_invalidate(page, cx);
    }

    /// Drops a copy that a writer has invalidated, unless an instruction must retire first.
    pub(super) fn try_invalidate<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let Some(invalidation) = self.state.pages.get(&page).and_then(|local| local.invalidation.clone())
        else {
            return;
        };
        if self.held_against(page, true, invalidation.priority, cx) {
            return;
        }
        let local = self.local(page);
        local.invalidation = None;
        local.hurry = None;
        local.leaving = None;
        if local.mode.is_update() {
            local.kept = false;
        }
        self.set(page, Mode::Invalidate, Access::None, cx);
        self.state.incoming.remove(&page);
        self.counters.invalidated += 1;
        self.send(invalidation.writer, page, Body::InvalidateAck, cx);
        self.go(page, cx);
    }

    /// Drops the copy if nothing needs it.
    pub(super) fn discard<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let Some(local) = self.state.pages.get_mut(&page) else { return };
        let busy = local.owner
            || local.want.is_some()
            || !local.holds.is_empty()
            || !local.waiting.is_empty()
            || local.invalidation.is_some()
            || local.access == Access::None;
        if busy {
            return;
        }
        let mode = local.mode;
        self.set(page, mode, Access::None, cx);
        if mode.is_update() {
            self.ask_to_leave(page, cx);
        }
    }

    /// Sends `Leave`: the sequencer shall send no more updates of the page. Until it agrees, the copy still gets updates, since the token,
    /// which requires them, may arrive meanwhile.
    pub(super) fn ask_to_leave<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let (node, seq) = (self.config.me, self.state.proven);
        self.local(page).leaving = Some(seq);
        self.send(self.state.token_at, page, Body::Leave { node, seq }, cx);
    }

    /// A node requests to leave a write-update page.
    pub(super) fn leave<P: Pages>(&mut self, page: Page, node: NodeId, seq: Seq, cx: &mut Context<'_, P>) {
        if node.0 >= self.config.nodes {
            self.counters.refused += 1;
            return;
        }
        let Some(token) = &self.state.token else {
            self.forward_to_token(page, Body::Leave { node, seq }, cx);
            return;
        };
        if node == self.config.me {
            return;
        }
        // Copies and the token have places in the order, like updates. If none was sent after `seq`, the copy is still the same one.
        let same = token.last.get(node.index()).is_some_and(|last| *last <= seq);
        let local = self.local(page);
        // While write-update ends, every copy has to answer.
        let leaves = same && local.owner && local.mode.is_update() && !local.is_changing();
        if leaves {
            local.copies = local.copies.without(NodeSet::one(node));
        }
        self.send(node, page, Body::Left { seq, stays: !leaves }, cx);
    }

    /// The sequencer's answer to `Leave`.
    pub(super) fn left<P: Pages>(&mut self, page: Page, seq: Seq, stays: bool, cx: &mut Context<'_, P>) {
        let local = self.local(page);
        if local.leaving != Some(seq) || local.owner {
            return;
        }
        local.leaving = None;
        if !stays {
            local.kept = false;
            local.mode = Mode::Invalidate;
        }
        self.go(page, cx);
    }
}
