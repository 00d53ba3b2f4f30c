//! Linux's e1000 driver on a shadow register page, whose causes no read clears. An eventfd only reports that the mask
//! is opened. The mask's closing and the receive tail are deferred writes. The line falls at each end of interrupt, and
//! other devices share it. The thread that harvests the causes runs between any two accesses. No frame stays
//! unprocessed, no link change is lost, and interrupts end.

use crate::support;

use std::collections::VecDeque;

use device_models::Access;
use device_models::devices::e1000::E1000;
use device_models::physical::PhysicalDevice;
use device_models::reference::e1000::E1000Card;
use support::e1000::{Card, Driver};
use support::memory::{Memory, Shared, memory, slots};
use support::{Numbers, Ports, address, config, frame, switch};
use vpio::plan::{Plan, plan};
use vpio::{Answer, FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0x1B, 0x21, 1, 2, 3];
const ID: GuestId = GuestId(0);
const LINK: u32 = 4;

/// Position of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Waits,
    /// Deferred writes were drained; causes weren't harvested.
    HasDrained,
    /// Causes were harvested and shown; deferred writes weren't drained once more.
    HasShown,
}

/// The protocol of `vpio::shown`, and broken variants as negative controls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Care {
    All,
    /// A cause counts as read as soon as the page shows it.
    Hasty,
    /// The first end of interrupt clears all shown causes.
    FirstEnd,
}

struct Machine {
    monitor: Monitor<Card>,
    page: Vec<u8>,
    /// Deferred writes.
    late: VecDeque<Access>,
    /// The eventfd reported a mask; the thread has noticed it.
    told: bool,
    collected: bool,
    /// The line's level at the guest's interrupt controller, and whether the monitor raised it.
    level: bool,
    asserted: bool,
    /// An end of interrupt that the thread hasn't processed.
    lowered: bool,
    step: Step,
    care: Care,
    plan: Plan,
    numbers: Numbers,
    /// No spontaneous events.
    still: bool,
    /// Frames for the driver: stored, lost; whether more come.
    frames: (usize, usize, bool),
    /// Link changes, and the last one that the driver noticed.
    link: (u32, u32),
    exits: u64,
}

impl Machine {
    fn new(seed: u64, care: Care) -> Self {
        let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, Shared::new(vec![memory(0)]), true));
        monitor.add(config(0, FailurePolicy::Stop, &[], slots(0)));
        switch(&mut monitor, ID);
        monitor.show_from_now(ID);
        let mut machine = Self {
            monitor,
            page: vec![0; 4096],
            late: VecDeque::new(),
            told: false,
            collected: false,
            level: false,
            asserted: false,
            lowered: false,
            step: Step::Waits,
            care,
            plan: plan(&E1000),
            numbers: Numbers(seed),
            still: true,
            frames: (0, 0, false),
            link: (0, 0),
            exits: 0,
        };
        machine.show();
        machine
    }

    fn show(&mut self) {
        let page = &mut self.page;
        let mut put = |shown: vpio::shown::Shown| {
            let from = usize::try_from(shown.offset).unwrap();
            let bytes = usize::from(shown.bytes);
            page[from..from + bytes].copy_from_slice(&shown.value.to_le_bytes()[..bytes]);
        };
        self.monitor.show(ID, &mut put).unwrap();
        if self.care == Care::Hasty {
            self.monitor.seen(ID);
        }
    }

    fn make(&mut self, access: Access) -> u32 {
        let Answer::Done(value) = self.monitor.access(ID, access).unwrap() else {
            panic!("{access:?}: {:?}", self.monitor.violations(ID))
        };
        self.show();
        value
    }

    fn drain(&mut self) {
        while let Some(access) = self.late.pop_front() {
            self.make(access);
        }
    }

    fn take_told(&mut self) {
        if std::mem::take(&mut self.collected) {
            self.make(Access { bar: 0, offset: 0xD0, size: 4, write: Some(0x9D) });
        }
    }

    fn drive(&mut self) {
        let wanted = self.monitor.line(ID);
        if wanted && !self.asserted {
            self.level = true;
            self.monitor.raised(ID);
            if self.care == Care::FirstEnd {
                // As if it were shown for the second time.
                self.monitor.lowered(ID);
                self.monitor.raised(ID);
            }
        }
        self.asserted = wanted;
    }

    /// One step of the thread: the guest acts before the next one.
    fn thread(&mut self) {
        match self.step {
            Step::Waits => {
                if self.lowered || self.told || self.monitor.physical().interrupt().unwrap() {
                    // Before deferred writes are drained: earlier writes to the mask are among them.
                    self.collected |= std::mem::take(&mut self.told);
                    self.drain();
                    self.step = Step::HasDrained;
                }
            }
            Step::HasDrained => {
                self.take_told();
                if std::mem::take(&mut self.lowered) {
                    self.asserted = false;
                    self.monitor.lowered(ID);
                }
                self.monitor.interrupt().unwrap();
                self.show();
                self.step = if self.monitor.has_unseen(ID) { Step::HasShown } else { Step::Waits };
                if self.step == Step::Waits {
                    self.drive();
                }
            }
            Step::HasShown => {
                self.drain();
                self.monitor.seen(ID);
                self.step = Step::Waits;
                self.drive();
            }
        }
    }

    /// The guest's end of interrupt, for any device on the line.
    fn end(&mut self) {
        self.level = false;
        self.lowered = true;
    }

    /// Events while the guest does something else.
    fn meanwhile(&mut self) {
        let many = if self.still { 0 } else { self.numbers.next() % 3 };
        for _ in 0..many {
            match self.numbers.next() % 16 {
                0..5 => self.thread(),
                5..9 => {
                    self.monitor.physical().tick();
                    self.monitor.physical().take_sent();
                }
                9..11 if self.frames.2 => {
                    for _ in 0..self.numbers.next() % 4 {
                        let length = if self.numbers.next().is_multiple_of(2) { 60 } else { 1514 };
                        match self.monitor.physical().receive(&frame(address(0), 0x11, length)) {
                            true => self.frames.0 += 1,
                            false => self.frames.1 += 1,
                        }
                    }
                }
                11 if self.frames.2 && self.numbers.next().is_multiple_of(8) => self.change_link(),
                _ => {}
            }
        }
    }

    /// Resets the guest's machine at any point. Its interrupt controller loses the line's state.
    fn power_on(&mut self) {
        self.late.clear();
        (self.told, self.collected, self.lowered, self.level, self.asserted) =
            (false, false, false, false, false);
        self.step = Step::Waits;
        self.monitor.power_on(ID).unwrap();
        self.show();
    }

    fn change_link(&mut self) {
        self.monitor.physical().write(0, 0xC8, 4, LINK).unwrap();
        self.link.0 += 1;
    }

    fn load_page(&self, offset: u32, size: u8) -> u32 {
        let from = usize::try_from(offset).unwrap();
        let mut value = [0; 4];
        value[..usize::from(size)].copy_from_slice(&self.page[from..from + usize::from(size)]);
        u32::from_le_bytes(value)
    }
}

impl Ports for Machine {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        self.meanwhile();
        if offset < 4096 {
            let value = self.load_page(offset, size);
            if offset == 0xC0 && value & LINK != 0 {
                self.link.1 = self.link.0;
            }
            return value;
        }
        self.exits += 1;
        self.drain();
        let value = self.make(Access { bar: 0, offset, size, write: None });
        self.drive();
        value
    }

    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.meanwhile();
        let access = Access { bar: 0, offset, size, write: Some(value) };
        let zones = &mut self.plan.late.iter();
        let late = zones.any(|zone| (zone.offset..zone.offset + zone.length).contains(&offset));
        let told = self.plan.told.iter().any(|told| (told.offset, told.value) == (offset, value));
        if told {
            self.told = true;
        } else if late && self.late.len() < 16 {
            self.late.push_back(access);
        } else {
            self.exits += 1;
            self.drain();
            self.make(access);
            self.drive();
        }
    }
}

impl Memory for Machine {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        self.monitor.physical().bus().load(address, length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.monitor.physical().bus().store(address, data);
    }
}

/// Unfinished work at the end: frames in the ring, sent frames without a report, a link change that the driver didn't
/// notice.
#[derive(Debug, Default, PartialEq, Eq)]
struct Standing {
    frames: usize,
    unnoticed: u32,
    link: bool,
}

#[derive(Debug, Default)]
struct Outcome {
    standing: Standing,
    received: usize,
    sent: u32,
    links: u32,
    interrupts: usize,
    exits: u64,
}

/// Runs the driver. `masks`: its handler masks interrupts, as Linux's does. `shared`: other devices share the line.
fn run(seed: u64, care: Care, masks: bool, shared: bool) -> Outcome {
    let mut machine = Machine::new(seed, care);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    machine.exits = 0;
    machine.still = false;
    let mut outcome = Outcome::default();
    for step in 0..12_000 {
        // Phases of traffic alternate with quiet ones, in which pending frames arrive.
        let busy = step % 200 < 100;
        machine.frames.2 = busy;
        machine.meanwhile();
        if !busy {
            machine.monitor.physical().tick();
            machine.thread();
        }
        match machine.numbers.next() % 4 {
            0 if busy && driver.has_room() => {
                driver.send(&mut machine, &frame([0xFF; 6], 0x22, 300));
                outcome.sent += 1;
            }
            1 | 2 if machine.level || shared && machine.numbers.next().is_multiple_of(16) => {
                outcome.interrupts += 1;
                let ours = if masks { driver.handle(&mut machine) } else { machine.read(0xC0, 4) };
                if ours != 0 && !masks {
                    outcome.received += driver.poll(&mut machine).0.len();
                }
                machine.meanwhile();
                machine.end();
                if ours != 0 && masks {
                    machine.meanwhile();
                    outcome.received += driver.poll(&mut machine).0.len();
                    driver.unmask(&mut machine);
                }
            }
            _ => {}
        }
        outcome.standing = Standing {
            frames: machine.frames.0 - outcome.received,
            unnoticed: driver.unnoticed(),
            link: machine.link.0 != machine.link.1,
        };
        if step % 200 == 199 && (outcome.standing != Standing::default() || machine.level) {
            break;
        }
    }
    assert!(!machine.level || outcome.standing != Standing::default(), "an interrupt for nothing stays");
    (outcome.links, outcome.exits) = (machine.link.0, machine.exits);
    outcome
}

#[test]
fn nothing_stands_still_and_nothing_is_told_for_ever() {
    for (masks, shared) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut all = Outcome::default();
        for seed in 1..=12 {
            let outcome = run(seed, Care::All, masks, shared);
            assert_eq!(outcome.standing, Standing::default(), "seed {seed}, masks {masks}, shared {shared}");
            all.received += outcome.received;
            all.sent += outcome.sent;
            all.links += outcome.links;
            all.interrupts += outcome.interrupts;
            all.exits += outcome.exits;
        }
        println!("e1000 by a page, masks {masks}, shared {shared}: {all:?}");
        assert!(all.received > 3000 && all.sent > 3000 && all.links > 100, "{all:?}");
    }
}

/// Controls: a shown cause isn't a read one, and the first end of interrupt may belong to a handler that read before.
#[test]
fn without_its_care_the_page_loses_causes() {
    for (care, shared) in [(Care::Hasty, false), (Care::FirstEnd, true)] {
        let lost = (1..=40).any(|seed| run(seed, care, true, shared).standing != Standing::default());
        assert!(lost, "{care:?}");
    }
}

/// A frame costs an exit to send, and none to receive.
#[test]
fn frames_cost_an_exit_where_they_are_sent() {
    let mut machine = Machine::new(1, Care::All);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    let settle = |machine: &mut Machine, driver: &mut Driver| {
        let (mut frames, mut sent, mut interrupts) = (0, 0, 0);
        for _ in 0..20 {
            machine.thread();
            if machine.level {
                interrupts += 1;
                let causes = driver.handle(machine);
                machine.end();
                if causes != 0 {
                    let (received, done) = driver.poll(machine);
                    frames += received.len();
                    sent += done;
                    driver.unmask(machine);
                }
            }
        }
        (frames, sent, interrupts)
    };
    settle(&mut machine, &mut driver);
    let before = machine.exits;
    for _ in 0..100 {
        driver.send(&mut machine, &frame([0xFF; 6], 0x22, 100));
        machine.monitor.physical().tick();
        assert_eq!(settle(&mut machine, &mut driver), (0, 1, 1));
    }
    assert_eq!(machine.exits - before, 100);
    for _ in 0..100 {
        assert!(machine.monitor.physical().receive(&frame(address(0), 0x11, 100)));
        assert_eq!(settle(&mut machine, &mut driver), (1, 0, 1));
    }
    assert_eq!(machine.exits - before, 100);
    machine.change_link();
    // Shown twice, noticed at least once.
    assert_eq!((settle(&mut machine, &mut driver), machine.link), ((0, 0, 2), (1, 1)));
    assert_eq!(machine.load_page(0xC0, 4), 0);
}

/// After a machine reset within an interrupt, the next guest gets a change's interrupt twice, as after a normal start.
#[test]
fn a_reset_in_an_interrupt_is_a_new_beginning() {
    let mut machine = Machine::new(1, Care::All);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    machine.change_link();
    (0..4).for_each(|_| machine.thread());
    assert!(machine.level && machine.monitor.is_in_service(ID), "the handler runs, and doesn't end");
    machine.power_on();
    assert!(!machine.monitor.is_in_service(ID) && !machine.monitor.has_unseen(ID));
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    machine.change_link();
    let mut interrupts = 0;
    for _ in 0..20 {
        machine.thread();
        if machine.level {
            interrupts += 1;
            driver.interrupt(&mut machine);
            machine.end();
        }
    }
    assert_eq!((interrupts, machine.link), (2, (2, 2)));
}

/// The page shows what an access returns, after any writes. Causes are the exception: an access clears them.
#[test]
fn the_page_is_what_an_access_gets() {
    let mut machine = Machine::new(1, Care::All);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    machine.still = false;
    let mut compared = 0;
    for step in 0..200 {
        machine.frames.2 = step % 100 < 50;
        if driver.has_room() {
            driver.send(&mut machine, &frame([0xFF; 6], 0x22, 300));
        }
        if machine.level {
            driver.handle(&mut machine);
            machine.end();
            driver.poll(&mut machine);
            driver.unmask(&mut machine);
        }
        let word = step % 128 * 4;
        machine.write(0x5200 + word, 4, 0x1000 + step);
        machine.drain();
        // A write of a register that drivers rarely write makes the monitor read all registers.
        machine.make(Access { bar: 0, offset: 0x28, size: 4, write: Some(step) });
        for (reg, register) in E1000.numbered().filter(|(_, register)| register.read.is_some()) {
            let places = register.offset.into_iter().chain(register.aliases.iter().copied());
            for place in places.filter(|place| *place < 4096) {
                for offset in (place..place + register.span).step_by(4) {
                    let shown = machine.load_page(offset, 4);
                    let access = Access { bar: 0, offset, size: 4, write: None };
                    if reg != E1000.interrupts.status {
                        let asked = machine.monitor.access(ID, access).unwrap();
                        assert_eq!(asked, Answer::Done(shown), "{} in step {step}", register.name);
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}
