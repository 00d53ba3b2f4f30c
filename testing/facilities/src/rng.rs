//! Pseudo-random numbers from a seed, for simulators and generated inputs: a run is a function of its seed.

/// The generator splitmix64. Every seed gives a good one, adjacent seeds too.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    /// 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which isn't 0.
    #[inline]
    pub fn below(&mut self, limit: u32) -> u32 {
        // The upper half of a 64-bit product of two 32-bit numbers.
        let product = (self.bits() >> 32) * u64::from(limit);
        u32::try_from(product >> 32).unwrap_or(0)
    }

    /// A number from `low` to `high`, both included.
    #[inline]
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(high - low + 1)
    }

    /// True in `parts` of 1000 cases.
    #[inline]
    pub fn chance(&mut self, parts: u32) -> bool {
        self.below(1000) < parts
    }
}
