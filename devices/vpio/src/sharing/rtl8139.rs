//! A shared RTL8139. The card uses its four transmit descriptors in order, independent of the holder's next one. Each
//! gets the address of the holder's frame.

use std::collections::VecDeque;

use device_models::describe::Reg;
use device_models::devices::rtl8139::{
    AAP, AB, AM, APM, BUFE, CAPR, CR, IMR, ISR, LOOPBACK, MAR0, MAR4, OWN, RBSTART, RCR, RE, ROK, RST,
    RTL8139, RXOVW, TCR, TE, TER, TOK, TOK_BIT, TSAD0, TSD0, VERSION, WRAP,
};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference::rtl8139::Rtl8139;
use device_models::reference::{Filter, SHORTEST};

use super::{Kind, Look, MAX_CARD_READS, Next, Side};
use crate::pad::{Inlet, in_pad};

/// Size in bytes of the owner's ring, and its RCR: all frames, no wrap inside a frame, 32 KiB, long bursts.
const OWN_RING: u32 = 0x8000;
const OWN_RCR: u32 = 0xF700 | 0x1000 | WRAP | AAP | APM | AM | AB;
/// TCR as Linux's driver sets it: standard interframe gap, 8 retries, long bursts.
const OWN_TCR: u32 = 0x0300_0680;
/// IMR: receive, transmit and their errors. Not ring overflow: with it, QEMU's card drops frames instead of holding
/// them back.
const OWN_CAUSES: u32 = 0x006F;
/// TSD: carrier lost, aborted; transmit FIFO underrun.
const ABORTED: u32 = 0x4000_0000;
const EMPTY: u32 = 0x4000;

/// The holder's state.
pub(super) struct Shared<B> {
    front: Rtl8139<Inlet<B>>,
    /// The owner's read offset in its ring.
    read: u32,
    /// The holder's transmit status descriptors as it sees them.
    tsd: [u32; 4],
    tsad: [u32; 4],
    /// Frames that the card has: the holder's descriptor, the card's descriptor.
    pending: VecDeque<(usize, u32)>,
    /// The card's next descriptor.
    next: u32,
}

/// Returns a register's offset.
fn at(reg: Reg) -> u32 {
    RTL8139.register(reg).offset.unwrap_or(0)
}

/// Returns the descriptor's number for an access to one of four registers from `first` on.
fn descriptor(first: Reg, offset: u32, bytes: u8) -> Option<usize> {
    let within = offset.checked_sub(at(first)).filter(|within| *within < 16)?;
    (bytes == 4 && within.is_multiple_of(4)).then(|| usize::try_from(within / 4).unwrap_or(0))
}

impl<B: Bus> Shared<B> {
    pub fn new(inlet: Inlet<B>) -> Self {
        Self {
            front: Rtl8139::new([0; 6], inlet, true),
            read: 0,
            tsd: [OWN; 4],
            tsad: [0; 4],
            pending: VecDeque::new(),
            next: 0,
        }
    }

    /// Reads the outcome of the frames that the card has.
    fn collect(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        while let Some(&(descriptor, on_card)) = self.pending.front() {
            let status = side.get(at(TSD0) + 4 * on_card, 4)?;
            if status & OWN == 0 || status & (TOK_BIT | ABORTED | EMPTY) == 0 {
                break;
            }
            self.pending.pop_front();
            self.tsd[descriptor] = status;
            self.front.raise(if status & TOK_BIT != 0 { TOK } else { TER });
        }
        Ok(())
    }

    /// Passes a frame of the holder to the card, or returns a descriptor to the holder.
    fn transmit(&mut self, side: &mut Side<'_>, descriptor: usize, value: u32) -> Result<(), DeviceError> {
        if value & OWN != 0 || self.pending.iter().any(|&(its, _)| its == descriptor) {
            self.empty(side)?;
        }
        self.tsd[descriptor] = value;
        if value & OWN != 0 || !side.masters {
            return Ok(());
        }
        self.pass_on(side, self.tsad[descriptor], value & 0x1FFF);
        side.handed += 1;
        side.put(at(TSAD0) + 4 * self.next, 4, self.tsad[descriptor])?;
        side.put(at(TSD0) + 4 * self.next, 4, value)?;
        self.pending.push_back((descriptor, self.next));
        self.next = (self.next + 1) % 4;
        Ok(())
    }

    /// Copies a frame for another guest. The holder may change it before the card reads it: both versions are the
    /// holder's own frames.
    fn pass_on(&mut self, side: &mut Side<'_>, address: u32, length: u32) {
        let length = usize::try_from(length).unwrap_or(0);
        let mut to = [0; 6];
        self.front.bus().read(address.into(), &mut to);
        if (SHORTEST..=1518).contains(&length) && side.wants(to) {
            let mut frame = vec![0; length];
            self.front.bus().read(address.into(), &mut frame);
            side.copies.push(frame);
        }
    }

    fn loops(&self) -> bool {
        self.front.value(TCR) & LOOPBACK == LOOPBACK
    }
}

impl<B: Bus> Kind<B> for Shared<B> {
    fn front(&mut self) -> &mut dyn PhysicalDevice {
        &mut self.front
    }

    fn set_memory(&mut self, memory: Option<B>) {
        self.front.bus().set_memory(memory);
    }

    fn filter(&self) -> Filter {
        self.front.filter()
    }

    fn has_room(&self, length: usize) -> bool {
        // While the monitor moves the ring pointers, frames from the wire wait.
        !self.loops() && self.front.has_room(length)
    }

    fn receive(&mut self, frame: &[u8]) -> bool {
        self.front.receive(frame)
    }

    fn raise(&mut self, causes: u32) {
        self.front.raise(causes);
    }

    fn start(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        side.reset()?;
        side.card.set_bus_master(true)?;
        (self.read, self.next) = (0, 0);
        self.pending.clear();
        let ring = u32::try_from(side.own.device_base()).unwrap_or(0);
        side.put(at(RBSTART), 4, ring)?;
        side.put(at(CR), 1, TE | RE)?;
        side.put(at(RCR), 4, OWN_RCR)?;
        side.put(at(TCR), 4, OWN_TCR)?;
        side.put(at(MAR0), 4, u32::MAX)?;
        side.put(at(MAR4), 4, u32::MAX)?;
        side.put(at(IMR), 2, OWN_CAUSES)
    }

    fn look(&mut self, side: &mut Side<'_>) -> Result<Look, DeviceError> {
        let causes = side.get(at(ISR), 2)?;
        if causes != 0 {
            // First: later events must set the causes again.
            side.put(at(ISR), 2, causes)?;
        }
        self.collect(side)?;
        Ok(Look { overrun: causes & (RXOVW | 0x40) != 0, ..Look::default() })
    }

    fn next(&mut self, side: &mut Side<'_>) -> Result<Next, DeviceError> {
        if side.get(at(CR), 1)? & BUFE != 0 {
            return Ok(Next::Nothing);
        }
        let mut header = [0; 4];
        side.own.read(self.read.into(), &mut header);
        let [low, high, length_low, length_high] = header;
        let (status, length) =
            (u16::from_le_bytes([low, high]), u16::from_le_bytes([length_low, length_high]));
        let length = usize::from(length);
        // The length includes the CRC.
        if u32::from(status) & ROK == 0 || !(18..=1540).contains(&length) {
            return Ok(Next::Garbled);
        }
        let mut frame = vec![0; length - 4];
        side.own.read(u64::from(self.read) + 4, &mut frame);
        let stored = (u32::try_from(length).unwrap_or(0) + 4).next_multiple_of(4);
        self.read = (self.read + stored) % OWN_RING;
        side.put(at(CAPR), 2, self.read.wrapping_sub(16) & 0xFFFF)?;
        Ok(Next::Frame(frame))
    }

    fn drain(&mut self, side: &mut Side<'_>) -> Result<bool, DeviceError> {
        for _ in 0..MAX_CARD_READS {
            self.collect(side)?;
            if self.pending.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn reset(&mut self, _: &mut Side<'_>) -> Result<(), DeviceError> {
        (self.tsd, self.tsad) = ([OWN; 4], [0; 4]);
        self.front.reset()
    }

    fn may_master(&mut self, _: &mut Side<'_>) -> Result<(), DeviceError> {
        // A frame that was handed over without bus mastering stays pending.
        Ok(())
    }

    fn read(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        if (0x10..0x20).contains(&offset) && !self.loops() {
            self.collect(side)?;
            let within = offset - at(TSD0);
            let value = self.tsd[usize::try_from(within / 4).unwrap_or(0) & 3];
            return Ok(value >> (8 * (within & 3)));
        }
        // Registers of link and transceiver.
        if offset == 0x58 || (0x62..0x6C).contains(&offset) {
            return side.get(offset, bytes);
        }
        let value = self.front.read(RTL8139.bar(), offset, bytes)?;
        if offset == at(TCR) && bytes == 4 {
            return Ok(value & !VERSION | side.get(offset, 4)? & VERSION);
        }
        Ok(value)
    }

    fn write(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        if !self.loops()
            && let Some(number) = descriptor(TSD0, offset, bytes)
        {
            return self.transmit(side, number, value);
        }
        if let Some(number) = descriptor(TSAD0, offset, bytes) {
            self.tsad[number] = value;
        }
        if offset == at(CR) && (value & RST != 0 || value & TE == 0) {
            self.empty(side)?;
        }
        if offset == at(CR) && value & RST != 0 {
            self.tsd = [OWN; 4];
        }
        self.front.write(RTL8139.bar(), offset, bytes, value)
    }

    fn map(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        if in_pad(mapping.device_base).is_none() {
            side.card.map(mapping)?;
        }
        self.front.map(mapping)
    }

    fn unmap(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        self.front.unmap(mapping)?;
        if in_pad(mapping.device_base).is_some() { Ok(()) } else { side.card.unmap(mapping) }
    }
}
