//! Hosts, the coordinator, and what happens when something that is in flight arrives.

use std::collections::{BTreeMap, BTreeSet};

use nomad::config::Config;
use nomad::coordinator::{self, Coordinator, Decision, Ledger};
use nomad::event::{Action, Event, Timer};
use nomad::host::Host;
use nomad::message::Message;
use nomad::monitor::Answer;
use nomad::names::{Epoch, HostId, Incarnation, MigrationId, Move, Node, Place, VmId};

use super::engine::{Engine, Flow, Instance, State};
use super::monitors::{Monitor, MonitorState};

/// A request to a host's engine or monitor that isn't done.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// To report whether there is room.
    Reservation(MigrationId, bool),
    /// To copy until little is left.
    Copy(MigrationId, VmId),
    /// To hold queue pairs that face a VM.
    SuspendQps(MigrationId, VmId),
    /// To stop a VM.
    Stop(MigrationId, VmId),
    /// To notice that a stream broke.
    Break(MigrationId),
}

/// Something in flight.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pending {
    /// A message to or from the coordinator, or one between hosts that the service passes on.
    Message(Message),
    /// A message by the direct connection of two hosts.
    Direct(Message),
    /// A host's work, of one of its starts.
    Work(HostId, Incarnation, Work),
    /// The rest of a VM's state.
    Stream {
        /// For which migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
        /// From where.
        from: HostId,
        /// To where.
        to: HostId,
        /// The state.
        state: State,
    },
    /// An operation of a VM on another one.
    Data {
        /// The requester.
        vm: VmId,
        /// The responder.
        peer: VmId,
        /// Its number, from 1.
        number: u16,
        /// The requester's host.
        from: HostId,
        /// The responder's host, as the requester's host knows it.
        to: HostId,
    },
    /// It was carried out.
    Done {
        /// The requester.
        vm: VmId,
        /// The responder.
        peer: VmId,
        /// Its number.
        number: u16,
        /// The requester's host.
        to: HostId,
    },
    /// The lease of a host that doesn't return is over.
    Silence(HostId),
    /// A host's timer, of one of its starts.
    Timer(HostId, Incarnation, Timer, u32),
    /// The coordinator's timer, of one of its starts.
    Deadline(u32, coordinator::Timer, u32),
}

impl Pending {
    /// Timers that differ in nothing but how long they take are one.
    pub(super) fn without_time(self) -> Self {
        match self {
            Self::Timer(host, incarnation, timer, _) => Self::Timer(host, incarnation, timer, 0),
            Self::Deadline(start, timer, _) => Self::Deadline(start, timer, 0),
            other => other,
        }
    }
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Machine {
    /// The state machine.
    pub host: Host,
    /// What it drives; lost with the daemon, as `host` is.
    pub engine: Engine,
    /// Monitors of VMs, which outlive the daemon.
    pub monitors: BTreeMap<VmId, Monitor>,
}

/// How many migrations ended how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    /// Decided for.
    pub committed: u32,
    /// Given up.
    pub aborted: u32,
}

/// A cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cluster {
    /// Times and injected bugs.
    pub config: Config,
    /// Hosts. One that doesn't return isn't here.
    pub machines: BTreeMap<HostId, Machine>,
    /// Those that don't return.
    pub dead: BTreeSet<HostId>,
    /// Pairs of hosts without a direct path, the lower number first: the service passes their messages on.
    pub severed: BTreeSet<(HostId, HostId)>,
    /// The coordinator.
    pub coordinator: Coordinator,
    /// What it has written.
    pub disk: Ledger,
    /// How often it was started.
    pub starts: u32,
    /// Operations that each VM asks of each peer.
    pub operations: u16,
    /// What was done, by asking VM and peer.
    pub flows: BTreeMap<(VmId, VmId), Flow>,
    /// VMs that may be lost: their owner was killed, or a destination that had voted.
    pub may_be_lost: BTreeSet<VmId>,
    /// VMs that were counted as lost, and are their hosts' again: no queue pairs of other VMs face them any more.
    pub broken: BTreeSet<VmId>,
    /// Operations that didn't reach their responder.
    pub undelivered: u32,
    /// Ends of migrations.
    pub ends: Ends,
    /// What is wrong.
    pub violation: Option<String>,
}

impl Cluster {
    /// Hosts 1 to `hosts`, without VMs. What they begin with is appended to `out`.
    #[must_use]
    pub fn new(hosts: u32, operations: u16, config: Config, out: &mut Vec<Pending>) -> Self {
        let mut cluster = Self {
            config,
            machines: BTreeMap::new(),
            dead: BTreeSet::new(),
            severed: BTreeSet::new(),
            coordinator: Coordinator::new(config, Ledger::default()),
            disk: Ledger::default(),
            starts: 0,
            operations,
            flows: BTreeMap::new(),
            may_be_lost: BTreeSet::new(),
            broken: BTreeSet::new(),
            undelivered: 0,
            ends: Ends::default(),
            violation: None,
        };
        for id in (1..=hosts).map(HostId) {
            let host = Host::new(id, Incarnation(1), config);
            let (engine, monitors) = (Engine::default(), BTreeMap::new());
            cluster.machines.insert(id, Machine { host, engine, monitors });
            cluster.host(id, Event::Start, out);
        }
        cluster
    }

    /// Starts a VM.
    pub fn start_vm(&mut self, vm: VmId, host: HostId, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        match self.coordinator.started(vm, host, &mut actions) {
            Ok(epoch) => {
                self.execute(actions, out);
                let instance = Instance { state: State::default(), running: true, epoch };
                if let Some(machine) = self.machines.get_mut(&host) {
                    machine.engine.instances.insert(vm, instance);
                    machine.monitors.insert(vm, Monitor { guest: true, epoch, state: MonitorState::Running });
                }
                let after = self.coordinator.last_of(vm);
                self.host(host, Event::Started { vm, epoch, after }, out);
            }
            Err(refused) => self.fail(format!("{refused}")),
        }
    }

    /// Connects two VMs.
    pub fn link(&mut self, one: VmId, other: VmId, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        if let Err(refused) = self.coordinator.linked(one, other, true, &mut actions) {
            self.fail(format!("{refused}"));
        }
        self.execute(actions, out);
        for (vm, peer) in [(one, other), (other, one)] {
            let (Some(owner), Some(at)) = (self.disk.vms.get(&vm), self.disk.vms.get(&peer)) else {
                continue;
            };
            let (host, place) = (owner.host, Place { vm: peer, host: at.host, epoch: at.epoch });
            self.host(host, Event::Connected { vm, peer: place }, out);
            if let Some(machine) = self.machines.get_mut(&host) {
                machine.engine.open.insert((vm, peer), place.host);
            }
            self.flows.insert((vm, peer), Flow::default());
        }
    }

    /// Asks for a migration. Whether it was begun.
    pub fn migrate(&mut self, moves: &[(VmId, HostId)], out: &mut Vec<Pending>) -> Option<MigrationId> {
        let mut actions = Vec::new();
        let begun = self.coordinator.migrate(moves, &mut actions).ok();
        self.execute(actions, out);
        begun
    }

    /// Gives one up.
    pub fn cancel(&mut self, migration: MigrationId, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        self.coordinator.cancel(migration, &mut actions);
        self.execute(actions, out);
    }

    /// Whether something in flight is lost with the service: messages of hosts to it, and those that it passes on.
    #[must_use]
    pub fn passes_by_service(pending: &Pending) -> bool {
        matches!(pending, Pending::Message(Message { from: Node::Host(_), .. }))
    }

    /// Hosts that are there, in pairs, the lower number first.
    #[must_use]
    pub fn pairs(&self) -> Vec<(HostId, HostId)> {
        let hosts = || self.machines.keys().copied();
        hosts()
            .flat_map(|one| hosts().filter(move |other| one < *other).map(move |other| (one, other)))
            .collect()
    }

    /// The direct path between two hosts breaks. What is in flight on it may still arrive.
    pub fn sever(&mut self, (one, other): (HostId, HostId)) {
        self.severed.insert((one.min(other), one.max(other)));
    }

    /// Whether a loss is no fault of its own: a connection broke, or its receiver drops messages of an earlier start.
    #[must_use]
    pub fn is_lost_freely(&self, pending: &Pending) -> bool {
        let Pending::Direct(message) = pending else { return false };
        let (Node::Host(from), Node::Host(to)) = (message.from, message.to) else { return false };
        self.is_severed(from, to) || self.disk.hosts.get(&from) != Some(&message.incarnation)
    }

    fn is_severed(&self, one: HostId, other: HostId) -> bool {
        self.severed.contains(&(one.min(other), one.max(other)))
    }

    /// A message takes the direct path if there is one.
    fn en_route(&self, message: Message) -> Pending {
        match (message.from, message.to) {
            (Node::Host(from), Node::Host(to)) if !self.is_severed(from, to) => Pending::Direct(message),
            _ => Pending::Message(message),
        }
    }

    /// Whether something in flight still has an effect.
    #[must_use]
    pub fn matters(&self, pending: &Pending) -> bool {
        match pending {
            Pending::Timer(host, incarnation, timer, _) => self.machines.get(host).is_some_and(|machine| {
                machine.host.incarnation() == *incarnation && machine.host.awaits(*timer)
            }),
            Pending::Deadline(starts, timer, _) => {
                // A decision that is kept for hosts that don't return reaches none.
                let dead = |migration| {
                    self.disk.migrations.get(migration).is_some_and(|stored| self.is_over(stored))
                };
                let said = !matches!(timer, coordinator::Timer::Retry(migration) if dead(migration));
                self.starts == *starts && self.coordinator.awaits(*timer) && said
            }
            Pending::Work(host, incarnation, work) => self.machines.get(host).is_some_and(|machine| {
                machine.host.incarnation() == *incarnation
                    && match work {
                        Work::SuspendQps(migration, vm) => {
                            machine.engine.suspending.contains(&(*migration, *vm))
                        }
                        Work::Stop(migration, vm) => machine.engine.stopping.contains(&(*migration, *vm)),
                        _ => true,
                    }
            }),
            _ => true,
        }
    }

    /// Something arrives.
    pub fn deliver(&mut self, pending: Pending, out: &mut Vec<Pending>) {
        if !self.matters(&pending) {
            return;
        }
        // Operations change nothing of what is checked below: their own checks are where they are carried out.
        let operation = matches!(pending, Pending::Data { .. } | Pending::Done { .. });
        match pending {
            Pending::Message(message) => match message.to {
                Node::Coordinator => self.coordinator(coordinator::Event::Message(message), out),
                Node::Host(host) => {
                    // The service passes a host's message on if the host is registered with the message's incarnation.
                    let passes = match message.from {
                        Node::Host(from) => self.disk.hosts.get(&from) == Some(&message.incarnation),
                        Node::Coordinator => true,
                    };
                    if passes {
                        self.host(host, Event::Message(message), out);
                    }
                }
            },
            // A receiver compares the incarnation with its view, which may be as old as it likes: nothing is dropped for certain.
            Pending::Direct(message) => {
                if let Node::Host(host) = message.to {
                    self.host(host, Event::Message(message), out);
                }
            }
            Pending::Silence(host) => self.coordinator(coordinator::Event::Silent { host }, out),
            Pending::Work(host, _, work) => self.work(host, work, out),
            Pending::Stream { migration, vm, from, to, state } => {
                self.stream(migration, vm, from, to, state, out);
            }
            Pending::Data { vm, peer, number, from, to } => {
                if self.executed(vm, peer, number, to) {
                    out.push(Pending::Done { vm, peer, number, to: from });
                } else {
                    self.undelivered += 1;
                }
            }
            Pending::Done { vm, peer, number, to } => self.done(vm, peer, number, to),
            Pending::Timer(host, _, timer, _) => self.host(host, Event::Timer(timer), out),
            Pending::Deadline(_, timer, _) => self.coordinator(coordinator::Event::Timer(timer), out),
        }
        if !operation {
            self.check();
        }
    }

    pub(super) fn fail(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    /// Whether a monitor can wait for each of these VMs: none of them has one on this host.
    fn reserve(&mut self, host: HostId, migration: MigrationId, moves: &[Move]) -> bool {
        let free = moves.iter().all(|moved| !self.is_monitored(host, moved.vm));
        let Some(machine) = self.machines.get_mut(&host).filter(|_| free) else { return false };
        for Move { vm, epoch, .. } in moves {
            let state = MonitorState::Receiving(migration);
            machine.monitors.insert(*vm, Monitor { guest: false, epoch: *epoch, state });
            machine.engine.phases.insert(*vm, (Answer::Pending, *epoch));
        }
        machine.engine.reservations.insert(migration, BTreeSet::new());
        true
    }

    fn work(&mut self, host: HostId, work: Work, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.get_mut(&host) else { return };
        let event = match work {
            Work::Reservation(migration, granted) => Event::Reservation { migration, granted },
            Work::Copy(migration, vm) => Event::Converged { migration, vm },
            Work::SuspendQps(migration, vm) => {
                machine.engine.suspend_qps(migration, vm);
                Event::QpsSuspended { migration, vm }
            }
            Work::Stop(migration, vm) => {
                if machine.engine.stop(migration, vm)
                    && let Some(monitor) = machine.monitors.get_mut(&vm)
                {
                    (monitor.guest, monitor.state) = (false, MonitorState::Stopped(migration));
                }
                Event::Stopped { migration, vm }
            }
            Work::Break(migration) => Event::StreamBroke { migration },
        };
        self.host(host, event, out);
    }

    fn stream(
        &mut self,
        migration: MigrationId,
        vm: VmId,
        from: HostId,
        to: HostId,
        state: State,
        out: &mut Vec<Pending>,
    ) {
        let Some(machine) = self.machines.get_mut(&to) else { return };
        let Some(room) = machine.engine.reservations.get_mut(&migration) else {
            self.lose(Pending::Stream { migration, vm, from, to, state }, out);
            return;
        };
        match machine.monitors.get_mut(&vm) {
            Some(monitor) if monitor.state == MonitorState::Receiving(migration) => {
                monitor.state = MonitorState::Voted(migration)
            }
            _ => {
                self.lose(Pending::Stream { migration, vm, from, to, state }, out);
                return;
            }
        }
        room.insert(vm);
        let instance = Instance { state, running: false, epoch: Epoch(0) };
        if machine.engine.instances.insert(vm, instance).is_some() {
            self.fail(format!("{vm} comes to {to}, which has it"));
        }
        self.host(to, Event::Arrived { migration, vm }, out);
    }

    /// Gives a host an event.
    pub fn host(&mut self, id: HostId, event: Event, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        if let Some(machine) = self.machines.get_mut(&id) {
            machine.host.step(event, &mut actions);
        }
        for action in actions {
            self.act(id, action, out);
        }
    }

    fn act(&mut self, id: HostId, action: Action, out: &mut Vec<Pending>) {
        let action = match action {
            Action::Send(message) => return out.push(self.en_route(message)),
            other => other,
        };
        let Some(machine) = self.machines.get_mut(&id) else { return };
        let incarnation = machine.host.incarnation();
        let engine = &mut machine.engine;
        let mut work = |work| out.push(Pending::Work(id, incarnation, work));
        match action {
            // Sent above.
            Action::Send(_) => {}
            Action::Reserve { migration, moves } => {
                let granted = self.reserve(id, migration, &moves);
                out.push(Pending::Work(id, incarnation, Work::Reservation(migration, granted)));
            }
            Action::Release { migration } => {
                for vm in engine.reservations.remove(&migration).into_iter().flatten() {
                    engine.instances.remove(&vm);
                }
                for (vm, monitor) in &mut machine.monitors {
                    match monitor.state {
                        MonitorState::Receiving(of) if of == migration => monitor.lose_devices(),
                        MonitorState::Voted(of) if of == migration => {
                            engine.phases.insert(*vm, (Answer::Aborted, monitor.epoch));
                        }
                        _ => {}
                    }
                }
            }
            Action::Copy { migration, vm, .. } => {
                engine.phases.insert(vm, (Answer::Pending, Epoch(0)));
                work(Work::Copy(migration, vm));
            }
            Action::EndCopy { .. } | Action::Queued { .. } => {}
            Action::SuspendQps { migration, vm } => {
                engine.suspending.retain(|(_, other)| *other != vm);
                engine.suspending.insert((migration, vm));
                work(Work::SuspendQps(migration, vm));
            }
            Action::ResumeQps { vm, peer } => {
                engine.suspending.retain(|(_, other)| *other != peer.vm);
                engine.open.insert((vm, peer.vm), peer.host);
            }
            Action::Lost { peer } => {
                engine.suspending.retain(|(_, other)| *other != peer);
                engine.open.retain(|(_, other), _| *other != peer);
            }
            Action::Stop { migration, vm } => {
                engine.stopping.insert((migration, vm));
                work(Work::Stop(migration, vm));
            }
            Action::Finish { migration, vm, to } => {
                let state = engine.instances.get(&vm).map(|instance| instance.state.clone());
                if let Some(state) = state {
                    out.push(Pending::Stream { migration, vm, from: id, to, state });
                }
            }
            Action::Run { vm, epoch } => {
                engine.stopping.retain(|(_, other)| *other != vm);
                engine.reservations.retain(|_, vms| !vms.remove(&vm) || !vms.is_empty());
                let came =
                    matches!(machine.monitors.get(&vm), Some(Monitor { state: MonitorState::Voted(_), .. }));
                engine.phases.insert(vm, (if came { Answer::Running } else { Answer::Aborted }, epoch));
                match engine.instances.get_mut(&vm) {
                    Some(instance) => (instance.running, instance.epoch) = (true, epoch),
                    None => self.fail(format!("{id} runs {vm}, whose state it doesn't have")),
                }
            }
            Action::Discard { vm } => {
                engine.instances.remove(&vm);
                engine.phases.insert(vm, (Answer::Moved, Epoch(0)));
                engine.open.retain(|(own, _), _| *own != vm);
                engine.stopping.retain(|(_, other)| *other != vm);
            }
            Action::Timer { timer, after_ms } => out.push(Pending::Timer(id, incarnation, timer, after_ms)),
        }
    }

    pub(super) fn coordinator(&mut self, event: coordinator::Event, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        self.coordinator.step(event, &mut actions);
        self.execute(actions, out);
    }

    pub(super) fn execute(&mut self, actions: Vec<coordinator::Action>, out: &mut Vec<Pending>) {
        for action in actions {
            match action {
                coordinator::Action::Write(record) => self.disk.apply(&record),
                coordinator::Action::Send(message) => out.push(Pending::Message(message)),
                coordinator::Action::Timer { timer, after_ms } => {
                    out.push(Pending::Deadline(self.starts, timer, after_ms));
                }
                coordinator::Action::Ended { decision, .. } => match decision {
                    Decision::Committed => self.ends.committed += 1,
                    Decision::Aborted => self.ends.aborted += 1,
                },
                coordinator::Action::StageEntered { .. } => {}
            }
        }
    }
}
