//! One node: its copies, the pages that it owns or is the home of, and the sequencer's role if it has it.

mod copies;
mod faults;
mod home;
mod local;
mod order;
mod owner;
pub mod saved;
mod sequencer;
mod weak;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};

use crate::config::{Config, ConfigError, Order, Plant};
use crate::counters::Counters;
use crate::event::{Action, Event};
use crate::message::{Body, Message, Seq, Stamp};
use crate::names::{Access, Mode, NodeId, NodeSet, Page, Priority, Vcpu};
use crate::operation::Change;
use crate::pages::Pages;
use local::{Home, Local, Sequencer, VcpuState};

/// State of the protocol at one node.
///
/// The node never blocks: every wait is state. Its size is bounded by the guest's pages, vCPUs and nodes, and by
/// [`crate::config::Policy::update_window`].
#[derive(Debug, Clone)]
pub struct Node {
    config: Config,
    counters: Counters,
    state: State,
}

/// State that determines how a node acts. The model checker compares it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    pages: BTreeMap<Page, Local>,
    homes: BTreeMap<Page, Home>,
    vcpus: Vec<VcpuState>,
    /// The latest age that this node has assigned or received ([`Priority`]).
    latest_age: u64,
    /// This node has applied all updates addressed to it up to this one.
    proven: Seq,
    /// The latest update that this node knows.
    seen: Seq,
    /// Messages of each node that wait for a causal dependency.
    blocked: Vec<VecDeque<Message>>,
    /// Messages of the stream that arrived before their predecessor.
    early: Vec<Message>,
    /// The update that the last `Sync` was for, and when to send the next.
    asked: Seq,
    ask_at: Option<u64>,
    /// Updates applied since the last `Applied`.
    since_applied: u64,
    /// Number of write-update copies that the guest can read.
    replicas: u32,
    /// Write-update pages that have arrived and aren't readable yet, since known updates are missing.
    incoming: BTreeSet<Page>,
    token: Option<Sequencer>,
    /// The sequencer, as far as this node knows.
    token_at: NodeId,
    /// Twins, contents at the time of a grant to write: page, version, bytes.
    twins: VecDeque<(Page, u64, Vec<u8>)>,
    /// Times at which holds end, ns, and their pages.
    alarms: BTreeSet<(u64, Page)>,
    /// The node was restored: memory of pages that it doesn't own is undefined.
    restored: bool,
    /// With [`Plant::ApplyTwice`] only: the previous update.
    again: Option<(Page, Change)>,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.state == other.state
    }
}

impl Eq for Node {}

impl Hash for Node {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.state.hash(hasher);
    }
}

/// Inputs and outputs of one step.
struct Context<'a, P> {
    now: u64,
    pages: &'a mut P,
    actions: &'a mut Vec<Action>,
    /// Messages of this node to itself.
    own: VecDeque<Message>,
    /// Pages held by vCPUs that no longer wait. Nodes that wait for these pages may now have the vCPUs kicked.
    recheck: Vec<Page>,
}

impl Node {
    /// A node whose pages no guest has touched. Each page is owned by its home and has the same content on all nodes: zeros or a program.
    ///
    /// # Errors
    /// See [`Config::check`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        let nodes = usize::from(config.nodes);
        let token = (config.me.0 == 0).then(|| Sequencer {
            last: vec![0; nodes],
            unacked: vec![0; nodes],
            stalled: VecDeque::new(),
            candidate: (config.me, 0),
            foreign: 0,
            since: 0,
            pages: BTreeSet::new(),
            busy: 0,
        });
        let state = State {
            pages: BTreeMap::new(),
            homes: BTreeMap::new(),
            vcpus: vec![VcpuState::default(); usize::from(config.vcpus)],
            latest_age: 0,
            proven: 0,
            seen: 0,
            blocked: vec![VecDeque::new(); nodes],
            early: Vec::new(),
            asked: 0,
            ask_at: None,
            since_applied: 0,
            replicas: 0,
            incoming: BTreeSet::new(),
            token,
            token_at: NodeId(0),
            twins: VecDeque::new(),
            alarms: BTreeSet::new(),
            restored: false,
            again: None,
        };
        Ok(Self { config, counters: Counters::default(), state })
    }

    /// Advances the logical clock that requests take their priority from, as a message with the priority of that time does. The clock
    /// never goes back. A time above [`Priority::MAX_TIME`] is none, and changes nothing.
    pub fn advance_clock(&mut self, time: u64) {
        if time <= Priority::MAX_TIME {
            self.state.latest_age = self.state.latest_age.max(time);
        }
    }

    /// Processes an event and appends the resulting actions. `now` is in ns, of any clock that never goes back.
    ///
    /// Invalid events (an unknown vCPU, a message that no correct node sends) change nothing but [`Counters::refused`].
    pub fn step<P: Pages>(&mut self, event: Event, now: u64, pages: &mut P, actions: &mut Vec<Action>) {
        let mut cx = Context { now, pages, actions, own: VecDeque::new(), recheck: Vec::new() };
        let named = match &event {
            Event::Fault { page, .. }
            | Event::Operate { page, .. }
            | Event::Discard { page }
            | Event::Advise { page, .. } => *page,
            Event::Message(message) => message.page,
            Event::Retired { .. } | Event::Timer | Event::MoveToken { .. } => 0,
        };
        if named >= self.config.pages {
            self.counters.refused += 1;
            return;
        }
        match event {
            Event::Fault { vcpu, page, fault } => self.fault(vcpu, page, fault, &mut cx),
            Event::Operate { vcpu, page, operation } => self.operate(vcpu, page, operation, &mut cx),
            Event::Retired { vcpu } => self.retired(vcpu, &mut cx),
            Event::Message(message) => {
                self.see_age(&message.body);
                self.receive(message);
            }
            Event::Timer => self.timer(&mut cx),
            Event::Discard { page } => self.discard(page, &mut cx),
            Event::Advise { page, mode } => {
                self.send(self.config.home(page), page, Body::Advise { mode }, &mut cx);
            }
            Event::MoveToken { to } => {
                self.move_token(to, &mut cx);
            }
        }
        self.settle(&mut cx);
    }

    /// When the caller must pass [`Event::Timer`], ns; none if no timer runs.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        let alarm = self.state.alarms.first().map(|(at, _)| *at);
        [alarm, self.state.ask_at].into_iter().flatten().min()
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The counters since the start.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Rights of the guest to a page at this node.
    #[must_use]
    pub fn access(&self, page: Page) -> Access {
        self.state.pages.get(&page).map_or(Access::None, |local| local.access)
    }

    /// Mode of a page, as far as this node knows.
    #[must_use]
    pub fn mode(&self, page: Page) -> Mode {
        self.state.pages.get(&page).map_or(Mode::Invalidate, |local| local.mode)
    }

    /// Whether this node owns a page.
    #[must_use]
    pub fn is_owner(&self, page: Page) -> bool {
        self.state.pages.get(&page).map_or(self.config.home(page) == self.config.me, |local| local.owner)
    }

    /// At the owner, the copyset: other nodes that may have copies.
    #[must_use]
    pub fn copies(&self, page: Page) -> NodeSet {
        self.state.pages.get(&page).map_or(NodeSet::EMPTY, |local| local.copies)
    }

    /// Whether this node is the sequencer.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.state.token.is_some()
    }

    /// The update up to which this node has applied all that are addressed to it.
    #[must_use]
    pub fn proven(&self) -> Seq {
        self.state.proven
    }

    /// Whether the node waits for nothing: no page requested, no message blocked, no request queued.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state.early.is_empty()
            && self.state.incoming.is_empty()
            && self.state.blocked.iter().all(VecDeque::is_empty)
            && self.state.vcpus.iter().all(|vcpu| vcpu.waiting.is_none() && !vcpu.operating)
            && self
                .state
                .pages
                .values()
                .all(|local| local.want.is_none() && local.queue.is_empty() && local.invalidation.is_none())
    }

    /// Updates of a page that have arrived and aren't applied yet, oldest first.
    pub fn held_back(&self, page: Page) -> impl Iterator<Item = &Message> {
        self.state.early.iter().filter(move |message| message.page == page)
    }

    fn local(&mut self, page: Page) -> &mut Local {
        let owner = self.config.home(page) == self.config.me;
        let kept = owner || !self.state.restored;
        self.state.pages.entry(page).or_insert_with(|| Local { kept, ..Local::new(owner) })
    }

    fn vcpu(&mut self, vcpu: Vcpu) -> Option<&mut VcpuState> {
        self.state.vcpus.get_mut(usize::from(vcpu))
    }

    /// Sets mode and rights, and counts readable write-update copies.
    fn set<P: Pages>(&mut self, page: Page, mode: Mode, access: Access, cx: &mut Context<'_, P>) {
        let local = self.local(page);
        let before = local.is_replica();
        let protect = local.access != access;
        (local.mode, local.access) = (mode, access);
        let after = local.is_replica();
        if protect {
            cx.pages.protect(page, access);
        }
        self.state.replicas = self.state.replicas + u32::from(after) - u32::from(before);
    }

    fn send<P: Pages>(&mut self, to: NodeId, page: Page, body: Body, cx: &mut Context<'_, P>) {
        let seen = self.state.seen;
        let need = match &self.state.token {
            Some(token) => token.last.get(to.index()).copied().unwrap_or(seen),
            None => seen,
        };
        let mut stamp = Stamp { seq: seen, need };
        if self.config.plant == Plant::DropAckStamp && body == Body::InvalidateAck {
            stamp = Stamp::default();
        }
        self.send_stamped(to, page, stamp, body, cx);
    }

    fn send_stamped<P: Pages>(
        &mut self,
        to: NodeId,
        page: Page,
        stamp: Stamp,
        body: Body,
        cx: &mut Context<'_, P>,
    ) {
        let message = Message { from: self.config.me, to, stamp, page, body };
        if to == self.config.me {
            cx.own.push_back(message);
        } else {
            self.counters.count_sent(&message.body);
            cx.actions.push(Action::Send(message));
        }
    }

    /// Acts on a message whose causal dependency is satisfied.
    fn act<P: Pages>(&mut self, message: Message, cx: &mut Context<'_, P>) {
        let Message { from, page, stamp, body, .. } = message;
        match body {
            Body::Request(request) => self.request(page, request, cx),
            Body::Grant(grant) => self.granted(from, page, grant, cx),
            Body::Invalidate { writer, priority, updated: _ } => {
                self.invalidate(page, writer, priority, cx);
            }
            Body::InvalidateAck => self.invalidated(from, page, cx),
            Body::Hurry { priority } => self.hurry(page, priority, cx),
            Body::Operate { requester, vcpu, operation } => {
                self.sequence_or_forward(requester, vcpu, page, operation, cx);
            }
            Body::Update { change, done } => self.updated(page, stamp.seq, &change, done, cx),
            Body::Done { vcpu, old } => self.completed(vcpu, old, cx),
            Body::Refuse { vcpu } => self.refused_operation(vcpu, page, cx),
            Body::Sync { requester } => self.sync(requester, cx),
            Body::Tick => {}
            Body::Applied { node, count } => self.applied(node, count, cx),
            Body::Leave { node, seq } => self.leave(page, node, seq, cx),
            Body::Left { seq, stays } => self.left(page, seq, stays, cx),
            Body::Advise { mode } => self.advise(page, mode, cx),
            Body::Reverted => self.home_reverted(from, page, cx),
            Body::RevertedAck => self.reverted_ack(page, cx),
            Body::Token(token) => self.take_token(from, token, cx),
            Body::Weak { counter, change } => {
                if self.config.policy.order == Order::PerWriter {
                    self.weak_update(from, page, counter, change, cx);
                } else {
                    self.counters.refused += 1;
                }
            }
        }
    }
}
