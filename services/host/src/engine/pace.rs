//! Limit of peers' writes to the memory of a VM during its pre-copy.

/// Lower bound of the limit, bytes per second: limited peers still progress, and a measurement at a quiet moment doesn't stop them.
const MIN_PEER_BYTES_PER_S: u64 = 1 << 20;

/// Measured rate of peers' writes to a device's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// Time of the last measurement, and bytes written until then.
    looked: (u64, u64),
    /// Highest rate between two measurements, bytes per second: an estimate of the unlimited rate.
    fastest: u64,
}

impl Pace {
    /// Begins to measure at `now`, nanoseconds.
    pub(super) fn begin(now: u64) -> Self {
        Self { looked: (now, 0), fastest: 0 }
    }

    /// The limit in bytes per second: `fastest * (100 - percent) / 100`, at least [`MIN_PEER_BYTES_PER_S`]. `None`: no limit. `bytes` were
    /// written since the beginning.
    pub(super) fn hold_back(&mut self, now: u64, bytes: u64, percent: u8) -> Option<u64> {
        let (before, written) = std::mem::replace(&mut self.looked, (now, bytes));
        let rate = u128::from(bytes.saturating_sub(written)) * 1_000_000_000
            / u128::from(now.saturating_sub(before).max(1));
        self.fastest = self.fastest.max(u64::try_from(rate).unwrap_or(u64::MAX));
        if percent == 0 || self.fastest == 0 {
            return None;
        }
        let left = u128::from(self.fastest) * u128::from(100 - percent.min(99)) / 100;
        Some(u64::try_from(left).unwrap_or(u64::MAX).max(MIN_PEER_BYTES_PER_S))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_held_back_from_what_they_wrote_unhindered() {
        const SECOND: u64 = 1_000_000_000;
        let mut pace = Pace::begin(5 * SECOND);
        assert_eq!(pace.hold_back(6 * SECOND, 0, 20), None, "nobody writes");
        assert_eq!(pace.hold_back(7 * SECOND, 1_000_000_000, 30), Some(700_000_000));
        // Limited peers write less, which isn't the base of the next limit.
        assert_eq!(pace.hold_back(8 * SECOND, 1_700_000_000, 50), Some(500_000_000));
        assert_eq!(pace.hold_back(9 * SECOND, 2_200_000_000, 99), Some(10_000_000));
        assert_eq!(pace.hold_back(10 * SECOND, 2_210_000_000, 0), None);
        // More than before, in no time at all.
        assert_eq!(pace.hold_back(10 * SECOND, u64::MAX, 90), Some(u64::MAX / 10));
    }

    #[test]
    fn something_may_always_be_written() {
        let mut pace = Pace::begin(0);
        assert_eq!(pace.hold_back(1_000_000_000, 2 << 20, 99), Some(MIN_PEER_BYTES_PER_S));
    }
}
