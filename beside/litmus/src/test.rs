//! A test as data.

/// A general register by its number in machine code (0 is rax).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(pub u8);

impl Register {
    /// Those that tests may use; the others hold addresses.
    pub const NAMES: [(&'static str, &'static str, Self); 6] = [
        ("EAX", "RAX", Self(0)),
        ("ECX", "RCX", Self(1)),
        ("EDX", "RDX", Self(2)),
        ("EBX", "RBX", Self(3)),
        ("ESI", "RSI", Self(6)),
        ("EDI", "RDI", Self(7)),
    ];
    /// What compare-and-exchange compares with.
    pub const ACCUMULATOR: Self = Self(0);

    /// The register and its width by name.
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

/// Bytes of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Width {
    /// Four.
    Double,
    /// Eight.
    Quad,
}

impl Width {
    /// As a number.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Double => 4,
            Self::Quad => 8,
        }
    }

    /// A value cut to this width.
    #[must_use]
    pub const fn cut(self, value: u64) -> u64 {
        match self {
            Self::Double => value & 0xffff_ffff,
            Self::Quad => value,
        }
    }
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A constant that fits into 32 bits; as 64 bits it is sign-extended, as the processor does.
    Constant(u32),
    /// A register.
    Register(Register),
}

/// What is done to a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `add`.
    Add,
    /// `sub`.
    Sub,
    /// `and`.
    And,
    /// `or`.
    Or,
    /// `xor`.
    Xor,
}

impl Operation {
    /// The result at a width.
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
    /// `add [x], operand` and its like; with `lock` as one.
    Modify {
        /// Whether it is locked.
        locked: bool,
        /// Bytes.
        width: Width,
        /// What is done.
        operation: Operation,
        /// Location.
        location: usize,
        /// With what.
        operand: Operand,
    },
    /// `xchg [x], reg`, which is always locked.
    Exchange(Width, usize, Register),
    /// `lock xadd [x], reg`.
    ExchangeAdd(Width, usize, Register),
    /// `lock cmpxchg [x], reg`.
    CompareExchange(Width, usize, Register),
    /// `mfence`.
    Fence,
}

impl Instruction {
    /// The location it accesses and how wide.
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

    /// The register that gets something from memory.
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
    /// A register of a thread at its end.
    Register(usize, Register),
    /// A location, all eight bytes, when all threads have ended and all stores are in memory.
    Location(usize),
}

/// What a test asks: does an outcome like this exist?
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Always.
    True,
    /// A value is this.
    Is(Observed, u64),
    /// Both.
    And(Box<Self>, Box<Self>),
    /// At least one.
    Or(Box<Self>, Box<Self>),
    /// Not.
    Not(Box<Self>),
}

impl Condition {
    /// Whether an outcome is like this; `value` gives its values.
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
    /// What they hold at first.
    pub initial: Vec<u64>,
    /// What registers hold at first; others hold 0.
    pub registers: Vec<(usize, Register, u64)>,
    /// The threads.
    pub threads: Vec<Vec<Instruction>>,
    /// What it asks.
    pub condition: Condition,
}

impl Test {
    /// What an outcome consists of: registers that loads fill, thread by thread in the order of their first load, then all locations.
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

    /// Registers that a thread's loads fill.
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

    /// The width that all accesses have, if it is one.
    #[must_use]
    pub fn width(&self) -> Option<Width> {
        let mut widths =
            self.threads.iter().flatten().filter_map(Instruction::access).map(|(_, width)| width);
        let first = widths.next()?;
        widths.all(|width| width == first).then_some(first)
    }

    /// Whether an outcome (values as [`Test::observed`] lists them) is what the test asks about.
    #[must_use]
    pub fn asks_about(&self, outcome: &[u64]) -> bool {
        let observed = self.observed();
        self.condition.holds(&|wanted| {
            let at = observed.iter().position(|one| *one == wanted);
            at.and_then(|at| outcome.get(at)).copied().unwrap_or(0)
        })
    }
}
