//! Measures the frequency of this machine's time-stamp counter. An emulated host reads the same counter. Its own
//! calibration may be wrong by factors on a crowded machine, and then so are its clocks and time-outs.
#![allow(unsafe_code, reason = "reading the time-stamp counter is an intrinsic without a safe form")]

use std::time::{Duration, Instant};

fn counter() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and reads no memory. User space may execute it on Linux unless the
    // process forbids it by prctl, which this one doesn't.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Reads both clocks without a pause between the two readings.
fn moment() -> (Instant, u64) {
    let mut best = (Duration::MAX, Instant::now(), 0);
    for _ in 0..50 {
        let before = Instant::now();
        let ticks = counter();
        let width = before.elapsed();
        if width < best.0 {
            best = (width, before, ticks);
        }
    }
    (best.1, best.2)
}

/// Returns the frequency in kHz, with an error of about 1e-4.
pub fn tsc_khz() -> u64 {
    let (start, first) = moment();
    std::thread::sleep(Duration::from_millis(60));
    let (end, last) = moment();
    let nanoseconds = end.duration_since(start).as_nanos().max(1);
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / nanoseconds).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_frequency_is_that_of_a_processor() {
        let khz = super::tsc_khz();
        assert!((300_000..8_000_000).contains(&khz), "{khz} kHz");
        assert!(khz.abs_diff(super::tsc_khz()) < khz / 200);
    }
}
