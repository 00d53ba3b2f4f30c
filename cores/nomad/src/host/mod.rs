//! A host's part in migrations: as source, destination and host of peers, for several migrations at the same time.
//!
//! | module | part |
//! |---|---|
//! | `leaving` | a source: from pre-copy to the decision |
//! | `arriving` | a destination: from the reservation to the decision |
//! | `facing` | a peers' host: suspends queue pairs connected to a VM, and resumes them |
//! | `running` | announcements by the host that runs a VM |
//!
//! The state machine is single-threaded and never blocks. The caller carries out the actions in their order.

mod arriving;
mod facing;
mod leaving;
mod running;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::config::{Config, Plant};
use crate::event::{Action, Event, Timer};
use crate::fan::Spread;
use crate::message::{Body, Message};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Node, Place, Stamp, VmId};

use arriving::Arriving;
use leaving::Leaving;
use running::Announcing;

/// Maximum number of forwarded messages whose answers are collected at a time. The lowest migration is dropped first;
/// its origin retransmits.
const MAX_SPREADS: usize = 1024;

/// A VM of this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Vm {
    epoch: Epoch,
    /// Its last migration that has ended.
    after: MigrationId,
    /// The switchover that has stopped it, or is about to.
    switching: Option<MigrationId>,
    /// Its peers, and whether queue pairs connected to them may send.
    faces: BTreeMap<VmId, bool>,
}

/// What this host knows of a VM that is a peer of its VMs, or of VMs that are moving here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Known {
    host: HostId,
    stamp: Stamp,
    /// The migration for which queue pairs connected to the VM are suspended, or are to be.
    suspended: Option<MigrationId>,
    /// Whether the caller has reported them as suspended.
    held: bool,
}

/// The state machine of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host {
    id: HostId,
    incarnation: Incarnation,
    config: Config,
    greeted: bool,
    vms: BTreeMap<VmId, Vm>,
    known: BTreeMap<VmId, Known>,
    leaving: BTreeMap<MigrationId, Leaving>,
    arriving: BTreeMap<MigrationId, Arriving>,
    announcing: BTreeMap<MigrationId, Announcing>,
    suspending: BTreeMap<(MigrationId, HostId), Spread>,
    readying: BTreeMap<(MigrationId, HostId), Spread>,
    /// Messages to itself, handled at the end of a step.
    own: VecDeque<Message>,
}

impl Host {
    /// A host without VMs. Its incarnation must be higher than at its last start.
    #[must_use]
    pub fn new(id: HostId, incarnation: Incarnation, config: Config) -> Self {
        Self {
            id,
            incarnation,
            config,
            greeted: false,
            vms: BTreeMap::new(),
            known: BTreeMap::new(),
            leaving: BTreeMap::new(),
            arriving: BTreeMap::new(),
            announcing: BTreeMap::new(),
            suspending: BTreeMap::new(),
            readying: BTreeMap::new(),
            own: VecDeque::new(),
        }
    }

    /// Handles an event, and appends the actions that follow from it.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start => {
                self.greet(actions);
                for migration in self.leaving.keys() {
                    self.set(Timer::Leaving(*migration), self.config.retry_ms, actions);
                }
                for migration in self.arriving.keys() {
                    self.set(Timer::Arriving(*migration), self.config.retry_ms, actions);
                }
            }
            Event::Message(message) => self.message(message, actions),
            Event::Started { vm, epoch, .. }
                if self.vms.get(&vm).is_some_and(|found| found.epoch < epoch) =>
            {
                self.reclaimed(vm, epoch, actions);
            }
            Event::Started { vm, epoch, after } => {
                let faces = BTreeMap::new();
                self.vms.entry(vm).or_insert(Vm { epoch, after, switching: None, faces });
            }
            Event::Ended { vm } => {
                self.vms.remove(&vm);
                self.forget_strangers();
            }
            Event::Connected { vm, peer } => self.connected(vm, peer),
            Event::Disconnected { vm, peer } => {
                if let Some(found) = self.vms.get_mut(&vm) {
                    found.faces.remove(&peer);
                }
                self.forget_strangers();
            }
            Event::Room { migration, granted } => self.room(migration, granted, actions),
            Event::Converged { migration, vm } => self.converged(migration, vm, actions),
            Event::StreamBroke { migration } => self.stream_broke(migration, actions),
            Event::Held { migration, vm } => self.held(migration, vm, actions),
            Event::Stopped { migration, vm } => self.stopped(migration, vm, actions),
            Event::Arrived { migration, vm } => self.arrived(migration, vm, actions),
            Event::Timer(timer) => {
                if self.awaits(timer) {
                    self.timer(timer, actions);
                }
            }
        }
        while let Some(message) = self.own.pop_front() {
            self.message(message, actions);
        }
    }

    /// Whether a timer's expiry still matters.
    #[must_use]
    pub fn awaits(&self, timer: Timer) -> bool {
        match timer {
            Timer::Hello => !self.greeted,
            Timer::Leaving(migration) => self.leaving.get(&migration).is_some_and(Leaving::repeats),
            Timer::Switch(migration) => {
                self.leaving.get(&migration).is_some_and(|leaving| leaving.has_deadline(&self.config))
            }
            Timer::Arriving(migration) => self.arriving.contains_key(&migration),
            Timer::Announce(migration) => self.announcing.contains_key(&migration),
            Timer::Ask(vm) => self.known.get(&vm).is_some_and(|known| known.suspended.is_some()),
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
    pub fn faces(&self, vm: VmId) -> BTreeSet<VmId> {
        self.vms.get(&vm).map(|found| found.faces.keys().copied().collect()).unwrap_or_default()
    }

    /// Peers to which a VM's queue pairs may send. Peers whose queue pairs are suspended for a migration, of either VM,
    /// aren't among them.
    #[must_use]
    pub fn open_faces(&self, vm: VmId) -> BTreeSet<VmId> {
        let faces = self.vms.get(&vm).into_iter().flat_map(|found| &found.faces);
        faces.filter(|(_, open)| **open).map(|(peer, _)| *peer).collect()
    }

    /// Whether the host is idle: it has no migration, no announcement and no suspended queue pair.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.leaving.is_empty()
            && self.arriving.is_empty()
            && self.announcing.is_empty()
            && self.known.values().all(|known| known.suspended.is_none())
            && self.vms.values().all(|vm| vm.switching.is_none() && vm.faces.values().all(|open| *open))
    }

    /// Whether this host, as a destination, has voted for a migration of the VM and waits for the decision.
    #[must_use]
    pub fn has_voted(&self, vm: VmId) -> bool {
        self.arriving.values().any(|arriving| arriving.has_voted(vm))
    }

    /// Whether this host, as a source, has voted for a migration of the VM and waits for the decision.
    #[must_use]
    pub fn has_yielded(&self, vm: VmId) -> bool {
        self.leaving.values().any(|leaving| leaving.has_voted() && leaving.brings(vm))
    }

    /// Gives this host a new number and incarnation, because the coordinator takes its daemon for a restarted one.
    /// Votes stay valid: VMs that it has voted for keep their state until the decision. All other state is as after a
    /// start, and the caller releases what belongs to it. The caller then sends [`Event::Start`].
    pub fn renumber(&mut self, id: HostId, incarnation: Incarnation) {
        let mut new = Self::new(id, incarnation, self.config);
        std::mem::swap(self, &mut new);
        if self.config.plant == Plant::RenumberTakesVotesBack {
            return;
        }
        self.leaving = new.leaving.into_iter().filter(|(_, leaving)| leaving.has_voted()).collect();
        self.arriving = new.arriving.into_iter().filter(|(_, arriving)| arriving.is_loaded()).collect();
        let stays = |vm: &VmId| self.leaving.values().any(|leaving| leaving.brings(*vm));
        self.vms = new.vms.into_iter().filter(|(vm, _)| stays(vm)).collect();
        self.known = new.known;
        self.forget_strangers();
    }

    fn timer(&mut self, timer: Timer, actions: &mut Vec<Action>) {
        match timer {
            Timer::Hello => self.greet(actions),
            Timer::Leaving(migration) => self.repeat_leaving(migration, actions),
            Timer::Switch(migration) => self.switch_is_late(migration, actions),
            Timer::Arriving(migration) => self.repeat_arriving(migration, actions),
            Timer::Announce(migration) => self.announce_again(migration, actions),
            Timer::Ask(vm) => self.ask(vm, actions),
        }
    }

    fn greet(&mut self, actions: &mut Vec<Action>) {
        self.tell(Node::Coordinator, Body::Hello, actions);
        self.set(Timer::Hello, self.config.retry_ms, actions);
    }

    fn message(&mut self, message: Message, actions: &mut Vec<Action>) {
        if message.to != Node::Host(self.id) {
            return;
        }
        match message.from {
            Node::Coordinator => self.coordinator_says(message.body, actions),
            Node::Host(from) => self.host_says(from, message.body, actions),
        }
    }

    fn coordinator_says(&mut self, body: Body, actions: &mut Vec<Action>) {
        match body {
            Body::Welcome => self.greeted = true,
            Body::Reserve { migration, moves } => self.reserve(migration, moves, actions),
            Body::Begin { migration, moves } => self.begin(migration, moves, actions),
            Body::Queued { migration, behind } => self.queued(migration, behind, actions),
            Body::Switch { migration } => self.switch(migration, actions),
            Body::Commit { migration, places } => self.commit(migration, &places, actions),
            Body::Abort { migration, places } => self.abort(migration, &places, actions),
            Body::At { place } => self.at(place),
            Body::Gone { vm, epoch } => self.gone(vm, epoch, actions),
            _ => {}
        }
    }

    fn host_says(&mut self, from: HostId, body: Body, actions: &mut Vec<Action>) {
        match body {
            Body::Suspend { migration, origin, vms, fan } => {
                self.suspend(from, migration, origin, vms, fan, actions);
            }
            Body::Suspended { migration, origin, hosts } => {
                self.suspended(migration, origin, hosts, actions);
            }
            Body::Handover { migration, vm, faces } => self.handover(from, migration, vm, faces, actions),
            Body::Loaded { migration } => self.loaded(from, migration, actions),
            Body::Running { after, origin, vms, fan } => {
                self.announced(from, after, origin, vms, fan, actions);
            }
            Body::Ready { after, origin, hosts } => self.ready(after, origin, hosts, actions),
            Body::Where { vm } => self.asked(from, vm, actions),
            _ => {}
        }
    }

    /// Carries out a commit. The place with the newer epoch wins over what this host assumed.
    fn commit(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        let landed = self.land(migration, places, actions);
        let mut left = false;
        for place in places.iter().filter(|place| place.host != self.id) {
            if self.vms.get(&place.vm).is_some_and(|vm| vm.epoch < place.epoch) {
                self.vms.remove(&place.vm);
                actions.push(Action::Discard { vm: place.vm });
                left = true;
            }
        }
        if self.leaving.remove(&migration).is_some() || left {
            actions.push(Action::EndCopy { migration });
        }
        for place in places {
            self.points_to(*place);
        }
        if let Some(vms) = landed {
            self.announce(migration, &vms, actions);
        }
        self.forget_strangers();
        self.settle(migration, places, actions);
    }

    fn abort(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        if self.arriving.remove(&migration).is_some() {
            actions.push(Action::Release { migration });
        }
        self.leave_aborted(migration, places, actions);
        self.forget_strangers();
        self.settle(migration, places, actions);
    }

    fn settle(&mut self, migration: MigrationId, places: &[Place], actions: &mut Vec<Action>) {
        let missing = |place: &&Place| {
            place.host == self.id && self.vms.get(&place.vm).is_none_or(|vm| vm.epoch < place.epoch)
        };
        let lost = places.iter().filter(missing).map(|place| place.vm).collect();
        self.tell(Node::Coordinator, Body::Settled { migration, lost }, actions);
    }

    fn connected(&mut self, vm: VmId, peer: Place) {
        let Some(found) = self.vms.get_mut(&vm) else { return };
        let known = self.known.entry(peer.vm).or_insert_with(|| Known::new(peer));
        let open = known.suspended.is_none() && found.switching.is_none();
        found.faces.entry(peer.vm).or_insert(open);
    }

    /// Forgets VMs that are no peers of this host's VMs.
    fn forget_strangers(&mut self) {
        let (vms, arriving) = (&self.vms, &self.arriving);
        self.known.retain(|vm, _| {
            vms.values().any(|found| found.faces.contains_key(vm))
                || arriving.values().any(|found| found.faces(*vm))
        });
    }

    fn set(&self, timer: Timer, after_ms: u32, actions: &mut Vec<Action>) {
        actions.push(Action::Timer { timer, after_ms });
    }

    fn tell(&mut self, to: Node, body: Body, actions: &mut Vec<Action>) {
        let message = Message { from: Node::Host(self.id), incarnation: self.incarnation, to, body };
        if to == message.from {
            self.own.push_back(message);
        } else {
            actions.push(Action::Send(message));
        }
    }

    /// Records a forwarded message. If a record is dropped, its origin retransmits.
    fn remember(
        spreads: &mut BTreeMap<(MigrationId, HostId), Spread>,
        key: (MigrationId, HostId),
        it: Spread,
    ) {
        spreads.insert(key, it);
        while spreads.len() > MAX_SPREADS {
            spreads.pop_first();
        }
    }

    /// Hosts of the VMs' peers, this host included.
    fn hosts_of_peers(&self, vms: &[VmId]) -> BTreeSet<HostId> {
        let faces = vms.iter().filter_map(|vm| self.vms.get(vm)).flat_map(|vm| vm.faces.keys());
        faces.filter_map(|peer| self.known.get(peer)).map(|known| known.host).collect()
    }
}

impl Known {
    fn new(place: Place) -> Self {
        let stamp = Stamp { epoch: place.epoch, after: MigrationId(0) };
        Self { host: place.host, stamp, suspended: None, held: false }
    }
}
