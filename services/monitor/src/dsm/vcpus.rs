//! Faults of this node's vCPUs, and whether their instructions have retired.
//!
//! A vCPU that needs another node's page sleeps in userfaultfd until the page arrives. The engine kicks it when another node requests a
//! page that it was granted, and samples its registers. The instruction at these registers, decoded, may touch none of the granted pages:
//! then the instruction that needed them has retired. Else the engine compares the registers with the previous sample. If they differ, that
//! instruction has retired, too. The engine reports this to the protocol, which then releases the pages.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use dsm::{Access, Event, Mode, Operation, Page, Vcpu, wire};
use machine::vcpu::GuestRegisters;
use machine::x86::kvm_regs;

use super::engine::{Core, Engine, now, this_thread};
use super::{instruction, window};

/// Samples of unchanged registers after which an instruction counts as retired, if it can't be emulated. A loop that polls a value returns
/// to the same registers although it retires instructions. But a locked access across a page's end takes the CPU milliseconds, and a vCPU
/// without a CPU makes no progress. So each pause is twice the previous one: 13 ms in all, with a hold of 0.1 ms.
const MAX_SAMPLES: u32 = 8;
/// Pause before the second sample, without an earlier one, ns: enough for the vCPU to enter the guest.
const FIRST_SAMPLE_DELAY_NS: u64 = 25_000;
/// Pause of a vCPU whose page changes its mode.
const MODE_CHANGE_PAUSE: Duration = Duration::from_micros(500);
/// Granted pages from which on a vCPU has retired an instruction, since no instruction needs as many. Gather and scatter need most: 16
/// elements on two pages each, and two pages of code (Intel SDM, volume 2). Which instructions have retired is unknown without a sample, so
/// all grants end. This happens at most once per instruction, which needs fewer pages again.
pub(super) const MAX_GRANTED_PAGES: usize = 40;
/// Bytes of the longest instruction.
pub(super) const MAX_INSTRUCTION_BYTES: usize = 15;

/// A fault that is being served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub(super) page: Page,
    pub(super) write: bool,
    /// The page was readable before.
    pub(super) upgrade: bool,
    /// The page was here before and was revoked.
    pub(super) again: bool,
    /// When the fault was read, ns.
    pub(super) at: u64,
}

/// State of a vCPU of this node.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The fault that the vCPU waits for.
    pub(super) fault: Option<Pending>,
    /// The registers were sampled since that fault.
    pub(super) sampled: bool,
    /// Registers at the last sample of an instruction that needed a page.
    pub(super) snapshot: Option<kvm_regs>,
    /// The page at which the vCPU's instruction is trapped: it is to be decoded and emulated.
    pub(super) trap: Option<Page>,
    /// When the fault of the trapped instruction was read, ns.
    pub(super) trapped_at: u64,
    /// The vCPU's operation is in flight.
    pub(super) operating: bool,
    /// Since when the vCPU sleeps until the operation completes, ns.
    pub(super) operating_since: Option<u64>,
    /// The operation is complete: the value before.
    pub(super) completed: Option<u64>,
    /// Pages granted since the last instruction that is known to have retired.
    pub(super) granted: Vec<Page>,
    /// Other nodes request pages that the vCPU was granted.
    pub(super) kick: bool,
    pub(super) samples: u32,
    /// The vCPU is in `before_run`.
    pub(super) outside: bool,
    /// The vCPU doesn't run any more.
    pub(super) ended: bool,
}

type Locked<'a> = MutexGuard<'a, Option<Core>>;

impl Engine {
    /// Implements [`machine::vcpu::VcpuExitHandler::before_run`]. `index` is the vCPU's number in the protocol.
    pub(super) fn before_run(&self, index: usize, registers: &dyn GuestRegisters) {
        let mut locked = self.lock();
        if let Some(core) = &mut *locked {
            core.threads.insert(this_thread(), index);
        }
        set_outside(&mut locked, index, true);
        while let Some(core) = &mut *locked
            && !core.stopping
            && let Some(slot) = core.vcpus.get_mut(index)
        {
            if let Some(page) = slot.trap.take() {
                locked = self.emulate(locked, index, page, registers);
            } else if slot.fault.is_some() {
                if std::mem::replace(&mut slot.sampled, true) {
                    locked = self.wait(locked, index);
                } else {
                    self.sample_waiting(core, index, registers);
                }
            } else if std::mem::take(&mut slot.kick) {
                self.sample_granted(core, index, registers);
            } else {
                break;
            }
        }
        set_outside(&mut locked, index, false);
    }

    fn wait<'a>(&self, locked: Locked<'a>, index: usize) -> Locked<'a> {
        match self.changed.get(index) {
            Some(changed) => changed.wait(locked).unwrap_or_else(PoisonError::into_inner),
            None => locked,
        }
    }

    /// Samples a vCPU that waits for a page: has the instruction retired that pages were granted for before?
    fn sample_waiting(&self, core: &mut Core, index: usize, registers: &dyn GuestRegisters) {
        let Some(found) = self.registers(registers) else { return };
        let needs = needs(core, index, &found);
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        let before = slot.snapshot.replace(found);
        if let Some(fault) = slot.fault {
            core.hot.instruction(fault.page, found.rip);
        }
        tracing::trace!(at = now(), node = self.me, index, rip = found.rip, ?needs, "examine");
        // Without an earlier sample it may be the instruction that was granted the pages.
        let moved = before.is_some_and(|before| before != found);
        if needs == Needs::None || needs == Needs::Some && moved {
            self.retired(core, index);
        }
    }

    /// Samples a vCPU whose granted pages other nodes request: has the instruction retired?
    fn sample_granted(&self, core: &mut Core, index: usize, registers: &dyn GuestRegisters) {
        let Some(found) = self.registers(registers) else { return };
        let needs = needs(core, index, &found);
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        let before = slot.snapshot.replace(found);
        let moved = needs == Needs::None || before.is_some_and(|before| before != found);
        tracing::trace!(at = now(), node = self.me, index, rip = found.rip, ?needs, moved, "look");
        if !moved && let Some(after) = window::step_over(core, &found) {
            core.counts.stepped += 1;
            if let Err(error) = registers.set(&after) {
                self.fail(format!("A vCPU's registers can't be written: {error}"));
            }
            self.retired(core, index);
            return;
        }
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        if !moved && slot.samples < MAX_SAMPLES {
            let hold = core.node.config().policy.hold_ns.max(10_000);
            // The first sample only records the registers.
            let pause = if before.is_none() {
                hold.min(FIRST_SAMPLE_DELAY_NS)
            } else {
                hold << slot.samples.saturating_sub(1).min(MAX_SAMPLES)
            };
            slot.samples += 1;
            core.rekick.push((now().saturating_add(pause), index));
            self.wake_faults_thread();
            return;
        }
        core.counts.unproven += u64::from(!moved);
        self.retired(core, index);
    }

    /// Ends all holds of a vCPU.
    pub(super) fn retired(&self, core: &mut Core, index: usize) {
        if let Some(slot) = core.vcpus.get_mut(index) {
            slot.granted.clear();
            // The kick is answered.
            slot.kick = false;
        }
        if let Ok(vcpu) = Vcpu::try_from(index) {
            self.step(core, Event::Retired { vcpu });
        }
    }

    fn registers(&self, registers: &dyn GuestRegisters) -> Option<kvm_regs> {
        match registers.get() {
            Ok(found) => Some(found),
            Err(error) => {
                self.fail(format!("A vCPU's registers can't be read: {error}"));
                None
            }
        }
    }

    /// Ends all holds of a vCPU that runs no more. `parked`: the VM continues without it.
    pub(super) fn vcpu_ended(&self, index: usize, parked: bool) {
        let mut locked = self.lock();
        if let Some(core) = &mut *locked
            && core.vcpus.get(index).is_some()
        {
            core.ending |= !parked;
            if let Some(slot) = core.vcpus.get_mut(index) {
                slot.ended = true;
                slot.kick = false;
            }
            self.retired(core, index);
        }
    }

    /// Emulates the instruction that was trapped at a write-update page, and further ones by window emulation. If it isn't supported,
    /// requests write-invalidate for the page.
    fn emulate<'a>(
        &self,
        mut locked: Locked<'a>,
        index: usize,
        page: Page,
        registers: &dyn GuestRegisters,
    ) -> Locked<'a> {
        let Some(mut found) = self.registers(registers) else { return locked };
        let Some(core) = &mut *locked else { return locked };
        let (Ok(vcpu), Some(bytes)) = (Vcpu::try_from(index), code(core, found.rip, MAX_INSTRUCTION_BYTES))
        else {
            // The page of its code was revoked. The vCPU faults there first, and then here again.
            return locked;
        };
        core.hot.instruction(page, found.rip);
        let atomics = core.node.config().policy.atomics;
        let fits = |trapped: &instruction::Trapped| {
            trapped.page == page && (atomics || !matches!(trapped.operation, Operation::Atomic { .. }))
        };
        let Some(trapped) = instruction::decode(&bytes, &found).filter(fits) else {
            core.counts.not_emulated += 1;
            self.step(core, Event::Advise { page, mode: Mode::Invalidate });
            return self.wait_for_mode_change(locked, index);
        };
        let Some(mut since) = core.vcpus.get(index).map(|slot| slot.trapped_at) else { return locked };
        let (mut trapped, begun, mut retired) = (trapped, since, false);
        for behind in 0.. {
            let (back, old) = self.operate(locked, index, vcpu, &trapped);
            locked = back;
            let (Some(old), Some(core)) = (old, &mut *locked) else { break };
            trapped.finish(old, &mut found);
            retired = true;
            let done = now();
            core.counts.emulated += 1;
            core.hot.trapped(trapped.page, done.saturating_sub(std::mem::replace(&mut since, done)));
            if behind == window::STORES || core.stopping || core.suspending {
                break;
            }
            let Some((registers, next)) = window::next_store(core, &found) else { break };
            core.hot.instruction(next.page, registers.rip);
            (found, trapped) = (registers, next);
        }
        if let Some(core) = &mut *locked {
            self.flush_batched(core);
        }
        // If the page's mode has changed meanwhile, or the VM ends, no instruction has retired.
        if retired && let Some(core) = &mut *locked {
            core.counts.stalls.count_trapped(since.saturating_sub(begun));
            if let Err(error) = registers.set(&found) {
                self.fail(format!("A vCPU's registers can't be written: {error}"));
            }
        }
        locked
    }

    /// Executes a trapped instruction's operation in the protocol. Returns the value in memory before, or none if the vCPU must run the
    /// instruction itself.
    fn operate<'a>(
        &self,
        mut locked: Locked<'a>,
        index: usize,
        vcpu: Vcpu,
        trapped: &instruction::Trapped,
    ) -> (Locked<'a>, Option<u64>) {
        let Some(core) = &mut *locked else { return (locked, None) };
        let Some(slot) = core.vcpus.get_mut(index) else { return (locked, None) };
        slot.operating = true;
        slot.operating_since = None;
        slot.completed = None;
        let operation = trapped.operation.clone();
        // Messages of consecutive stores leave together, unless this one must wait: each message that arrives alone wakes a thread.
        core.outbox.batch();
        self.step(core, Event::Operate { vcpu, page: trapped.page, operation });
        if core.vcpus.get(index).is_some_and(|slot| slot.operating) {
            self.flush_batched(core);
        }
        if let Some(slot) = core.vcpus.get_mut(index)
            && slot.operating
        {
            slot.operating_since = Some(now());
        }
        while let Some(core) = &mut *locked
            && let Some(slot) = core.vcpus.get_mut(index)
        {
            if let Some(old) = slot.completed.take() {
                // The next sample starts over.
                slot.snapshot = None;
                slot.granted.clear();
                return (locked, Some(old));
            }
            if !slot.operating || core.stopping {
                break;
            }
            locked = self.wait(locked, index);
        }
        (locked, None)
    }

    /// Waits a little, so that other nodes can change a page's mode.
    fn wait_for_mode_change<'a>(&self, locked: Locked<'a>, index: usize) -> Locked<'a> {
        match self.changed.get(index) {
            Some(changed) => {
                changed.wait_timeout(locked, MODE_CHANGE_PAUSE).unwrap_or_else(PoisonError::into_inner).0
            }
            None => locked,
        }
    }
}

/// Whether the instruction at a vCPU's registers needs pages that were granted since the last one retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// No pages were granted.
    Nothing,
    /// It needs none of them, so the instruction that they were granted for has retired.
    None,
    /// It needs some, or that is unknown.
    Some,
}

fn needs(core: &Core, index: usize, regs: &kvm_regs) -> Needs {
    let granted = core.vcpus.get(index).map(|slot| slot.granted.as_slice()).unwrap_or_default();
    if granted.is_empty() {
        return Needs::Nothing;
    }
    let pages =
        code(core, regs.rip, MAX_INSTRUCTION_BYTES).and_then(|bytes| instruction::touched(&bytes, regs));
    match pages {
        Some(pages) if !pages.iter().any(|page| granted.contains(page)) => Needs::None,
        _ => Needs::Some,
    }
}

/// Up to `max_bytes` bytes at a code address, from pages that are readable here now; `None` if the first page isn't.
pub(super) fn code(core: &Core, rip: u64, max_bytes: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; max_bytes];
    let size = wire::PAGE_SIZE as u64;
    let offset = usize::try_from(rip % size).ok()?;
    let readable = |page| core.node.access(page) >= Access::Read;
    let page = rip / size;
    if !readable(page) {
        return None;
    }
    let mut len = core.pages.code(page, offset, &mut bytes)?;
    if len < max_bytes && readable(page + 1) {
        len += core.pages.code(page + 1, 0, bytes.get_mut(len..)?)?;
    }
    bytes.truncate(len);
    Some(bytes)
}

fn set_outside(locked: &mut Locked<'_>, index: usize, outside: bool) {
    if let Some(slot) = locked.as_mut().and_then(|core| core.vcpus.get_mut(index)) {
        slot.outside = outside;
    }
}
