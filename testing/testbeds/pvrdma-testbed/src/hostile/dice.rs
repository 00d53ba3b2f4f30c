//! Source of the attacker's choices.

/// A source of numbers: a generator, or a fuzzer's input.
pub trait Entropy {
    /// The next number; `None` at the end of the input.
    fn next(&mut self) -> Option<u64>;
}

/// An endless pseudo-random sequence from a seed (xorshift64*).
#[derive(Debug, Clone)]
pub struct Seed(pub u64);

impl Entropy for Seed {
    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.max(1);
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        Some(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D))
    }
}

/// A fuzzer's input: four bytes per number.
#[derive(Debug, Clone)]
pub struct Bytes<'a>(pub &'a [u8]);

impl Entropy for Bytes<'_> {
    fn next(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        let word = u64::from(u32::from_le_bytes(*word));
        // Both halves of the result depend on the whole word.
        Some(word << 32 | word.wrapping_mul(0x9E37_79B9) & 0xFFFF_FFFF)
    }
}

/// Random choices.
#[derive(Debug)]
pub struct Dice<E> {
    source: E,
    /// The input has ended; choices are 0 from now on.
    pub over: bool,
}

impl<E: Entropy> Dice<E> {
    /// From a source.
    pub fn new(source: E) -> Self {
        Self { source, over: false }
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.source.next().unwrap_or_else(|| {
            self.over = true;
            0
        })
    }

    /// Any 32-bit number.
    pub fn word(&mut self) -> u32 {
        u32::try_from(self.any() >> 32).unwrap()
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from((self.any() >> 32) % limit.max(1) as u64).unwrap()
    }

    /// True in one of `of` cases.
    pub fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// One element of `from`.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
