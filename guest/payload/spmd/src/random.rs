//! Random numbers from a seed: splitmix64. Every seed yields a good sequence, and so do adjacent seeds.

/// An endless sequence.
#[derive(Debug, Clone, Copy)]
pub struct Random(u64);

impl Random {
    /// Creates the sequence of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, which isn't 0. The bias is at most `limit` in 2^64.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// Returns a number in [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits are what a double holds")]
    pub const fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    /// The first values of seed 1234567, as published by the algorithm's author.
    #[test]
    fn the_published_sequence() {
        let mut random = Random::new(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.bits(), random.bits(), random.bits()], first);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.unit())));
    }
}
