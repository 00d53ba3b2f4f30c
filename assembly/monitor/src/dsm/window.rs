//! What a vCPU does behind a trapped instruction, as far as it only computes: so that the next store to a page that is kept by updates is carried out without
//! going back into the guest for it, which costs an exit and a fault each.
//!
//! Source: *window emulation* of the project's specification of shared memory, section 5. Each store is still an update of its own, and
//! done before the next begins: to the guest it is as if it had trapped.

use dsm::{Access, Operation};
use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register,
};
use machine::x86::kvm_regs;

use super::engine::Core;
use super::instruction::{
    self, CF, OF, PF, SF, Trapped, ZF, added, bits, is_immediate, read, result_flags, set_flags, source,
    subtracted, write,
};
use super::vcpus::{LONGEST, code};

/// Stores that are carried out behind a trapped instruction at most. Who has the token has done so many in the time in which others do one: more would let it
/// run away from them.
pub(super) const STORES: usize = 2;
/// Instructions that are looked at for one.
const STEPS: usize = 12;
/// Bytes of code that are fetched at once.
const FETCHED: usize = 64;

/// The next store, and registers before it, if the vCPU comes to one soon, to a page that is kept by updates here. Atomic instructions end it: each of these is for all vCPUs to
/// compete for.
pub(super) fn next_store(core: &Core, regs: &kvm_regs) -> Option<(kvm_regs, Trapped)> {
    let mut regs = *regs;
    let (mut start, mut here) = (0, Vec::new());
    for _ in 0..STEPS {
        let fetched = |start: u64, here: &Vec<u8>| {
            let at = usize::try_from(regs.rip.checked_sub(start)?).ok()?;
            (here.len().checked_sub(at)? >= LONGEST).then_some(at)
        };
        let at = match fetched(start, &here) {
            Some(at) => at,
            None => {
                (start, here) = (regs.rip, code(core, regs.rip, FETCHED)?);
                0
            }
        };
        let bytes = here.get(at..)?;
        if let Some(trapped) = instruction::decode(bytes, &regs) {
            let page = trapped.page;
            let kept = core.node.mode(page).is_update() && core.node.access(page) == Access::Read;
            let plain = matches!(trapped.operation, Operation::Store { .. });
            return (kept && plain).then_some((regs, trapped));
        }
        compute(bytes, &mut regs)?;
    }
    None
}

/// Carries out an instruction of general registers and constants only, or a branch. `None`, and nothing done, where it isn't known.
fn compute(bytes: &[u8], regs: &mut kvm_regs) -> Option<()> {
    let instruction = Decoder::with_ip(64, bytes, regs.rip, DecoderOptions::NONE).decode();
    let mut next = instruction.next_ip();
    match instruction.mnemonic() {
        Mnemonic::Nop | Mnemonic::Endbr64 => {}
        Mnemonic::Lea => {
            let address = instruction.virtual_address(1, 0, |register, _, _| match register {
                // Its base isn't added.
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
        _ => of_registers(&instruction, regs)?,
    }
    regs.rip = next;
    Some(())
}

/// Whether a condition holds; `None` for conditions of counters.
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

/// An instruction whose first operand is a general register, and whose second one, if any, is one or a constant.
fn of_registers(instruction: &Instruction, regs: &mut kvm_regs) -> Option<()> {
    if instruction.op0_kind() != OpKind::Register || instruction.has_lock_prefix() {
        return None;
    }
    let to = instruction.op0_register();
    let old = read(to, regs)?;
    let width = to.size();
    let unary = matches!(instruction.mnemonic(), Mnemonic::Inc | Mnemonic::Dec);
    let plain = instruction.op_count() == 2
        && (instruction.op1_kind() == OpKind::Register || is_immediate(instruction.op1_kind()));
    if !unary && !plain {
        return None;
    }
    let value = if unary { 1 } else { source(instruction, regs)? };
    let low = value & bits(width);
    let kept = regs.rflags & CF;
    match instruction.mnemonic() {
        // Zero-extended by what reads a register.
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
#[path = "window_tests.rs"]
mod tests;
