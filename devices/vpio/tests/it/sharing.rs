//! A shared card: one guest at a time holds it, and its receiver serves all. Without threads; `host::card`'s tests use
//! sockets.

use crate::support;

use device_models::devices::e1000::E1000;
use device_models::devices::ne2000::NE2000;
use support::memory::{SCRATCH, memory};
use support::nic::Driver;
use support::shared::{MASTERS, OUTSIDE, SHARED, Table};
use support::{Guest, Numbers, Ports as _, address, frame};
use vpio::{GuestId, Switched};

/// Frames arrive while the other guest has the card, during a hand-off, and while rings wrap. Each guest gets its own
/// frames only, intact and in order. Sent frames reach the wire. The card is never reset, and touches only its ring and
/// granted memory.
#[test]
fn frames_come_whoever_has_the_card() {
    for which in SHARED {
        let mut table = Table::new(which);
        let device = which.0;
        let (mut expected, mut got) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut mark = 0u8;
        for round in 0..120 {
            let to = u8::from(round % 2 == 0);
            for length in [60, 1514, 333] {
                for number in 0..2u8 {
                    mark = mark.wrapping_add(1);
                    let into = frame(address(number), mark, length);
                    table.arrive(&into);
                    expected[usize::from(number)].push(into);
                }
            }
            table.arrive(&frame(OUTSIDE, 0xEE, 100));
            let all = frame([0xFF; 6], mark, 64);
            table.arrive(&all);
            expected.iter_mut().for_each(|frames| frames.push(all.clone()));
            if round % 3 == 0 {
                table.look();
            }
            table.turn(to);
            let out = frame(OUTSIDE, mark, 700);
            table.send(to, &out);
            table.look();
            assert!(table.monitor.line(GuestId(to.into())));
            let (frames, sent, error) = table.interrupt(to);
            assert_eq!((sent, error), (1, false), "{}", device.name);
            got[usize::from(to)].extend(frames);
            assert_eq!(table.wire(), vec![out]);
        }
        for number in [1, 0, 1, 0u8] {
            table.turn(number);
            let (frames, ..) = table.interrupt(number);
            got[usize::from(number)].extend(frames);
        }
        let (first, second) = (got[0].len(), got[1].len());
        assert!(got == expected, "{}: {first} and {second} frames of {}", device.name, expected[0].len());
        let totals = table.monitor.physical().totals();
        assert_eq!((totals.resets, totals.overruns, totals.for_nobody), (0, 0, 120));
        assert_eq!(table.refused(), 0);
        table.was_good();
    }
}

/// Any order of incoming frames, sent frames, polls, hand-offs and interrupts loses, repeats, tears or reorders no
/// frame.
#[test]
fn any_order_of_events_loses_nothing() {
    for (which, seed) in SHARED.into_iter().flat_map(|which| (1..=12).map(move |seed| (which, seed))) {
        let mut table = Table::new(which);
        let device = which.0;
        let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15 ^ seed);
        let (mut expected, mut got) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let (mut out, mut wire, mut holder, mut waiting) = (Vec::new(), Vec::new(), 1u8, 0);
        for step in 0..600u32 {
            let mark = step.to_le_bytes()[0];
            let length = 60 + usize::try_from(numbers.next() % 1455).unwrap();
            match numbers.next() % 6 {
                // As many as fit into the smallest ring.
                0 | 1 if waiting < 7 => {
                    let number = u8::try_from(numbers.next() % 2).unwrap();
                    let into = frame(address(number), mark, length);
                    table.arrive(&into);
                    expected[usize::from(number)].push(into);
                    waiting += 1;
                }
                2 if table.drivers[usize::from(holder)].has_room() => {
                    let to = [OUTSIDE, address(1 - holder), [0xFF; 6]][step as usize % 3];
                    let sent = frame(to, mark, length);
                    table.send(holder, &sent);
                    if to != OUTSIDE {
                        expected[usize::from(1 - holder)].push(sent.clone());
                    }
                    out.push(sent);
                    table.look();
                    waiting = 0;
                }
                3 => {
                    table.look();
                    waiting = 0;
                }
                4 => {
                    holder = 1 - holder;
                    table.turn(holder);
                    waiting = 0;
                }
                _ => {
                    let (frames, _, error) = table.interrupt(holder);
                    assert!(!error);
                    got[usize::from(holder)].extend(frames);
                }
            }
            wire.extend(table.wire());
        }
        for number in [0, 1, 0, 1] {
            table.turn(number);
            got[usize::from(number)].extend(table.interrupt(number).0);
            wire.extend(table.wire());
        }
        for frames in expected.iter_mut().chain(&mut got) {
            // Frames from the wire and from the other guest take two paths, each of which preserves order.
            frames.sort_by_key(|frame| (frame[6], frame.len()));
        }
        let (first, second) = (got[0].len(), got[1].len());
        assert!(
            got == expected,
            "{} {seed}: {first} and {second} frames of {} and {}",
            device.name,
            expected[0].len(),
            expected[1].len()
        );
        assert!(wire == out, "{} {seed}: {} on the wire of {}", device.name, wire.len(), out.len());
        assert_eq!((table.refused(), table.monitor.physical().totals().resets), (0, 0));
        table.was_good();
    }
}

/// A frame for another guest reaches it and the wire. A multicast frame reaches all guests but its sender.
#[test]
fn guests_hear_each_other() {
    for which in SHARED {
        let mut table = Table::new(which);
        let (to_one, to_all) = (frame(address(1), 7, 200), frame([0xFF; 6], 8, 90));
        table.turn(0);
        for out in [&to_one, &to_all] {
            table.send(0, out);
            table.look();
            assert_eq!(table.interrupt(0), (Vec::new(), 1, false));
        }
        assert_eq!(table.wire(), vec![to_one.clone(), to_all.clone()]);
        assert_eq!(table.monitor.physical_ref().waiting().collect::<Vec<_>>(), [1]);
        table.turn(1);
        assert_eq!(table.interrupt(1).0, vec![to_one, to_all]);
        table.was_good();
    }
}

/// A driver that polls only after several hand-offs still gets the report of a sent frame.
#[test]
fn a_sent_frame_is_reported_however_late_the_driver_looks() {
    for which in SHARED {
        let mut table = Table::new(which);
        let device = which.0;
        table.send(1, &frame(OUTSIDE, 2, 60));
        for to in [0, 1, 0, 1, 0, 1] {
            table.turn(to);
        }
        assert_eq!(table.interrupt(1).1, 1, "{}", device.name);
    }
}

/// A driver's pending read of a PHY register completes after any number of hand-offs. A completed read isn't repeated.
#[test]
fn the_phy_answers_whoever_has_the_card() {
    const MDIC: u32 = 0x20;
    let of_phy = |register: u32| 1 << 27 | 1 << 21 | register << 16;
    for which in SHARED.into_iter().filter(|which| which.0.name == E1000.name) {
        let mut table = Table::new(which);
        let read = |table: &mut Table| Guest::new(&mut table.monitor, GuestId(1)).read(MDIC, 4);
        for hand_offs in 0..3 {
            for (register, expected) in [(2, 0x0141), (3, 0x0C20)] {
                Guest::new(&mut table.monitor, GuestId(1)).write(MDIC, 4, of_phy(register));
                for _ in 0..hand_offs {
                    table.turn(0);
                    // The other guest reads its own PHY.
                    Guest::new(&mut table.monitor, GuestId(0)).write(MDIC, 4, of_phy(1));
                    table.turn(1);
                }
                let answer = read(&mut table);
                assert!(
                    answer >> 28 == 1 && answer & 0xFFF0 == expected & 0xFFF0,
                    "{answer:X} after {hand_offs}"
                );
            }
        }
        table.turn(0);
        table.turn(1);
        assert_eq!(read(&mut table) & 0xF000_FFFF, 0, "nobody asks for it any more");
        table.was_good();
    }
}

/// For a guest without bus mastering, the card neither reads frames from its memory nor writes any there.
#[test]
fn a_guest_without_bus_mastering_has_no_dma() {
    for which in MASTERS {
        let mut table = Table::new(which);
        table.monitor.physical().set_guest_bus_master(false).unwrap();
        let before = table.bytes(1);
        let into = frame(address(1), 1, 500);
        table.arrive(&into);
        table.look();
        assert!(table.bytes(1) == before, "nothing is written");
        table.send(1, &frame(OUTSIDE, 2, 60));
        table.look();
        assert!(table.wire().is_empty());
        table.monitor.physical().set_guest_bus_master(true).unwrap();
        table.look();
        assert_eq!(table.interrupt(1).0, vec![into], "it waited");
    }
}

/// The card is revoked from a guest that never reaches a quiescent point. Its driver gets an error if the card has one.
/// The card isn't reset, and the other guest continues.
#[test]
fn a_card_can_be_taken() {
    for which in MASTERS {
        let mut table = Table::new(which);
        let device = which.0;
        // Handed over while the card may not read: the frame stays pending.
        table.monitor.physical().set_guest_bus_master(false).unwrap();
        table.send(1, &frame(OUTSIDE, 2, 60));
        table.look();
        assert!(!table.monitor.settle().unwrap());
        table.monitor.physical().park();
        table.monitor.release().unwrap();
        let view = table.view(0);
        table.monitor.physical().seat(Some((0, view, true)));
        assert_eq!(table.monitor.switch(GuestId(0), false).unwrap(), Switched::Done);
        let out = frame(OUTSIDE, 3, 80);
        table.send(0, &out);
        table.look();
        assert_eq!(table.wire(), vec![out]);
        assert_eq!(table.monitor.physical().totals().resets, 0);
        table.turn(1);
        let id = GuestId(1);
        let error = device.interrupts.error.unwrap_or(0);
        assert_eq!(table.monitor.model(id).graph().value(device.interrupts.status) & error, error);
    }
}

/// A full ring doesn't request the card repeatedly: only its guest makes room.
#[test]
fn a_full_ring_asks_for_nothing() {
    for which in SHARED {
        let mut table = Table::new(which);
        let device = which.0;
        let mut expected = Vec::new();
        for mark in 0..100 {
            let into = frame(address(0), mark, 1000);
            table.arrive(&into);
            table.look();
            expected.push(into);
        }
        table.turn(0);
        table.turn(1);
        assert_eq!(table.monitor.physical_ref().waiting().count(), 0, "{}", device.name);
        table.turn(0);
        let mut got = Vec::new();
        while got.len() < expected.len() {
            let (frames, ..) = table.interrupt(0);
            assert!(!frames.is_empty(), "{}: {} of {}", device.name, got.len(), expected.len());
            got.extend(frames);
            table.look();
        }
        assert!(got == expected);
    }
}

/// The e1000's hidden state: a context descriptor precedes hand-offs, and its frame follows them. Meanwhile the other
/// guest had frames segmented by another context. The wire carries all segments of the frame with the guest's own
/// headers.
#[test]
fn contexts_are_each_guests_own() {
    let cut = |mark: u8| {
        let mut frame = frame(OUTSIDE, mark, 54 + 2000);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[46] = 0x50;
        frame
    };
    let lengths = |frames: Vec<Vec<u8>>| frames.iter().map(Vec::len).collect::<Vec<_>>();
    let with = |table: &mut Table, number: u8, segment: u16, context: bool| {
        let mut guest = Guest::new(&mut table.monitor, GuestId(number.into()));
        let Driver::E1000(driver, _) = &mut table.drivers[usize::from(number)] else { unreachable!() };
        if context {
            driver.send_cut(&mut guest, &cut(number), 54, segment);
        } else {
            driver.send_more(&mut guest, &cut(number));
        }
        table.look();
        lengths(table.wire())
    };
    for iommu in [true, false] {
        let mut table = Table::new((&E1000, iommu));
        assert_eq!(with(&mut table, 1, 1000, true), [1054, 1054]);
        table.turn(0);
        assert_eq!(with(&mut table, 0, 500, true), [554; 4]);
        table.turn(1);
        assert_eq!(with(&mut table, 1, 0, false), [1054, 1054], "its own, not the other's");
        table.turn(0);
        assert_eq!(with(&mut table, 0, 0, false), [554; 4]);
        table.was_good();
    }
}

/// Only a part of an e1000 guest's memory stays mapped, and none after its guest is gone.
#[test]
fn memory_is_mapped_by_need_and_forgotten() {
    let mut table = Table::new((&E1000, true));
    for number in [0, 1] {
        table.turn(number);
        table.send(number, &frame(OUTSIDE, number, 100));
        table.look();
    }
    assert_eq!(table.mapped(), 2, "of each guest a chunk");
    table.turn(0);
    table.monitor.physical().forget_memory(1).unwrap();
    assert_eq!(table.mapped(), 1);
    table.monitor.release().unwrap();
    table.monitor.physical().seat(None);
    table.monitor.physical().forget_memory(0).unwrap();
    assert_eq!((table.mapped(), table.monitor.physical_ref().mapped().0), (0, 0));
}

/// The card doesn't get descriptors that name memory outside of the guest's. The guest's other frames are sent.
#[test]
fn frames_outside_of_the_guests_memory_are_not_sent() {
    for iommu in [true, false] {
        let mut table = Table::new((&E1000, iommu));
        let mut guest = Guest::new(&mut table.monitor, GuestId(1));
        let Driver::E1000(driver, _) = &mut table.drivers[1] else { unreachable!() };
        for (address, length) in
            [(memory(0).start, 60), (memory(1).end - 10, 60), (u64::MAX - 5, 60), (SCRATCH, 9)]
        {
            driver.send_at(&mut guest, address, length);
        }
        let out = frame(OUTSIDE, 4, 70);
        driver.send(&mut guest, &out);
        table.look();
        assert_eq!(table.wire(), vec![out]);
        assert_eq!(table.interrupt(1).1, 5, "all are done");
        assert_eq!(table.monitor.physical_ref().fed(1).refused, 4);
        table.turn(0);
        table.was_good();
    }
}

/// After an NE2000 is revoked, the next guest finds no data of the previous one.
#[test]
fn card_memory_is_zeroed_between_guests() {
    let mut table = Table::new((&NE2000, true));
    let secret = frame(OUTSIDE, 0xA5, 1000);
    // The secret was sent, so it is in the guest's on-card memory; and it was received.
    table.send(1, &secret);
    table.arrive(&frame(address(1), 0xA5, 1000));
    // The card is revoked during a transmission.
    assert!(!table.monitor.settle().unwrap());
    table.monitor.physical().park();
    table.monitor.release().unwrap();
    let view = table.view(0);
    table.monitor.physical().seat(Some((0, view, true)));
    assert_eq!(table.monitor.switch(GuestId(0), true).unwrap(), Switched::Done);
    use support::Ports as _;
    let mut guest = Guest::new(&mut table.monitor, GuestId(0));
    let mut found = 0;
    for page in 0x40..0x80 {
        for (value, offset) in [(0x22, 0), (0, 0xA), (1, 0xB), (0, 8), (page, 9), (0x0A, 0)] {
            guest.outb(value, offset);
        }
        found += (0..64).filter(|_| guest.read(0x10, 4) == 0xA5A5_A5A5).count();
    }
    assert_eq!(found, 0, "of the other guest's bytes");
}
