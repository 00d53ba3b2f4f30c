//! Hosts in one process, each with an engine, its transports on sockets of the loopback interface, and its state machine of `nomad`; guests
//! with programs migrate among them. When a guest stops, its RAM is copied to other memory at the destination. So a late write of its old
//! host is lost, and the test detects it.

mod actions;
mod directory;
pub mod hostile;
pub mod measure;
mod outside;
mod setup;
mod traffic;
mod verbs;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use dma::MappedMemory;
use hca::names::{DeviceId, SegmentId};
use host::migration::{Destination, Parts, Source};
use host::transport::Transports;
use nomad::coordinator::{self, Coordinator, Decision};
use nomad::{Event, HostId, Message, MigrationId, Node, VmId};
use pvrdma_testbed::{Cq, Guest, Host};

use directory::{LiveDirectory, OUTSIDE, config, gid, memory};
pub use outside::Frames;
use outside::{Outside, Port, Ports};
use traffic::End;
pub use traffic::Verdict;

const SEGMENT: SegmentId = SegmentId(7);
const SEGMENT_NAME: &str = "s0";
/// All access rights of regions and queue pairs.
const ALL: u32 = 1 | 2 | 4 | 8;

struct Machine {
    host: Host<MappedMemory>,
    transports: Transports,
    directory: Arc<LiveDirectory>,
    nomad: nomad::Host,
    /// Devices of VMs that run or are stopped here.
    here: BTreeMap<VmId, DeviceId>,
    leaving: BTreeMap<VmId, (MigrationId, HostId, Source, u32)>,
    arriving: BTreeMap<VmId, (MigrationId, Destination, MappedMemory)>,
    /// Ports to the segment of the peer outside of the cluster; empty without it.
    ports: Ports,
}

impl Machine {
    fn parts(&mut self) -> Parts<'_, MappedMemory> {
        let Host { engine, devices, now, .. } = &mut self.host;
        Parts { engine, devices, transports: &mut self.transports, now: *now }
    }

    fn drop_lines(&mut self, device: DeviceId) {
        self.host.lines.remove(&device);
        self.ports.remove(&device);
    }
}

struct Vm {
    guest: Guest<MappedMemory>,
    size: u64,
    cq: Cq,
    on: usize,
    running: bool,
    stopped_at: u64,
    /// When it last began to run, and how long it had been suspended.
    ran: (u64, u64),
    /// The memory that it was last copied from, until its host has released it.
    left: Option<MappedMemory>,
    ends: BTreeMap<VmId, End>,
}

/// Counts of migrations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Moves {
    /// Committed migrations.
    pub committed: u64,
    /// Aborted migrations.
    pub aborted: u64,
    /// VMs that moved.
    pub vms: u64,
    /// Connections that changed from the network to RAM.
    pub came_local: u64,
    /// Objects copied during blackouts.
    pub objects_in_pause: u64,
    /// Bytes of these objects.
    pub bytes_in_pause: u64,
    /// Longest suspension of a VM, nanoseconds.
    pub longest_pause_ns: u64,
    /// Sum of all suspensions, nanoseconds.
    pub paused_ns: u64,
    /// Completions with the peer on the same host.
    pub local: u64,
    /// Completions with the peer on another host.
    pub remote: u64,
}

/// Hosts, the coordinator, and guests.
pub struct Cluster {
    machines: Vec<Machine>,
    vms: BTreeMap<VmId, Vm>,
    coordinator: Coordinator,
    messages: VecDeque<Message>,
    /// Events in response to actions, delivered after all actions of a step.
    answers: VecDeque<(usize, Event)>,
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    timed: HashMap<u64, Timed>,
    /// The timer set last, of each kind: it replaces earlier ones.
    latest: HashMap<Timed, u64>,
    next_timer: u64,
    clock: Clock,
    /// Counts of migrations.
    pub moves: Moves,
    running: Option<(MigrationId, u64)>,
    dice: u64,
    /// Memory that VMs have left, with its contents, for later ones: allocating and filling pages took longer than the operations. All VMs
    /// have the same size.
    spare: Vec<MappedMemory>,
    /// Buffer for copying a VM's memory.
    bytes: Vec<u8>,
    outside: Option<Outside>,
    /// Since when a VM is suspended towards another one, nanoseconds; recorded for [`Cluster::peers_pauses`].
    held: Option<BTreeMap<(VmId, VmId), u64>>,
    peers: Vec<PeerPause>,
    draining: Vec<(usize, verbs::Drain)>,
}

/// A peer pause: how long a VM that stayed was suspended towards one that moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerPause {
    /// From its host's suspension to the resumption, nanoseconds.
    pub held_ns: u64,
    /// How long the other VM was suspended, nanoseconds.
    pub mover_ns: u64,
}

/// Source of the time of hosts, timers and pauses.
#[derive(Debug, Clone, Copy)]
enum Clock {
    /// Real time since this moment.
    Real(Instant),
    /// Simulated time: each turn takes `turn_ns`.
    Simulated { now_ns: u64, turn_ns: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Timed {
    Host(usize, nomad::Timer),
    Coordinator(coordinator::Timer),
    Copied(usize, MigrationId, VmId),
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Cluster").field("moves", &self.moves).finish_non_exhaustive()
    }
}

impl Cluster {
    /// `hosts` hosts, and VMs on them in turn, each connected with each other one by one queue pair.
    pub fn new(hosts: usize, vms: u32, seed: u64) -> Self {
        Self::make(hosts, vms, seed, None, false)
    }

    /// Records from now on how long VMs that stay are suspended, for [`Cluster::peers_pauses`].
    pub fn watch_peers(&mut self) {
        self.held.get_or_insert_default();
    }

    /// How long VMs that stayed were suspended towards one that moved alone.
    #[must_use]
    pub fn peers_pauses(&self) -> &[PeerPause] {
        &self.peers
    }

    /// From now on a turn takes `turn_ns` nanoseconds of simulated time, so that all migrations depend on the seed alone.
    pub fn simulate_time(&mut self, turn_ns: u64) {
        self.clock = Clock::Simulated { now_ns: self.now(), turn_ns };
    }

    fn now(&self) -> u64 {
        match self.clock {
            Clock::Real(started) => u64::try_from(started.elapsed().as_nanos()).unwrap() + 1,
            Clock::Simulated { now_ns, .. } => now_ns,
        }
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % sides
    }

    fn event(&mut self, index: usize, event: Event) {
        let mut actions = Vec::new();
        self.machines[index].nomad.step(event, &mut actions);
        for action in actions {
            self.act(index, action);
        }
    }

    fn timer(&mut self, after_ms: u64, what: Timed) {
        self.next_timer += 1;
        self.timers.push(Reverse((self.now() + after_ms * 1_000_000, self.next_timer)));
        if let Some(before) = self.latest.insert(what, self.next_timer) {
            self.timed.remove(&before);
        }
        self.timed.insert(self.next_timer, what);
    }

    fn deliver(&mut self) {
        loop {
            if let Some((index, event)) = self.answers.pop_front() {
                self.event(index, event);
                continue;
            }
            let Some(message) = self.messages.pop_front() else { return };
            match message.to {
                Node::Coordinator => self.coordinate(coordinator::Event::Message(message)),
                Node::Host(host) => self.event(host.0 as usize - 1, Event::Message(message)),
            }
        }
    }

    fn coordinate(&mut self, event: coordinator::Event) {
        let mut actions = Vec::new();
        self.coordinator.step(event, &mut actions);
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<coordinator::Action>) {
        for action in actions {
            match action {
                coordinator::Action::Write(_) | coordinator::Action::StageEntered { .. } => {}
                coordinator::Action::Send(message) => self.messages.push_back(message),
                coordinator::Action::Timer { timer, after_ms } => {
                    self.timer(u64::from(after_ms), Timed::Coordinator(timer));
                }
                coordinator::Action::Ended { decision, .. } => match decision {
                    Decision::Committed => self.moves.committed += 1,
                    Decision::Aborted => self.moves.aborted += 1,
                },
            }
        }
    }

    /// Requests a migration of one VM, of several, or an exchange of two; sometimes cancels it a moment later.
    fn begin_migration(&mut self) {
        let all: Vec<VmId> = self.vms.keys().copied().collect();
        let hosts = self.machines.len() as u64;
        let count = 1 + self.roll(all.len() as u64);
        let mut moves: BTreeMap<VmId, HostId> = BTreeMap::new();
        for _ in 0..count {
            let vm = all[usize::try_from(self.roll(all.len() as u64)).unwrap()];
            let to = usize::try_from(self.roll(hosts)).unwrap();
            if self.vms[&vm].on != to {
                moves.insert(vm, HostId(u32::try_from(to).unwrap() + 1));
            }
        }
        let moves: Vec<(VmId, HostId)> = moves.into_iter().collect();
        let mut actions = Vec::new();
        if let Ok(migration) = self.coordinator.migrate(&moves, &mut actions) {
            let cancel = if self.roll(8) == 0 { self.now() + self.roll(400) * 1_000 } else { u64::MAX };
            self.running = Some((migration, cancel));
        }
        self.carry_out(actions);
    }

    /// A turn of all hosts.
    fn turn(&mut self, most: u64) {
        if let Clock::Simulated { now_ns, turn_ns } = &mut self.clock {
            *now_ns += *turn_ns;
        }
        for index in 0..self.machines.len() {
            let now = self.now();
            let machine = &mut self.machines[index];
            machine.host.now = now;
            machine.transports.receive(&mut machine.host.engine, now);
            let uars = self.vms.iter().filter(|(_, vm)| vm.on == index && vm.running);
            machine.host.turn(uars.map(|(_, vm)| (vm.guest.id, &vm.guest.uar)));
            machine.host.now = now;
            machine.transports.carry(&mut machine.host.engine, now);
        }
        let places: BTreeMap<VmId, usize> = self.vms.iter().map(|(vm, found)| (*vm, found.on)).collect();
        for vm in self.vms.values_mut().filter(|vm| vm.running) {
            while let Some(entry) = vm.guest.take(&vm.cq) {
                let qp = u32::try_from(entry.qp.get()).unwrap();
                let (peer, end) = vm.ends.iter_mut().find(|(_, end)| end.qp.handle == qp).unwrap();
                end.complete(&vm.guest, entry.wr_id.get(), entry.opcode.get(), entry.status.get());
                if places.get(peer) == Some(&vm.on) {
                    self.moves.local += 1;
                } else {
                    self.moves.remote += 1;
                }
            }
            for end in vm.ends.values_mut() {
                end.post(&vm.guest, most);
            }
        }
        self.turn_outside(most);
        self.look_at_draining();
        let now = self.now();
        while let Some(&Reverse((at, number))) = self.timers.peek() {
            if at > now {
                break;
            }
            self.timers.pop();
            let timed = self.timed.remove(&number);
            if let Some(timed) = &timed {
                self.latest.remove(timed);
            }
            match timed {
                Some(Timed::Host(index, timer)) if self.machines[index].nomad.awaits(timer) => {
                    self.event(index, Event::Timer(timer));
                }
                Some(Timed::Coordinator(timer)) if self.coordinator.awaits(timer) => {
                    self.coordinate(coordinator::Event::Timer(timer));
                }
                Some(Timed::Copied(index, migration, vm)) => {
                    let copies = self.machines[index].leaving.get(&vm);
                    if copies.is_some_and(|(of, ..)| *of == migration) {
                        // Objects that changed during the first round.
                        self.round(index, vm);
                        self.event(index, Event::Converged { migration, vm });
                    }
                }
                // It is obsolete.
                Some(Timed::Host(..) | Timed::Coordinator(_)) | None => {}
            }
        }
        if let Some((migration, cancel)) = self.running
            && now >= cancel
        {
            self.running = Some((migration, u64::MAX));
            let mut actions = Vec::new();
            self.coordinator.cancel(migration, &mut actions);
            self.carry_out(actions);
        }
        self.deliver();
    }

    /// Runs until each direction of each connection has done `operations`, with a migration at a given interval of nanoseconds. Calls
    /// `seen` from time to time with the number done.
    ///
    /// # Errors
    /// When there was no progress for half a minute, or something is wrong.
    pub fn run_until(
        &mut self,
        operations: u64,
        every_ns: u64,
        mut seen: impl FnMut(u64, &Moves),
    ) -> Result<Verdict, String> {
        let mut next_migration = self.now() + every_ns;
        let (mut last_done, mut last_progress) = (0, self.now());
        let mut turns = 0u64;
        loop {
            self.turn(operations);
            turns += 1;
            let now = self.now();
            if now >= next_migration {
                self.begin_migration();
                self.deliver();
                next_migration = now + every_ns;
            }
            if !turns.is_multiple_of(256) {
                continue;
            }
            let done: u64 = self.ends().map(|end| end.completed()).sum();
            seen(done, &self.moves);
            let verdict = self.verdict();
            if !verdict.is_clean() {
                return Err(format!("{verdict:?} after {:?}", self.moves));
            }
            if self.ends().all(|end| end.completed() >= operations) && self.is_quiet() {
                break;
            }
            if done > last_done {
                (last_done, last_progress) = (done, now);
            } else if now - last_progress > 30_000_000_000 {
                return Err(format!("nothing has moved for 30 s: {}", self.describe()));
            }
        }
        for vm in self.vms.values_mut() {
            for end in vm.ends.values_mut() {
                end.check_words(&vm.guest, operations);
            }
        }
        if let Some(outside) = &mut self.outside {
            outside.check_words(operations);
        }
        let verdict = self.verdict();
        if verdict.is_clean() { Ok(verdict) } else { Err(format!("{verdict:?} after {:?}", self.moves)) }
    }

    fn ends(&self) -> impl Iterator<Item = &End> {
        let outside = self.outside.iter().flat_map(|outside| outside.ends.values());
        self.vms.values().flat_map(|vm| vm.ends.values()).chain(outside)
    }

    fn verdict(&self) -> Verdict {
        let mut sum = Verdict::default();
        for end in self.ends() {
            sum.add(&end.verdict);
        }
        sum
    }

    /// Whether no VM is suspended.
    fn is_quiet(&self) -> bool {
        self.vms.values().all(|vm| vm.running)
    }

    fn describe(&self) -> String {
        let stuck: BTreeSet<String> = self
            .vms
            .iter()
            .flat_map(|(vm, found)| {
                found.ends.iter().map(move |(peer, end)| {
                    let on = found.on + 1;
                    format!(
                        "VM {} on {on} to {}: {} done, runs {}",
                        vm.0,
                        peer.0,
                        end.completed(),
                        found.running
                    )
                })
            })
            .collect();
        format!("{stuck:?}, {:?}, {:?}", self.moves, self.running)
    }

    /// State and number of each queue pair after all migrations, as the guests' drivers query them.
    pub fn states(&mut self) -> Vec<(u32, u32)> {
        let mut states = Vec::new();
        for vm in self.vms.values_mut() {
            let machine = &mut self.machines[vm.on];
            let qps: Vec<(u32, u32)> = vm.ends.values().map(|end| (end.qp.handle, end.qp.qpn)).collect();
            for (handle, qpn) in qps {
                let attributes = vm.guest.query(&mut machine.host, handle).unwrap();
                states.push((attributes.state.get(), qpn));
            }
        }
        states
    }
}
