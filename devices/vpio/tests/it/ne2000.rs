//! A guest with Linux's driver sequences on an NE2000 under the monitor: traffic, decisions, hand-off.

use crate::support;

use device_models::Access;
use device_models::devices::ne2000::NE2000;
use device_models::reference::ne2000::Ne2000;
use support::ne2000::Driver;
use support::{Bare, Guest, Numbers, Ports, address, config, frame, switch};
use vpio::{FailurePolicy, GuestId, Monitor, Slots};

const CARD: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];

fn monitor(guests: u8) -> Monitor<Ne2000> {
    let mut monitor = Monitor::new(&NE2000, Ne2000::new(CARD));
    for number in 0..guests {
        monitor.add(config(number, FailurePolicy::DeviceError, &[], Slots::default()));
    }
    monitor
}

/// Sends a frame and lets the card finish it.
fn send(monitor: &mut Monitor<Ne2000>, driver: &mut Driver, id: GuestId, frame: &[u8]) {
    driver.send(&mut Guest::new(monitor, id), frame);
    monitor.physical().tick();
    monitor.interrupt().unwrap();
    assert!(monitor.line(id), "the driver is told");
    let (_, sent, error) = driver.interrupt(&mut Guest::new(monitor, id));
    assert!(sent && !error);
    assert!(!monitor.line(id), "and has acknowledged");
}

/// The driver finds the guest's own address. It sends and receives frames, compared byte by byte, also one that wraps
/// in the ring. No request is refused, and bus mastering stays unchanged.
#[test]
fn a_driver_sends_and_receives() {
    let (mut monitor, id) = (monitor(1), GuestId(0));
    let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id));
    assert_eq!(driver.address, address(0), "its own address, not the card's");
    driver.start(&mut Guest::new(&mut monitor, id));
    for (mark, length) in (1u8..).zip([60, 61, 62, 63, 64, 1000, 1513, 1514].repeat(8)) {
        let out = frame([0xFF; 6], mark, length);
        send(&mut monitor, &mut driver, id, &out);
        let mut sent = monitor.physical().take_sent();
        assert_eq!(sent.len(), 1);
        sent[0].truncate(length);
        assert_eq!(sent[0], out);

        let into = frame(address(0), mark.wrapping_add(100), length);
        assert!(monitor.physical().receive(&into));
        monitor.interrupt().unwrap();
        assert!(monitor.line(id));
        let (frames, _, _) = driver.interrupt(&mut Guest::new(&mut monitor, id));
        assert_eq!(frames, vec![into]);
    }
    assert!(!monitor.physical().receive(&frame(address(1), 1, 60)), "another's frame is filtered");
    let counters = monitor.counters(id);
    assert_eq!((counters.refused, counters.disbelieved), (0, 0), "{:?}", monitor.violations(id));
    assert!(!monitor.physical().bus_master());
}

/// Share of port instructions that run a check, with as many frames sent as received. At most 4 % if frames arrive one
/// by one. Slightly more if they arrive in groups, which need fewer instructions each.
#[test]
fn few_requests_run_a_check() {
    for (length, group) in [(60, 1), (1514, 1), (60, 8), (1514, 8)] {
        let (mut monitor, id) = (monitor(1), GuestId(0));
        let mut driver = Driver::probe(&mut Guest::new(&mut monitor, id));
        driver.start(&mut Guest::new(&mut monitor, id));
        let before = (*monitor.counters(id), driver.instructions, driver.accesses);
        for mark in 0..8 {
            for _ in 0..group {
                send(&mut monitor, &mut driver, id, &frame([0xFF; 6], mark, length));
            }
            for _ in 0..group {
                assert!(monitor.physical().receive(&frame(address(0), mark, length)));
            }
            monitor.interrupt().unwrap();
            assert_eq!(driver.interrupt(&mut Guest::new(&mut monitor, id)).0.len(), group);
        }
        let counters = monitor.counters(id);
        let decisions = counters.decisions - before.0.decisions;
        let (instructions, accesses) = (driver.instructions - before.1, driver.accesses - before.2);
        let per_mille = decisions * 1000 / instructions;
        println!(
            "ne2000: {length} bytes in groups of {group}: {decisions} decisions in {instructions} port instructions ({per_mille} per mille), \
             {accesses} port accesses; {} virtual",
            counters.virtual_requests - before.0.virtual_requests
        );
        assert!(decisions > 0, "frames to send are checked");
        assert!(per_mille <= if group == 1 { 40 } else { 45 }, "{per_mille} per mille");
        assert_eq!(counters.refused, 0);
    }
}

/// Offsets and values read, frames received, frames sent, hand-offs to the guest.
type Seen = (Vec<(u32, u32)>, Vec<Vec<u8>>, Vec<Vec<u8>>, u64);

/// Runs guest 0's driver, with hand-offs before some of its accesses if `switching`. Returns what it reads and
/// receives.
fn run(seed: u64, switching: bool) -> Seen {
    let (mut monitor, a, b) = (monitor(2), GuestId(0), GuestId(1));
    let (mut trace, mut received) = (Vec::new(), Vec::new());
    let mut numbers = Numbers(seed);
    let mut other: Option<Driver> = None;
    let mut turn = 0u8;
    let mut between = |monitor: &mut Monitor<Ne2000>| {
        if !switching || !numbers.next().is_multiple_of(53) {
            return;
        }
        turn = turn.wrapping_add(1);
        match &mut other {
            None => {
                let mut driver = Driver::probe(&mut Guest::new(monitor, b));
                driver.start(&mut Guest::new(monitor, b));
                other = Some(driver);
            }
            Some(driver) => {
                // Every third time the other guest's driver leaves a frame unread.
                switch(monitor, b);
                monitor.physical().receive(&frame(address(1), 0xB0, 300));
                monitor.interrupt().unwrap();
                if !turn.is_multiple_of(3) {
                    driver.interrupt(&mut Guest::new(monitor, b));
                    driver.send(&mut Guest::new(monitor, b), &frame([0xFF; 6], 0xBB, 700));
                }
            }
        }
        if monitor.resident() == Some(b) {
            monitor.physical().tick();
            monitor.interrupt().unwrap();
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
    let mut driver = Driver::probe(&mut guest!());
    driver.start(&mut guest!());
    for round in 0u8..40 {
        let length = 60 + usize::from(round) * 37 % 1455;
        driver.send(&mut guest!(), &frame([0xFF; 6], round, length));
        switch(&mut monitor, a);
        monitor.physical().tick();
        for _ in 0..round % 3 {
            assert!(monitor.physical().receive(&frame(address(0), round, length)));
        }
        monitor.interrupt().unwrap();
        received.extend(driver.interrupt(&mut guest!()).0);
    }
    let all = monitor.physical().take_sent();
    let of_the_other = all.iter().filter(|frame| frame[6] == 0xBB).count();
    assert!(!switching || of_the_other > 5, "the other guest sends as well: {of_the_other}");
    let sent = all.into_iter().filter(|frame| frame[6] != 0xBB).collect();
    assert_eq!(monitor.counters(a).refused + monitor.counters(b).refused, 0, "{:?}", monitor.violations(a));
    let switches = monitor.counters(a).switches;
    (trace, received, sent, switches)
}

/// The driver can't distinguish a run with hundreds of hand-offs from one without any: every read value and every frame
/// is the same. This includes hidden state: frames in the ring, incomplete remote transfers, loaded frames.
#[test]
fn a_switched_run_looks_like_an_unswitched_one() {
    let alone = run(1, false);
    assert_eq!(alone.3, 1);
    assert_eq!((alone.1.len(), alone.2.len()), (39, 40), "every frame arrives");
    for seed in 1..=2 {
        let shared = run(seed, true);
        assert!(shared.3 > 30, "{} switches", shared.3);
        let first = alone.0.iter().zip(&shared.0).position(|(one, other)| one != other);
        assert_eq!(
            first,
            None,
            "seed {seed}: {:X?} against {:X?}",
            first.map(|at| alone.0[at]),
            first.map(|at| shared.0[at])
        );
        assert_eq!(alone.0.len(), shared.0.len());
        assert_eq!(alone.1, shared.1);
        assert_eq!(alone.2, shared.2);
    }
}

/// Reads all of the card's packet memory.
fn dump(ports: &mut dyn Ports) -> Vec<u8> {
    for (value, offset) in
        [(0x21, 0x00), (0x49, 0x0E), (0x00, 0x0A), (0x40, 0x0B), (0x00, 0x08), (0x40, 0x09), (0x0A, 0x00)]
    {
        ports.outb(value, offset);
    }
    (0..0x1000).flat_map(|_| ports.read(0x10, 4).to_le_bytes()).collect()
}

/// After a hand-off a guest can't read the other guest's data from the card. Without the monitor it can.
#[test]
fn nothing_of_a_guest_stays_on_the_card() {
    let secret = |memory: &[u8]| memory.iter().filter(|&&byte| byte == 0xA5).count();
    let fill = |ports: &mut dyn Ports| {
        let mut driver = Driver::probe(ports);
        driver.start(ports);
        driver.send(ports, &frame([0xFF; 6], 0xA5, 1514));
        driver.address
    };
    let mut bare = Bare(Ne2000::new(CARD));
    let to = fill(&mut bare);
    bare.0.tick();
    assert!(bare.0.receive(&frame(to, 0xA5, 1514)));
    assert_eq!(secret(&dump(&mut bare)), 2 * 1508);

    let (mut monitor, a, b) = (monitor(2), GuestId(0), GuestId(1));
    fill(&mut Guest::new(&mut monitor, a));
    monitor.physical().tick();
    assert!(monitor.physical().receive(&frame(address(0), 0xA5, 1514)));
    assert_eq!(secret(&dump(&mut Guest::new(&mut monitor, b))), 0);
    // The data still belongs to the first guest.
    assert_eq!(secret(&dump(&mut Guest::new(&mut monitor, a))), 2 * 1508);
}

/// The model holds status and mask, so a guest that isn't resident can access them. Every other access waits.
#[test]
fn a_guest_without_the_device_waits() {
    let mut monitor = monitor(2);
    switch(&mut monitor, GuestId(0));
    let read = |offset| Access { bar: 0, offset, size: 1, write: None };
    assert_eq!(monitor.access(GuestId(1), read(0x07)).unwrap(), vpio::Answer::Done(0x80));
    assert_eq!(monitor.access(GuestId(1), read(0x03)).unwrap(), vpio::Answer::Done(0));
    assert_eq!(monitor.access(GuestId(1), read(0x0D)).unwrap(), vpio::Answer::Wait);
    assert_eq!(monitor.counters(GuestId(1)).waits, 1);
}
