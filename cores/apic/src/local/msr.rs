//! Accesses to an x2APIC's registers.

use super::lvt::LocalSource;
use super::{Effect, GeneralProtection, LocalApic};
use crate::message::{Message, Trigger, logical_id, low, vector_of};
use crate::registers::{
    APIC_BASE, APIC_BASE_BOOTSTRAP, APIC_BASE_X2APIC, COMMAND_DELIVERY_STATUS, COMMAND_RESERVED,
    CURRENT_COUNT, DIVIDE_CONFIGURATION, DIVIDE_WRITABLE, END_OF_INTERRUPT, ERROR_SEND_ILLEGAL_VECTOR,
    ERROR_STATUS, FIRST_LEGAL_VECTOR, ID, IN_SERVICE, INITIAL_COUNT, INTERRUPT_COMMAND, INTERRUPT_REQUEST,
    LOGICAL_DESTINATION, LVT_MASKED, PROCESSOR_PRIORITY, SELF_IPI, SPURIOUS_VECTOR, SPURIOUS_WRITABLE,
    TASK_PRIORITY, TRIGGER_MODE, VERSION, VERSION_VALUE, XAPIC_DISABLE_STATUS,
};
use crate::vectors::VectorSet;

impl LocalApic {
    /// Reads a register (RDMSR) at time `now_ns`, which determines the timer's current count.
    pub(crate) fn read_msr(&mut self, msr: u32, now_ns: u64) -> Result<u64, GeneralProtection> {
        self.advance(now_ns);
        if let Some(source) = LocalSource::of_msr(msr) {
            return Ok(self.lvt.get(source).into());
        }
        let word = |set: &VectorSet, first: u32| set.word(usize::try_from(msr - first).unwrap_or(usize::MAX));
        let value = match msr {
            APIC_BASE => return Ok(self.apic_base()),
            // Legacy xAPIC mode is disabled.
            XAPIC_DISABLE_STATUS => 1,
            ID => self.id,
            VERSION => VERSION_VALUE,
            TASK_PRIORITY => self.task_priority.into(),
            PROCESSOR_PRIORITY => self.processor_priority().into(),
            LOGICAL_DESTINATION => logical_id(self.id),
            SPURIOUS_VECTOR => self.spurious,
            IN_SERVICE..TRIGGER_MODE => word(&self.in_service, IN_SERVICE),
            TRIGGER_MODE..INTERRUPT_REQUEST => word(&self.trigger, TRIGGER_MODE),
            INTERRUPT_REQUEST..ERROR_STATUS => word(&self.requested, INTERRUPT_REQUEST),
            ERROR_STATUS => self.errors.readable,
            INTERRUPT_COMMAND => return Ok(self.command),
            INITIAL_COUNT => self.timer.initial(),
            CURRENT_COUNT => self.timer.current(now_ns),
            DIVIDE_CONFIGURATION => self.timer.divide(),
            _ => return Err(GeneralProtection { msr }),
        };
        Ok(value.into())
    }

    fn apic_base(&self) -> u64 {
        APIC_BASE_X2APIC | if self.is_bootstrap { APIC_BASE_BOOTSTRAP } else { 0 }
    }

    /// Writes a register (WRMSR). After an error all registers are unchanged.
    pub(crate) fn write_msr(
        &mut self,
        msr: u32,
        value: u64,
        now_ns: u64,
    ) -> Result<Effect, GeneralProtection> {
        self.advance(now_ns);
        let refused = Err(GeneralProtection { msr });
        match msr {
            INTERRUPT_COMMAND => return self.write_command(value),
            // x2APIC mode is locked, as with LEGACY_XAPIC_DISABLED in IA32_XAPIC_DISABLE_STATUS.
            APIC_BASE if value == self.apic_base() => return Ok(Effect::None),
            _ => {}
        }
        if value >> 32 != 0 {
            return refused;
        }
        let bits = low(value);
        if let Some(source) = LocalSource::of_msr(msr) {
            if bits & !(source.writable() | source.read_only()) != 0 {
                return refused;
            }
            self.write_lvt(source, bits);
            return Ok(Effect::None);
        }
        match msr {
            TASK_PRIORITY if bits <= 0xFF => self.task_priority = vector_of(value),
            END_OF_INTERRUPT if bits == 0 => return Ok(self.end_of_interrupt()),
            SPURIOUS_VECTOR if bits & !SPURIOUS_WRITABLE == 0 => {
                self.spurious = bits;
                if !self.is_enabled() {
                    self.lvt.mask_all();
                }
            }
            ERROR_STATUS if bits == 0 => self.errors.readable = std::mem::take(&mut self.errors.found),
            INITIAL_COUNT => self.timer.start(bits, now_ns),
            DIVIDE_CONFIGURATION if bits & !DIVIDE_WRITABLE == 0 => self.timer.set_divide(bits, now_ns),
            SELF_IPI if bits <= 0xFF => self.send_to_self(vector_of(value)),
            _ => return refused,
        }
        Ok(Effect::None)
    }

    fn write_lvt(&mut self, source: LocalSource, bits: u32) {
        let mask = if self.is_enabled() { 0 } else { LVT_MASKED };
        self.lvt.set(source, bits | mask);
        // A write may unmask the entry of an asserted line.
        self.fire_asserted_lints();
    }

    fn write_command(&mut self, value: u64) -> Result<Effect, GeneralProtection> {
        if value & COMMAND_RESERVED != 0 {
            return Err(GeneralProtection { msr: INTERRUPT_COMMAND });
        }
        self.command = value & !COMMAND_DELIVERY_STATUS;
        let is_vectored = value >> 8 & 7 <= 1;
        if is_vectored && vector_of(value) < FIRST_LEGAL_VECTOR {
            self.record_error(ERROR_SEND_ILLEGAL_VECTOR);
            return Ok(Effect::None);
        }
        Ok(Message::from_command(value, self.id).map_or(Effect::None, Effect::Send))
    }

    fn send_to_self(&mut self, vector: u8) {
        if vector < FIRST_LEGAL_VECTOR {
            self.record_error(ERROR_SEND_ILLEGAL_VECTOR);
        } else if self.is_enabled() {
            self.request(vector, Trigger::Edge);
        }
    }
}
