//! Says hello from every vCPU, and shows the arguments. `exit=N` among them sets the exit code.

#![no_std]
#![no_main]

use payload_runtime::{Barrier, Vcpu, println};

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
    code
}
