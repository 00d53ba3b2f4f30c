//! Reference NE2000: 64 KiB of card addresses, remote transfers, transmission, the receive ring. The station PROM is at
//! 0, the packet memory at 4000h, and foreign memory beyond it.

use super::SHORTEST;
use super::filter::{Filter, Groups};
use crate::describe::{Class, Direction, Event, Reg};
use crate::devices::ne2000::{
    BNRY, CNTR0, CNTR1, CNTR2, CR, CRDA0, CRDA1, CURR, DATA, DCR, MAC0, MAR0, MON, NCR, NE2000, OVW, PAR0,
    PRO, PRX, PSTART, PSTOP, PTX, RCR, RDMA_IDLE, RDMA_WRITE, RESET, RSAR0, RSAR1, RSR, RUNNING, TBCR0,
    TBCR1, TPSR, TSR, TX_BUSY, TX_IDLE, TXP, WTS,
};
use crate::graph::{Given, Graph, truncated};
use crate::physical::{DeviceError, Mapping, PhysicalDevice, Touch};

const PAGE: usize = 256;
/// Base of the packet memory. The station PROM is below.
const PACKETS: usize = 0x4000;

/// The device.
#[derive(Debug, Clone)]
pub struct Ne2000 {
    graph: Graph,
    memory: Vec<u8>,
    /// Address of the remote transfer.
    at: u16,
    sent: Vec<Vec<u8>>,
    /// Log of touched memory; `None` if disabled.
    log: Option<Vec<Touch>>,
    bus_master: bool,
    /// Frames that were lost because the ring was full.
    pub missed: u64,
}

fn low(value: u32) -> u16 {
    u16::try_from(value & 0xFFFF).unwrap_or(0)
}

impl Ne2000 {
    /// Creates a card with a station address.
    pub fn new(address: [u8; 6]) -> Self {
        let mut graph = Graph::new(&NE2000);
        let mut memory = vec![0; 0x1_0000];
        for (at, byte) in (0u8..).zip(address) {
            graph.set(Reg(MAC0.0 + at), u32::from(byte));
            memory[usize::from(at) * 2] = byte;
            memory[usize::from(at) * 2 + 1] = byte;
        }
        memory[28..32].fill(0x57);
        Self { graph, memory, at: 0, sent: Vec::new(), log: Some(Vec::new()), bus_master: false, missed: 0 }
    }

    /// Disables the log of touched memory.
    #[must_use]
    pub fn without_log(mut self) -> Self {
        self.log = None;
        self
    }

    /// Replaces all writable memory, and returns the previous contents. Contents of another length yield a card's
    /// power-on contents.
    pub fn exchange_memory(&mut self, contents: Vec<u8>) -> Vec<u8> {
        let before = self.memory.split_off(PACKETS);
        if contents.len() == before.len() {
            self.memory.extend(contents);
        } else {
            self.memory.resize(PACKETS + before.len(), 0);
        }
        before
    }

    /// Returns the card's address space, byte by byte.
    pub fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// Returns what the card touched of its memory since the last call: the oracle of tests.
    pub fn take_log(&mut self) -> Vec<Touch> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns the frames that were sent since the last call.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sent)
    }

    /// Returns whether bus mastering was enabled.
    pub fn bus_master(&self) -> bool {
        self.bus_master
    }

    /// Returns the card's value of a register.
    pub fn value(&self, reg: Reg) -> u32 {
        self.graph.value(reg)
    }

    /// Advances time: a frame in transmission is sent.
    pub fn tick(&mut self) {
        let Some(frame) = self.sending() else { return };
        let base = usize::from(low(self.value(TPSR) << 8));
        self.touch(Direction::DeviceReads, base, frame.len(), "frame to send");
        self.sent.push(frame);
        self.finish(1, 0, PTX);
    }

    /// Returns the frame in transmission.
    pub fn sending(&self) -> Option<Vec<u8>> {
        self.graph.is(TX_BUSY).then(|| {
            let length = usize::from(low(self.value(TBCR0) | self.value(TBCR1) << 8));
            let base = usize::from(low(self.value(TPSR) << 8));
            (0..length).map(|at| self.memory[(base + at) % self.memory.len()]).collect()
        })
    }

    /// Completes or aborts the frame in transmission: status, collisions, causes.
    pub fn finish(&mut self, status: u32, collisions: u32, causes: u32) {
        self.graph.set(TSR, status & 0xFF);
        self.graph.set(NCR, collisions & 0xFF);
        self.graph.set(CR, self.value(CR) & !TXP);
        self.graph.enter(TX_IDLE);
        self.cause(causes);
    }

    /// Receives a frame. Returns whether it was stored.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        if !self.filter().accepts(frame) {
            return false;
        }
        let (start, stop, curr) = (self.byte(PSTART), self.byte(PSTOP), self.byte(CURR));
        let length = frame.len().max(SHORTEST);
        let pages = (length + 8).div_ceil(PAGE);
        if !self.has_room(frame.len()) {
            self.missed += 1;
            self.graph.set(CNTR2, (self.value(CNTR2) + 1).min(0xFF));
            self.cause(OVW);
            return false;
        }
        let after = |page: usize| if page + 1 == stop { start } else { (page + 1) % 256 };
        let next = (0..pages).fold(curr, |page, _| after(page));
        let status = 0x01 | u8::from(frame[0] & 1 == 1) << 5;
        let count = low(u32::try_from(length + 4).unwrap_or(0)).to_le_bytes();
        let mut stored = vec![status, u8::try_from(next).unwrap_or(0), count[0], count[1]];
        stored.extend_from_slice(frame);
        stored.resize(length + 4, 0);
        let mut page = curr;
        for chunk in stored.chunks(PAGE) {
            self.memory[page * PAGE..page * PAGE + chunk.len()].copy_from_slice(chunk);
            self.touch(Direction::DeviceWrites, page * PAGE, chunk.len(), "received frame");
            page = after(page);
        }
        self.graph.set(CURR, u32::try_from(next).unwrap_or(0));
        self.graph.set(RSR, u32::from(status));
        self.cause(PRX);
        true
    }

    /// Returns whether the ring has room for a frame of `length` bytes.
    pub fn has_room(&self, length: usize) -> bool {
        let (start, stop) = (self.byte(PSTART), self.byte(PSTOP));
        let (curr, bnry) = (self.byte(CURR), self.byte(BNRY));
        let free =
            if curr < bnry { bnry - curr } else { stop.saturating_sub(start).saturating_sub(curr - bnry) };
        (length.max(SHORTEST) + 8).div_ceil(PAGE) < free
    }

    /// Returns the current filter.
    pub fn filter(&self) -> Filter {
        let rcr = self.value(RCR);
        let bytes = |first: Reg, at: u8| self.value(Reg(first.0 + at)).to_le_bytes()[0];
        let groups = (0..8).fold(0, |all, at| all | u64::from(bytes(MAR0, at)) << (8 * at));
        let groups = if rcr & 0x08 == 0 { Groups::None } else { Groups::Hashed(groups) };
        let on = self.graph.is(RUNNING) && rcr & MON == 0;
        let station = std::array::from_fn(|at| bytes(PAR0, u8::try_from(at).unwrap_or(0)));
        Filter::new(on, rcr & PRO != 0, rcr & 0x04 != 0, groups).with(station)
    }

    /// Raises interrupt causes of another part of the card.
    pub fn raise(&mut self, causes: u32) {
        self.cause(causes);
    }

    fn byte(&self, reg: Reg) -> usize {
        usize::from(low(self.value(reg) & 0xFF))
    }

    fn touch(&mut self, direction: Direction, address: usize, length: usize, purpose: &'static str) {
        let number = |at: usize| u64::try_from(at).unwrap_or(u64::MAX);
        if let Some(log) = &mut self.log {
            log.push(Touch { direction, address: number(address), length: number(length), purpose });
        }
    }

    fn cause(&mut self, causes: u32) {
        let status = NE2000.interrupts.status;
        self.graph.set(status, self.value(status) | causes);
        self.graph.happen(&NE2000, Event::Cause(causes), None, Given::default());
    }

    /// Returns the next byte's offset of the remote transfer, with wraparound in the ring as the data sheet says.
    fn step(&mut self) -> usize {
        let now = usize::from(self.at);
        self.at = self.at.wrapping_add(1);
        if self.at == low(self.value(PSTOP) << 8) {
            self.at = low(self.value(PSTART) << 8);
        }
        now
    }

    /// In word mode a byte access moves two bytes.
    fn finish_word(&mut self, bytes: u8) {
        if bytes == 1 && self.value(DCR) & WTS != 0 {
            self.step();
        }
    }

    fn write_register(&mut self, reg: Reg, value: u32, bytes: u8) {
        let register = NE2000.register(reg);
        if reg == DATA {
            if self.graph.is(RDMA_WRITE) {
                for byte in value.to_le_bytes().into_iter().take(usize::from(bytes)) {
                    let at = self.step();
                    self.memory[at] = byte;
                    self.touch(Direction::DeviceWrites, at, 1, "remote write");
                }
                self.finish_word(bytes);
            }
            self.graph.happen(&NE2000, Event::Write(reg), None, Given::size(bytes));
            return;
        }
        if matches!(register.write, None | Some(Class::Deny)) || reg == RESET {
            return;
        }
        if reg == CR && value & 0x20 == 0 && value & 0x18 != 0 {
            self.at = low(self.value(RSAR0) | self.value(RSAR1) << 8);
        }
        let stored = register.stored(self.value(reg), value & register.mask());
        self.graph.happen(
            &NE2000,
            Event::Write(reg),
            Some((reg, stored)),
            Given { size: u32::from(bytes), written: value, ..Given::default() },
        );
    }

    fn read_register(&mut self, reg: Reg, bytes: u8) -> u32 {
        let register = NE2000.register(reg);
        let mut value = self.value(register.mirrors.unwrap_or(reg));
        if reg == DATA {
            let moving = !self.graph.is(RDMA_IDLE) && !self.graph.is(RDMA_WRITE);
            value = 0;
            for byte in 0..if moving { bytes } else { 0 } {
                let at = self.step();
                value |= u32::from(self.memory[at]) << (8 * byte);
            }
            if moving {
                self.finish_word(bytes);
            }
        } else if reg == CRDA0 || reg == CRDA1 {
            value = u32::from(self.at.to_le_bytes()[usize::from(reg == CRDA1)]);
        } else if [CNTR0, CNTR1, CNTR2].contains(&reg) {
            self.graph.set(reg, 0);
        }
        self.graph.happen(&NE2000, Event::Read(reg), None, Given::size(bytes));
        value
    }
}

impl super::Card for Ne2000 {
    fn tick(&mut self) {
        Self::tick(self);
    }

    fn take_sent(&mut self) -> Vec<Vec<u8>> {
        // Only tests use the log, and a guest must not be able to grow it.
        drop(self.take_log());
        Self::take_sent(self)
    }

    fn receive(&mut self, frame: &[u8]) -> bool {
        Self::receive(self, frame)
    }

    fn blocked(&self) -> u64 {
        0
    }
}

impl PhysicalDevice for Ne2000 {
    fn read(&mut self, _: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        let (mut done, mut value) = (0, 0);
        while done < size {
            let piece = self.graph.piece(&NE2000, offset + u32::from(done), size - done, false);
            let part = piece.reg.map_or(0, |reg| self.read_register(reg, piece.bytes) >> (8 * piece.skip));
            value |= truncated(part, piece.bytes) << (8 * done);
            done += piece.bytes;
        }
        Ok(value)
    }

    fn write(&mut self, _: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < size {
            let piece = self.graph.piece(&NE2000, offset + u32::from(done), size - done, true);
            if let Some(reg) = piece.reg {
                self.write_register(reg, truncated(value >> (8 * done), piece.bytes), piece.bytes);
            }
            done += piece.bytes;
        }
        Ok(())
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        Ok(self.graph.line(&NE2000))
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.graph.reset(&NE2000);
        Ok(())
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.bus_master |= on;
        Ok(())
    }

    fn has_iommu(&self) -> bool {
        false
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        Err(DeviceError {
            bar: 0,
            offset: 0,
            why: format!("it has no bus mastering, so nothing is mapped for it ({mapping:?})"),
        })
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.map(mapping)
    }
}
