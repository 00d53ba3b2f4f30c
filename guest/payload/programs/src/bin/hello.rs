//! Prints a greeting from every vCPU, and the arguments. The argument `exit=N` sets the exit code.

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Reads the window.

use payload_runtime::abi::Region;
use payload_runtime::{Barrier, Vcpu, pointer_to, println};

static BARRIER: Barrier = Barrier::new();

payload_runtime::entry!(main);

fn main(vcpu: Vcpu) -> u32 {
    println!("Hello from vCPU {} of {}", vcpu.index(), vcpu.count());
    BARRIER.wait(vcpu.count());
    if vcpu.index() != 0 {
        return 0;
    }
    let mut code = 0;
    for (index, argument) in vcpu.arguments().enumerate() {
        println!("Argument {index}: {argument}");
        if let Some(number) = argument.strip_prefix("exit=") {
            code = number.parse().unwrap_or(1);
        }
    }
    let info = vcpu.info();
    println!(
        "TSC {} kHz, AVX: {}, free RAM {:#x} bytes from {:#x}",
        info.tsc_khz,
        vcpu.has_avx(),
        info.free.size,
        info.free.start
    );
    show_window(info.window);
    code
}

/// Prints the printable characters at the start of the window.
fn show_window(window: Region) {
    let mut text = [0_u8; 16];
    if window.size < 16 {
        return;
    }
    // SAFETY: the window is mapped for reading, and has at least this length.
    unsafe { pointer_to::<[u8; 16]>(window.start).copy_to_nonoverlapping(&raw mut text, 1) };
    let printable = text.iter().take_while(|byte| (b' '..0x7f).contains(*byte)).count();
    if let Some(Ok(text)) = text.get(..printable).map(core::str::from_utf8) {
        println!("Window begins with: {text}");
    }
}
