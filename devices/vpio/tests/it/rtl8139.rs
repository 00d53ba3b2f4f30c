//! A guest with Linux's driver sequences on an RTL8139 under the monitor: traffic, decisions, pinned memory, hand-off. With and without an
//! IOMMU.

use crate::support;

use device_models::devices::rtl8139::RTL8139;
use device_models::reference::rtl8139::Rtl8139;
use support::memory::{MEMORY, Shared, at, memory, scratch, slots};
use support::rtl8139::{Card, Driver};
use support::{Guest, Numbers, Ports as _, address, config, frame, switch};
use vpio::{FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];

fn monitor(guests: u8, iommu: bool) -> Monitor<Card> {
    let length = MEMORY.end - MEMORY.start;
    let mut allowed = vec![scratch()];
    if iommu {
        allowed.extend((0..guests).map(memory));
    } else {
        allowed.extend((0..guests).map(|number| at(number)..at(number) + length));
    }
    let ram = Shared::new(allowed);
    let mut monitor = Monitor::new(&RTL8139, Rtl8139::new(CARD, ram.clone(), iommu));
    monitor.set_scratch(Box::new(ram));
    for number in 0..guests {
        monitor.add(config(number, FailurePolicy::DeviceError, &[], slots(number)));
    }
    monitor
}

/// The driver reads the guest's own address from the virtual EEPROM. It sends and receives frames, compared byte by
/// byte, through several rounds of the ring. No DMA leaves the guest's memory.
#[test]
fn a_driver_sends_and_receives() {
    for iommu in [false, true] {
        let (mut monitor, id) = (monitor(1, iommu), GuestId(0));
        switch(&mut monitor, id);
        let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id), 0);
        assert_eq!(driver.address, address(0));
        driver.start(&mut Guest::new(&mut monitor, id));
        for (mark, length) in (1u8..=200).zip([60, 61, 64, 1000, 1514].repeat(40)) {
            let out = frame([0xFF; 6], mark, length);
            driver.send(&mut Guest::new(&mut monitor, id), &out);
            let into = frame(address(0), mark, length);
            assert!(monitor.physical().receive(&into));
            monitor.interrupt().unwrap();
            assert!(monitor.line(id));
            let (frames, sent, error) = driver.interrupt(&mut Guest::new(&mut monitor, id));
            assert_eq!((frames, sent, error), (vec![into], 1, false));
            assert!(!monitor.line(id));
            assert_eq!(monitor.physical().take_sent(), vec![out]);
        }
        let counters = *monitor.counters(id);
        assert_eq!((counters.refused, counters.disbelieved), (0, 0), "{:?}", monitor.violations(id));
        let card = monitor.physical();
        let (touched, outside) = card.bus().log();
        assert_eq!((outside, card.blocked()), (0, 0));
        assert!(touched > 100_000);
    }
}

/// In the steady state no request runs a check: the monitor checked the ring and the four windows in advance.
#[test]
fn no_request_runs_a_check_in_the_steady_state() {
    let (mut monitor, id) = (monitor(1, true), GuestId(0));
    switch(&mut monitor, id);
    let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id), 0);
    driver.start(&mut Guest::new(&mut monitor, id));
    let before = (*monitor.counters(id), driver.accesses);
    for mark in 0..100 {
        driver.send(&mut Guest::new(&mut monitor, id), &frame([0xFF; 6], mark, 1514));
        assert!(monitor.physical().receive(&frame(address(0), mark, 1514)));
        monitor.interrupt().unwrap();
        driver.interrupt(&mut Guest::new(&mut monitor, id));
    }
    let counters = monitor.counters(id);
    let (pinned, peak) = monitor.mapped();
    println!(
        "rtl8139: {} decisions in {} requests, {} virtual; pinned {pinned} bytes, at most {peak}, of {} of the guest",
        counters.decisions - before.0.decisions,
        driver.accesses - before.1,
        counters.virtual_requests - before.0.virtual_requests,
        MEMORY.end - MEMORY.start
    );
    assert_eq!(counters.decisions, before.0.decisions);
    assert!(before.0.decisions >= 6, "ring, its size, four frames: {}", before.0.decisions);
    // Ring: 32 KiB + 16 + 2 KiB from a page's start are 9 pages. Four overlapping windows of 8 KiB - 1 are 4 pages.
    assert!((48 << 10..64 << 10).contains(&pinned), "{pinned}");
    monitor.release().unwrap();
    assert_eq!(monitor.mapped().0, 0, "nothing stays pinned without the device");
}

/// Offsets and values read, frames received, frames sent, hand-offs to the guest.
type Seen = (Vec<(u32, u32)>, Vec<Vec<u8>>, Vec<Vec<u8>>, u64);

/// Runs guest 0's driver, with hand-offs to the other guest before some accesses if `switching`. Returns what guest 0
/// reads, receives and sends.
fn run(seed: u64, switching: bool, iommu: bool) -> Seen {
    let (mut monitor, a, b) = (monitor(2, iommu), GuestId(0), GuestId(1));
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
            monitor.interrupt().unwrap();
            driver.interrupt(&mut Guest::new(monitor, b));
        }
    };
    macro_rules! guest {
        () => {
            Guest {
                monitor: &mut monitor,
                id: a,
                bar: 1,
                trace: Some(&mut trace),
                between: Some(&mut between),
            }
        };
    }
    let mut driver = Driver::probe(&mut guest!(), 0);
    driver.start(&mut guest!());
    for round in 0u8..120 {
        let length = 60 + usize::from(round) * 37 % 1455;
        driver.send(&mut guest!(), &frame([0xFF; 6], round, length));
        switch(&mut monitor, a);
        for _ in 0..round % 3 {
            assert!(monitor.physical().receive(&frame(address(0), round, length)));
        }
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

/// The driver can't distinguish a run with many hand-offs from one without any. This includes hidden state: the ring's
/// write position and the next descriptor, which can't be written.
#[test]
fn a_switched_run_looks_like_an_unswitched_one() {
    for iommu in [false, true] {
        let alone = run(1, false, iommu);
        assert_eq!((alone.1.len(), alone.2.len(), alone.3), (120, 120, 1), "every frame arrives");
        for seed in 1..=2 {
            let shared = run(seed, true, iommu);
            assert!(shared.3 > 30, "{} switches", shared.3);
            let first = alone.0.iter().zip(&shared.0).position(|(one, other)| one != other);
            let around = |trace: &[(u32, u32)]| first.map(|at| trace[at.saturating_sub(4)..=at].to_vec());
            assert_eq!(first, None, "seed {seed}: {:X?} against {:X?}", around(&alone.0), around(&shared.0));
            assert_eq!(alone.0.len(), shared.0.len());
            assert_eq!(alone.1, shared.1);
            assert_eq!(alone.2, shared.2);
        }
    }
}

/// A driver that changes its receive filter, such as for another multicast group, continues with its next descriptor
/// and ring position. This holds on the card that it has and on one that it gets back.
#[test]
fn descriptors_and_ring_outlive_another_filter() {
    for iommu in [false, true] {
        let (mut monitor, a, b) = (monitor(2, iommu), GuestId(0), GuestId(1));
        switch(&mut monitor, a);
        let mut driver = Driver::probe(&mut Guest::new(&mut monitor, a), 0);
        driver.start(&mut Guest::new(&mut monitor, a));
        for mark in 0..12u8 {
            Guest::new(&mut monitor, a).write(0x44, 4, if mark % 2 == 0 { 0xF78E } else { 0xF78A });
            if mark % 3 == 2 {
                switch(&mut monitor, b);
                switch(&mut monitor, a);
            }
            let out = frame([0xFF; 6], mark, 100);
            driver.send(&mut Guest::new(&mut monitor, a), &out);
            let into = frame(address(0), mark, 200);
            assert!(monitor.physical().receive(&into));
            monitor.interrupt().unwrap();
            let (frames, sent, error) = driver.interrupt(&mut Guest::new(&mut monitor, a));
            assert_eq!((frames, sent, error), (vec![into], 1, false), "frame {mark}");
            assert_eq!(monitor.physical().take_sent(), vec![out], "frame {mark}");
        }
        assert_eq!(monitor.counters(a).refused, 0, "{:?}", monitor.violations(a));
    }
}
