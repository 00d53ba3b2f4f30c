//! Memory is unmapped only after the device can no longer use it. A guest whose memory can't be mapped is refused,
//! without effects on others.

use std::collections::BTreeSet;

use crate::support;

use device_models::Access;
use device_models::describe::Device;
use device_models::devices::{e1000::E1000, rtl8139::RTL8139};
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use device_models::reference::{e1000::E1000Card, rtl8139::Rtl8139};
use support::memory::{OnBus, Shared, memory, scratch, slots};
use support::nic::Driver;
use support::{Guest, Timed, config, frame, switch};
use vpio::{Answer, FailurePolicy, GuestId, Monitor};

const CARD: [u8; 6] = [0x00, 0x1B, 0x21, 1, 2, 3];
const ID: GuestId = GuestId(0);

/// A card behind an IOMMU that records mappings, and what was unmapped while an engine could use it.
struct Watched<P> {
    card: P,
    /// Registers that start engines: offset, bytes, bits.
    engines: &'static [(u32, u8, u32)],
    masters: bool,
    mapped: BTreeSet<Mapping>,
    early: Vec<Mapping>,
    /// Number of `map` calls that succeed before a failure, and of further failures after it.
    maps: Option<usize>,
    lasting: bool,
}

impl<P: PhysicalDevice> Watched<P> {
    fn runs(&mut self) -> bool {
        let engines = self.engines;
        self.masters
            && engines
                .iter()
                .any(|&(offset, bytes, bits)| self.card.read(0, offset, bytes).unwrap() & bits != 0)
    }
}

impl<P: PhysicalDevice> PhysicalDevice for Watched<P> {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        self.card.read(bar, offset, size)
    }
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        self.card.write(bar, offset, size, value)
    }
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.card.interrupt()
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.card.reset()
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.masters = on;
        self.card.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        true
    }
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if let Some(left) = &mut self.maps {
            let Some(now) = left.checked_sub(1) else {
                if !self.lasting {
                    self.maps = None;
                }
                let why = format!("{:#x} can't be mapped for it", mapping.guest_base);
                return Err(DeviceError { bar: 0, offset: 0, why });
            };
            *left = now;
        }
        assert!(self.mapped.insert(mapping), "{mapping:?} is mapped twice");
        self.card.map(mapping)
    }
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if self.runs() {
            self.early.push(mapping);
        }
        assert!(self.mapped.remove(&mapping), "{mapping:?} isn't mapped");
        self.card.unmap(mapping)
    }
}

impl<P: Timed> Timed for Watched<P> {
    fn tick(&mut self) {
        self.card.tick();
    }
}

impl<P: OnBus> OnBus for Watched<P> {
    fn bus(&mut self) -> &mut Shared {
        self.card.bus()
    }
}

fn monitor<P: PhysicalDevice + Timed>(
    device: &'static Device,
    card: P,
    engines: &'static [(u32, u8, u32)],
    policy: FailurePolicy,
) -> Monitor<Watched<P>> {
    let card = Watched {
        card,
        engines,
        masters: false,
        mapped: BTreeSet::new(),
        early: Vec::new(),
        maps: None,
        lasting: false,
    };
    let mut monitor = Monitor::new(device, card);
    monitor.set_scratch(Box::new(Shared::default()));
    monitor.add(config(0, policy, &[], slots(0)));
    monitor.add(config(1, policy, &[], slots(1)));
    switch(&mut monitor, ID);
    monitor
}

fn e1000(policy: FailurePolicy) -> Monitor<Watched<E1000Card<Shared>>> {
    let bus = Shared::new(vec![memory(0), memory(1)]);
    monitor(&E1000, E1000Card::new(CARD, bus, true), &[(0x100, 4, 2), (0x400, 4, 2)], policy)
}

fn rtl8139(policy: FailurePolicy) -> Monitor<Watched<Rtl8139<Shared>>> {
    let bus = Shared::new(vec![memory(0), memory(1), scratch()]);
    monitor(&RTL8139, Rtl8139::new(CARD, bus, true), &[(0x37, 1, 0x0C)], policy)
}

/// A guest resets its device in flight, a guest's machine is reset, and a guest loses the device to another one. Each
/// time the device is stopped before guest memory is unmapped.
fn resets<P: PhysicalDevice + Timed + OnBus>(
    mut monitor: Monitor<Watched<P>>,
    device: &'static Device,
    reset: (u32, u8, u32),
) {
    let starts = |monitor: &mut Monitor<Watched<P>>| {
        let mut driver = Driver::probe(device, &mut Guest::new(monitor, ID), 0);
        driver.start(&mut Guest::new(monitor, ID));
        driver.send(&mut Guest::new(monitor, ID), &frame([0xFF; 6], 1, 100));
        assert!(monitor.physical().runs() && !monitor.physical().mapped.is_empty());
    };
    let looks = |monitor: &mut Monitor<Watched<P>>, how: &str| {
        assert_eq!(monitor.physical().early, [], "{}: unmapped while it runs, {how}", device.name);
        assert!(monitor.physical().mapped.is_empty(), "{}: nothing stays mapped, {how}", device.name);
    };
    starts(&mut monitor);
    let (offset, size, value) = reset;
    monitor.access(ID, Access { bar: 0, offset, size, write: Some(value) }).unwrap();
    looks(&mut monitor, "by its guest's reset");
    starts(&mut monitor);
    monitor.power_on(ID).unwrap();
    looks(&mut monitor, "by its machine's reset");
    starts(&mut monitor);
    monitor.switch(GuestId(1), true).unwrap();
    looks(&mut monitor, "by a hand-off");
    switch(&mut monitor, ID);
    starts(&mut monitor);
    monitor.abandon();
    monitor.recover().unwrap();
    looks(&mut monitor, "by its failure");
    assert_eq!(monitor.resident(), None);
}

#[test]
fn a_device_is_stopped_before_its_windows_are_unmapped() {
    resets(e1000(FailurePolicy::Stop), &E1000, (0, 4, 1 << 26));
    resets(rtl8139(FailurePolicy::Stop), &RTL8139, (0x37, 1, 0x10));
}

/// If any page of a window can't be mapped, the guest's request is refused. The earlier mappings remain, and no others.
/// The device can go to the other guest.
#[test]
fn memory_that_cannot_be_mapped_is_a_refusal_of_its_guest() {
    let mut refused = 0;
    for maps in 0..12 {
        let mut monitor = rtl8139(FailurePolicy::Ignore);
        let mut driver = Driver::probe(&RTL8139, &mut Guest::new(&mut monitor, ID), 0);
        monitor.physical().maps = Some(maps);
        driver.start(&mut Guest::new(&mut monitor, ID));
        let before = monitor.counters(ID).refused;
        refused += before;
        monitor.physical().maps = None;
        let pages = u64::try_from(monitor.physical().mapped.len()).unwrap();
        assert_eq!(monitor.mapped().0, pages * 4096, "what is counted is what is mapped");
        monitor.release().unwrap();
        assert!(monitor.physical().mapped.is_empty(), "{:?}", monitor.physical().mapped);
        switch(&mut monitor, GuestId(1));
        let mut other = Driver::probe(&RTL8139, &mut Guest::new(&mut monitor, GuestId(1)), 1);
        other.start(&mut Guest::new(&mut monitor, GuestId(1)));
        other.send(&mut Guest::new(&mut monitor, GuestId(1)), &frame([0xFF; 6], 1, 100));
        assert_eq!(monitor.counters(GuestId(1)).refused, 0);
    }
    assert!(refused > 0, "none was refused");
    // All of the guest's memory.
    let mut monitor = e1000(FailurePolicy::Stop);
    Driver::probe(&E1000, &mut Guest::new(&mut monitor, ID), 0);
    monitor.physical().maps = Some(1);
    for (offset, value) in [(0x2808, 0x1000), (0x2800, u32::try_from(memory(0).start).unwrap())] {
        monitor.access(ID, Access { bar: 0, offset, size: 4, write: Some(value) }).unwrap();
    }
    let answer = monitor.access(ID, Access { bar: 0, offset: 0x100, size: 4, write: Some(2) });
    assert_eq!(answer, Ok(Answer::Stopped));
    let why = &monitor.violations(ID)[0].refusal.why;
    assert!(why.contains("can't be mapped"), "{why}");
    assert!(monitor.physical().mapped.is_empty(), "{:?}", monitor.physical().mapped);
}

/// If an earlier mapping can't be restored, the device has failed. After its reset nothing is mapped, and both guests
/// can use it again.
#[test]
fn a_device_whose_memory_cannot_be_restored_begins_anew() {
    let mut monitor = e1000(FailurePolicy::Ignore);
    Driver::probe(&E1000, &mut Guest::new(&mut monitor, ID), 0);
    for (offset, value) in [(0x2808, 0x1000), (0x2800, u32::try_from(memory(0).start).unwrap())] {
        monitor.access(ID, Access { bar: 0, offset, size: 4, write: Some(value) }).unwrap();
    }
    (monitor.physical().maps, monitor.physical().lasting) = (Some(1), true);
    let failed = monitor.access(ID, Access { bar: 0, offset: 0x100, size: 4, write: Some(2) });
    assert!(failed.is_err(), "{failed:?}");
    (monitor.physical().maps, monitor.physical().lasting) = (None, false);
    monitor.abandon();
    monitor.recover().unwrap();
    assert_eq!((monitor.resident(), monitor.mapped().0), (None, 0));
    assert!(monitor.physical().mapped.is_empty(), "{:?}", monitor.physical().mapped);
    for (id, number) in [(ID, 0), (GuestId(1), 1)] {
        switch(&mut monitor, id);
        let mut driver = Driver::probe(&E1000, &mut Guest::new(&mut monitor, id), number);
        driver.start(&mut Guest::new(&mut monitor, id));
        driver.send(&mut Guest::new(&mut monitor, id), &frame([0xFF; 6], number, 100));
        monitor.physical().tick();
        assert_eq!(monitor.physical().card.take_sent().len(), 1);
    }
}
