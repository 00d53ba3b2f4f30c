//! The total order of updates at receivers, and causal dependencies.
//!
//! A node keeps two numbers. `proven`: it has applied all updates addressed to it up to here. `seen`: the latest update that it knows,
//! which stamps its messages. A node acts on a message only when `proven` has reached the message's `need`, so all that the sender had
//! applied or known is visible here. A node without a readable write-update copy may act at once. When it gets such a copy, the copy
//! becomes readable only after `proven` has reached `seen`.

use super::{Context, Node};
use crate::config::Plant;
use crate::message::{Body, Message};
use crate::names::NodeId;
use crate::pages::Pages;

/// Time before a node sends `Sync` for updates that are probably in flight: `hold_ns / ASK_DIVISOR`.
const ASK_DIVISOR: u64 = 2;

/// Limit of each queue of messages that wait for updates. Correct nodes have a few per vCPU in flight.
const MOST_HELD_BACK: usize = 1 << 16;

impl Node {
    /// Accepts a message from the network, and queues it by its kind.
    pub(super) fn receive(&mut self, message: Message) {
        let plausible = message.to == self.config.me
            && message.from != self.config.me
            && message.from.0 < self.config.nodes
            && message.stamp.need <= message.stamp.seq;
        if !plausible {
            self.counters.refused += 1;
            return;
        }
        self.counters.received += 1;
        // `Sync` never waits. An outdated `token_at` may lead it back to its requester, where it would wait behind messages that wait for
        // its answer.
        if message.is_stream() || matches!(message.body, Body::Sync { .. }) {
            if self.config.plant == Plant::ForgetEarly
                && message.stamp.need > self.state.proven
                && matches!(message.body, Body::Update { .. })
            {
                self.state.proven = message.stamp.seq;
                return;
            }
            if self.state.early.len() >= MOST_HELD_BACK {
                self.counters.refused += 1;
                return;
            }
            self.state.early.push(message);
            // Messages of one sender are in order. Sorting makes states equal that differ only in the order of arrival.
            self.state.early.sort_by_key(|message| (message.stamp.need, message.stamp.seq));
            return;
        }
        match self.state.blocked.get_mut(message.from.index()) {
            Some(queue) if queue.len() < MOST_HELD_BACK => queue.push_back(message),
            _ => self.counters.refused += 1,
        }
    }

    /// Acts on everything whose dependencies are satisfied.
    pub(super) fn settle<P: Pages>(&mut self, cx: &mut Context<'_, P>) {
        loop {
            if let Some(message) = cx.own.pop_front() {
                self.act(message, cx);
            } else if let Some(page) = cx.recheck.pop() {
                self.try_invalidate(page, cx);
                self.serve(page, cx);
            } else if let Some(message) = self.next_of_stream() {
                self.act_stamped(message, cx);
            } else if let Some(message) = self.next_unblocked() {
                self.act_stamped(message, cx);
            } else if !self.open_incoming(cx) {
                break;
            }
        }
        self.ask(cx);
    }

    fn next_of_stream(&mut self) -> Option<Message> {
        let ready = |message: &Message| {
            message.stamp.need <= self.state.proven || matches!(message.body, Body::Sync { .. })
        };
        let index = self.state.early.iter().position(ready)?;
        Some(self.state.early.remove(index))
    }

    fn next_unblocked(&mut self) -> Option<Message> {
        let (proven, replicas) = (self.state.proven, self.state.replicas);
        let ready = |message: &Message| {
            let strict = replicas > 0 || matches!(message.body, Body::Invalidate { updated: true, .. });
            message.stamp.need <= proven || !strict
        };
        let queue = self.state.blocked.iter_mut().find(|queue| queue.front().is_some_and(ready))?;
        queue.pop_front()
    }

    fn act_stamped<P: Pages>(&mut self, message: Message, cx: &mut Context<'_, P>) {
        self.state.seen = self.state.seen.max(message.stamp.seq);
        if message.stamp.need <= self.state.proven {
            self.state.proven = self.state.proven.max(message.stamp.seq);
        }
        self.act(message, cx);
    }

    /// Makes arrived copies readable once all updates that this node knows have been applied.
    fn open_incoming<P: Pages>(&mut self, cx: &mut Context<'_, P>) -> bool {
        if self.state.proven < self.state.seen {
            return false;
        }
        let Some(page) = self.state.incoming.pop_first() else { return false };
        self.open(page, cx);
        true
    }

    /// The latest update that a message or copy here waits for.
    fn awaited(&self) -> Option<u64> {
        let heads = self.state.blocked.iter().filter_map(|queue| queue.front());
        let blocked = heads.map(|message| message.stamp.need).filter(|need| *need > self.state.proven);
        let incoming = (!self.state.incoming.is_empty()).then_some(self.state.seen);
        blocked.chain(incoming).max()
    }

    /// Sends `Sync` if something waits for an update, and this node doesn't know the last update that was addressed to it.
    fn ask<P: Pages>(&mut self, cx: &mut Context<'_, P>) {
        let asked = self.state.asked;
        let awaited = if self.state.token.is_some() { None } else { self.awaited() };
        let Some(awaited) = awaited.filter(|awaited| *awaited > asked) else {
            self.state.ask_at = None;
            return;
        };
        let delay = self.config.policy.hold_ns / ASK_DIVISOR;
        let at = *self.state.ask_at.get_or_insert(cx.now.saturating_add(delay));
        if at <= cx.now {
            self.state.ask_at = None;
            self.state.asked = awaited;
            self.counters.asked += 1;
            let me = self.config.me;
            self.send(self.state.token_at, 0, Body::Sync { requester: me }, cx);
        }
    }

    /// A node requests the last update that was addressed to it.
    pub(super) fn sync<P: Pages>(&mut self, requester: NodeId, cx: &mut Context<'_, P>) {
        if requester.0 >= self.config.nodes {
            self.counters.refused += 1;
        } else if self.state.token.is_none() {
            self.forward_to_token(0, Body::Sync { requester }, cx);
        } else if requester != self.config.me {
            self.send(requester, 0, Body::Tick, cx);
        }
    }

    /// Forwards a message to the sequencer.
    pub(super) fn forward_to_token<P: Pages>(&mut self, page: u64, body: Body, cx: &mut Context<'_, P>) {
        if self.state.token_at == self.config.me {
            // Only a peer that invents tokens causes this.
            self.counters.refused += 1;
            return;
        }
        self.send(self.state.token_at, page, body, cx);
    }
}
