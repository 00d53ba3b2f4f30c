//! How far a guest's clock advances during the blackout of its migration.
//!
//! KVM adds the time since the save by the hosts' wall clocks, which may differ. The guest's clock would jump by hours, or lose the time
//! of the blackout. So the monitor accepts the wall clocks only within these limits around the measured time:
//!
//! ```text
//! measured - MAX_CLOCK_DIFFERENCE <= time by wall clocks <= measured + MAX_CLOCK_DIFFERENCE + MAX_TRANSIT
//! ```
//! Otherwise it uses the measured time.

use std::time::Duration;

use machine::state::SavedClock;

/// Wall clocks synchronized by NTP differ by less.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_millis(100);
/// Transit time of the last bytes over the network, which the measured time doesn't include.
const MAX_TRANSIT: Duration = Duration::from_secs(1);

/// Returns the clock to restore at `now_ns` of this host's wall clock, for a guest that has been stopped for `measured`. Where the wall
/// clocks weren't accepted, also returns their difference in nanoseconds. Without a measurement the function accepts them.
pub fn bounded(saved: &SavedClock, measured: Option<Duration>, now_ns: u64) -> (SavedClock, Option<i128>) {
    let (Some(then_ns), Some(measured)) = (saved.realtime_ns, measured) else { return (saved.clone(), None) };
    let by_clocks = i128::from(now_ns) - i128::from(then_ns);
    let measured_ns = u64::try_from(measured.as_nanos()).unwrap_or(u64::MAX);
    let difference = by_clocks - i128::from(measured_ns);
    let limit = |limit: Duration| i128::try_from(limit.as_nanos()).unwrap_or(i128::MAX);
    let believable = -limit(MAX_CLOCK_DIFFERENCE)..=limit(MAX_CLOCK_DIFFERENCE + MAX_TRANSIT);
    if believable.contains(&difference) {
        return (saved.clone(), None);
    }
    // KVM adds the time since `realtime_ns`.
    let realtime_ns = Some(now_ns.saturating_sub(measured_ns));
    (SavedClock { realtime_ns, ..saved.clone() }, Some(difference))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const NOW: u64 = 1_000_000 * SECOND;

    /// Nanoseconds that KVM adds to the clock of a guest that was saved `by_clocks_ns` ago by the wall clocks, and the difference.
    fn added(by_clocks_ns: i64, measured: Option<Duration>) -> (u64, Option<i128>) {
        let realtime_ns = Some(NOW.checked_add_signed(-by_clocks_ns).unwrap());
        let saved = SavedClock { version: 1, clock_ns: 7, realtime_ns, host_tsc: None };
        let (clock, difference) = bounded(&saved, measured, NOW);
        assert_eq!(clock.clock_ns, 7);
        (NOW - clock.realtime_ns.unwrap(), difference)
    }

    #[test]
    fn wall_clocks_that_agree_with_the_pause_are_believed() {
        let measured = Some(Duration::from_millis(300));
        for by_clocks in [200_000_000_u64, 300_000_000, 350_000_000, 1_400_000_000] {
            assert_eq!(added(by_clocks.cast_signed(), measured), (by_clocks, None));
        }
        let without = SavedClock { version: 1, clock_ns: 7, realtime_ns: None, host_tsc: None };
        assert_eq!(bounded(&without, measured, NOW), (without.clone(), None));
        assert_eq!(added(3_600 * SECOND.cast_signed(), None), (3_600 * SECOND, None), "an older source");
    }

    /// The destination's wall clock is hours ahead or behind: the guest's clock advances by the measured blackout.
    #[test]
    fn wall_clocks_that_differ_move_the_guest_s_clock_by_the_measured_pause() {
        let pause = Duration::from_millis(300);
        for by_clocks in [7_200 * SECOND.cast_signed(), -7_200 * SECOND.cast_signed(), 0, 1_500_000_000] {
            let difference = i128::from(by_clocks) - 300_000_000;
            assert_eq!(added(by_clocks, Some(pause)), (300_000_000, Some(difference)));
        }
        // A hostile source's value.
        assert_eq!(added(0, Some(Duration::MAX)).0, NOW);
    }
}
