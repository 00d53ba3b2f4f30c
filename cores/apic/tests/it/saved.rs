//! Saved state: it is restored identically, and an invalid one is refused.

use apic::{Config, Controllers, RestoreError, SavedControllers, VcpuEvent};

use crate::common::*;

fn restore(saved: &SavedControllers) -> Result<Controllers, RestoreError> {
    Controllers::restore(config(), saved, 0)
}

#[test]
fn pending_interrupts_and_timers_come_back() {
    let controllers = running(config());
    write(&controllers, 1, 0x832, 0xEC);
    controllers.vcpu(1).unwrap().write_msr(0x838, 500, 10_000, &mut Vec::new()).unwrap();
    write(&controllers, 0, 0x830, 0x1_0000_0041);
    write(&controllers, 0, 0x830, 0x2_0000_0400);
    set_pin(&controllers, 9, 2 << 56 | 0x8051);
    set_line(&controllers, 9, true);
    let saved = controllers.save(10_100);
    let restored = Controllers::restore(config(), &saved, 7).unwrap();
    let port = restored.vcpu(1).unwrap();
    let mut actions = Vec::new();
    assert_eq!(port.next_event(true, 7, &mut actions), VcpuEvent::Interrupt { vector: 0x41 });
    assert_eq!(actions, [apic::Action::SetTimer { apic_id: 1, due_ns: Some(907) }]);
    assert!(!port.has_event(true, 906, &mut actions) && port.has_event(true, 907, &mut actions));
    assert_eq!(next(&restored, 2), VcpuEvent::Nmi);
    assert_eq!(serve(&restored, 2).map(|(vector, actions)| (vector, actions.len())), Some((0x51, 2)));
}

#[test]
fn another_version_or_another_vm_is_refused() {
    let saved = running(config()).save(0);
    let text = |saved: &SavedControllers, config: Config| {
        Controllers::restore(config, saved, 0).err().unwrap().to_string()
    };
    assert!(text(&SavedControllers { version: 2, ..saved.clone() }, config()).contains("version 2"));
    let fewer = Config { local_apic_ids: vec![0, 1], ..config() };
    assert!(text(&saved, fewer).contains("[0, 1, 2], but this node has [0, 1]"));
    let elsewhere = Config { io_apic: apic::IoApicLocation::Node(7), ..config() };
    assert!(text(&saved, elsewhere).contains("IOAPIC"));
    let mut many = saved.clone();
    many.local = vec![saved.local[0].clone(); 1000];
    assert!(text(&many, config()).len() < 200, "a long list isn't repeated");
    let impossible = Config { timer_tick_ns: 0, ..config() };
    let error = Controllers::restore(impossible, &saved, 0).err().unwrap();
    assert!(matches!(error, RestoreError::Config(_)));
}

#[test]
fn states_that_no_apic_was_in_are_refused() {
    let saved = running(config()).save(0);
    let refuse = |change: &dyn Fn(&mut apic::saved::SavedLocalApic), what: &str| {
        let mut damaged = saved.clone();
        change(&mut damaged.local[1]);
        let error = restore(&damaged).err().unwrap_or_else(|| panic!("{what} was restored"));
        let text = error.to_string();
        assert!(text.contains("APIC 0x1 ") && text.contains(what), "{text}");
    };
    refuse(&|apic| apic.spurious = 0x1FFF, "spurious");
    refuse(&|apic| apic.command = 1 << 13, "command");
    refuse(&|apic| apic.command = 1 << 12, "command");
    refuse(&|apic| apic.error_status = 1, "error status");
    refuse(&|apic| apic.errors_found = 0x80, "errors found");
    refuse(&|apic| apic.requested = [15].into_iter().collect(), "request");
    refuse(&|apic| apic.trigger = [0].into_iter().collect(), "trigger");
    refuse(&|apic| apic.in_service = [3].into_iter().collect(), "in-service");
    refuse(&|apic| apic.in_service = [0x40, 0x4F].into_iter().collect(), "in-service");
    refuse(&|apic| apic.lvt[0] = 1 << 18, "table");
    refuse(&|apic| apic.lvt[3] = 1 << 14, "table");
    refuse(&|apic| (apic.spurious, apic.lvt[0]) = (0xFF, 0x40), "table");
    refuse(&|apic| apic.divide_configuration = 4, "divide");
    refuse(&|apic| apic.timer_remaining_ns = Some(1), "timer");
    refuse(&|apic| (apic.initial_count, apic.timer_remaining_ns) = (10, Some(21)), "timer");
    refuse(&|apic| apic.startup_latched = Some(1), "start-up");
    let mut damaged = saved.clone();
    damaged.local[0].waits_for_startup = true;
    assert!(restore(&damaged).is_err(), "the bootstrap processor never waits");
    let refuse = |change: &dyn Fn(&mut apic::saved::SavedIoApic)| {
        let mut damaged = saved.clone();
        change(damaged.io_apic.as_mut().unwrap());
        assert!(restore(&damaged).err().unwrap().to_string().contains("IOAPIC"));
    };
    refuse(&|io_apic| io_apic.id = 0x10);
    refuse(&|io_apic| io_apic.asserted = 1 << 24);
    refuse(&|io_apic| io_apic.until_end = 1 << 31);
    refuse(&|io_apic| io_apic.entries[3] = 1 << 14);
    refuse(&|io_apic| io_apic.entries[3] = 1 << 12);
    refuse(&|io_apic| io_apic.entries[3] = 1 << 50);
}

#[test]
fn a_state_is_loaded_in_place_or_not_at_all() {
    let source = running(config());
    write(&source, 0, 0x830, 0x1_0000_0041);
    set_pin(&source, 9, 2 << 56 | 0x8051);
    let saved = source.save(0);
    let controllers = Controllers::new(config()).unwrap();
    let mut damaged = saved.clone();
    damaged.local[2].spurious = 0x1FFF;
    let before = controllers.save(0);
    assert!(controllers.load(&damaged, 0).is_err());
    assert_eq!(controllers.save(0), before);
    controllers.load(&saved, 0).unwrap();
    assert_eq!(controllers.save(0), saved);
    assert_eq!(vectors(&controllers, 1), [0x41]);
}
