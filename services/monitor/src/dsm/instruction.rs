//! The decoder of instructions that store, for emulation on write-update pages.
//!
//! The decoder supports stores and read-modify-writes of general registers and constants, in all widths, with and without `lock`:
//! - `mov`, `movnti`, and `stos`; with `rep`, as many elements as one update holds.
//! - `xchg`, `xadd`, `cmpxchg`.
//! - `add`, `adc`, `sub`, `sbb`, `and`, `or`, `xor`, `inc`, `dec`, `not`.
//! - `bts`, `btr`, `btc`.
//!
//! For other instructions [`decode`] returns `None`, and the vCPU needs the page itself.
//!
//! A read-modify-write without `lock` is emulated atomically, too, which is one of its permitted behaviors.
//!
//! Source: Intel SDM volume 2 and AMD APM volume 3, the instructions' pages.

use dsm::operation::{Atomic, MAX_STORE, Operation};
use dsm::{Page, wire};
use iced_x86::{
    Code, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, MemorySize, Mnemonic, OpKind,
    Register,
};
use machine::x86::kvm_regs;

pub(super) const CF: u64 = 1;
pub(super) const PF: u64 = 1 << 2;
const AF: u64 = 1 << 4;
pub(super) const ZF: u64 = 1 << 6;
pub(super) const SF: u64 = 1 << 7;
pub(super) const DF: u64 = 1 << 10;
pub(super) const OF: u64 = 1 << 11;
const ARITHMETIC: u64 = CF | PF | AF | ZF | SF | OF;

/// A decoded instruction: its effect on memory, and on registers once the value before is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trapped {
    /// The page that it writes.
    pub(super) page: Page,
    /// Its effect on the page.
    pub(super) operation: Operation,
    /// Address of the next instruction.
    next: u64,
    finish: Finish,
}

/// Its effect on registers, after memory was written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Finish {
    Nothing,
    /// `xchg`: loads the old value into the register.
    Load(Register),
    /// `xadd`: the same, and sets the flags of an addition of this value.
    LoadAndAdd(Register, u64),
    Compare {
        expected: u64,
    },
    Add {
        value: u64,
        carry: u64,
    },
    Subtract {
        value: u64,
        carry: u64,
    },
    Increment,
    Decrement,
    Logic {
        kind: Atomic,
        value: u64,
    },
    Bit(u32),
    /// `stos`: advances the address by the elements, and decrements the count of a repetition by `counted`.
    String {
        counted: u64,
    },
}

/// Decodes the instruction at `regs.rip` from its `bytes`. `None` if it isn't supported, or crosses the end of its page.
pub(super) fn decode(bytes: &[u8], regs: &kvm_regs) -> Option<Trapped> {
    let instruction = Decoder::with_ip(64, bytes, regs.rip, DecoderOptions::NONE).decode();
    if instruction.code() == Code::INVALID {
        return None;
    }
    if let Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq = instruction.mnemonic() {
        return stos(&instruction, regs);
    }
    if instruction.op0_kind() != OpKind::Memory
        || matches!(instruction.memory_segment(), Register::FS | Register::GS)
        || matches!(instruction.memory_size(), MemorySize::Unknown)
    {
        return None;
    }
    let width = instruction.memory_size().size();
    if !matches!(width, 1 | 2 | 4 | 8) {
        return None;
    }
    let mut address = instruction.virtual_address(0, 0, |register, _, _| match register {
        Register::DS | Register::ES | Register::SS | Register::CS => Some(0),
        other => read(other, regs),
    })?;
    let (operation, finish) = match instruction.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movnti => {
            let value = source(&instruction, regs)?.to_le_bytes();
            (Stored::Bytes(value.get(..width)?.to_vec()), Finish::Nothing)
        }
        Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc => {
            let (bit, words) = bit(&instruction, regs, width)?;
            address = address.wrapping_add_signed(words);
            bit_operation(instruction.mnemonic(), bit)
        }
        mnemonic => read_modify_write(mnemonic, &instruction, regs, width)?,
    };
    let offset = usize::try_from(address % wire::PAGE_SIZE as u64).ok()?;
    if offset + width > wire::PAGE_SIZE {
        return None;
    }
    let offset = u16::try_from(offset).ok()?;
    let operation = match operation {
        Stored::Bytes(bytes) => Operation::store(offset, &bytes),
        Stored::Atomic { kind, operand, expected } => {
            Operation::Atomic { offset, width: u8::try_from(width).ok()?, kind, operand, expected }
        }
    };
    Some(Trapped { page: address / wire::PAGE_SIZE as u64, operation, next: instruction.next_ip(), finish })
}

/// The pages that the instruction at `regs.rip` touches, with its own bytes and its operands in memory. `None` if they can't be determined.
pub(super) fn touched(bytes: &[u8], regs: &kvm_regs) -> Option<Vec<Page>> {
    let size = wire::PAGE_SIZE as u64;
    let instruction = Decoder::with_ip(64, bytes, regs.rip, DecoderOptions::NONE).decode();
    if instruction.code() == Code::INVALID {
        return None;
    }
    let mut pages = Vec::new();
    let mut add = |from: u64, len: usize| {
        let last = from.wrapping_add(u64::try_from(len.max(1) - 1).unwrap_or(0));
        pages.extend([from / size, last / size]);
    };
    add(regs.rip, instruction.len());
    let mut factory = InstructionInfoFactory::new();
    for used in factory.info(&instruction).used_memory() {
        let address = used.virtual_address(0, |register, _, _| match register {
            Register::DS | Register::ES | Register::SS | Register::CS => Some(0),
            other => read(other, regs),
        })?;
        // An operand of unknown size, or of many elements, isn't examined.
        let len = used.memory_size().size();
        if len == 0 || instruction.has_rep_prefix() || instruction.has_repne_prefix() {
            return None;
        }
        add(address, len);
    }
    Some(pages)
}

enum Stored {
    Bytes(Vec<u8>),
    Atomic { kind: Atomic, operand: u64, expected: u64 },
}

fn atomic(kind: Atomic, operand: u64) -> Stored {
    Stored::Atomic { kind, operand, expected: 0 }
}

fn read_modify_write(
    mnemonic: Mnemonic,
    instruction: &Instruction,
    regs: &kvm_regs,
    width: usize,
) -> Option<(Stored, Finish)> {
    let bits = bits(width);
    let carry = regs.rflags & CF;
    let unary = matches!(mnemonic, Mnemonic::Inc | Mnemonic::Dec | Mnemonic::Not);
    let value = if unary { 1 } else { source(instruction, regs)? & bits };
    Some(match mnemonic {
        Mnemonic::Xchg => (atomic(Atomic::Exchange, value), Finish::Load(instruction.op1_register())),
        Mnemonic::Xadd => (atomic(Atomic::Add, value), Finish::LoadAndAdd(instruction.op1_register(), value)),
        Mnemonic::Cmpxchg => {
            let expected = regs.rax & bits;
            let stored = Stored::Atomic { kind: Atomic::CompareExchange, operand: value, expected };
            (stored, Finish::Compare { expected })
        }
        Mnemonic::Add => (atomic(Atomic::Add, value), Finish::Add { value, carry: 0 }),
        Mnemonic::Adc => {
            (atomic(Atomic::Add, value.wrapping_add(carry) & bits), Finish::Add { value, carry })
        }
        Mnemonic::Sub => {
            (atomic(Atomic::Add, value.wrapping_neg() & bits), Finish::Subtract { value, carry: 0 })
        }
        Mnemonic::Sbb => {
            let less = value.wrapping_add(carry).wrapping_neg() & bits;
            (atomic(Atomic::Add, less), Finish::Subtract { value, carry })
        }
        Mnemonic::Inc => (atomic(Atomic::Add, 1), Finish::Increment),
        Mnemonic::Dec => (atomic(Atomic::Add, bits), Finish::Decrement),
        Mnemonic::Not => (atomic(Atomic::Xor, bits), Finish::Nothing),
        Mnemonic::And => (atomic(Atomic::And, value), Finish::Logic { kind: Atomic::And, value }),
        Mnemonic::Or => (atomic(Atomic::Or, value), Finish::Logic { kind: Atomic::Or, value }),
        Mnemonic::Xor => (atomic(Atomic::Xor, value), Finish::Logic { kind: Atomic::Xor, value }),
        _ => return None,
    })
}

/// The bit in its word that a bit instruction selects, and the offset of that word from the operand's address, bytes.
fn bit(instruction: &Instruction, regs: &kvm_regs, width: usize) -> Option<(u32, i64)> {
    let wide = i64::try_from(width).ok()? * 8;
    let index = if instruction.op1_kind() == OpKind::Register {
        // The index is signed, in the operand's width.
        let raw = source(instruction, regs)? & bits(width);
        let unused = u32::try_from(64 - wide).ok()?;
        (raw << unused).cast_signed() >> unused
    } else {
        (source(instruction, regs)?.cast_signed()).rem_euclid(wide)
    };
    let bit = u32::try_from(index.rem_euclid(wide)).ok()?;
    Some((bit, index.div_euclid(wide) * (wide / 8)))
}

fn bit_operation(mnemonic: Mnemonic, bit: u32) -> (Stored, Finish) {
    let one = 1u64 << bit;
    let stored = match mnemonic {
        Mnemonic::Bts => atomic(Atomic::Or, one),
        Mnemonic::Btr => atomic(Atomic::And, !one),
        _ => atomic(Atomic::Xor, one),
    };
    (stored, Finish::Bit(bit))
}

/// Decodes `stos`, single or repeated.
fn stos(instruction: &Instruction, regs: &kvm_regs) -> Option<Trapped> {
    let width = instruction.memory_size().size();
    let (address, rcx) = match instruction.op0_kind() {
        OpKind::MemoryESRDI => (regs.rdi, regs.rcx),
        // 32-bit addresses: compilers don't generate them.
        _ => return None,
    };
    let repeated = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    let offset = usize::try_from(address % wire::PAGE_SIZE as u64).ok()?;
    let backwards = regs.rflags & DF != 0;
    let room = (wire::PAGE_SIZE - offset).min(MAX_STORE) / width;
    let most = if backwards { room.min(1) } else { room };
    let wanted = if repeated { rcx } else { 1 };
    // With a count of 0 the instruction writes nothing, so it didn't fault. Without room the element crosses the page's end.
    let elements = wanted.min(u64::try_from(most).ok()?);
    if elements == 0 {
        return None;
    }
    let element = regs.rax.to_le_bytes();
    let bytes = element.get(..width)?.repeat(usize::try_from(elements).ok()?);
    let left = wanted > elements;
    Some(Trapped {
        page: address / wire::PAGE_SIZE as u64,
        operation: Operation::store(u16::try_from(offset).ok()?, &bytes),
        next: if left { regs.rip } else { instruction.next_ip() },
        finish: Finish::String { counted: if repeated { elements } else { 0 } },
    })
}

impl Trapped {
    /// Applies the instruction's effect on registers. `old` is the value in memory before.
    pub(super) fn finish(&self, old: u64, regs: &mut kvm_regs) {
        regs.rip = self.next;
        let width = match &self.operation {
            Operation::Atomic { width, .. } => usize::from(*width),
            Operation::Store { bytes, .. } => bytes.len(),
        };
        let mask = bits(width);
        let old = old & mask;
        match self.finish {
            Finish::Nothing => {}
            Finish::Load(register) => write(register, old, regs),
            Finish::LoadAndAdd(register, value) => {
                write(register, old, regs);
                set_flags(regs, added(old, value, 0, width));
            }
            Finish::Compare { expected } => {
                set_flags(regs, subtracted(expected, old, 0, width));
                if old != expected {
                    let accumulator = match width {
                        1 => Register::AL,
                        2 => Register::AX,
                        4 => Register::EAX,
                        _ => Register::RAX,
                    };
                    write(accumulator, old, regs);
                }
            }
            Finish::Add { value, carry } => set_flags(regs, added(old, value, carry, width)),
            Finish::Subtract { value, carry } => set_flags(regs, subtracted(old, value, carry, width)),
            Finish::Increment => {
                let carry = regs.rflags & CF;
                set_flags(regs, added(old, 1, 0, width) & !CF | carry);
            }
            Finish::Decrement => {
                let carry = regs.rflags & CF;
                set_flags(regs, subtracted(old, 1, 0, width) & !CF | carry);
            }
            Finish::Logic { kind, value } => {
                let result = kind.apply(old, value, 0).unwrap_or(old);
                set_flags(regs, result_flags(result & mask, width));
            }
            Finish::Bit(bit) => regs.rflags = regs.rflags & !CF | (old >> bit) & CF,
            Finish::String { counted } => {
                let bytes = u64::try_from(width).unwrap_or(0);
                let backwards = regs.rflags & DF != 0;
                regs.rdi =
                    if backwards { regs.rdi.wrapping_sub(bytes) } else { regs.rdi.wrapping_add(bytes) };
                regs.rcx = regs.rcx.wrapping_sub(counted);
            }
        }
    }
}

pub(super) fn bits(width: usize) -> u64 {
    if width >= 8 { u64::MAX } else { (1 << (8 * width)) - 1 }
}

pub(super) fn set_flags(regs: &mut kvm_regs, flags: u64) {
    regs.rflags = regs.rflags & !ARITHMETIC | flags;
}

/// Zero, sign and parity flags of a result.
pub(super) fn result_flags(result: u64, width: usize) -> u64 {
    let mut flags = 0;
    if result == 0 {
        flags |= ZF;
    }
    if result >> (8 * width - 1) & 1 == 1 {
        flags |= SF;
    }
    if (result & 0xff).count_ones().is_multiple_of(2) {
        flags |= PF;
    }
    flags
}

pub(super) fn added(a: u64, b: u64, carry: u64, width: usize) -> u64 {
    let full = u128::from(a) + u128::from(b) + u128::from(carry);
    let result = a.wrapping_add(b).wrapping_add(carry) & bits(width);
    let mut flags = result_flags(result, width);
    if full >> (8 * width) != 0 {
        flags |= CF;
    }
    if ((a ^ result) & (b ^ result)) >> (8 * width - 1) & 1 == 1 {
        flags |= OF;
    }
    flags | (a ^ b ^ result) & AF
}

pub(super) fn subtracted(a: u64, b: u64, borrow: u64, width: usize) -> u64 {
    let result = a.wrapping_sub(b).wrapping_sub(borrow) & bits(width);
    let mut flags = result_flags(result, width);
    if u128::from(a) < u128::from(b) + u128::from(borrow) {
        flags |= CF;
    }
    if ((a ^ b) & (a ^ result)) >> (8 * width - 1) & 1 == 1 {
        flags |= OF;
    }
    flags | (a ^ b ^ result) & AF
}

/// The second operand: a register, or a sign-extended constant.
pub(super) fn source(instruction: &Instruction, regs: &kvm_regs) -> Option<u64> {
    match instruction.op1_kind() {
        OpKind::Register => read(instruction.op1_register(), regs),
        kind if is_immediate(kind) => Some(instruction.immediate(1)),
        _ => None,
    }
}

pub(super) fn is_immediate(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64
    )
}

fn is_high_byte(register: Register) -> bool {
    matches!(register, Register::AH | Register::CH | Register::DH | Register::BH)
}

/// The 64-bit register that a general register is part of.
fn whole(register: Register, regs: &mut kvm_regs) -> Option<&mut u64> {
    Some(match register.full_register() {
        Register::RAX => &mut regs.rax,
        Register::RCX => &mut regs.rcx,
        Register::RDX => &mut regs.rdx,
        Register::RBX => &mut regs.rbx,
        Register::RSP => &mut regs.rsp,
        Register::RBP => &mut regs.rbp,
        Register::RSI => &mut regs.rsi,
        Register::RDI => &mut regs.rdi,
        Register::R8 => &mut regs.r8,
        Register::R9 => &mut regs.r9,
        Register::R10 => &mut regs.r10,
        Register::R11 => &mut regs.r11,
        Register::R12 => &mut regs.r12,
        Register::R13 => &mut regs.r13,
        Register::R14 => &mut regs.r14,
        Register::R15 => &mut regs.r15,
        _ => return None,
    })
}

/// The value of a general register, zero-extended.
pub(super) fn read(register: Register, regs: &kvm_regs) -> Option<u64> {
    let mut copy = *regs;
    let value = *whole(register, &mut copy)?;
    let value = if is_high_byte(register) { value >> 8 } else { value };
    Some(value & bits(register.size()))
}

/// Writes a general register as the CPU does: a 32-bit write clears the upper half, a narrower one keeps the other bits.
pub(super) fn write(register: Register, value: u64, regs: &mut kvm_regs) {
    let Some(whole) = whole(register, regs) else { return };
    let shift = if is_high_byte(register) { 8 } else { 0 };
    let size = register.size();
    *whole = if size >= 4 {
        value & bits(size)
    } else {
        *whole & !(bits(size) << shift) | (value & bits(size)) << shift
    };
}

#[cfg(test)]
#[path = "instruction_tests.rs"]
mod tests;
