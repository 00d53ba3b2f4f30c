//! Passes one cache line back and forth between two processors.

use core::arch::asm;

/// One of the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Writes odd numbers, waits for even ones.
    First,
    /// Waits for odd numbers, answers with the next.
    Second,
}

/// Passes the 64-bit word at `address` back and forth `rounds` times; returns the ticks. Both sides call it with the same `rounds`,
/// with the word 0 before. A round is two transfers of the line.
///
/// # Safety
/// `address` must be mapped, 8-byte aligned, and used by the two sides only. The call returns only after the other side has played
/// all rounds.
pub unsafe fn ping_pong(address: u64, side: Side, rounds: u64) -> u64 {
    if rounds == 0 {
        return 0;
    }
    let last = rounds.wrapping_mul(2);
    let started = crate::tsc::start();
    // SAFETY: the caller vouches for the word.
    unsafe {
        match side {
            Side::First => asm!(
                "2:",
                "inc {next}",
                "mov [{address}], {next}",
                "inc {next}",
                "3:",
                "cmp [{address}], {next}",
                "jne 3b",
                "cmp {next}, {last}",
                "jne 2b",
                next = inout(reg) 0_u64 => _, address = in(reg) address, last = in(reg) last,
                options(nostack)
            ),
            Side::Second => asm!(
                "2:",
                "inc {next}",
                "3:",
                "cmp [{address}], {next}",
                "jne 3b",
                "inc {next}",
                "mov [{address}], {next}",
                "cmp {next}, {last}",
                "jne 2b",
                next = inout(reg) 0_u64 => _, address = in(reg) address, last = in(reg) last,
                options(nostack)
            ),
        }
    }
    crate::tsc::end().wrapping_sub(started)
}
