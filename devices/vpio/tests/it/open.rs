//! A card changes between model and passthrough (`vpio::open`) many times under a driver's traffic. No frame is lost,
//! repeated or reordered, and the card reaches the right memory. A guest whose state the model doesn't permit stays in
//! passthrough.

use crate::support;

use device_models::Access;
use device_models::describe::Device;
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::PhysicalDevice;
use device_models::reference::Card;
use device_models::reference::{e1000::E1000Card, ne2000::Ne2000, rtl8139::Rtl8139};
use support::memory::{MEMORY, Memory, Shared, memory, scratch, slots};
use support::nic::Driver;
use support::{Numbers, Ports, address, config, frame};
use vpio::{Answer, FailurePolicy, GuestId, Monitor, Passed};

/// The guest has the card's own address, which it could read without the model.
const CARD: [u8; 6] = address(0);
const GUEST: GuestId = GuestId(0);

type Boxed = Box<dyn Card + Send>;

/// A card, and the state that it shares with the driver.
struct Table {
    monitor: Monitor<Held>,
    ram: Shared,
    /// Decides before each access of the driver whether the mode changes.
    numbers: Option<Numbers>,
    opened: u32,
    closed: u32,
    busy: u32,
}

/// A reference card of any kind. Its IOMMU refuses mappings that contain the given address.
struct Held(Boxed, Option<u64>);

impl PhysicalDevice for Held {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, device_models::physical::DeviceError> {
        self.0.read(bar, offset, size)
    }
    fn write(
        &mut self,
        bar: u8,
        offset: u32,
        size: u8,
        value: u32,
    ) -> Result<(), device_models::physical::DeviceError> {
        self.0.write(bar, offset, size, value)
    }
    fn interrupt(&mut self) -> Result<bool, device_models::physical::DeviceError> {
        self.0.interrupt()
    }
    fn reset(&mut self) -> Result<(), device_models::physical::DeviceError> {
        self.0.reset()
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), device_models::physical::DeviceError> {
        self.0.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        self.0.has_iommu()
    }
    fn map(
        &mut self,
        mapping: device_models::physical::Mapping,
    ) -> Result<(), device_models::physical::DeviceError> {
        if self.1.is_some_and(|most| mapping.length > most) {
            let why = "too much of it is pinned".to_owned();
            return Err(device_models::physical::DeviceError { bar: 0, offset: 0, why });
        }
        self.0.map(mapping)
    }
    fn unmap(
        &mut self,
        mapping: device_models::physical::Mapping,
    ) -> Result<(), device_models::physical::DeviceError> {
        self.0.unmap(mapping)
    }
}

impl Table {
    fn new(device: &'static Device, seed: Option<u64>) -> Self {
        let ram = Shared::new(vec![scratch(), memory(0)]);
        let card: Boxed = match device.name {
            "rtl8139" => Box::new(Rtl8139::new(CARD, ram.clone(), true)),
            "e1000" => Box::new(E1000Card::new(CARD, ram.clone(), true)),
            _ => Box::new(Ne2000::new(CARD)),
        };
        let mut monitor = Monitor::new(device, Held(card, None));
        if device.context.pointers.is_some() {
            monitor.set_scratch(Box::new(ram.clone()));
        }
        monitor.add(config(0, FailurePolicy::DeviceError, &[], slots(0)));
        monitor.switch(GUEST, false).unwrap();
        Self { monitor, ram, numbers: seed.map(Numbers), opened: 0, closed: 0, busy: 0 }
    }

    fn tick(&mut self) {
        self.monitor.physical().0.tick();
        self.monitor.interrupt().unwrap();
    }

    /// Changes the mode if possible.
    fn change(&mut self) {
        let open = self.monitor.is_open();
        let passed = if open { self.monitor.close() } else { self.monitor.open() };
        match passed.unwrap() {
            Passed::Done if open => self.closed += 1,
            Passed::Done => self.opened += 1,
            Passed::Busy => self.busy += 1,
            other => panic!("{other:?}"),
        }
    }

    fn access(&mut self, access: Access) -> u32 {
        if let Some(numbers) = &mut self.numbers
            && numbers.next().is_multiple_of(7)
        {
            self.change();
        }
        if self.monitor.is_open() && self.monitor.is_watched() {
            return self.monitor.watched(GUEST, access).unwrap();
        }
        if self.monitor.is_open() {
            // The guest accesses the card's registers directly.
            let card = self.monitor.physical();
            return match access.write {
                Some(value) => card.write(access.bar, access.offset, access.size, value).map(|()| 0),
                None => card.read(access.bar, access.offset, access.size),
            }
            .unwrap();
        }
        match self.monitor.access(GUEST, access).unwrap() {
            Answer::Done(value) => value,
            other => panic!("{access:?}: {other:?}"),
        }
    }
}

impl Ports for Table {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        self.access(Access { bar: 0, offset, size, write: None })
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.access(Access { bar: 0, offset, size, write: Some(value) });
    }
}

impl Memory for Table {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        self.ram.load(address, length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.ram.store(address, data);
    }
}

/// Starts a driver without mode changes. Later, every access may be preceded by one.
fn started(device: &'static Device, seed: u64) -> (Table, Driver) {
    let mut table = Table::new(device, None);
    let mut driver = Driver::probe(device, &mut table, 0);
    assert_eq!(driver.address(), address(0));
    driver.start(&mut table);
    table.numbers = Some(Numbers(seed));
    (table, driver)
}

/// Sends and receives frames of various lengths, through many rounds of rings and descriptors, with mode changes before
/// any access. A frame that arrived during a change would be lost, as in a hand-off. None arrives then here, so none
/// may be lost.
fn traffic(device: &'static Device, seed: u64) -> (u32, u32, u32) {
    let (mut table, mut driver) = started(device, seed);
    for round in 0..150u16 {
        let length = 60 + usize::from(round) * 37 % 1455;
        let mark = round.to_le_bytes()[0];
        let out = frame([0xFF; 6], mark, length);
        driver.send(&mut table, &out);
        let into = frame(address(0), mark, length);
        assert!(table.monitor.physical().0.receive(&into), "round {round}");
        let (mut frames, mut sent) = (Vec::new(), 0);
        for _ in 0..20 {
            table.tick();
            let (more, count, error) = driver.interrupt(&mut table);
            assert!(!error, "{}, seed {seed}, round {round}", device.name);
            frames.extend(more);
            sent += count;
            if (frames.len(), sent) == (1, 1) {
                break;
            }
        }
        assert_eq!((frames, sent), (vec![into], 1), "{}, seed {seed}, round {round}", device.name);
        let wire: Vec<Vec<u8>> = table.monitor.physical().0.take_sent();
        assert_eq!(wire.len(), 1, "{}, seed {seed}, round {round}", device.name);
        assert_eq!(wire[0][..length], out, "{}, seed {seed}, round {round}", device.name);
    }
    let counters = table.monitor.counters(GUEST);
    assert_eq!((counters.refused, counters.disbelieved), (0, 0), "{:?}", table.monitor.violations(GUEST));
    assert_eq!(table.ram.log().1, 0, "nothing outside of the guest's memory");
    (table.opened, table.closed, table.busy)
}

#[test]
fn a_driver_sees_nothing_of_the_model_coming_and_going() {
    for device in [&RTL8139, &E1000, &NE2000] {
        for seed in 1..=4 {
            let (opened, closed, busy) = traffic(device, seed);
            println!("{}, seed {seed}: opened {opened}, closed {closed}, not then {busy}", device.name);
            assert!(opened > 20 && closed >= opened - 1, "{}: {opened} {closed} {busy}", device.name);
        }
    }
}

/// The card reaches all of the guest's memory without its model, validated windows with it, and nothing after its
/// release.
#[test]
fn the_card_reaches_what_its_side_may() {
    let whole = MEMORY.end - MEMORY.start;
    for (device, pages, all) in [(&RTL8139, 48 << 10..64 << 10, whole), (&NE2000, 0..1, 0)] {
        let (mut table, _driver) = started(device, 1);
        table.numbers = None;
        for _ in 0..3 {
            assert!(
                pages.contains(&table.monitor.mapped().0),
                "{}: {:?}",
                device.name,
                table.monitor.mapped()
            );
            table.change();
            assert!(table.monitor.is_open() && table.monitor.mapped().0 == all);
            assert!(!table.monitor.line(GUEST), "its line is the card's own");
            table.change();
            assert!(!table.monitor.is_open());
        }
        table.monitor.release().unwrap();
        assert_eq!(table.monitor.mapped().0, 0);
    }
}

/// A guest in passthrough whose machine is reset finds the card as after power-on, still in passthrough.
#[test]
fn a_reset_leaves_the_card_with_its_guest() {
    for device in [&RTL8139, &E1000, &NE2000] {
        let (mut table, _driver) = started(device, 1);
        table.numbers = None;
        table.change();
        table.monitor.power_on(GUEST).unwrap();
        assert!(table.monitor.is_open());
        let mut driver = Driver::probe(device, &mut table, 0);
        driver.start(&mut table);
        driver.send(&mut table, &frame([0xFF; 6], 7, 100));
        table.tick();
        assert_eq!(driver.interrupt(&mut table).1, 1, "{}", device.name);
        table.change();
        assert!(!table.monitor.is_open(), "and can be taken under its model");
        assert!(table.monitor.physical().0.receive(&frame(address(0), 8, 100)));
        table.tick();
        assert_eq!(driver.interrupt(&mut table).0.len(), 1, "{}", device.name);
    }
}

/// A guest in promiscuous mode, which its model doesn't permit, stays in passthrough and continues. The result names
/// the register.
#[test]
fn what_the_model_does_not_allow_keeps_it_away() {
    for (device, register, offset, size, value) in [
        (&RTL8139, "RCR", 0x44, 4, 0xF78B_u32),
        (&E1000, "RCTL", 0x100, 4, 1 << 26 | 1 << 15 | 2 | 8),
        (&NE2000, "RCR", 0x0C, 1, 0x14),
    ] {
        let (mut table, mut driver) = started(device, 1);
        table.numbers = None;
        table.change();
        table.write(offset, size, value);
        for _ in 0..2 {
            match table.monitor.close().unwrap() {
                Passed::Refused(refusal) => assert_eq!(refusal.register, register, "{refusal}"),
                other => panic!("{}: {other:?}", device.name),
            }
            assert!(table.monitor.is_open());
            assert_eq!(table.monitor.counters(GUEST).refused, 0, "nobody was stopped for it");
        }
        driver.send(&mut table, &frame([0xFF; 6], 7, 100));
        table.tick();
        assert_eq!(driver.interrupt(&mut table).1, 1, "{}", device.name);
    }
}

/// If memory can't be mapped, the guest stays under its model and loses no frame.
#[test]
fn memory_that_can_not_be_mapped_leaves_the_model() {
    let (mut table, mut driver) = started(&RTL8139, 1);
    table.numbers = None;
    table.monitor.physical().1 = Some(0x2_0000);
    let before = table.monitor.mapped().0;
    match table.monitor.open().unwrap() {
        Passed::NotMapped(error) => assert!(error.to_string().contains("pinned"), "{error}"),
        other => panic!("{other:?}"),
    }
    assert!(!table.monitor.is_open() && table.monitor.mapped().0 == before);
    driver.send(&mut table, &frame([0xFF; 6], 7, 100));
    assert!(table.monitor.physical().0.receive(&frame(address(0), 8, 100)));
    table.tick();
    let (frames, sent, error) = driver.interrupt(&mut table);
    assert_eq!((frames.len(), sent, error), (1, 1, false));
    table.monitor.physical().1 = None;
    table.change();
    assert!(table.monitor.is_open(), "and can be tried again");
}
