//! Instructions that are carried out for a vCPU beside those that trap: behind one of these, and where a page is to be given away that one was granted for.
//!
//! What a vCPU does behind a trapped instruction, as far as it only computes: so that the next store to a page that is kept by updates is carried out without
//! going back into the guest for it, which costs an exit and a fault each.
//!
//! Source: *window emulation* of the project's specification of shared memory, section 5. Each store is still an update of its own, and
//! done before the next begins: to the guest it is as if it had trapped.

use dsm::{Access, Operation, wire};
use machine::x86::kvm_regs;

use super::compute::{self, compute};
use super::engine::Core;
use super::instruction::{self, Trapped};
use super::vcpus::{MAX_INSTRUCTION_BYTES, code};

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
            (here.len().checked_sub(at)? >= MAX_INSTRUCTION_BYTES).then_some(at)
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
        // Loads end it: what they find is for the vCPU to say when it is there.
        compute(bytes, &mut regs, &mut |_, _| None)?;
    }
    None
}

/// Carries out the instruction that a vCPU is at, with pages that are here, so that it has retired for certain: registers behind it. Nothing, and nothing done, where it isn't known, or
/// needs a page that isn't here, or isn't aligned, so that the processor itself has to do it as one. The vCPU must be outside the guest.
///
/// Its siblings on this node may use the same words meanwhile: each load, store and read-modify-write is one for them, too.
pub(super) fn step_over(core: &Core, regs: &kvm_regs) -> Option<kvm_regs> {
    let bytes = code(core, regs.rip, MAX_INSTRUCTION_BYTES)?;
    let (ram, size) = (&core.pages.ram, wire::PAGE_SIZE as u64);
    let mut after = *regs;
    if let Some(trapped) = instruction::decode(&bytes, regs) {
        let page = trapped.page;
        if core.node.access(page) != Access::Write {
            return None;
        }
        let old = match &trapped.operation {
            Operation::Store { offset, bytes, .. } => {
                let at = usize::from(*offset);
                if !matches!(bytes.len(), 1 | 2 | 4 | 8) || !at.is_multiple_of(bytes.len()) {
                    return None;
                }
                ram.write(page, at, bytes).ok()?;
                0
            }
            Operation::Atomic { offset, width, kind, operand, expected } => {
                let mut change = |old| kind.apply(old, *operand, *expected);
                ram.update(page, (*offset).into(), (*width).into(), &mut change).ok()?
            }
        };
        trapped.finish(old, &mut after);
        return Some(after);
    }
    let mut load = |address: u64, width: usize| {
        let page = address / size;
        let here = core.node.access(page) >= Access::Read;
        let offset = usize::try_from(address % size).ok()?;
        if here { ram.load(page, offset, width).ok() } else { None }
    };
    if let Some(moved) = compute::moves(&bytes, regs) {
        let value = load(moved.from, moved.width)?;
        let (page, at) = (moved.to / size, usize::try_from(moved.to % size).ok()?);
        if core.node.access(page) != Access::Write || !at.is_multiple_of(moved.width) {
            return None;
        }
        ram.write(page, at, value.to_le_bytes().get(..moved.width)?).ok()?;
        return Some(moved.after);
    }
    compute(&bytes, &mut after, &mut load)?;
    Some(after)
}
