//! Unit tests of one local APIC.

use super::*;
use crate::registers::*;

/// An enabled APIC with id 3 of a bootstrap processor.
fn apic() -> LocalApic {
    let mut apic = LocalApic::new(3, true, 1);
    write(&mut apic, SPURIOUS_VECTOR, 0x1FF);
    apic
}

fn write(apic: &mut LocalApic, msr: u32, value: u64) -> Effect {
    apic.write_msr(msr, value, 0).unwrap()
}

fn read(apic: &mut LocalApic, msr: u32) -> u64 {
    apic.read_msr(msr, 0).unwrap()
}

fn fixed(vector: u8) -> Delivery {
    Delivery::Fixed { vector, trigger: Trigger::Edge }
}

fn take(apic: &mut LocalApic) -> Option<u8> {
    match apic.next_event(true, 0) {
        VcpuEvent::Interrupt { vector } => Some(vector),
        VcpuEvent::None => None,
        other => panic!("{other:?}"),
    }
}

/// Each register with whether it can be read, and bits that may be written; `None` for a read-only one.
fn register_rules() -> Vec<(u32, bool, Option<u64>)> {
    let mut rules = vec![
        (ID, true, None),
        (VERSION, true, None),
        (TASK_PRIORITY, true, Some(0xFF)),
        (PROCESSOR_PRIORITY, true, None),
        (END_OF_INTERRUPT, false, Some(0)),
        (LOGICAL_DESTINATION, true, None),
        (SPURIOUS_VECTOR, true, Some(0x3FF)),
        (ERROR_STATUS, true, Some(0)),
        (INTERRUPT_COMMAND, true, Some(0xFFFF_FFFF_000C_DFFF)),
        (LVT_TIMER, true, Some(0x3_10FF)),
        (LVT_THERMAL, true, Some(0x1_17FF)),
        (LVT_PERFORMANCE, true, Some(0x1_17FF)),
        (LVT_LINT0, true, Some(0x1_F7FF)),
        (LVT_LINT1, true, Some(0x1_F7FF)),
        (LVT_ERROR, true, Some(0x1_10FF)),
        (INITIAL_COUNT, true, Some(0xFFFF_FFFF)),
        (CURRENT_COUNT, true, None),
        (DIVIDE_CONFIGURATION, true, Some(0xB)),
        (SELF_IPI, false, Some(0xFF)),
    ];
    rules.extend((IN_SERVICE..ERROR_STATUS).map(|msr| (msr, true, None)));
    rules
}

#[test]
fn each_register_takes_what_its_rules_allow() {
    for msr in X2APIC_FIRST..=X2APIC_LAST {
        let rule = register_rules().into_iter().find(|(register, ..)| *register == msr);
        let (readable, writable) = rule.map_or((false, None), |(_, readable, writable)| (readable, writable));
        assert_eq!(apic().read_msr(msr, 0).is_ok(), readable, "RDMSR {msr:#x}");
        assert_eq!(apic().write_msr(msr, 0, 0).is_ok(), writable.is_some(), "WRMSR {msr:#x} of 0");
        for bit in 0..64 {
            let allowed = writable.is_some_and(|bits| bits >> bit & 1 != 0);
            let (mut before, mut after) = (apic(), apic());
            assert_eq!(after.write_msr(msr, 1 << bit, 0).is_ok(), allowed, "WRMSR {msr:#x}, bit {bit}");
            if !allowed {
                assert_eq!(after, before, "a refused write changes nothing");
            }
            before.take_attention();
        }
    }
}

#[test]
fn fixed_registers_follow_from_the_id() {
    let mut apic = LocalApic::new(0x123, false, 1);
    assert_eq!(read(&mut apic, ID), 0x123);
    assert_eq!(read(&mut apic, LOGICAL_DESTINATION), 0x12_0008);
    assert_eq!(read(&mut apic, VERSION), 0x5_0014);
    assert_eq!(read(&mut apic, SPURIOUS_VECTOR), 0xFF);
    assert_eq!(read(&mut apic, LVT_ERROR), 0x1_0000);
}

#[test]
fn x2apic_mode_is_locked() {
    for (is_bootstrap, base) in [(true, 0xFEE0_0D00), (false, 0xFEE0_0C00)] {
        let mut apic = LocalApic::new(3, is_bootstrap, 1);
        assert_eq!(read(&mut apic, APIC_BASE), base);
        assert_eq!(apic.write_msr(APIC_BASE, base, 0), Ok(Effect::None));
        for other in [base ^ 0x100, base & !0x400, base & !0xC00, base + 0x1000, base | 1 << 63, 0] {
            assert_eq!(apic.write_msr(APIC_BASE, other, 0), Err(GeneralProtection { msr: APIC_BASE }));
        }
        assert_eq!(read(&mut apic, XAPIC_DISABLE_STATUS), 1);
        assert!(apic.write_msr(XAPIC_DISABLE_STATUS, 1, 0).is_err());
    }
}

#[test]
fn interrupts_are_taken_in_the_order_of_their_classes() {
    let mut apic = apic();
    for vector in [0x31, 0x52, 0x51, 0x30] {
        assert!(apic.accept(fixed(vector)));
    }
    assert_eq!((take(&mut apic), take(&mut apic)), (Some(0x52), None));
    assert_eq!(read(&mut apic, PROCESSOR_PRIORITY), 0x50);
    assert!(apic.accept(fixed(0x61)));
    assert_eq!(take(&mut apic), Some(0x61), "a higher class interrupts");
    for expected in [None, Some(0x51), Some(0x31), Some(0x30), None] {
        write(&mut apic, END_OF_INTERRUPT, 0);
        assert_eq!(take(&mut apic), expected);
    }
    assert_eq!(apic.in_service, VectorSet::default());
}

#[test]
fn task_priority_and_cr8_hold_interrupts_back() {
    let mut apic = apic();
    write(&mut apic, TASK_PRIORITY, 0x47);
    assert_eq!((read(&mut apic, PROCESSOR_PRIORITY), apic.cr8()), (0x47, 4));
    apic.set_cr8(4);
    assert_eq!(read(&mut apic, TASK_PRIORITY), 0x47, "the same class keeps the lower half");
    apic.accept(fixed(0x4F));
    assert_eq!(take(&mut apic), None);
    apic.set_cr8(3);
    assert_eq!(read(&mut apic, TASK_PRIORITY), 0x30);
    assert_eq!(take(&mut apic), Some(0x4F));
}

#[test]
fn an_interrupt_waits_for_its_window() {
    let mut apic = apic();
    apic.accept(fixed(0x40));
    assert_eq!(apic.next_event(false, 0), VcpuEvent::AwaitInterruptWindow);
    assert!(apic.has_event(true, 0) && !apic.has_event(false, 0));
    assert_eq!(take(&mut apic), Some(0x40));
}

#[test]
fn one_bit_per_vector_and_one_kick_per_bit() {
    let mut apic = apic();
    assert!(apic.accept(fixed(0x40)) && apic.take_attention());
    assert!(apic.accept(fixed(0x40)) && !apic.take_attention());
    assert_eq!((take(&mut apic), take(&mut apic)), (Some(0x40), None));
    assert!(apic.accept(fixed(0x40)) && apic.take_attention(), "requested again while in service");
    write(&mut apic, END_OF_INTERRUPT, 0);
    assert_eq!(take(&mut apic), Some(0x40));
}

#[test]
fn the_end_of_a_level_interrupt_is_broadcast() {
    let mut apic = apic();
    let level = |vector| Delivery::Fixed { vector, trigger: Trigger::Level };
    apic.accept(level(0x40));
    apic.accept(fixed(0x50));
    assert_eq!(read(&mut apic, TRIGGER_MODE + 2), 1);
    assert_eq!((take(&mut apic), write(&mut apic, END_OF_INTERRUPT, 0)), (Some(0x50), Effect::None));
    let ended = (take(&mut apic), write(&mut apic, END_OF_INTERRUPT, 0));
    assert_eq!(ended, (Some(0x40), Effect::BroadcastEnd(0x40)));
    apic.accept(fixed(0x40));
    assert_eq!(read(&mut apic, TRIGGER_MODE + 2), 0, "the last message's trigger mode counts");
    assert_eq!(write(&mut apic, END_OF_INTERRUPT, 0), Effect::None, "nothing is in service");
}

#[test]
fn errors_become_readable_with_a_write_and_interrupt_once() {
    let mut apic = apic();
    write(&mut apic, LVT_ERROR, 0xE0);
    write(&mut apic, INTERRUPT_COMMAND, 0x0F);
    assert_eq!(read(&mut apic, ERROR_STATUS), 0);
    assert!(!apic.accept(fixed(0x0F)));
    assert_eq!((take(&mut apic), take(&mut apic)), (Some(0xE0), None));
    write(&mut apic, END_OF_INTERRUPT, 0);
    assert_eq!(take(&mut apic), None, "one interrupt for both");
    write(&mut apic, ERROR_STATUS, 0);
    assert_eq!(read(&mut apic, ERROR_STATUS), 0x60);
    write(&mut apic, SELF_IPI, 0x05);
    assert_eq!(take(&mut apic), Some(0xE0), "armed again");
    write(&mut apic, ERROR_STATUS, 0);
    assert_eq!(read(&mut apic, ERROR_STATUS), 0x20);
    write(&mut apic, ERROR_STATUS, 0);
    assert_eq!(read(&mut apic, ERROR_STATUS), 0);
}

#[test]
fn an_illegal_error_vector_is_an_error_without_an_interrupt() {
    let mut apic = apic();
    write(&mut apic, LVT_ERROR, 0x0E);
    write(&mut apic, SELF_IPI, 0x05);
    write(&mut apic, ERROR_STATUS, 0);
    assert_eq!(read(&mut apic, ERROR_STATUS), 0x60);
    assert_eq!(take(&mut apic), None);
}

#[test]
fn disabling_masks_the_table_and_refuses_fixed_interrupts() {
    let mut apic = apic();
    write(&mut apic, LVT_TIMER, 0x40);
    apic.accept(fixed(0x41));
    write(&mut apic, SPURIOUS_VECTOR, 0xFF);
    assert_eq!(read(&mut apic, LVT_TIMER), 0x1_0040);
    write(&mut apic, LVT_TIMER, 0x40);
    assert_eq!(read(&mut apic, LVT_TIMER), 0x1_0040, "it can't be unmasked");
    assert!(!apic.accept(fixed(0x42)) && apic.accept(Delivery::Nmi));
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Nmi);
    assert_eq!(take(&mut apic), Some(0x41), "what was requested before is still taken");
    write(&mut apic, SELF_IPI, 0x43);
    write(&mut apic, SPURIOUS_VECTOR, 0x1FF);
    write(&mut apic, END_OF_INTERRUPT, 0);
    assert_eq!(take(&mut apic), None);
}

#[test]
fn a_timer_interrupts_when_it_is_due() {
    let mut apic = apic();
    write(&mut apic, LVT_TIMER, 0xEC);
    apic.write_msr(INITIAL_COUNT, 100, 1000).unwrap();
    assert_eq!(apic.timer_due_ns(), Some(1200), "divided by 2");
    assert_eq!(apic.read_msr(CURRENT_COUNT, 1100), Ok(50));
    assert_eq!(apic.next_event(true, 1199), VcpuEvent::None);
    assert!(apic.has_event(true, 1200));
    assert_eq!(apic.next_event(true, 1200), VcpuEvent::Interrupt { vector: 0xEC });
    assert_eq!((apic.read_msr(CURRENT_COUNT, 1200), apic.timer_due_ns()), (Ok(0), None));
}

#[test]
fn a_masked_timer_expires_without_an_interrupt() {
    let mut apic = apic();
    write(&mut apic, LVT_TIMER, 0x1_00EC);
    write(&mut apic, INITIAL_COUNT, 100);
    assert_eq!(apic.timer_due_ns(), None);
    apic.write_msr(LVT_TIMER, 0xEC, 500).unwrap();
    assert_eq!(apic.next_event(true, 500), VcpuEvent::None);
    write(&mut apic, INITIAL_COUNT, 100);
    apic.write_msr(INITIAL_COUNT, 0, 10).unwrap();
    assert_eq!(apic.next_event(true, 500), VcpuEvent::None, "stopped");
}

#[test]
fn a_periodic_timer_goes_on_until_it_becomes_one_shot() {
    let mut apic = apic();
    write(&mut apic, LVT_TIMER, 0x2_00EC);
    write(&mut apic, INITIAL_COUNT, 500_000);
    for period in 1..4 {
        let now = period * 1_000_000;
        assert_eq!(apic.next_event(true, now), VcpuEvent::Interrupt { vector: 0xEC });
        assert_eq!(apic.write_msr(END_OF_INTERRUPT, 0, now), Ok(Effect::None));
    }
    apic.write_msr(LVT_TIMER, 0xEC, 3_000_000).unwrap();
    assert_eq!(apic.next_event(true, 4_000_000), VcpuEvent::Interrupt { vector: 0xEC });
    assert_eq!(apic.timer_due_ns(), None);
}

#[test]
fn local_sources_interrupt_in_their_modes() {
    let mut apic = apic();
    for (mode, expected) in [
        (0x040, VcpuEvent::Interrupt { vector: 0x40 }),
        (0x240, VcpuEvent::None),
        (0x340, VcpuEvent::None),
        (0x440, VcpuEvent::Nmi),
        (0x740, VcpuEvent::ExternalInterrupt),
    ] {
        write(&mut apic, LVT_LINT0, mode);
        apic.set_lint(LocalSource::Lint0, true);
        apic.set_lint(LocalSource::Lint0, true);
        assert_eq!(apic.next_event(true, 0), expected, "{mode:#x}");
        assert_eq!(apic.next_event(true, 0), VcpuEvent::None);
        apic.set_lint(LocalSource::Lint0, false);
        write(&mut apic, END_OF_INTERRUPT, 0);
    }
    write(&mut apic, LVT_PERFORMANCE, 0x400);
    apic.fire(LocalSource::Performance);
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Nmi);
    assert_eq!(read(&mut apic, LVT_PERFORMANCE), 0x1_0400, "masked by its interrupt");
}

#[test]
fn a_level_triggered_lint_interrupts_again_while_it_is_asserted() {
    let mut apic = apic();
    apic.set_lint(LocalSource::Lint0, true);
    write(&mut apic, LVT_LINT0, 0x8040);
    assert_eq!(read(&mut apic, LVT_LINT0), 0xC040, "remote IRR");
    for _ in 0..3 {
        assert_eq!((take(&mut apic), take(&mut apic)), (Some(0x40), None));
        write(&mut apic, END_OF_INTERRUPT, 0);
    }
    assert_eq!(take(&mut apic), Some(0x40));
    apic.set_lint(LocalSource::Lint0, false);
    write(&mut apic, END_OF_INTERRUPT, 0);
    assert_eq!((take(&mut apic), read(&mut apic, LVT_LINT0)), (None, 0x8040));
}

#[test]
fn init_resets_and_a_startup_begins_once() {
    let mut apic = LocalApic::new(3, false, 1);
    assert_eq!(apic.next_event(true, 0), VcpuEvent::WaitForStartup, "after power-on");
    assert!(apic.accept(Delivery::Startup { vector: 0x98 }) && apic.take_attention());
    assert!(!apic.accept(Delivery::Startup { vector: 0x99 }));
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Startup { vector: 0x98 });
    write(&mut apic, SPURIOUS_VECTOR, 0x1FF);
    write(&mut apic, TASK_PRIORITY, 0x20);
    write(&mut apic, INITIAL_COUNT, 5);
    assert!(!apic.accept(Delivery::Startup { vector: 0x97 }), "it runs");
    apic.accept(fixed(0x40));
    assert!(apic.accept(Delivery::Init));
    assert!(apic.accept(Delivery::Startup { vector: 0x96 }), "before the vCPU has seen INIT");
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Init);
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Startup { vector: 0x96 });
    assert_eq!(apic.next_event(true, 1_000), VcpuEvent::None);
    let fresh = LocalApic { waits_for_startup: false, ..LocalApic::new(3, false, 1) };
    assert_eq!(apic, fresh, "only the id is as before");
}

#[test]
fn the_bootstrap_processor_does_not_wait_after_init() {
    let mut apic = apic();
    apic.accept(Delivery::Init);
    apic.accept(Delivery::Startup { vector: 1 });
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Init);
    assert_eq!(apic.next_event(true, 0), VcpuEvent::None);
    assert!(!apic.is_enabled());
}

#[test]
fn an_nmi_waits_for_the_startup() {
    let mut apic = LocalApic::new(3, false, 1);
    apic.accept(Delivery::Nmi);
    assert!(!apic.has_event(true, 0));
    assert_eq!(apic.next_event(true, 0), VcpuEvent::WaitForStartup);
    apic.accept(Delivery::Startup { vector: 1 });
    assert!(apic.has_event(false, 0));
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Startup { vector: 1 });
    assert_eq!(apic.next_event(true, 0), VcpuEvent::Nmi);
}
