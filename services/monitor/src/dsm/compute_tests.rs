//! Each instruction runs on the host's CPU and in the emulator, with the same registers and memory. Results must be equal.
#![allow(unsafe_code)] // Runs single instructions that use registers and load from one word.

use super::*;
use proptest::prelude::*;

const ARITHMETIC: u64 = CF | PF | ZF | SF | OF;
const AF: u64 = 1 << 4;
const RIP: u64 = 0x20_1000;
const AT: u64 = 0x70_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    rax: u64,
    rcx: u64,
    rdx: u64,
    /// The eight bytes at `rdi`.
    word: u64,
    flags: u64,
}

/// Runs an instruction on the host's CPU.
macro_rules! native {
    ($($byte:literal),+) => {
        |state: State| -> State {
            let State { mut rax, mut rcx, mut rdx, word, flags } = state;
            let mut flags = flags | 2;
            // SAFETY: the bytes are one instruction of rax, rcx and rdx that loads from `word` at the most.
            unsafe {
                std::arch::asm!(
                    "push {flags}",
                    "popfq",
                    concat!(".byte ", $(stringify!($byte), ",",)+ "0x90"),
                    "pushfq",
                    "pop {flags}",
                    flags = inout(reg) flags,
                    inout("rax") rax,
                    inout("rcx") rcx,
                    inout("rdx") rdx,
                    in("rdi") &raw const word,
                );
            }
            State { rax, rcx, rdx, word, flags: flags & ARITHMETIC }
        }
    };
}

fn ours(bytes: &[u8], state: State) -> State {
    let mut regs = kvm_regs {
        rax: state.rax,
        rcx: state.rcx,
        rdx: state.rdx,
        rdi: AT,
        rflags: state.flags | 2,
        rip: RIP,
        ..kvm_regs::default()
    };
    let mut load = |address: u64, width: usize| {
        let shift = 8 * u32::try_from(address.checked_sub(AT)?).ok()?;
        Some(state.word.checked_shr(shift)? & bits(width))
    };
    compute(bytes, &mut regs, &mut load).unwrap_or_else(|| panic!("{bytes:x?} isn't known"));
    assert_eq!(regs.rip, RIP + bytes.len() as u64);
    State { rax: regs.rax, rcx: regs.rcx, rdx: regs.rdx, word: state.word, flags: regs.rflags & ARITHMETIC }
}

macro_rules! check {
    ($state:expr, $([$($byte:literal),+]),+ $(,)?) => {
        $(
            let (expected, found) = (native!($($byte),+)($state), ours(&[$($byte),+], $state));
            prop_assert_eq!(found, expected, "{:x?}", [$($byte),+]);
        )+
    };
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        any::<u8>().prop_map(u64::from),
        prop_oneof![
            Just(0),
            Just(1),
            Just(u64::MAX),
            Just(1 << 63),
            Just(0x7fff_ffff),
            Just(0x8000_0000),
            Just(0xff)
        ],
    ]
}

fn states() -> impl Strategy<Value = State> {
    (value(), value(), value(), value(), any::<u64>()).prop_map(|(rax, rcx, rdx, word, flags)| State {
        rax,
        rcx,
        rdx,
        word,
        flags: flags & (ARITHMETIC | AF),
    })
}

proptest! {
    /// Instructions on registers change registers and flags as the CPU does.
    #[test]
    fn instructions_of_registers_do_what_the_processor_does(state in states()) {
        check!(state,
            [0x48, 0x89, 0xc8], [0x89, 0xc8], [0x66, 0x89, 0xc8], [0x88, 0xc8], [0x88, 0xe5], // mov rax, rcx ... mov ch, ah
            [0xb8, 0x78, 0x56, 0x34, 0x92], [0x48, 0xc7, 0xc1, 0xff, 0xff, 0xff, 0x8f], // mov eax, imm32; mov rcx, simm32
            [0x0f, 0xb6, 0xc1], [0x48, 0x0f, 0xb7, 0xc1], [0x0f, 0xb6, 0xc5], // movzx eax, cl; rax, cx; eax, ch
            [0x48, 0x8d, 0x44, 0x8a, 0x10], [0x8d, 0x44, 0x0a, 0xf0], [0x66, 0x8d, 0x42, 0x05], // lea
            [0x48, 0x01, 0xc8], [0x01, 0xc8], [0x66, 0x01, 0xc8], [0x00, 0xc8], [0x48, 0x83, 0xc0, 0xff], // add
            [0x48, 0x29, 0xc8], [0x29, 0xc8], [0x28, 0xc4], [0x2d, 0x00, 0x00, 0x00, 0x80], // sub
            [0x48, 0x39, 0xc8], [0x39, 0xc8], [0x38, 0xc8], [0x83, 0xf8, 0x01], [0x3d, 0x00, 0x00, 0x00, 0x80], // cmp
            [0x48, 0x21, 0xc8], [0x21, 0xc8], [0x48, 0x83, 0xe0, 0xf0], // and
            [0x48, 0x09, 0xc8], [0x09, 0xc8], [0x0c, 0x81], // or
            [0x48, 0x31, 0xc8], [0x31, 0xc0], [0x30, 0xec], // xor
            [0x48, 0x85, 0xc0], [0x85, 0xc8], [0x84, 0xe4], [0xa8, 0x80], // test
            [0x48, 0xff, 0xc0], [0xff, 0xc1], [0xfe, 0xc4], // inc
            [0x48, 0xff, 0xc8], [0xff, 0xc9], [0xfe, 0xc8], // dec
            [0x90], [0x0f, 0x1f, 0x40, 0x00],
        );
    }

    /// The same with a second operand in memory, and with a first one for `cmp` and `test`.
    #[test]
    fn loads_do_what_the_processor_does(state in states()) {
        check!(state,
            [0x48, 0x8b, 0x07], [0x8b, 0x07], [0x66, 0x8b, 0x47, 0x02], [0x8a, 0x67, 0x01], // mov rax, [rdi]; eax; ax, [rdi+2]; ah, [rdi+1]
            [0x0f, 0xb6, 0x07], [0x0f, 0xb7, 0x4f, 0x04], // movzx eax, byte [rdi]; ecx, word [rdi+4]
            [0x48, 0x03, 0x07], [0x03, 0x47, 0x04], [0x48, 0x2b, 0x07], [0x2a, 0x0f], // add, sub
            [0x48, 0x3b, 0x07], [0x3a, 0x07], [0x48, 0x39, 0x07], [0x39, 0x0f], [0x38, 0x27], // cmp, both ways
            [0x83, 0x3f, 0x01], [0x48, 0x83, 0x3f, 0xff], [0x80, 0x3f, 0x00], [0x66, 0x83, 0x7f, 0x02, 0x80], // cmp with constants
            [0x48, 0x85, 0x07], [0xf6, 0x07, 0x81], [0xf7, 0x47, 0x04, 0x00, 0x00, 0x00, 0x80], // test
            [0x48, 0x23, 0x07], [0x0b, 0x07], [0x33, 0x0f], // and, or, xor
        );
    }

    /// Each conditional branch agrees with the CPU's `setcc` of the same condition.
    #[test]
    fn branches_are_taken_as_by_the_processor(flags in any::<u64>()) {
        let state = State { rax: 0, rcx: 0, rdx: 0, word: 0, flags: flags & (ARITHMETIC | AF) };
        macro_rules! taken {
            ($($code:literal $jump:literal),+ $(,)?) => {
                $(
                    let expected = native!(0x0f, $code, 0xc0)(state).rax == 1;
                    let mut regs = kvm_regs { rflags: state.flags | 2, rip: RIP, ..kvm_regs::default() };
                    prop_assert!(compute(&[$jump, 0x10], &mut regs, &mut |_, _| None).is_some());
                    prop_assert_eq!(regs.rip, RIP + 2 + if expected { 0x10 } else { 0 }, "{:x}", $jump);
                )+
            };
        }
        taken!(
            0x90 0x70, 0x91 0x71, 0x92 0x72, 0x93 0x73, 0x94 0x74, 0x95 0x75, 0x96 0x76, 0x97 0x77,
            0x98 0x78, 0x99 0x79, 0x9a 0x7a, 0x9b 0x7b, 0x9c 0x7c, 0x9d 0x7d, 0x9e 0x7e, 0x9f 0x7f,
        );
    }

    /// Unsupported instructions change nothing, and no bytes cause a panic.
    #[test]
    fn what_is_not_known_is_left_alone(bytes in proptest::collection::vec(any::<u8>(), 1..16), state in states()) {
        let before = kvm_regs { rax: state.rax, rcx: state.rcx, rflags: state.flags | 2, rip: RIP, ..kvm_regs::default() };
        let mut regs = before;
        if compute(&bytes, &mut regs, &mut |_, width| Some(state.word & bits(width))).is_none() {
            prop_assert_eq!(regs, before);
        }
    }
}

/// Stores, other segments, fences, locked and privileged instructions, calls, and branches by counters or registers aren't emulated.
#[test]
fn what_needs_more_than_registers_is_not_carried_out() {
    let none: [&[u8]; 12] = [
        &[0x48, 0x89, 0x07],       // mov [rdi], rax
        &[0x48, 0x01, 0x07],       // add [rdi], rax
        &[0x64, 0x48, 0x8b, 0x07], // mov rax, fs:[rdi]
        &[0x0f, 0xae, 0xf0],       // mfence
        &[0xf3, 0x90],             // pause
        &[0x48, 0x87, 0xc8],       // xchg rax, rcx
        &[0xff, 0xe0],             // jmp rax
        &[0xe8, 0, 0, 0, 0],       // call
        &[0xe2, 0xfe],             // loop
        &[0x0f, 0xa2],             // cpuid
        &[0xfa],                   // cli
        &[0xf0, 0x48, 0xff, 0xc0], // lock inc rax: not valid
    ];
    for bytes in none {
        let mut regs = kvm_regs { rip: RIP, ..kvm_regs::default() };
        assert_eq!(compute(bytes, &mut regs, &mut |_, _| Some(1)), None, "{bytes:x?}");
    }
}

/// A `movs` yields source, destination and width, and advances by the direction flag. Repeated ones are left to the CPU.
#[test]
fn moves_go_on_in_their_direction() {
    let regs = kvm_regs { rsi: 0x1000, rdi: 0x2000, rip: RIP, ..kvm_regs::default() };
    for (bytes, width) in [(&[0xa4][..], 1), (&[0x66, 0xa5], 2), (&[0xa5], 4), (&[0x48, 0xa5], 8)] {
        for (rflags, by) in [(2, width as u64), (2 | DF, (width as u64).wrapping_neg())] {
            let moved = moves(bytes, &kvm_regs { rflags, ..regs }).unwrap();
            assert_eq!((moved.from, moved.to, moved.width), (0x1000, 0x2000, width));
            let (rsi, rdi) = (0x1000_u64.wrapping_add(by), 0x2000_u64.wrapping_add(by));
            assert_eq!(moved.after, kvm_regs { rsi, rdi, rflags, rip: RIP + bytes.len() as u64, ..regs });
        }
    }
    for other in [&[0xf3, 0x48, 0xa5][..], &[0xa6], &[0x64, 0xa4], &[0x67, 0xa4], &[0xf2, 0x0f, 0x10, 0x07]] {
        assert_eq!(moves(other, &regs), None, "{other:x?}");
    }
}
