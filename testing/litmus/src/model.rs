//! Enumerates all outcomes of a test by all possible orders.
//!
//! The machine is that of Sewell, Sarkar, Owens, Zappa Nardelli and Myreen, *x86-TSO: A Rigorous and Usable Programmer's Model for
//! x86 Multiprocessors* (CACM 2010), section 3. Each thread has a queue of its own stores, which reach memory one by one in order. A
//! load reads the newest store to its bytes from its own queue, otherwise memory. A fence and a locked instruction wait until the
//! queue is empty, and a locked instruction is one step.
//!
//! Beyond the paper, memory consists of bytes. An access across a boundary ([`Memory::Split`]) isn't atomic unless locked: it is two
//! accesses in either order, as the architecture guarantees nothing more (Intel SDM volume 3, 10.1.1; AMD APM volume 2, 7.3.2).

use crate::test::{Instruction, Observed, Operand, Operation, Register, Test, Width};
use std::collections::{BTreeSet, HashSet};

/// Values as [`Test::observed`] lists them.
pub type Outcome = Vec<u64>;

/// The memory model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// x86-TSO, the model of the processor.
    Tso,
    /// No store queues: sequential consistency.
    Sequential,
    /// Whole threads in sequence, in any order: the outcomes of threads that don't run in parallel.
    Serial,
}

/// Alignment of locations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Aligned: every access is atomic.
    Whole,
    /// Every access crosses a boundary after half of its bytes.
    Split,
}

/// A part of a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Part {
    location: usize,
    first: usize,
    length: usize,
}

/// Index of a step's value: a register, or the instruction's scratch place for its read.
const SCRATCH: usize = 16;

/// An atomic step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    /// Reads bytes into the scratch place.
    Read(Part),
    /// Queues bytes of a value.
    Queue(Part, Source),
    /// Sets a register (or the scratch place) to an operation on two values.
    Set(Width, usize, Option<Operation>, Source),
    /// Executes a whole instruction on memory, with an empty queue.
    Locked(Instruction),
    /// Waits for an empty queue.
    Fence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Constant(u64),
    Place(usize),
}

/// Extends a constant as the processor does.
fn extended(width: Width, constant: u32) -> u64 {
    match width {
        Width::Double => constant.into(),
        Width::Quad => i64::from(constant.cast_signed()).cast_unsigned(),
    }
}

fn source(width: Width, operand: Operand) -> Source {
    match operand {
        Operand::Constant(constant) => Source::Constant(extended(width, constant)),
        Operand::Register(register) => Source::Place(register.0.into()),
    }
}

/// Returns all orders of the parts of a thread's accesses, as steps.
fn expand(thread: &[Instruction], memory: Memory) -> Vec<Vec<Step>> {
    let mut ways = vec![Vec::new()];
    for instruction in thread {
        let mut next = Vec::new();
        for steps in one(instruction, memory) {
            next.extend(ways.iter().map(|way: &Vec<Step>| [way.as_slice(), &steps].concat()));
        }
        ways = next;
    }
    ways
}

/// Returns the orders of an access' parts.
fn parts(location: usize, width: Width, memory: Memory) -> Vec<Vec<Part>> {
    let bytes = width.bytes();
    match memory {
        Memory::Whole => vec![vec![Part { location, first: 0, length: bytes }]],
        Memory::Split => {
            let half = |first| Part { location, first, length: bytes / 2 };
            vec![vec![half(0), half(bytes / 2)], vec![half(bytes / 2), half(0)]]
        }
    }
}

/// Returns the ways to execute one instruction.
fn one(instruction: &Instruction, memory: Memory) -> Vec<Vec<Step>> {
    let reads = |location, width| -> Vec<Vec<Step>> {
        let clear = Step::Set(Width::Quad, SCRATCH, None, Source::Constant(0));
        let order = |parts: Vec<Part>| [clear].into_iter().chain(parts.into_iter().map(Step::Read)).collect();
        parts(location, width, memory).into_iter().map(order).collect()
    };
    let stores = |location, width, value: Source| -> Vec<Vec<Step>> {
        let order = |parts: Vec<Part>| parts.into_iter().map(|part| Step::Queue(part, value)).collect();
        parts(location, width, memory).into_iter().map(order).collect()
    };
    match *instruction {
        Instruction::Load(width, register, location) => {
            let set = Step::Set(width, register.0.into(), None, Source::Place(SCRATCH));
            reads(location, width)
                .into_iter()
                .map(|mut steps| {
                    steps.push(set);
                    steps
                })
                .collect()
        }
        Instruction::Store(width, location, operand) => stores(location, width, source(width, operand)),
        Instruction::Move(width, register, operand) => {
            vec![vec![Step::Set(width, register.0.into(), None, source(width, operand))]]
        }
        Instruction::Compute(width, operation, register, operand) => {
            vec![vec![Step::Set(width, register.0.into(), Some(operation), source(width, operand))]]
        }
        Instruction::Modify { locked: false, width, operation, location, operand } => {
            let set = Step::Set(width, SCRATCH, Some(operation), source(width, operand));
            let writes = stores(location, width, Source::Place(SCRATCH));
            let together = |read: Vec<Step>| {
                writes.iter().map(move |write| [read.as_slice(), &[set], write].concat()).collect::<Vec<_>>()
            };
            reads(location, width).into_iter().flat_map(together).collect()
        }
        Instruction::Modify { .. }
        | Instruction::Exchange(..)
        | Instruction::ExchangeAdd(..)
        | Instruction::CompareExchange(..) => vec![vec![Step::Locked(*instruction)]],
        Instruction::Fence => vec![vec![Step::Fence]],
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Thread {
    at: usize,
    places: [u64; SCRATCH + 1],
    queue: Vec<(Part, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Machine {
    memory: Vec<[u8; 8]>,
    threads: Vec<Thread>,
}

impl Machine {
    fn write(&mut self, part: Part, value: u64) {
        let bytes = &value.to_le_bytes()[part.first..part.first + part.length];
        self.memory[part.location][part.first..part.first + part.length].copy_from_slice(bytes);
    }

    fn whole(&self, location: usize, width: Width) -> u64 {
        width.cut(u64::from_le_bytes(self.memory[location]))
    }

    fn value(&self, thread: usize, source: Source) -> u64 {
        match source {
            Source::Constant(value) => value,
            Source::Place(place) => self.threads[thread].places[place],
        }
    }

    /// Returns bytes as a thread reads them, at their position.
    fn see(&self, thread: usize, part: Part) -> u64 {
        let mut bytes = [0; 8];
        for (index, byte) in bytes.iter_mut().enumerate().skip(part.first).take(part.length) {
            let covers = |queued: &Part| {
                queued.location == part.location
                    && (queued.first..queued.first + queued.length).contains(&index)
            };
            let own = self.threads[thread].queue.iter().rev().find(|(queued, _)| covers(queued));
            *byte = own.map_or(self.memory[part.location][index], |(_, value)| value.to_le_bytes()[index]);
        }
        u64::from_le_bytes(bytes)
    }

    /// Executes a step if it is possible now.
    fn take(&mut self, thread: usize, step: Step, order: Order) -> bool {
        match step {
            Step::Fence | Step::Locked(_) if !self.threads[thread].queue.is_empty() => return false,
            Step::Fence => {}
            Step::Read(part) => {
                let value = self.see(thread, part);
                self.threads[thread].places[SCRATCH] |= value;
            }
            Step::Queue(part, source) => {
                let value = self.value(thread, source);
                match order {
                    Order::Tso => self.threads[thread].queue.push((part, value)),
                    Order::Sequential | Order::Serial => self.write(part, value),
                }
            }
            Step::Set(width, place, operation, source) => {
                let (old, value) = (self.threads[thread].places[place], self.value(thread, source));
                let new = operation
                    .map_or(value, |operation| operation.apply(width, width.cut(old), width.cut(value)));
                self.threads[thread].places[place] = width.cut(new);
            }
            Step::Locked(instruction) => self.locked(thread, instruction),
        }
        self.threads[thread].at += 1;
        true
    }

    fn locked(&mut self, thread: usize, instruction: Instruction) {
        let Some((location, width)) = instruction.access() else { return };
        let old = self.whole(location, width);
        let place = |register: Register| usize::from(register.0);
        let write = Part { location, first: 0, length: width.bytes() };
        match instruction {
            Instruction::Modify { operation, operand, .. } => {
                let value = self.value(thread, source(width, operand));
                self.write(write, operation.apply(width, old, width.cut(value)));
            }
            Instruction::Exchange(_, _, register) => {
                let value = self.threads[thread].places[place(register)];
                self.write(write, value);
                self.threads[thread].places[place(register)] = old;
            }
            Instruction::ExchangeAdd(_, _, register) => {
                let value = self.threads[thread].places[place(register)];
                self.write(write, Operation::Add.apply(width, old, width.cut(value)));
                self.threads[thread].places[place(register)] = old;
            }
            Instruction::CompareExchange(_, _, register) => {
                let accumulator = &mut self.threads[thread].places[place(Register::ACCUMULATOR)];
                if width.cut(*accumulator) == old {
                    // The accumulator is unchanged, including its upper half (AMD APM volume 3, CMPXCHG).
                    let value = self.threads[thread].places[place(register)];
                    self.write(write, value);
                } else {
                    *accumulator = old;
                }
            }
            _ => {}
        }
    }
}

/// Returns all possible outcomes of a test.
#[must_use]
pub fn outcomes(test: &Test, order: Order, memory: Memory) -> BTreeSet<Outcome> {
    let ways: Vec<Vec<Vec<Step>>> = test.threads.iter().map(|thread| expand(thread, memory)).collect();
    let mut found = BTreeSet::new();
    // Every combination of one path per thread.
    let mut choice = vec![0; ways.len()];
    loop {
        let steps: Vec<&[Step]> = ways.iter().zip(&choice).map(|(ways, way)| ways[*way].as_slice()).collect();
        explore(test, &steps, order, &mut found);
        let Some(next) = choice.iter().zip(&ways).position(|(way, ways)| way + 1 < ways.len()) else {
            return found;
        };
        choice[next] += 1;
        choice[..next].fill(0);
    }
}

fn explore(test: &Test, steps: &[&[Step]], order: Order, found: &mut BTreeSet<Outcome>) {
    let mut threads: Vec<Thread> =
        steps.iter().map(|_| Thread { at: 0, places: [0; SCRATCH + 1], queue: Vec::new() }).collect();
    for (thread, register, value) in &test.registers {
        threads[*thread].places[usize::from(register.0)] = *value;
    }
    let memory = test.initial.iter().map(|value| value.to_le_bytes()).collect();
    let start = Machine { memory, threads };
    let mut known = HashSet::from([start.clone()]);
    let mut open = vec![start];
    let observed = test.observed();
    while let Some(machine) = open.pop() {
        let mut next = Vec::new();
        let under_way = |index: usize| {
            let at = machine.threads[index].at;
            at > 0 && at < steps[index].len()
        };
        for (index, steps) in steps.iter().enumerate() {
            if order == Order::Serial
                && (0..machine.threads.len()).any(|other| other != index && under_way(other))
            {
                continue;
            }
            if let Some(step) = steps.get(machine.threads[index].at) {
                let mut after = machine.clone();
                if after.take(index, *step, order) {
                    next.push(after);
                }
            }
            if !machine.threads[index].queue.is_empty() {
                let mut after = machine.clone();
                let (part, value) = after.threads[index].queue.remove(0);
                after.write(part, value);
                next.push(after);
            }
        }
        if next.is_empty() {
            found.insert(
                observed
                    .iter()
                    .map(|observed| match observed {
                        Observed::Register(thread, register) => {
                            machine.threads[*thread].places[usize::from(register.0)]
                        }
                        Observed::Location(location) => u64::from_le_bytes(machine.memory[*location]),
                    })
                    .collect(),
            );
        }
        open.extend(next.into_iter().filter(|machine| known.insert(machine.clone())));
    }
}
