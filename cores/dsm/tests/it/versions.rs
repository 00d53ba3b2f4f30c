//! Versions name contents: through changes of modes, moves of the sequencer and kept old contents, a reader loads the last stored values.

use std::collections::VecDeque;

use dsm::{
    Access, Action, Config, Event, Fault, Message, Mode, Node, NodeId, Operation, Page, Pages, Policy,
};
use proptest::prelude::*;

const PAGES: u64 = 3;
const SIZE: usize = 64;

fn at(page: Page) -> usize {
    usize::try_from(page).unwrap()
}

/// Memory of one host.
struct Memory {
    contents: Vec<Vec<u8>>,
    access: Vec<Access>,
}

impl Pages for Memory {
    fn size(&self) -> usize {
        SIZE
    }
    fn read(&self, page: Page, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.contents[at(page)]);
    }
    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        self.contents[at(page)][offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    fn protect(&mut self, page: Page, access: Access) {
        self.access[at(page)] = access;
    }
}

/// Nodes with one vCPU each, one instruction at a time. Messages arrive in the order in which they were sent.
struct Machine {
    nodes: Vec<Node>,
    memories: Vec<Memory>,
    messages: VecDeque<Message>,
    now: u64,
    /// Results of the present instruction.
    resumed: bool,
    trapped: bool,
}

impl Machine {
    fn new(nodes: u8, policy: Policy) -> Self {
        let node = |me| Node::new(Config { pages: PAGES, ..Config::new(me, nodes, policy) }).unwrap();
        let memory = |_| Memory {
            // The same on all nodes and not zero, like a program.
            contents: vec![vec![200; SIZE]; at(PAGES)],
            access: vec![Access::None; at(PAGES)],
        };
        Self {
            nodes: (0..nodes).map(node).collect(),
            memories: (0..nodes).map(memory).collect(),
            messages: VecDeque::new(),
            now: 0,
            resumed: false,
            trapped: false,
        }
    }

    fn step(&mut self, node: usize, event: Event) {
        self.now += 1;
        let mut actions = Vec::new();
        self.nodes[node].step(event, self.now, &mut self.memories[node], &mut actions);
        assert_eq!(self.nodes[node].counters().refused, 0);
        for action in actions {
            match action {
                Action::Send(message) => self.messages.push_back(message),
                Action::Resume { .. } | Action::Completed { .. } => self.resumed = true,
                Action::Trap { .. } => self.trapped = true,
                Action::Kick { vcpu } => self.step(node, Event::Retired { vcpu }),
                Action::Wounded { .. } => {}
            }
        }
    }

    /// Delivers all messages in flight, and runs timers that are due.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if let Some(message) = self.messages.pop_front() {
                self.step(message.to.index(), Event::Message(message));
                continue;
            }
            let due =
                (0..self.nodes.len()).filter_map(|node| Some((self.nodes[node].deadline()?, node))).min();
            let Some((at, node)) = due else { return };
            self.now = self.now.max(at);
            self.step(node, Event::Timer);
        }
        panic!("it never ends");
    }

    fn fault(&mut self, node: usize, page: Page, fault: Fault) {
        (self.resumed, self.trapped) = (false, false);
        self.step(node, Event::Fault { vcpu: 0, page, fault });
        self.settle();
        assert!(self.resumed || self.trapped, "node {node} waits for page {page} for ever");
    }

    fn read(&mut self, node: usize, page: Page) -> Vec<u8> {
        if self.memories[node].access[at(page)] < Access::Read {
            self.fault(node, page, Fault::Read);
        }
        let content = self.memories[node].contents[at(page)].clone();
        self.step(node, Event::Retired { vcpu: 0 });
        self.settle();
        content
    }

    fn write(&mut self, node: usize, page: Page, offset: u16, bytes: &[u8]) {
        if self.memories[node].access[at(page)] < Access::Write {
            self.fault(node, page, Fault::Write);
            if self.trapped {
                self.resumed = false;
                let mask = dsm::operation::full_mask(bytes.len());
                let operation = Operation::Store { offset, bytes: bytes.to_vec(), mask };
                self.step(node, Event::Operate { vcpu: 0, page, operation });
                self.settle();
                assert!(self.resumed, "a store of node {node} to page {page} is never done");
                return;
            }
        }
        self.memories[node].write(page, offset.into(), bytes);
        self.step(node, Event::Retired { vcpu: 0 });
        self.settle();
    }
}

#[derive(Debug, Clone)]
enum Step {
    Read(usize, Page),
    Write(usize, Page, u16, Vec<u8>),
    Advise(Page, Mode),
    Token(usize, u8),
    Discard(usize, Page),
}

fn step(nodes: u8) -> impl Strategy<Value = Step> {
    let node = || 0..usize::from(nodes);
    let bytes = proptest::collection::vec(any::<u8>(), 1..=8);
    prop_oneof![
        3 => (node(), 0..PAGES).prop_map(|(node, page)| Step::Read(node, page)),
        3 => (node(), 0..PAGES, 0..56_u16, bytes).prop_map(|(node, page, offset, bytes)| Step::Write(node, page, offset, bytes)),
        2 => (0..PAGES, any::<bool>()).prop_map(|(page, update)| {
            Step::Advise(page, if update { Mode::Update } else { Mode::Invalidate })
        }),
        1 => (node(), 0..nodes).prop_map(|(node, to)| Step::Token(node, to)),
        1 => (node(), 0..PAGES).prop_map(|(node, page)| Step::Discard(node, page)),
    ]
}

fn run(nodes: u8, policy: Policy, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut machine = Machine::new(nodes, policy);
    let mut right = vec![vec![200_u8; SIZE]; at(PAGES)];
    for step in steps {
        match step {
            Step::Read(node, page) => {
                prop_assert_eq!(&machine.read(node, page), &right[at(page)], "{} reads {}", node, page);
            }
            Step::Write(node, page, offset, bytes) => {
                machine.write(node, page, offset, &bytes);
                right[at(page)][usize::from(offset)..][..bytes.len()].copy_from_slice(&bytes);
            }
            Step::Advise(page, mode) => machine.step(0, Event::Advise { page, mode }),
            Step::Token(node, to) => machine.step(node, Event::MoveToken { to: NodeId(to) }),
            Step::Discard(node, page) => machine.step(node, Event::Discard { page }),
        }
        machine.settle();
    }
    for page in 0..PAGES {
        for node in 0..usize::from(nodes) {
            prop_assert_eq!(&machine.read(node, page), &right[at(page)], "{} reads {}", node, page);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn readers_read_what_was_last_written(
        steps in proptest::collection::vec(step(4), 1..120),
        migratory in any::<bool>(),
        twins in 0..3_usize,
    ) {
        let policy = Policy { migratory, twins, hold_ns: 0, adapt: false, ..Policy::OURS };
        run(4, policy, steps)?;
    }
}

/// Nodes that take turns to read and write a page get it for writing at once. Two nodes that from then on only read soon have a copy each,
/// and don't take the page from each other any more.
#[test]
fn readers_do_not_take_a_page_from_each_other_for_ever() {
    let policy = Policy { migratory: true, hold_ns: 0, adapt: false, ..Policy::OURS };
    let mut machine = Machine::new(3, policy);
    for turn in 0..10_u8 {
        for node in [1, 2] {
            machine.read(node, 0);
            machine.write(node, 0, 0, &[turn, 7]);
        }
    }
    machine.read(1, 0);
    assert_eq!(machine.memories[1].access[0], Access::Write, "it goes from writer to writer");
    let misses = |machine: &Machine| -> u64 { machine.nodes.iter().map(|node| node.counters().misses).sum() };
    let before = misses(&machine);
    for _ in 0..20 {
        assert_eq!(machine.read(2, 0)[..2], [9, 7]);
        assert_eq!(machine.read(1, 0)[..2], [9, 7]);
    }
    let missed = misses(&machine) - before;
    assert!(missed <= 6, "{missed} of 40 reads asked for the page");
    assert!([1, 2].iter().all(|node| machine.memories[*node].access[0] == Access::Read));
}
