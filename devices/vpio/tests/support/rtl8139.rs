//! What Linux's 8139too does, in the order of spec nics 2.5, and the memory that it and the card share.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use device_models::PhysicalDevice;
use device_models::physical::Bus;
use device_models::reference::rtl8139::Rtl8139;
use vpio::fast_forward::{FRAME, RING, Scratch};
use vpio::{Monitor, Slot, Slots};

use super::{Bare, Guest, Ports, Timed};

/// Memory of guest 0, in its own addresses.
pub const MEMORY: Range<u64> = 0x10_0000..0x20_0000;

/// Memory of guest `number`, in its own addresses. They differ, since a device behind an IOMMU uses these on one bus here.
pub fn memory(number: u8) -> Range<u64> {
    let length = MEMORY.end - MEMORY.start;
    let start = MEMORY.start + u64::from(number) * length;
    start..start + length
}
/// Scratch memory of the monitor, in the device's addresses.
pub const SCRATCH: u64 = 0x3000_0000;

/// Where guest `number`'s memory is for a device without an IOMMU.
pub fn at(number: u8) -> u64 {
    u64::from(number + 1) * 0x0800_0000 + MEMORY.start
}

pub fn slots(number: u8) -> Slots {
    let length = MEMORY.end - MEMORY.start;
    Slots(vec![Slot { guest_base: memory(number).start, length, device_base: at(number), writable: true }])
}

/// Memory in the device's addresses, with a log of what the device touched outside of what it may.
#[derive(Debug, Default)]
pub struct Ram {
    pages: HashMap<u64, Box<[u8; 4096]>>,
    pub allowed: Vec<Range<u64>>,
    /// Bytes that the device touched.
    pub touched: u64,
    /// Those outside of `allowed`.
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
    /// Bytes that the device touched, and those of them outside of what it may.
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

/// What of the scratch memory the device may touch.
pub fn scratch() -> Range<u64> {
    SCRATCH..SCRATCH + RING + FRAME
}

pub type Card = Rtl8139<Shared>;

impl Timed for Card {
    fn tick(&mut self) {
        Rtl8139::tick(self);
    }
}

/// A driver's view of its own memory.
pub trait Memory: Ports {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8>;
    fn store(&mut self, address: u64, data: &[u8]);
}

/// Where a guest's address is on the bus.
pub fn on_bus(monitor: &mut Monitor<Card>, number: u8, address: u64) -> u64 {
    if monitor.physical().has_iommu() { address } else { address - memory(number).start + at(number) }
}

impl Memory for Guest<'_, Card> {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        let address = on_bus(self.monitor, u8::try_from(self.id.0).unwrap(), address);
        self.monitor.physical().bus().load(address, length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        let address = on_bus(self.monitor, u8::try_from(self.id.0).unwrap(), address);
        self.monitor.physical().bus().store(address, data);
    }
}

impl Memory for Bare<Card> {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        self.0.bus().load(address, length)
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.0.bus().store(address, data);
    }
}

const RING_AT: u64 = 0x1_0000;
const RING_BYTES: u16 = 0x8000;
const BUFFERS: u64 = 0x4000;

/// The driver's state.
#[derive(Debug, Clone, Default)]
pub struct Driver {
    pub address: [u8; 6],
    next: u32,
    done: u32,
    read: u16,
    memory: u64,
    polling: bool,
    pub accesses: u64,
}

impl Driver {
    fn w(&mut self, ports: &mut dyn Memory, offset: u32, size: u8, value: u32) {
        self.accesses += 1;
        ports.write(offset, size, value);
    }
    fn r(&mut self, ports: &mut dyn Memory, offset: u32, size: u8) -> u32 {
        self.accesses += 1;
        ports.read(offset, size)
    }

    fn eeprom(&mut self, ports: &mut dyn Memory, word: u32) -> u16 {
        self.w(ports, 0x50, 1, 0x80);
        self.w(ports, 0x50, 1, 0x88);
        for bit in (0..11).rev() {
            let data = (word | 6 << 6) >> bit << 1 & 2;
            self.w(ports, 0x50, 1, 0x88 | data);
            self.w(ports, 0x50, 1, 0x8C | data);
        }
        self.w(ports, 0x50, 1, 0x88);
        let mut value = 0;
        for _ in 0..16 {
            self.w(ports, 0x50, 1, 0x8C);
            value = value << 1 | u16::try_from(self.r(ports, 0x50, 1) & 1).unwrap();
            self.w(ports, 0x50, 1, 0x88);
        }
        self.w(ports, 0x50, 1, 0);
        value
    }

    fn reset(&mut self, ports: &mut dyn Memory) {
        self.w(ports, 0x37, 1, 0x10);
        assert!((0..20).any(|_| self.r(ports, 0x37, 1) & 0x10 == 0), "the reset ends");
    }

    /// Finds the card and reads its address out of the EEPROM.
    pub fn probe(ports: &mut dyn Memory, number: u8) -> Self {
        let mut driver = Self { memory: memory(number).start, ..Self::default() };
        driver.w(ports, 0x5B, 1, u32::from(b'R'));
        driver.reset(ports);
        assert_eq!(driver.eeprom(ports, 0), 0x8129);
        for at in 0..3 {
            let word = driver.eeprom(ports, 7 + at).to_le_bytes();
            driver.address[usize::try_from(at).unwrap() * 2..][..2].copy_from_slice(&word);
        }
        driver.w(ports, 0x5B, 1, u32::from(b'H'));
        driver
    }

    /// Starts the card.
    pub fn start(&mut self, ports: &mut dyn Memory) {
        (self.next, self.done, self.read) = (0, 0, 0);
        self.w(ports, 0x5B, 1, u32::from(b'R'));
        self.reset(ports);
        self.w(ports, 0x50, 1, 0xC0);
        let a = self.address;
        for (offset, value) in [
            (0x00, u32::from_le_bytes([a[0], a[1], a[2], a[3]])),
            (0x04, u32::from_le_bytes([a[4], a[5], 0, 0])),
        ] {
            self.w(ports, offset, 4, value);
            assert_eq!(self.r(ports, offset, 4), value);
        }
        self.w(ports, 0x30, 4, u32::try_from(self.memory + RING_AT).unwrap());
        self.w(ports, 0x37, 1, 0x0C);
        self.w(ports, 0x44, 4, 0xF78A);
        self.w(ports, 0x40, 4, 0x0300_0680);
        self.w(ports, 0x50, 1, 0);
        for n in 0..4 {
            let buffer = u32::try_from(self.memory + BUFFERS).unwrap() + n * 1536;
            self.w(ports, 0x20 + 4 * n, 4, buffer);
            assert_eq!(self.r(ports, 0x20 + 4 * n, 4), buffer, "its own address, not the translated one");
        }
        self.w(ports, 0x4C, 4, 0);
        self.w(ports, 0x08, 4, 0);
        self.w(ports, 0x0C, 4, 0);
        self.w(ports, 0x5C, 2, 0);
        self.r(ports, 0x37, 1);
        self.w(ports, 0x3C, 2, 0xC07F);
    }

    /// Sends a frame.
    pub fn send(&mut self, ports: &mut dyn Memory, frame: &[u8]) {
        let n = self.next % 4;
        ports.store(self.memory + BUFFERS + u64::from(n) * 1536, frame);
        let length = u32::try_from(frame.len().max(60)).unwrap();
        self.w(ports, 0x10 + 4 * n, 4, 0x0008_0000 | length);
        self.r(ports, 0x10 + 4 * n, 4);
        self.next += 1;
    }

    /// The interrupt handler: frames received, frames sent, whether there was a transmit error.
    pub fn interrupt(&mut self, ports: &mut dyn Memory) -> (Vec<Vec<u8>>, u32, bool) {
        let (mut frames, mut sent, mut error) = (Vec::new(), 0, false);
        let status = self.r(ports, 0x3E, 2);
        if status & 0x000C != 0 {
            error = status & 8 != 0;
            self.w(ports, 0x3E, 2, status & 0x000C);
            while self.done != self.next && self.r(ports, 0x10 + 4 * (self.done % 4), 4) & 0x8000 != 0 {
                self.done += 1;
                sent += 1;
            }
        }
        if status & 0x0051 != 0 {
            self.w(ports, 0x3C, 2, 0xC02E);
            self.r(ports, 0x3C, 2);
            self.r(ports, 0x3E, 2);
            while self.r(ports, 0x37, 1) & 1 == 0 {
                frames.push(self.take(ports));
                let status = self.r(ports, 0x3E, 2) & 0x0051;
                if status != 0 {
                    self.w(ports, 0x3E, 2, status);
                    self.r(ports, 0x3E, 2);
                }
            }
            self.w(ports, 0x3C, 2, 0xC07F);
            self.r(ports, 0x3C, 2);
        }
        (frames, sent, error)
    }

    /// Whether a frame can be handed over.
    pub fn has_room(&self) -> bool {
        self.next - self.done < 4
    }

    /// The interrupt handler without its softirq half: frames that were sent are the driver's again, what came in waits for a poll.
    pub fn handle(&mut self, ports: &mut dyn Memory) {
        let status = self.r(ports, 0x3E, 2);
        if status & 0xC07F == 0 {
            return;
        }
        let now = status & !(0x0051 | 0x0008);
        if now != 0 {
            self.w(ports, 0x3E, 2, now);
        }
        if status & 0x0051 != 0 && !self.polling {
            self.polling = true;
            self.w(ports, 0x3C, 2, 0xC02E);
            self.r(ports, 0x3C, 2);
        }
        if status & 0x000C != 0 {
            while self.done != self.next && self.r(ports, 0x10 + 4 * (self.done % 4), 4) & 0x8000 != 0 {
                self.done += 1;
            }
            if status & 0x0008 != 0 {
                self.w(ports, 0x3E, 2, 0x0008);
            }
        }
    }

    fn acknowledge_received(&mut self, ports: &mut dyn Memory) {
        if self.r(ports, 0x3E, 2) & 0x0051 != 0 {
            self.w(ports, 0x3E, 2, 0x0051);
            self.r(ports, 0x3E, 2);
        }
    }

    /// The softirq half: at most `budget` frames.
    pub fn poll(&mut self, ports: &mut dyn Memory, budget: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        if !self.polling {
            return frames;
        }
        if self.r(ports, 0x3E, 2) & 0x0051 != 0 {
            while frames.len() < budget && self.r(ports, 0x37, 1) & 1 == 0 {
                frames.push(self.take(ports));
                self.acknowledge_received(ports);
            }
            if frames.is_empty() {
                self.acknowledge_received(ports);
            }
        }
        if frames.len() < budget {
            self.polling = false;
            self.w(ports, 0x3C, 2, 0xC07F);
            self.r(ports, 0x3C, 2);
        }
        frames
    }

    /// The next frame of the ring.
    fn take(&mut self, ports: &mut dyn Memory) -> Vec<u8> {
        let header = ports.load(self.memory + RING_AT + u64::from(self.read), 4);
        let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
        assert!(
            (64..=1522).contains(&length) && header[0] & 1 == 1,
            "a sane header at {:X}: {header:X?}",
            self.read
        );
        let frame = ports.load(self.memory + RING_AT + u64::from(self.read) + 4, length - 4);
        self.read = (self.read + u16::try_from((length + 4).next_multiple_of(4)).unwrap()) % RING_BYTES;
        self.w(ports, 0x38, 2, u32::from(self.read.wrapping_sub(16)));
        frame
    }
}
