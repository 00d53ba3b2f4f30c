//! Linux's e1000 driver for an 82540EM, as a sequence of register accesses.

use device_models::reference::e1000::E1000Card;

use super::Timed;
use super::memory::{Memory, OnBus, Shared, memory};

pub type Card = E1000Card<Shared>;

impl Timed for Card {
    fn tick(&mut self) {
        E1000Card::tick(self);
    }
}

impl OnBus for Card {
    fn bus(&mut self) -> &mut Shared {
        E1000Card::bus(self)
    }
}

/// Descriptors of each ring.
pub const RING: u32 = 64;
pub const RX_RING: u64 = 0x1000;
pub const TX_RING: u64 = 0x2000;
const RX_BUFFERS: u64 = 0x1_0000;
const TX_BUFFERS: u64 = 0x4_0000;
const BUFFER: u64 = 2048;
/// EOP, IFCS, RS.
const SEND: u8 = 0x0B;

/// The driver's state.
#[derive(Debug, Clone, Default)]
pub struct Driver {
    pub address: [u8; 6],
    memory: u64,
    next: u32,
    done: u32,
    fill: u32,
    clean: u32,
    pub accesses: u64,
}

impl Driver {
    fn w(&mut self, ports: &mut dyn Memory, offset: u32, value: u32) {
        self.accesses += 1;
        ports.write(offset, 4, value);
    }
    fn r(&mut self, ports: &mut dyn Memory, offset: u32) -> u32 {
        self.accesses += 1;
        ports.read(offset, 4)
    }

    fn eeprom(&mut self, ports: &mut dyn Memory, word: u32) -> u16 {
        self.w(ports, 0x10, 0x40);
        assert_eq!(self.r(ports, 0x10) & 0x80, 0x80, "the EEPROM is granted");
        self.w(ports, 0x10, 0x40);
        self.w(ports, 0x10, 0x42);
        for bit in (0..9).rev() {
            let data = (word | 6 << 6) >> bit << 2 & 4;
            self.w(ports, 0x10, 0x42 | data);
            self.w(ports, 0x10, 0x43 | data);
            self.w(ports, 0x10, 0x42 | data);
        }
        let mut value = 0;
        for _ in 0..16 {
            self.w(ports, 0x10, 0x43);
            value = value << 1 | u16::try_from(self.r(ports, 0x10) >> 3 & 1).unwrap();
            self.w(ports, 0x10, 0x42);
        }
        self.w(ports, 0x10, 0x40);
        self.w(ports, 0x10, 0);
        value
    }

    fn phy(&mut self, ports: &mut dyn Memory, register: u32) -> u32 {
        self.w(ports, 0x20, 1 << 27 | 1 << 21 | register << 16);
        let read = (0..20).map(|_| self.r(ports, 0x20)).find(|read| read & 1 << 28 != 0);
        read.expect("the PHY answers") & 0xFFFF
    }

    fn reset(&mut self, ports: &mut dyn Memory) {
        self.w(ports, 0xD8, u32::MAX);
        self.w(ports, 0x100, 0);
        self.w(ports, 0x400, 0x8);
        self.r(ports, 0x8);
        self.w(ports, 0x0, 1 << 26);
        assert_eq!(self.r(ports, 0x0) & 1 << 26, 0, "the reset ends");
        self.w(ports, 0xD8, u32::MAX);
        self.r(ports, 0xC0);
    }

    /// Finds the card and reads its address out of the EEPROM.
    pub fn probe(ports: &mut dyn Memory, number: u8) -> Self {
        let mut driver = Self { memory: memory(number).start, ..Self::default() };
        driver.reset(ports);
        let words: Vec<u16> = (0..64).map(|word| driver.eeprom(ports, word)).collect();
        assert_eq!(words.iter().fold(0u16, |sum, word| sum.wrapping_add(*word)), 0xBABA);
        for (at, word) in words[..3].iter().enumerate() {
            driver.address[2 * at..][..2].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!((driver.phy(ports, 2), driver.phy(ports, 3) & 0xFFF0), (0x0141, 0x0C20), "M88E1011");
        assert_eq!(driver.r(ports, 0x8) & 2, 2, "the link is up");
        driver
    }

    /// Starts the card.
    pub fn start(&mut self, ports: &mut dyn Memory) {
        (self.next, self.done, self.fill, self.clean) = (0, 0, 0, 0);
        self.reset(ports);
        let a = self.address;
        self.w(ports, 0x5400, u32::from_le_bytes([a[0], a[1], a[2], a[3]]));
        self.w(ports, 0x5404, u32::from_le_bytes([a[4], a[5], 0, 0x80]));
        for entry in 1..16 {
            self.w(ports, 0x5400 + 8 * entry, 0);
            self.w(ports, 0x5404 + 8 * entry, 0);
        }
        for word in 0..128 {
            self.w(ports, 0x5200 + 4 * word, 0);
        }
        let low = |address: u64| u32::try_from(address & 0xFFFF_FFFF).unwrap();
        ports.store(self.memory + TX_RING, &[0; 16 * RING as usize]);
        ports.store(self.memory + RX_RING, &[0; 16 * RING as usize]);
        let tx = [
            (0x3808, RING * 16),
            (0x3804, 0),
            (0x3800, low(self.memory + TX_RING)),
            (0x3818, 0),
            (0x3810, 0),
        ];
        let timers = [(0x410, 0x60_200A), (0x3820, 8), (0x382C, 32), (0x400, 0x0104_00FA)];
        for (offset, value) in tx.into_iter().chain(timers) {
            self.w(ports, offset, value);
        }
        // Broadcasts, buffers of 2 KiB, no CRC.
        let receive = 1 << 26 | 1 << 15;
        let rx = [
            (0x2808, RING * 16),
            (0x2804, 0),
            (0x2800, low(self.memory + RX_RING)),
            (0x2818, 0),
            (0x2810, 0),
        ];
        let before = [(0x100, receive), (0x2820, 0), (0x282C, 8), (0xC4, 195)];
        for (offset, value) in before.into_iter().chain(rx).chain([(0x5000, 0x300), (0x100, receive | 2)]) {
            self.w(ports, offset, value);
        }
        self.refill(ports, RING - 1);
        self.w(ports, 0xD0, 0x9D);
        self.r(ports, 0x8);
    }

    fn refill(&mut self, ports: &mut dyn Memory, buffers: u32) {
        for _ in 0..buffers {
            let at = u64::from(self.fill % RING);
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&(self.memory + RX_BUFFERS + at * BUFFER).to_le_bytes());
            ports.store(self.memory + RX_RING + at * 16, &descriptor);
            self.fill += 1;
        }
        if buffers > 0 {
            self.w(ports, 0x2818, self.fill % RING);
        }
    }

    /// Sends the bytes at an address by a legacy descriptor.
    pub fn send_at(&mut self, ports: &mut dyn Memory, address: u64, length: u16) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..10].copy_from_slice(&length.to_le_bytes());
        descriptor[11] = SEND;
        self.post(ports, &descriptor);
        self.w(ports, 0x3818, self.next % RING);
    }

    /// Sends the bytes at several addresses by a legacy descriptor each.
    pub fn send_pieces(&mut self, ports: &mut dyn Memory, pieces: &[(u64, u16)]) {
        for (number, (address, length)) in (1..).zip(pieces) {
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            descriptor[8..10].copy_from_slice(&length.to_le_bytes());
            // The last descriptor ends the frame and requests a report.
            descriptor[11] = if number == pieces.len() { SEND } else { 0x02 };
            self.post(ports, &descriptor);
        }
        self.w(ports, 0x3818, self.next % RING);
    }

    /// Has the card segment `length` bytes at an address. The first `headers` bytes precede each segment.
    pub fn send_cut_at(
        &mut self,
        ports: &mut dyn Memory,
        (address, length): (u64, u32),
        headers: u8,
        segment: u16,
    ) {
        let mut context = [14, 24, 33, 0, 34, 50, 0, 0, 0, 0, 0, 0x27, 0, headers, 0, 0];
        context[14..].copy_from_slice(&segment.to_le_bytes());
        self.post(ports, &context);
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&(length | 1 << 20).to_le_bytes());
        (descriptor[11], descriptor[13]) = (0x2F, 3);
        self.post(ports, &descriptor);
        self.w(ports, 0x3818, self.next % RING);
    }

    fn post(&mut self, ports: &mut dyn Memory, descriptor: &[u8; 16]) {
        ports.store(self.memory + TX_RING + u64::from(self.next % RING) * 16, descriptor);
        self.next += 1;
    }

    /// Sends a frame by a legacy descriptor.
    pub fn send(&mut self, ports: &mut dyn Memory, frame: &[u8]) {
        let buffer = self.memory + TX_BUFFERS + u64::from(self.next % RING) * BUFFER;
        ports.store(buffer, frame);
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
        descriptor[8..10].copy_from_slice(&u16::try_from(frame.len()).unwrap().to_le_bytes());
        descriptor[11] = SEND;
        self.post(ports, &descriptor);
        self.w(ports, 0x3818, self.next % RING);
    }

    /// Sends a frame that the card segments: a context, and data in pieces of 1 KiB. The first `headers` bytes precede
    /// each segment.
    pub fn send_cut(&mut self, ports: &mut dyn Memory, frame: &[u8], headers: u8, segment: u16) {
        let mut context = [14, 24, 33, 0, 34, 50, 0, 0, 0, 0, 0, 0x27, 0, headers, 0, 0];
        context[14..].copy_from_slice(&segment.to_le_bytes());
        self.post(ports, &context);
        self.send_more(ports, frame);
    }

    /// Does the same with the previous context.
    pub fn send_more(&mut self, ports: &mut dyn Memory, frame: &[u8]) {
        let pieces = frame.chunks(1024).count();
        for (number, piece) in frame.chunks(1024).enumerate() {
            let buffer = self.memory + TX_BUFFERS + u64::from(self.next % RING) * BUFFER;
            ports.store(buffer, piece);
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
            descriptor[8..12].copy_from_slice(&(u32::try_from(piece.len()).unwrap() | 1 << 20).to_le_bytes());
            // Extended, segmentation, IFCS. The last one ends the frame and requests a report.
            descriptor[11] = 0x26 | if number + 1 == pieces { 0x09 } else { 0 };
            descriptor[13] = 3;
            self.post(ports, &descriptor);
        }
        self.w(ports, 0x3818, self.next % RING);
    }

    /// Runs the interrupt handler. Returns the causes, which are 0 if another device interrupted.
    pub fn handle(&mut self, ports: &mut dyn Memory) -> u32 {
        let causes = self.r(ports, 0xC0);
        if causes != 0 {
            self.w(ports, 0xD8, u32::MAX);
            self.r(ports, 0x8);
        }
        causes
    }

    /// Runs the handler and the poll after it. Returns received frames and the number of descriptors of sent frames.
    pub fn interrupt(&mut self, ports: &mut dyn Memory) -> (Vec<Vec<u8>>, u32) {
        if self.handle(ports) == 0 {
            return (Vec::new(), 0);
        }
        let found = self.poll(ports);
        self.unmask(ports);
        found
    }

    /// Returns whether a frame can be sent.
    pub fn has_room(&self) -> bool {
        self.next - self.done + 1 < RING
    }

    /// Returns the number of descriptors that were handed over and that the driver hasn't seen returned.
    pub fn unnoticed(&self) -> u32 {
        self.next - self.done
    }

    /// Enables interrupts again.
    pub fn unmask(&mut self, ports: &mut dyn Memory) {
        self.w(ports, 0xD0, 0x9D);
        self.r(ports, 0x8);
    }

    /// Polls both rings. Returns received frames and the number of descriptors of sent frames.
    pub fn poll(&mut self, ports: &mut dyn Memory) -> (Vec<Vec<u8>>, u32) {
        let (mut frames, mut sent) = (Vec::new(), 0);
        while self.done != self.next {
            // For a frame of several descriptors, the last one reports.
            let reported = (self.done..self.next).find(|at| {
                let descriptor = self.memory + TX_RING + u64::from(at % RING) * 16;
                ports.load(descriptor + 11, 1)[0] & 8 != 0
            });
            let Some(last) = reported else { break };
            if ports.load(self.memory + TX_RING + u64::from(last % RING) * 16 + 12, 1)[0] & 1 == 0 {
                break;
            }
            sent += last + 1 - self.done;
            self.done = last + 1;
        }
        let mut taken = 0;
        while self.clean != self.fill {
            let at = u64::from(self.clean % RING);
            let descriptor = ports.load(self.memory + RX_RING + at * 16, 16);
            if descriptor[12] & 1 == 0 {
                break;
            }
            let length = usize::from(u16::from_le_bytes([descriptor[8], descriptor[9]]));
            let piece = ports.load(self.memory + RX_BUFFERS + at * BUFFER, length);
            frames.push(piece);
            self.clean += 1;
            taken += 1;
        }
        self.refill(ports, taken);
        (frames, sent)
    }
}
