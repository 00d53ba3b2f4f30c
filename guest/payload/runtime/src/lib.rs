//! Entry, console, arguments and exit of payload programs, and the start of an SPMD program on all vCPUs. A program is
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//! payload_runtime::entry!(main);
//! fn main(vcpu: Vcpu) -> u32 { 0 }
//! ```
//!
//! `main` runs on every vCPU. The result of vCPU 0 is the exit code of the VM; the others park.

#![no_std]

pub mod console;
pub mod ports;
pub mod spmd;
mod start;
mod symbols;
pub mod vcpu;

pub use payload_abi as abi;
pub use payload_loops as loops;
pub use payload_spmd::Barrier;
pub use vcpu::Vcpu;

/// Converts a guest-physical address to a pointer: page tables map one to one.
pub fn pointer_to<T>(address: u64) -> *mut T {
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 has 64-bit pointers")]
    core::ptr::with_exposed_provenance_mut(address as usize)
}

/// Sets the program's main function, `fn(Vcpu) -> u32`, and defines its panic handler.
#[macro_export]
macro_rules! entry {
    ($main:path) => {
        // Called by the runtime's `_start` on every vCPU.
        #[expect(unsafe_code, reason = "the runtime finds the program's main function by name")]
        // SAFETY: the only definition of this name, with the signature that the runtime declares.
        #[unsafe(no_mangle)]
        extern "Rust" fn payload_main(vcpu: $crate::Vcpu) -> u32 {
            $main(vcpu)
        }

        #[panic_handler]
        fn panic(info: &::core::panic::PanicInfo<'_>) -> ! {
            $crate::console::print_now(::core::format_args!("{info}\n"));
            $crate::ports::exit($crate::ports::PANIC_EXIT_CODE)
        }
    };
}
