//! Each instruction is run by this processor and carried out by us, with the same registers; both must agree.
#![allow(unsafe_code)] // Runs single instructions that use registers only.

use super::*;
use proptest::prelude::*;

const ARITHMETIC: u64 = CF | PF | ZF | SF | OF;
const AF: u64 = 1 << 4;
const RIP: u64 = 0x20_1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    rax: u64,
    rcx: u64,
    rdx: u64,
    flags: u64,
}

/// Runs it on the processor. `rdx` becomes whether a branch was taken, where the bytes are one that goes five bytes on.
macro_rules! native {
    ($($byte:literal),+) => {
        |state: State| -> State {
            let State { mut rax, mut rcx, mut rdx, flags } = state;
            let mut flags = flags | 2;
            // SAFETY: the bytes are one instruction of rax, rcx and rdx, or a branch over the next one.
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
                );
            }
            State { rax, rcx, rdx, flags: flags & ARITHMETIC }
        }
    };
}

fn ours(bytes: &[u8], state: State) -> State {
    let mut regs = kvm_regs {
        rax: state.rax,
        rcx: state.rcx,
        rdx: state.rdx,
        rflags: state.flags | 2,
        rip: RIP,
        ..kvm_regs::default()
    };
    compute(bytes, &mut regs).unwrap_or_else(|| panic!("{bytes:x?} isn't known"));
    assert_eq!(regs.rip, RIP + bytes.len() as u64);
    State { rax: regs.rax, rcx: regs.rcx, rdx: regs.rdx, flags: regs.rflags & ARITHMETIC }
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
    (value(), value(), value(), any::<u64>()).prop_map(|(rax, rcx, rdx, flags)| State {
        rax,
        rcx,
        rdx,
        flags: flags & (ARITHMETIC | AF),
    })
}

proptest! {
    /// mov, movzx, lea, add, sub, cmp, and, or, xor, test, inc, dec and nop do to registers and flags what the processor does.
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

    /// Each condition of a branch is what the processor's `setcc` of the same condition says.
    #[test]
    fn branches_are_taken_as_by_the_processor(flags in any::<u64>()) {
        let state = State { rax: 0, rcx: 0, rdx: 0, flags: flags & (ARITHMETIC | AF) };
        macro_rules! taken {
            ($($code:literal $jump:literal),+ $(,)?) => {
                $(
                    let expected = native!(0x0f, $code, 0xc0)(state).rax == 1;
                    let mut regs = kvm_regs { rflags: state.flags | 2, rip: RIP, ..kvm_regs::default() };
                    prop_assert!(compute(&[$jump, 0x10], &mut regs).is_some());
                    prop_assert_eq!(regs.rip, RIP + 2 + if expected { 0x10 } else { 0 }, "{:x}", $jump);
                )+
            };
        }
        taken!(
            0x90 0x70, 0x91 0x71, 0x92 0x72, 0x93 0x73, 0x94 0x74, 0x95 0x75, 0x96 0x76, 0x97 0x77,
            0x98 0x78, 0x99 0x79, 0x9a 0x7a, 0x9b 0x7b, 0x9c 0x7c, 0x9d 0x7d, 0x9e 0x7e, 0x9f 0x7f,
        );
    }

    /// What isn't known changes nothing, and no bytes make it panic.
    #[test]
    fn what_is_not_known_is_left_alone(bytes in proptest::collection::vec(any::<u8>(), 1..16), state in states()) {
        let before = kvm_regs { rax: state.rax, rcx: state.rcx, rflags: state.flags | 2, rip: RIP, ..kvm_regs::default() };
        let mut regs = before;
        if compute(&bytes, &mut regs).is_none() {
            prop_assert_eq!(regs, before);
        }
    }
}

/// Loads, stores, fences, locked and privileged instructions, calls and branches by counters or registers end it.
#[test]
fn what_needs_more_than_registers_is_not_carried_out() {
    let none: [&[u8]; 12] = [
        &[0x48, 0x8b, 0x07],       // mov rax, [rdi]
        &[0x48, 0x03, 0x07],       // add rax, [rdi]
        &[0x48, 0x39, 0x07],       // cmp [rdi], rax
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
        assert_eq!(compute(bytes, &mut regs), None, "{bytes:x?}");
    }
}
