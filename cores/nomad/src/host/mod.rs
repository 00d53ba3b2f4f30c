//! A host's part in migrations: as source, destination and host of peers, for several migrations at the same time.
//!
//! | module | part |
//! |---|---|
//! | `source` | a source: from pre-copy to the decision |
//! | `destination` | a destination: from the reservation to the decision |
//! | `peers` | a peers' host: suspends queue pairs connected to a VM, and resumes them |
//! | `announcement` | announcements by the host that runs a VM |
//!
//! The state machine is single-threaded and never blocks. The caller carries out the actions in their order.

mod announcement;
mod destination;
mod peers;
mod source;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::config::{Config, InjectedBug};
use crate::event::{Action, Event, Timer};
use crate::fanout::ForwardedMessage;
use crate::message::{Body, Message};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Node, Place, Stamp, VmId};

use announcement::Announcement;
use destination::IncomingMigration;
use source::OutgoingMigration;

/// Maximum number of forwarded messages whose answers are collected at a time. The lowest migration is dropped first;
/// its origin retransmits.
const MAX_FORWARDED_MESSAGES: usize = 1024;

/// A VM of this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Vm {
    epoch: Epoch,
    /// Its last migration that has ended.
    after: MigrationId,
    /// The switchover that has stopped it, or is about to.
    switching: Option<MigrationId>,
    /// Its peers, and whether queue pairs connected to them may send.
    peers: BTreeMap<VmId, bool>,
}

/// What this host knows of a VM that is a peer of its VMs, or of VMs that are moving here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct PeerVm {
    host: HostId,
    stamp: Stamp,
    /// The migration for which queue pairs connected to the VM are suspended, or are to be.
    suspended: Option<MigrationId>,
    /// Whether the caller has reported them as suspended.
    qps_suspended: bool,
}

/// The state machine of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host {
    id: HostId,
    incarnation: Incarnation,
    config: Config,
    registered: bool,
    vms: BTreeMap<VmId, Vm>,
    peer_vms: BTreeMap<VmId, PeerVm>,
    outgoing: BTreeMap<MigrationId, OutgoingMigration>,
    incoming: BTreeMap<MigrationId, IncomingMigration>,
    announcements: BTreeMap<MigrationId, Announcement>,
    suspending: BTreeMap<(MigrationId, HostId), ForwardedMessage>,
    resuming: BTreeMap<(MigrationId, HostId), ForwardedMessage>,
    /// Messages to itself, handled at the end of a step.
    loopback: VecDeque<Message>,
}

impl Host {
    /// A host without VMs. Its incarnation must be higher than at its last start.
    #[must_use]
    pub fn new(id: HostId, incarnation: Incarnation, config: Config) -> Self {
        Self {
            id,
            incarnation,
            config,
            registered: false,
            vms: BTreeMap::new(),
            peer_vms: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            announcements: BTreeMap::new(),
            suspending: BTreeMap::new(),
            resuming: BTreeMap::new(),
            loopback: VecDeque::new(),
        }
    }

    /// Handles an event, and appends the actions that follow from it.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start => {
                self.send_hello(actions);
                for migration in self.outgoing.keys() {
                    self.set(Timer::Outgoing(*migration), self.config.retry_ms, actions);
                }
                for migration in self.incoming.keys() {
                    self.set(Timer::Incoming(*migration), self.config.retry_ms, actions);
                }
            }
            Event::Message(message) => self.message(message, actions),
            Event::Started { vm, epoch, .. }
                if self.vms.get(&vm).is_some_and(|found| found.epoch < epoch) =>
            {
                self.reclaimed(vm, epoch, actions);
            }
            Event::Started { vm, epoch, after } => {
                let peers = BTreeMap::new();
                self.vms.entry(vm).or_insert(Vm { epoch, after, switching: None, peers });
            }
            Event::Ended { vm } => {
                self.vms.remove(&vm);
                self.forget_unconnected();
            }
            Event::Connected { vm, peer } => self.connected(vm, peer),
            Event::Disconnected { vm, peer } => {
                if let Some(found) = self.vms.get_mut(&vm) {
                    found.peers.remove(&peer);
                }
                self.forget_unconnected();
            }
            Event::Reservation { migration, granted } => self.reservation(migration, granted, actions),
            Event::Converged { migration, vm } => self.converged(migration, vm, actions),
            Event::StreamBroke { migration } => self.stream_broke(migration, actions),
            Event::QpsSuspended { migration, vm } => self.qps_suspended(migration, vm, actions),
            Event::Stopped { migration, vm } => self.stopped(migration, vm, actions),
            Event::Arrived { migration, vm } => self.arrived(migration, vm, actions),
            Event::Timer(timer) => {
                if self.awaits(timer) {
                    self.timer(timer, actions);
                }
            }
        }
        while let Some(message) = self.loopback.pop_front() {
            self.message(message, actions);
        }
    }

    /// Whether a timer's expiry still matters.
    #[must_use]
    pub fn awaits(&self, timer: Timer) -> bool {
        match timer {
            Timer::Hello => !self.registered,
            Timer::Outgoing(migration) => {
                self.outgoing.get(&migration).is_some_and(OutgoingMigration::is_retransmitted)
            }
            Timer::Switch(migration) => {
                self.outgoing.get(&migration).is_some_and(|outgoing| outgoing.has_deadline(&self.config))
            }
            Timer::Incoming(migration) => self.incoming.contains_key(&migration),
            Timer::Announce(migration) => self.announcements.contains_key(&migration),
            Timer::Locate(vm) => self.peer_vms.get(&vm).is_some_and(|known| known.suspended.is_some()),
        }
    }

    /// The number of this host in the cluster.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.id
    }

    /// The incarnation of this host's daemon.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// VMs of this host, stopped ones included.
    pub fn vms(&self) -> impl Iterator<Item = (VmId, Epoch)> {
        self.vms.iter().map(|(vm, found)| (*vm, found.epoch))
    }

    /// The epoch of a VM of this host.
    #[must_use]
    pub fn epoch(&self, vm: VmId) -> Option<Epoch> {
        self.vms.get(&vm).map(|found| found.epoch)
    }

    /// Peers of a VM of this host.
    #[must_use]
    pub fn peers(&self, vm: VmId) -> BTreeSet<VmId> {
        self.vms.get(&vm).map(|found| found.peers.keys().copied().collect()).unwrap_or_default()
    }

    /// Peers to which a VM's queue pairs may send. Peers whose queue pairs are suspended for a migration, of either VM,
    /// aren't among them.
    #[must_use]
    pub fn open_peers(&self, vm: VmId) -> BTreeSet<VmId> {
        let peers = self.vms.get(&vm).into_iter().flat_map(|found| &found.peers);
        peers.filter(|(_, open)| **open).map(|(peer, _)| *peer).collect()
    }

    /// Whether the host is idle: it has no migration, no announcement and no suspended queue pair.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.outgoing.is_empty()
            && self.incoming.is_empty()
            && self.announcements.is_empty()
            && self.peer_vms.values().all(|known| known.suspended.is_none())
            && self.vms.values().all(|vm| vm.switching.is_none() && vm.peers.values().all(|open| *open))
    }

    /// Whether this host, as a destination, has voted for a migration of the VM and waits for the decision.
    #[must_use]
    pub fn has_voted(&self, vm: VmId) -> bool {
        self.incoming.values().any(|incoming| incoming.has_voted(vm))
    }

    /// Whether this host, as a source, has voted for a migration of the VM and waits for the decision.
    #[must_use]
    pub fn has_yielded(&self, vm: VmId) -> bool {
        self.outgoing.values().any(|outgoing| outgoing.has_voted() && outgoing.includes(vm))
    }

    /// Gives this host a new number and incarnation, because the coordinator takes its daemon for a restarted one.
    /// Votes stay valid: VMs that it has voted for keep their state until the decision. All other state is as after a
    /// start, and the caller releases what belongs to it. The caller then sends [`Event::Start`].
    pub fn renumber(&mut self, id: HostId, incarnation: Incarnation) {
        let mut new = Self::new(id, incarnation, self.config);
        std::mem::swap(self, &mut new);
        if self.config.injected_bug == InjectedBug::RenumberWithdrawsVotes {
            return;
        }
        self.outgoing = new.outgoing.into_iter().filter(|(_, outgoing)| outgoing.has_voted()).collect();
        self.incoming = new.incoming.into_iter().filter(|(_, incoming)| incoming.is_loaded()).collect();
        let remains = |vm: &VmId| self.outgoing.values().any(|outgoing| outgoing.includes(*vm));
        self.vms = new.vms.into_iter().filter(|(vm, _)| remains(vm)).collect();
        self.peer_vms = new.peer_vms;
        self.forget_unconnected();
    }

    fn timer(&mut self, timer: Timer, actions: &mut Vec<Action>) {
        match timer {
            Timer::Hello => self.send_hello(actions),
            Timer::Outgoing(migration) => self.retransmit_outgoing(migration, actions),
            Timer::Switch(migration) => self.switch_timed_out(migration, actions),
            Timer::Incoming(migration) => self.retransmit_incoming(migration, actions),
            Timer::Announce(migration) => self.retransmit_announcement(migration, actions),
            Timer::Locate(vm) => self.locate(vm, actions),
        }
    }

    fn send_hello(&mut self, actions: &mut Vec<Action>) {
        self.send(Node::Coordinator, Body::Hello, actions);
        self.set(Timer::Hello, self.config.retry_ms, actions);
    }

    fn message(&mut self, message: Message, actions: &mut Vec<Action>) {
        if message.to != Node::Host(self.id) {
            return;
        }
        match message.from {
            Node::Coordinator => self.coordinator_message(message.body, actions),
            Node::Host(from) => self.host_message(from, message.body, actions),
        }
    }

    fn coordinator_message(&mut self, body: Body, actions: &mut Vec<Action>) {
        match body {
            Body::Welcome => self.registered = true,
            Body::Reserve { migration, moves } => self.reserve(migration, moves, actions),
            Body::Begin { migration, moves } => self.begin(migration, moves, actions),
            Body::Queued { migration, waits_for } => self.queued(migration, waits_for, actions),
            Body::Switch { migration } => self.switch(migration, actions),
            Body::Commit { migration, places } => self.commit(migration, &places, actions),
            Body::Abort { migration, places } => self.abort(migration, &places, actions),
            Body::At { place } => self.located(place),
            Body::Lost { vm, epoch } => self.peer_lost(vm, epoch, actions),
            _ => {}
        }
    }

    fn host_message(&mut self, from: HostId, body: Body, actions: &mut Vec<Action>) {
        match body {
            Body::Suspend { migration, origin, vms, forward_to } => {
                self.suspend(from, migration, origin, vms, forward_to, actions);
            }
            Body::Suspended { migration, origin, hosts } => {
                self.suspended(migration, origin, hosts, actions);
            }
            Body::Handover { migration, vm, peers } => self.handover(from, migration, vm, peers, actions),
            Body::Loaded { migration } => self.loaded(from, migration, actions),
            Body::Running { after, origin, vms, forward_to } => {
                self.announced(from, after, origin, vms, forward_to, actions);
            }
            Body::Ready { after, origin, hosts } => self.ready(after, origin, hosts, actions),
            Body::Where { vm } => self.answer_where(from, vm, actions),
            _ => {}
        }
    }

    /// Carries out a commit. The place with the newer epoch wins over what this host assumed.
    fn commit(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        let started = self.commit_incoming(migration, places, actions);
        let mut left = false;
        for place in places.iter().filter(|place| place.host != self.id) {
            if self.vms.get(&place.vm).is_some_and(|vm| vm.epoch < place.epoch) {
                self.vms.remove(&place.vm);
                actions.push(Action::Discard { vm: place.vm });
                left = true;
            }
        }
        if self.outgoing.remove(&migration).is_some() || left {
            actions.push(Action::EndCopy { migration });
        }
        for place in places {
            self.record_place(*place);
        }
        if let Some(vms) = started {
            self.announce(migration, &vms, actions);
        }
        self.forget_unconnected();
        self.settle(migration, places, actions);
    }

    fn abort(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        if self.incoming.remove(&migration).is_some() {
            actions.push(Action::Release { migration });
        }
        self.abort_outgoing(migration, places, actions);
        self.forget_unconnected();
        self.settle(migration, places, actions);
    }

    fn settle(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        let missing = |place: &&Place| {
            place.host == self.id && self.vms.get(&place.vm).is_none_or(|vm| vm.epoch < place.epoch)
        };
        let lost = places.iter().filter(missing).map(|place| place.vm).collect();
        self.send(Node::Coordinator, Body::Settled { migration, lost }, actions);
    }

    fn connected(&mut self, vm: VmId, peer: Place) {
        let Some(found) = self.vms.get_mut(&vm) else { return };
        let known = self.peer_vms.entry(peer.vm).or_insert_with(|| PeerVm::new(peer));
        let open = known.suspended.is_none() && found.switching.is_none();
        found.peers.entry(peer.vm).or_insert(open);
    }

    /// Forgets VMs that are no peers of this host's VMs.
    fn forget_unconnected(&mut self) {
        let (vms, incoming) = (&self.vms, &self.incoming);
        self.peer_vms.retain(|vm, _| {
            vms.values().any(|found| found.peers.contains_key(vm))
                || incoming.values().any(|found| found.has_peer(*vm))
        });
    }

    fn set(&self, timer: Timer, after_ms: u32, actions: &mut Vec<Action>) {
        actions.push(Action::Timer { timer, after_ms });
    }

    fn send(&mut self, to: Node, body: Body, actions: &mut Vec<Action>) {
        let message = Message { from: Node::Host(self.id), incarnation: self.incarnation, to, body };
        if to == message.from {
            self.loopback.push_back(message);
        } else {
            actions.push(Action::Send(message));
        }
    }

    /// Records a forwarded message. If a record is dropped, its origin retransmits.
    fn insert_forwarded(
        forwarded: &mut BTreeMap<(MigrationId, HostId), ForwardedMessage>,
        key: (MigrationId, HostId),
        it: ForwardedMessage,
    ) {
        forwarded.insert(key, it);
        while forwarded.len() > MAX_FORWARDED_MESSAGES {
            forwarded.pop_first();
        }
    }

    /// Hosts of the VMs' peers, this host included.
    fn hosts_of_peers(&self, vms: &[VmId]) -> BTreeSet<HostId> {
        let peers = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| vm.peers.keys());
        peers.filter_map(|peer| self.peer_vms.get(peer)).map(|known| known.host).collect()
    }
}

impl PeerVm {
    fn new(place: Place) -> Self {
        let stamp = Stamp { epoch: place.epoch, after: MigrationId(0) };
        Self { host: place.host, stamp, suspended: None, qps_suspended: false }
    }
}
