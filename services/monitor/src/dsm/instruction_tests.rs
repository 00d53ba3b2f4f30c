//! Each instruction runs on the host's CPU and in the emulator, with the same registers and memory. Results must be equal.
#![allow(unsafe_code)] // Runs single instructions on memory of the test's own.

use super::*;
use proptest::prelude::*;

const PAGE: usize = wire::PAGE_SIZE;
const AT: usize = 2048;

/// Registers and memory, before or after an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    rax: u64,
    rcx: u64,
    /// Offset in the page that `rdi` points to.
    at: u64,
    flags: u64,
    page: Vec<u8>,
}

/// Runs an instruction on the host's CPU.
macro_rules! native {
    ($($byte:literal),+) => {
        |state: &State| -> State {
            let mut page = state.page.clone();
            let base = page.as_mut_ptr();
            let (mut rax, mut rcx, mut flags) = (state.rax, state.rcx, state.flags | 2);
            let mut rdi = base as u64 + state.at;
            // SAFETY: the bytes are one instruction that reads and writes memory near `rdi`, in the middle of `page`; the flags
            // asked for are arithmetic ones, and the direction flag is clear afterwards.
            unsafe {
                std::arch::asm!(
                    "push {flags}",
                    "popfq",
                    concat!(".byte ", $(stringify!($byte), ",",)+ "0x90"),
                    "pushfq",
                    "pop {flags}",
                    "cld",
                    flags = inout(reg) flags,
                    inout("rax") rax,
                    inout("rcx") rcx,
                    inout("rdi") rdi,
                );
            }
            State { rax, rcx, at: rdi - base as u64, flags: flags & (ARITHMETIC | DF), page }
        }
    };
}

const BASE: u64 = 0x70_0000;
const RIP: u64 = 0x20_1000;

/// Emulates an instruction until it has retired, in several steps if it repeats.
fn ours(bytes: &[u8], state: &State) -> State {
    let mut regs = kvm_regs {
        rax: state.rax,
        rcx: state.rcx,
        rdi: BASE + state.at,
        rflags: state.flags | 2,
        rip: RIP,
        ..kvm_regs::default()
    };
    let mut page = state.page.clone();
    while regs.rip == RIP {
        let trapped = decode(bytes, &regs).unwrap_or_else(|| panic!("{bytes:x?} isn't known"));
        assert_eq!(trapped.page, BASE / PAGE as u64);
        assert!(trapped.operation.is_valid(PAGE));
        let effect = trapped.operation.effect(&page);
        if let Some(change) = &effect.change {
            for (offset, bytes) in change.runs() {
                page[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
        }
        trapped.finish(effect.old, &mut regs);
    }
    assert_eq!(regs.rip, RIP + bytes.len() as u64);
    let flags = regs.rflags & (ARITHMETIC | DF);
    State { rax: regs.rax, rcx: regs.rcx, at: regs.rdi - BASE, flags, page }
}

/// Flags that the manuals define after an instruction, and flags that it preserves.
fn defined(kind: &str) -> u64 {
    match kind {
        "logic" => !AF,
        "bit" => CF | DF,
        _ => u64::MAX,
    }
}

type Native = fn(&State) -> State;

macro_rules! cases {
    ($($kind:literal: $($byte:literal)+;)+) => {
        &[$(($kind, &[$($byte),+], native!($($byte),+) as Native)),+]
    };
}

#[rustfmt::skip]
const CASES: &[(&str, &[u8], Native)] = cases! {
    "": 0x48 0x89 0x0f; "": 0x89 0x0f; "": 0x66 0x89 0x0f; "": 0x88 0x0f;
    "": 0x88 0x27; "": 0x88 0x2f; "": 0x48 0x0f 0xc3 0x0f; "": 0x0f 0xc3 0x0f;
    "": 0x48 0xc7 0x07 0x80 0xff 0x01 0xfe; "": 0xc7 0x47 0x04 0x01 0x02 0x03 0x04; "": 0x66 0xc7 0x07 0x01 0x80; "": 0xc6 0x07 0xfe;
    "": 0x48 0x87 0x0f; "": 0x87 0x0f; "": 0x66 0x87 0x0f; "": 0x86 0x0f; "": 0x86 0x2f;
    "": 0xf0 0x48 0x0f 0xc1 0x0f; "": 0x0f 0xc1 0x0f; "": 0x66 0x0f 0xc1 0x0f; "": 0x0f 0xc0 0x0f; "": 0xf0 0x0f 0xc0 0x2f;
    "": 0xf0 0x48 0x0f 0xb1 0x0f; "": 0xf0 0x0f 0xb1 0x0f; "": 0x66 0x0f 0xb1 0x0f; "": 0x0f 0xb0 0x0f;
    "": 0xf0 0x48 0x01 0x0f; "": 0x01 0x0f; "": 0x66 0x01 0x0f; "": 0x00 0x0f;
    "": 0xf0 0x48 0x11 0x0f; "": 0x11 0x0f; "": 0x66 0x11 0x0f; "": 0x10 0x0f;
    "": 0xf0 0x48 0x29 0x0f; "": 0x29 0x0f; "": 0x66 0x29 0x0f; "": 0x28 0x0f;
    "": 0xf0 0x48 0x19 0x0f; "": 0x19 0x0f; "": 0x66 0x19 0x0f; "": 0x18 0x0f;
    "": 0x48 0x83 0x07 0xff; "": 0x83 0x2f 0x80; "": 0x81 0x07 0x00 0x00 0x00 0x80; "": 0x80 0x07 0x7f;
    "": 0xf0 0x48 0xff 0x07; "": 0xff 0x07; "": 0x66 0xff 0x07; "": 0xfe 0x07;
    "": 0xf0 0x48 0xff 0x0f; "": 0xff 0x0f; "": 0x66 0xff 0x0f; "": 0xfe 0x0f;
    "": 0xf0 0x48 0xf7 0x17; "": 0xf7 0x17; "": 0x66 0xf7 0x17; "": 0xf6 0x17;
    "logic": 0xf0 0x48 0x21 0x0f; "logic": 0x21 0x0f; "logic": 0x66 0x21 0x0f; "logic": 0x20 0x0f;
    "logic": 0xf0 0x48 0x09 0x0f; "logic": 0x09 0x0f; "logic": 0x66 0x09 0x0f; "logic": 0x08 0x0f;
    "logic": 0xf0 0x48 0x31 0x0f; "logic": 0x31 0x0f; "logic": 0x66 0x31 0x0f; "logic": 0x30 0x0f;
    "logic": 0x48 0x83 0x0f 0x81; "logic": 0x83 0x27 0xf0; "logic": 0x80 0x37 0x55;
    "bit": 0xf0 0x48 0x0f 0xab 0x0f; "bit": 0x0f 0xab 0x0f; "bit": 0x66 0x0f 0xab 0x0f;
    "bit": 0xf0 0x48 0x0f 0xb3 0x0f; "bit": 0x0f 0xb3 0x0f; "bit": 0x0f 0xbb 0x0f;
    "bit": 0x48 0x0f 0xba 0x2f 0x3f; "bit": 0x0f 0xba 0x37 0x05; "bit": 0x66 0x0f 0xba 0x3f 0x1f;
    "": 0xaa; "": 0xab; "": 0x48 0xab; "": 0x66 0xab;
};

#[rustfmt::skip]
const REPEATED: &[(&str, &[u8], Native)] = cases! {
    "": 0xf3 0xaa; "": 0xf3 0xab; "": 0xf3 0x48 0xab; "": 0xf3 0x66 0xab;
};

fn words() -> impl Strategy<Value = u64> {
    let edge = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(1 << 63),
        Just(0x7fff_ffff),
        Just(0x8000_0000),
        Just(0x80),
        Just(0x7f)
    ];
    prop_oneof![edge, any::<u64>(), (-128i64..128).prop_map(i64::cast_unsigned)]
}

fn compare(cases: &[(&str, &[u8], Native)], before: &State) -> Result<(), TestCaseError> {
    for (kind, bytes, run) in cases {
        let (mut theirs, mut mine) = (run(before), ours(bytes, before));
        theirs.flags &= defined(kind);
        mine.flags &= defined(kind);
        prop_assert_eq!(&theirs, &mine, "{:x?}", bytes);
    }
    Ok(())
}

proptest! {
    /// Detects a deviation in any of: result, width, sign extension, flags, high bytes, upper half of registers.
    #[test]
    fn all_instructions_do_what_the_processor_does(
        rax in words(), rcx in words(), memory in words(), flags in any::<u64>(), equal in any::<bool>(),
    ) {
        let mut page = vec![0; PAGE];
        page[AT..AT + 8].copy_from_slice(&memory.to_le_bytes());
        page[AT - 8..AT].copy_from_slice(&rcx.to_be_bytes());
        // Bit instructions with this index stay within the page.
        let rcx = if rcx > 1 << 12 && rcx < u64::MAX - (1 << 12) { rcx & 0xfff } else { rcx };
        let rax = if equal { memory } else { rax };
        let before = State { rax, rcx, at: AT as u64, flags: flags & ARITHMETIC, page };
        compare(CASES, &before)?;
    }

    #[test]
    fn repeated_stores_take_several_steps_to_the_same_end(
        rax in words(), rcx in 1u64..300, flags in any::<u64>(),
    ) {
        let flags = flags & (ARITHMETIC | DF);
        let before = State { rax, rcx: rcx % 200 + 1, at: AT as u64, flags, page: vec![0xee; PAGE] };
        compare(REPEATED, &before)?;
    }

    /// No bytes of the guest cause a panic, with any registers.
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..16), rdi in any::<u64>(), old in any::<u64>()) {
        let mut regs = kvm_regs { rdi, rcx: old, rip: u64::MAX - 3, rflags: old & 0xfff, ..kvm_regs::default() };
        if let Some(trapped) = decode(&bytes, &regs) {
            prop_assert!(trapped.operation.is_valid(PAGE));
            trapped.finish(old, &mut regs);
        }
        touched(&bytes, &regs);
    }
}

/// Operands in memory, the stack, and code across the end of a page are found. Anything else yields `None`.
#[test]
fn pages_that_an_instruction_touches() {
    let regs = kvm_regs { rdi: 0x5ffe, rsi: 0x9000, rsp: 0x8000, rip: 0x2fff, ..kvm_regs::default() };
    let pages = |bytes: &[u8]| {
        let mut pages = touched(bytes, &regs)?;
        pages.sort_unstable();
        pages.dedup();
        Some(pages)
    };
    assert_eq!(pages(&[0x8b, 0x0f]).unwrap(), [2, 3, 5, 6], "mov ecx, [rdi]");
    assert_eq!(pages(&[0x90]).unwrap(), [2], "nop");
    assert_eq!(pages(&[0x57]).unwrap(), [2, 7], "push rdi");
    assert_eq!(pages(&[0xff, 0x36]).unwrap(), [2, 3, 7, 9], "push [rsi]");
    assert_eq!(pages(&[0x48, 0xa5]).unwrap(), [2, 3, 5, 6, 9], "movsq");
    assert_eq!(pages(&[0xf3, 0x48, 0xa5]), None, "rep movsq");
    assert_eq!(pages(&[0x64, 0x8b, 0x0f]), None, "fs:");
    assert_eq!(pages(&[0x0f]), None, "half an instruction");
}

#[test]
fn what_is_not_known_or_crosses_the_page_is_left_to_the_processor() {
    let regs = kvm_regs { rdi: 0x3ffc, rip: RIP, ..kvm_regs::default() };
    for bytes in [
        &[0x48, 0x89, 0x0f][..],         // mov [rdi], rcx across the end
        &[0x48, 0xf7, 0x1f],             // neg
        &[0x0f, 0x11, 0x07],             // movups
        &[0x48, 0xa5],                   // movsq
        &[0x64, 0x89, 0x0f],             // fs:
        &[0x48, 0x8b, 0x0f],             // a load
        &[0xff, 0x37],                   // push
        &[0x48, 0xc1, 0x27, 0x04],       // shl
        &[0xf0, 0x48, 0x0f, 0xc7, 0x0f], // cmpxchg16b
        &[0x48],                         // ends early
        &[],
    ] {
        assert_eq!(decode(bytes, &regs), None, "{bytes:x?}");
    }
    assert!(decode(&[0x89, 0x0f], &regs).is_some(), "the last word of the page");
}
