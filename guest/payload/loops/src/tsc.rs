//! The time stamp counter.

use core::arch::asm;

/// Ticks before what follows begins: earlier loads and stores are done (AMD APM volume 3, RDTSC).
#[inline]
pub fn start() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: RDTSC is allowed in ring 3 (CR4.TSD is clear) and touches only the named registers.
    unsafe { asm!("mfence", "lfence", "rdtsc", "lfence", out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Ticks after what came before ended, its stores included.
#[inline]
pub fn end() -> u64 {
    start()
}

/// Ticks as nanoseconds, at `khz`.
pub fn nanoseconds(ticks: u64, khz: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits of nanoseconds are 104 days")]
    if khz == 0 { 0.0 } else { ticks as f64 * 1e6 / khz as f64 }
}
