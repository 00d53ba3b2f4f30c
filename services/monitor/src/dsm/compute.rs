//! Emulation of instructions that compute, load and branch: `mov`, `movzx`, `lea`, `add`, `sub`, `cmp`, `and`, `or`, `xor`, `test`, `inc`,
//! `dec` on general registers and constants, `jmp`, and conditional branches. One operand may be in memory if it is only read.
//!
//! Source: Intel SDM volume 2, the instructions' pages.

use iced_x86::{
    Code, ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, MemorySize, Mnemonic, OpKind,
    Register,
};
use machine::x86::kvm_regs;

use super::instruction::{
    CF, DF, OF, PF, SF, ZF, added, bits, is_immediate, read, result_flags, set_flags, source, subtracted,
    write,
};

/// Loads 1, 2, 4 or 8 bytes from a virtual address; `None` if they can't be read at once.
pub(super) type Load<'a> = &'a mut dyn FnMut(u64, usize) -> Option<u64>;

/// Emulates the instruction at `regs.rip` from its `bytes`. Returns `None`, with `regs` unchanged, if it doesn't support the instruction or
/// `load`
/// returns `None`.
pub(super) fn compute(bytes: &[u8], regs: &mut kvm_regs, load: Load<'_>) -> Option<()> {
    let instruction = Decoder::with_ip(64, bytes, regs.rip, DecoderOptions::NONE).decode();
    if instruction.code() == Code::INVALID {
        return None;
    }
    let mut next = instruction.next_ip();
    match instruction.mnemonic() {
        Mnemonic::Nop | Mnemonic::Endbr64 => {}
        Mnemonic::Lea => {
            let address = instruction.virtual_address(1, 0, |register, _, _| match register {
                // `lea` doesn't add the segment's base.
                Register::DS | Register::ES | Register::SS | Register::CS | Register::FS | Register::GS => {
                    Some(0)
                }
                other => read(other, regs),
            })?;
            let to = instruction.op0_register();
            write(to, address & bits(to.size()), regs);
        }
        _ if instruction.flow_control() == FlowControl::ConditionalBranch => {
            if instruction.op0_kind() != OpKind::NearBranch64 {
                return None;
            }
            if holds(instruction.condition_code(), regs.rflags)? {
                next = instruction.near_branch_target();
            }
        }
        Mnemonic::Jmp if instruction.op0_kind() == OpKind::NearBranch64 => {
            next = instruction.near_branch_target()
        }
        _ => of_values(&instruction, regs, load)?,
    }
    regs.rip = next;
    Some(())
}

/// A decoded `movs`, which copies one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Moves {
    /// Virtual addresses of source and destination, and bytes.
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) width: usize,
    /// Registers after the instruction.
    pub(super) after: kvm_regs,
}

/// Decodes the `movs` at `regs.rip` from its `bytes`; `None` for other instructions and for repeated ones.
pub(super) fn moves(bytes: &[u8], regs: &kvm_regs) -> Option<Moves> {
    let instruction = Decoder::with_ip(64, bytes, regs.rip, DecoderOptions::NONE).decode();
    let known = matches!(
        instruction.mnemonic(),
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq
    ) && (instruction.op0_kind(), instruction.op1_kind())
        == (OpKind::MemoryESRDI, OpKind::MemorySegRSI);
    let repeated = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    if !known || repeated || matches!(instruction.memory_segment(), Register::FS | Register::GS) {
        return None;
    }
    let width = instruction.memory_size().size();
    let step = u64::try_from(width).ok()?;
    let on = |at: u64| if regs.rflags & DF == 0 { at.wrapping_add(step) } else { at.wrapping_sub(step) };
    let after = kvm_regs { rsi: on(regs.rsi), rdi: on(regs.rdi), rip: instruction.next_ip(), ..*regs };
    Some(Moves { from: regs.rsi, to: regs.rdi, width, after })
}

/// Whether a branch's condition holds; `None` for conditions on counters.
fn holds(condition: ConditionCode, flags: u64) -> Option<bool> {
    let is = |flag: u64| flags & flag != 0;
    let less = is(SF) != is(OF);
    Some(match condition {
        ConditionCode::o => is(OF),
        ConditionCode::no => !is(OF),
        ConditionCode::b => is(CF),
        ConditionCode::ae => !is(CF),
        ConditionCode::e => is(ZF),
        ConditionCode::ne => !is(ZF),
        ConditionCode::be => is(CF) || is(ZF),
        ConditionCode::a => !is(CF) && !is(ZF),
        ConditionCode::s => is(SF),
        ConditionCode::ns => !is(SF),
        ConditionCode::p => is(PF),
        ConditionCode::np => !is(PF),
        ConditionCode::l => less,
        ConditionCode::ge => !less,
        ConditionCode::le => less || is(ZF),
        ConditionCode::g => !less && !is(ZF),
        ConditionCode::None => return None,
    })
}

/// Loads the operand in memory.
fn loaded(instruction: &Instruction, regs: &kvm_regs, load: Load<'_>) -> Option<u64> {
    if matches!(instruction.memory_segment(), Register::FS | Register::GS)
        || matches!(instruction.memory_size(), MemorySize::Unknown)
    {
        return None;
    }
    let width = instruction.memory_size().size();
    let operand = (0..2).find(|operand| instruction.op_kind(*operand) == OpKind::Memory)?;
    let address = instruction.virtual_address(operand, 0, |register, _, _| match register {
        Register::DS | Register::ES | Register::SS | Register::CS => Some(0),
        other => read(other, regs),
    })?;
    if matches!(width, 1 | 2 | 4 | 8) { load(address, width) } else { None }
}

/// Emulates an instruction that sets a general register or flags from registers, constants and one operand in memory.
fn of_values(instruction: &Instruction, regs: &mut kvm_regs, load: Load<'_>) -> Option<()> {
    let mnemonic = instruction.mnemonic();
    let unary = matches!(mnemonic, Mnemonic::Inc | Mnemonic::Dec);
    let compares = matches!(mnemonic, Mnemonic::Cmp | Mnemonic::Test);
    if instruction.has_lock_prefix() || instruction.op_count() != if unary { 1 } else { 2 } {
        return None;
    }
    let (to, old, width) = match instruction.op0_kind() {
        // Instructions that only set the register ignore its old value.
        OpKind::Register => {
            let to = instruction.op0_register();
            (to, read(to, regs)?, to.size())
        }
        OpKind::Memory if compares => {
            (Register::None, loaded(instruction, regs, load)?, instruction.memory_size().size())
        }
        _ => return None,
    };
    let value = match instruction.op1_kind() {
        _ if unary => 1,
        OpKind::Memory if to != Register::None => loaded(instruction, regs, load)?,
        OpKind::Register => source(instruction, regs)?,
        kind if is_immediate(kind) => source(instruction, regs)?,
        _ => return None,
    };
    let low = value & bits(width);
    let kept = regs.rflags & CF;
    match mnemonic {
        // A read of a register or of memory already zero-extends.
        Mnemonic::Mov | Mnemonic::Movzx => write(to, low, regs),
        Mnemonic::Add => {
            write(to, old.wrapping_add(low), regs);
            set_flags(regs, added(old, low, 0, width));
        }
        Mnemonic::Sub => {
            write(to, old.wrapping_sub(low), regs);
            set_flags(regs, subtracted(old, low, 0, width));
        }
        Mnemonic::Cmp => set_flags(regs, subtracted(old, low, 0, width)),
        Mnemonic::And => logic(old & low, Some(to), width, regs),
        Mnemonic::Or => logic(old | low, Some(to), width, regs),
        Mnemonic::Xor => logic(old ^ low, Some(to), width, regs),
        Mnemonic::Test => logic(old & low, None, width, regs),
        Mnemonic::Inc => {
            write(to, old.wrapping_add(1), regs);
            set_flags(regs, added(old, 1, 0, width) & !CF | kept);
        }
        Mnemonic::Dec => {
            write(to, old.wrapping_sub(1), regs);
            set_flags(regs, subtracted(old, 1, 0, width) & !CF | kept);
        }
        _ => return None,
    }
    Some(())
}

fn logic(result: u64, to: Option<Register>, width: usize, regs: &mut kvm_regs) {
    if let Some(to) = to {
        write(to, result, regs);
    }
    set_flags(regs, result_flags(result, width));
}

#[cfg(test)]
#[path = "compute_tests.rs"]
mod tests;
