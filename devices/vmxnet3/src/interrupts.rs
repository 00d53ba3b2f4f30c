//! Interrupt vectors: masks, automatic masking, and pending interrupts.

use crate::registers::INTERRUPTS_MAX;

/// Interrupts to the guest. The PCI shell implements it.
pub trait Interrupts: Send {
    /// Raises MSI-X vector `vector` (below [`crate::pci::VECTORS`]). Must not block. The owner of the MSI-X table keeps a masked one
    /// pending.
    fn raise(&self, vector: u16);
}

/// The vectors' masks (register IMR) and pending interrupts: one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vectors {
    pub masked: u32,
    pub pending: u32,
    /// Whether a raised vector masks itself until the driver unmasks it.
    pub auto_mask: bool,
}

impl Vectors {
    /// All masked, nothing pending.
    pub fn new() -> Self {
        Self { masked: (1 << INTERRUPTS_MAX) - 1, pending: 0, auto_mask: true }
    }

    /// Requests an interrupt of a vector.
    pub fn request(&mut self, vector: u8) {
        self.pending |= bit(vector);
    }

    /// Handles a write to an IMR register.
    pub fn set_masked(&mut self, vector: u8, masked: bool) {
        if masked {
            self.masked |= bit(vector);
        } else {
            self.masked &= !bit(vector);
        }
    }

    pub fn is_masked(&self, vector: u8) -> bool {
        self.masked & bit(vector) != 0
    }

    /// Whether [`Vectors::take_due`] would return any.
    pub fn any_due(&self) -> bool {
        self.pending & !self.masked != 0
    }

    /// Returns the vectors to raise now, one bit each.
    pub fn take_due(&mut self) -> u32 {
        let due = self.pending & !self.masked;
        self.pending &= !due;
        if self.auto_mask {
            self.masked |= due;
        }
        due
    }
}

fn bit(vector: u8) -> u32 {
    if vector < INTERRUPTS_MAX { 1 << vector } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::Vectors;

    #[test]
    fn a_vector_fires_once_until_it_is_unmasked_and_nothing_is_lost_meanwhile() {
        let mut vectors = Vectors::new();
        vectors.request(1);
        assert_eq!(vectors.take_due(), 0, "masked at first");
        vectors.set_masked(1, false);
        assert_eq!(vectors.take_due(), 2);
        assert!(vectors.is_masked(1));
        vectors.request(1);
        vectors.request(1);
        assert_eq!(vectors.take_due(), 0);
        vectors.set_masked(1, false);
        assert_eq!(vectors.take_due(), 2);
        vectors.set_masked(1, false);
        assert_eq!(vectors.take_due(), 0);
    }

    #[test]
    fn without_auto_mask_every_request_fires() {
        let mut vectors = Vectors { masked: 0, pending: 0, auto_mask: false };
        for _ in 0..2 {
            vectors.request(0);
            assert_eq!(vectors.take_due(), 1);
        }
        vectors.request(200);
        assert_eq!(vectors.take_due(), 0, "vectors that don't exist don't fire");
    }
}
