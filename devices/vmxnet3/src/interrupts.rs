//! Interrupt vectors: masks that set themselves, and what waits behind them.

use crate::registers::INTERRUPTS_MAX;

/// Interrupts the guest. Implemented by the PCI shell.
pub trait Interrupts: Send {
    /// Sends MSI-X vector `vector` (below [`crate::pci::VECTORS`]). Must not block; what the MSI-X table masks is
    /// kept pending by whoever owns that table.
    fn raise(&self, vector: u16);
}

/// The vectors' masks (register IMR) and what is pending behind them: one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vectors {
    pub masked: u32,
    pub pending: u32,
    /// A vector that fires masks itself until the driver unmasks it.
    pub auto_mask: bool,
}

impl Vectors {
    /// All masked, nothing pending.
    pub fn new() -> Self {
        Self { masked: (1 << INTERRUPTS_MAX) - 1, pending: 0, auto_mask: true }
    }

    /// There is something to tell on this vector.
    pub fn request(&mut self, vector: u8) {
        self.pending |= bit(vector);
    }

    /// A write to an IMR register.
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

    /// Whether [`Vectors::take_due`] would give any.
    pub fn any_due(&self) -> bool {
        self.pending & !self.masked != 0
    }

    /// Vectors that fire now, one bit each.
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
