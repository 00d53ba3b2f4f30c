//! A vCPU's information about itself and its machine.

#![allow(unsafe_code)] // Arguments lie on the stack as C strings, put there by the monitor.

use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::ffi::{CStr, c_char};
use payload_abi::BootInfo;
use payload_spmd::settings::parse_number;

/// The vCPU that `main` runs on.
#[derive(Debug, Clone, Copy)]
pub struct Vcpu {
    info: &'static BootInfo,
    /// argc, then argv: pointers to C strings.
    arguments: *const u64,
}

impl Vcpu {
    /// # Safety
    /// `arguments` must be the address of argc, followed by argc pointers to C strings, all valid forever.
    pub(crate) unsafe fn new(info: &'static BootInfo, arguments: *const u64) -> Self {
        Self { info, arguments }
    }

    /// Returns the monitor's description of the machine.
    pub fn info(&self) -> &'static BootInfo {
        self.info
    }

    /// Returns this vCPU's index, from 0.
    pub fn index(&self) -> u32 {
        self.info.vcpu_index
    }

    /// Returns the number of vCPUs of the VM.
    pub fn count(&self) -> u32 {
        self.info.vcpu_count
    }

    /// Returns the arguments, the program's name first. One that isn't UTF-8 reads as "?".
    pub fn arguments(&self) -> impl Iterator<Item = &'static str> + use<> {
        let at = self.arguments;
        // SAFETY: promised to `new`.
        let count = unsafe { at.read() };
        (0..usize::try_from(count).unwrap_or(0)).map(move |index| {
            // SAFETY: promised to `new`: argc pointers follow argc, each to a C string.
            let text = unsafe { CStr::from_ptr(at.add(1).add(index).cast::<*const c_char>().read()) };
            text.to_str().unwrap_or("?")
        })
    }

    /// Returns argument `index` (0 is the program's name) as a number, decimal or `0x` hexadecimal, with the suffixes K, M and G.
    /// Returns `default` if it is absent.
    ///
    /// # Panics
    /// The argument isn't a number; the message is a sentence for the user.
    pub fn number(&self, index: usize, default: u64) -> u64 {
        match self.arguments().nth(index) {
            None => default,
            Some(text) => parse_number(text).unwrap_or_else(|| {
                panic!("Argument {index} is '{text}'; give a number such as 4096, 0x1000 or 4K")
            }),
        }
    }

    /// Returns whether AVX instructions can be used, by the usual user space check. CPUID must report AVX and enabled extended state,
    /// and XCR0 must include AVX state.
    pub fn has_avx(&self) -> bool {
        const OSXSAVE_AND_AVX: u32 = 1 << 27 | 1 << 28;
        const SSE_AND_AVX_STATE: u32 = 6;
        let features = __cpuid(1).ecx;
        if features & OSXSAVE_AND_AVX != OSXSAVE_AND_AVX {
            return false;
        }
        let xcr0: u32;
        // SAFETY: XGETBV works in ring 3 when OSXSAVE is set.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") xcr0, out("edx") _, options(nomem, nostack, preserves_flags))
        };
        xcr0 & SSE_AND_AVX_STATE == SSE_AND_AVX_STATE
    }

    /// Converts ticks to nanoseconds.
    pub fn nanoseconds(&self, ticks: u64) -> f64 {
        payload_loops::tsc::nanoseconds(ticks, self.info.tsc_khz)
    }
}
