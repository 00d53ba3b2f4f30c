//! A set of vectors, the type of IRR, ISR and TMR.

use serde::{Deserialize, Serialize};

/// 256 bits, one per vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct VectorSet([u32; 8]);

impl VectorSet {
    /// Whether `vector` is in it.
    pub fn contains(&self, vector: u8) -> bool {
        self.0[usize::from(vector >> 5)] & Self::bit(vector) != 0
    }

    /// Adds `vector`; returns whether it was absent.
    pub(crate) fn insert(&mut self, vector: u8) -> bool {
        let word = &mut self.0[usize::from(vector >> 5)];
        let added = *word & Self::bit(vector) == 0;
        *word |= Self::bit(vector);
        added
    }

    pub(crate) fn remove(&mut self, vector: u8) {
        self.0[usize::from(vector >> 5)] &= !Self::bit(vector);
    }

    /// The highest vector, which has the highest priority.
    pub fn highest(&self) -> Option<u8> {
        (0u8..8).rev().find_map(|index| {
            let word = self.0[usize::from(index)];
            let bit = u8::try_from(word.checked_ilog2()?).ok()?;
            Some(index << 5 | bit)
        })
    }

    /// The 32 vectors from `32 * index` on; 0 above the last word.
    pub fn word(&self, index: usize) -> u32 {
        self.0.get(index).copied().unwrap_or(0)
    }

    /// Vectors in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + '_ {
        (0..=u8::MAX).filter(|vector| self.contains(*vector))
    }

    fn bit(vector: u8) -> u32 {
        1 << (vector & 31)
    }
}

impl FromIterator<u8> for VectorSet {
    fn from_iter<T: IntoIterator<Item = u8>>(vectors: T) -> Self {
        let mut set = Self::default();
        for vector in vectors {
            set.insert(vector);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_vector_comes_first_wherever_it_lies() {
        let mut set: VectorSet = [0, 31, 32, 100, 255].into_iter().collect();
        assert!(!set.insert(100));
        assert_eq!((set.word(0), set.word(3), set.word(8)), (0x8000_0001, 1 << 4, 0));
        let mut order = Vec::new();
        while let Some(vector) = set.highest() {
            order.push(vector);
            set.remove(vector);
        }
        assert_eq!(order, [255, 100, 32, 31, 0]);
        assert_eq!(set, VectorSet::default());
    }
}
