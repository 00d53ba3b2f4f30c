//! Bulk traffic as Linux's 8139too drives it, including its softirq half: 64 frames per poll, four transmit frames in
//! flight, ring overflows. Interrupts, polls and frames come in any order. Under the monitor every stored frame reaches
//! the driver and every frame of the driver is sent, without a further event. On a bare card a poll that ends at its 64
//! frames leaves the others in the ring.

use crate::support;

use device_models::PhysicalDevice as _;
use device_models::devices::rtl8139::RTL8139;
use device_models::reference::rtl8139::Rtl8139;
use support::memory::{MEMORY, Memory, Shared, at, scratch, slots};
use support::rtl8139::{Card, Driver};
use support::{Bare, Guest, Numbers, address, config, frame, switch};
use vpio::{FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = address(0);

/// Limit of frames per poll in Linux's network stack.
const BUDGET: usize = 64;
/// Runs per kind.
const SEEDS: u64 = 8;

/// The card, alone or under the monitor.
enum Machine {
    Bare(Bare<Card>),
    Guarded(Monitor<Card>),
}

impl Machine {
    fn new(guarded: bool) -> Self {
        let memory = if guarded { at(0)..at(0) + MEMORY.end - MEMORY.start } else { MEMORY };
        let ram = Shared::new(vec![memory, scratch()]);
        let mut card = Rtl8139::new(CARD, ram.clone(), false);
        if !guarded {
            card.set_bus_master(true).unwrap();
            return Self::Bare(Bare(card));
        }
        let mut monitor = Monitor::new(&RTL8139, card);
        monitor.set_scratch(Box::new(ram));
        monitor.add(config(0, FailurePolicy::DeviceError, &[], slots(0)));
        switch(&mut monitor, GuestId(0));
        Self::Guarded(monitor)
    }

    fn card(&mut self) -> &mut Card {
        match self {
            Self::Bare(bare) => &mut bare.0,
            Self::Guarded(monitor) => monitor.physical(),
        }
    }

    fn drive<T>(&mut self, with: impl FnOnce(&mut dyn Memory) -> T) -> T {
        match self {
            Self::Bare(bare) => with(bare),
            Self::Guarded(monitor) => with(&mut Guest::new(monitor, GuestId(0))),
        }
    }

    fn line(&mut self) -> bool {
        match self {
            Self::Bare(bare) => bare.0.interrupt().unwrap(),
            Self::Guarded(monitor) => monitor.line(GuestId(0)),
        }
    }

    /// Lets the thread harvest the card's causes.
    fn take_causes(&mut self) {
        if let Self::Guarded(monitor) = self {
            monitor.interrupt().unwrap();
        }
    }
}

fn run(seed: u64, guarded: bool) -> (usize, usize) {
    let budget = if guarded { BUDGET } else { usize::MAX };
    let mut numbers = Numbers(seed);
    let mut machine = Machine::new(guarded);
    let mut driver = machine.drive(|ports| {
        let mut driver = Driver::probe(ports, 0);
        driver.start(ports);
        driver
    });
    let (mut stored, mut lost, mut received, mut handed, mut sent) = (0, 0, Vec::new(), 0, Vec::new());
    let mut order = 0u32;
    for step in 0..6000 {
        // In the end no events come from outside.
        let over = step >= 5000;
        match numbers.next() % 8 {
            0..3 if !over => {
                for _ in 0..numbers.next() % 30 {
                    let length = if numbers.next().is_multiple_of(2) { 60 } else { 1514 };
                    let mut out = frame(CARD, 0x11, length);
                    out[14..18].copy_from_slice(&order.to_le_bytes());
                    order += 1;
                    match machine.card().receive(&out) {
                        true => stored += 1,
                        false => lost += 1,
                    }
                }
            }
            3 if !over => {
                let mut out = frame([0xFF; 6], 0x22, 1514);
                out[14..18].copy_from_slice(&u32::try_from(handed).unwrap().to_le_bytes());
                if machine.drive(|ports| {
                    driver.has_room() && {
                        driver.send(ports, &out);
                        true
                    }
                }) {
                    handed += 1;
                }
            }
            4 => machine.card().tick(),
            5 => machine.take_causes(),
            6 if machine.line() => machine.drive(|ports| driver.handle(ports)),
            _ => received.extend(machine.drive(|ports| driver.poll(ports, budget))),
        }
        sent.extend(machine.card().take_sent());
    }
    let what = if guarded { "guarded" } else { "bare" };
    assert!(lost > 0, "{what}, seed {seed}: the ring never ran over");
    assert_eq!(received.len(), stored, "{what}, seed {seed}: frames stand in the ring");
    let number = |frame: &Vec<u8>| u32::from_le_bytes(frame[14..18].try_into().unwrap());
    assert!(received.iter().map(number).is_sorted(), "{what}, seed {seed}: out of order");
    assert_eq!(sent.len(), handed, "{what}, seed {seed}: frames were not sent");
    assert!(
        sent.iter().map(number).eq(0..u32::try_from(handed).unwrap()),
        "{what}, seed {seed}: sent out of order"
    );
    assert!(driver.has_room());
    (received.len(), handed)
}

#[test]
fn nothing_stands_still() {
    for guarded in [false, true] {
        let (mut received, mut sent) = (0, 0);
        for seed in 1..=SEEDS {
            let (more, handed) = run(seed, guarded);
            received += more;
            sent += handed;
        }
        println!("rtl8139, guarded {guarded}: {received} frames received, {sent} sent");
        assert!(received > 10_000 && sent > 100, "{received} received, {sent} sent");
    }
}

/// The card receives more frames than a poll accepts, and then none: the ring is full, or the peer waits for a response.
/// 8139too has acknowledged ROK with the last frame that it read. It reads ROK before it polls the ring again, so on a bare
/// card it stops polling. The monitor reports ROK until the ring is empty.
#[test]
fn frames_behind_a_full_poll_are_told_of_again() {
    for (guarded, expected) in [(false, BUDGET), (true, 3 * BUDGET + 8)] {
        let mut machine = Machine::new(guarded);
        let mut driver = machine.drive(|ports| {
            let mut driver = Driver::probe(ports, 0);
            driver.start(ports);
            driver
        });
        for _ in 0..3 * BUDGET + 8 {
            assert!(machine.card().receive(&frame(CARD, 0x11, 60)));
        }
        machine.take_causes();
        let mut received = 0;
        for _ in 0..100 {
            if machine.line() {
                machine.drive(|ports| driver.handle(ports));
            }
            received += machine.drive(|ports| driver.poll(ports, BUDGET)).len();
            machine.take_causes();
        }
        assert_eq!(received, expected, "guarded {guarded}");
        assert!(!machine.line(), "nothing is told of an empty ring");
        if !guarded {
            assert!(machine.card().receive(&frame(CARD, 0x11, 60)), "the next frame");
            for _ in 0..100 {
                if machine.line() {
                    machine.drive(|ports| driver.handle(ports));
                }
                received += machine.drive(|ports| driver.poll(ports, BUDGET)).len();
            }
            assert!(received > BUDGET, "brings others");
        }
    }
}
