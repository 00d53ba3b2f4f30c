//! Memory copies.

use core::arch::asm;

/// Bytes per iteration of the unrolled variants; lengths are multiples of it.
pub const BLOCK: u64 = 256;

/// A copy method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// String move by bytes: `rep movsb`.
    RepMovsb,
    /// 16-byte loads and non-temporal stores (SSE2).
    SseStream,
    /// 32-byte loads and stores (AVX).
    Avx,
    /// 32-byte loads and non-temporal stores (AVX).
    AvxStream,
}

impl Variant {
    /// All variants.
    pub const ALL: [Self; 4] = [Self::RepMovsb, Self::SseStream, Self::Avx, Self::AvxStream];

    /// Returns its name on a command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::RepMovsb => "rep_movsb",
            Self::SseStream => "sse_stream",
            Self::Avx => "avx",
            Self::AvxStream => "avx_stream",
        }
    }

    /// Returns the variant of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// Returns its number in a [`crate::job::Job`].
    pub fn number(self) -> u64 {
        match self {
            Self::RepMovsb => 0,
            Self::SseStream => 1,
            Self::Avx => 2,
            Self::AvxStream => 3,
        }
    }

    /// Returns the variant of that number.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.number() == number)
    }

    /// Returns whether it needs AVX.
    pub fn needs_avx(self) -> bool {
        matches!(self, Self::Avx | Self::AvxStream)
    }
}

/// Copies `length` bytes from `source` to `target` `repeats` times; returns the ticks.
///
/// # Safety
/// Both ranges must be mapped, must not overlap, and no other code may use them meanwhile. `length` must be a multiple of [`BLOCK`],
/// and both addresses of 32. The processor must support the variant.
pub unsafe fn repeat(variant: Variant, target: u64, source: u64, length: u64, repeats: u64) -> u64 {
    let started = crate::tsc::start();
    for _ in 0..repeats {
        // SAFETY: the caller vouches for the ranges.
        unsafe { once(variant, target, source, length) };
    }
    crate::tsc::end().wrapping_sub(started)
}

/// As [`repeat`], once and without timing.
///
/// # Safety
/// As for [`repeat`].
pub unsafe fn once(variant: Variant, target: u64, source: u64, length: u64) {
    if length == 0 {
        return;
    }
    // SAFETY: the caller vouches for the ranges. The loops below access exactly `length` bytes of each.
    unsafe {
        match variant {
            Variant::RepMovsb => asm!(
                "rep movsb",
                inout("rcx") length => _, inout("rdi") target => _, inout("rsi") source => _,
                options(nostack, preserves_flags)
            ),
            Variant::SseStream => asm!(
                ".p2align 5",
                "2:",
                ".irp at, 0, 64, 128, 192",
                "movdqa xmm0, [rsi + \\at]",
                "movdqa xmm1, [rsi + \\at + 16]",
                "movdqa xmm2, [rsi + \\at + 32]",
                "movdqa xmm3, [rsi + \\at + 48]",
                "movntdq [rdi + \\at], xmm0",
                "movntdq [rdi + \\at + 16], xmm1",
                "movntdq [rdi + \\at + 32], xmm2",
                "movntdq [rdi + \\at + 48], xmm3",
                ".endr",
                "add rsi, 256",
                "add rdi, 256",
                "sub rcx, 256",
                "jnz 2b",
                "sfence",
                inout("rcx") length => _, inout("rdi") target => _, inout("rsi") source => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack)
            ),
            Variant::Avx => asm!(
                ".p2align 5",
                "2:",
                ".irp at, 0, 128",
                "vmovdqa ymm0, [rsi + \\at]",
                "vmovdqa ymm1, [rsi + \\at + 32]",
                "vmovdqa ymm2, [rsi + \\at + 64]",
                "vmovdqa ymm3, [rsi + \\at + 96]",
                "vmovdqa [rdi + \\at], ymm0",
                "vmovdqa [rdi + \\at + 32], ymm1",
                "vmovdqa [rdi + \\at + 64], ymm2",
                "vmovdqa [rdi + \\at + 96], ymm3",
                ".endr",
                "add rsi, 256",
                "add rdi, 256",
                "sub rcx, 256",
                "jnz 2b",
                "vzeroupper",
                inout("rcx") length => _, inout("rdi") target => _, inout("rsi") source => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack)
            ),
            Variant::AvxStream => asm!(
                ".p2align 5",
                "2:",
                ".irp at, 0, 128",
                "vmovdqa ymm0, [rsi + \\at]",
                "vmovdqa ymm1, [rsi + \\at + 32]",
                "vmovdqa ymm2, [rsi + \\at + 64]",
                "vmovdqa ymm3, [rsi + \\at + 96]",
                "vmovntdq [rdi + \\at], ymm0",
                "vmovntdq [rdi + \\at + 32], ymm1",
                "vmovntdq [rdi + \\at + 64], ymm2",
                "vmovntdq [rdi + \\at + 96], ymm3",
                ".endr",
                "add rsi, 256",
                "add rdi, 256",
                "sub rcx, 256",
                "jnz 2b",
                "sfence",
                "vzeroupper",
                inout("rcx") length => _, inout("rdi") target => _, inout("rsi") source => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack)
            ),
        }
    }
}
