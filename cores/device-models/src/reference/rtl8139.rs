//! Reference RTL8139: four transmit descriptors, the receive ring, bus mastering. A register read advances time.

use super::filter::{Filter, Groups};
use super::port::Port;
use crate::describe::{Class, Direction, Event, Reg};
use crate::devices::rtl8139::{
    AAP, AB, AM, APM, BUFE, CAPR, CBR, CR, EECR, IDR0, IDR4, LOOPBACK, MAC0, MAR0, MAR4, MPC, OWN, RBSTART,
    RCR, RE, ROK, RST, RTL8139, RXOVW, TCR, TE, TOK, TOK_BIT, TSAD0, TSD0, WRAP,
};
use crate::graph::{Given, Graph, truncated};
use crate::physical::{Bus, DeviceError, Mapping, PhysicalDevice};

/// The emulated card.
#[derive(Debug)]
pub struct Rtl8139<B> {
    graph: Graph,
    port: Port<B>,
    next: u8,
    position: u32,
    sent: Vec<Vec<u8>>,
}

fn size(number: u32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

fn number(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

impl<B: Bus> Rtl8139<B> {
    /// Creates a card with a station address on a bus. With `iommu` it reaches mapped memory only.
    pub fn new(address: [u8; 6], bus: B, iommu: bool) -> Self {
        let mut graph = Graph::new(&RTL8139);
        for (at, byte) in (0u8..).zip(address) {
            graph.set(Reg(MAC0.0 + at), u32::from(byte));
        }
        let mut card = Self { graph, port: Port::new(bus, iommu), next: 0, position: 0, sent: Vec::new() };
        card.clear();
        card
    }

    /// Returns the bus.
    pub fn bus(&mut self) -> &mut B {
        &mut self.port.bus
    }

    /// Returns the number of DMA accesses that the IOMMU or a disabled bus master blocked.
    pub fn blocked(&self) -> u64 {
        self.port.blocked
    }

    /// Returns the frames that were sent since the last call.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sent)
    }

    /// Returns the card's value of a register.
    pub fn value(&self, reg: Reg) -> u32 {
        self.graph.value(reg)
    }

    /// Returns the hidden pointers: next descriptor, write position.
    pub fn pointers(&self) -> (u8, u32) {
        (self.next, self.position)
    }

    fn clear(&mut self) {
        self.graph.reset(&RTL8139);
        let mac = |at: u8| u32::from(self.graph.value(Reg(MAC0.0 + at)).to_le_bytes()[0]);
        let (low, high) = (mac(0) | mac(1) << 8 | mac(2) << 16 | mac(3) << 24, mac(4) | mac(5) << 8);
        self.graph.set(IDR0, low);
        self.graph.set(IDR4, high);
        self.next = 0;
        self.position = 0;
    }

    /// Addresses wrap at 32 bits, as on the device.
    fn dma(&mut self, address: u32, length: usize, direction: Direction, data: &mut [u8]) {
        let before_wrap = if address == 0 { length } else { length.min(size(0u32.wrapping_sub(address))) };
        let parts = [(address, 0..before_wrap), (0, before_wrap..length)];
        for (address, range) in parts.into_iter().filter(|(_, range)| !range.is_empty()) {
            // The card doesn't notice a blocked access.
            let _ = match direction {
                Direction::DeviceWrites => self.port.write(u64::from(address), &data[range]),
                Direction::DeviceReads => self.port.read(u64::from(address), &mut data[range]),
            };
        }
    }

    /// Advances time: sends the next descriptors that the device owns.
    pub fn tick(&mut self) {
        for _ in 0..4 {
            let (tsd, tsad) = (Reg(TSD0.0 + self.next), Reg(TSAD0.0 + self.next));
            if self.value(CR) & TE == 0 || self.value(tsd) & OWN != 0 {
                return;
            }
            let length = size(self.value(tsd) & 0x1FFF);
            let mut frame = vec![0; length];
            self.dma(self.value(tsad), length, Direction::DeviceReads, &mut frame);
            self.graph.set(tsd, self.value(tsd) | OWN | TOK_BIT);
            self.next = (self.next + 1) % 4;
            if self.value(TCR) & LOOPBACK == LOOPBACK {
                self.store(&frame);
            } else {
                self.sent.push(frame);
            }
            self.cause(TOK);
        }
    }

    /// Receives a frame from the wire; a card in loopback ignores it. Returns whether it was stored.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        self.value(TCR) & LOOPBACK != LOOPBACK && self.store(frame)
    }

    fn store(&mut self, frame: &[u8]) -> bool {
        if !self.filter().accepts(frame) {
            return false;
        }
        let rcr = self.value(RCR);
        let ring = 0x2000 << (rcr >> 11 & 3);
        let stored = (number(frame.len()) + 8).next_multiple_of(4);
        if stored >= self.free() {
            self.graph.set(MPC, self.value(MPC) + 1);
            self.cause(RXOVW);
            return false;
        }
        let kind = if frame[0] & 1 == 0 {
            0x4000
        } else if frame[..6] == [0xFF; 6] {
            0x2000
        } else {
            0x8000u32
        };
        let length = number(frame.len()) + 4;
        let mut bytes = (1 | kind | length << 16).to_le_bytes().to_vec();
        bytes.extend_from_slice(frame);
        bytes.extend_from_slice(&[0xCC; 4]);
        let base = self.value(RBSTART);
        let overhangs = rcr & WRAP != 0 && ring < 0x1_0000;
        let first = if overhangs { bytes.len() } else { bytes.len().min(size(ring - self.position)) };
        let (now, mut rest) = (self.position, bytes.split_off(first));
        self.dma(base.wrapping_add(now), bytes.len(), Direction::DeviceWrites, &mut bytes);
        if !rest.is_empty() {
            self.dma(base, rest.len(), Direction::DeviceWrites, &mut rest);
        }
        self.position = (self.position + stored) % ring;
        self.cause(ROK);
        true
    }

    /// Returns the current filter.
    pub fn filter(&self) -> Filter {
        let (rcr, [low, high]) =
            (self.value(RCR), [self.value(IDR0), self.value(IDR4)].map(u32::to_le_bytes));
        let groups = u64::from(self.value(MAR0)) | u64::from(self.value(MAR4)) << 32;
        let groups = if rcr & AM == 0 { Groups::None } else { Groups::Hashed(groups) };
        let filter = Filter::new(self.value(CR) & RE != 0, rcr & AAP != 0, rcr & AB != 0, groups);
        if rcr & APM == 0 {
            return filter;
        }
        filter.with([low[0], low[1], low[2], low[3], high[0], high[1]])
    }

    /// Returns whether the ring has room for a frame of `length` bytes.
    pub fn has_room(&self, length: usize) -> bool {
        (number(length) + 8).next_multiple_of(4) < self.free()
    }

    /// Returns the number of free bytes in the ring: those that the driver has read.
    fn free(&self) -> u32 {
        let ring = 0x2000 << (self.value(RCR) >> 11 & 3);
        let read = self.value(CAPR).wrapping_add(16) % ring;
        if self.position == read { ring } else { (read + ring - self.position) % ring }
    }

    /// Raises interrupt causes of another part of the card.
    pub fn raise(&mut self, causes: u32) {
        self.cause(causes);
    }

    fn cause(&mut self, causes: u32) {
        let status = RTL8139.interrupts.status;
        self.graph.set(status, self.value(status) | causes);
    }

    fn write_register(&mut self, reg: Reg, value: u32, bytes: u8) {
        let register = RTL8139.register(reg);
        if matches!(register.write, None | Some(Class::Deny)) || reg == TCR && self.value(CR) & TE == 0 {
            return;
        }
        if reg == CR && value & RST != 0 {
            self.clear();
            return;
        }
        let before = self.value(reg);
        let stored = register.stored(before, value & register.mask());
        self.graph.happen(
            &RTL8139,
            Event::Write(reg),
            Some((reg, stored)),
            Given { size: u32::from(bytes), written: value, ..Given::default() },
        );
        // The ring restarts when the receiver is enabled, and with a new size, but not with a new filter. 8139too
        // relies on the first and the last.
        let begins = reg == CR && stored & !before & RE != 0;
        if begins || reg == RCR && (stored ^ before) & 0x1800 != 0 {
            self.position = 0;
        } else if reg == MPC {
            self.graph.set(MPC, 0);
        }
    }

    fn read_register(&mut self, reg: Reg) -> u32 {
        self.tick();
        let ring = 0x2000 << (self.value(RCR) >> 11 & 3);
        if reg == CR {
            let empty = self.position == self.value(CAPR).wrapping_add(16) % ring;
            return self.value(CR) & !BUFE | if empty { BUFE } else { 0 };
        }
        if reg == EECR {
            // The EEPROM answers on a bit of the register that controls it.
            let answer = self.graph.happen(&RTL8139, Event::Read(reg), None, Given::size(1));
            return answer.unwrap_or_else(|| self.value(reg));
        }
        if reg == CBR { self.position } else { self.value(reg) }
    }
}

impl<B: Bus> super::Card for Rtl8139<B> {
    fn tick(&mut self) {
        Self::tick(self);
    }

    fn take_sent(&mut self) -> Vec<Vec<u8>> {
        Self::take_sent(self)
    }

    fn receive(&mut self, frame: &[u8]) -> bool {
        Self::receive(self, frame)
    }

    fn blocked(&self) -> u64 {
        Self::blocked(self)
    }
}

impl<B: Bus> PhysicalDevice for Rtl8139<B> {
    fn read(&mut self, _: u8, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        let (mut done, mut value) = (0, 0);
        while done < bytes {
            let piece = self.graph.piece(&RTL8139, offset + u32::from(done), bytes - done, false);
            let part = piece.reg.map_or(0, |reg| self.read_register(reg) >> (8 * piece.skip));
            value |= truncated(part, piece.bytes) << (8 * done);
            done += piece.bytes;
        }
        Ok(value)
    }

    fn write(&mut self, _: u8, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < bytes {
            let piece = self.graph.piece(&RTL8139, offset + u32::from(done), bytes - done, true);
            if let Some(reg) = piece.reg {
                let mask = truncated(u32::MAX, piece.bytes) << (8 * piece.skip);
                let part = truncated(value >> (8 * done), piece.bytes) << (8 * piece.skip);
                // A part of a register: the rest is unchanged.
                let whole =
                    if piece.is_whole(RTL8139.register(reg)) { part } else { self.value(reg) & !mask | part };
                self.write_register(reg, whole, piece.bytes);
            }
            done += piece.bytes;
        }
        Ok(())
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        Ok(self.graph.line(&RTL8139))
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.clear();
        Ok(())
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.port.bus_master = on;
        Ok(())
    }

    fn has_iommu(&self) -> bool {
        self.port.has_iommu()
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.port.map(mapping)
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.port.unmap(mapping)
    }
}
