//! Saving and restoring a local APIC.

use super::lvt::{LocalSource, LocalVectorTable};
use super::timer::Timer;
use super::{ErrorStatus, Latched, LocalApic};
use crate::registers::{
    COMMAND_DELIVERY_STATUS, COMMAND_RESERVED, DIVIDE_WRITABLE, ERROR_RECEIVE_ILLEGAL_VECTOR,
    ERROR_SEND_ILLEGAL_VECTOR, LVT_LEVEL, LVT_MASKED, LVT_REMOTE_IRR, SPURIOUS_WRITABLE,
};
use crate::saved::{RestoreError, SavedLocalApic};
use crate::vectors::VectorSet;

const ERRORS: u32 = ERROR_SEND_ILLEGAL_VECTOR | ERROR_RECEIVE_ILLEGAL_VECTOR;
/// Vectors 0 to 15, whose bits are never set in IRR, ISR or TMR.
const ILLEGAL_VECTORS: u32 = 0xFFFF;

impl LocalApic {
    /// Saves the state at `now_ns`. A timer that has expired by then has requested its interrupt.
    pub(crate) fn save(&mut self, now_ns: u64) -> SavedLocalApic {
        self.advance(now_ns);
        SavedLocalApic {
            id: self.id,
            task_priority: self.task_priority,
            spurious: self.spurious,
            command: self.command,
            requested: self.requested,
            in_service: self.in_service,
            trigger: self.trigger,
            lvt: self.lvt.entries(),
            error_status: self.errors.readable,
            errors_found: self.errors.found,
            initial_count: self.timer.initial(),
            divide_configuration: self.timer.divide(),
            timer_remaining_ns: self.timer.remaining_ns(now_ns),
            lint_asserted: self.lint_asserted,
            init_latched: self.latched.init,
            startup_latched: self.latched.startup,
            nmi_latched: self.latched.nmi,
            external_latched: self.latched.external,
            waits_for_startup: self.waits_for_startup,
        }
    }

    /// Restores a saved APIC, whose timer continues from `now_ns`.
    ///
    /// # Errors
    /// When a register has a value that no APIC can have.
    pub(crate) fn restore(
        saved: &SavedLocalApic,
        is_bootstrap: bool,
        timer_tick_ns: u32,
        now_ns: u64,
    ) -> Result<Self, RestoreError> {
        let refuse = |what, value: u64| Err(RestoreError::LocalApic { apic_id: saved.id, what, value });
        if saved.spurious & !SPURIOUS_WRITABLE != 0 {
            return refuse("spurious-interrupt vector register", saved.spurious.into());
        }
        if saved.command & (COMMAND_RESERVED | COMMAND_DELIVERY_STATUS) != 0 {
            return refuse("interrupt command", saved.command);
        }
        for (what, errors) in [("error status", saved.error_status), ("errors found", saved.errors_found)] {
            if errors & !ERRORS != 0 {
                return refuse(what, errors.into());
            }
        }
        check_vectors(saved)?;
        let may_start = saved.init_latched || saved.waits_for_startup;
        if saved.waits_for_startup && is_bootstrap || saved.startup_latched.is_some() && !may_start {
            return refuse("start-up state", saved.startup_latched.map_or(0, Into::into));
        }
        let mut apic = Self::new(saved.id, is_bootstrap, timer_tick_ns);
        apic.lvt = restore_lvt(saved)?;
        apic.timer = restore_timer(saved, timer_tick_ns, now_ns)?;
        apic.task_priority = saved.task_priority;
        apic.spurious = saved.spurious;
        apic.command = saved.command;
        (apic.requested, apic.in_service, apic.trigger) = (saved.requested, saved.in_service, saved.trigger);
        apic.errors = ErrorStatus { readable: saved.error_status, found: saved.errors_found };
        apic.lint_asserted = saved.lint_asserted;
        apic.latched = Latched {
            init: saved.init_latched,
            startup: saved.startup_latched,
            nmi: saved.nmi_latched,
            external: saved.external_latched,
        };
        apic.waits_for_startup = saved.waits_for_startup;
        Ok(apic)
    }
}

/// Checks the vector sets. Vectors are 16 or above. At most one of each class is in service, as a vCPU accepts an interrupt only above the
/// class in service.
fn check_vectors(saved: &SavedLocalApic) -> Result<(), RestoreError> {
    let refuse =
        |what, value: u32| Err(RestoreError::LocalApic { apic_id: saved.id, what, value: value.into() });
    let sets: [(&str, &VectorSet); 3] = [
        ("interrupt request register", &saved.requested),
        ("in-service register", &saved.in_service),
        ("trigger mode register", &saved.trigger),
    ];
    for (what, set) in sets {
        if set.word(0) & ILLEGAL_VECTORS != 0 {
            return refuse(what, set.word(0));
        }
    }
    for index in 0..8 {
        let word = saved.in_service.word(index);
        if (word & 0xFFFF).count_ones() > 1 || (word >> 16).count_ones() > 1 {
            return refuse("in-service register", word);
        }
    }
    Ok(())
}

fn restore_lvt(saved: &SavedLocalApic) -> Result<LocalVectorTable, RestoreError> {
    let is_enabled = saved.spurious & crate::registers::SPURIOUS_ENABLE != 0;
    let mut table = LocalVectorTable::new();
    for (source, value) in LocalSource::ALL.into_iter().zip(saved.lvt) {
        let has_remote_irr = value & LVT_LEVEL != 0 && source.read_only() & LVT_REMOTE_IRR != 0;
        let possible = source.writable() | if has_remote_irr { LVT_REMOTE_IRR } else { 0 };
        if value & !possible != 0 || !is_enabled && value & LVT_MASKED == 0 {
            let what = "local vector table entry";
            return Err(RestoreError::LocalApic { apic_id: saved.id, what, value: value.into() });
        }
        table.set(source, value & source.writable());
        table.set_remote_irr(source, value & LVT_REMOTE_IRR != 0);
    }
    Ok(table)
}

fn restore_timer(saved: &SavedLocalApic, timer_tick_ns: u32, now_ns: u64) -> Result<Timer, RestoreError> {
    let refuse = |what, value| Err(RestoreError::LocalApic { apic_id: saved.id, what, value });
    if saved.divide_configuration & !DIVIDE_WRITABLE != 0 {
        return refuse("divide configuration", saved.divide_configuration.into());
    }
    let mut timer = Timer::new(timer_tick_ns);
    timer.restore(saved.initial_count, saved.divide_configuration, saved.timer_remaining_ns, now_ns);
    match saved.timer_remaining_ns {
        Some(remaining_ns) if remaining_ns > timer.period_ns() || saved.initial_count == 0 => {
            refuse("remaining timer nanoseconds", remaining_ns)
        }
        _ => Ok(timer),
    }
}
