//! The simulator, driven by recordings of live nodes. Each vCPU does what it did, when it did it. It does so later where the simulated
//! machine is slower than the live one. With links that are faster, adaptation so sees the same times.
//!
//! A recorded fault on a page to which the simulated node still has the rights waits until the page is revoked, as it was then. (A loop
//! that reads a flag isn't in the trace, only its faults.) A fault that joined a pending request for the page doesn't wait. With faster
//! links the page is already there, and the live node sent no request for it either.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use dsm::config::{Config, ConfigError};
use dsm::event::{Action, Event, Fault};
use dsm::message::Message;
use dsm::names::{Access, Page, Vcpu};
use dsm::node::Node;
use dsm::operation::Operation;
use dsm::pages::Pages;
use dsm::trace::Entry;
use dsm::wire::{self, PAGE_SIZE};

/// Results of a replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Messages between nodes.
    pub messages: u64,
    /// Bytes of these messages.
    pub bytes: u64,
    /// Messages and bytes by kind.
    pub kinds: BTreeMap<&'static str, (u64, u64)>,
    /// Recorded events that were replayed.
    pub done: u64,
    /// Recorded events that couldn't be replayed, since the simulated machine took another course.
    pub skipped: u64,
    /// Events and messages that nodes refused.
    pub refused: u64,
}

impl Replayed {
    /// Counts a sent message.
    pub(super) fn count(&mut self, message: &Message) {
        let bytes = wire::encoded_len(message) as u64;
        self.messages += 1;
        self.bytes += bytes;
        let kind = self.kinds.entry(message.body.name()).or_default();
        *kind = (kind.0 + 1, kind.1 + bytes);
    }
}

/// Memory of a node, which changes as the live guest changed it.
#[derive(Default)]
pub(super) struct Memory {
    content: HashMap<Page, Box<[u8; PAGE_SIZE]>>,
    /// Number of reads of each page by the protocol.
    readings: HashMap<Page, u64>,
    /// Changes by the guest, with the number of the read that found them.
    changes: HashMap<Page, VecDeque<(u64, Changes)>>,
}

/// Offsets and bytes.
pub(super) type Changes = Vec<(u16, Vec<u8>)>;

impl Memory {
    /// Adds changes that the guest makes before a read. Calls for a page must come in the order of reads.
    pub(super) fn will_change(&mut self, page: Page, reading: u64, changes: Changes) {
        self.changes.entry(page).or_default().push_back((reading, changes));
    }

    fn page(&mut self, page: Page) -> &mut [u8; PAGE_SIZE] {
        self.content.entry(page).or_insert_with(|| Box::new([0; PAGE_SIZE]))
    }

    fn put(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        if let Some(into) = self.page(page).get_mut(offset..offset + bytes.len()) {
            into.copy_from_slice(bytes);
        }
    }
}

/// Memory for a node. A read applies the guest's stores, so it needs interior mutability.
pub(super) struct Shared<'a>(pub(super) &'a RefCell<Memory>);

impl Pages for Shared<'_> {
    fn size(&self) -> usize {
        PAGE_SIZE
    }

    fn read(&self, page: Page, into: &mut Vec<u8>) {
        let mut memory = self.0.borrow_mut();
        let reading = memory.readings.entry(page).or_default();
        *reading += 1;
        let now = *reading;
        while let Some(queue) = memory.changes.get_mut(&page)
            && queue.front().is_some_and(|(reading, _)| *reading <= now)
            && let Some((_, changes)) = queue.pop_front()
        {
            for (offset, bytes) in changes {
                memory.put(page, offset.into(), &bytes);
            }
        }
        into.clear();
        into.extend_from_slice(memory.page(page));
    }

    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        self.0.borrow_mut().put(page, offset, bytes);
    }

    fn protect(&mut self, _: Page, _: Access) {}
}

/// A recorded event of a vCPU.
struct Item {
    /// When the live vCPU did it, ns.
    time: u64,
    event: Event,
    /// A fault that joined a pending request of the node for the page, so that the live node sent no request for it.
    joined: bool,
}

/// State of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// The next item has a time.
    Timed,
    /// The vCPU is stopped until the node resumes it.
    Waiting,
    /// The next item waits until the page is revoked.
    UntilGone(Page, Fault),
    /// No items are left.
    Ended,
}

struct Cpu {
    items: VecDeque<Item>,
    at: At,
    /// The page at which the vCPU's instruction is trapped.
    trapped: Option<Page>,
}

struct Host {
    node: Node,
    memory: RefCell<Memory>,
    cpus: BTreeMap<Vcpu, Cpu>,
    timer: Option<u64>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Arrive(usize, u64),
    Next(usize, Vcpu),
    Timer(usize),
}

struct Machine {
    hosts: Vec<Host>,
    queue: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    order: u64,
    flying: HashMap<u64, Message>,
    latency_ns: u64,
    result: Replayed,
}

/// Replays the traces of all nodes, one for each, over links with a latency of `latency_ns`.
///
/// # Errors
/// See [`Config::check`].
pub fn replay(nodes: Vec<(Config, Vec<Entry>)>, latency_ns: u64) -> Result<Replayed, ConfigError> {
    let mut machine = Machine {
        hosts: Vec::new(),
        queue: BinaryHeap::new(),
        order: 0,
        flying: HashMap::new(),
        latency_ns,
        result: Replayed::default(),
    };
    let first = nodes.iter().flat_map(|(_, entries)| entries).filter_map(time).min().unwrap_or(0);
    for (config, entries) in nodes {
        machine.hosts.push(host(config, entries, first)?);
    }
    for host in 0..machine.hosts.len() {
        let cpus: Vec<Vcpu> = machine.hosts[host].cpus.keys().copied().collect();
        for vcpu in cpus {
            machine.schedule(host, vcpu, 0);
        }
    }
    machine.run();
    Ok(machine.result)
}

fn time(entry: &Entry) -> Option<u64> {
    match entry {
        Entry::Event { at, .. } | Entry::Go { at, .. } => Some(*at),
        Entry::Content { .. } | Entry::Arrived { .. } | Entry::Timer { .. } => None,
    }
}

/// A node with the items of its vCPUs. Times are relative to `first`.
fn host(config: Config, entries: Vec<Entry>, first: u64) -> Result<Host, ConfigError> {
    let mut memory = Memory::default();
    let mut cpus: BTreeMap<Vcpu, Cpu> = BTreeMap::new();
    let mut awaited: BTreeMap<Vcpu, (Page, Fault)> = BTreeMap::new();
    for entry in entries {
        match entry {
            Entry::Go { vcpu, .. } => {
                awaited.remove(&vcpu);
            }
            Entry::Content { page, reading, changes } => memory.will_change(page, reading, changes),
            // The replay has links and deadlines of its own.
            Entry::Arrived { .. } | Entry::Timer { .. } => {}
            Entry::Event { at, event } => {
                let vcpu = match &event {
                    Event::Fault { vcpu, .. } | Event::Operate { vcpu, .. } | Event::Retired { vcpu } => {
                        *vcpu
                    }
                    // Requests of the monitor aren't of one vCPU: the first one replays them.
                    _ => 0,
                };
                let mut joined = false;
                if let Event::Fault { page, fault, .. } = event {
                    let covers = |other: &(Page, Fault)| {
                        other.0 == page && (other.1 == Fault::Write || fault == Fault::Read)
                    };
                    joined = awaited.values().any(covers);
                    awaited.insert(vcpu, (page, fault));
                }
                let none = || Cpu { items: VecDeque::new(), at: At::Ended, trapped: None };
                let time = at.saturating_sub(first);
                cpus.entry(vcpu).or_insert_with(none).items.push_back(Item { time, event, joined });
            }
        }
    }
    Ok(Host { node: Node::new(config)?, memory: RefCell::new(memory), cpus, timer: None })
}

impl Machine {
    fn push(&mut self, time: u64, what: Happening) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order, what)));
    }

    /// Sets the time of a vCPU's next item.
    fn schedule(&mut self, host: usize, vcpu: Vcpu, now: u64) {
        let Some(cpu) = self.hosts[host].cpus.get_mut(&vcpu) else { return };
        let Some(item) = cpu.items.front() else {
            cpu.at = At::Ended;
            return;
        };
        cpu.at = At::Timed;
        let time = now.max(item.time);
        self.push(time, Happening::Next(host, vcpu));
    }

    fn run(&mut self) {
        let mut now = 0;
        loop {
            let Some(Reverse((time, _, what))) = self.queue.pop() else {
                // All vCPUs wait for events that don't happen: the machine took another course than the live one.
                if self.skip_one(now) {
                    continue;
                }
                break;
            };
            now = time;
            match what {
                Happening::Arrive(host, id) => {
                    if let Some(message) = self.flying.remove(&id) {
                        self.step(host, Event::Message(message), now);
                    }
                }
                Happening::Next(host, vcpu) => self.next(host, vcpu, now),
                Happening::Timer(host) => {
                    if self.hosts[host].timer == Some(now) {
                        self.hosts[host].timer = None;
                        self.step(host, Event::Timer, now);
                    }
                }
            }
        }
        self.result.refused = self.hosts.iter().map(|host| host.node.counters().refused).sum();
    }

    /// Drops one item. Returns false if there is none.
    fn skip_one(&mut self, now: u64) -> bool {
        for index in 0..self.hosts.len() {
            let cpus = &mut self.hosts[index].cpus;
            let found = cpus.iter_mut().find(|(_, cpu)| cpu.at != At::Ended);
            if let Some((&vcpu, cpu)) = found {
                // A vCPU that waits for `Resume` has no item in progress: it stops waiting instead.
                if cpu.at != At::Waiting {
                    cpu.items.pop_front();
                }
                self.result.skipped += 1;
                self.schedule(index, vcpu, now);
                return true;
            }
        }
        false
    }

    fn allows(&self, host: usize, page: Page, fault: Fault) -> bool {
        let access = self.hosts[host].node.access(page);
        access == Access::Write || (access == Access::Read && fault == Fault::Read)
    }

    /// A vCPU replays its next item, if it can.
    fn next(&mut self, host: usize, vcpu: Vcpu, now: u64) {
        let Some(cpu) = self.hosts[host].cpus.get_mut(&vcpu) else { return };
        if cpu.at != At::Timed {
            return;
        }
        let joined = cpu.items.front().is_some_and(|item| item.joined);
        match cpu.items.front().map(|item| &item.event) {
            Some(Event::Fault { page, fault, .. }) => {
                let (page, fault) = (*page, *fault);
                if self.allows(host, page, fault) {
                    if joined {
                        // The live vCPU waited for the page in flight; here the page arrived earlier.
                        self.result.done += 1;
                        self.pop(host, vcpu);
                        self.schedule(host, vcpu, now);
                        return;
                    }
                    self.set(host, vcpu, At::UntilGone(page, fault));
                    return;
                }
            }
            Some(Event::Operate { page, .. }) if cpu.trapped != Some(*page) => {
                // The instruction wasn't trapped here: it ran in the guest.
                self.result.skipped += 1;
                self.pop(host, vcpu);
                self.schedule(host, vcpu, now);
                return;
            }
            _ => {}
        }
        let Some(event) = self.pop(host, vcpu) else { return };
        self.result.done += 1;
        let waits = matches!(event, Event::Fault { .. } | Event::Operate { .. });
        if waits {
            self.set(host, vcpu, At::Waiting);
        }
        self.step(host, event, now);
        if !waits {
            self.schedule(host, vcpu, now);
        }
    }

    fn pop(&mut self, host: usize, vcpu: Vcpu) -> Option<Event> {
        Some(self.hosts[host].cpus.get_mut(&vcpu)?.items.pop_front()?.event)
    }

    fn set(&mut self, host: usize, vcpu: Vcpu, at: At) {
        if let Some(cpu) = self.hosts[host].cpus.get_mut(&vcpu) {
            cpu.at = at;
        }
    }

    /// An instruction is trapped. A recorded operation follows at its time. Without one, an operation that changes nothing follows at once.
    fn trap(&mut self, host: usize, vcpu: Vcpu, page: Page, now: u64) -> Option<Event> {
        let cpu = self.hosts[host].cpus.get_mut(&vcpu)?;
        // `Retired` of an earlier instruction may come before the operation.
        let recorded = cpu
            .items
            .iter()
            .take(2)
            .any(|item| matches!(&item.event, Event::Operate { page: other, .. } if *other == page));
        if recorded {
            cpu.trapped = Some(page);
            self.schedule(host, vcpu, now);
            return None;
        }
        self.result.skipped += 1;
        let bytes = self.hosts[host].memory.borrow_mut().page(page)[..8].to_vec();
        Some(Event::Operate { vcpu, page, operation: Operation::store(0, &bytes) })
    }

    fn step(&mut self, index: usize, event: Event, now: u64) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let host = &mut self.hosts[index];
            let mut actions = Vec::new();
            host.node.step(event, now, &mut Shared(&host.memory), &mut actions);
            for action in actions {
                match action {
                    Action::Send(message) => self.send(message, now),
                    Action::Resume { vcpu } | Action::Completed { vcpu, .. } => {
                        if let Some(cpu) = self.hosts[index].cpus.get_mut(&vcpu) {
                            cpu.trapped = None;
                        }
                        self.schedule(index, vcpu, now);
                    }
                    Action::Trap { vcpu, page } => events.extend(self.trap(index, vcpu, page, now)),
                    Action::Kick { vcpu } => events.push_back(Event::Retired { vcpu }),
                    Action::Wounded { .. } => {}
                }
            }
        }
        let gone: Vec<Vcpu> = self.hosts[index]
            .cpus
            .iter()
            .filter_map(|(vcpu, cpu)| match cpu.at {
                At::UntilGone(page, fault) if !self.allows(index, page, fault) => Some(*vcpu),
                _ => None,
            })
            .collect();
        for vcpu in gone {
            self.set(index, vcpu, At::Timed);
            self.push(now, Happening::Next(index, vcpu));
        }
        let host = &mut self.hosts[index];
        let deadline = host.node.deadline().map(|deadline| deadline.max(now + 1));
        if let Some(deadline) = deadline
            && host.timer.is_none_or(|timer| deadline < timer)
        {
            host.timer = Some(deadline);
            self.push(deadline, Happening::Timer(index));
        }
    }

    fn send(&mut self, message: Message, now: u64) {
        self.result.count(&message);
        let (to, id) = (message.to.index(), self.order);
        self.flying.insert(id, message);
        self.push(now + self.latency_ns, Happening::Arrive(to, id));
    }
}
