//! Model checking: every order of events of two small connections, with losses, repetitions, reordering, early timeouts, and late receives.
//!
//! A state holds both connections as [`roce::saved`] states, so each step also saves and restores. Time doesn't advance; a running timer
//! may expire at any moment.

use std::hash::{Hash, Hasher};

use roce::config::{Config, Mtu, Plant};
use roce::connection::{Arrival, Connection, State as ConnectionState};
use roce::counters::Counters;
use roce::memory::Remote;
use roce::output::Batch;
use roce::request::{Kind, Request};
use roce::saved;
use roce::status::Status;
use stateright::{Checker, HasDiscoveries, Model, Property};

use super::oracle::{End, Flow};
use super::program::{KEY, Op, WORDS, address};

/// Faults that may happen in one run, each at any moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Budget {
    losses: u8,
    copies: u8,
    early_timeouts: u8,
}

struct Pair {
    programs: [Vec<Op>; 2],
    config: Config,
    budget: Budget,
    /// Receives posted at the start; the others are posted at any moment.
    receives: [u32; 2],
    late: [u8; 2],
}

/// A connection's state without parts that differ between equivalent runs.
#[derive(Debug, Clone, PartialEq)]
struct Saved(saved::Connection);

impl Eq for Saved {}

impl Hash for Saved {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        // The rest is constant, or follows from these.
        self.0.state.hash(hasher);
        self.0.requester.hash(hasher);
        self.0.responder.hash(hasher);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    ends: [Saved; 2],
    flows: [Flow; 2],
    words: [[u64; WORDS]; 2],
    failed: [bool; 2],
    /// Packets in flight, with their receivers; sorted, since their order has no meaning.
    network: Vec<(u8, Vec<u8>)>,
    budget: Budget,
    late: [u8; 2],
    verdict: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Deliver(usize),
    Lose(usize),
    Copy(usize),
    Transmit(u8),
    Timer(u8),
    Receive(u8),
}

impl World {
    fn connection(&self, side: u8) -> Connection {
        Connection::restore(&self.ends[usize::from(side)].0, 0).unwrap()
    }

    /// Calls a connection, and stores its new state.
    fn with<R>(&mut self, side: u8, call: impl FnOnce(&mut Connection, &mut End<'_>) -> R) -> R {
        let mut connection = self.connection(side);
        let own = usize::from(side);
        let [a, b] = &mut self.flows;
        let (out, back) = if side == 0 { (a, b) } else { (b, a) };
        let peer_gone = self.failed[1 - own];
        let mut end = End {
            out,
            back,
            words: &mut self.words[own],
            now: 0,
            retry_count: 7,
            peer_gone,
            finite_rnr: false,
            own_failed: &mut self.failed[own],
            verdict: &mut self.verdict,
            late: None,
        };
        let result = call(&mut connection, &mut end);
        self.store(side, &connection);
        result
    }

    fn store(&mut self, side: u8, connection: &Connection) {
        let mut saved = connection.save(0);
        saved.counters = Counters::default();
        self.ends[usize::from(side)] = Saved(saved);
    }

    fn is_done(&self) -> bool {
        (0..2).all(|side| self.flows[side].is_done() || self.failed[side])
    }

    /// Whether only a timer can cause progress.
    fn is_quiet(&self) -> bool {
        self.network.is_empty() && (0..2).all(|side| !self.connection(side).wants_transmit(0))
    }
}

impl Model for Pair {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let mirror = Config { qpn: self.config.peer_qpn, peer_qpn: self.config.qpn, ..self.config };
        let configs = [self.config, Config { sq_psn: mirror.rq_psn, rq_psn: mirror.sq_psn, ..mirror }];
        let mut connections = configs.map(|config| Connection::new(config).unwrap());
        let mut flows = [0, 1].map(|side: usize| {
            let program = self.programs[side].clone();
            let mut flow = Flow::new(side.try_into().unwrap(), program, self.config.reliability);
            for op in &flow.program {
                connections[side].post(op.request).unwrap();
            }
            flow.posted = flow.program.len();
            flow
        });
        // A flow's receives are those of its other end.
        flows[0].receives = self.receives[1];
        flows[1].receives = self.receives[0];
        let ends = connections.map(|connection| Saved(connection.save(0)));
        vec![World {
            ends,
            flows,
            words: [[0; WORDS]; 2],
            failed: [false; 2],
            network: Vec::new(),
            budget: self.budget,
            late: self.late,
            verdict: None,
        }]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Action>) {
        if state.verdict.is_some() {
            return;
        }
        for index in 0..state.network.len() {
            if index > 0 && state.network[index] == state.network[index - 1] {
                continue;
            }
            actions.push(Action::Deliver(index));
            if state.budget.losses > 0 {
                actions.push(Action::Lose(index));
            }
            if state.budget.copies > 0 {
                actions.push(Action::Copy(index));
            }
        }
        let quiet = state.is_quiet();
        for side in 0..2 {
            let connection = state.connection(side);
            if connection.wants_transmit(0) {
                actions.push(Action::Transmit(side));
            }
            if connection.timeout().is_some() && (quiet || state.budget.early_timeouts > 0) {
                actions.push(Action::Timer(side));
            }
            if state.late[usize::from(side)] > 0 {
                actions.push(Action::Receive(side));
            }
        }
    }

    fn next_state(&self, state: &World, action: Action) -> Option<World> {
        let mut next = state.clone();
        match action {
            Action::Deliver(index) | Action::Copy(index) => {
                let (to, packet) = next.network[index].clone();
                if action == Action::Deliver(index) {
                    next.network.remove(index);
                } else {
                    next.budget.copies -= 1;
                }
                next.with(to, |connection, end| connection.receive(0, &packet, Arrival::default(), end));
            }
            Action::Lose(index) => {
                next.network.remove(index);
                next.budget.losses -= 1;
            }
            Action::Transmit(side) => {
                let mut buffer = vec![0; 16 * 320];
                let mut lengths = Vec::new();
                let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 16);
                next.with(side, |connection, end| connection.transmit(0, end, &mut out));
                let mut position = 0;
                for len in lengths {
                    let len = len as usize;
                    next.network.push((1 - side, buffer[position..position + len].to_vec()));
                    position += len;
                }
                next.network.sort_unstable();
            }
            Action::Timer(side) => {
                if !state.is_quiet() {
                    next.budget.early_timeouts -= 1;
                }
                let now = state.connection(side).timeout()?;
                next.with(side, |connection, end| connection.expired(now, end));
            }
            Action::Receive(side) => {
                next.late[usize::from(side)] -= 1;
                next.flows[usize::from(1 - side)].receives += 1;
                next.with(side, |connection, _| connection.receive_posted());
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("everything is as the oracle says", |_, state: &World| state.verdict.is_none()),
            Property::always("nothing stands still before the end", |model: &Pair, state: &World| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                !actions.is_empty() || state.is_done() || state.verdict.is_some()
            }),
            Property::always("the network holds a few packets", |_, state: &World| state.network.len() <= 16),
            Property::always("nobody fails", |_, state: &World| {
                state.ends.iter().all(|end| end.0.state == ConnectionState::Ready)
            }),
            Property::sometimes("all is done", |_, state: &World| state.is_done()),
        ]
    }
}

fn op(index: usize, kind: Kind, length: u32) -> Op {
    let request = Request::new(index as u64, kind, length);
    Op { request, expected: Status::Success, lost_from: None, refused: false }
}

fn send(index: usize, length: u32) -> Op {
    op(index, Kind::Send { immediate: None, invalidate: None }, length)
}

fn write(index: usize, length: u32) -> Op {
    op(
        index,
        Kind::Write { remote: Remote { address: address(index, 0), rkey: KEY }, immediate: None },
        length,
    )
}

fn read(index: usize, length: u32) -> Op {
    op(index, Kind::Read { remote: Remote { address: address(index, 0), rkey: KEY } }, length)
}

fn add(index: usize) -> Op {
    op(index, Kind::FetchAdd { remote: Remote { address: address(index, 1), rkey: KEY }, add: 7 }, 8)
}

fn config(window: u32, depth: u8) -> Config {
    Config {
        mtu: Mtu::B256,
        window,
        max_rd_atomic: depth,
        max_dest_rd_atomic: depth,
        timeout: 5,
        // The PSN wraps in the middle.
        ..Config::new(1, 2, 0xFF_FFFF, 7)
    }
}

/// Explores all states; returns their number.
fn explore(pair: Pair) -> usize {
    let checker = pair.checker().spawn_dfs().join();
    checker.assert_properties();
    checker.unique_state_count()
}

const fn budget(losses: u8, copies: u8, early_timeouts: u8) -> Budget {
    Budget { losses, copies, early_timeouts }
}

fn pair(program: Vec<Op>, back: Vec<Op>, config: Config, budget: Budget) -> Pair {
    Pair { programs: [program, back], config, budget, receives: [0, 1], late: [0, 0] }
}

#[test]
fn a_send_in_two_packets_and_an_atomic() {
    let states = explore(pair(vec![send(0, 300), add(1)], vec![], config(2, 1), budget(1, 1, 0)));
    assert!(states > 5000, "{states} states");
}

#[test]
fn a_read_in_two_parts_before_a_write() {
    let states = explore(pair(vec![read(0, 500), write(1, 8)], vec![], config(2, 2), budget(1, 1, 0)));
    assert!(states > 5000, "{states} states");
}

#[test]
fn two_atomics_in_flight() {
    let states = explore(pair(vec![add(0), add(1), add(2)], vec![], config(2, 2), budget(1, 1, 0)));
    assert!(states > 5000, "{states} states");
}

#[test]
fn a_receive_that_comes_late() {
    let program = vec![send(0, 8), send(1, 300)];
    let late = Pair { late: [0, 1], ..pair(program, vec![], config(2, 1), budget(1, 0, 0)) };
    let states = explore(late);
    assert!(states > 2000, "{states} states");
}

#[test]
fn both_directions_at_once() {
    let states = explore(pair(vec![add(0)], vec![write(0, 300)], config(2, 1), budget(1, 1, 0)));
    assert!(states > 1000, "{states} states");
}

/// The same with larger limits. `cargo test --release -p roce-testbed --lib -- --ignored --nocapture explore`
#[test]
#[ignore = "takes minutes"]
fn at_length() {
    let pairs = [
        pair(vec![send(0, 300), add(1)], vec![], config(2, 1), budget(2, 1, 1)),
        pair(vec![write(0, 10), read(1, 500), write(2, 8)], vec![], config(2, 2), budget(1, 1, 0)),
        pair(vec![add(0), add(1), add(2)], vec![], config(2, 2), budget(2, 1, 1)),
        pair(vec![send(0, 8), add(1)], vec![write(0, 300)], config(2, 1), budget(1, 0, 0)),
        Pair {
            late: [0, 1],
            ..pair(vec![write(0, 8), send(1, 8), send(2, 300)], vec![], config(3, 1), budget(1, 0, 0))
        },
    ];
    for (number, pair) in pairs.into_iter().enumerate() {
        println!("pair {number}: {} states", explore(pair));
    }
}

/// Each injected bug must be found.
#[test]
fn planted_faults_are_found() {
    for plant in [Plant::SkipPsn, Plant::ForgetReplay, Plant::EarlyAck] {
        let config = Config { plant, ..config(3, 1) };
        let checker = pair(vec![add(0), write(1, 300)], vec![], config, budget(1, 0, 0))
            .checker()
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_dfs()
            .join();
        let found = checker.discoveries();
        assert!(found.keys().any(|name| *name != "all is done"), "{plant:?} is not found");
    }
}
