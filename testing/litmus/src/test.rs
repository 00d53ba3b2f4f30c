//! A test as data.

/// A general register by its machine code number (0 is rax).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(pub u8);

impl Register {
    /// Registers that tests may use; the others hold addresses.
    pub const NAMES: [(&'static str, &'static str, Self); 6] = [
        ("EAX", "RAX", Self(0)),
        ("ECX", "RCX", Self(1)),
        ("EDX", "RDX", Self(2)),
        ("EBX", "RBX", Self(3)),
        ("ESI", "RSI", Self(6)),
        ("EDI", "RDI", Self(7)),
    ];
    /// The implicit operand of compare-and-exchange.
    pub const ACCUMULATOR: Self = Self(0);

    /// Returns a register and its width by name.
    #[must_use]
    pub fn named(name: &str) -> Option<(Self, Width)> {
        Self::NAMES.iter().find_map(|(narrow, wide, register)| {
            if name.eq_ignore_ascii_case(narrow) {
                Some((*register, Width::Double))
            } else {
                name.eq_ignore_ascii_case(wide).then_some((*register, Width::Quad))
            }
        })
    }
}

/// Width of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Width {
    /// Four bytes.
    Double,
    /// Eight bytes.
    Quad,
}

impl Width {
    /// Returns the number of bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Double => 4,
            Self::Quad => 8,
        }
    }

    /// Truncates a value to this width.
    #[must_use]
    pub const fn cut(self, value: u64) -> u64 {
        match self {
            Self::Double => value & 0xffff_ffff,
            Self::Quad => value,
        }
    }
}

/// A source operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A 32-bit constant. As 64 bits it is sign-extended, as by the processor.
    Constant(u32),
    /// A register.
    Register(Register),
}

/// An arithmetic operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Adds modulo 2^width (`add`).
    Add,
    /// Subtracts modulo 2^width (`sub`).
    Sub,
    /// Bitwise and (`and`).
    And,
    /// Bitwise or (`or`).
    Or,
    /// Bitwise exclusive or (`xor`).
    Xor,
}

impl Operation {
    /// Applies the operation at a width.
    #[must_use]
    pub const fn apply(self, width: Width, left: u64, right: u64) -> u64 {
        width.cut(match self {
            Self::Add => left.wrapping_add(right),
            Self::Sub => left.wrapping_sub(right),
            Self::And => left & right,
            Self::Or => left | right,
            Self::Xor => left ^ right,
        })
    }
}

/// An instruction; locations are numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// `mov reg, [x]`.
    Load(Width, Register, usize),
    /// `mov [x], operand`.
    Store(Width, usize, Operand),
    /// `mov reg, operand`.
    Move(Width, Register, Operand),
    /// `add reg, operand` and its like.
    Compute(Width, Operation, Register, Operand),
    /// `add [x], operand` and its like; atomic with `lock`.
    Modify {
        /// Whether it is locked.
        locked: bool,
        /// Width of the access.
        width: Width,
        /// The operation.
        operation: Operation,
        /// Index of the location.
        location: usize,
        /// The operand.
        operand: Operand,
    },
    /// `xchg [x], reg`, which is always locked.
    Exchange(Width, usize, Register),
    /// `lock xadd [x], reg`.
    ExchangeAdd(Width, usize, Register),
    /// `lock cmpxchg [x], reg`.
    CompareExchange(Width, usize, Register),
    /// Waits until the thread's stores are in memory (`mfence`).
    Fence,
}

impl Instruction {
    /// Returns the location that it accesses, and the width.
    #[must_use]
    pub fn access(&self) -> Option<(usize, Width)> {
        match *self {
            Self::Load(width, _, location)
            | Self::Store(width, location, _)
            | Self::Modify { width, location, .. }
            | Self::Exchange(width, location, _)
            | Self::ExchangeAdd(width, location, _)
            | Self::CompareExchange(width, location, _) => Some((location, width)),
            Self::Move(..) | Self::Compute(..) | Self::Fence => None,
        }
    }

    /// Returns the register that it loads from memory.
    #[must_use]
    pub fn loads(&self) -> Option<Register> {
        match *self {
            Self::Load(_, register, _)
            | Self::Exchange(_, _, register)
            | Self::ExchangeAdd(_, _, register) => Some(register),
            Self::CompareExchange(..) => Some(Register::ACCUMULATOR),
            _ => None,
        }
    }
}

/// One value of an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Observed {
    /// A thread's register at its end.
    Register(usize, Register),
    /// All eight bytes of a location, after all threads have ended and all stores are in memory.
    Location(usize),
}

/// A test's question: does such an outcome exist?
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Holds for every outcome.
    True,
    /// A value equals this.
    Is(Observed, u64),
    /// Both hold.
    And(Box<Self>, Box<Self>),
    /// At least one.
    Or(Box<Self>, Box<Self>),
    /// It doesn't hold.
    Not(Box<Self>),
}

impl Condition {
    /// Evaluates the condition; `value` returns an outcome's values.
    pub fn holds(&self, value: &impl Fn(Observed) -> u64) -> bool {
        match self {
            Self::True => true,
            Self::Is(observed, expected) => value(*observed) == *expected,
            Self::And(one, other) => one.holds(value) && other.holds(value),
            Self::Or(one, other) => one.holds(value) || other.holds(value),
            Self::Not(inner) => !inner.holds(value),
        }
    }
}

/// A test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test {
    /// Its name.
    pub name: String,
    /// Names of its locations.
    pub locations: Vec<String>,
    /// Their initial values.
    pub initial: Vec<u64>,
    /// Initial values of registers; others are 0.
    pub registers: Vec<(usize, Register, u64)>,
    /// The threads.
    pub threads: Vec<Vec<Instruction>>,
    /// The question.
    pub condition: Condition,
}

impl Test {
    /// Returns an outcome's components: registers that loads fill, thread by thread in the order of their first load, then all
    /// locations.
    #[must_use]
    pub fn observed(&self) -> Vec<Observed> {
        let mut observed = Vec::new();
        for (index, thread) in self.threads.iter().enumerate() {
            observed
                .extend(Self::loaded(thread).into_iter().map(|register| Observed::Register(index, register)));
        }
        observed.extend((0..self.locations.len()).map(Observed::Location));
        observed
    }

    /// Returns the registers that a thread's loads fill.
    #[must_use]
    pub fn loaded(thread: &[Instruction]) -> Vec<Register> {
        let mut loaded = Vec::new();
        for register in thread.iter().filter_map(Instruction::loads) {
            if !loaded.contains(&register) {
                loaded.push(register);
            }
        }
        loaded
    }

    /// Returns the common width of all accesses, if there is one.
    #[must_use]
    pub fn width(&self) -> Option<Width> {
        let mut widths =
            self.threads.iter().flatten().filter_map(Instruction::access).map(|(_, width)| width);
        let first = widths.next()?;
        widths.all(|width| width == first).then_some(first)
    }

    /// Returns whether the condition holds for an outcome (values as [`Test::observed`] lists them).
    #[must_use]
    pub fn asks_about(&self, outcome: &[u64]) -> bool {
        let observed = self.observed();
        self.condition.holds(&|wanted| {
            let at = observed.iter().position(|one| *one == wanted);
            at.and_then(|at| outcome.get(at)).copied().unwrap_or(0)
        })
    }
}
