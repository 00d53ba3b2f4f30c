//! A shared card and its guests on one bus, with or without an IOMMU.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use device_models::describe::{Device, Direction};
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference::{Card, card};
use vpio::sharing::{SharedCard, own_bytes};
use vpio::{FailurePolicy, GuestConfig, GuestId, MemoryMap, Monitor, Slot, Slots, Switched};

use super::memory::{OnBus, SCRATCH, Shared, at, memory, pages, slots};
use super::nic::Driver;
use super::{Guest, Timed, address, config};

pub const STATION: [u8; 6] = [0x00, 0xE0, 0x4C, 1, 2, 3];
pub const OUTSIDE: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x99];

/// A card, and whether it is behind an IOMMU.
pub type Which = (&'static Device, bool);
/// Cards that VMs can share. An NE2000 does no DMA.
pub const SHARED: [Which; 4] = [(&RTL8139, true), (&E1000, true), (&NE2000, true), (&E1000, false)];
/// Those with DMA.
pub const MASTERS: [Which; 3] = [(&RTL8139, true), (&E1000, true), (&E1000, false)];

const PAGE: u64 = 0x1000;
/// An e1000's TDT and CTRL, and CTRL's reset bit.
const TAIL: u32 = 0x3818;
const RST: u32 = 1 << 26;

/// Memory of guest `number` in regions of one to five pages. They are adjacent for the guest. For a device without an
/// IOMMU they are in reverse order, and memory that isn't the guest's lies between any two.
pub fn scattered(number: u8) -> Slots {
    let all = memory(number);
    let (mut slots, mut from) = (Vec::new(), all.start);
    for pages in [1, 2, 3, 5].into_iter().cycle() {
        let length = (pages * PAGE).min(all.end - from);
        if length == 0 {
            break;
        }
        slots.push(Slot { guest_base: from, length, device_base: 0, writable: true });
        from += length;
    }
    for (place, slot) in (0..).zip(slots.iter_mut().rev()) {
        slot.device_base = at(number) + place * 8 * PAGE;
    }
    Slots(slots)
}

/// Scattered memory that its owner describes as one region. Memory that is contiguous for the guest needn't be so for
/// the card.
struct OneRegion(Slots);

impl MemoryMap for OneRegion {
    fn dma(&self, base: u64, length: u64, direction: Direction) -> Option<u64> {
        self.0.dma(base, length, direction)
    }
    fn all(&self) -> Vec<(u64, u64, bool)> {
        vec![(self.0.0[0].guest_base, self.0.0.iter().map(|slot| slot.length).sum(), true)]
    }
}

/// The memory that the card reaches: IOMMU mappings, or all memory.
#[derive(Clone)]
struct Reach {
    ram: Shared,
    maps: Option<Arc<Mutex<Vec<Mapping>>>>,
    own: u64,
}

impl Reach {
    /// Behind an IOMMU the reference card accesses mapped addresses only.
    fn place(&self, address: u64) -> u64 {
        let Some(maps) = &self.maps else { return address };
        let maps = maps.lock().unwrap();
        let of = maps.iter().find(|map| (map.device_base..map.device_base + map.length).contains(&address));
        let of = of.expect("it is mapped");
        address - of.device_base + of.guest_base
    }
}

impl Bus for Reach {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        if self.maps.is_none() {
            return Bus::read(&mut self.ram, address, into);
        }
        for (at, byte) in (address..).zip(into) {
            let place = self.place(at);
            Bus::read(&mut self.ram, place, std::slice::from_mut(byte));
        }
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        for (at, byte) in (address..).zip(data) {
            let place = self.place(at);
            // A shared card writes only its owner's rings and buffers.
            if (SCRATCH..SCRATCH + self.own).contains(&place) {
                Bus::write(&mut self.ram, place, std::slice::from_ref(byte));
            } else {
                self.ram.stray(1);
            }
        }
    }
}

/// The effect of a card's reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resets {
    Work,
    /// The reset has no effect.
    Ignored,
    /// The card is unreachable.
    Fail,
}

/// A reference card on its bus.
pub struct Behind {
    pub card: Box<dyn Card + Send>,
    bus: Reach,
    /// Guests' memory on the bus.
    slots: [Slots; 2],
    /// The new tail of an e1000 that handles transmit frames only later ([`Self::hear`]), unless it is reset before.
    pub slow: bool,
    held: Option<u32>,
    /// The effect of a reset.
    pub resets: Resets,
}

impl Behind {
    /// Lets the card handle the frames.
    pub fn hear(&mut self) {
        self.slow = false;
        if let Some(tail) = self.held.take() {
            self.card.write(0, TAIL, 4, tail).unwrap();
        }
        self.card.tick();
    }
}

impl PhysicalDevice for Behind {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        self.card.read(bar, offset, size)
    }
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        if self.slow && offset == TAIL {
            if self.resets != Resets::Ignored || value != 0 {
                self.held = Some(value);
            }
            return Ok(());
        }
        if offset == 0 && value & RST != 0 {
            if self.resets == Resets::Ignored {
                return Ok(());
            }
            self.held = None;
        }
        self.card.write(bar, offset, size, value)
    }
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.card.interrupt()
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        match self.resets {
            Resets::Work => {
                self.held = None;
                self.card.reset()
            }
            Resets::Ignored => Ok(()),
            Resets::Fail => Err(DeviceError { bar: 0, offset: 0, why: "it doesn't answer".to_owned() }),
        }
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.card.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        self.bus.maps.is_some()
    }
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if let Some(maps) = &self.bus.maps {
            maps.lock().unwrap().push(mapping);
        }
        // Fails without an IOMMU.
        self.card.map(mapping)
    }
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if let Some(maps) = &self.bus.maps {
            maps.lock().unwrap().retain(|known| *known != mapping);
        }
        self.card.unmap(mapping)
    }
}

/// A guest's memory by guest-physical addresses, as the card's owner accesses it.
#[derive(Clone)]
pub struct View {
    ram: Shared,
    slots: Slots,
}

impl View {
    /// Returns a byte's bus address.
    pub fn place(&self, address: u64) -> Option<u64> {
        self.slots.dma(address, 1, Direction::DeviceReads)
    }

    fn each(&mut self, address: u64, length: usize, mut act: impl FnMut(&mut Shared, u64, Range<usize>)) {
        let mut done = 0;
        for (at, length) in pages(address, length) {
            match self.place(at) {
                Some(place) => act(&mut self.ram, place, done..done + length),
                None => self.ram.stray(u64::try_from(length).unwrap()),
            }
            done += length;
        }
    }
}

impl Bus for View {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        self.each(address, into.len(), |ram, place, part| Bus::read(ram, place, &mut into[part]));
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        self.each(address, data.len(), |ram, place, part| Bus::write(ram, place, &data[part]));
    }
}

pub type Front = SharedCard<Behind, View, Shared>;

impl Timed for Front {
    fn tick(&mut self) {
        self.card().card.tick();
    }
}

impl OnBus for Front {
    fn bus(&mut self) -> &mut Shared {
        &mut self.card().bus.ram
    }
    fn place(&mut self, number: u8, address: u64) -> Option<u64> {
        self.card().slots[usize::from(number)].dma(address, 1, Direction::DeviceReads)
    }
}

pub struct Table {
    pub device: &'static Device,
    pub monitor: Monitor<Front>,
    pub ram: Shared,
    pub drivers: [Driver; 2],
    slots: [Slots; 2],
    own: u64,
}

impl Table {
    /// Starts a card and two guests with running drivers. The last one holds the card. Without an IOMMU their memory is
    /// scattered.
    pub fn new(which: Which) -> Self {
        Self::with(which, FailurePolicy::DeviceError)
    }

    pub fn with((device, iommu): Which, policy: FailurePolicy) -> Self {
        let own = own_bytes(device).unwrap();
        let ram = Shared::default();
        // Behind an IOMMU, bus addresses are guest-physical ones.
        let same = |number| {
            let mut slots = slots(number);
            slots.0.iter_mut().for_each(|slot| slot.device_base = slot.guest_base);
            slots
        };
        let slots = [0, 1].map(|number| if iommu { same(number) } else { scattered(number) });
        // One guest's regions are its slots, and the other's is all of its memory.
        let map = |number: u8| -> Box<dyn MemoryMap + Send> {
            let slots = slots[usize::from(number)].clone();
            if number == 0 { Box::new(slots) } else { Box::new(OneRegion(slots)) }
        };
        let bus = Reach { ram: ram.clone(), maps: iommu.then(Arc::default), own };
        let made = card(device, STATION, bus.clone(), iommu && device.name != "ne2000").unwrap();
        let mut behind =
            Behind { card: made, bus, slots: slots.clone(), slow: false, held: None, resets: Resets::Work };
        if iommu && own > 0 {
            let all = Mapping { device_base: SCRATCH, guest_base: SCRATCH, length: own, writable: true };
            behind.map(all).unwrap();
        }
        let mut front = SharedCard::new(device, behind, ram.clone()).unwrap();
        let pad = front.pad();
        for number in 0..2u8 {
            if iommu {
                front.add_seat(address(number));
            } else {
                front.add_seat_of(address(number), map(number));
            }
        }
        let mut monitor = Monitor::new(device, front);
        monitor.set_scratch(Box::new(pad));
        for number in 0..2u8 {
            let slots = slots[usize::from(number)].clone();
            monitor.add(GuestConfig { memory: map(number), ..config(number, policy, &[], slots) });
        }
        let idle = Driver::Ne2000(super::ne2000::Driver::default(), false);
        let mut table = Self { device, monitor, ram, drivers: [idle.clone(), idle], slots, own };
        for number in 0..2 {
            table.turn(number);
            let mut guest = Guest::new(&mut table.monitor, GuestId(number.into()));
            let mut driver = Driver::probe(device, &mut guest, number);
            assert_eq!(driver.address(), address(number), "its own, {}", device.name);
            driver.start(&mut guest);
            table.drivers[usize::from(number)] = driver;
        }
        table
    }

    /// Returns a guest's memory for its emulated receiver.
    pub fn view(&self, number: u8) -> View {
        View { ram: self.ram.clone(), slots: self.slots[usize::from(number)].clone() }
    }

    /// Returns all bytes of a guest's memory.
    pub fn bytes(&self, number: u8) -> Vec<u8> {
        let slots = &self.slots[usize::from(number)].0;
        slots
            .iter()
            .flat_map(|slot| self.ram.load(slot.device_base, usize::try_from(slot.length).unwrap()))
            .collect()
    }

    /// Writes bytes to a guest's memory.
    pub fn store(&mut self, number: u8, address: u64, data: &[u8]) {
        use super::memory::Memory as _;
        Guest::new(&mut self.monitor, GuestId(number.into())).store(address, data);
    }

    /// Hands the card to this guest, from a holder at a quiescent point.
    pub fn turn(&mut self, to: u8) {
        self.look();
        assert!(self.monitor.settle().unwrap(), "the holder is reusable");
        self.take(to);
        self.monitor.interrupt().unwrap();
    }

    /// Hands the card to this guest in any state of the holder. Once the other guest has lost it, the card may touch
    /// only this guest's memory.
    pub fn take(&mut self, to: u8) {
        self.monitor.physical().park();
        self.monitor.release().unwrap();
        self.allow(Some(to));
        let view = self.view(to);
        self.monitor.physical().seat(Some((to.into(), view, true)));
        assert_eq!(self.monitor.switch(GuestId(to.into()), false).unwrap(), Switched::Done);
        self.monitor.physical().feed();
    }

    /// From now on the card may touch only this guest's memory and its own.
    pub fn allow(&mut self, holder: Option<u8>) {
        let slots = holder.into_iter().flat_map(|holder| &self.slots[usize::from(holder)].0);
        let its = slots.map(|slot| slot.device_base..slot.device_base + slot.length);
        self.ram.allow(its.chain(std::iter::once(SCRATCH..SCRATCH + self.own)).collect());
    }

    /// Collects what the card has finished.
    pub fn look(&mut self) {
        self.monitor.physical().tick();
        while self.monitor.physical().poll().unwrap() {}
        self.monitor.physical().feed();
        self.monitor.interrupt().unwrap();
    }

    pub fn arrive(&mut self, frame: &[u8]) {
        assert!(self.monitor.physical().card().card.receive(frame), "{}: {}", self.device.name, frame.len());
    }

    pub fn wire(&mut self) -> Vec<Vec<u8>> {
        self.monitor.physical().card().card.take_sent()
    }

    pub fn send(&mut self, number: u8, frame: &[u8]) {
        let mut guest = Guest::new(&mut self.monitor, GuestId(number.into()));
        self.drivers[usize::from(number)].send(&mut guest, frame);
    }

    pub fn interrupt(&mut self, number: u8) -> (Vec<Vec<u8>>, u32, bool) {
        let mut guest = Guest::new(&mut self.monitor, GuestId(number.into()));
        self.drivers[usize::from(number)].interrupt(&mut guest)
    }

    pub fn refused(&self) -> u64 {
        [0, 1].iter().map(|&number| self.monitor.counters(GuestId(number)).refused).sum()
    }

    /// Checks that the card accessed, or tried to access, only its own memory and what the holder was granted.
    pub fn was_good(&mut self) {
        let (_, outside) = self.ram.log();
        assert_eq!((outside, self.monitor.physical().card().card.blocked()), (0, 0), "{}", self.device.name);
    }

    /// Returns the number of mappings of guests' memory.
    pub fn mapped(&mut self) -> usize {
        let own = usize::from(own_bytes(self.device) != Some(0));
        self.monitor.physical().card().bus.maps.as_ref().map_or(0, |maps| maps.lock().unwrap().len() - own)
    }
}
