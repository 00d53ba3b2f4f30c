//! Linux's 8139too driver, as a sequence of register accesses.

use device_models::reference::rtl8139::Rtl8139;

use super::Timed;
use super::memory::{Memory, OnBus, Shared, memory};

pub type Card = Rtl8139<Shared>;

impl Timed for Card {
    fn tick(&mut self) {
        Rtl8139::tick(self);
    }
}

impl OnBus for Card {
    fn bus(&mut self) -> &mut Shared {
        Rtl8139::bus(self)
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

    /// Runs the interrupt handler. Returns received frames, the number of sent frames, and whether there was a transmit
    /// error.
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

    /// Returns whether a frame can be handed over.
    pub fn has_room(&self) -> bool {
        self.next - self.done < 4
    }

    /// Returns the number of frames that were handed over and not returned to the driver.
    pub fn unnoticed(&self) -> u32 {
        self.next - self.done
    }

    /// Runs the interrupt handler without its softirq half: it collects sent frames, and received ones wait for a poll.
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

    /// Runs the softirq half for at most `budget` frames.
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

    /// Returns the next frame of the ring.
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
