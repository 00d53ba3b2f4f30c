//! Hosts, the coordinator, and what happens when something that is under way arrives.

use std::collections::{BTreeMap, BTreeSet};

use super::engine::{Engine, Flow, Instance, State};
use crate::config::Config;
use crate::coordinator::{self, Coordinator, Decision, Ledger};
use crate::event::{Action, Event, Timer};
use crate::host::Host;
use crate::message::Message;
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Node, Place, VmId};

/// What a host's engine or monitor is asked for, and hasn't done.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// To make room.
    Room(MigrationId),
    /// To copy until little is left.
    Copy(MigrationId, VmId),
    /// To hold queue pairs that face a VM.
    Hold(MigrationId, VmId),
    /// To stop a VM.
    Stop(MigrationId, VmId),
    /// To notice that a stream broke.
    Break(MigrationId),
}

/// Something under way.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pending {
    /// A message.
    Message(Message),
    /// A host's work, of one of its starts.
    Work(HostId, Incarnation, Work),
    /// The rest of a VM's state.
    Stream {
        /// For which migration.
        migration: MigrationId,
        /// Whose.
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
        /// Who asks.
        vm: VmId,
        /// Who carries it out.
        peer: VmId,
        /// Its number, from 1.
        number: u16,
        /// Where the one who asks was.
        from: HostId,
        /// Where the other one is thought to be.
        to: HostId,
    },
    /// It was carried out.
    Done {
        /// Who asked.
        vm: VmId,
        /// Who carried it out.
        peer: VmId,
        /// Its number.
        number: u16,
        /// Where the one who asked was.
        to: HostId,
    },
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
    /// What it drives.
    pub engine: Engine,
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
    /// Times and plants.
    pub config: Config,
    /// Hosts.
    pub machines: BTreeMap<HostId, Machine>,
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
    pub excused: BTreeSet<VmId>,
    /// Operations that found nobody.
    pub unheard: u32,
    /// Ends of migrations.
    pub ends: Ends,
    /// What is wrong.
    pub verdict: Option<String>,
}

impl Cluster {
    /// Hosts 1 to `hosts`, without VMs. What they begin with is appended to `out`.
    #[must_use]
    pub fn new(hosts: u32, operations: u16, config: Config, out: &mut Vec<Pending>) -> Self {
        let mut cluster = Self {
            config,
            machines: BTreeMap::new(),
            coordinator: Coordinator::new(config, Ledger::default()),
            disk: Ledger::default(),
            starts: 0,
            operations,
            flows: BTreeMap::new(),
            excused: BTreeSet::new(),
            unheard: 0,
            ends: Ends::default(),
            verdict: None,
        };
        for id in (1..=hosts).map(HostId) {
            let host = Host::new(id, Incarnation(1), config);
            cluster.machines.insert(id, Machine { host, engine: Engine::default() });
            cluster.host(id, Event::Start, out);
        }
        cluster
    }

    /// Starts a VM.
    pub fn start_vm(&mut self, vm: VmId, host: HostId, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        match self.coordinator.started(vm, host, &mut actions) {
            Ok(epoch) => {
                self.carry_out(actions, out);
                let instance = Instance { state: State::default(), running: true, epoch };
                if let Some(machine) = self.machines.get_mut(&host) {
                    machine.engine.instances.insert(vm, instance);
                }
                self.host(host, Event::Started { vm, epoch }, out);
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
        self.carry_out(actions, out);
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
        self.carry_out(actions, out);
        begun
    }

    /// Gives one up.
    pub fn cancel(&mut self, migration: MigrationId, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        self.coordinator.cancel(migration, &mut actions);
        self.carry_out(actions, out);
    }

    /// A host is killed, and starts again with nothing.
    pub fn kill(&mut self, id: HostId, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.get_mut(&id) else { return };
        let owned = self.disk.vms.iter().filter(|(_, owner)| owner.host == id).map(|(vm, _)| *vm);
        self.excused.extend(owned);
        let voted = self.disk.vms.keys().filter(|vm| machine.host.has_voted(**vm));
        self.excused.extend(voted);
        let incarnation = Incarnation(machine.host.incarnation().0 + 1);
        *machine = Machine { host: Host::new(id, incarnation, self.config), engine: Engine::default() };
        self.host(id, Event::Start, out);
    }

    /// The coordinator is killed, and starts again with what it has written.
    pub fn kill_coordinator(&mut self, out: &mut Vec<Pending>) {
        self.starts += 1;
        self.coordinator = Coordinator::new(self.config, self.disk.clone());
        self.coordinator(coordinator::Event::Start, out);
    }

    /// Whether something under way still means anything.
    #[must_use]
    pub fn matters(&self, pending: &Pending) -> bool {
        match pending {
            Pending::Timer(host, incarnation, timer, _) => self.machines.get(host).is_some_and(|machine| {
                machine.host.incarnation() == *incarnation && machine.host.awaits(*timer)
            }),
            Pending::Deadline(starts, timer, _) => self.starts == *starts && self.coordinator.awaits(*timer),
            Pending::Work(host, incarnation, work) => self.machines.get(host).is_some_and(|machine| {
                machine.host.incarnation() == *incarnation
                    && match work {
                        Work::Hold(migration, vm) => machine.engine.holding.contains(&(*migration, *vm)),
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
        // Operations change nothing of what is checked behind: their own checks are where they are carried out.
        let operation = matches!(pending, Pending::Data { .. } | Pending::Done { .. });
        match pending {
            Pending::Message(message) => match message.to {
                Node::Coordinator => self.coordinator(coordinator::Event::Message(message), out),
                Node::Host(host) => self.host(host, Event::Message(message), out),
            },
            Pending::Work(host, _, work) => self.work(host, work, out),
            Pending::Stream { migration, vm, from, to, state } => {
                self.stream(migration, vm, from, to, state, out);
            }
            Pending::Data { vm, peer, number, from, to } => {
                if self.carried_out(vm, peer, number, to) {
                    out.push(Pending::Done { vm, peer, number, to: from });
                } else {
                    self.unheard += 1;
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

    /// Something is lost. Streams tell their sender, the rest doesn't.
    pub fn lose(&mut self, pending: Pending, out: &mut Vec<Pending>) {
        if let Pending::Stream { migration, from, .. } = pending
            && let Some(machine) = self.machines.get(&from)
        {
            out.push(Pending::Work(from, machine.host.incarnation(), Work::Break(migration)));
        }
    }

    /// Operations that may be sent now.
    pub fn sends(&self, mut each: impl FnMut(Pending)) {
        for (from, machine) in &self.machines {
            for ((vm, peer), to) in &machine.engine.open {
                let Some(instance) = machine.engine.instances.get(vm).filter(|vm| vm.running) else {
                    continue;
                };
                // Towards a VM that is gone they are sent again until the queue pair fails, which isn't modelled.
                if self.is_lost(*peer) {
                    continue;
                }
                let completed = instance.state.completed.get(peer).copied().unwrap_or(0);
                if completed < self.operations {
                    let (vm, peer) = (*vm, *peer);
                    each(Pending::Data { vm, peer, number: completed + 1, from: *from, to: *to });
                }
            }
        }
    }

    pub(super) fn fail(&mut self, text: String) {
        self.verdict.get_or_insert(text);
    }

    fn work(&mut self, host: HostId, work: Work, out: &mut Vec<Pending>) {
        let Some(machine) = self.machines.get_mut(&host) else { return };
        let event = match work {
            Work::Room(migration) => Event::Room { migration, granted: true },
            Work::Copy(migration, vm) => Event::Converged { migration, vm },
            Work::Hold(migration, vm) => {
                machine.engine.hold(migration, vm);
                Event::Held { migration, vm }
            }
            Work::Stop(migration, vm) => {
                machine.engine.stop(migration, vm);
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
        let Some(room) = machine.engine.rooms.get_mut(&migration) else {
            self.lose(Pending::Stream { migration, vm, from, to, state }, out);
            return;
        };
        room.insert(vm);
        let instance = Instance { state, running: false, epoch: Epoch(0) };
        if machine.engine.instances.insert(vm, instance).is_some() {
            self.fail(format!("{vm} comes to {to}, which has it"));
        }
        self.host(to, Event::Arrived { migration, vm }, out);
    }

    /// An operation reaches a host. Whether it was carried out, now or before.
    fn carried_out(&mut self, vm: VmId, peer: VmId, number: u16, to: HostId) -> bool {
        let Some(machine) = self.machines.get_mut(&to) else { return false };
        // Queue pairs that are held take nothing in.
        if !machine.engine.open.contains_key(&(peer, vm)) {
            return false;
        }
        let Some(instance) = machine.engine.instances.get_mut(&peer).filter(|peer| peer.running) else {
            return false;
        };
        let before = instance.state.carried_out.entry(vm).or_default();
        if number <= *before {
            return true;
        }
        let next = *before + 1;
        *before = number;
        let effects = self.flows.entry((vm, peer)).or_default();
        let expected = effects.effects + 1;
        effects.effects = number;
        if number != next || number != expected {
            self.fail(format!(
                "operation {number} of {vm} on {peer} is carried out where {next} is next for it, and {expected} in truth"
            ));
        }
        true
    }

    fn done(&mut self, vm: VmId, peer: VmId, number: u16, to: HostId) {
        let effects = self.flows.get(&(vm, peer)).map_or(0, |flow| flow.effects);
        let Some(machine) = self.machines.get_mut(&to) else { return };
        let Some(instance) = machine.engine.instances.get_mut(&vm).filter(|vm| vm.running) else { return };
        if !machine.engine.open.contains_key(&(vm, peer)) {
            return;
        }
        let completed = instance.state.completed.entry(peer).or_default();
        if number == *completed + 1 {
            *completed = number;
            if effects < number {
                self.fail(format!("operation {number} of {vm} on {peer} is complete and wasn't carried out"));
            }
        }
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
        let Some(machine) = self.machines.get_mut(&id) else { return };
        let incarnation = machine.host.incarnation();
        let engine = &mut machine.engine;
        let mut work = |work| out.push(Pending::Work(id, incarnation, work));
        match action {
            Action::Send(message) => out.push(Pending::Message(message)),
            Action::Reserve { migration, .. } => {
                engine.rooms.insert(migration, BTreeSet::new());
                work(Work::Room(migration));
            }
            Action::Release { migration } => {
                for vm in engine.rooms.remove(&migration).into_iter().flatten() {
                    engine.instances.remove(&vm);
                }
            }
            Action::Copy { migration, vm, .. } => work(Work::Copy(migration, vm)),
            Action::EndCopy { .. } => {}
            Action::Hold { migration, vm } => {
                engine.holding.retain(|(_, other)| *other != vm);
                engine.holding.insert((migration, vm));
                work(Work::Hold(migration, vm));
            }
            Action::Open { vm, peer } => {
                engine.holding.retain(|(_, other)| *other != peer.vm);
                engine.open.insert((vm, peer.vm), peer.host);
            }
            Action::Lost { peer } => {
                engine.holding.retain(|(_, other)| *other != peer);
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
                engine.rooms.retain(|_, vms| !vms.contains(&vm));
                match engine.instances.get_mut(&vm) {
                    Some(instance) => (instance.running, instance.epoch) = (true, epoch),
                    None => self.fail(format!("{id} runs {vm}, whose state it doesn't have")),
                }
            }
            Action::Discard { vm } => {
                engine.instances.remove(&vm);
                engine.open.retain(|(own, _), _| *own != vm);
                engine.stopping.retain(|(_, other)| *other != vm);
            }
            Action::Timer { timer, after_ms } => out.push(Pending::Timer(id, incarnation, timer, after_ms)),
        }
    }

    fn coordinator(&mut self, event: coordinator::Event, out: &mut Vec<Pending>) {
        let mut actions = Vec::new();
        self.coordinator.step(event, &mut actions);
        self.carry_out(actions, out);
    }

    fn carry_out(&mut self, actions: Vec<coordinator::Action>, out: &mut Vec<Pending>) {
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
                coordinator::Action::Came { .. } => {}
            }
        }
    }
}
