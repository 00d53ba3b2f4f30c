//! Delivery of interrupts to vCPUs: IPIs, pins, MSIs, and messages of other nodes.

use apic::message::{Delivery, Destination, Message, Trigger};
use apic::{Action, Config, Controllers, IoApicLocation, LineError, LocalInput, NodeMessage, VcpuEvent};

use crate::common::*;

const ICR: u32 = 0x830;

fn kick(apic_id: u32) -> Action {
    Action::Kick { apic_id }
}

fn send(node: u16, destination: Destination, delivery: Delivery) -> Action {
    Action::Send { node, message: NodeMessage::Interrupt(Message { destination, delivery }) }
}

fn fixed(vector: u8) -> Delivery {
    Delivery::Fixed { vector, trigger: Trigger::Edge }
}

#[test]
fn an_ipi_reaches_its_destination_only() {
    let controllers = running(config());
    assert_eq!(write(&controllers, 0, ICR, 0x2_0000_0041), [kick(2)]);
    assert_eq!([0, 1, 2, 0x21].map(|id| vectors(&controllers, id).len()), [0, 0, 1, 0]);
    assert_eq!(read(&controllers, 0, ICR), 0x2_0000_0041);
    assert_eq!(write(&controllers, 0, ICR, 0x99_0000_0041), [], "nobody has this id");
}

#[test]
fn a_vcpu_is_not_kicked_for_its_own_ipi() {
    let controllers = running(config());
    for (msr, value) in [(0x83F, 0x41), (ICR, 0x4_0042), (ICR, 0x43)] {
        assert_eq!(write(&controllers, 0, msr, value), []);
    }
    assert_eq!(vectors(&controllers, 0), [0x43, 0x42, 0x41]);
}

#[test]
fn shorthands_and_broadcasts_reach_all_nodes_with_one_message_each() {
    let controllers = running(config());
    let clear = |ids: &[u32]| ids.iter().for_each(|id| drop(vectors(&controllers, *id)));
    let others = write(&controllers, 1, ICR, 0xC_0041);
    let to = Destination::AllBut(1);
    let sent = |to| [send(7, to, fixed(0x41)), send(9, to, fixed(0x41))];
    assert_eq!(others, [&[kick(0), kick(2), kick(0x21)][..], &sent(to)].concat());
    let all = [&[kick(0), kick(2), kick(0x21)][..], &sent(Destination::All)].concat();
    clear(&[0, 2, 0x21]);
    assert_eq!(write(&controllers, 1, ICR, 0x8_0041), all);
    clear(&[0, 1, 2, 0x21]);
    assert_eq!(write(&controllers, 1, ICR, 0xFFFF_FFFF_0000_0041), all);
    assert_eq!(vectors(&controllers, 1), [0x41]);
}

#[test]
fn a_logical_destination_may_lie_on_several_nodes() {
    let controllers = running(config());
    let actions = write(&controllers, 0, ICR, 0x2_000E_0000_0841);
    assert_eq!(actions, [kick(0x21), send(7, Destination::Logical(0x2_000E), fixed(0x41))]);
    let received = running(Config { local_apic_ids: vec![0, 0x22, 0x23], remote_apics: vec![], ..config() });
    let mut actions = Vec::new();
    let message = Message { destination: Destination::Logical(0x2_000E), delivery: fixed(0x41) };
    received.receive(NodeMessage::Interrupt(message), &mut actions);
    assert_eq!(actions, [kick(0x22), kick(0x23)]);
}

#[test]
fn lowest_priority_reaches_one_of_the_enabled() {
    let controllers = running(config());
    let lowest = |vector: u64| write(&controllers, 0x21, ICR, 0x7_0000_0900 | vector);
    assert_eq!([0x41, 0x42, 0x45].map(lowest), [[kick(2)], [kick(0)], [kick(0)]].map(Vec::from));
    write(&controllers, 2, 0x80F, 0xFF);
    assert_eq!(lowest(0x43), [kick(1)]);
    assert_eq!(lowest(0x44), [kick(0)]);
    let chosen = write(&controllers, 0, ICR, 0x2_000E_0000_0941);
    assert_eq!(chosen, [send(7, Destination::Physical(0x23), fixed(0x41))]);
}

#[test]
fn nmi_init_and_startup_pass_disabled_apics() {
    let controllers = running(config());
    write(&controllers, 1, 0x80F, 0xFF);
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_0041), []);
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_0400), [kick(1)]);
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_4200), [], "SMI");
    assert_eq!(next(&controllers, 1), VcpuEvent::Nmi);
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_C500), [kick(1)]);
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_8500), [], "de-assert");
    assert_eq!((next(&controllers, 1), next(&controllers, 1)), (VcpuEvent::Init, VcpuEvent::WaitForStartup));
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_469A), [kick(1)]);
    assert_eq!(next(&controllers, 1), VcpuEvent::Startup { vector: 0x9A });
    assert_eq!(write(&controllers, 0, ICR, 0x1_0000_469B), [], "it runs");
    let startup = Delivery::Startup { vector: 0x9A };
    let sent = write(&controllers, 0, ICR, 0x40_0000_469A);
    assert_eq!(sent, [send(9, Destination::Physical(0x40), startup)]);
}

#[test]
fn a_level_triggered_pin_interrupts_until_it_is_deasserted() {
    let controllers = running(config());
    set_pin(&controllers, 9, 2 << 56 | 0x8051);
    assert_eq!(set_line(&controllers, 9, true), [kick(2)]);
    assert_eq!(set_line(&controllers, 9, true), [], "remote IRR");
    assert_eq!(pin_entry(&controllers, 9), 0xC051);
    for _ in 0..3 {
        assert_eq!(serve(&controllers, 2), Some((0x51, vec![Action::Resample { pin: 9 }, kick(2)])));
    }
    set_line(&controllers, 9, false);
    assert_eq!(serve(&controllers, 2), Some((0x51, vec![Action::Resample { pin: 9 }])));
    assert_eq!((serve(&controllers, 2), pin_entry(&controllers, 9)), (None, 0x8051));
}

#[test]
fn an_eventfds_line_is_released_by_the_end_of_its_interrupt() {
    let controllers = running(config());
    set_pin(&controllers, 9, 2 << 56 | 0x8051);
    let assert_line = || {
        let mut actions = Vec::new();
        controllers.assert_until_end(9, &mut actions).unwrap();
        actions
    };
    assert_eq!(assert_line(), [kick(2)]);
    assert_eq!(serve(&controllers, 2), Some((0x51, vec![Action::Resample { pin: 9 }])));
    assert_eq!(serve(&controllers, 2), None);
    assert_eq!(assert_line(), [kick(2)]);
    set_line(&controllers, 9, true);
    let again = Some((0x51, vec![Action::Resample { pin: 9 }, kick(2)]));
    assert_eq!(serve(&controllers, 2), again, "another device on the pin");
}

#[test]
fn the_end_register_ends_as_a_broadcast_does() {
    let controllers = running(config());
    set_pin(&controllers, 9, 2 << 56 | 0x8051);
    set_line(&controllers, 9, true);
    set_line(&controllers, 9, false);
    let mut actions = Vec::new();
    controllers.write_io_apic(0x40, &[0x51, 0, 0, 0], &mut actions);
    assert_eq!(actions, [Action::Resample { pin: 9 }]);
    assert_eq!(pin_entry(&controllers, 9), 0x8051);
}

#[test]
fn a_level_that_nobody_accepts_waits_for_another_entry() {
    let controllers = running(config());
    set_pin(&controllers, 9, 0x30 << 56 | 0x8051);
    assert_eq!(set_line(&controllers, 9, true), []);
    assert_eq!(pin_entry(&controllers, 9), 0x8051, "nobody has it");
    assert_eq!(set_pin(&controllers, 9, 2 << 56 | 0x8051), [kick(2)]);
}

#[test]
fn a_level_that_was_not_accepted_is_tried_again_with_an_end_of_its_vector() {
    let controllers = running(config());
    set_pin(&controllers, 9, 1 << 56 | 0x8051);
    write(&controllers, 1, 0x80F, 0xFF);
    assert_eq!(set_line(&controllers, 9, true), [], "disabled by software");
    write(&controllers, 1, 0x80F, 0x1FF);
    let mut actions = Vec::new();
    controllers.write_io_apic(0x40, &[0x51], &mut actions);
    assert_eq!(actions, [kick(1)]);
}

#[test]
fn pins_that_share_a_vector_end_together() {
    let controllers = running(config());
    for pin in [9, 10] {
        set_pin(&controllers, pin, 2 << 56 | 0x8051);
        set_line(&controllers, pin.into(), true);
        set_line(&controllers, pin.into(), false);
    }
    let ended = vec![Action::Resample { pin: 9 }, Action::Resample { pin: 10 }];
    assert_eq!(serve(&controllers, 2), Some((0x51, ended)));
}

#[test]
fn nmi_pins_interrupt_with_each_edge_even_if_level_triggered() {
    let controllers = running(config());
    set_pin(&controllers, 3, 1 << 56 | 0x8400);
    for _ in 0..2 {
        assert_eq!(set_line(&controllers, 3, true), [kick(1)]);
        assert_eq!(next(&controllers, 1), VcpuEvent::Nmi);
        set_line(&controllers, 3, false);
    }
}

#[test]
fn an_msi_interrupts_as_an_ipi_does() {
    let controllers = running(config());
    let mut actions = Vec::new();
    controllers.signal_msi(0xFEE0_1000, 0x61, &mut actions).unwrap();
    controllers.signal_msi(0xFEE4_0000, 0x62, &mut actions).unwrap();
    assert_eq!(actions, [kick(1), send(9, Destination::Physical(0x40), fixed(0x62))]);
    assert_eq!(vectors(&controllers, 1), [0x61]);
    assert!(controllers.signal_msi(0, 0x61, &mut actions).is_err());
    controllers.signal_msi(0xFEE0_1000, 0x05, &mut actions).unwrap();
    assert_eq!(actions.len(), 2, "an illegal vector interrupts nobody");
}

#[test]
fn the_end_of_a_level_interrupt_goes_to_the_node_with_the_io_apic() {
    let here = running(config());
    let elsewhere = Config {
        local_apic_ids: vec![0x22, 0x23],
        remote_apics: vec![apic::RemoteApic { apic_id: 0, node: 1 }],
        io_apic: IoApicLocation::Node(1),
        ..config()
    };
    let there = Controllers::new(elsewhere).unwrap();
    let mut actions = Vec::new();
    let startup = Message { destination: Destination::All, delivery: Delivery::Startup { vector: 1 } };
    there.receive(NodeMessage::Interrupt(startup), &mut actions);
    assert_eq!(next(&there, 0x22), VcpuEvent::Startup { vector: 1 });
    write(&there, 0x22, 0x80F, 0x1FF);

    set_pin(&here, 9, 0x22 << 56 | 0x8051);
    let sent = set_line(&here, 9, true);
    let level = Delivery::Fixed { vector: 0x51, trigger: Trigger::Level };
    assert_eq!(sent, [send(7, Destination::Physical(0x22), level)]);
    let [Action::Send { message, .. }] = sent[..] else { panic!("{sent:?}") };
    there.receive(message, &mut Vec::new());
    let end = NodeMessage::EndOfInterrupt { vector: 0x51 };
    assert_eq!(serve(&there, 0x22), Some((0x51, vec![Action::Send { node: 1, message: end }])));
    actions.clear();
    here.receive(end, &mut actions);
    assert_eq!(actions[0], Action::Resample { pin: 9 });
    assert_eq!(actions[1..], sent, "the line is still asserted");

    there.receive(end, &mut actions);
    assert_eq!(there.set_line(9, true, &mut actions), Err(LineError::Elsewhere { pin: 9, node: 1 }));
    let mut data = [0; 4];
    there.read_io_apic(0x10, &mut data);
    assert_eq!((data, actions.len()), ([0xFF; 4], 2));
}

#[test]
fn a_pin_that_is_none_is_named() {
    let controllers = running(config());
    for pin in [24, 256 + 9, u32::MAX] {
        let error = controllers.set_line(pin, true, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains(&format!("pin {pin} ")), "{error}");
    }
}

#[test]
fn a_timer_is_reported_when_it_changes() {
    let controllers = running(config());
    let set = |due_ns| vec![Action::SetTimer { apic_id: 1, due_ns }];
    write(&controllers, 1, 0x832, 0xEC);
    assert_eq!(write(&controllers, 1, 0x838, 50), set(Some(100)));
    assert_eq!(write(&controllers, 1, 0x808, 0), []);
    assert_eq!(write(&controllers, 1, 0x832, 0x1_00EC), set(None), "masked");
    assert_eq!(write(&controllers, 1, 0x832, 0xEC), set(Some(100)));
    let mut actions = Vec::new();
    let event = controllers.vcpu(1).unwrap().next_event(true, 100, &mut actions);
    assert_eq!((event, actions), (VcpuEvent::Interrupt { vector: 0xEC }, set(None)));
}

#[test]
fn local_inputs_kick_their_vcpu() {
    let controllers = running(config());
    write(&controllers, 1, 0x836, 0x400);
    let input = |input| {
        let mut actions = Vec::new();
        controllers.vcpu(1).unwrap().set_input(input, &mut actions);
        actions
    };
    assert_eq!(input(LocalInput::Lint0(true)), [], "masked");
    assert_eq!(input(LocalInput::Lint1(true)), [kick(1)]);
    assert_eq!(next(&controllers, 1), VcpuEvent::Nmi);
    assert_eq!(input(LocalInput::Lint1(false)), []);
    assert_eq!(input(LocalInput::Thermal), []);
}

#[test]
fn a_reset_is_a_power_on_but_for_lines() {
    let controllers = running(config());
    set_pin(&controllers, 9, 2 << 56 | 0x8051);
    write(&controllers, 1, 0x838, 50);
    write(&controllers, 0, ICR, 0x1_0000_0400);
    controllers.reset();
    assert_eq!(controllers.save(0), Controllers::new(config()).unwrap().save(0));
}
