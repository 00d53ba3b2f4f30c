//! Attacks of a hostile guest on an e1000. They succeed on a bare card, and fail under the monitor. The test judges by
//! the memory that the card touched, not by the monitor's answers.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device_models::PhysicalDevice;
use device_models::devices::e1000::E1000;
use device_models::grammar::Grammar;
use device_models::reference::e1000::E1000Card;
use support::e1000::Card;
use support::e1000_attacks::{ATTACKS, HONEST, RX_RING, SETUP, TX_RING, prepare, requests};
use support::memory::{MEMORY, Shared, memory, slots};
use support::{Bare, Guest, Numbers, Ports, config, frame, switch};
use vpio::violation::replay;
use vpio::{FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0x1B, 0x21, 1, 2, 3];
fn traffic(card: &mut Card) {
    card.tick();
    for length in [4000, 60, 1514, 600].repeat(4) {
        card.receive(&frame([0xFF; 6], 0x55, length));
    }
    card.tick();
}

fn monitor(iommu: bool, policy: FailurePolicy) -> (Monitor<Card>, Shared) {
    let ram = Shared::new(vec![MEMORY]);
    let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, ram.clone(), iommu));
    monitor.add(config(0, policy, &[], slots(0)));
    switch(&mut monitor, GuestId(0));
    (monitor, ram)
}

#[test]
fn attacks_succeed_on_a_bare_card_and_not_under_the_monitor() {
    for of in ATTACKS {
        let ram = Shared::new(vec![MEMORY]);
        let mut bare = Bare(E1000Card::new(CARD, ram.clone(), false));
        bare.0.set_bus_master(true).unwrap();
        prepare(&mut bare, of);
        for (bar, offset, value) in requests(of) {
            bare.0.write(bar, offset, 4, value).unwrap();
        }
        traffic(&mut bare.0);
        assert!(ram.log().1 > 0, "{}: the bare card withstands", of.name);

        let (mut monitor, ram) = monitor(true, FailurePolicy::Ignore);
        let mut guest = Guest::new(&mut monitor, GuestId(0));
        prepare(&mut guest, of);
        for (bar, offset, value) in requests(of) {
            guest.bar = bar;
            guest.write(offset, 4, value);
        }
        traffic(monitor.physical());
        // A correct driver can use the card afterwards.
        let mut guest = Guest::new(&mut monitor, GuestId(0));
        prepare(&mut guest, &HONEST);
        for &(offset, value) in SETUP {
            guest.write(offset, 4, value);
        }
        monitor.physical().take_sent();
        Guest::new(&mut monitor, GuestId(0)).write(0x3818, 4, 1);
        traffic(monitor.physical());
        assert_eq!(monitor.physical().take_sent().len(), 1, "{}: the card stands still", of.name);
        assert_eq!(ram.log().1, 0, "{}", of.name);
        // The IOMMU blocks addresses in descriptors. Addresses in registers were refused before.
        assert!(
            monitor.physical().blocked() > 0
                || monitor.counters(GuestId(0)).refused > 0
                || monitor.counters(GuestId(0)).denied > 0,
            "{}: nobody stopped it",
            of.name
        );
        for violation in monitor.violations(GuestId(0)) {
            assert_eq!(replay(&E1000, violation).unwrap().last(), Some(&violation.refusal), "{}", of.name);
        }
    }
}

/// The monitor refuses addresses in registers before the card gets them, and applies the policy. Addresses in
/// descriptors reach the IOMMU.
#[test]
fn a_ring_outside_is_refused() {
    for (name, expected) in [("a receive ring outside", true), ("a frame out of foreign memory", false)] {
        let of = ATTACKS.iter().find(|of| of.name == name).unwrap();
        let (mut monitor, _) = monitor(true, FailurePolicy::Ignore);
        let mut guest = Guest::new(&mut monitor, GuestId(0));
        prepare(&mut guest, of);
        for (bar, offset, value) in requests(of) {
            guest.bar = bar;
            guest.write(offset, 4, value);
        }
        traffic(monitor.physical());
        assert_eq!(monitor.counters(GuestId(0)).refused > 0, expected, "{name}");
    }
}

/// Without an IOMMU nothing confines the addresses in descriptors. So the engines don't start, and the error names the
/// reason.
#[test]
fn without_an_iommu_no_engine_starts() {
    let (mut monitor, ram) = monitor(false, FailurePolicy::Ignore);
    let mut guest = Guest::new(&mut monitor, GuestId(0));
    for &(offset, value) in SETUP {
        guest.write(offset, 4, value);
    }
    traffic(monitor.physical());
    assert_eq!(ram.log(), (0, 0), "no DMA at all");
    let said = monitor.violations(GuestId(0)).iter().map(|it| it.refusal.why.clone()).collect::<Vec<_>>();
    assert!(said.iter().any(|why| why.contains("without an IOMMU")), "{said:?}");
}

/// Other guests' frames pass through the packet buffer, which a bare card exposes.
#[test]
fn the_packet_buffer_stays_closed() {
    let secret = frame([0xFF; 6], 0x5A, 500);
    let (mut monitor, _) = monitor(true, FailurePolicy::Ignore);
    let mut guest = Guest::new(&mut monitor, GuestId(0));
    for &(offset, value) in SETUP {
        guest.write(offset, 4, value);
    }
    assert!(guest.monitor.physical().receive(&secret));
    let shown = |value: u32| value.to_le_bytes() == [0x5A; 4];
    assert!(!(0..0x200).any(|word| shown(guest.read(0x1_0000 + 4 * word, 4))));
    guest.write(0x1_0000, 4, 0);
    let card = monitor.physical();
    assert!((0..0x200).any(|word| shown(card.read(0, 0x1_0000 + 4 * word, 4).unwrap())));
}

/// Random requests of the grammar and frames in any order, while another thread overwrites all of the guest's memory,
/// including its rings. The card stays inside that memory. `CAUSEWAY_RACES` sets the number of requests.
#[test]
fn no_sequence_of_requests_leaves_the_memory() {
    let wanted: u64 =
        std::env::var("CAUSEWAY_RACES").ok().and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let (mut requests, mut refused, mut touched, mut blocked, mut seed) = (0, 0, 0, 0, 0u64);
    while requests < wanted {
        seed += 1;
        let (mut monitor, ram) = monitor(true, FailurePolicy::Ignore);
        let over = Arc::new(AtomicBool::new(false));
        let racer = std::thread::spawn({
            let (over, ram) = (Arc::clone(&over), ram.clone());
            move || {
                let mut numbers = Numbers(seed);
                while !over.load(Ordering::Relaxed) {
                    // Half of them hit the rings, with addresses near the guest's memory or anywhere.
                    let number = numbers.next();
                    let address = match number % 4 {
                        0 => u64::from(TX_RING) + numbers.next() % 0x80 / 8 * 8,
                        1 => u64::from(RX_RING) + numbers.next() % 0x80 / 8 * 8,
                        _ => memory(0).start + numbers.next() % 0xF_FFF0,
                    };
                    let value = if number & 4 == 0 { numbers.next() } else { numbers.next() % 0x40_0000 };
                    ram.store(address, &value.to_le_bytes());
                }
            }
        });
        let grammar = Grammar::new(&E1000);
        let mut numbers = Numbers(seed);
        for _ in 0..4000 {
            match numbers.next() % 64 {
                0..4 => {
                    monitor.physical().receive(&frame([0xFF; 6], 0x55, 700));
                }
                4..8 => monitor.physical().tick(),
                8..11 => monitor.interrupt().unwrap(),
                11 => {
                    for &(offset, value) in SETUP {
                        Guest::new(&mut monitor, GuestId(0)).write(offset, 4, value);
                        requests += 1;
                    }
                }
                12..16 => {
                    let tail = u32::try_from(numbers.next() % 8).unwrap();
                    let at = if numbers.next().is_multiple_of(2) { 0x3818 } else { 0x2818 };
                    Guest::new(&mut monitor, GuestId(0)).write(at, 4, tail);
                    requests += 1;
                }
                _ => {
                    for access in grammar.request(&mut numbers) {
                        monitor.access(GuestId(0), access).unwrap();
                        requests += 1;
                    }
                }
            }
            assert_eq!(ram.log().1, 0, "seed {seed}: {:?}", monitor.violations(GuestId(0)).last());
        }
        over.store(true, Ordering::Relaxed);
        racer.join().unwrap();
        refused += monitor.counters(GuestId(0)).refused;
        touched += ram.log().0;
        blocked += monitor.physical().blocked();
    }
    println!(
        "e1000: {requests} requests, {refused} refused, {touched} bytes of DMA, {blocked} stopped by the IOMMU, 0 outside"
    );
    assert!(refused > 1000 && touched > 100_000 && blocked > 100, "{refused} {touched} {blocked}");
}
