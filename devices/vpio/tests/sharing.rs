//! A shared RTL8139: guests take turns with it, its receiver feeds them all. Without threads; with sockets: `host::card`'s tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod support;

use device_models::PhysicalDevice as _;
use device_models::devices::rtl8139::RTL8139;
use device_models::physical::Mapping;
use device_models::reference::rtl8139::Rtl8139;
use support::memory::{OnBus, SCRATCH, Shared, memory, scratch, slots};
use support::rtl8139::{Card, Driver};
use support::{Guest, Timed, address, config, frame};
use vpio::fast_forward::RING;
use vpio::sharing::{OwnRing, SharedCard};
use vpio::{FailurePolicy, GuestId, Monitor, Switched};

const CARD: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];
const OUTSIDE: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x99];

type Front = SharedCard<Card, Shared, Shared>;

impl OwnRing for Shared {
    fn read(&mut self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.load(SCRATCH + offset, into.len()));
    }
}

impl Timed for Front {
    fn tick(&mut self) {
        self.card().tick();
    }
}

impl OnBus for Front {
    fn bus(&mut self) -> &mut Shared {
        self.card().bus()
    }
}

/// A card, two guests with their drivers running; the last of them has it.
fn shared() -> (Monitor<Front>, Shared, [Driver; 2]) {
    let ram = Shared::new(vec![scratch(), memory(0), memory(1)]);
    let mut card = Rtl8139::new(CARD, ram.clone(), true);
    card.map(Mapping { device_base: SCRATCH, guest_base: SCRATCH, length: RING, writable: true }).unwrap();
    let mut front = SharedCard::new(card, ram.clone()).unwrap();
    let pad = front.pad();
    for number in 0..2 {
        front.add_seat(address(number));
    }
    let mut monitor = Monitor::new(&RTL8139, front);
    monitor.set_scratch(Box::new(pad));
    let drivers = [0, 1].map(|number| {
        let id = monitor.add(config(number, FailurePolicy::DeviceError, &[], slots(number)));
        turn(&mut monitor, &ram, number);
        let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id), number);
        driver.start(&mut Guest::new(&mut monitor, id));
        driver
    });
    (monitor, ram, drivers)
}

/// Takes what the card has finished.
fn look(monitor: &mut Monitor<Front>) {
    monitor.physical().tick();
    while monitor.physical().poll().unwrap() {}
    monitor.physical().feed();
    monitor.interrupt().unwrap();
}

/// The card goes to this guest.
fn turn(monitor: &mut Monitor<Front>, ram: &Shared, to: u8) {
    look(monitor);
    assert!(monitor.settle().unwrap(), "the holder is reusable");
    monitor.physical().park();
    monitor.release().unwrap();
    monitor.physical().seat(Some((to.into(), ram.clone(), true)));
    assert_eq!(monitor.switch(GuestId(to.into()), false).unwrap(), Switched::Done);
    monitor.physical().feed();
    monitor.interrupt().unwrap();
}

/// Frames arrive while the other guest has the card, in the midst of a hand-off, and while rings wrap: each guest gets its own, whole and in
/// order, and nobody else's; what is sent is on the wire; the card is never reset; it touches nothing but its ring and granted memory.
#[test]
fn frames_come_whoever_has_the_card() {
    let (mut monitor, ram, mut drivers) = shared();
    let (mut expected, mut got) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut mark = 0u8;
    for round in 0..120 {
        let to = u8::from(round % 2 == 0);
        for length in [60, 1514, 333] {
            for number in 0..2u8 {
                mark = mark.wrapping_add(1);
                let into = frame(address(number), mark, length);
                assert!(monitor.physical().card().receive(&into));
                expected[usize::from(number)].push(into);
            }
        }
        let nobodys = frame(OUTSIDE, 0xEE, 100);
        assert!(monitor.physical().card().receive(&nobodys));
        let all = frame([0xFF; 6], mark, 64);
        assert!(monitor.physical().card().receive(&all));
        expected.iter_mut().for_each(|frames| frames.push(all.clone()));
        if round % 3 == 0 {
            look(&mut monitor);
        }
        turn(&mut monitor, &ram, to);
        let (id, driver) = (GuestId(to.into()), &mut drivers[usize::from(to)]);
        let out = frame(OUTSIDE, mark, 700);
        driver.send(&mut Guest::new(&mut monitor, id), &out);
        look(&mut monitor);
        assert!(monitor.line(id));
        let (frames, sent, error) = driver.interrupt(&mut Guest::new(&mut monitor, id));
        assert_eq!((sent, error), (1, false));
        got[usize::from(to)].extend(frames);
        assert_eq!(monitor.physical().card().take_sent(), vec![out]);
    }
    for number in [1, 0u8] {
        turn(&mut monitor, &ram, number);
        let id = GuestId(number.into());
        let (frames, ..) = drivers[usize::from(number)].interrupt(&mut Guest::new(&mut monitor, id));
        got[usize::from(number)].extend(frames);
    }
    assert!(got == expected, "{} and {} frames of {}", got[0].len(), got[1].len(), expected[0].len());
    let totals = monitor.physical().totals();
    assert_eq!((totals.resets, totals.overruns, totals.for_nobody), (0, 0, 120));
    assert_eq!(monitor.counters(GuestId(0)).refused + monitor.counters(GuestId(1)).refused, 0);
    let (_, outside) = ram.log();
    assert_eq!((outside, monitor.physical().card().blocked()), (0, 0));
}

/// A frame for another guest reaches it and the wire; one for a group reaches all but its sender.
#[test]
fn guests_hear_each_other() {
    let (mut monitor, ram, mut drivers) = shared();
    let (to_one, to_all) = (frame(address(1), 7, 200), frame([0xFF; 6], 8, 90));
    turn(&mut monitor, &ram, 0);
    for out in [&to_one, &to_all] {
        drivers[0].send(&mut Guest::new(&mut monitor, GuestId(0)), out);
        look(&mut monitor);
    }
    assert_eq!(monitor.physical().card().take_sent(), vec![to_one.clone(), to_all.clone()]);
    assert_eq!(drivers[0].interrupt(&mut Guest::new(&mut monitor, GuestId(0))).0, Vec::<Vec<u8>>::new());
    assert_eq!(monitor.physical_ref().waiting().collect::<Vec<_>>(), [1]);
    turn(&mut monitor, &ram, 1);
    assert_eq!(drivers[1].interrupt(&mut Guest::new(&mut monitor, GuestId(1))).0, vec![to_one, to_all]);
}

/// What became of a frame is told to a driver that looks only after several hand-offs.
#[test]
fn a_sent_frame_is_reported_however_late_the_driver_looks() {
    let (mut monitor, ram, mut drivers) = shared();
    let id = GuestId(1);
    drivers[1].send(&mut Guest::new(&mut monitor, id), &frame(OUTSIDE, 2, 60));
    for to in [0, 1, 0, 1, 0, 1] {
        turn(&mut monitor, &ram, to);
    }
    assert_eq!(drivers[1].interrupt(&mut Guest::new(&mut monitor, id)).1, 1);
}

/// A guest that may not master the bus has neither frames read from its memory nor any written there.
#[test]
fn a_guest_without_bus_mastering_has_no_dma() {
    let (mut monitor, ram, mut drivers) = shared();
    let id = GuestId(1);
    monitor.physical().set_guest_bus_master(false).unwrap();
    let before = ram.load(memory(1).start, 0x10_0000);
    let into = frame(address(1), 1, 500);
    assert!(monitor.physical().card().receive(&into));
    look(&mut monitor);
    assert!(ram.load(memory(1).start, 0x10_0000) == before, "nothing is written");
    drivers[1].send(&mut Guest::new(&mut monitor, id), &frame(OUTSIDE, 2, 60));
    look(&mut monitor);
    assert!(monitor.physical().card().take_sent().is_empty());
    monitor.physical().set_guest_bus_master(true).unwrap();
    look(&mut monitor);
    assert_eq!(drivers[1].interrupt(&mut Guest::new(&mut monitor, id)).0, vec![into], "it waited");
}

/// A guest that never comes to a reusable point has the card taken: its driver sees an error, the card isn't reset for it, the other guest
/// goes on.
#[test]
fn a_card_can_be_taken() {
    let (mut monitor, ram, mut drivers) = shared();
    // Handed over where the card may not read: it stays with the guest for good.
    monitor.physical().set_guest_bus_master(false).unwrap();
    drivers[1].send(&mut Guest::new(&mut monitor, GuestId(1)), &frame(OUTSIDE, 2, 60));
    look(&mut monitor);
    assert!(!monitor.settle().unwrap());
    monitor.physical().park();
    monitor.release().unwrap();
    monitor.physical().seat(Some((0, ram.clone(), true)));
    assert_eq!(monitor.switch(GuestId(0), false).unwrap(), Switched::Done);
    let out = frame(OUTSIDE, 3, 80);
    drivers[0].send(&mut Guest::new(&mut monitor, GuestId(0)), &out);
    look(&mut monitor);
    assert_eq!(monitor.physical().card().take_sent(), vec![out]);
    assert_eq!(monitor.physical().totals().resets, 0);
    turn(&mut monitor, &ram, 1);
    let id = GuestId(1);
    assert_eq!(monitor.model(id).graph().value(RTL8139.interrupts.status) & 8, 8, "a transmit error");
}
