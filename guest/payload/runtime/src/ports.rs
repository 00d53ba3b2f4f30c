//! I/O ports, and the end of a vCPU and of the VM.

#![allow(unsafe_code)] // Port instructions.

use core::arch::asm;
use payload_abi::{PORT_CONSOLE, PORT_EXIT, PORT_PARK};

/// Exit code of a program that panicked.
pub const PANIC_EXIT_CODE: u32 = 101;

/// Ends the VM with this exit code.
pub fn exit(code: u32) -> ! {
    loop {
        // SAFETY: the exit port only ends the VM.
        unsafe { asm!("out dx, eax", in("dx") PORT_EXIT, in("eax") code, options(nostack, preserves_flags)) };
    }
}

/// Ends this vCPU; the others continue.
pub fn park() -> ! {
    loop {
        // SAFETY: the park port only ends this vCPU.
        unsafe { asm!("out dx, al", in("dx") PORT_PARK, in("al") 0_u8, options(nostack, preserves_flags)) };
    }
}

/// Reads 32 bits from a port that the host serves (`payload_abi::PORT_HOST` and on).
pub fn read(port: u16) -> u32 {
    let value;
    // SAFETY: ports of the payload machine reach the monitor only. It touches only memory that the program has agreed on with it. The
    // compiler assumes that this statement changes memory.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nostack, preserves_flags)) };
    value
}

/// Writes 32 bits to a port that the host serves.
pub fn write(port: u16, value: u32) {
    // SAFETY: as for `read`.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack, preserves_flags)) };
}

/// Writes bytes to the console with one instruction; KVM may still exit for each.
pub(crate) fn write_console(bytes: &[u8]) {
    // SAFETY: reads exactly the bytes of the slice.
    unsafe {
        asm!(
            "rep outsb",
            in("dx") PORT_CONSOLE, inout("rcx") bytes.len() => _, inout("rsi") bytes.as_ptr() => _,
            options(nostack, preserves_flags, readonly)
        );
    }
}
