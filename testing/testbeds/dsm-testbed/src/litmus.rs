//! Litmus tests, and their outcomes that x86-TSO allows.

use std::collections::{BTreeSet, HashSet};

/// A byte of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Var {
    /// The page.
    pub page: u8,
    /// Offset in the page.
    pub offset: u8,
}

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Loads into the next register.
    Load(Var),
    /// Stores a constant.
    Store(Var, u8),
    /// Waits until all earlier stores are in memory.
    Fence,
    /// Adds atomically, and loads the value before into the next register.
    Add(Var, u8),
    /// Loads from the first and stores to the second variable, as one instruction that needs two pages (`movs`).
    Copy(Var, Var),
}

/// A litmus test: one program per vCPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Litmus {
    /// Its name in the literature, or its purpose.
    pub name: &'static str,
    /// One program per vCPU.
    pub programs: Vec<Vec<Instruction>>,
}

/// Registers of all vCPUs at the end, in the order of their loads.
pub type Outcome = Vec<Vec<u8>>;

/// A machine with one memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Machine {
    memory: Vec<(Var, u8)>,
    cpus: Vec<Cpu>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Cpu {
    at: usize,
    registers: Vec<u8>,
    /// The value that a copy has loaded and not yet stored.
    between: Option<u8>,
    buffer: Vec<(Var, u8)>,
}

impl Machine {
    fn load(&self, var: Var) -> u8 {
        self.memory.iter().find(|(other, _)| *other == var).map_or(0, |(_, value)| *value)
    }

    fn write(&mut self, var: Var, value: u8) {
        match self.memory.iter_mut().find(|(other, _)| *other == var) {
            Some((_, old)) => *old = value,
            None => self.memory.push((var, value)),
        }
        self.memory.sort_unstable();
    }

    fn see(&self, cpu: usize, var: Var) -> u8 {
        let own = self.cpus[cpu].buffer.iter().rev().find(|(other, _)| *other == var);
        own.map_or_else(|| self.load(var), |(_, value)| *value)
    }

    fn store(&mut self, cpu: usize, var: Var, value: u8, buffered: bool) {
        if buffered {
            self.cpus[cpu].buffer.push((var, value));
        } else {
            self.write(var, value);
        }
    }

    /// Executes an instruction. Returns false if it has to wait.
    fn run(&mut self, cpu: usize, instruction: Instruction, buffered: bool) -> bool {
        match instruction {
            Instruction::Load(var) => {
                let value = self.see(cpu, var);
                self.cpus[cpu].registers.push(value);
            }
            Instruction::Store(var, value) => self.store(cpu, var, value, buffered),
            Instruction::Fence | Instruction::Add(..) if !self.cpus[cpu].buffer.is_empty() => return false,
            Instruction::Fence => {}
            Instruction::Add(var, value) => {
                let old = self.load(var);
                self.cpus[cpu].registers.push(old);
                self.write(var, old.wrapping_add(value));
            }
            Instruction::Copy(from, to) => match self.cpus[cpu].between.take() {
                None => {
                    self.cpus[cpu].between = Some(self.see(cpu, from));
                    return true;
                }
                Some(value) => self.store(cpu, to, value, buffered),
            },
        }
        self.cpus[cpu].at += 1;
        true
    }
}

impl Litmus {
    /// All outcomes of a machine with one memory. With `buffered`, vCPUs have store buffers: x86-TSO. Without: sequential consistency.
    ///
    /// Source: Sewell and others, *x86-TSO: A Rigorous and Usable Programmer's Model* (2010), the abstract machine.
    #[must_use]
    pub fn allowed(&self, buffered: bool) -> BTreeSet<Outcome> {
        let start = Machine { memory: Vec::new(), cpus: vec![Cpu::default(); self.programs.len()] };
        let mut known = HashSet::from([start.clone()]);
        let mut open = vec![start];
        let mut outcomes = BTreeSet::new();
        while let Some(machine) = open.pop() {
            let mut next = Vec::new();
            for (cpu, program) in self.programs.iter().enumerate() {
                if let Some(instruction) = program.get(machine.cpus[cpu].at) {
                    let mut after = machine.clone();
                    if after.run(cpu, *instruction, buffered) {
                        next.push(after);
                    }
                }
                if !machine.cpus[cpu].buffer.is_empty() {
                    let mut after = machine.clone();
                    let (var, value) = after.cpus[cpu].buffer.remove(0);
                    after.write(var, value);
                    next.push(after);
                }
            }
            if next.is_empty() {
                outcomes.insert(machine.cpus.into_iter().map(|cpu| cpu.registers).collect());
            }
            open.extend(next.into_iter().filter(|machine| known.insert(machine.clone())));
        }
        outcomes
    }
}

/// The variable at an offset of a page.
#[must_use]
pub const fn var(page: u8, offset: u8) -> Var {
    Var { page, offset }
}

/// Classic litmus tests. Each uses the two variables, which may be in one page or in two.
#[must_use]
pub fn classics(x: Var, y: Var) -> Vec<Litmus> {
    use Instruction::{Add, Fence, Load, Store};
    let test = |name, programs: &[&[Instruction]]| Litmus {
        name,
        programs: programs.iter().map(|program| program.to_vec()).collect(),
    };
    vec![
        test("SB", &[&[Store(x, 1), Load(y)], &[Store(y, 1), Load(x)]]),
        test("SB+mfences", &[&[Store(x, 1), Fence, Load(y)], &[Store(y, 1), Fence, Load(x)]]),
        test("MP", &[&[Store(x, 1), Store(y, 1)], &[Load(y), Load(x)]]),
        test("LB", &[&[Load(x), Store(y, 1)], &[Load(y), Store(x, 1)]]),
        test("2+2W", &[&[Store(x, 1), Store(y, 2), Load(y)], &[Store(y, 1), Store(x, 2), Load(x)]]),
        test("CoRR", &[&[Store(x, 1), Store(x, 2)], &[Load(x), Load(x)]]),
        test("WRC", &[&[Store(x, 1)], &[Load(x), Store(y, 1)], &[Load(y), Load(x)]]),
        test("IRIW", &[&[Store(x, 1)], &[Store(y, 1)], &[Load(x), Load(y)], &[Load(y), Load(x)]]),
        test("SB+xadds", &[&[Add(x, 1), Load(y)], &[Add(y, 1), Load(x)]]),
        test("xadd three times", &[&[Add(x, 1)], &[Add(x, 1)], &[Add(x, 1)]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Litmus {
        classics(var(0, 0), var(1, 0)).into_iter().find(|test| test.name == name).unwrap()
    }

    /// The reference agrees with the published verdicts that separate x86-TSO from stronger and weaker models.
    #[test]
    fn the_reference_allows_what_x86_allows() {
        let weak = vec![vec![0], vec![0]];
        assert!(named("SB").allowed(true).contains(&weak));
        assert!(!named("SB").allowed(false).contains(&weak));
        assert!(!named("SB+mfences").allowed(true).contains(&weak));
        assert!(!named("SB+xadds").allowed(true).contains(&vec![vec![0, 0], vec![0, 0]]));
        assert!(!named("MP").allowed(true).contains(&vec![vec![], vec![1, 0]]));
        assert!(!named("LB").allowed(true).contains(&vec![vec![1], vec![1]]));
        assert!(!named("WRC").allowed(true).contains(&vec![vec![], vec![1], vec![1, 0]]));
        assert!(!named("IRIW").allowed(true).contains(&vec![vec![], vec![], vec![1, 0], vec![1, 0]]));
        assert_eq!(named("MP").allowed(true).len(), 3);
    }
}
