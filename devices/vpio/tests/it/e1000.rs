//! A guest with Linux's driver sequences on an e1000 under the monitor, behind an IOMMU: traffic, segmentation, decisions, pinned memory.

use crate::support;

use device_models::Access;
use device_models::describe::Permission;
use device_models::devices::e1000::E1000;
use device_models::reference::e1000::E1000Card;
use support::e1000::{Card, Driver};
use support::memory::{MEMORY, Memory, Shared, memory, slots};
use support::{Bare, Guest, Numbers, Ports, address, config, frame, switch};
use vpio::{FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0x1B, 0x21, 1, 2, 3];

fn monitor() -> Monitor<Card> {
    let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, Shared::new(vec![memory(0)]), true));
    monitor.add(config(0, FailurePolicy::Stop, &[], slots(0)));
    switch(&mut monitor, GuestId(0));
    monitor
}

/// The driver reads the guest's own address from the virtual EEPROM. It sends and receives frames, compared byte by
/// byte, through several rounds of the rings. No DMA leaves the guest's memory, so the IOMMU blocks nothing.
#[test]
fn a_driver_sends_and_receives() {
    let (mut monitor, id) = (monitor(), GuestId(0));
    let driver = Driver::probe(&mut Guest::new(&mut monitor, id), 0);
    assert_eq!(driver.address, address(0));
    // Linux stores multicast addresses in the receive address registers. Another station's unicast address is refused.
    for (offset, size, value, fine) in [
        (0x5408, 4, 0x0000_3333, true),
        (0x540C, 4, 0x8000_0100, true),
        (0x48, 4, 0x005E_0001, true),
        (0x5408, 4, 0x0000_5452, false),
        (0x50, 4, 0x0000_5452, false),
        (0x5409, 1, 0x55, false),
        (0x540A, 2, 0x55, false),
    ] {
        let before = monitor.counters(id).refused;
        Monitor::access(&mut monitor, id, Access { bar: 0, offset, size, write: Some(value) }).unwrap();
        assert_eq!(monitor.counters(id).refused == before, fine, "{offset:X} {value:X}");
        if !fine {
            monitor.power_on(id).unwrap();
        }
    }
    let refused = monitor.counters(id).refused;
    let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id), 0);
    driver.start(&mut Guest::new(&mut monitor, id));
    for (mark, length) in (1u8..=200).zip([60, 61, 64, 1000, 1514].repeat(40)) {
        let out = frame([0xFF; 6], mark, length);
        driver.send(&mut Guest::new(&mut monitor, id), &out);
        let into = frame(address(0), mark, length);
        assert!(monitor.physical().receive(&into));
        assert!(!monitor.physical().receive(&frame(address(9), mark, length)), "somebody else's");
        monitor.physical().tick();
        monitor.interrupt().unwrap();
        assert!(monitor.line(id));
        let (frames, sent) = driver.interrupt(&mut Guest::new(&mut monitor, id));
        assert_eq!((frames, sent), (vec![into], 1));
        assert!(!monitor.line(id));
        assert_eq!(monitor.physical().take_sent(), vec![out]);
    }
    let counters = *monitor.counters(id);
    assert_eq!((counters.refused, counters.disbelieved), (refused, 0), "{:?}", monitor.violations(id));
    let card = monitor.physical();
    let (touched, outside) = card.bus().log();
    assert_eq!((outside, card.blocked()), (0, 0));
    assert!(touched > 100_000);
}

/// A guest may set the link up through the PHY as drivers do. It may loop frames back only with the permission,
/// whichever register it uses. It can neither reset the card from its EEPROM nor drive its pins.
#[test]
fn the_phy_is_the_guests_for_its_link_only() {
    let write = |register: u32, value: u32| (0x20, 1 << 26 | 1 << 21 | register << 16 | value);
    let loops = [write(0, 0x4140), write(20, 0x4CE0)];
    let fine = [
        (0x20, 1 << 27 | 1 << 21 | 17 << 16),
        write(0, 0x9140),
        write(0, 0x1340),
        write(4, 0x0DE1),
        write(9, 0x0E00),
        write(16, 0x0068),
        write(20, 0x0CE0),
        (0x18, 1 << 17),
    ];
    let refused = [
        write(0, 0x1940),
        write(0, 0x1540),
        write(9, 0x2E00),
        write(1, 0x0001),
        write(18, 0x0001),
        write(29, 0x0003),
        write(30, 0xFFFF),
        (0x20, 1 << 21 | 0x4140),
        (0x20, 3 << 26 | 1 << 21),
        (0x18, 1 << 13),
        (0x18, 1 << 23),
        (0x18, 1 << 8),
    ];
    for permissions in [&[][..], &[Permission::Loopback]] {
        let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, Shared::new(vec![memory(0)]), true));
        let id = monitor.add(config(0, FailurePolicy::Ignore, permissions, slots(0)));
        switch(&mut monitor, id);
        let mut refuses = |(offset, value): (u32, u32)| {
            let before = monitor.counters(id).refused;
            monitor.access(id, Access { bar: 0, offset, size: 4, write: Some(value) }).unwrap();
            monitor.counters(id).refused > before
        };
        for (offset, value) in fine {
            assert!(!refuses((offset, value)), "{offset:X} {value:X}");
        }
        for (offset, value) in refused {
            assert!(refuses((offset, value)), "{offset:X} {value:X}");
        }
        for (offset, value) in loops {
            assert_eq!(refuses((offset, value)), permissions.is_empty(), "{offset:X} {value:X}");
        }
    }
}

/// Segmentation under the monitor sends the same frames as a bare card.
#[test]
fn frames_are_cut_as_by_a_bare_card() {
    let headers = 54;
    let big: Vec<u8> = (0..20_000usize).map(|at| u8::try_from(at * 7 % 253).unwrap()).collect();
    let run = |ports: &mut dyn Memory| {
        let mut driver = Driver::probe(ports, 0);
        driver.start(ports);
        driver.send_cut(ports, &big, headers, 1460);
        driver
    };
    let mut bare = Bare(E1000Card::new(address(0), Shared::new(vec![memory(0)]), false));
    device_models::PhysicalDevice::set_bus_master(&mut bare.0, true).unwrap();
    run(&mut bare);
    bare.0.tick();
    let alone = bare.0.take_sent();
    let (mut monitor, id) = (monitor(), GuestId(0));
    let mut driver = run(&mut Guest::new(&mut monitor, id));
    monitor.physical().tick();
    monitor.interrupt().unwrap();
    assert_eq!(driver.interrupt(&mut Guest::new(&mut monitor, id)).1, 21, "a context, 20 pieces");
    let guarded = monitor.physical().take_sent();
    assert_eq!((alone.len(), &alone), (14, &guarded));
    assert_eq!(alone.iter().map(|frame| frame.len() - usize::from(headers)).sum::<usize>(), big.len() - 54);
    assert_eq!(monitor.counters(id).refused, 0, "{:?}", monitor.violations(id));
}

/// In the steady state no request runs a check, and only the guest's memory is pinned.
#[test]
fn no_request_runs_a_check_in_the_steady_state() {
    let (mut monitor, id) = (monitor(), GuestId(0));
    let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id), 0);
    assert_eq!(monitor.mapped().0, 0, "an idle card has nothing");
    driver.start(&mut Guest::new(&mut monitor, id));
    let before = (*monitor.counters(id), driver.accesses);
    for mark in 0..100 {
        driver.send(&mut Guest::new(&mut monitor, id), &frame([0xFF; 6], mark, 1514));
        assert!(monitor.physical().receive(&frame(address(0), mark, 1514)));
        monitor.physical().tick();
        monitor.interrupt().unwrap();
        driver.interrupt(&mut Guest::new(&mut monitor, id));
    }
    let counters = monitor.counters(id);
    let (pinned, _) = monitor.mapped();
    println!(
        "e1000: {} decisions in {} requests, {} virtual; pinned {pinned} bytes of {} of the guest",
        counters.decisions - before.0.decisions,
        driver.accesses - before.1,
        counters.virtual_requests - before.0.virtual_requests,
        MEMORY.end - MEMORY.start
    );
    assert_eq!(counters.decisions, before.0.decisions);
    assert_eq!(pinned, MEMORY.end - MEMORY.start, "buffers are named by memory: all of it");
    // A stopped engine may finish its current work. So memory is unmapped at a reset or a hand-off, not at the stop.
    let mut guest = Guest::new(&mut monitor, id);
    Ports::write(&mut guest, 0x0, 4, 1 << 26);
    assert_eq!(monitor.mapped().0, 0, "nothing is mapped after a reset");
    Driver::probe(&mut Guest::new(&mut monitor, id), 0).start(&mut Guest::new(&mut monitor, id));
    assert!(monitor.mapped().0 > 0);
    monitor.release().unwrap();
    assert_eq!(monitor.mapped().0, 0, "nothing stays pinned without the device");
}

/// Offsets and values read, frames received, frames sent, hand-offs to the guest.
type Seen = (Vec<(u32, u32)>, Vec<Vec<u8>>, Vec<Vec<u8>>, u64);

/// Runs guest 0's driver, with hand-offs to the other guest before some accesses if `switching`. Returns what guest 0
/// reads, receives and sends.
fn run(seed: u64, switching: bool) -> Seen {
    let (a, b) = (GuestId(0), GuestId(1));
    let ram = Shared::new(vec![memory(0), memory(1)]);
    let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, ram, true));
    for number in 0..2 {
        monitor.add(config(number, FailurePolicy::Stop, &[], slots(number)));
    }
    let (mut trace, mut received) = (Vec::new(), Vec::new());
    let mut numbers = Numbers(seed);
    let mut other: Option<Driver> = None;
    let mut between = |monitor: &mut Monitor<Card>| {
        if !switching || !numbers.next().is_multiple_of(29) {
            return;
        }
        switch(monitor, b);
        let driver = other.get_or_insert_with(|| {
            let mut driver = Driver::probe(&mut Guest::new(monitor, b), 1);
            driver.start(&mut Guest::new(monitor, b));
            driver
        });
        // Sometimes the other guest leaves frames unread.
        monitor.physical().receive(&frame(
            address(1),
            0xB0,
            60 + usize::try_from(numbers.next() % 1400).unwrap(),
        ));
        monitor.interrupt().unwrap();
        if !numbers.next().is_multiple_of(3) {
            driver.send(&mut Guest::new(monitor, b), &frame([0xFF; 6], 0xBB, 700));
            monitor.physical().tick();
            monitor.interrupt().unwrap();
            driver.interrupt(&mut Guest::new(monitor, b));
        }
    };
    macro_rules! guest {
        () => {
            Guest {
                monitor: &mut monitor,
                id: a,
                bar: 0,
                trace: Some(&mut trace),
                between: Some(&mut between),
            }
        };
    }
    let mut driver = Driver::probe(&mut guest!(), 0);
    driver.start(&mut guest!());
    // A multicast group that the guest joined: bit 1A5h of the filter.
    let group = [0x01, 0x00, 0x5E, 0x00, 0x50, 0x1A];
    Ports::write(&mut guest!(), 0x5200 + 4 * (0x1A5 >> 5), 4, 1 << (0x1A5 & 31));
    for round in 0u8..120 {
        let length = 60 + usize::from(round) * 37 % 1455;
        driver.send(&mut guest!(), &frame([0xFF; 6], round, length));
        switch(&mut monitor, a);
        for number in 0..round % 3 {
            let to = if number == 0 { address(0) } else { group };
            assert!(monitor.physical().receive(&frame(to, round, length)), "round {round} frame {number}");
        }
        monitor.physical().tick();
        monitor.interrupt().unwrap();
        received.extend(driver.interrupt(&mut guest!()).0);
    }
    assert_eq!(monitor.counters(a).refused + monitor.counters(b).refused, 0, "{:?}", monitor.violations(a));
    let switches = monitor.counters(a).switches;
    let all = monitor.physical().take_sent();
    assert!(!switching || all.iter().any(|frame| frame[6] == 0xBB), "the other guest sends as well");
    assert_eq!((monitor.physical().bus().log().1, monitor.physical().blocked()), (0, 0));
    (trace, received, all.into_iter().filter(|frame| frame[6] != 0xBB).collect(), switches)
}

/// The driver can't distinguish a run with many hand-offs from one without any. Heads, tails and the multicast filter
/// are the same.
#[test]
fn a_switched_run_looks_like_an_unswitched_one() {
    let alone = run(1, false);
    assert_eq!((alone.1.len(), alone.2.len(), alone.3), (120, 120, 1), "every frame arrives");
    for seed in 1..=2 {
        let shared = run(seed, true);
        assert!(shared.3 > 30, "{} switches", shared.3);
        let first = alone.0.iter().zip(&shared.0).position(|(one, other)| one != other);
        let around = |trace: &[(u32, u32)]| first.map(|at| trace[at.saturating_sub(4)..=at].to_vec());
        assert_eq!(first, None, "seed {seed}: {:X?} against {:X?}", around(&alone.0), around(&shared.0));
        assert_eq!(alone.0.len(), shared.0.len());
        assert_eq!((&alone.1, &alone.2), (&shared.1, &shared.2));
    }
}
