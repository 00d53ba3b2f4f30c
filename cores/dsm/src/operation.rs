//! Stores and atomic instructions on write-update pages.

/// Limit of bytes in one store.
pub const MAX_STORE: usize = 64;

/// Effect of a trapped instruction on memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Writes the bytes whose mask bit is set. Bit 0 is the first byte.
    Store {
        /// Offset in the page.
        offset: u16,
        /// 1 to [`MAX_STORE`] bytes.
        bytes: Vec<u8>,
        /// Mask of the bytes that are written.
        mask: u64,
    },
    /// An atomic read-modify-write.
    Atomic {
        /// Offset in the page.
        offset: u16,
        /// Bytes: 1, 2, 4 or 8. Values are little-endian.
        width: u8,
        /// The computation.
        kind: Atomic,
        /// The operand; the new value of a compare-exchange.
        operand: u64,
        /// The value that a compare-exchange expects.
        expected: u64,
    },
}

/// Atomic read-modify-write instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Atomic {
    /// `xchg`, which is always locked.
    Exchange,
    /// `lock xadd`, `add`, `inc`. The decoder builds `sub`, `dec` and `neg` from this and from a compare-exchange.
    Add,
    /// `lock and`, `btr`.
    And,
    /// `lock or`, `bts`.
    Or,
    /// `lock xor`, `not`, `btc`.
    Xor,
    /// `lock cmpxchg`.
    CompareExchange,
}

impl Atomic {
    /// All, in the order of their codes in messages.
    pub const ALL: [Self; 6] =
        [Self::Exchange, Self::Add, Self::And, Self::Or, Self::Xor, Self::CompareExchange];

    /// The value after the operation; none if a comparison fails.
    #[must_use]
    pub fn apply(self, old: u64, operand: u64, expected: u64) -> Option<u64> {
        match self {
            Self::Exchange => Some(operand),
            Self::Add => Some(old.wrapping_add(operand)),
            Self::And => Some(old & operand),
            Self::Or => Some(old | operand),
            Self::Xor => Some(old ^ operand),
            Self::CompareExchange => (old == expected).then_some(operand),
        }
    }
}

/// Result of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Effect {
    /// Bytes to write; none after a failed comparison.
    pub change: Option<Change>,
    /// The value before an atomic, little-endian in the low bytes; 0 for a store.
    pub old: u64,
}

/// Bytes that change in a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Change {
    /// Offset in the page.
    pub offset: u16,
    /// 1 to [`MAX_STORE`] bytes.
    pub bytes: Vec<u8>,
    /// Mask of the bytes that are written.
    pub mask: u64,
}

impl Change {
    /// Runs of bytes to write: offset in the page, and the bytes.
    pub fn runs(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let set = |index: usize| self.mask.checked_shr(index.try_into().ok()?).map(|mask| mask & 1 == 1);
            while at < self.bytes.len() && set(at) != Some(true) {
                at += 1;
            }
            let start = at;
            while at < self.bytes.len() && set(at) == Some(true) {
                at += 1;
            }
            (at > start).then(|| (usize::from(self.offset) + start, &self.bytes[start..at]))
        })
    }
}

/// The mask that covers `len` bytes.
#[must_use]
pub fn full_mask(len: usize) -> u64 {
    if len >= MAX_STORE { u64::MAX } else { (1 << len) - 1 }
}

impl Operation {
    /// A store of all `bytes`.
    #[must_use]
    pub fn store(offset: u16, bytes: &[u8]) -> Self {
        Self::Store { offset, bytes: bytes.to_vec(), mask: full_mask(bytes.len()) }
    }

    /// Whether the operation is an atomic and needs the present value.
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        matches!(self, Self::Atomic { .. })
    }

    /// Whether the operation lies inside a page of `size` bytes and has allowed lengths.
    #[must_use]
    pub fn is_valid(&self, size: usize) -> bool {
        match self {
            Self::Store { offset, bytes, .. } => {
                (1..=MAX_STORE).contains(&bytes.len()) && usize::from(*offset) + bytes.len() <= size
            }
            Self::Atomic { offset, width, .. } => {
                matches!(width, 1 | 2 | 4 | 8) && usize::from(*offset) + usize::from(*width) <= size
            }
        }
    }

    /// The effect on the content of a page. The operation must be valid for a page of that size ([`Self::is_valid`]).
    #[must_use]
    pub fn effect(&self, content: &[u8]) -> Effect {
        match self {
            Self::Store { offset, bytes, mask } => Effect {
                change: Some(Change {
                    offset: *offset,
                    bytes: bytes.clone(),
                    mask: *mask & full_mask(bytes.len()),
                }),
                old: 0,
            },
            Self::Atomic { offset, width, kind, operand, expected } => {
                let (at, width) = (usize::from(*offset), usize::from(*width));
                let mut word = [0; 8];
                if let (Some(into), Some(from)) = (word.get_mut(..width), content.get(at..at + width)) {
                    into.copy_from_slice(from);
                }
                let bits = if width == 8 { u64::MAX } else { (1u64 << (8 * width)) - 1 };
                let old = u64::from_le_bytes(word);
                let change = kind.apply(old, operand & bits, expected & bits).map(|new| Change {
                    offset: *offset,
                    bytes: (new & bits).to_le_bytes()[..width].to_vec(),
                    mask: full_mask(width),
                });
                Effect { change, old }
            }
        }
    }
}
