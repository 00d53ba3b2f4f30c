//! Repeated single accesses: ports, device memory, plain memory.

use core::arch::asm;

/// Writes a byte to an I/O port `times` times; returns the ticks.
///
/// # Safety
/// In a VM only, with IOPL 3; the port must tolerate it.
pub unsafe fn port_out(port: u16, times: u64) -> u64 {
    let started = crate::tsc::start();
    for _ in 0..times {
        // SAFETY: the caller vouches for the port.
        unsafe { asm!("out dx, al", in("dx") port, in("al") 0_u8, options(nostack, preserves_flags)) };
    }
    crate::tsc::end().wrapping_sub(started)
}

/// Stores 32 bits at `address` `times` times; returns the ticks.
///
/// # Safety
/// `address` must be 4-byte aligned and writable.
pub unsafe fn store(address: u64, times: u64) -> u64 {
    let started = crate::tsc::start();
    for _ in 0..times {
        // SAFETY: the caller vouches for the address.
        unsafe { asm!("mov [{}], eax", in(reg) address, in("eax") 0_u32, options(nostack, preserves_flags)) };
    }
    crate::tsc::end().wrapping_sub(started)
}

/// Follows a chain of 64-bit offsets from `base` for `times` steps (a multiple of 8, at least 8); returns the ticks. Each load
/// depends on the previous one.
///
/// # Safety
/// Every offset of the chain from offset 0 must lead to a readable 8-byte word.
pub unsafe fn chase(base: u64, times: u64) -> u64 {
    let rounds = (times / 8).max(1);
    let started = crate::tsc::start();
    // SAFETY: the caller vouches for the chain.
    unsafe {
        asm!(
            "2:",
            ".rept 8",
            "mov {offset}, [{base} + {offset}]",
            ".endr",
            "dec {rounds}",
            "jnz 2b",
            offset = inout(reg) 0_u64 => _, base = in(reg) base, rounds = inout(reg) rounds => _,
            options(nostack, readonly)
        );
    }
    crate::tsc::end().wrapping_sub(started)
}
