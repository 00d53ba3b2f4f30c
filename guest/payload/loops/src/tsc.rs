//! The time stamp counter.

use core::arch::asm;

/// Returns ticks before the following code begins: earlier loads and stores are complete (AMD APM volume 3, RDTSC).
#[inline]
pub fn start() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: RDTSC is permitted in ring 3 (CR4.TSD is clear) and changes only the named registers.
    unsafe { asm!("mfence", "lfence", "rdtsc", "lfence", out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Returns ticks after the preceding code has ended, including its stores.
#[inline]
pub fn end() -> u64 {
    start()
}

/// Converts ticks to nanoseconds, at `khz`.
pub fn nanoseconds(ticks: u64, khz: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits of nanoseconds are 104 days")]
    if khz == 0 { 0.0 } else { ticks as f64 * 1e6 / khz as f64 }
}
