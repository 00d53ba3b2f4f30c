//! Memory that cards, guests and monitors share, with a log of the cards' accesses.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use device_models::PhysicalDevice;
use device_models::physical::Bus;
use vpio::fast_forward::{FRAME, RING, Scratch};
use vpio::sharing::OwnRing;
use vpio::{Monitor, Slot, Slots};

use super::{Bare, Guest, Ports, Timed};

/// Guest 0's memory, in guest-physical addresses.
pub const MEMORY: Range<u64> = 0x10_0000..0x20_0000;

/// Guest `number`'s memory, in guest-physical addresses. The ranges differ, since a device behind an IOMMU uses them on
/// one bus here.
pub fn memory(number: u8) -> Range<u64> {
    let length = MEMORY.end - MEMORY.start;
    let start = MEMORY.start + u64::from(number) * length;
    start..start + length
}
/// The monitor's scratch memory, in the device's addresses.
pub const SCRATCH: u64 = 0x3000_0000;

/// Base of guest `number`'s memory for a device without an IOMMU.
pub fn at(number: u8) -> u64 {
    u64::from(number + 1) * 0x0800_0000 + MEMORY.start
}

pub fn slots(number: u8) -> Slots {
    let length = MEMORY.end - MEMORY.start;
    Slots(vec![Slot { guest_base: memory(number).start, length, device_base: at(number), writable: true }])
}

/// Memory in the device's addresses, with a log of accesses outside of the permitted ranges.
#[derive(Debug, Default)]
pub struct Ram {
    pages: HashMap<u64, Box<[u8; 4096]>>,
    pub allowed: Vec<Range<u64>>,
    /// Number of bytes that the device touched.
    pub touched: u64,
    /// Number of bytes that it touched outside of `allowed`.
    pub outside: u64,
}

impl Ram {
    fn byte(&mut self, address: u64) -> &mut u8 {
        let page = self.pages.entry(address >> 12).or_insert_with(|| Box::new([0; 4096]));
        &mut page[usize::try_from(address & 0xFFF).unwrap()]
    }
    pub fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        (address..).take(length).map(|address| *self.byte(address)).collect()
    }
    pub fn store(&mut self, address: u64, data: &[u8]) {
        for (address, byte) in (address..).zip(data) {
            *self.byte(address) = *byte;
        }
    }
    fn log(&mut self, address: u64, length: usize) {
        let length = u64::try_from(length).unwrap();
        self.touched += length;
        let inside: u64 = self
            .allowed
            .iter()
            .map(|range| (address + length).min(range.end).saturating_sub(address.max(range.start)))
            .sum();
        self.outside += length - inside;
    }
}

/// Memory that card, guests and monitor share.
#[derive(Debug, Clone, Default)]
pub struct Shared(Arc<Mutex<Ram>>);

impl Shared {
    pub fn new(allowed: Vec<Range<u64>>) -> Self {
        Self(Arc::new(Mutex::new(Ram { allowed, ..Ram::default() })))
    }
    pub fn load(&self, address: u64, length: usize) -> Vec<u8> {
        self.0.lock().unwrap().load(address, length)
    }
    pub fn store(&self, address: u64, data: &[u8]) {
        self.0.lock().unwrap().store(address, data);
    }
    /// Sets the ranges that the device may access from now on.
    pub fn allow(&self, allowed: Vec<Range<u64>>) {
        self.0.lock().unwrap().allowed = allowed;
    }
    /// Logs an access outside of the permitted ranges.
    pub fn stray(&self, bytes: u64) {
        let mut ram = self.0.lock().unwrap();
        ram.touched += bytes;
        ram.outside += bytes;
    }
    /// Returns the number of bytes that the device touched, and of those outside of the permitted ranges.
    pub fn log(&self) -> (u64, u64) {
        let ram = self.0.lock().unwrap();
        (ram.touched, ram.outside)
    }
}

impl Bus for Shared {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        let mut ram = self.0.lock().unwrap();
        ram.log(address, into.len());
        into.copy_from_slice(&ram.load(address, into.len()));
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        let mut ram = self.0.lock().unwrap();
        ram.log(address, data.len());
        ram.store(address, data);
    }
}

impl Scratch for Shared {
    fn device_base(&self) -> u64 {
        SCRATCH
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        self.store(SCRATCH + offset, data);
    }
}

impl OwnRing for Shared {
    fn read(&mut self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.load(SCRATCH + offset, into.len()));
    }
}

/// Returns the scratch ranges that the device may access.
pub fn scratch() -> Range<u64> {
    SCRATCH..SCRATCH + RING + FRAME
}

/// A card on the shared memory.
pub trait OnBus {
    fn bus(&mut self) -> &mut Shared;
    /// Returns the bus address of a guest's page if it differs from [`on_bus`]'s.
    fn place(&mut self, _number: u8, _address: u64) -> Option<u64> {
        None
    }
}

/// A driver's view of its own memory.
pub trait Memory: Ports {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8>;
    fn store(&mut self, address: u64, data: &[u8]);
}

/// Splits a range by pages: a guest's adjacent pages may be apart on the bus.
pub fn pages(address: u64, length: usize) -> Vec<(u64, usize)> {
    let (mut at, mut left, mut pages) = (address, length, Vec::new());
    while left > 0 {
        let now = left.min(usize::try_from(0x1000 - at % 0x1000).unwrap());
        pages.push((at, now));
        at += u64::try_from(now).unwrap();
        left -= now;
    }
    pages
}

/// Returns the bus address of a guest's address.
pub fn on_bus(monitor: &mut Monitor<impl PhysicalDevice + OnBus>, number: u8, address: u64) -> u64 {
    if let Some(place) = monitor.physical().place(number, address) {
        return place;
    }
    if monitor.physical().has_iommu() { address } else { address - memory(number).start + at(number) }
}

impl<P: PhysicalDevice + Timed + OnBus> Memory for Guest<'_, P> {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        let (number, mut bytes) = (u8::try_from(self.id.0).unwrap(), Vec::new());
        for (at, length) in pages(address, length) {
            let place = on_bus(self.monitor, number, at);
            bytes.extend(self.monitor.physical().bus().load(place, length));
        }
        bytes
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        let (number, mut data) = (u8::try_from(self.id.0).unwrap(), data);
        for (at, length) in pages(address, data.len()) {
            let place = on_bus(self.monitor, number, at);
            let (now, rest) = data.split_at(length);
            self.monitor.physical().bus().store(place, now);
            data = rest;
        }
    }
}

impl<P: PhysicalDevice + OnBus> Memory for Bare<P> {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        self.0.bus().load(address, length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.0.bus().store(address, data);
    }
}
