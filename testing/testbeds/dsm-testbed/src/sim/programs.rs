//! Guest programs: generators of the sharing patterns that decide how well shared memory over a network performs.

use dsm::names::Page;

use crate::dice::Dice;

/// One operation of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Loads eight bytes.
    Load(Page, u16),
    /// Loads eight bytes repeatedly until their value is at least the given one.
    Wait(Page, u16, u64),
    /// Stores eight bytes.
    Store(Page, u16, u64),
    /// Adds to eight bytes, atomically.
    Add(Page, u16, u64),
    /// Computes for a time, ns.
    Compute(u64),
    /// Counts one event of the pattern.
    Event,
    /// Ends the program.
    End,
}

/// A pattern of sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// One node writes a page, then all others read it. An event is one read.
    ReadMiss,
    /// One node stores to a counter at intervals, another loads it at intervals. An event is a store.
    ProducerConsumer,
    /// All nodes contend for one ticket lock. An event is a hand-off.
    Lock,
    /// Every node stores to its own word of one page. An event is a store.
    FalseSharing,
    /// Nodes take turns to read and then write a page. An event is a turn.
    Migratory,
    /// Every node computes, reads its neighbors' edges after each step, and meets the others at a barrier. An event is a step.
    Jacobi,
    /// Every node uses only its own pages. An event is a store.
    Private,
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 7] = [
        Self::ReadMiss,
        Self::ProducerConsumer,
        Self::Lock,
        Self::FalseSharing,
        Self::Migratory,
        Self::Jacobi,
        Self::Private,
    ];

    /// The name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadMiss => "read-miss",
            Self::ProducerConsumer => "producer-consumer",
            Self::Lock => "lock",
            Self::FalseSharing => "false-sharing",
            Self::Migratory => "migratory",
            Self::Jacobi => "jacobi",
            Self::Private => "private",
        }
    }
}

/// The page of locks, counters and barriers. Its home is node 0.
const SHARED: Page = 0;
/// The page of the migratory pattern.
const DATA: Page = 64;

/// The program of one vCPU.
#[derive(Debug, Clone)]
pub struct Program {
    pattern: Pattern,
    me: u64,
    nodes: u64,
    /// Number of rounds to run.
    rounds: u64,
    round: u64,
    state: u8,
    ticket: u64,
    pace_ns: u64,
    dice: Dice,
    /// The first failure that the program found.
    pub fault: Option<String>,
}

impl Program {
    /// The program of one node's vCPU.
    #[must_use]
    pub fn new(pattern: Pattern, me: u8, nodes: u8, rounds: u64, pace_ns: u64, seed: u64) -> Self {
        let dice = Dice::new(seed.wrapping_mul(1000).wrapping_add(me.into()));
        Self {
            pattern,
            me: me.into(),
            nodes: nodes.into(),
            rounds,
            round: 0,
            state: 0,
            ticket: 0,
            pace_ns,
            dice,
            fault: None,
        }
    }

    /// The next operation. `last` is the value that the last load or addition returned.
    pub fn next(&mut self, last: u64) -> Op {
        if self.state == 0 && self.round >= self.rounds {
            return Op::End;
        }
        match self.pattern {
            Pattern::ReadMiss => self.read_miss(last),
            Pattern::ProducerConsumer => self.producer_consumer(last),
            Pattern::Lock => self.lock(last),
            Pattern::FalseSharing => self.false_sharing(SHARED),
            Pattern::Private => self.false_sharing(self.me + 64),
            Pattern::Migratory => self.migratory(last),
            Pattern::Jacobi => self.jacobi(),
        }
    }

    fn go(&mut self, state: u8, op: Op) -> Op {
        self.state = state;
        op
    }

    fn end_round(&mut self) -> Op {
        self.round += 1;
        self.go(0, Op::Compute(0))
    }

    fn offset(&self) -> u16 {
        u16::try_from(self.me * 8 + 1024).unwrap_or(0)
    }

    /// Node 1 writes all cache lines of a page. The others read half a round later.
    fn read_miss(&mut self, last: u64) -> Op {
        let half = self.pace_ns / 2;
        match (self.me == 1 || self.nodes == 1, self.state) {
            (true, 0) => self.go(1, Op::Compute(half)),
            // The whole page changes, so write-update doesn't pay.
            (true, state @ 1..64) => {
                let value = self.dice.bits() | 1;
                self.go(state + 1, Op::Store(SHARED, u16::from(state) * 64 - 64, value))
            }
            (true, 64) => self.go(65, Op::Compute(half)),
            (true, _) => self.end_round(),
            (false, 0) => self.go(1, Op::Compute(self.pace_ns)),
            (false, 1) => self.go(2, Op::Load(SHARED, 64)),
            (false, 2) => {
                if last == 0 && self.round > 1 {
                    self.fault.get_or_insert("a reader never saw what was written".to_owned());
                }
                self.go(3, Op::Event)
            }
            (false, _) => self.end_round(),
        }
    }

    fn producer_consumer(&mut self, last: u64) -> Op {
        match (self.me, self.state) {
            (1, 0) => {
                let pause = self.dice.around(self.pace_ns);
                self.go(1, Op::Compute(pause))
            }
            (1, 1) => self.go(2, Op::Store(SHARED, 64, self.round + 1)),
            (1, 2) => self.go(3, Op::Event),
            (1, _) => self.end_round(),
            (0, 0) if self.nodes > 2 => {
                self.round = self.rounds;
                Op::End
            }
            (_, 0) if self.me > 2 => Op::End,
            (_, 0) => {
                let pause = self.dice.around(self.pace_ns);
                self.go(1, Op::Compute(pause))
            }
            (_, 1) => self.go(2, Op::Load(SHARED, 64)),
            (_, _) => {
                if last < self.ticket {
                    self.fault.get_or_insert(format!("a counter went from {} back to {last}", self.ticket));
                }
                self.ticket = last;
                // The consumer reads until the producer's last value.
                self.round = if last >= self.rounds { self.rounds } else { 0 };
                self.go(0, Op::Compute(0))
            }
        }
    }

    /// A ticket lock: offset 64 has the next ticket, 128 the ticket that is served. Only the served ticket itself is checked inside.
    fn lock(&mut self, last: u64) -> Op {
        match self.state {
            0 => {
                let pause = self.dice.around(self.pace_ns);
                self.go(1, Op::Compute(pause))
            }
            1 => self.go(2, Op::Add(SHARED, 64, 1)),
            2 => {
                self.ticket = last;
                self.go(3, Op::Wait(SHARED, 128, last))
            }
            3 => {
                let inside = self.pace_ns / 4;
                self.go(5, Op::Compute(inside))
            }
            5 => self.go(6, Op::Load(SHARED, 128)),
            6 => {
                if last != self.ticket {
                    self.fault.get_or_insert("two virtual CPUs were inside one lock".to_owned());
                }
                let served = self.ticket + 1;
                self.go(7, Op::Store(SHARED, 128, served))
            }
            7 => self.go(8, Op::Event),
            _ => self.end_round(),
        }
    }

    fn false_sharing(&mut self, page: Page) -> Op {
        match self.state {
            0 => {
                let pause = self.dice.around(self.pace_ns);
                self.go(1, Op::Compute(pause))
            }
            1 => self.go(2, Op::Store(page, self.offset(), self.round + 1)),
            2 => self.go(3, Op::Event),
            _ => self.end_round(),
        }
    }

    /// Waits for its turn by time; nodes take turns to read, then write.
    fn migratory(&mut self, last: u64) -> Op {
        let turn = self.pace_ns;
        match self.state {
            0 if self.round == 0 => {
                let first = turn * self.me;
                self.go(1, Op::Compute(first))
            }
            0 => {
                let lap = turn * self.nodes;
                self.go(1, Op::Compute(lap))
            }
            // Many words change, so write-update doesn't pay.
            1 => self.go(2, Op::Load(DATA, 0)),
            2 => {
                self.ticket = last;
                self.go(3, Op::Store(DATA, 0, last + 1))
            }
            state @ 3..67 => {
                let value = self.dice.bits() | 1;
                self.go(state + 1, Op::Store(DATA, (u16::from(state) - 2) * 56, value))
            }
            67 => self.go(68, Op::Event),
            _ => self.end_round(),
        }
    }

    /// A node's own page is `128 + me`. The barrier is a counter in the shared page.
    fn jacobi(&mut self) -> Op {
        let edge = 128 + self.me;
        match self.state {
            0 => {
                let work = self.dice.around(self.pace_ns);
                self.go(1, Op::Compute(work))
            }
            state @ 1..65 => {
                let value = self.dice.bits() | 1;
                self.go(state + 1, Op::Store(edge, u16::from(state) * 56, value))
            }
            65 => self.go(66, Op::Add(SHARED, 64, 1)),
            66 => self.go(67, Op::Wait(SHARED, 64, self.nodes * (2 * self.round + 1))),
            67 => self.go(68, Op::Load(128 + (self.me + 1) % self.nodes, 56)),
            68 => self.go(69, Op::Load(128 + (self.me + self.nodes - 1) % self.nodes, 56)),
            69 => self.go(70, Op::Add(SHARED, 64, 1)),
            70 => self.go(71, Op::Wait(SHARED, 64, self.nodes * (2 * self.round + 2))),
            71 => self.go(72, Op::Event),
            _ => self.end_round(),
        }
    }
}
