//! What the vCPUs of this node wait for, and whether their instructions have retired.
//!
//! A vCPU that needs another node's page sleeps in userfaultfd until it is kicked: then its registers are read while the request
//! travels. Registers tell whether the instruction that faults is the one that the last page was granted for. If they differ,
//! that one has retired, which the protocol is told. When another node asks for a page that a vCPU has had for long enough, the
//! vCPU is kicked again, and the same comparison says whether it may go. It is not even needed where the instruction, decoded, touches
//! none of the pages that were granted.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use dsm::{Access, Event, Mode, Operation, Page, Vcpu, wire};
use machine::vcpu::GuestRegisters;
use machine::x86::kvm_regs;

use super::ahead::Foresight;
use super::engine::{Core, Engine, now, this_thread};
use super::{instruction, window};

/// Looks at unchanged registers after which an instruction counts as retired all the same, where it isn't one that can be carried out here. A loop that waits for a value
/// comes back to the same registers, though it retires instructions all the time; a locked access across a page's end takes the processor milliseconds, and a vCPU that has no processor does nothing.
/// So each pause is twice the one before: 13 ms in all, where a page is held for 0.1 ms.
const LOOKS: u32 = 8;
/// Pause before the second look, where nothing was known of its registers before, nanoseconds: enough for it to get back into the guest.
const FIRST_PAUSE: u64 = 25_000;
/// Pause of a vCPU whose page is to be kept in another mode.
const PAUSE: Duration = Duration::from_micros(500);
/// More pages than an instruction can need: the most have those that gather or scatter, 16 elements on two pages each, and two pages of code (Intel, Software Developer's
/// Manual, volume 2). A vCPU that was granted more has retired some; which, isn't known without a look at its registers, so all grants are given up, once for
/// an instruction at the most, as those that it needs again are fewer.
pub(super) const MOST_GRANTED: usize = 40;
/// Bytes of the longest instruction.
pub(super) const MAX_INSTRUCTION_BYTES: usize = 15;

/// A fault that is being served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub(super) page: Page,
    pub(super) write: bool,
    /// It could read the page before.
    pub(super) upgrade: bool,
    /// The page was here before, and was taken.
    pub(super) again: bool,
    /// When it was read, nanoseconds.
    pub(super) at: u64,
}

/// A vCPU of this node.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// What it waits for.
    pub(super) fault: Option<Pending>,
    /// Its registers have been read since that fault.
    pub(super) examined: bool,
    /// Registers at the last look that showed an instruction which needs a page.
    pub(super) snapshot: Option<kvm_regs>,
    /// Its instruction is to be decoded and carried out on this page.
    pub(super) trap: Option<Page>,
    /// When the fault of that was read.
    pub(super) trapped_at: u64,
    /// Its operation is under way.
    pub(super) operating: bool,
    /// Since when it sleeps until that is done, nanoseconds.
    pub(super) operating_since: Option<u64>,
    /// Its operation is done: the value before.
    pub(super) completed: Option<u64>,
    /// Pages that it was granted since its last instruction is known to have retired.
    pub(super) granted: Vec<Page>,
    /// Others want what it was granted.
    pub(super) kick: bool,
    pub(super) looks: u32,
    /// It is in `before_run`.
    pub(super) outside: bool,
    /// It runs no more.
    pub(super) ended: bool,
    /// Which pages it will want.
    pub(super) foresight: Foresight,
}

type Locked<'a> = MutexGuard<'a, Option<Core>>;

impl Engine {
    /// See [`machine::vcpu::VcpuExitHandler::before_run`]; `index` is that of the protocol.
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
                locked = self.carry_out(locked, index, page, registers);
            } else if slot.fault.is_some() {
                if std::mem::replace(&mut slot.examined, true) {
                    locked = self.wait(locked, index);
                } else {
                    self.examine(core, index, registers);
                }
            } else if std::mem::take(&mut slot.kick) {
                self.look(core, index, registers);
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

    /// It waits for a page: is it still the instruction that pages were granted for before?
    fn examine(&self, core: &mut Core, index: usize, registers: &dyn GuestRegisters) {
        let Some(found) = self.registers(registers) else { return };
        let needs = needs(core, index, &found);
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        let before = slot.snapshot.replace(found);
        if let Some(fault) = slot.fault {
            core.hot.instruction(fault.page, found.rip);
        }
        tracing::trace!(at = now(), node = self.me, index, rip = found.rip, ?needs, "examine");
        // Without an earlier look it may be the instruction that it was granted them for.
        let moved = before.is_some_and(|before| before != found);
        if needs == Needs::None || needs == Needs::Some && moved {
            self.retired(core, index);
        }
    }

    /// Others want what it was granted: has the instruction retired?
    fn look(&self, core: &mut Core, index: usize, registers: &dyn GuestRegisters) {
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
        if !moved && slot.looks < LOOKS {
            let hold = core.node.config().policy.hold_ns.max(10_000);
            // The first look only says where it is.
            let pause = if before.is_none() {
                hold.min(FIRST_PAUSE)
            } else {
                hold << slot.looks.saturating_sub(1).min(LOOKS)
            };
            slot.looks += 1;
            core.rekick.push((now().saturating_add(pause), index));
            self.poke();
            return;
        }
        core.counts.unproven += u64::from(!moved);
        self.retired(core, index);
    }

    /// Nothing that it was granted is held for it any more.
    pub(super) fn retired(&self, core: &mut Core, index: usize) {
        if let Some(slot) = core.vcpus.get_mut(index) {
            slot.granted.clear();
            // Whoever asked is answered.
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

    /// A vCPU runs no more: nothing it was granted is held for it.
    /// `parked`: the VM goes on without it.
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

    /// Carries out the instruction that was trapped at a page which is kept by updates, or, where it isn't known, asks for the page
    /// to be kept otherwise.
    fn carry_out<'a>(
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
            // Its code has been taken away: it faults there first, and then here again.
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
            return self.wait_a_little(locked, index);
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
            if behind == window::STORES || core.stopping || core.holding {
                break;
            }
            let Some((registers, next)) = window::next_store(core, &found) else { break };
            core.hot.instruction(next.page, registers.rip);
            (found, trapped) = (registers, next);
        }
        if let Some(core) = &mut *locked {
            self.send_held(core);
        }
        // Nothing was done when the page's mode has changed meanwhile, or the VM ends.
        if retired && let Some(core) = &mut *locked {
            core.counts.stalls.count_trapped(since.saturating_sub(begun));
            if let Err(error) = registers.set(&found) {
                self.fail(format!("A vCPU's registers can't be written: {error}"));
            }
        }
        locked
    }

    /// Has an instruction carried out; gives what was in memory before it, or nothing if it has to be run by the vCPU itself.
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
        // What others are told of several stores in a row goes together, unless it has to be waited for: each message that comes alone costs them a wake.
        core.outbox.hold();
        self.step(core, Event::Operate { vcpu, page: trapped.page, operation });
        if core.vcpus.get(index).is_some_and(|slot| slot.operating) {
            self.send_held(core);
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
                // The next look begins anew.
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

    /// Leaves others the time to change a page's mode.
    fn wait_a_little<'a>(&self, locked: Locked<'a>, index: usize) -> Locked<'a> {
        match self.changed.get(index) {
            Some(changed) => changed.wait_timeout(locked, PAUSE).unwrap_or_else(PoisonError::into_inner).0,
            None => locked,
        }
    }
}

/// What the instruction at a vCPU's registers needs of the pages that it was granted since the last one retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// It was granted none.
    Nothing,
    /// None of them: it isn't the one that they were granted for, which has retired.
    None,
    /// Some, or it isn't known.
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

/// So many bytes at a code address, as far as their pages can be read here now; `None` when the first can't.
pub(super) fn code(core: &Core, rip: u64, most: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; most];
    let size = wire::PAGE_SIZE as u64;
    let offset = usize::try_from(rip % size).ok()?;
    let readable = |page| core.node.access(page) >= Access::Read;
    let page = rip / size;
    if !readable(page) {
        return None;
    }
    let mut len = core.pages.code(page, offset, &mut bytes)?;
    if len < most && readable(page + 1) {
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
