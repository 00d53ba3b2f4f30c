//! A discrete-event simulator of 1 to 64 nodes that run the protocol, with real messages and contents, and simulated time.
//!
//! Time is in whole ns, and the same seed gives the same run. Each host has one vCPU, which runs a [`Program`], one protocol thread and one
//! link. Programs load from the contents that the protocol has delivered, and check them.

pub mod costs;
pub mod programs;
pub mod replay;
pub mod retrace;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use dsm::config::{Config, ConfigError};
use dsm::counters::Counters;
use dsm::event::{Action, Event, Fault};
use dsm::message::{Body, Message};
use dsm::names::{Access, Page};
use dsm::node::Node;
use dsm::operation::{Atomic, Operation};
use dsm::pages::Pages;
use dsm::wire::PAGE_SIZE;

use costs::{Costs, Preset};
use programs::{Op, Pattern, Program};

/// Parameters of a run.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Policy and costs.
    pub preset: Preset,
    /// The pattern of sharing.
    pub pattern: Pattern,
    /// Number of nodes, with one vCPU each.
    pub nodes: u8,
    /// Rounds of each program.
    pub rounds: u64,
    /// Rounds that aren't counted, in which pages find their modes.
    pub warm_up: u64,
    /// Time of a round of a program, ns.
    pub pace_ns: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Results of a run, without the warm-up.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Events that the pattern counts.
    pub events: u64,
    /// Messages between nodes.
    pub messages: u64,
    /// Bytes of these messages.
    pub bytes: u64,
    /// Messages and bytes by kind.
    pub kinds: BTreeMap<&'static str, (u64, u64)>,
    /// Grants with the whole content of a page.
    pub pages_moved: u64,
    /// Loads that stalled, and the sum of their stalls, ns.
    pub load_stalls: (u64, u64),
    /// Stores and atomics that stalled, and the sum of their stalls, ns.
    pub store_stalls: (u64, u64),
    /// Loads that waited for another node.
    pub remote_loads: u64,
    /// Simulated time, ns.
    pub time_ns: u64,
    /// Sum of all nodes' counters, warm-up included.
    pub counters: Counters,
    /// The first failure that a program or the simulator found.
    pub fault: Option<String>,
}

impl Report {
    /// `value` per event of the pattern; 0 without events.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    pub fn per_event(&self, value: u64) -> f64 {
        if self.events == 0 { 0.0 } else { value as f64 / self.events as f64 }
    }
}

#[derive(Debug, Default)]
struct Memory {
    content: HashMap<Page, Box<[u8; PAGE_SIZE]>>,
    access: HashMap<Page, Access>,
    /// The page whose next change ends a wait, and whether it changed.
    watched: Option<Page>,
    touched: bool,
}

impl Memory {
    fn word(&self, page: Page, offset: u16) -> u64 {
        let offset = usize::from(offset);
        let bytes = self.content.get(&page).and_then(|content| content.get(offset..offset + 8));
        bytes.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    }
}

impl Pages for Memory {
    fn size(&self) -> usize {
        PAGE_SIZE
    }

    fn read(&self, page: Page, into: &mut Vec<u8>) {
        into.clear();
        match self.content.get(&page) {
            Some(content) => into.extend_from_slice(content.as_slice()),
            None => into.resize(PAGE_SIZE, 0),
        }
    }

    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        self.touched |= self.watched == Some(page);
        let content = self.content.entry(page).or_insert_with(|| Box::new([0; PAGE_SIZE]));
        if let Some(into) = content.get_mut(offset..offset + bytes.len()) {
            into.copy_from_slice(bytes);
        }
    }

    fn protect(&mut self, page: Page, access: Access) {
        self.touched |= self.watched == Some(page);
        self.access.insert(page, access);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Doing {
    Running,
    Waiting,
    Ended,
}

struct Host {
    node: Node,
    memory: Memory,
    program: Program,
    doing: Doing,
    /// The present operation, and since when it stalls, ns.
    op: Op,
    since: Option<u64>,
    remote: bool,
    last: u64,
    /// A granted instruction has retired that the node doesn't know of.
    unreported: bool,
    granted: bool,
    kicked: bool,
    busy_until: u64,
    link_free: u64,
    /// When the timer expires, ns.
    timer: Option<u64>,
    events: u64,
    inbox: VecDeque<(Event, usize)>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A vCPU continues.
    Go(usize),
    /// A vCPU's fault has reached the protocol.
    Faulted(usize, Fault),
    /// A trapped instruction is decoded.
    Decoded(usize),
    /// A message arrives.
    Arrive(usize, u64),
    /// The protocol's thread handles its next event.
    Handle(usize),
    /// A vCPU has left the guest.
    Kicked(usize),
    /// A timer expires.
    Timer(usize),
}

struct Machine {
    costs: Costs,
    hosts: Vec<Host>,
    queue: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    order: u64,
    flying: HashMap<u64, Message>,
    report: Report,
    counting: bool,
    warm: u64,
    started: u64,
}

/// Limit of simulated events per run. More mean that the run doesn't end.
const MAX_RUN_EVENTS: u64 = 200_000_000;

/// Simulates a run.
///
/// # Errors
/// See [`Config::check`].
pub fn run(run: &Run) -> Result<Report, ConfigError> {
    let mut hosts = Vec::new();
    for me in 0..run.nodes {
        let config = Config { stride: 1, ..Config::new(me, run.nodes, run.preset.policy) };
        let program = Program::new(run.pattern, me, run.nodes, run.rounds, run.pace_ns, run.seed);
        hosts.push(Host {
            node: Node::new(config)?,
            memory: Memory::default(),
            program,
            doing: Doing::Running,
            op: Op::Compute(0),
            since: None,
            remote: false,
            last: 0,
            unreported: false,
            granted: false,
            kicked: false,
            busy_until: 0,
            link_free: 0,
            timer: None,
            events: 0,
            inbox: VecDeque::new(),
        });
    }
    let mut machine = Machine {
        costs: run.preset.costs,
        hosts,
        queue: BinaryHeap::new(),
        order: 0,
        flying: HashMap::new(),
        report: Report::default(),
        counting: run.warm_up == 0,
        warm: run.warm_up,
        started: 0,
    };
    for host in 0..machine.hosts.len() {
        machine.at(0, Happening::Go(host));
    }
    machine.run();
    Ok(machine.report)
}

impl Machine {
    fn at(&mut self, time: u64, what: Happening) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order, what)));
    }

    fn run(&mut self) {
        let mut now = 0;
        let mut count = 0;
        while let Some(Reverse((time, _, what))) = self.queue.pop() {
            now = time;
            count += 1;
            if count > MAX_RUN_EVENTS {
                self.report.fault = Some("the run doesn't end".to_owned());
                break;
            }
            match what {
                Happening::Go(host) => self.go(host, now),
                Happening::Faulted(host, fault) => {
                    let page = page_of(self.hosts[host].op);
                    if std::mem::take(&mut self.hosts[host].unreported) {
                        self.enqueue(host, Event::Retired { vcpu: 0 }, 0, now);
                    }
                    self.enqueue(host, Event::Fault { vcpu: 0, page, fault }, 0, now);
                }
                Happening::Decoded(host) => self.decoded(host, now),
                Happening::Arrive(host, id) => {
                    if let Some(message) = self.flying.remove(&id) {
                        let bytes = self.costs.bytes(&message);
                        self.enqueue(host, Event::Message(message), bytes, now);
                    }
                }
                Happening::Handle(host) => self.handle(host, now),
                Happening::Kicked(host) => {
                    if std::mem::take(&mut self.hosts[host].unreported) {
                        self.enqueue(host, Event::Retired { vcpu: 0 }, 0, now);
                    } else {
                        self.hosts[host].kicked = true;
                    }
                }
                Happening::Timer(host) => {
                    if self.hosts[host].timer == Some(now) {
                        self.hosts[host].timer = None;
                        self.enqueue(host, Event::Timer, 0, now);
                    }
                }
            }
        }
        self.report.time_ns = now - self.started;
        for host in &self.hosts {
            self.report.counters.add(host.node.counters());
            let unended = host.doing != Doing::Ended;
            let fault = host.program.fault.clone();
            let fault = fault.or(unended.then(|| "a virtual CPU waits for ever".to_owned()));
            if self.report.fault.is_none() {
                self.report.fault = fault;
            }
        }
        if self.report.counters.refused > 0 {
            self.report.fault.get_or_insert("a node refused an event of correct nodes".to_owned());
        }
    }

    /// Queues an event for the protocol's thread of a host.
    fn enqueue(&mut self, host: usize, event: Event, bytes: usize, now: u64) {
        let at = self.hosts[host].busy_until.max(now) + self.costs.handling_ns(bytes);
        self.hosts[host].busy_until = at;
        self.hosts[host].inbox.push_back((event, bytes));
        self.at(at, Happening::Handle(host));
    }

    fn handle(&mut self, index: usize, now: u64) {
        let host = &mut self.hosts[index];
        let Some((event, _)) = host.inbox.pop_front() else { return };
        let mut actions = Vec::new();
        host.node.step(event, now, &mut host.memory, &mut actions);
        for action in actions {
            match action {
                Action::Send(message) => self.send(index, message, now),
                Action::Resume { .. } => {
                    self.hosts[index].granted = true;
                    self.at(now + self.costs.resume_ns, Happening::Go(index));
                }
                Action::Trap { .. } => self.at(now + self.costs.trap_ns, Happening::Decoded(index)),
                Action::Completed { old, .. } => {
                    self.hosts[index].last = old;
                    self.hosts[index].granted = false;
                    self.hosts[index].kicked = false;
                    self.retire(index, now + self.costs.resume_ns);
                }
                Action::Kick { .. } => self.at(now + self.costs.kick_ns, Happening::Kicked(index)),
                Action::Wounded { .. } => {}
            }
        }
        let memory = &mut self.hosts[index].memory;
        if std::mem::take(&mut memory.touched) {
            memory.watched = None;
            self.at(now + self.costs.access_ns, Happening::Go(index));
        }
        let deadline = self.hosts[index].node.deadline().map(|deadline| deadline.max(now + 1));
        if let Some(deadline) = deadline
            && self.hosts[index].timer.is_none_or(|timer| deadline < timer)
        {
            self.hosts[index].timer = Some(deadline);
            self.at(deadline, Happening::Timer(index));
        }
    }

    fn send(&mut self, index: usize, message: Message, now: u64) {
        let bytes = self.costs.bytes(&message);
        if self.counting {
            self.report.messages += 1;
            self.report.bytes += bytes as u64;
            let kind = self.report.kinds.entry(message.body.name()).or_default();
            *kind = (kind.0 + 1, kind.1 + bytes as u64);
            let whole = matches!(&message.body, Body::Grant(grant) if grant.payload.wire_len() >= PAGE_SIZE);
            self.report.pages_moved += u64::from(whole);
        }
        if matches!(message.body, Body::Request(_)) {
            self.hosts[index].remote = true;
        }
        let to = message.to.index();
        let depart = self.hosts[index].link_free.max(now) + self.costs.sending_ns(bytes);
        self.hosts[index].link_free = depart;
        let id = self.order;
        self.flying.insert(id, message);
        self.at(depart + self.costs.latency_ns, Happening::Arrive(to, id));
    }

    /// A vCPU executes its operation, if its rights allow it.
    fn go(&mut self, index: usize, now: u64) {
        let host = &mut self.hosts[index];
        if host.doing == Doing::Ended {
            return;
        }
        host.doing = Doing::Running;
        let access = |page: Page| host.memory.access.get(&page).copied().unwrap_or_default();
        let (fits, fault) = match host.op {
            Op::Load(page, _) | Op::Wait(page, ..) => (access(page) >= Access::Read, Fault::Read),
            Op::Store(page, ..) => (access(page) == Access::Write, Fault::Write),
            Op::Add(page, ..) => (access(page) == Access::Write, Fault::Atomic),
            Op::Compute(_) | Op::Event | Op::End => (true, Fault::Read),
        };
        if !fits {
            host.doing = Doing::Waiting;
            if host.since.is_none() {
                host.remote = false;
            }
            host.since.get_or_insert(now);
            self.at(now + self.costs.fault_ns, Happening::Faulted(index, fault));
            return;
        }
        match host.op {
            Op::Load(page, offset) => host.last = host.memory.word(page, offset),
            Op::Wait(page, offset, least) => {
                host.last = host.memory.word(page, offset);
                if host.last < least {
                    // The vCPU spins. Its loads retire, and return another value only when the page changes.
                    (host.memory.watched, host.memory.touched) = (Some(page), false);
                    host.doing = Doing::Waiting;
                    self.account(index, now);
                    return;
                }
            }
            Op::Store(page, offset, value) => {
                host.memory.write(page, offset.into(), &value.to_le_bytes());
            }
            Op::Add(page, offset, value) => {
                host.last = host.memory.word(page, offset);
                let new = host.last.wrapping_add(value);
                host.memory.write(page, offset.into(), &new.to_le_bytes());
            }
            Op::Compute(_) | Op::Event | Op::End => {}
        }
        self.retire(index, now);
    }

    /// Counts the stall of a retired instruction, and reports the instruction if the node has asked.
    fn account(&mut self, index: usize, now: u64) {
        let counting = self.counting;
        let host = &mut self.hosts[index];
        if let Some(since) = host.since.take()
            && counting
        {
            let stalls = match host.op {
                Op::Load(..) | Op::Wait(..) => &mut self.report.load_stalls,
                _ => &mut self.report.store_stalls,
            };
            stalls.0 += 1;
            stalls.1 += now.saturating_sub(since);
            let load = matches!(host.op, Op::Load(..) | Op::Wait(..));
            self.report.remote_loads += u64::from(host.remote && load);
        }
        host.unreported |= std::mem::take(&mut host.granted);
        if std::mem::take(&mut host.kicked) && std::mem::take(&mut host.unreported) {
            self.enqueue(index, Event::Retired { vcpu: 0 }, 0, now);
        }
    }

    /// Retires the instruction and starts the next one.
    fn retire(&mut self, index: usize, now: u64) {
        self.account(index, now);
        let counting = self.counting;
        let host = &mut self.hosts[index];
        let last = host.last;
        host.op = host.program.next(last);
        host.doing = Doing::Running;
        let mut after = self.costs.access_ns;
        match host.op {
            Op::Compute(time) => after = time,
            Op::Event => {
                host.events += 1;
                if counting {
                    self.report.events += 1;
                } else if self.hosts.iter().any(|host| host.events >= self.warm) {
                    self.counting = true;
                    self.started = now;
                }
            }
            Op::End => {
                host.doing = Doing::Ended;
                // The vCPU may hold pages that other nodes wait for.
                self.enqueue(index, Event::Retired { vcpu: 0 }, 0, now);
                return;
            }
            _ => {}
        }
        self.at(now + after, Happening::Go(index));
    }

    fn decoded(&mut self, index: usize, now: u64) {
        let (page, operation) = match self.hosts[index].op {
            Op::Store(page, offset, value) => (page, Operation::store(offset, &value.to_le_bytes())),
            Op::Add(page, offset, operand) => {
                (page, Operation::Atomic { offset, width: 8, kind: Atomic::Add, operand, expected: 0 })
            }
            other => {
                self.report.fault = Some(format!("{other:?} was trapped"));
                return;
            }
        };
        self.enqueue(index, Event::Operate { vcpu: 0, page, operation }, 0, now);
    }
}

const fn page_of(op: Op) -> Page {
    match op {
        Op::Load(page, _) | Op::Wait(page, ..) | Op::Store(page, ..) | Op::Add(page, ..) => page,
        Op::Compute(_) | Op::Event | Op::End => 0,
    }
}
