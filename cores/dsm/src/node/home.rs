//! The home of a page: it knows the owner, serializes requests for ownership, and decides the page's mode.
//!
//! The home forwards a request to the owner. If the request takes the ownership, the home names the requester as the owner at once. So
//! requests form a chain, each behind the one that the home forwarded before, and no node reports completion to the home.

use super::local::{Home, Seen};
use super::{Context, Node};
use crate::message::{Body, Intent, Request, UNKNOWN_CHANGE};
use crate::names::{Mode, NodeId, NodeSet, Page};
use crate::pages::Pages;

/// Times that a reader must have been the next writer before it gets a page for writing at once.
const MIGRATIONS: u8 = 2;

impl Node {
    fn home(&mut self, page: Page) -> &mut Home {
        let owner = self.config.me;
        self.state.homes.entry(page).or_insert_with(|| Home {
            owner,
            mode: Mode::Invalidate,
            seen: Seen::default(),
        })
    }

    /// A request arrives at the home.
    pub(super) fn home_request<P: Pages>(
        &mut self,
        page: Page,
        mut request: Request,
        cx: &mut Context<'_, P>,
    ) {
        let me = self.config.me;
        let mode = self.home(page).mode;
        if mode.is_update() {
            request.as_update = true;
            if self.state.token.is_some() {
                self.owner_request(page, request, cx);
            } else {
                self.forward_to_token(page, Body::Request(request), cx);
            }
            return;
        }
        request.as_update = false;
        if !request.convert {
            let intent = self.intent(page, &request);
            self.observe(page, &request, cx);
            request.intent = intent;
        }
        let home = self.home(page);
        let owner = home.owner;
        if request.intent != Intent::Read {
            home.owner = request.requester;
        }
        if request.convert {
            home.mode = Mode::Update;
            home.seen = Seen { changed_at: Some(cx.now), ..Seen::default() };
        }
        if owner == me {
            self.owner_request(page, request, cx);
        } else if owner == request.requester && !request.convert {
            // No correct node requests a page that it owns.
            self.counters.refused += 1;
        } else {
            self.send(owner, page, Body::Request(request), cx);
        }
    }

    /// The rights to grant: a reader may get more than it requested.
    fn intent(&mut self, page: Page, request: &Request) -> Intent {
        if request.intent == Intent::Write {
            return Intent::Write;
        }
        let policy = self.config.policy;
        let seen = &self.home(page).seen;
        if policy.read_moves_ownership {
            Intent::ReadOwn
        } else if policy.migratory && seen.migrations >= MIGRATIONS {
            Intent::Write
        } else {
            Intent::Read
        }
    }

    /// Counts a request as it arrived, and requests write-update when the policy's thresholds are met.
    fn observe<P: Pages>(&mut self, page: Page, request: &Request, cx: &mut Context<'_, P>) {
        let policy = self.config.policy;
        if !policy.adapt && !policy.migratory {
            return;
        }
        let seen = &mut self.home(page).seen;
        let reads = request.intent == Intent::Read;
        match seen.last {
            Some((node, true)) if !reads && node == request.requester => {
                seen.migrations = (seen.migrations + 1).min(MIGRATIONS);
            }
            // Nothing had changed when the page last arrived at this reader, though the node before it had the right to write: both only
            // read.
            _ if reads && seen.migrations >= MIGRATIONS && request.changed == 0 => seen.migrations = 0,
            _ if reads && seen.migrations >= MIGRATIONS => {}
            // Two readers in a row: the page isn't migratory.
            Some((node, true)) if reads && node != request.requester => seen.migrations = 0,
            _ => {}
        }
        seen.last = Some((request.requester, reads));
        if !policy.adapt {
            return;
        }
        if cx.now.saturating_sub(seen.window.0) > policy.window_ns {
            seen.window = (cx.now, 0);
            seen.nodes = NodeSet::EMPTY;
            seen.small = 0;
            seen.atomic = false;
        }
        seen.window.1 += 1;
        seen.nodes = seen.nodes.with(NodeSet::one(request.requester));
        // An unknown number isn't small.
        seen.small += u32::from(request.changed <= policy.changed_bytes && request.changed != UNKNOWN_CHANGE);
        seen.atomic |= request.atomic;
        let settled =
            seen.changed_at.is_none_or(|changed| cx.now.saturating_sub(changed) >= policy.cooldown_ns);
        let small = seen.small * 2 >= seen.window.1;
        // This implies two nodes at least. One of them may be the home, which uses its own page without a request.
        let fit = if policy.atomics { small || seen.atomic } else { small && !seen.atomic };
        let wanted = seen.window.1 >= policy.transfers && settled && fit;
        if wanted {
            seen.window.1 = 0;
            self.send(self.state.token_at, page, Body::Advise { mode: Mode::Update }, cx);
        }
    }

    /// The sequencer has ended write-update and owns the page.
    pub(super) fn home_reverted<P: Pages>(&mut self, from: NodeId, page: Page, cx: &mut Context<'_, P>) {
        let me = self.config.me;
        if self.config.home(page) != me || !self.home(page).mode.is_update() {
            self.counters.refused += 1;
            return;
        }
        let home = self.home(page);
        home.mode = Mode::Invalidate;
        home.owner = from;
        home.seen = Seen { changed_at: Some(cx.now), ..Seen::default() };
        self.send(from, page, Body::RevertedAck, cx);
    }
}
