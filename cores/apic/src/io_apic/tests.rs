//! Unit tests of the IOAPIC's registers and pins.

use super::*;
use crate::message::{Delivery, Destination, Trigger};

fn write(io_apic: &mut IoApic, index: u8, value: u32) -> PinEffect {
    io_apic.write(SELECT, &[index]);
    io_apic.write(WINDOW, &value.to_le_bytes())
}

fn read(io_apic: &mut IoApic, index: u8) -> u32 {
    io_apic.write(SELECT, &[index]);
    let mut data = [0; 4];
    io_apic.read(WINDOW, &mut data);
    u32::from_le_bytes(data)
}

/// Pin 5: vector 0x40 to APIC 1.
fn set_pin(low: u32) -> IoApic {
    let mut io_apic = IoApic::new(false);
    write(&mut io_apic, 0x1B, 0x0100_0000);
    write(&mut io_apic, 0x1A, low);
    io_apic
}

#[test]
fn registers_keep_what_they_may() {
    let mut io_apic = IoApic::new(false);
    assert_eq!(read(&mut io_apic, 1), 0x17_0020);
    assert_eq!((read(&mut io_apic, 0x10), read(&mut io_apic, 0x3F)), (0x1_0000, 0));
    write(&mut io_apic, 0, 0xFF00_0000);
    assert_eq!((read(&mut io_apic, 0), read(&mut io_apic, 2)), (0x0F00_0000, 0x0F00_0000));
    write(&mut io_apic, 0x10, u32::MAX);
    write(&mut io_apic, 0x11, u32::MAX);
    assert_eq!((read(&mut io_apic, 0x10), read(&mut io_apic, 0x11)), (0x1_AFFF, 0xFF00_0000));
    write(&mut io_apic, 1, u32::MAX);
    assert_eq!(read(&mut io_apic, 1), 0x17_0020);
    assert_eq!((read(&mut io_apic, 0x40), read(&mut io_apic, 3)), (u32::MAX, u32::MAX));
    let mut extended = IoApic::new(true);
    write(&mut extended, 0x11, u32::MAX);
    assert_eq!(read(&mut extended, 0x11), 0xFFFE_0000);
}

#[test]
fn accesses_of_any_length_and_place_are_harmless() {
    let mut io_apic = set_pin(0x40);
    let before = io_apic.clone();
    for offset in [1, 4, 8, 0x14, 0x20, 0x44, 0xFFF, u64::MAX] {
        let mut data = [0xAA; 8];
        io_apic.read(offset, &mut data);
        assert_eq!(data, [0; 8]);
        assert_eq!(io_apic.write(offset, &[0x55; 8]), PinEffect::None);
    }
    io_apic.read(WINDOW, &mut []);
    assert_eq!(io_apic, before);
    let mut data = [0xAA; 8];
    io_apic.read(WINDOW, &mut data);
    assert_eq!(data, [0x40, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn an_edge_interrupts_once_and_is_lost_while_masked() {
    let mut io_apic = set_pin(0x40);
    assert!(io_apic.set_line(5, true));
    let delivery = Delivery::Fixed { vector: 0x40, trigger: Trigger::Edge };
    let message = Message { destination: Destination::Physical(1), delivery };
    assert_eq!(io_apic.pending(5), Some(message));
    assert!(!io_apic.set_line(5, true) && !io_apic.set_line(5, false));
    write(&mut io_apic, 0x1A, 0x1_0040);
    assert!(io_apic.set_line(5, true));
    assert_eq!(io_apic.pending(5), None);
    assert_eq!(write(&mut io_apic, 0x1A, 0x40), PinEffect::None, "unmasking makes no edge");
}

#[test]
fn a_level_interrupts_until_its_line_is_deasserted() {
    let mut io_apic = set_pin(0x1_8040);
    assert!(io_apic.set_line(5, true));
    assert_eq!(io_apic.pending(5), None, "masked");
    assert_eq!(write(&mut io_apic, 0x1A, 0x8040), PinEffect::Service(5));
    assert!(io_apic.pending(5).is_some());
    io_apic.set_remote_irr(5);
    assert_eq!((io_apic.pending(5), read(&mut io_apic, 0x1A)), (None, 0xC040));
    write(&mut io_apic, 0x1A, 0x8040);
    assert_eq!(read(&mut io_apic, 0x1A), 0xC040, "remote IRR is read-only");
    assert_eq!((io_apic.end(0x41), io_apic.end(0x40), io_apic.end(0x40)), (0, 1 << 5, 0));
    assert!(io_apic.pending(5).is_some());
    io_apic.set_line(5, false);
    assert_eq!(io_apic.pending(5), None);
}

#[test]
fn an_edge_triggered_entry_has_no_remote_irr() {
    let mut io_apic = set_pin(0x8040);
    io_apic.set_line(5, true);
    io_apic.set_remote_irr(5);
    write(&mut io_apic, 0x1A, 0x1_0040);
    write(&mut io_apic, 0x1A, 0x8040);
    assert_eq!(read(&mut io_apic, 0x1A), 0x8040);
    assert!(io_apic.pending(5).is_some());
}

#[test]
fn the_end_register_names_a_vector() {
    let mut io_apic = set_pin(0x8040);
    assert_eq!(io_apic.write(END, &0x40u32.to_le_bytes()), PinEffect::End(0x40));
}

#[test]
fn a_reset_keeps_what_devices_assert() {
    let mut io_apic = set_pin(0x8040);
    io_apic.set_line(5, true);
    io_apic.assert_until_end(6);
    io_apic.reset();
    let mut expected = IoApic::new(false);
    expected.set_line(5, true);
    assert_eq!(io_apic, expected);
}
