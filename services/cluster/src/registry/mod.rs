//! All decisions of the service, one after the other: hosts and their leases, VMs and their epochs, connections, migrations.
//!
//! What concerns epochs, owners and moves is decided by `nomad`'s coordinator; this module keeps names, addresses and leases beside it, and
//! checks the sender. It has no threads, clocks or sockets: the time comes with each call.
//!
//! ```text
//!  register_vm, message, tick … ─▶ changes, messages and events are staged ─▶ flush: one transaction ─▶ take_messages, take_events
//!                                                                               └─ it fails: all of them are dropped
//! ```
//! A caller must not answer a request before the [`Registry::flush`] after it, as long as [`Registry::has_staged`]. After a flush that failed,
//! state and coordinator are as they were after the last one that succeeded. Leases, reported connections and waiting monitors are in memory
//! only, and stay as hosts have reported them.

mod hosts;
mod leases;
mod links;
mod migrations;
#[cfg(test)]
mod tests;
mod vms;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nomad::coordinator::{Action, Checkpoint, Event as CoordinatorEvent, Stage, Timer};
use nomad::{Coordinator, HostId, Incarnation, Message, VmId};

use crate::refusal::Refusal;
use crate::state::{Change, Settings, State, touched};
use crate::store::Store;
use crate::store_error::StoreError;

use leases::Leases;

pub use vms::Registered;

/// Hosts and VMs of a cluster at most; NICs of a VM and addresses of a NIC.
pub const MAX_HOSTS: usize = nomad::config::MAX_HOSTS;
/// VMs of a cluster at most.
pub const MAX_VMS: usize = 65_536;
/// NICs of a VM at most.
pub const MAX_NICS: usize = 16;
/// Addresses of a NIC at most.
pub const MAX_ADDRESSES: usize = 128;
/// Monitors of one host that may wait for VMs.
pub const MAX_WAITING_MONITORS: usize = 1024;
/// Connected pairs of VMs that one host may report: those of 512 VMs that are all connected to 512 others.
pub const MAX_LINKS: usize = 262_144;

/// A host that says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speaker {
    /// The host.
    pub host: HostId,
    /// Which start of it.
    pub incarnation: Incarnation,
}

/// What watchers are to see: the hosts and VMs that changes concern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The state's revision after it.
    pub revision: u64,
    /// Hosts that the change concerns.
    pub hosts: BTreeSet<HostId>,
    /// VMs; those that aren't in the state are gone.
    pub vms: BTreeSet<VmId>,
}

impl Event {
    /// Takes a later event in.
    pub fn merge(&mut self, later: Self) {
        self.revision = later.revision;
        self.hosts.extend(later.hosts);
        self.vms.extend(later.vms);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Registry {
    store: Box<dyn Store>,
    coordinator: Coordinator,
    /// The coordinator's state isn't the store's: a transaction has failed.
    out_of_sync: bool,
    /// What the coordinator knew besides its ledger when a transaction succeeded last; `None`: it hasn't begun.
    checkpoint: Option<Checkpoint>,
    lease: Duration,
    /// Transports by VMs' names.
    pins: BTreeMap<String, String>,
    /// The coordinator's times.
    times: nomad::Config,
    leases: Leases,
    /// Hosts whose lease is over.
    silent: BTreeSet<HostId>,
    /// Those of them of which nothing was written since.
    newly_silent: BTreeSet<HostId>,
    /// Leases that have run out since the service began.
    leases_lost: u64,
    /// What hosts have said of connections since the service began.
    reported: BTreeMap<HostId, BTreeSet<(VmId, VmId)>>,
    /// Where monitors of hosts wait for VMs, by the VMs' names.
    waiting: BTreeMap<HostId, BTreeMap<String, SocketAddr>>,
    timers: BTreeMap<(Instant, u64), Timer>,
    /// Of each timer the one that was set last: it replaces those before it.
    latest: HashMap<Timer, u64>,
    next_timer: u64,
    /// The last [`Registry::tick`] came late and gave everybody more time.
    stalled: bool,
    staged: Staged,
    /// Transactions that were written since the service began.
    writes: u64,
    messages: Vec<Message>,
    events: Vec<Event>,
}

/// What follows from calls since the last flush.
#[derive(Debug, Default)]
struct Staged {
    /// Changes of the store.
    changes: usize,
    /// The coordinator has taken something in.
    stepped: bool,
    messages: Vec<Message>,
    events: Vec<Event>,
}

/// A migration whose memory isn't copied after so long is given up; monitors have time limits of their own, which are shorter as a rule.
const COPY_TIMEOUT_MS: u32 = 6 * 3_600_000;

/// A [`Registry::tick`] that is overdue by more than this means that the service itself was paused: its process or machine was stalled.
const STALL_THRESHOLD: Duration = Duration::from_millis(500);
/// What answers that came meanwhile are given to be read.
const STALL_GRACE: Duration = Duration::from_millis(50);

impl Registry {
    /// Continues with the state in a database. Each known host gets a lease of the length `lease`; undecided migrations are aborted. A
    /// switchover may take as long as `switch_limit`.
    ///
    /// # Errors
    /// When the database can't be written.
    pub fn new(
        store: Box<dyn Store>,
        lease: Duration,
        switch_limit: Duration,
        now: Instant,
    ) -> Result<Self, StoreError> {
        let ledger = store.state().ledger.clone();
        let switch_ms = u32::try_from(switch_limit.as_millis()).unwrap_or(u32::MAX).max(1);
        let ordinary = nomad::Config::default();
        // A longer lease is for hosts that stall: destinations get more time as well.
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let reserve_ms = ordinary.reserve_ms.max(lease_ms / 3);
        let times = nomad::Config { switch_ms, reserve_ms, copy_ms: COPY_TIMEOUT_MS, ..ordinary };
        let mut registry = Self {
            coordinator: Coordinator::new(times, ledger),
            times,
            leases: store.state().hosts.keys().map(|host| (*host, now + lease)).collect(),
            store,
            out_of_sync: true,
            checkpoint: None,
            lease,
            pins: BTreeMap::new(),
            silent: BTreeSet::new(),
            newly_silent: BTreeSet::new(),
            leases_lost: 0,
            reported: BTreeMap::new(),
            waiting: BTreeMap::new(),
            timers: BTreeMap::new(),
            latest: HashMap::new(),
            next_timer: 0,
            stalled: false,
            staged: Staged::default(),
            writes: 0,
            messages: Vec::new(),
            events: Vec::new(),
        };
        registry.resync(now)?;
        registry.flush()?;
        Ok(registry)
    }

    /// What is written, with what is staged.
    #[must_use]
    pub fn state(&self) -> &State {
        self.store.state()
    }

    /// Which transports VMs' connections are pinned to, by the VMs' names; `*` is all others.
    #[must_use]
    pub fn pins(&self) -> &BTreeMap<String, String> {
        &self.pins
    }

    /// Pins VMs' connections to transports. Hosts hear of it when they register.
    pub fn set_pins(&mut self, pins: BTreeMap<String, String>) {
        self.pins = pins;
    }

    /// How long a host counts as alive after it was heard.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Whether a host's lease runs.
    #[must_use]
    pub fn has_lease(&self, host: HostId) -> bool {
        self.leases.runs(host)
    }

    /// What a migration waits for; `None`: it is over.
    #[must_use]
    pub fn stage(&self, migration: nomad::MigrationId) -> Option<Stage> {
        self.coordinator.stage(migration)
    }

    /// The VM that has to move before a migration can switch over, since it is a peer of one of its VMs.
    #[must_use]
    pub fn waits_for(&self, migration: nomad::MigrationId) -> Option<VmId> {
        self.coordinator.waits_for(migration)
    }

    /// Leases that have run out since the service began.
    #[must_use]
    pub fn leases_lost(&self) -> u64 {
        self.leases_lost
    }

    /// Transactions that were written since the service began.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Returns whether calls since the last [`Registry::flush`] have changed anything that isn't written.
    #[must_use]
    pub fn has_staged(&self) -> bool {
        self.staged.changes > 0
    }

    /// Changes since the last [`Registry::flush`].
    #[must_use]
    pub fn staged_changes(&self) -> usize {
        self.staged.changes
    }

    /// Writes what calls since the last flush have changed, as one transaction. What follows from them is due then.
    ///
    /// # Errors
    /// When it can't be written: then all of these calls have changed nothing, and nothing of what follows from them is due.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        let staged = std::mem::take(&mut self.staged);
        if let Err(error) = self.store.commit() {
            self.out_of_sync = true;
            return Err(error);
        }
        self.writes += u64::from(staged.changes > 0);
        self.newly_silent.clear();
        if staged.stepped && !self.out_of_sync {
            self.checkpoint = Some(self.coordinator.checkpoint());
        }
        self.messages.extend(staged.messages);
        self.events.extend(staged.events);
        Ok(())
    }

    /// Messages of the coordinator, to be sent in this order. They may be lost.
    pub fn take_messages(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.messages)
    }

    /// What has changed since it was asked last.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// When [`Registry::tick`] is due next.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let timer = self.timers.keys().next().map(|(at, _)| *at);
        self.leases.next().into_iter().chain(timer).min()
    }

    /// Expires leases and the coordinator's timers that are due. A call that is overdue by more than [`STALL_THRESHOLD`] expires none of them,
    /// unless the call before postponed them already. While the service itself was paused, it read no messages of hosts, so that time isn't
    /// their silence. Such a call extends each lease by the delay and a third of the lease's length, and each timer by the delay and
    /// [`STALL_GRACE`].
    ///
    /// # Errors
    /// When the state can't be read after a transaction that failed; it is tried again with the next call.
    pub fn tick(&mut self, now: Instant) -> Result<(), StoreError> {
        self.resync(now)?;
        let late = self.next().map_or(Duration::ZERO, |due| now.saturating_duration_since(due));
        // Twice in a row, and a service that always comes late would never decide.
        self.stalled = late > STALL_THRESHOLD && !self.stalled;
        if self.stalled {
            tracing::warn!(
                milliseconds = late.as_millis(),
                "The service stood still; that time doesn't count as hosts' silence"
            );
            self.leases.extend(late + self.lease / 3);
            let timers = std::mem::take(&mut self.timers);
            let later = |((at, number), timer)| ((at + late + STALL_GRACE, number), timer);
            self.timers = timers.into_iter().map(later).collect();
            return Ok(());
        }
        while let Some(host) = self.leases.take_over(now) {
            self.waiting.remove(&host);
            self.silent.insert(host);
            self.newly_silent.insert(host);
            self.leases_lost += 1;
            tracing::warn!(
                host = self.state().host_name(host),
                "A host isn't heard of any more; its VMs stay its own, since they may still run"
            );
            self.step(CoordinatorEvent::Silent { host }, now);
        }
        while let Some((&(at, number), _)) = self.timers.first_key_value() {
            if at > now {
                break;
            }
            if let Some(timer) = self.timers.remove(&(at, number))
                && self.latest.get(&timer) == Some(&number)
            {
                self.latest.remove(&timer);
                self.step(CoordinatorEvent::Timer(timer), now);
            }
        }
        Ok(())
    }

    /// Takes settings over that were given at the start.
    ///
    /// # Errors
    /// When they can't be written.
    pub fn set_settings(&mut self, settings: Settings, now: Instant) -> Result<(), StoreError> {
        if self.state().settings == settings && self.state().revision > 0 {
            return Ok(());
        }
        self.stage_actions(vec![Change::Settings(settings)], Vec::new(), now);
        self.flush()
    }

    /// Has the coordinator take an event in.
    fn step(&mut self, event: CoordinatorEvent, now: Instant) {
        let mut actions = Vec::new();
        self.coordinator.step(event, &mut actions);
        self.stage_actions(Vec::new(), actions, now);
    }

    /// Stages changes and what the coordinator decided.
    fn stage_actions(&mut self, mut changes: Vec<Change>, actions: Vec<Action>, now: Instant) {
        changes.extend(actions.iter().filter_map(|action| match action {
            Action::Write(record) => Some(Change::Ledger(record.clone())),
            _ => None,
        }));
        if !changes.is_empty() {
            // A migration's moves are known before it is forgotten, and after it was begun.
            let before = touched(&changes, self.state());
            self.store.stage(&changes);
            let (mut hosts, mut vms) = touched(&changes, self.state());
            hosts.extend(before.0);
            vms.extend(before.1);
            self.staged.events.push(Event { revision: self.state().revision, hosts, vms });
            self.staged.changes += changes.len();
        }
        self.staged.stepped = true;
        for action in actions {
            match action {
                Action::Write(_) => {}
                Action::Send(message) => self.staged.messages.push(message),
                Action::Timer { timer, after_ms } => {
                    self.next_timer += 1;
                    let at = now + Duration::from_millis(u64::from(after_ms));
                    self.timers.insert((at, self.next_timer), timer);
                    self.latest.insert(timer, self.next_timer);
                }
                Action::StageEntered { migration, stage } => tracing::info!("{migration}: {stage:?}"),
                Action::Ended { migration, decision, reason } => {
                    let why = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                    tracing::info!("{migration} is {decision:?}{why}");
                }
            }
        }
    }

    /// How long a switch-over may take, milliseconds.
    #[must_use]
    pub fn switch_ms(&self) -> u32 {
        self.times.switch_ms
    }

    /// Makes state and coordinator what is written. Nothing where no transaction has failed.
    ///
    /// # Errors
    /// When the state can't be read, or what the coordinator has to decide then can't be written.
    pub fn settle(&mut self, now: Instant) -> Result<(), StoreError> {
        self.resync(now)?;
        self.flush()
    }

    /// At first the coordinator begins with what is written. After a transaction has failed it goes back to what it knew before; migrations continue.
    fn resync(&mut self, now: Instant) -> Result<(), StoreError> {
        if !self.out_of_sync {
            return Ok(());
        }
        self.store.recover()?;
        let ledger = self.state().ledger.clone();
        self.timers.clear();
        self.latest.clear();
        let mut actions = Vec::new();
        match self.checkpoint.clone() {
            Some(checkpoint) => self.coordinator.roll_back(checkpoint, ledger, &mut actions),
            None => {
                self.coordinator = Coordinator::new(self.times, ledger);
                self.coordinator.step(CoordinatorEvent::Start, &mut actions);
            }
        }
        self.out_of_sync = false;
        self.stage_actions(Vec::new(), actions, now);
        // What hosts reported whose registration failed.
        let known = |host: HostId| self.store.state().hosts.contains_key(&host);
        self.leases.retain(known);
        self.silent.retain(|host| known(*host));
        self.reported.retain(|host, _| known(*host));
        self.waiting.retain(|host, _| known(*host));
        for host in self.newly_silent.clone() {
            self.step(CoordinatorEvent::Silent { host }, now);
        }
        Ok(())
    }

    /// Whether a host is the one that the cluster knows, in its last start.
    ///
    /// # Errors
    /// When it isn't, or the database can't be written.
    pub fn renew_lease(&mut self, speaker: Speaker, now: Instant) -> Result<(), Refusal> {
        self.check(speaker, now)
    }

    fn check(&mut self, speaker: Speaker, now: Instant) -> Result<(), Refusal> {
        self.resync(now)?;
        let Some(known) = self.state().ledger.hosts.get(&speaker.host).copied() else {
            return Err(Refusal::Missing(format!("There is no {}: register first", speaker.host)));
        };
        if speaker.incarnation < known {
            let name = self.state().host_name(speaker.host);
            return Err(Refusal::old_start(&name, speaker.incarnation, known));
        }
        if speaker.incarnation > known {
            // The database is older than the host: it was restored from a copy.
            return Err(Refusal::Missing(format!(
                "Start {} of {} isn't known here: register first",
                speaker.incarnation.0, speaker.host
            )));
        }
        Ok(())
    }
}
