//! Attacks on an NE2000, judged by what the card touched of its memory. On a bare card they succeed. Under the monitor
//! the card touches no byte outside the packet memory.

use crate::support;

use device_models::devices::ne2000::{MEMORY, MEMORY_END, NE2000};
use device_models::grammar::Grammar;
use device_models::physical::Touch;
use device_models::reference::ne2000::Ne2000;
use proptest::prelude::*;
use support::{Bare, Guest, Numbers, Ports, config, frame};
use vpio::violation::replay;
use vpio::{Answer, FailurePolicy, GuestId, Monitor, Slots, Violation};

const CARD: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];

/// Counts the bytes that the card touched outside its packet memory.
fn outside(log: &[Touch]) -> u64 {
    let inside = u64::from(MEMORY)..u64::from(MEMORY_END);
    log.iter()
        .flat_map(|touch| touch.address..touch.address + touch.length)
        .filter(|byte| !inside.contains(byte))
        .count()
        .try_into()
        .unwrap()
}

/// Receive ring 4C..80, running, accepts broadcasts.
const START: &[(u8, u32)] = &[
    (0x21, 0x00),
    (0x49, 0x0E),
    (0x4C, 0x01),
    (0x80, 0x02),
    (0x7F, 0x03),
    (0x61, 0x00),
    (0x4C, 0x07),
    (0x21, 0x00),
    (0x04, 0x0C),
    (0x22, 0x00),
];

type Attack = (&'static str, &'static [(u8, u32)], &'static [(u8, u32)], u32);

/// Name; byte writes after `START`; byte writes after 64 bytes to the data port; number of dwords to the data port.
const ATTACKS: &[Attack] = &[
    (
        "ring that ends before it begins",
        &[(0x21, 0x00), (0x7F, 0x01), (0x4C, 0x02), (0xFF, 0x03), (0x22, 0x00)],
        &[],
        0,
    ),
    ("ring beyond the memory", &[(0x21, 0x00), (0xFF, 0x02), (0xFE, 0x03), (0x22, 0x00)], &[], 0),
    ("ring grown while the receiver runs", &[(0xFF, 0x02), (0xFE, 0x03)], &[], 0),
    (
        "ring moved over the station PROM while the receiver runs",
        &[(0x00, 0x01), (0x00, 0x03), (0x62, 0x00), (0x00, 0x07)],
        &[],
        0,
    ),
    (
        "write pointer outside the ring, stopped",
        &[(0x61, 0x00), (0xC0, 0x07), (0x21, 0x00), (0xFF, 0x03), (0x22, 0x00)],
        &[],
        0,
    ),
    (
        "write pointer outside the ring, running",
        &[(0x62, 0x00), (0xC0, 0x07), (0x22, 0x00), (0xFF, 0x03)],
        &[],
        0,
    ),
    (
        "receiver switched on after the ring was moved",
        &[(0x20, 0x0C), (0xFF, 0x02), (0xFE, 0x03), (0x62, 0x00), (0xC0, 0x07), (0x22, 0x00), (0x04, 0x0C)],
        &[],
        0,
    ),
    ("frame of FFFF bytes", &[(0x40, 0x04), (0xFF, 0x05), (0xFF, 0x06), (0x26, 0x00)], &[], 0),
    ("frame beyond the memory", &[(0x7F, 0x04), (0x00, 0x05), (0x02, 0x06), (0x26, 0x00)], &[], 0),
    ("frame out of the station PROM", &[(0x00, 0x04), (0x40, 0x05), (0x00, 0x06), (0x26, 0x00)], &[], 0),
    (
        "frame moved while it is sent",
        &[(0x40, 0x04), (0x40, 0x05), (0x00, 0x06), (0x26, 0x00), (0xF0, 0x04)],
        &[],
        0,
    ),
    (
        "frame grown while it is sent",
        &[(0x7F, 0x04), (0x40, 0x05), (0x00, 0x06), (0x26, 0x00), (0xFF, 0x06)],
        &[],
        0,
    ),
    (
        "frame moved after its command was written over",
        &[(0x40, 0x04), (0x40, 0x05), (0x00, 0x06), (0x26, 0x00), (0x22, 0x00), (0xF0, 0x04)],
        &[],
        0,
    ),
    ("station PROM written", &[(0x00, 0x08), (0x00, 0x09), (0x20, 0x0A), (0x00, 0x0B), (0x12, 0x00)], &[], 8),
    (
        "remote write beyond the memory",
        &[(0x00, 0x08), (0x80, 0x09), (0x00, 0x0A), (0x04, 0x0B), (0x12, 0x00)],
        &[],
        256,
    ),
    (
        "last access of a remote write wider than its count",
        &[
            (0x21, 0x00),
            (0x70, 0x02),
            (0x6F, 0x03),
            (0xFE, 0x08),
            (0x7F, 0x09),
            (0x02, 0x0A),
            (0x00, 0x0B),
            (0x12, 0x00),
        ],
        &[],
        1,
    ),
    (
        "remote address moved while it runs",
        &[(0x00, 0x08), (0x40, 0x09), (0x00, 0x0A), (0x01, 0x0B), (0x12, 0x00)],
        &[(0x00, 0x09), (0x12, 0x00)],
        32,
    ),
    (
        "remote write through the ring's end to page 0",
        &[
            (0x21, 0x00),
            (0x00, 0x01),
            (0x41, 0x02),
            (0x00, 0x08),
            (0x40, 0x09),
            (0x00, 0x0A),
            (0x02, 0x0B),
            (0x11, 0x00),
        ],
        &[],
        128,
    ),
    (
        "ring's end moved under a remote write",
        &[(0x20, 0x0C), (0x00, 0x08), (0x40, 0x09), (0x00, 0x0A), (0x02, 0x0B), (0x12, 0x00)],
        &[(0x00, 0x01), (0x41, 0x02)],
        128,
    ),
];

fn attack(ports: &mut dyn Ports, attack: &Attack) {
    for &(value, offset) in START.iter().chain(attack.1) {
        ports.outb(value, offset);
    }
    for at in 0..attack.3 {
        if at == 16 {
            for &(value, offset) in attack.2 {
                ports.outb(value, offset);
            }
        }
        ports.write(0x10, 4, 0x6666_6666);
    }
}

fn traffic(card: &mut Ne2000) {
    card.tick();
    for length in [60, 1514, 1514, 600, 1514].repeat(12) {
        card.receive(&frame([0xFF; 6], 0x55, length));
    }
}

fn monitor(policy: FailurePolicy) -> Monitor<Ne2000> {
    let mut monitor = Monitor::new(&NE2000, Ne2000::new(CARD));
    monitor.add(config(0, policy, &[], Slots::default()));
    support::switch(&mut monitor, GuestId(0));
    monitor
}

#[test]
fn attacks_succeed_on_a_bare_card_and_not_under_the_monitor() {
    for one in ATTACKS {
        let mut bare = Bare(Ne2000::new(CARD));
        attack(&mut bare, one);
        traffic(&mut bare.0);
        let stray = outside(&bare.0.take_log());
        assert!(stray > 0, "{}: the bare card withstands", one.0);

        let mut monitor = monitor(FailurePolicy::Ignore);
        attack(&mut Guest::new(&mut monitor, GuestId(0)), one);
        traffic(monitor.physical());
        assert_eq!(outside(&monitor.physical().take_log()), 0, "{}", one.0);
        assert!(monitor.counters(GuestId(0)).refused > 0, "{}: nothing was refused", one.0);
        let prom = &monitor.physical().memory()[..12];
        assert!(
            prom.chunks(2).zip(CARD).all(|(pair, byte)| pair == [byte, byte]),
            "{}: the PROM is as it was",
            one.0
        );
    }
}

/// A trace replays each refused request without card and guest: the same check refuses it.
#[test]
fn violations_are_replayed() {
    for one in ATTACKS {
        let mut monitor = monitor(FailurePolicy::Ignore);
        attack(&mut Guest::new(&mut monitor, GuestId(0)), one);
        let violations = monitor.violations(GuestId(0));
        assert!(!violations.is_empty());
        for violation in violations {
            let text = serde_json::to_string(violation).unwrap();
            let violation: Violation = serde_json::from_str(&text).unwrap();
            let refusals = replay(&NE2000, &violation).unwrap();
            assert_eq!(refusals.last(), Some(&violation.refusal), "{}", one.0);
        }
    }
}

/// Each policy has its effect on the guest.
#[test]
fn policies_differ() {
    let bad = [(0x00, 0x04), (0x40, 0x05), (0x00, 0x06)];
    let outcome = |policy| {
        let mut monitor = monitor(policy);
        let mut guest = Guest::new(&mut monitor, GuestId(0));
        for (value, offset) in START.iter().copied().chain(bad) {
            guest.outb(value, offset);
        }
        guest.outb(0x3F, 0x0F);
        let answer = guest.access(device_models::Access { bar: 0, offset: 0, size: 1, write: Some(0x26) });
        let next = guest.access(device_models::Access { bar: 0, offset: 7, size: 1, write: None });
        traffic(monitor.physical());
        assert!(monitor.physical().take_sent().is_empty(), "nothing is sent");
        (answer, next, monitor.line(GuestId(0)))
    };
    assert_eq!(outcome(FailurePolicy::Ignore), (Answer::Done(0), Answer::Done(0), false));
    assert_eq!(
        outcome(FailurePolicy::DeviceError),
        (Answer::Done(0), Answer::Done(0x08), true),
        "a transmit error"
    );
    assert_eq!(outcome(FailurePolicy::MachineCheck), (Answer::MachineCheck, Answer::Done(0), false));
    assert_eq!(outcome(FailurePolicy::Stop), (Answer::Stopped, Answer::Stopped, false));
}

/// The card's own error makes the driver recover from a refused frame: the next frame goes out.
#[test]
fn the_driver_recovers_from_a_refused_frame() {
    use support::ne2000::Driver;
    let mut monitor = monitor(FailurePolicy::DeviceError);
    let id = GuestId(0);
    let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id));
    driver.start(&mut Guest::new(&mut monitor, id));
    // Another process of the guest sends a frame from the PROM.
    let mut guest = Guest::new(&mut monitor, id);
    for (value, offset) in [(0x00, 0x04), (0x40, 0x05), (0x00, 0x06), (0x26, 0x00)] {
        guest.outb(value, offset);
    }
    assert!(monitor.line(id));
    let (_, sent, error) = driver.interrupt(&mut Guest::new(&mut monitor, id));
    assert_eq!((sent, error), (false, true));
    driver.send(&mut Guest::new(&mut monitor, id), &frame([0xFF; 6], 9, 100));
    monitor.physical().tick();
    monitor.interrupt().unwrap();
    assert!(driver.interrupt(&mut Guest::new(&mut monitor, id)).1);
    assert_eq!(monitor.physical().take_sent().len(), 1);
}

/// The monitor hides an impossible value of the card from the guest.
#[test]
fn a_lying_card_isnt_believed() {
    let mut monitor = monitor(FailurePolicy::Ignore);
    let id = GuestId(0);
    for &(value, offset) in START {
        Guest::new(&mut monitor, id).outb(value, offset);
    }
    // The card's pointer leaves its ring without the monitor's knowledge.
    use device_models::PhysicalDevice;
    for (value, offset) in [(0x62, 0), (0xF0, 7), (0x22, 0)] {
        monitor.physical().write(0, offset, 1, value).unwrap();
    }
    let mut guest = Guest::new(&mut monitor, id);
    guest.outb(0x62, 0x00);
    assert_eq!(guest.inb(0x07), 0x4C);
    assert_eq!(monitor.counters(id).disbelieved, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Random requests, frames, times and hand-offs: the card stays inside its packet memory, and every refusal can be
    /// replayed.
    #[test]
    fn no_sequence_of_requests_leaves_the_memory(seed in 1u64..) {
        let grammar = Grammar::new(&NE2000);
        let mut numbers = Numbers(seed);
        let mut monitor = monitor(FailurePolicy::Ignore);
        monitor.add(config(1, FailurePolicy::DeviceError, &[], Slots::default()));
        for _ in 0..300 {
            match numbers.next() % 16 {
                0 => monitor.physical().tick(),
                1 => { monitor.physical().receive(&frame([0xFF; 6], 0x55, 700)); }
                2 => { monitor.switch(GuestId(usize::from(numbers.next().is_multiple_of(2))), numbers.next().is_multiple_of(4)).unwrap(); }
                3 => monitor.interrupt().unwrap(),
                _ => {
                    let id = monitor.resident().unwrap();
                    for access in grammar.request(&mut numbers) {
                        monitor.access(id, access).unwrap();
                    }
                }
            }
            let log = monitor.physical().take_log();
            let stray = log.iter().find(|touch| outside(&[**touch]) > 0);
            prop_assert_eq!(stray, None, "{:?}", monitor.resident().map(|id| monitor.model(id).graph()));
        }
        for violation in monitor.violations(GuestId(0)) {
            let refusals = replay(&NE2000, violation).unwrap();
            prop_assert_eq!(refusals.last(), Some(&violation.refusal));
        }
    }
}
