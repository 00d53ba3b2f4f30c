//! Causes an exception, to show the monitor's report. Argument: one of undefined, divide, unmapped, null, privileged, write-window,
//! stack, panic.

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Faults on purpose.

use core::arch::asm;
use payload_runtime::{Vcpu, println};

payload_runtime::entry!(main);

fn main(vcpu: Vcpu) -> u32 {
    if vcpu.index() != 0 {
        return 0;
    }
    let what = vcpu.arguments().nth(1).unwrap_or("");
    // SAFETY: each of these raises an exception, which ends the VM.
    unsafe {
        match what {
            "undefined" => asm!("ud2"),
            "divide" => asm!("xor ecx, ecx", "div ecx", out("rax") _, out("rcx") _, out("rdx") _),
            "unmapped" => asm!("mov rax, [{}]", in(reg) 0x4000_0000_0000_u64, out("rax") _),
            "null" => asm!("mov rax, [{}]", in(reg) 8_u64, out("rax") _),
            "privileged" => asm!("hlt"),
            "write-window" => asm!("mov [{}], rax", in(reg) vcpu.info().window.start),
            "stack" => asm!("mov rsp, 8", "push rax", options(noreturn)),
            "panic" => panic!("asked for"),
            _ => {}
        }
    }
    println!("No exception came of '{what}'");
    2
}
