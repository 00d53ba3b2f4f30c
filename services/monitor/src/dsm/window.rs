//! Emulation of whole instructions with the pages of this node: of those behind a trapped store, and of one whose granted page is
//! requested.
//!
//! *Window emulation*: behind a trapped store, the monitor executes instructions that only compute, up to the next store to a write-update
//! page, and that store, too. This saves an exit and a fault per store. Each store is still an update of its own, and complete before the
//! next begins, as if it had trapped. See docs/design/dsm.md.

use dsm::{Access, Operation, wire};
use machine::x86::kvm_regs;

use super::compute::{self, compute};
use super::engine::Core;
use super::instruction::{self, Trapped};
use super::vcpus::{MAX_INSTRUCTION_BYTES, code};

/// Limit of stores that are emulated behind a trapped instruction. In the same time a node that isn't the sequencer completes one, so with
/// a higher limit the sequencer would outrun the others.
pub(super) const STORES: usize = 2;
/// Instructions to examine per store.
const STEPS: usize = 12;
/// Bytes of code to fetch at once.
const FETCHED: usize = 64;

/// The next store to a write-update page, with the registers before it, if it follows within [`STEPS`] instructions that only compute. An
/// atomic instruction ends the search, since all vCPUs contend for its word.
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
        // A load ends it: its value must be the one at the time when the vCPU gets there.
        compute(bytes, &mut regs, &mut |_, _| None)?;
    }
    None
}

/// Emulates the instruction at `regs` with pages that are here, so that it certainly retires. Returns the registers after it. Returns
/// `None`, with no effect, if the instruction isn't supported, a page isn't here, or an access isn't aligned: the CPU must then execute it
/// atomically. The vCPU must be outside the guest.
///
/// Other vCPUs of this node may use the same words meanwhile, so each load, store and read-modify-write is atomic for them, too.
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
