//! Steps that access registers.

use apic::registers::*;

use super::{Comparison, ILLEGAL_VECTORS, LVT_MASKED, LVT_READ_ONLY};

/// Writable registers. Those that software writes most occur several times.
const WRITTEN: [u32; 14] = [
    TASK_PRIORITY,
    TASK_PRIORITY,
    END_OF_INTERRUPT,
    SPURIOUS_VECTOR,
    ERROR_STATUS,
    LVT_TIMER,
    LVT_THERMAL,
    LVT_PERFORMANCE,
    LVT_LINT0,
    LVT_LINT1,
    LVT_ERROR,
    DIVIDE_CONFIGURATION,
    SELF_IPI,
    SELF_IPI,
];
const READ: [u32; 8] = [
    TASK_PRIORITY,
    PROCESSOR_PRIORITY,
    PROCESSOR_PRIORITY,
    LOGICAL_DESTINATION,
    ID,
    VERSION,
    ERROR_STATUS,
    APIC_BASE,
];

/// Bits of a written value that KVM stores; it drops others without an error.
fn kept_bits(msr: u32) -> Option<u64> {
    match msr {
        TASK_PRIORITY => Some(0xFF),
        END_OF_INTERRUPT => Some(0),
        SPURIOUS_VECTOR => Some(0x3FF),
        LVT_TIMER => Some(0x3_10FF),
        LVT_THERMAL | LVT_PERFORMANCE => Some(0x1_17FF),
        LVT_LINT0 | LVT_LINT1 => Some(0x1_F7FF),
        LVT_ERROR => Some(0x1_10FF),
        DIVIDE_CONFIGURATION => Some(0xB),
        _ => None,
    }
}

impl Comparison {
    pub(super) fn write_register(&mut self, vcpu: usize) {
        let msr = if self.random.once_in(8) {
            X2APIC_FIRST + u32::from(self.random.byte())
        } else {
            self.random.of(&WRITTEN)
        };
        let value = self.value_for(msr);
        let by_guest = self.random.once_in(50);
        self.note("write", format!("vCPU {vcpu} writes {value:#x} to MSR {msr:#x}, by guest: {by_guest}"));
        self.write(vcpu, msr, value, by_guest);
    }

    /// A value that the register mostly accepts. Other steps write the ICR and start the timer. The error entry stays masked.
    fn value_for(&mut self, msr: u32) -> u64 {
        let value = match self.random.below(16) {
            0 => self.random.next(),
            1 => self.random.bits32().into(),
            2 => 1 << self.random.below(64),
            _ => u64::from(self.random.bits32()) & kept_bits(msr).unwrap_or(0xFF),
        };
        match msr {
            INTERRUPT_COMMAND => value | 1 << 13,
            INITIAL_COUNT => value & !0xFFFF_FFFF,
            LVT_ERROR => value | u64::from(LVT_MASKED),
            ERROR_STATUS if !self.random.once_in(4) => 0,
            // Most of the time: enabled, and every priority is accepted.
            SPURIOUS_VECTOR if !self.random.once_in(4) => value | 0x100,
            TASK_PRIORITY if !self.random.once_in(4) => value & 0x1F,
            _ => value,
        }
    }

    /// Both sides allow the write or both refuse it, apart from reserved bits, which KVM drops.
    pub(super) fn write(&mut self, vcpu: usize, msr: u32, value: u64, by_guest: bool) {
        let kernel = match by_guest {
            true => self.kernel.guest_write(vcpu, msr, value),
            false => self.kernel.write(vcpu, msr, value),
        };
        let ours = self.ours.write(vcpu, msr, value);
        if kernel && !ours && value >> 32 == 0 {
            let kept = kept_bits(msr).filter(|kept| value & !kept != 0);
            self.check(kept.is_some(), || format!("KVM allows {value:#x} in MSR {msr:#x}, ours refuses it"));
            self.deviate("RESERVED_BITS");
            assert!(self.ours.write(vcpu, msr, value & kept.unwrap()));
            return;
        }
        self.check(kernel == ours, || {
            format!("vCPU {vcpu} writes {value:#x} to MSR {msr:#x}: KVM allows it {kernel}, ours {ours}")
        });
    }

    pub(super) fn read_register(&mut self, vcpu: usize) {
        let msr = if self.random.once_in(2) {
            X2APIC_FIRST + u32::from(self.random.byte())
        } else {
            self.random.of(&READ)
        };
        let by_guest = self.random.once_in(50);
        self.note("read", format!("vCPU {vcpu} reads MSR {msr:#x}, by guest: {by_guest}"));
        let kernel = match by_guest {
            true => self.kernel.guest_read(vcpu, msr),
            false => self.kernel.read(vcpu, msr),
        };
        let ours = self.ours.read(vcpu, msr);
        if msr == ERROR_STATUS && ours != Some(0) {
            assert_eq!((kernel, ours.is_some_and(|errors| errors & !0x60 == 0)), (Some(0), true));
            self.deviate("NO_ERRORS");
            return;
        }
        let bits = match msr {
            TRIGGER_MODE | INTERRUPT_REQUEST => !u64::from(ILLEGAL_VECTORS),
            LVT_TIMER..=LVT_ERROR => !u64::from(LVT_READ_ONLY),
            _ => u64::MAX,
        };
        let equal = kernel.map(|value| value & bits) == ours.map(|value| value & bits);
        self.check(equal, || {
            format!("vCPU {vcpu} reads MSR {msr:#x}: {kernel:x?} of KVM, {ours:x?} of ours")
        });
    }

    /// Enables the APIC and accepts every priority.
    pub(super) fn enable(&mut self, vcpu: usize) {
        self.note("enable", format!("vCPU {vcpu} enables its APIC"));
        self.write(vcpu, SPURIOUS_VECTOR, 0x1FF, false);
        self.write(vcpu, TASK_PRIORITY, 0, false);
    }
}
