//! Linux's ne2k-pci driver, as a sequence of port accesses.

use super::Ports;

const CR: u32 = 0x00;
const DATA: u32 = 0x10;
const RESET: u32 = 0x1F;

/// The driver's state.
#[derive(Debug, Clone, Default)]
pub struct Driver {
    pub address: [u8; 6],
    second: bool,
    /// Port instructions. A repeated instruction counts once.
    pub instructions: u64,
    /// Port accesses.
    pub accesses: u64,
}

impl Driver {
    fn out(&mut self, ports: &mut dyn Ports, value: u8, offset: u32) {
        self.instructions += 1;
        self.accesses += 1;
        ports.outb(value, offset);
    }

    fn r#in(&mut self, ports: &mut dyn Ports, offset: u32) -> u8 {
        self.instructions += 1;
        self.accesses += 1;
        ports.inb(offset)
    }

    fn outs(&mut self, ports: &mut dyn Ports, list: &[(u8, u32)]) {
        for &(value, offset) in list {
            self.out(ports, value, offset);
        }
    }

    /// Finds the card and reads its address.
    pub fn probe(ports: &mut dyn Ports) -> Self {
        let mut driver = Self::default();
        assert_ne!(driver.r#in(ports, CR), 0xFF, "a card is there");
        driver.outs(ports, &[(0x61, CR)]);
        driver.r#in(ports, 0x0D);
        driver.outs(ports, &[(0xFF, 0x0D), (0x20, CR)]);
        driver.r#in(ports, 0x0D);
        assert_eq!(driver.r#in(ports, 0x0D), 0, "the counter clears");
        let reset = driver.r#in(ports, RESET);
        driver.out(ports, reset, RESET);
        assert!((0..20).any(|_| driver.r#in(ports, 0x07) & 0x80 != 0), "the card stops");
        driver.outs(
            ports,
            &[
                (0xFF, 0x07),
                (0x21, CR),
                (0x49, 0x0E),
                (0x00, 0x0A),
                (0x00, 0x0B),
                (0x00, 0x0F),
                (0xFF, 0x07),
                (0x20, 0x0C),
                (0x02, 0x0D),
                (0x20, 0x0A),
                (0x00, 0x0B),
                (0x00, 0x08),
                (0x00, 0x09),
                (0x0A, CR),
            ],
        );
        let prom: Vec<u8> = (0..32).map(|_| driver.r#in(ports, DATA)).collect();
        assert_eq!((prom[14], prom[15]), (0x57, 0x57), "a byte per word, as in word mode");
        for (at, byte) in driver.address.iter_mut().enumerate() {
            *byte = prom[at];
        }
        driver.out(ports, 0x49, 0x0E);
        driver
    }

    /// Starts the card.
    pub fn start(&mut self, ports: &mut dyn Ports) {
        self.second = false;
        self.outs(
            ports,
            &[
                (0x21, CR),
                (0x49, 0x0E),
                (0x00, 0x0A),
                (0x00, 0x0B),
                (0x20, 0x0C),
                (0x02, 0x0D),
                (0x40, 0x04),
                (0x4C, 0x01),
                (0x7F, 0x03),
                (0x80, 0x02),
                (0xFF, 0x07),
                (0x00, 0x0F),
                (0x61, CR),
            ],
        );
        for (at, byte) in (1u32..).zip(self.address) {
            self.out(ports, byte, at);
        }
        self.outs(
            ports,
            &[(0x4C, 0x07), (0x21, CR), (0xFF, 0x07), (0x3F, 0x0F), (0x22, CR), (0x00, 0x0D), (0x04, 0x0C)],
        );
        self.outs(ports, &[(0x04, 0x0C), (0x60, CR)]);
        for at in 8..16 {
            self.out(ports, 0, at);
        }
        self.outs(ports, &[(0x20, CR), (0x04, 0x0C)]);
    }

    /// Sends a frame, up to the write that starts it. The card must be idle.
    pub fn send(&mut self, ports: &mut dyn Ports, frame: &[u8]) {
        let mut frame = frame.to_vec();
        frame.resize(frame.len().max(60), 0);
        let [low, high] = u16::try_from(frame.len() + (frame.len() & 1)).unwrap().to_le_bytes();
        let page = if self.second { 0x46 } else { 0x40 };
        self.second = !self.second;
        self.outs(
            ports,
            &[
                (0x00, 0x0F),
                (0x22, CR),
                (0x40, 0x07),
                (low, 0x0A),
                (high, 0x0B),
                (0x00, 0x08),
                (page, 0x09),
                (0x12, CR),
            ],
        );
        self.instructions += 1;
        let mut chunks = frame.chunks_exact(4);
        for chunk in &mut chunks {
            self.accesses += 1;
            ports.write(DATA, 4, u32::from_le_bytes(chunk.try_into().unwrap()));
        }
        if !chunks.remainder().is_empty() {
            let mut last = chunks.remainder().to_vec();
            last.resize(if last.len() > 2 { 4 } else { 2 }, 0);
            for half in last.chunks(2) {
                self.instructions += 1;
                self.accesses += 1;
                ports.write(DATA, 2, u32::from(u16::from_le_bytes([half[0], half[1]])));
            }
        }
        assert!((0..20).any(|_| self.r#in(ports, 0x07) & 0x40 != 0), "the transfer completes");
        self.outs(ports, &[(0x40, 0x07), (0x20, CR)]);
        assert_eq!(self.r#in(ports, CR) & 0x04, 0, "the transmitter is idle");
        let [low, high] = u16::try_from(frame.len()).unwrap().to_le_bytes();
        self.outs(ports, &[(low, 0x05), (high, 0x06), (page, 0x04), (0x26, CR), (0x3F, 0x0F)]);
    }

    /// Runs the interrupt handler. Returns received frames, whether a frame was sent, and whether there was a transmit
    /// error.
    pub fn interrupt(&mut self, ports: &mut dyn Ports) -> (Vec<Vec<u8>>, bool, bool) {
        let (mut frames, mut sent, mut error) = (Vec::new(), false, false);
        self.out(ports, 0x20, CR);
        for _ in 0..10 {
            let status = self.r#in(ports, 0x07);
            if status & 0x3F == 0 {
                break;
            }
            if status & 0x05 != 0 {
                self.receive(ports, &mut frames);
            }
            if status & 0x0A != 0 {
                self.r#in(ports, 0x04);
                (sent, error) = (sent || status & 0x02 != 0, error || status & 0x08 != 0);
                self.out(ports, status & 0x0A, 0x07);
            }
            if status & 0x30 != 0 {
                self.out(ports, status & 0x30, 0x07);
            }
            self.out(ports, 0x22, CR);
        }
        (frames, sent, error)
    }

    fn fetch(&mut self, ports: &mut dyn Ports, page: u8, offset: u8, length: u16) -> Vec<u8> {
        let [low, high] = length.to_le_bytes();
        self.outs(ports, &[(0x22, CR), (low, 0x0A), (high, 0x0B), (offset, 0x08), (page, 0x09), (0x0A, CR)]);
        let mut bytes = Vec::new();
        self.instructions += 1;
        while bytes.len() + 4 <= usize::from(length) {
            self.accesses += 1;
            bytes.extend(ports.read(DATA, 4).to_le_bytes());
        }
        // As the driver does: a word, then a byte.
        if usize::from(length) - bytes.len() >= 2 {
            self.instructions += 1;
            self.accesses += 1;
            let [low, high, ..] = ports.read(DATA, 2).to_le_bytes();
            bytes.extend([low, high]);
        }
        if bytes.len() < usize::from(length) {
            let data = self.r#in(ports, DATA);
            bytes.push(data);
        }
        self.out(ports, 0x40, 0x07);
        bytes
    }

    fn receive(&mut self, ports: &mut dyn Ports, frames: &mut Vec<Vec<u8>>) {
        for _ in 0..64 {
            self.out(ports, 0x60, CR);
            let current = self.r#in(ports, 0x07);
            self.out(ports, 0x20, CR);
            let boundary = self.r#in(ports, 0x03);
            let page = if boundary + 1 >= 0x80 { 0x4C } else { boundary + 1 };
            if page == current {
                break;
            }
            let header = self.fetch(ports, page, 0, 4);
            let count = u16::from_le_bytes([header[2], header[3]]);
            assert!(
                (64..=1522).contains(&count) && header[0] & 1 == 1,
                "a sane header at page {page:X} (boundary {boundary:X}, current {current:X}): {header:X?}"
            );
            let length = count - 4;
            let body = self.fetch(ports, page, 4, length);
            frames.push(body);
            let next = header[1];
            self.out(ports, if next == 0x4C { 0x7F } else { next - 1 }, 0x03);
        }
        self.out(ports, 0x05, 0x07);
    }
}
