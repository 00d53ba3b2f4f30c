//! Attacks on an RTL8139, judged by what the device read and wrote on the bus. On a bare card they succeed. Under the
//! monitor the device touches no byte outside the guest's memory.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device_models::PhysicalDevice;
use device_models::devices::rtl8139::RTL8139;
use device_models::grammar::Grammar;
use device_models::reference::rtl8139::Rtl8139;
use support::memory::{MEMORY, Shared, at, scratch, slots};
use support::rtl8139::Card;
use support::{Bare, Guest, Numbers, Ports, config, frame, switch};
use vpio::violation::replay;
use vpio::{FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];
const BASE: u32 = 0x10_0000;
const END: u32 = 0x20_0000;

/// Offset, bytes, value.
type Write = (u32, u8, u32);

/// A ring of 32 KiB, both engines enabled, two transmit frames with addresses.
const START: &[Write] = &[
    (0x30, 4, BASE),
    (0x37, 1, 0x0C),
    (0x44, 4, 0xF78A),
    (0x40, 4, 0x0300_0680),
    (0x20, 4, BASE + 0x1_0000),
    (0x24, 4, BASE + 0x1_0000),
];

const ATTACKS: &[(&str, &[Write])] = &[
    ("frame outside", &[(0x20, 4, 0x4000_0000), (0x10, 4, 100)]),
    ("frame through the end of memory", &[(0x20, 4, END - 64), (0x10, 4, 100)]),
    ("frame through the end of 32 bits", &[(0x20, 4, 0xFFFF_FFC0), (0x10, 4, 200)]),
    ("frame larger than checked for others", &[(0x20, 4, END - 0x600), (0x10, 4, 0x1FFF)]),
    ("frame without an address", &[(0x10, 4, 100), (0x14, 4, 100), (0x18, 4, 100)]),
    ("frame moved while it is sent", &[(0x10, 4, 100), (0x20, 4, 0x4000_0000)]),
    ("frame grown while it is sent", &[(0x20, 4, END - 0x600), (0x10, 4, 100), (0x10, 4, 0x1FFF)]),
    ("address in parts", &[(0x22, 2, 0x4000), (0x10, 4, 100)]),
    ("address in bytes", &[(0x23, 1, 0x40), (0x10, 4, 100)]),
    (
        "sizes before the transmitter starts",
        &[(0x37, 1, 0x08), (0x20, 4, 0x4000_0000), (0x10, 4, 100), (0x37, 1, 0x0C)],
    ),
    ("ring outside", &[(0x37, 1, 0x04), (0x30, 4, 0x4000_0000), (0x37, 1, 0x0C)]),
    ("ring through the end of memory", &[(0x37, 1, 0x04), (0x30, 4, END - 0x400), (0x37, 1, 0x0C)]),
    ("ring moved while the receiver runs", &[(0x30, 4, 0x4000_0000)]),
    ("ring moved in parts while the receiver runs", &[(0x32, 2, 0x4000)]),
    (
        "ring grown while the receiver runs",
        &[(0x37, 1, 0x04), (0x44, 4, 0x000A), (0x30, 4, END - 0x2010), (0x37, 1, 0x0C), (0x44, 4, 0xFF8A)],
    ),
    (
        "ring grown by the other BAR's alias of its size",
        &[(0x37, 1, 0x04), (0x44, 4, 0x000A), (0x30, 4, END - 0x2010), (0x37, 1, 0x0C), (0x44, 4, 0x180A)],
    ),
    ("ring at the end of 32 bits", &[(0x37, 1, 0x04), (0x30, 4, 0xFFFF_F000), (0x37, 1, 0x0C)]),
];

fn attack(ports: &mut dyn Ports, writes: &[Write]) {
    for &(offset, size, value) in START.iter().chain(writes) {
        ports.write(offset, size, value);
    }
}

fn traffic(card: &mut Card) {
    card.tick();
    for length in [60, 1514, 1514, 600].repeat(30) {
        card.receive(&frame([0xFF; 6], 0x55, length));
    }
    card.tick();
}

fn monitor(iommu: bool, policy: FailurePolicy) -> (Monitor<Card>, Shared) {
    let memory = if iommu { MEMORY } else { at(0)..at(0) + MEMORY.end - MEMORY.start };
    let ram = Shared::new(vec![memory, scratch()]);
    let mut monitor = Monitor::new(&RTL8139, Rtl8139::new(CARD, ram.clone(), iommu));
    monitor.set_scratch(Box::new(ram.clone()));
    monitor.add(config(0, policy, &[], slots(0)));
    switch(&mut monitor, GuestId(0));
    (monitor, ram)
}

#[test]
fn attacks_succeed_on_a_bare_card_and_not_under_the_monitor() {
    for (name, writes) in ATTACKS {
        let ram = Shared::new(vec![MEMORY]);
        let mut bare = Bare(Rtl8139::new(CARD, ram.clone(), false));
        bare.0.set_bus_master(true).unwrap();
        attack(&mut bare, writes);
        traffic(&mut bare.0);
        assert!(ram.log().1 > 0, "{name}: the bare card withstands");
        for iommu in [false, true] {
            for bar in [0, 1] {
                let (mut monitor, ram) = monitor(iommu, FailurePolicy::Ignore);
                let mut guest = Guest::new(&mut monitor, GuestId(0));
                guest.bar = bar;
                attack(&mut guest, writes);
                traffic(monitor.physical());
                assert_eq!(
                    (ram.log().1, monitor.physical().blocked()),
                    (0, 0),
                    "{name}: nor has the IOMMU to stop anything"
                );
                assert!(monitor.counters(GuestId(0)).refused > 0, "{name}: nothing was refused");
                for violation in monitor.violations(GuestId(0)) {
                    assert_eq!(
                        replay(&RTL8139, violation).unwrap().last(),
                        Some(&violation.refusal),
                        "{name}"
                    );
                }
            }
        }
    }
}

/// Writes to C+ registers, analogue tuning, PHY and EEPROM never reach the device. The guest can't distinguish these
/// from missing registers.
#[test]
fn what_is_denied_stays_denied() {
    let (mut monitor, _) = monitor(false, FailurePolicy::Ignore);
    let mut guest = Guest::new(&mut monitor, GuestId(0));
    for (offset, size) in [
        (0xD9, 1),
        (0xE0, 2),
        (0xE4, 4),
        (0xE8, 4),
        (0x70, 4),
        (0x74, 4),
        (0x78, 4),
        (0x7C, 4),
        (0x62, 2),
        (0x60, 2),
    ] {
        guest.write(offset, size, 0xFFFF_FFFF >> (32 - 8 * u32::from(size)));
    }
    let counters = monitor.counters(GuestId(0));
    assert_eq!((counters.forwarded, counters.refused), (0, 0));
    assert!(counters.denied > 9);
}

/// The policy's device error is a transmit error.
#[test]
fn a_refused_frame_is_a_transmit_error() {
    let (mut monitor, _) = monitor(false, FailurePolicy::DeviceError);
    let mut guest = Guest::new(&mut monitor, GuestId(0));
    attack(&mut guest, &[(0x3C, 2, 0xC07F), (0x18, 4, 100)]);
    assert_eq!(guest.read(0x3E, 2), 0x0008);
    assert!(monitor.line(GuestId(0)));
    // The next frame goes out.
    Guest::new(&mut monitor, GuestId(0)).write(0x10, 4, 100);
    monitor.physical().tick();
    assert_eq!(monitor.physical().take_sent().len(), 1);
}

/// Random requests, frames and hand-offs, while another thread overwrites all of the guest's memory: the device stays
/// inside it. `CAUSEWAY_RACES` sets the number of requests.
#[test]
fn no_sequence_of_requests_leaves_the_memory() {
    let wanted: u64 =
        std::env::var("CAUSEWAY_RACES").ok().and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let (mut requests, mut refused, mut touched, mut seed) = (0, 0, 0, 0u64);
    while requests < wanted {
        seed += 1;
        let iommu = seed.is_multiple_of(2);
        let (mut monitor, ram) = monitor(iommu, FailurePolicy::Ignore);
        monitor.add(config(1, FailurePolicy::DeviceError, &[], slots(0)));
        let over = Arc::new(AtomicBool::new(false));
        let racer = std::thread::spawn({
            let (over, ram) = (Arc::clone(&over), ram.clone());
            move || {
                let mut numbers = Numbers(seed);
                while !over.load(Ordering::Relaxed) {
                    let address = at(0) + numbers.next() % 0xF_FFF0;
                    ram.store(address, &numbers.next().to_le_bytes());
                }
            }
        });
        let grammar = Grammar::new(&RTL8139);
        let mut numbers = Numbers(seed);
        for _ in 0..4000 {
            match numbers.next() % 64 {
                0..4 => {
                    monitor.physical().receive(&frame([0xFF; 6], 0x55, 700));
                }
                4 => {
                    let to = GuestId(usize::from(numbers.next().is_multiple_of(2)));
                    monitor.switch(to, numbers.next().is_multiple_of(4)).unwrap();
                }
                5..8 => monitor.interrupt().unwrap(),
                8 => attack(&mut Guest::new(&mut monitor, GuestId(0)), &[]),
                _ => {
                    let id = monitor.resident().unwrap();
                    for access in grammar.request(&mut numbers) {
                        monitor.access(id, access).unwrap();
                        requests += 1;
                    }
                }
            }
            assert_eq!(ram.log().1, 0, "seed {seed}: {:?}", monitor.violations(GuestId(0)).last());
        }
        over.store(true, Ordering::Relaxed);
        racer.join().unwrap();
        refused += monitor.counters(GuestId(0)).refused + monitor.counters(GuestId(1)).refused;
        touched += ram.log().0;
        assert_eq!(monitor.physical().blocked(), 0, "the IOMMU had nothing to stop");
    }
    println!("rtl8139: {requests} requests, {refused} refused, {touched} bytes of DMA, 0 outside");
    assert!(refused > 1000 && touched > 100_000, "{refused} refused, {touched} bytes of DMA");
}
