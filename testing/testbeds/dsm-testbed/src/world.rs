//! A whole machine, small enough to explore every order of its events: nodes, links, guest memories, vCPUs with store buffers.

mod check;
mod memory;
mod prefetch;
mod restart;

use std::collections::VecDeque;
use std::hash::Hash;

use dsm::config::{Config, Plant, Policy};
use dsm::event::{Action, Event, Fault};
use dsm::message::Message;
use dsm::names::{Access, Mode, NodeId, Page, Vcpu};
use dsm::node::Node;
use dsm::operation::{Atomic, Operation};

use crate::litmus::{Instruction, Litmus, Outcome, Var};
use memory::Memory;

/// Bytes of a page in the world.
pub const SIZE: usize = 2;
/// Pages of the world.
pub const PAGES: usize = 2;
/// Times that one vCPU may take pages from an instruction of another: with the instruction that was running when its node received the
/// other's age, and with the one before.
pub const WOUNDS_BY_EACH: usize = 2;
/// Grants for one instruction above which it makes no progress.
pub const MOST_GRANTS: u8 = 12;

/// Parameters of a world.
#[derive(Debug, Clone)]
pub struct Setup {
    /// One program per vCPU.
    pub litmus: Litmus,
    /// The node of each program.
    pub places: Vec<u8>,
    /// Number of nodes.
    pub nodes: u8,
    /// The policy of all nodes.
    pub policy: Policy,
    /// The injected bug.
    pub plant: Plant,
    /// vCPUs have store buffers.
    pub buffered: bool,
    /// The monitor reports a retired instruction only when a node kicks its vCPU, not with the vCPU's next fault.
    pub told_late: bool,
    /// Stores to write-update pages are emulated without a fault, as by a monitor that decodes further instructions after a trapped one.
    pub straight: bool,
    /// Pages that are write-update from the start.
    pub updates: Vec<u8>,
    /// How often each external event may happen.
    pub budget: Budget,
    /// Lead of each node over the others, by its clock and its ages; 0 for nodes that aren't listed.
    pub ahead: Vec<u64>,
}

/// Limits of external events, which may happen at any time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// A node discards a page.
    pub discards: u8,
    /// A page's mode changes.
    pub modes: u8,
    /// The sequencer's role moves.
    pub tokens: u8,
    /// All nodes are saved, while nothing is in flight, and restored.
    pub restarts: u8,
    /// A node prefetches a page.
    pub prefetches: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Doing {
    Running,
    /// Faulted and waiting.
    Stopped(u8, Fault),
    /// Trapped and not decoded.
    Trapped(u8),
    /// Its operation is in flight.
    Operating,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Cpu {
    at: usize,
    registers: Vec<u8>,
    doing: Doing,
    /// Pages granted to the present instruction, and whether to write.
    held: Vec<(u8, bool)>,
    grants: u8,
    /// Times that older instructions took pages from the present one.
    wounds: usize,
    /// An instruction has retired that the node doesn't know of.
    unreported: bool,
    kicked: bool,
}

/// A state of the whole machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    nodes: Vec<Node>,
    memories: Vec<Memory>,
    cpus: Vec<Cpu>,
    /// The page that the context of each node fetches.
    prefetched: Vec<Option<u8>>,
    /// Messages from each node to each node.
    links: Vec<VecDeque<Message>>,
    budget: Budget,
    /// The first failure.
    pub verdict: Option<String>,
}

/// An event that may happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A vCPU continues.
    Run(usize),
    /// A vCPU's oldest store reaches memory.
    Drain(usize),
    /// The next message of a link arrives.
    Deliver(usize),
    /// A node discards a page.
    Discard(usize, u8),
    /// Another mode is requested for a page.
    Advise(u8, Mode),
    /// The sequencer's role shall move to a node.
    MoveToken(u8),
    /// A node's timer expires.
    Timer(usize),
    /// All nodes are saved and restored.
    Restart,
    /// A node prefetches a page, to write it or only to read it.
    Prefetch(usize, u8, bool),
}

impl World {
    /// The initial state.
    ///
    /// # Panics
    /// If the setup is invalid. Only tests write setups.
    #[must_use]
    pub fn new(setup: &Setup) -> Self {
        let nodes = usize::from(setup.nodes);
        let vcpus = |node: usize| prefetch::vcpus(setup, node);
        let contexts = u16::from(setup.budget.prefetches > 0);
        let node = |me: u8| {
            let vcpus = u16::try_from(vcpus(me.into())).expect("few").saturating_add(contexts).max(1);
            let config = Config::new(me, setup.nodes, setup.policy);
            let mut node =
                Node::new(Config { vcpus, plant: setup.plant, ..config }).expect("a configuration");
            node.advance_clock(ahead(setup, me.into()));
            node
        };
        let memory = |node: usize| Memory {
            content: [[0; SIZE]; PAGES],
            access: [Access::None; PAGES],
            buffers: vec![VecDeque::new(); vcpus(node).max(1)],
            lowered: Vec::new(),
        };
        let cpu = Cpu {
            at: 0,
            registers: Vec::new(),
            doing: Doing::Running,
            held: Vec::new(),
            grants: 0,
            wounds: 0,
            unreported: false,
            kicked: false,
        };
        let mut world = Self {
            nodes: (0..setup.nodes).map(node).collect(),
            memories: (0..nodes).map(memory).collect(),
            cpus: vec![cpu; setup.places.len()],
            prefetched: vec![None; nodes],
            links: vec![VecDeque::new(); nodes * nodes],
            budget: setup.budget,
            verdict: None,
        };
        for page in &setup.updates {
            world.feed(setup, 0, Event::Advise { page: (*page).into(), mode: Mode::Update }, 0);
            while let Some(link) = (0..world.links.len()).find(|link| !world.links[*link].is_empty()) {
                world = world.after(setup, Step::Deliver(link)).expect("possible");
            }
        }
        world
    }

    /// Adds all events that may happen next to `steps`.
    pub fn steps(&self, setup: &Setup, steps: &mut Vec<Step>) {
        if self.verdict.is_some() {
            return;
        }
        for (cpu, state) in self.cpus.iter().enumerate() {
            let more = state.at < setup.litmus.programs[cpu].len();
            if matches!(state.doing, Doing::Trapped(_)) || (state.doing == Doing::Running && more) {
                steps.push(Step::Run(cpu));
            }
            let (node, vcpu) = place(setup, cpu);
            if !self.memories[node].buffers[vcpu].is_empty() {
                steps.push(Step::Drain(cpu));
            }
        }
        for (link, queue) in self.links.iter().enumerate() {
            if !queue.is_empty() {
                steps.push(Step::Deliver(link));
            }
        }
        for (node, state) in self.nodes.iter().enumerate() {
            if state.deadline().is_some() {
                steps.push(Step::Timer(node));
            }
        }
        // External events only happen while programs run that they can disturb.
        let open = self.cpus.iter().zip(&setup.litmus.programs).any(|(cpu, program)| cpu.at < program.len());
        if !open {
            return;
        }
        for page in 0..PAGES {
            let page = u8::try_from(page).unwrap_or(0);
            if self.budget.discards > 0 {
                steps.extend((0..self.nodes.len()).map(|node| Step::Discard(node, page)));
            }
            if self.budget.modes > 0 {
                steps.push(Step::Advise(page, Mode::Update));
                steps.push(Step::Advise(page, Mode::Invalidate));
            }
        }
        if self.budget.tokens > 0 {
            steps.extend((0..setup.nodes).map(Step::MoveToken));
        }
        if self.budget.prefetches > 0 {
            self.prefetches(steps);
        }
        if self.budget.restarts > 0 && self.is_quiet() {
            steps.push(Step::Restart);
        }
    }

    /// The world after a step; none if the step changes nothing.
    #[must_use]
    pub fn after(&self, setup: &Setup, step: Step) -> Option<Self> {
        let mut world = self.clone();
        match step {
            Step::Run(cpu) => world.run(setup, cpu),
            Step::Drain(cpu) => {
                let (node, vcpu) = place(setup, cpu);
                let (var, value) = world.memories[node].buffers[vcpu].pop_front()?;
                world.memories[node].put(var, value);
            }
            Step::Deliver(link) => {
                let message = world.links[link].pop_front()?;
                world.feed(setup, message.to.index(), Event::Message(message), 0);
            }
            Step::Timer(node) => {
                let at = world.nodes[node].deadline()?;
                world.feed(setup, node, Event::Timer, at);
            }
            Step::Discard(node, page) => {
                world.feed(setup, node, Event::Discard { page: page.into() }, 0);
                if world == *self {
                    return None;
                }
                world.budget.discards -= 1;
            }
            Step::Advise(page, mode) => {
                let home = usize::from(page) % world.nodes.len();
                world.feed(setup, home, Event::Advise { page: page.into(), mode }, 0);
                if world == *self {
                    return None;
                }
                world.budget.modes -= 1;
            }
            Step::MoveToken(to) => {
                let node = world.nodes.iter().position(Node::has_token)?;
                world.feed(setup, node, Event::MoveToken { to: NodeId(to) }, 0);
                if world == *self {
                    return None;
                }
                world.budget.tokens -= 1;
            }
            Step::Prefetch(node, page, write) => world.prefetch(setup, node, page, write),
            Step::Restart => {
                world.budget.restarts -= 1;
                world.restart();
            }
        }
        world.check(setup);
        Some(world)
    }

    /// A vCPU tries its next instruction.
    fn run(&mut self, setup: &Setup, cpu: usize) {
        let Some(instruction) = setup.litmus.programs[cpu].get(self.cpus[cpu].at).copied() else { return };
        let (node, vcpu) = place(setup, cpu);
        let trapped = match (self.cpus[cpu].doing, instruction) {
            (Doing::Trapped(page), _) => Some(page),
            // Once per instruction: if the mode changes meanwhile, the vCPU enters the guest again and faults there.
            (Doing::Running, Instruction::Store(var, _) | Instruction::Add(var, _))
                if setup.straight && self.cpus[cpu].grants == 0 =>
            {
                let page = usize::from(var.page);
                let kept = self.nodes[node].mode(page as Page).is_update();
                (kept && self.memories[node].access[page] == Access::Read).then(|| {
                    // The vCPU has left the guest, so its store buffer is empty.
                    self.memories[node].drain(vcpu);
                    var.page
                })
            }
            _ => None,
        };
        let readable = |var: Var| self.memories[node].access[usize::from(var.page)] >= Access::Read;
        let writable = |var: Var| self.memories[node].access[usize::from(var.page)] == Access::Write;
        // The right that the instruction lacks. A trapped one needs no right to write, only the right to load its source.
        let lacks = match instruction {
            Instruction::Load(var) => {
                (!self.forwards(node, vcpu, var) && !readable(var)).then_some((var, Fault::Read))
            }
            Instruction::Store(var, _) => (!writable(var)).then_some((var, Fault::Write)),
            Instruction::Add(var, _) => (!writable(var)).then_some((var, Fault::Atomic)),
            Instruction::Fence => None,
            Instruction::Copy(from, _) if !readable(from) => Some((from, Fault::Read)),
            Instruction::Copy(_, to) => (!writable(to)).then_some((to, Fault::Write)),
        };
        if let Some(page) = trapped
            && lacks.is_none_or(|(var, fault)| fault != Fault::Read && var.page == page)
        {
            let operation = match instruction {
                Instruction::Store(var, value) => Operation::store(var.offset.into(), &[value]),
                Instruction::Copy(from, to) => {
                    let value = self.memories[node].content[usize::from(from.page)][usize::from(from.offset)];
                    Operation::store(to.offset.into(), &[value])
                }
                Instruction::Add(var, value) => Operation::Atomic {
                    offset: var.offset.into(),
                    width: 1,
                    kind: Atomic::Add,
                    operand: value.into(),
                    expected: 0,
                },
                Instruction::Load(_) | Instruction::Fence => {
                    self.verdict = Some("a load was trapped".to_owned());
                    return;
                }
            };
            self.cpus[cpu].doing = Doing::Operating;
            let vcpu = vcpu_id(vcpu);
            let now = self.cpus[cpu].at as u64;
            self.feed(setup, node, Event::Operate { vcpu, page: page.into(), operation }, now);
            return;
        }
        if let Some((var, fault)) = lacks {
            // An exit from the guest drains the store buffer.
            self.memories[node].drain(vcpu);
            self.cpus[cpu].doing = Doing::Stopped(var.page, fault);
            if !setup.told_late && std::mem::take(&mut self.cpus[cpu].unreported) {
                self.feed(setup, node, Event::Retired { vcpu: vcpu_id(vcpu) }, 0);
            }
            let event = Event::Fault { vcpu: vcpu_id(vcpu), page: var.page.into(), fault };
            let now = self.cpus[cpu].at as u64;
            self.feed(setup, node, event, now);
            return;
        }
        match instruction {
            Instruction::Load(var) => {
                let value = self.loaded(node, vcpu, var);
                self.cpus[cpu].registers.push(value);
            }
            Instruction::Store(var, value) => self.store(setup, node, vcpu, var, value),
            Instruction::Fence => self.memories[node].drain(vcpu),
            Instruction::Add(var, value) => {
                self.memories[node].drain(vcpu);
                let old = self.loaded(node, vcpu, var);
                self.cpus[cpu].registers.push(old);
                self.memories[node].put(var, old.wrapping_add(value));
            }
            Instruction::Copy(from, to) => {
                let value = self.loaded(node, vcpu, from);
                self.store(setup, node, vcpu, to, value);
            }
        }
        self.retire(setup, cpu);
    }

    fn forwards(&self, node: usize, vcpu: usize, var: Var) -> bool {
        self.memories[node].buffers[vcpu].iter().any(|(other, _)| *other == var)
    }

    fn loaded(&self, node: usize, vcpu: usize, var: Var) -> u8 {
        let memory = &self.memories[node];
        let own = memory.buffers[vcpu].iter().rev().find(|(other, _)| *other == var);
        own.map_or(memory.content[usize::from(var.page)][usize::from(var.offset)], |(_, value)| *value)
    }

    fn store(&mut self, setup: &Setup, node: usize, vcpu: usize, var: Var, value: u8) {
        if setup.buffered {
            self.memories[node].buffers[vcpu].push_back((var, value));
        } else {
            self.memories[node].put(var, value);
        }
    }

    fn retire(&mut self, setup: &Setup, cpu: usize) {
        let state = &mut self.cpus[cpu];
        state.at += 1;
        state.doing = Doing::Running;
        state.held.clear();
        state.unreported |= state.grants > 0;
        (state.grants, state.wounds) = (0, 0);
        // The monitor reports to a node when it kicks, or with the next fault.
        if std::mem::take(&mut state.kicked) {
            self.report(setup, cpu);
        }
    }

    fn report(&mut self, setup: &Setup, cpu: usize) {
        let (node, vcpu) = place(setup, cpu);
        self.cpus[cpu].unreported = false;
        self.feed(setup, node, Event::Retired { vcpu: vcpu_id(vcpu) }, 0);
    }

    /// Passes an event to a node, and performs its actions.
    fn feed(&mut self, setup: &Setup, node: usize, event: Event, now: u64) {
        let now = now.saturating_add(ahead(setup, node));
        let mut actions = Vec::new();
        let refused = self.nodes[node].counters().refused;
        self.nodes[node].step(event, now, &mut self.memories[node], &mut actions);
        if self.nodes[node].counters().refused != refused {
            self.fail(format!("node {node} refused an event of correct nodes"));
        }
        let mut report = Vec::new();
        let mut ended = Vec::new();
        for action in actions {
            match action {
                Action::Resume { vcpu } | Action::Trap { vcpu, .. } | Action::Kick { vcpu }
                    if self.end_context(setup, node, vcpu, !ended.is_empty()) =>
                {
                    ended.push(vcpu);
                }
                // A context has only the page that it waits for.
                Action::Wounded { vcpu, .. } if usize::from(vcpu) == prefetch::vcpus(setup, node) => {}
                Action::Send(message) => {
                    let link = node * self.nodes.len() + message.to.index();
                    self.links[link].push_back(message);
                }
                Action::Resume { vcpu } => self.resume(cpu_at(setup, node, vcpu), None),
                Action::Trap { vcpu, page } => self.resume(cpu_at(setup, node, vcpu), Some(page)),
                Action::Completed { vcpu, old } => {
                    let cpu = cpu_at(setup, node, vcpu);
                    if self.cpus[cpu].doing != Doing::Operating {
                        self.fail(format!("vCPU {cpu} was completed without an operation"));
                    }
                    let at = self.cpus[cpu].at;
                    if matches!(setup.litmus.programs[cpu].get(at), Some(Instruction::Add(..))) {
                        self.cpus[cpu].registers.push(old.to_le_bytes()[0]);
                    }
                    // The node knows that this instruction has retired.
                    self.cpus[cpu].grants = 0;
                    self.cpus[cpu].kicked = false;
                    self.retire(setup, cpu);
                }
                Action::Kick { vcpu } => {
                    let cpu = cpu_at(setup, node, vcpu);
                    report.push(cpu);
                }
                Action::Wounded { vcpu, page } => {
                    let cpu = cpu_at(setup, node, vcpu);
                    self.cpus[cpu].held.retain(|(held, _)| Page::from(*held) != page);
                    self.cpus[cpu].wounds += 1;
                    let wounds = self.cpus[cpu].wounds;
                    let others = self.cpus.len() - 1 + usize::from(setup.budget.prefetches);
                    if wounds > WOUNDS_BY_EACH * others {
                        self.fail(format!(
                            "vCPU {cpu} lost pages {wounds} times in one instruction to {others} others"
                        ));
                    }
                }
            }
        }
        for (page, access) in std::mem::take(&mut self.memories[node].lowered) {
            let taken = |cpu: &Cpu| {
                cpu.held
                    .iter()
                    .any(|(held, write)| Page::from(*held) == page && (*write || access == Access::None))
            };
            let lost =
                (0..self.cpus.len()).find(|cpu| place(setup, *cpu).0 == node && taken(&self.cpus[*cpu]));
            if let Some(cpu) = lost {
                self.fail(format!("vCPU {cpu} lost page {page} before its instruction retired"));
            }
        }
        for vcpu in ended {
            self.feed(setup, node, Event::Retired { vcpu }, 0);
        }
        for cpu in report {
            // Pages of the present instruction may have arrived together with the kick. Then the monitor can report only when that
            // instruction has retired, too, since a report releases all pages.
            if self.cpus[cpu].unreported && self.cpus[cpu].held.is_empty() {
                self.report(setup, cpu);
            } else {
                self.cpus[cpu].kicked = true;
            }
        }
    }

    fn resume(&mut self, cpu: usize, trapped: Option<Page>) {
        let state = &mut self.cpus[cpu];
        if let (Doing::Stopped(page, fault), None) = (state.doing, trapped) {
            state.held.push((page, fault != Fault::Read));
        }
        state.grants += 1;
        let grants = state.grants;
        state.doing = match trapped {
            Some(page) => Doing::Trapped(u8::try_from(page).unwrap_or(u8::MAX)),
            None => Doing::Running,
        };
        if grants > MOST_GRANTS {
            self.fail(format!("vCPU {cpu} got {grants} grants for one instruction and none let it retire"));
        }
    }

    fn fail(&mut self, what: String) {
        self.verdict.get_or_insert(what);
    }

    /// Whether all programs have ended and nothing is in flight.
    #[must_use]
    pub fn is_done(&self, setup: &Setup) -> bool {
        let ended =
            self.cpus.iter().zip(&setup.litmus.programs).all(|(cpu, program)| cpu.at == program.len());
        ended
            && self.links.iter().all(VecDeque::is_empty)
            && self.nodes.iter().all(Node::is_idle)
            && self.memories.iter().all(|memory| memory.buffers.iter().all(VecDeque::is_empty))
    }

    /// Whether the machine can't progress although it hasn't ended.
    #[must_use]
    pub fn is_stuck(&self, setup: &Setup) -> bool {
        if self.verdict.is_some() || self.is_done(setup) {
            return false;
        }
        let mut steps = Vec::new();
        self.steps(setup, &mut steps);
        // External events don't count: a machine must progress without them.
        let own =
            |step: &Step| matches!(step, Step::Run(_) | Step::Drain(_) | Step::Deliver(_) | Step::Timer(_));
        !steps.iter().any(own)
    }

    /// Registers of all vCPUs.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.cpus.iter().map(|cpu| cpu.registers.clone()).collect()
    }

    /// Number of messages in the longest link.
    #[must_use]
    pub fn longest_link(&self) -> usize {
        self.links.iter().map(VecDeque::len).max().unwrap_or(0)
    }
}

fn ahead(setup: &Setup, node: usize) -> u64 {
    setup.ahead.get(node).copied().unwrap_or(0)
}

fn vcpu_id(vcpu: usize) -> Vcpu {
    Vcpu::try_from(vcpu).unwrap_or(Vcpu::MAX)
}

/// The node of a vCPU, and its number there.
fn place(setup: &Setup, cpu: usize) -> (usize, usize) {
    let node = setup.places[cpu];
    (node.into(), setup.places[..cpu].iter().filter(|place| **place == node).count())
}

fn cpu_at(setup: &Setup, node: usize, vcpu: Vcpu) -> usize {
    let here = setup.places.iter().enumerate().filter(|(_, place)| usize::from(**place) == node);
    here.map(|(cpu, _)| cpu).nth(vcpu.into()).unwrap_or(0)
}
