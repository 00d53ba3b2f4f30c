//! One x2APIC: registers, interrupts requested and in service, and the next event of its vCPU.

mod lvt;
mod msr;
mod saved;
mod timer;

pub use timer::MIN_PERIODIC_INTERRUPT_NS;

pub(crate) use self::lvt::LocalSource;
use self::lvt::LocalVectorTable;
use self::timer::Timer;
use crate::message::{Delivery, Message, Trigger, vector_of};
use crate::registers::{
    ERROR_RECEIVE_ILLEGAL_VECTOR, FIRST_LEGAL_VECTOR, LVT_LEVEL, LVT_PERIODIC, LVT_REMOTE_IRR,
    SPURIOUS_ENABLE, SPURIOUS_RESET,
};
use crate::vectors::VectorSet;

/// An event that a vCPU handles before it enters the guest ([`crate::VcpuPort::next_event`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VcpuEvent {
    /// Reset the vCPU's registers as INIT does. The bootstrap processor then begins at the reset vector. Others get
    /// [`Self::WaitForStartup`] until a start-up IPI arrives.
    Init,
    /// Begin in real mode: CS selector `vector << 8`, CS base `vector << 12`, IP 0.
    Startup {
        /// Number of the 4 KiB page at which real-mode code begins.
        vector: u8,
    },
    /// Don't enter the guest: wait for a kick, and repeat the call.
    WaitForStartup,
    /// Inject an NMI (KVM_NMI). KVM delays it while the guest blocks NMIs.
    Nmi,
    /// Inject the vector of an 8259's interrupt acknowledge cycle; in a VM without an 8259, nothing.
    ExternalInterrupt,
    /// Inject this vector (KVM_INTERRUPT). It is in service from this call until its EOI.
    Interrupt {
        /// The vector.
        vector: u8,
    },
    /// An interrupt is pending, but the guest can't accept it yet. Enter the guest, with an exit as soon as it can
    /// (`request_interrupt_window`).
    AwaitInterruptWindow,
    /// Enter the guest; a halted vCPU stays halted.
    None,
}

/// A register access for which a processor raises #GP(0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The access to MSR {msr:#x} isn't allowed by its register: inject #GP(0) into the guest")]
pub struct GeneralProtection {
    /// The MSR.
    pub msr: u32,
}

/// Effect of a register write outside of its APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    None,
    Send(Message),
    /// Broadcast the EOI of a level-triggered interrupt with this vector to the IOAPIC.
    BroadcastEnd(u8),
}

/// Error status register: `found` collects errors since the last write of the register; that write made `readable` visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ErrorStatus {
    readable: u32,
    found: u32,
}

/// Pending events without a bit in IRR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Latched {
    init: bool,
    startup: Option<u8>,
    nmi: bool,
    external: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalApic {
    id: u32,
    is_bootstrap: bool,
    task_priority: u8,
    spurious: u32,
    command: u64,
    requested: VectorSet,
    in_service: VectorSet,
    trigger: VectorSet,
    lvt: LocalVectorTable,
    errors: ErrorStatus,
    timer: Timer,
    /// Levels of LINT0 and LINT1.
    lint_asserted: [bool; 2],
    latched: Latched,
    waits_for_startup: bool,
    /// An event arrived since the vCPU's last [`Self::next_event`], so it must be kicked.
    attention: bool,
}

impl LocalApic {
    /// An APIC in its power-on state: the bootstrap processor runs, others wait for a start-up IPI.
    pub(crate) fn new(id: u32, is_bootstrap: bool, timer_tick_ns: u32) -> Self {
        Self {
            id,
            is_bootstrap,
            task_priority: 0,
            spurious: SPURIOUS_RESET,
            command: 0,
            requested: VectorSet::default(),
            in_service: VectorSet::default(),
            trigger: VectorSet::default(),
            lvt: LocalVectorTable::new(),
            errors: ErrorStatus::default(),
            timer: Timer::new(timer_tick_ns),
            lint_asserted: [false; 2],
            latched: Latched::default(),
            waits_for_startup: !is_bootstrap,
            attention: false,
        }
    }

    /// Resets to the power-on state. The levels of LINT0 and LINT1 don't change.
    pub(crate) fn reset(&mut self) {
        let latched = Latched::default();
        self.init_registers();
        (self.latched, self.waits_for_startup, self.attention) = (latched, !self.is_bootstrap, false);
    }

    /// Resets the registers as INIT does, and as a reset does. The id doesn't change.
    fn init_registers(&mut self) {
        (self.task_priority, self.spurious, self.command) = (0, SPURIOUS_RESET, 0);
        (self.requested, self.in_service, self.trigger) = Default::default();
        self.lvt = LocalVectorTable::new();
        self.errors = ErrorStatus::default();
        self.timer.reset();
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.spurious & SPURIOUS_ENABLE != 0
    }

    /// Whether an event has arrived for which a vCPU in the guest or in HLT must be kicked. Clears the flag.
    pub(crate) fn take_attention(&mut self) -> bool {
        std::mem::take(&mut self.attention)
    }

    /// Accepts a message. Returns whether it has an effect, now or when the vCPU handles it.
    pub(crate) fn accept(&mut self, delivery: Delivery) -> bool {
        match delivery {
            Delivery::Fixed { vector, trigger } | Delivery::LowestPriority { vector, trigger } => {
                return self.is_enabled() && self.request(vector, trigger);
            }
            Delivery::Smi => return false,
            Delivery::Nmi => self.latch(|latched| latched.nmi = true),
            Delivery::Init => {
                self.latch(|latched| *latched = Latched { init: true, startup: None, ..*latched });
            }
            Delivery::Startup { vector } => {
                if !(self.waits_for_startup || self.latched.init) || self.latched.startup.is_some() {
                    return false;
                }
                self.latch(|latched| latched.startup = Some(vector));
            }
            Delivery::External => self.latch(|latched| latched.external = true),
        }
        true
    }

    fn latch(&mut self, change: impl FnOnce(&mut Latched)) {
        let before = self.latched;
        change(&mut self.latched);
        self.attention |= self.latched != before;
    }

    /// Sets the vector's bit in IRR. `false` for an illegal vector.
    fn request(&mut self, vector: u8, trigger: Trigger) -> bool {
        if vector < FIRST_LEGAL_VECTOR {
            self.record_error(ERROR_RECEIVE_ILLEGAL_VECTOR);
            return false;
        }
        if self.requested.insert(vector) {
            self.attention = true;
        }
        match trigger {
            Trigger::Edge => self.trigger.remove(vector),
            Trigger::Level => drop(self.trigger.insert(vector)),
        }
        true
    }

    /// Records an error. The first error since the last write of ESR interrupts. If the error entry's own vector is illegal, that is a
    /// second error, without an interrupt.
    fn record_error(&mut self, error: u32) {
        let is_first = self.errors.found == 0;
        self.errors.found |= error;
        if is_first {
            self.fire(LocalSource::Error);
        }
    }

    /// Sends the interrupt of a local source, as its LVT entry specifies. The performance entry is masked afterwards.
    pub(crate) fn fire(&mut self, source: LocalSource) {
        if self.lvt.is_masked(source) {
            return;
        }
        let entry = u64::from(self.lvt.get(source));
        let is_lint = matches!(source, LocalSource::Lint0 | LocalSource::Lint1);
        match entry >> 8 & 7 {
            0 if is_lint && entry & u64::from(LVT_LEVEL) != 0 => self.fire_level(source),
            0 => drop(self.request(vector_of(entry), Trigger::Edge)),
            4 => drop(self.accept(Delivery::Nmi)),
            5 if is_lint => drop(self.accept(Delivery::Init)),
            7 if is_lint => drop(self.accept(Delivery::External)),
            // SMI, which has no effect, and reserved modes.
            _ => {}
        }
        if source == LocalSource::Performance {
            self.lvt.mask(source);
        }
    }

    /// Requests the interrupt of a level-triggered LINT entry, unless remote IRR shows that its last interrupt hasn't ended.
    fn fire_level(&mut self, source: LocalSource) {
        let entry = self.lvt.get(source);
        if entry & LVT_REMOTE_IRR == 0 && self.request(vector_of(entry.into()), Trigger::Level) {
            self.lvt.set_remote_irr(source, true);
        }
    }

    /// Sets the level of LINT0 or LINT1. A change to asserted interrupts.
    pub(crate) fn set_lint(&mut self, source: LocalSource, asserted: bool) {
        let line = &mut self.lint_asserted[usize::from(source == LocalSource::Lint1)];
        if !std::mem::replace(line, asserted) && asserted {
            self.fire(source);
        }
    }

    /// Requests the interrupts of level-triggered LINT lines that are still asserted, where the entry allows it.
    fn fire_asserted_lints(&mut self) {
        for (source, asserted) in [LocalSource::Lint0, LocalSource::Lint1].into_iter().zip(self.lint_asserted)
        {
            let entry = self.lvt.get(source);
            if asserted && entry & LVT_LEVEL != 0 && entry >> 8 & 7 == 0 {
                self.fire(source);
            }
        }
    }

    /// Ends the interrupt in service with the highest priority.
    fn end_of_interrupt(&mut self) -> Effect {
        let Some(vector) = self.in_service.highest() else { return Effect::None };
        self.in_service.remove(vector);
        if !self.trigger.contains(vector) {
            return Effect::None;
        }
        for source in [LocalSource::Lint0, LocalSource::Lint1] {
            if vector_of(self.lvt.get(source).into()) == vector {
                self.lvt.set_remote_irr(source, false);
            }
        }
        self.fire_asserted_lints();
        Effect::BroadcastEnd(vector)
    }

    /// The class of the interrupt in service or TPR, whichever is higher.
    pub(crate) fn processor_priority(&self) -> u8 {
        let in_service = self.in_service.highest().unwrap_or(0) & 0xF0;
        if self.task_priority & 0xF0 >= in_service { self.task_priority } else { in_service }
    }

    /// The highest requested vector, if its class is above the processor priority: the vCPU's next interrupt.
    pub(crate) fn deliverable(&self) -> Option<u8> {
        self.requested.highest().filter(|vector| vector & 0xF0 > self.processor_priority() & 0xF0)
    }

    pub(crate) fn cr8(&self) -> u8 {
        self.task_priority >> 4
    }

    /// Applies the vCPU's CR8. A change sets bits 7:4 of TPR, and clears the others.
    pub(crate) fn set_cr8(&mut self, cr8: u8) {
        let class = cr8 & 0xF;
        if class != self.cr8() {
            self.task_priority = class << 4;
        }
    }

    /// Requests the timer's interrupt, if it has expired by `now_ns`.
    pub(crate) fn advance(&mut self, now_ns: u64) {
        if self.timer.expire(self.lvt.get(LocalSource::Timer) & LVT_PERIODIC != 0, now_ns) {
            self.fire(LocalSource::Timer);
        }
    }

    /// Time of the timer's next interrupt, in nanoseconds; `None` while its entry is masked, since its expiry is lost then.
    pub(crate) fn timer_due_ns(&self) -> Option<u64> {
        self.timer.due_ns().filter(|_| !self.lvt.is_masked(LocalSource::Timer))
    }

    /// Whether an event must wake a halted vCPU. `interruptible`: RFLAGS.IF is set.
    pub(crate) fn has_event(&mut self, interruptible: bool, now_ns: u64) -> bool {
        if self.latched.init {
            return true;
        }
        if self.waits_for_startup {
            return self.latched.startup.is_some();
        }
        self.advance(now_ns);
        self.latched.nmi || interruptible && (self.latched.external || self.deliverable().is_some())
    }

    /// The next event for the vCPU. `interruptible`: RFLAGS.IF is set, no interrupt shadow blocks it, and no other event is being injected.
    pub(crate) fn next_event(&mut self, interruptible: bool, now_ns: u64) -> VcpuEvent {
        self.attention = false;
        if self.latched.init {
            self.init_registers();
            self.latched = Latched {
                startup: self.latched.startup.filter(|_| !self.is_bootstrap),
                ..Default::default()
            };
            self.waits_for_startup = !self.is_bootstrap;
            return VcpuEvent::Init;
        }
        if self.waits_for_startup {
            let Some(vector) = self.latched.startup.take() else { return VcpuEvent::WaitForStartup };
            self.waits_for_startup = false;
            return VcpuEvent::Startup { vector };
        }
        self.advance(now_ns);
        self.attention = false;
        if std::mem::take(&mut self.latched.nmi) {
            return VcpuEvent::Nmi;
        }
        match self.deliverable() {
            None if !self.latched.external => VcpuEvent::None,
            _ if !interruptible => VcpuEvent::AwaitInterruptWindow,
            _ if std::mem::take(&mut self.latched.external) => VcpuEvent::ExternalInterrupt,
            Some(vector) => {
                self.requested.remove(vector);
                self.in_service.insert(vector);
                VcpuEvent::Interrupt { vector }
            }
            None => VcpuEvent::None,
        }
    }
}

#[cfg(test)]
mod tests;
