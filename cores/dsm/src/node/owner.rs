//! The owner of a page: it serves requests in the order in which the home forwarded them.

use std::collections::VecDeque;

use super::local::WantKind;
use super::{Context, Node};
use crate::config::Order;
use crate::message::{Body, Grant, Intent, Request, Stamp};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority};
use crate::pages::Pages;
use crate::payload::Payload;

impl Node {
    /// A request arrives, at the home or at the owner.
    pub(super) fn request<P: Pages>(&mut self, page: Page, request: Request, cx: &mut Context<'_, P>) {
        if request.requester.0 >= self.config.nodes {
            self.counters.refused += 1;
        } else if self.config.home(page) == self.config.me {
            self.home_request(page, request, cx);
        } else {
            self.owner_request(page, request, cx);
        }
    }

    /// A request arrives that the home has forwarded.
    pub(super) fn owner_request<P: Pages>(&mut self, page: Page, request: Request, cx: &mut Context<'_, P>) {
        let me = self.config.me;
        let holds_token = self.state.token.is_some();
        let local = self.local(page);
        let kind = local.want.as_ref().map(|want| want.kind);
        if request.as_update {
            let updating = (local.owner && local.mode.is_update())
                || matches!(kind, Some(WantKind::Convert | WantKind::Revert));
            if request.requester == me && (updating || kind != Some(WantKind::Remote)) {
                // The page arrived with the token before this node's own request returned.
                if kind == Some(WantKind::Remote) {
                    local.want = None;
                }
                self.go(page, cx);
            } else if !holds_token {
                self.forward_to_token(page, Body::Request(request), cx);
            } else if updating {
                self.enqueue(page, request, cx);
            } else {
                self.back_to_home(page, request, cx);
            }
            return;
        }
        if local.owner || kind.is_some() {
            self.enqueue(page, request, cx);
        } else {
            self.back_to_home(page, request, cx);
        }
    }

    fn enqueue<P: Pages>(&mut self, page: Page, request: Request, cx: &mut Context<'_, P>) {
        let priority = request.priority;
        let local = self.local(page);
        // A node has one request per page in flight, which bounds the queue.
        local.queue.retain(|queued| queued.requester != request.requester);
        local.queue.push_back(request);
        self.serve(page, cx);
        if self.local(page).queue.iter().any(|queued| queued.priority == priority) {
            self.hurry_behind(page, priority, cx);
        }
    }

    /// Returns a request to the home, which knows, or will know, the right node.
    fn back_to_home<P: Pages>(&mut self, page: Page, mut request: Request, cx: &mut Context<'_, P>) {
        if request.as_update {
            // The requester may have got and dropped a write-update copy meanwhile, so the version that it kept is unknown.
            request.held = None;
        }
        let home = self.config.home(page);
        if home == self.config.me {
            let known = self.state.homes.get(&page).map_or(Mode::Invalidate, |home| home.mode);
            if request.as_update && !known.is_update() {
                request.as_update = false;
                self.home_request(page, request, cx);
            } else {
                // The home sent the request here itself. Correct nodes never cause this.
                self.counters.refused += 1;
            }
            return;
        }
        self.counters.bounced += 1;
        request.as_update = false;
        self.send(home, page, Body::Request(request), cx);
    }

    /// Serves all requests that can be served now.
    pub(super) fn serve<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let me = self.config.me;
        loop {
            let Some(local) = self.state.pages.get(&page) else { return };
            let busy = local.want.as_ref().is_some_and(|want| match want.kind {
                WantKind::Upgrade | WantKind::Revert => true,
                WantKind::Convert => want.needed.is_some(),
                WantKind::Remote => false,
            });
            if !local.owner || busy || local.reverting {
                return;
            }
            // Some requests wait until this node makes the page write-update. The request that does so may be queued behind them, for
            // example one from the time when an earlier write-update mode ended.
            let waits =
                |queued: &Request| queued.as_update && !local.mode.is_update() && local.want.is_some();
            let Some(at) = local.queue.iter().position(|queued| !waits(queued)) else { return };
            let Some(request) = local.queue.get(at) else { return };
            let oldest = local.queue.iter().map(|queued| queued.priority).min();
            let oldest = oldest.unwrap_or(request.priority);
            let (update, request) = (local.mode.is_update(), request.clone());
            let takes_reads = request.intent == Intent::Write;
            if !update && self.held_against(page, takes_reads, oldest, cx) {
                return;
            }
            self.local(page).queue.remove(at);
            match (update, request.as_update) {
                (true, _) => {
                    if request.atomic {
                        self.local(page).mode = Mode::SingleWriter;
                    }
                    self.give_copy_with_updates(page, request.requester, Intent::Read, cx);
                }
                (false, true) => self.back_to_home(page, request, cx),
                (false, false) if request.requester == me => self.convert_own(page, cx),
                (false, false) => match request.intent {
                    Intent::Read => self.give_copy(page, &request, cx),
                    Intent::ReadOwn => self.give_ownership(page, &request, cx),
                    Intent::Write => self.give_away(page, &request, cx),
                },
            }
        }
    }

    /// The shortest payload for a requester that has kept version `held`. The guest must not have the right to write the page.
    fn payload<P: Pages>(&mut self, page: Page, held: Option<u64>, cx: &mut Context<'_, P>) -> Payload {
        let versions = self.config.policy.versions;
        let local = self.local(page);
        let version = local.version;
        if held == Some(version) && local.kept {
            self.counters.same += 1;
            return Payload::Same;
        }
        let mut content = Vec::with_capacity(cx.pages.size());
        cx.pages.read(page, &mut content);
        if !versions {
            return Payload::Raw(content);
        }
        let twin = self.state.twins.iter().find(|(kept, version, _)| *kept == page && Some(*version) == held);
        let payload = Payload::shortest(content, twin.map(|twin| twin.2.as_slice()));
        match payload {
            Payload::Zero => self.counters.zero += 1,
            Payload::Difference(_) => self.counters.differences += 1,
            _ => self.counters.raw += 1,
        }
        payload
    }

    fn grant<P: Pages>(
        &mut self,
        page: Page,
        to: NodeId,
        intent: Intent,
        copies: NodeSet,
        payload: Payload,
        cx: &mut Context<'_, P>,
    ) {
        let version = self.local(page).version;
        let grant = Grant { intent, mode: Mode::Invalidate, version, copies, payload, counters: Vec::new() };
        self.send(to, page, Body::Grant(grant), cx);
    }

    fn give_copy<P: Pages>(&mut self, page: Page, request: &Request, cx: &mut Context<'_, P>) {
        // Rights first, then the content: a vCPU may be storing.
        let access = self.local(page).access.min(Access::Read);
        self.set(page, Mode::Invalidate, access, cx);
        let payload = self.payload(page, request.held, cx);
        let local = self.local(page);
        local.copies = local.copies.with(NodeSet::one(request.requester));
        self.grant(page, request.requester, Intent::Read, NodeSet::EMPTY, payload, cx);
        self.forget_hurry(page);
    }

    fn give_ownership<P: Pages>(&mut self, page: Page, request: &Request, cx: &mut Context<'_, P>) {
        let access = self.local(page).access.min(Access::Read);
        self.set(page, Mode::Invalidate, access, cx);
        let payload = self.payload(page, request.held, cx);
        let to = NodeSet::one(request.requester);
        let me = NodeSet::one(self.config.me);
        let local = self.local(page);
        let copies = std::mem::take(&mut local.copies).with(me).without(to);
        local.owner = false;
        self.grant(page, request.requester, Intent::ReadOwn, copies, payload, cx);
        self.part_with_queue(page, cx);
    }

    fn give_away<P: Pages>(&mut self, page: Page, request: &Request, cx: &mut Context<'_, P>) {
        let writer = request.requester;
        self.set(page, Mode::Invalidate, Access::None, cx);
        let payload = self.payload(page, request.held, cx);
        let local = self.local(page);
        let copies = std::mem::take(&mut local.copies).without(NodeSet::one(writer));
        local.owner = false;
        self.grant(page, writer, Intent::Write, copies, payload, cx);
        if !self.config.policy.serial_invalidation {
            self.invalidate_copies(page, writer, copies, request.priority, false, cx);
        }
        self.part_with_queue(page, cx);
        self.go(page, cx);
    }

    fn forget_hurry(&mut self, page: Page) {
        let local = self.local(page);
        if local.queue.is_empty() && local.want.is_none() {
            local.hurry = None;
        }
    }

    /// Handles the queue after the ownership has moved. The home forwards no request to an owner behind the one that takes the ownership,
    /// so no such request is left. Requests that wait for this node to make the page write-update stay.
    fn part_with_queue<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let local = self.local(page);
        local.hurry = None;
        let (stay, go): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut local.queue).into_iter().partition(|request| request.as_update);
        local.queue = stay;
        for request in go {
            self.back_to_home(page, request, cx);
        }
    }

    /// Invalidates copies. The nodes answer `writer`.
    pub(super) fn invalidate_copies<P: Pages>(
        &mut self,
        page: Page,
        writer: NodeId,
        copies: NodeSet,
        priority: Priority,
        updated: bool,
        cx: &mut Context<'_, P>,
    ) {
        let serial = self.config.policy.serial_invalidation && writer == self.config.me;
        let most = if serial { 1 } else { usize::MAX };
        for node in copies.iter().take(most) {
            self.send(node, page, Body::Invalidate { writer, priority, updated }, cx);
        }
    }

    /// As the sequencer, grants a write-update copy. The copy has a place in the total order: the receiver acts on later messages of any
    /// sequencer after it.
    ///
    /// [`Intent::Read`] answers a request; [`Intent::ReadOwn`] goes ahead of the token.
    pub(super) fn give_copy_with_updates<P: Pages>(
        &mut self,
        page: Page,
        to: NodeId,
        intent: Intent,
        cx: &mut Context<'_, P>,
    ) {
        let seq = self.state.seen.saturating_add(1);
        let Some(token) = &mut self.state.token else { return };
        let Some(last) = token.last.get_mut(to.index()) else { return };
        let stamp = Stamp { seq, need: std::mem::replace(last, seq) };
        (self.state.seen, self.state.proven) = (seq, seq);
        let mut content = Vec::with_capacity(cx.pages.size());
        cx.pages.read(page, &mut content);
        let weak = self.config.policy.order == Order::PerWriter;
        let local = self.local(page);
        local.copies = local.copies.with(NodeSet::one(to));
        let grant = Grant {
            intent,
            mode: local.mode,
            // The next sequencer continues counting from this version when write-update ends: else a version would name two contents.
            version: local.version,
            copies: NodeSet::EMPTY,
            payload: Payload::shortest(content, None),
            counters: if weak { local.counters.clone() } else { Vec::new() },
        };
        self.send_stamped(to, page, stamp, Body::Grant(grant), cx);
        self.forget_hurry(page);
    }

    /// This node's own request to make a page write-update returns from the home, because this node owned the page already: it first
    /// invalidates all copies.
    fn convert_own<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let local = self.local(page);
        let copies = local.copies;
        let Some(want) = local.want.as_mut().filter(|want| want.kind == WantKind::Convert) else {
            self.counters.refused += 1;
            return;
        };
        want.needed = Some(copies);
        let priority = want.priority;
        self.invalidate_copies(page, self.config.me, copies, priority, false, cx);
        self.finish_want(page, cx);
    }
}
