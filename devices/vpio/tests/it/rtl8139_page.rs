//! Linux's 8139too on a shadow register page. Acknowledgements are deferred writes, and an eventfd reports a mask. The
//! line falls at each end of interrupt. The thread that harvests the causes runs between any two accesses. No frame
//! stays unprocessed, and the driver notices each sent frame.

use crate::support;

use std::collections::VecDeque;

use device_models::Access;
use device_models::devices::rtl8139::RTL8139;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use device_models::reference::rtl8139::Rtl8139;
use support::memory::{MEMORY, Memory, Shared, at, memory, scratch, slots};
use support::rtl8139::{Card, Driver};
use support::{Numbers, Ports, Timed, address, config, frame, switch};
use vpio::plan::{Plan, plan};
use vpio::{Answer, FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = address(0);
const ID: GuestId = GuestId(0);
const BUDGET: usize = 64;

/// A card that sends one frame per tick.
struct Slow {
    card: Card,
    /// Descriptors that were handed over, and the values written to them.
    held: VecDeque<(u8, u32, u32)>,
}

impl Slow {
    fn tick(&mut self) {
        if let Some((bar, offset, value)) = self.held.pop_front() {
            self.card.write(bar, offset, 4, value).unwrap();
            self.card.tick();
        }
    }
}

impl Timed for Slow {
    fn tick(&mut self) {
        Slow::tick(self);
    }
}

impl PhysicalDevice for Slow {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        match self.held.iter().find(|(_, held, _)| *held == offset) {
            Some((.., value)) => Ok(*value),
            None => self.card.read(bar, offset, size),
        }
    }
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        if (0x10..0x20).contains(&offset) && value & 0x2000 == 0 {
            self.held.push_back((bar, offset, value));
            return Ok(());
        }
        self.card.write(bar, offset, size, value)
    }
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.card.interrupt()
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.held.clear();
        self.card.reset()
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.card.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        self.card.has_iommu()
    }
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.card.map(mapping)
    }
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.card.unmap(mapping)
    }
}

/// Position of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Waits,
    /// Deferred writes were drained; causes weren't harvested.
    HasDrained,
    /// Causes were harvested and shown; deferred writes weren't drained once more.
    HasShown,
}

struct Machine {
    monitor: Monitor<Slow>,
    page: [u8; 256],
    /// Deferred writes.
    late: VecDeque<Access>,
    /// The eventfd reported a mask.
    told: bool,
    /// The line's level at the guest's interrupt controller, and whether the monitor raised it.
    line: bool,
    asserted: bool,
    /// An end of interrupt that the thread hasn't processed.
    lowered: bool,
    step: Step,
    /// Acknowledgements leave causes that the guest can't have read.
    careful: bool,
    plan: Plan,
    numbers: Numbers,
    /// No spontaneous events.
    still: bool,
    /// Frames for the driver: stored, lost; whether more come.
    frames: (usize, usize, bool),
    sent: usize,
}

impl Machine {
    fn new(seed: u64, careful: bool) -> Self {
        let ram = Shared::new(vec![at(0)..at(0) + MEMORY.end - MEMORY.start, scratch()]);
        let mut monitor = Monitor::new(
            &RTL8139,
            Slow { card: Rtl8139::new(CARD, ram.clone(), false), held: VecDeque::new() },
        );
        monitor.set_scratch(Box::new(ram));
        monitor.add(config(0, FailurePolicy::DeviceError, &[], slots(0)));
        switch(&mut monitor, ID);
        monitor.show_from_now(ID);
        let mut machine = Self {
            monitor,
            page: [0; 256],
            late: VecDeque::new(),
            told: false,
            line: false,
            asserted: false,
            lowered: false,
            step: Step::Waits,
            careful,
            plan: plan(&RTL8139),
            numbers: Numbers(seed),
            still: false,
            frames: (0, 0, false),
            sent: 0,
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
        if !self.careful {
            self.monitor.seen(ID);
        }
    }

    fn make(&mut self, access: Access) {
        assert_eq!(self.monitor.access(ID, access).unwrap(), Answer::Done(0));
        self.show();
    }

    fn drain(&mut self) {
        while let Some(access) = self.late.pop_front() {
            self.make(access);
        }
    }

    fn take_told(&mut self) {
        if std::mem::take(&mut self.told) {
            self.make(Access { bar: 1, offset: 0x3C, size: 2, write: Some(0xC02E) });
        }
    }

    fn drive(&mut self) {
        let wanted = self.monitor.line(ID);
        self.line |= wanted && !self.asserted;
        self.asserted = wanted;
    }

    /// One step of the thread: the guest acts before the next one.
    fn thread(&mut self) {
        match self.step {
            Step::Waits => {
                if self.lowered || self.monitor.physical().interrupt().unwrap() {
                    self.drain();
                    self.step = Step::HasDrained;
                }
            }
            Step::HasDrained => {
                self.take_told();
                if std::mem::take(&mut self.lowered) {
                    self.asserted = false;
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

    /// Events while the guest does something else.
    fn meanwhile(&mut self) {
        let many = if self.still { 0 } else { self.numbers.next() % 3 };
        for _ in 0..many {
            match self.numbers.next() % 16 {
                0..4 => self.thread(),
                4..8 => {
                    self.monitor.physical().tick();
                    self.sent += self.monitor.physical().card.take_sent().len();
                }
                8..10 if self.frames.2 => {
                    for _ in 0..self.numbers.next() % 4 {
                        let length = if self.numbers.next().is_multiple_of(2) { 60 } else { 1514 };
                        match self.monitor.physical().card.receive(&frame(CARD, 0x11, length)) {
                            true => self.frames.0 += 1,
                            false => self.frames.1 += 1,
                        }
                    }
                }
                _ => {}
            }
        }
    }
}

impl Ports for Machine {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        self.meanwhile();
        let from = usize::try_from(offset).unwrap();
        let mut value = [0; 4];
        value[..usize::from(size)].copy_from_slice(&self.page[from..from + usize::from(size)]);
        u32::from_le_bytes(value)
    }

    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.meanwhile();
        let access = Access { bar: 1, offset, size, write: Some(value) };
        let late = self
            .plan
            .late
            .iter()
            .any(|zone| zone.bar == 1 && (zone.offset..zone.offset + zone.length).contains(&offset));
        let told = self.plan.told.iter().any(|told| (told.offset, told.value) == (offset, value));
        if told {
            self.told = true;
        } else if late && self.late.len() < 16 {
            self.late.push_back(access);
        } else {
            self.drain();
            self.take_told();
            self.make(access);
            self.drive();
        }
    }
}

impl Memory for Machine {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        self.monitor.physical().card.bus().load(address - memory(0).start + at(0), length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.monitor.physical().card.bus().store(address - memory(0).start + at(0), data);
    }
}

/// Unfinished work at the end: frames in the ring, and sent frames that weren't returned to the driver.
struct Outcome {
    standing: usize,
    unnoticed: u32,
    received: usize,
    handed: usize,
    lost: usize,
}

fn run(seed: u64, careful: bool) -> Outcome {
    let mut machine = Machine::new(seed, careful);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    let (mut received, mut handed) = (0, 0);
    for step in 0..12_000 {
        // Phases of traffic alternate with quiet ones, in which pending frames arrive.
        let busy = step % 120 < 60;
        machine.frames.2 = busy;
        machine.meanwhile();
        match machine.numbers.next() % 4 {
            0 if busy && driver.has_room() => {
                driver.send(&mut machine, &frame([0xFF; 6], 0x22, 1514));
                handed += 1;
            }
            1 | 2 if machine.line => {
                driver.handle(&mut machine);
                machine.meanwhile();
                // The end of interrupt.
                machine.line = false;
                machine.lowered = true;
            }
            _ => received += driver.poll(&mut machine, BUDGET).len(),
        }
        if step % 120 == 119 && (machine.frames.0 > received || driver.unnoticed() > 0) {
            break;
        }
    }
    Outcome {
        standing: machine.frames.0 - received,
        unnoticed: driver.unnoticed(),
        received,
        handed,
        lost: machine.frames.1,
    }
}

#[test]
fn nothing_stands_still() {
    let (mut received, mut handed, mut lost) = (0, 0, 0);
    for seed in 1..=16 {
        let outcome = run(seed, true);
        assert_eq!((outcome.standing, outcome.unnoticed), (0, 0), "seed {seed}");
        received += outcome.received;
        handed += outcome.handed;
        lost += outcome.lost;
    }
    println!("rtl8139 by a page: {received} frames received, {lost} lost before, {handed} sent");
    assert!(received > 10_000 && handed > 1000, "{received} received, {handed} sent");
}

/// The driver acknowledges a sent frame. Before the monitor has drained this write, the card reports the next frame,
/// which the driver polled for too early. The control lets an acknowledgement clear a younger cause: the driver then
/// misses that frame.
#[test]
fn a_cause_that_was_not_read_is_not_acknowledged() {
    for (careful, unnoticed) in [(true, 0), (false, 1)] {
        let mut machine = Machine::new(1, careful);
        machine.still = true;
        let mut driver = Driver::probe(&mut machine, 0);
        driver.start(&mut machine);
        let out = frame([0xFF; 6], 0x22, 100);
        driver.send(&mut machine, &out);
        machine.monitor.physical().tick();
        for _ in 0..3 {
            machine.thread();
        }
        assert!(machine.line, "the first frame was sent");
        driver.send(&mut machine, &out);
        machine.monitor.physical().tick();
        machine.thread();
        assert_eq!(machine.step, Step::HasDrained);
        driver.handle(&mut machine);
        assert_eq!(driver.unnoticed(), 1, "the page doesn't show the second yet");
        machine.thread();
        machine.line = false;
        machine.lowered = true;
        for _ in 0..20 {
            machine.thread();
            if std::mem::take(&mut machine.line) {
                driver.handle(&mut machine);
                machine.lowered = true;
            }
        }
        assert_eq!(driver.unnoticed(), unnoticed, "careful {careful}");
    }
}

/// The page shows what an access would have returned, after any writes.
#[test]
fn the_page_is_what_an_access_gets() {
    let mut machine = Machine::new(1, true);
    let mut driver = Driver::probe(&mut machine, 0);
    driver.start(&mut machine);
    let mut compared = 0;
    for step in 0..400 {
        machine.frames.2 = step % 100 < 50;
        if driver.has_room() {
            driver.send(&mut machine, &frame([0xFF; 6], 0x22, 300));
        }
        if machine.line {
            driver.handle(&mut machine);
            machine.line = false;
            machine.lowered = true;
        }
        driver.poll(&mut machine, 8);
        machine.drain();
        machine.take_told();
        for _ in 0..4 {
            machine.thread();
        }
        machine.make(Access { bar: 1, offset: 0x38, size: 2, write: Some(machine.read_page(0x38, 2)) });
        for (_, register) in RTL8139.numbered().filter(|(_, register)| register.read.is_some()) {
            let (Some(offset), size) = (register.offset, register.width) else { continue };
            let shown = machine.read_page(offset, size);
            let access = Access { bar: 1, offset, size, write: None };
            let asked = machine.monitor.access(ID, access).unwrap();
            // Timer and missed frames count by themselves, and drivers don't poll them.
            if !matches!(register.name, "TCTR" | "MPC" | "CBR" | "ERBCR" | "ERSR") {
                assert_eq!(asked, Answer::Done(shown), "{} in step {step}", register.name);
                compared += 1;
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

impl Machine {
    fn read_page(&self, offset: u32, size: u8) -> u32 {
        (0..u32::from(size)).fold(0, |value, at| {
            value | u32::from(self.page[usize::try_from(offset + at).unwrap()]) << (8 * at)
        })
    }
}
