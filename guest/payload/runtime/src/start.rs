//! The entry code.

#![allow(unsafe_code)] // Entry is assembly, and what the monitor left in memory comes as addresses.

use crate::vcpu::Vcpu;
use core::arch::global_asm;
use payload_abi::{BootInfo, MAGIC, VERSION};

unsafe extern "Rust" {
    /// Defined by `entry!` in the program.
    safe fn payload_main(vcpu: Vcpu) -> u32;
}

// At entry: rdi is the address of the boot information, rsp that of argc, 16-byte aligned.
global_asm!(
    ".section .text.start, \"ax\"",
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rsi, rsp",
    "and rsp, -16",
    "call {start}",
    "ud2",
    ".text",
    start = sym start,
);

extern "C" fn start(boot: *const BootInfo, arguments: *const u64) -> ! {
    // SAFETY: the monitor has written it for this vCPU, and no code changes it while the VM runs.
    let info: &'static BootInfo = unsafe { &*boot };
    if info.magic != MAGIC || info.version != VERSION || (info.size as usize) < size_of::<BootInfo>() {
        crate::println!("This program needs version {VERSION} of the payload interface, and got {info:x?}");
        crate::ports::exit(crate::ports::PANIC_EXIT_CODE);
    }
    // SAFETY: the monitor has written argc, argv and the strings there (System V ABI, process initialization).
    let vcpu = unsafe { Vcpu::new(info, arguments) };
    let code = payload_main(vcpu);
    if info.vcpu_index == 0 { crate::ports::exit(code) } else { crate::ports::park() }
}
