//! A shared e1000. It reads each of the holder's descriptors once, checks it, and copies it into the owner's transmit
//! ring. The frames stay in the holder's memory. So the card's rings always belong to the owner, and a hand-off costs
//! no access to the card. The card needs no IOMMU: no guest can write to the rings from which the card reads addresses.
//!
//! ```text
//! holder's ring ─▶ descriptor, read once ─▶ address checked and moved ─▶ owner's ring ─▶ card ─▶ reads the frame
//! holder's ring ◀─ done, cause ◀──────────────────────────── done ◀──── owner's ring ◀─ card
//! ```
//!
//! The card's hidden state are the last context descriptors, which define checksum offload and segmentation. Before a
//! frame, the card gets the holder's contexts if it has others.

use std::collections::VecDeque;

use device_models::describe::Reg;
use device_models::devices::e1000::{
    CTRL, E1000, EN, ICR, IMS, MDIC, RCTL, RDBAH, RDBAL, RDH, RDLEN, RDT, RXT0, STATUS, TCTL, TDBAH, TDBAL,
    TDH, TDLEN, TDT, TIPG, TXDW, UPE, VET,
};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference::Filter;
use device_models::reference::e1000::{E1000Card, Parsed, parse, reports};

use super::places::Places;
use super::{Kind, Look, MAX_CARD_READS, Next, Side};
use crate::pad::Inlet;

/// Descriptors in each of the owner's rings.
const RING: u32 = 256;
/// Offsets in the owner's memory: both rings, then the buffers.
const RX_AT: u64 = 0;
const TX_AT: u64 = 0x1000;
const BUFFERS_AT: u64 = 0x2000;
const BUFFER: u64 = 2048;
/// Size in bytes of the owner's memory.
pub(super) const OWN_BYTES: u64 = BUFFERS_AT + RING as u64 * BUFFER;
/// Receive buffers that are returned to the card at a time.
const BACK: u32 = 32;
/// RCTL: accept all unicast, multicast and broadcast frames, without their CRC, in buffers of 2 KiB.
const OWN_RCTL: u32 = EN | UPE | 0x10 | 1 << 15 | 1 << 26;
/// TCTL: pad short frames, 15 collisions, full duplex, retransmit on late collision. Gaps as in Intel's manual.
const OWN_TCTL: u32 = 0x0104_00F8 | EN;
const OWN_TIPG: u32 = 0x0060_200A;
/// ICR: link status change; receive descriptor minimum threshold; receiver overrun.
const LSC: u32 = 0x04;
const RXDMT0: u32 = 0x10;
const RXO: u32 = 0x40;
const OWN_CAUSES: u32 = TXDW | LSC | RXDMT0 | RXO | RXT0;
/// CTRL: set link up; strip and insert VLAN tags; VET: the tag type of 802.1Q.
const SLU: u32 = 0x40;
const VME: u32 = 1 << 30;
const TAG: u16 = 0x8100;
/// CTRL bits that the owner keeps off: link reset, inverted signal, forced speed and duplex.
const CTRL_OFF: u32 = 0x08 | 0x80 | 0x800 | 0x1000;
/// Receive descriptor status: descriptor done, end of packet, VLAN tag.
const DONE: u8 = 0x01;
const END: u8 = 0x02;
const TAGGED: u8 = 0x08;
/// Transmit descriptor command: end of packet, report status, extended. The owner clears delayed reporting and reserved
/// bits.
const EOP: u8 = 0x01;
const RS: u8 = 0x08;
const EXTENDED: u8 = 0x20;
const DELAYED: u8 = 0x80 | 0x10;
const PUT_TAG: u8 = 0x40;
/// Limit of descriptors that are read before other work, and of descriptors per frame.
const WALK: u32 = 256;
const MAX_FRAME_DESCRIPTORS: usize = 128;
/// Limit in bytes of an unsegmented frame that other guests may receive: 64 KiB and headers.
const MAX_FRAME_BYTES: usize = 0x1_0100;
/// Approximate limits: descriptors whose report is pending, and copies for other guests at a time.
const REPORTS: usize = 512;
const COPIES: usize = 512;
/// MDIC: read a register of the only PHY; ready.
const PHY_READ: u32 = 1 << 27 | 1 << 21;
const PHY_DONE: u32 = 1 << 28;
/// PHY registers with the link's state: status, link partner ability, 1000BASE-T status, Marvell's specific status.
const PHY_LINK: [u32; 4] = [1, 5, 10, 17];

/// The holder's state.
pub(super) struct Shared<B> {
    front: E1000Card<Inlet<B>>,
    places: Places,
    /// Next descriptor in the owner's receive ring, and the number of descriptors that were read but not returned to
    /// the card.
    read: u32,
    back: u32,
    /// The owner's transmit ring: first descriptor that the card has, and first free one.
    done: u32,
    free: u32,
    /// Next descriptor in the holder's ring.
    next: u32,
    frame: Frame,
    /// Reports to the holder that wait until the card has sent the frame.
    pending: VecDeque<Pending>,
    /// Context descriptors: the holder's last ones (checksum and segmentation), which of them arrived since the last
    /// frame, and those that the card has.
    contexts: [Option<[u8; 16]>; 2],
    fresh: [bool; 2],
    on_card: [Option<[u8; 16]>; 2],
    /// Contexts to restore after the holder's next reset.
    restored: [Option<[u8; 16]>; 2],
}

/// A frame of the holder that isn't complete.
#[derive(Debug, Default)]
struct Frame {
    /// The frame has a first piece.
    begun: bool,
    bytes: usize,
    /// Descriptors in the form that the card gets.
    descriptors: Vec<[u8; 16]>,
    /// Another guest accepts the frame.
    copied: bool,
    copies: Vec<Vec<u8>>,
    /// The card doesn't get the frame.
    refused: bool,
    /// The holder's descriptors that request a report: address and content.
    reports: Vec<(u64, [u8; 16])>,
}

#[derive(Debug)]
struct Pending {
    /// Number of the descriptor after the frame's last one in the owner's ring.
    end: u32,
    reports: Vec<(u64, [u8; 16])>,
    /// The holder's head after the report.
    head: u32,
}

/// Returns a register's offset.
fn at(reg: Reg) -> u32 {
    E1000.register(reg).offset.unwrap_or(0)
}

fn low(value: u64) -> u32 {
    u32::try_from(value & 0xFFFF_FFFF).unwrap_or(0)
}

impl<B: Bus> Shared<B> {
    pub fn new(inlet: Inlet<B>) -> Self {
        Self {
            front: E1000Card::new([0; 6], inlet, true).without_transmitter(),
            places: Places::default(),
            read: 0,
            back: 0,
            done: 0,
            free: 0,
            next: 0,
            frame: Frame::default(),
            pending: VecDeque::new(),
            contexts: [None; 2],
            fresh: [false; 2],
            on_card: [None; 2],
            restored: [None; 2],
        }
    }

    fn sends(&self, side: &Side<'_>) -> bool {
        side.masters && self.front.value(TCTL) & EN != 0
    }

    /// Returns whether descriptors of the holder wait and the owner's ring has room for the longest frame.
    fn has_more(&self, side: &Side<'_>) -> bool {
        let room = RING - 1 - (self.free + RING - self.done) % RING;
        self.sends(side)
            && self.next != self.front.value(TDT) & 0xFFFF
            && self.pending.len() < REPORTS
            && usize::try_from(room).unwrap_or(0) >= MAX_FRAME_DESCRIPTORS + self.contexts.len()
    }

    /// Processes the holder's next descriptors.
    fn walk(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        if let Some(holder) = side.holder
            && !self.frame.begun
            && self.places.is_full(holder)
        {
            // Restarts with the contexts that the next frames need.
            self.empty(side)?;
            self.places.forget(side.card, holder)?;
        }
        let before = self.free;
        for _ in 0..WALK {
            // One frame of a guest can yield very many segments.
            if !self.has_more(side) || side.copies.len() >= COPIES {
                break;
            }
            let descriptor = self.front.descriptor(self.next);
            let next = (self.next + 1) & 0xFFFF;
            self.next = if next * 16 == self.front.value(TDLEN) { 0 } else { next };
            // Skip a descriptor that the card couldn't read.
            let Some((place, descriptor)) = descriptor else { continue };
            if reports(&descriptor) {
                self.frame.reports.push((place, descriptor));
            }
            match parse(&descriptor) {
                Parsed::Context { segments } => {
                    let of = usize::from(segments);
                    (self.contexts[of], self.fresh[of]) = (Some(descriptor), true);
                    // For copies to other guests.
                    self.front.assemble(&descriptor);
                }
                Parsed::Data { address, length, last } => {
                    self.add(side, &descriptor, address, length)?;
                    if last {
                        self.commit(side);
                    }
                }
                Parsed::Unknown => {}
            }
            // Limits a frame that never ends but requests report after report.
            self.frame.refused |= self.frame.begun && self.frame.reports.len() >= REPORTS;
            if !self.frame.begun || self.frame.refused {
                // Report descriptors that belong to no frame.
                self.tell_after();
            }
        }
        if self.free != before {
            side.put(at(TDT), 4, self.free)?;
        }
        self.complete(side);
        Ok(())
    }

    /// Queues the report of processed descriptors behind the frames that the card has.
    fn tell_after(&mut self) {
        let reports = std::mem::take(&mut self.frame.reports);
        self.pending.push_back(Pending { end: self.free, reports, head: self.next });
    }

    /// Adds a piece to the current frame.
    fn add(
        &mut self,
        side: &mut Side<'_>,
        descriptor: &[u8; 16],
        address: u64,
        length: usize,
    ) -> Result<(), DeviceError> {
        if !self.frame.begun {
            let mut to = [0; 6];
            let known = length >= to.len() && self.front.peek(address, &mut to);
            (self.frame.begun, self.frame.copied) =
                (true, if known { side.wants(to) } else { side.seats.len() > 1 });
        }
        if self.frame.refused {
            return Ok(());
        }
        self.frame.bytes = self.frame.bytes.saturating_add(length);
        if self.frame.copied && self.frame.bytes > MAX_FRAME_BYTES {
            // No guest needs a copy, so don't assemble it.
            self.front.forget_frame();
            self.frame.copied = false;
        }
        if self.frame.copied {
            self.frame.copies.extend(self.front.assemble(descriptor));
        }
        let pieces = match side.holder {
            Some(holder) if length > 0 => {
                let length = u64::try_from(length).unwrap_or(u64::MAX);
                if side.card.has_iommu() {
                    self.places.find(side.card, holder, address, length)
                } else {
                    self.places.translate(side.map(holder)?, address, length, MAX_FRAME_DESCRIPTORS)
                }
            }
            // The card skips an empty piece, whatever its address.
            _ => Some(vec![(side.own.device_base(), 0)]),
        };
        let Some(pieces) =
            pieces.filter(|pieces| self.frame.descriptors.len() + pieces.len() <= MAX_FRAME_DESCRIPTORS)
        else {
            self.frame.refused = true;
            return Ok(());
        };
        let count = pieces.len();
        for (number, (place, bytes)) in pieces.into_iter().enumerate() {
            let mut piece = *descriptor;
            piece[..8].copy_from_slice(&place.to_le_bytes());
            let [first, second, third, ..] = bytes.to_le_bytes();
            (piece[8], piece[9]) = (first, second);
            if piece[11] & EXTENDED != 0 {
                piece[10] = piece[10] & 0xF0 | third & 0x0F;
            }
            piece[11] &= !(DELAYED | RS);
            if self.front.value(CTRL) & VME == 0 {
                piece[11] &= !PUT_TAG;
            }
            if number + 1 < count {
                piece[11] &= !EOP;
            }
            piece[12] &= 0xF0;
            self.frame.descriptors.push(piece);
        }
        Ok(())
    }

    /// Hands a complete frame to the card.
    fn commit(&mut self, side: &mut Side<'_>) {
        let frame = std::mem::take(&mut self.frame);
        if frame.refused {
            side.refused += 1;
            self.front.forget_frame();
            self.frame.reports = frame.reports;
            return;
        }
        for of in 0..self.contexts.len() {
            let Some(mut context) = self.contexts[of] else { continue };
            if std::mem::take(&mut self.fresh[of]) || self.on_card[of] != self.contexts[of] {
                self.on_card[of] = Some(context);
                context[11] &= !(DELAYED | RS | EOP);
                context[12] = 0;
                self.put(side, &context);
            }
        }
        let count = frame.descriptors.len();
        for (number, mut descriptor) in frame.descriptors.into_iter().enumerate() {
            if number + 1 == count {
                descriptor[11] |= RS;
            }
            self.put(side, &descriptor);
        }
        side.handed += 1;
        side.copies.extend(frame.copies);
        self.frame.reports = frame.reports;
    }

    fn put(&mut self, side: &mut Side<'_>, descriptor: &[u8; 16]) {
        side.own.write(TX_AT + u64::from(self.free) * 16, descriptor);
        self.free = (self.free + 1) % RING;
    }

    /// Reports to the holder the frames that the card has sent.
    fn complete(&mut self, side: &mut Side<'_>) {
        while let Some(first) = self.pending.front() {
            if first.end != self.done {
                let last = (first.end + RING - 1) % RING;
                let mut status = [0];
                side.own.read(TX_AT + u64::from(last) * 16 + 12, &mut status);
                if status[0] & DONE == 0 {
                    return;
                }
                self.done = first.end;
            }
            let Some(Pending { reports, head, .. }) = self.pending.pop_front() else { return };
            for (place, descriptor) in &reports {
                self.front.report(*place, descriptor);
            }
            self.front.sent_to(head, if reports.is_empty() { 0 } else { TXDW });
        }
    }

    /// Discards the holder's incomplete frame.
    fn forget_frame(&mut self) {
        self.frame = Frame::default();
        self.front.forget_frame();
    }

    /// Updates the link state that the holder is about to read from the card's.
    fn look_at_link(&mut self, side: &mut Side<'_>, register: u32) -> Result<(), DeviceError> {
        if !PHY_LINK.contains(&register) {
            return Ok(());
        }
        side.put(at(MDIC), 4, PHY_READ | register << 16)?;
        for _ in 0..MAX_CARD_READS {
            let value = side.get(at(MDIC), 4)?;
            if value & PHY_DONE != 0 {
                self.front.set_phy(register, u16::try_from(value & 0xFFFF).unwrap_or(0));
                return Ok(());
            }
        }
        let why = format!("its PHY didn't answer for register {register} in {MAX_CARD_READS} reads");
        Err(DeviceError { bar: E1000.bar(), offset: at(MDIC), why })
    }

    fn give_back(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.back) == 0 {
            return Ok(());
        }
        side.put(at(RDT), 4, (self.read + RING - 1) % RING)
    }
}

/// Returns a receive descriptor for one of the owner's buffers.
fn empty(base: u64, number: u32) -> [u8; 16] {
    let mut descriptor = [0; 16];
    descriptor[..8].copy_from_slice(&(base + BUFFERS_AT + u64::from(number) * BUFFER).to_le_bytes());
    descriptor
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
        self.front.has_room(length)
    }

    fn receive(&mut self, frame: &[u8]) -> bool {
        self.front.receive(frame)
    }

    fn raise(&mut self, causes: u32) {
        self.front.raise(causes);
    }

    fn start(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        // First: a card that can't be reset still stops reading its frames.
        side.card.set_bus_master(false)?;
        side.reset()?;
        (self.read, self.back, self.done, self.free) = (0, 0, 0, 0);
        self.on_card = [None; 2];
        // The reports that wait behind the card's frames are due: these frames are gone.
        self.pending.iter_mut().for_each(|pending| pending.end = 0);
        self.complete(side);
        let base = side.own.device_base();
        for number in 0..RING {
            side.own.write(RX_AT + u64::from(number) * 16, &empty(base, number));
        }
        side.card.set_bus_master(true)?;
        let control = side.get(at(CTRL), 4)? & !CTRL_OFF | SLU | VME;
        for (reg, value) in [
            (CTRL, control),
            (VET, TAG.into()),
            (RDBAL, low(base + RX_AT)),
            (RDBAH, low((base + RX_AT) >> 32)),
            (RDLEN, RING * 16),
            (RDH, 0),
            (RDT, RING - 1),
            (RCTL, OWN_RCTL),
            (TDBAL, low(base + TX_AT)),
            (TDBAH, low((base + TX_AT) >> 32)),
            (TDLEN, RING * 16),
            (TDH, 0),
            (TDT, 0),
            (TIPG, OWN_TIPG),
            (TCTL, OWN_TCTL),
            (IMS, OWN_CAUSES),
        ] {
            side.put(at(reg), 4, value)?;
        }
        Ok(())
    }

    fn look(&mut self, side: &mut Side<'_>) -> Result<Look, DeviceError> {
        // A read clears the causes: later events set them again.
        let causes = side.get(at(ICR), 4)?;
        self.complete(side);
        self.walk(side)?;
        Ok(Look { overrun: causes & RXO != 0, all: causes & LSC, more: self.has_more(side) })
    }

    fn next(&mut self, side: &mut Side<'_>) -> Result<Next, DeviceError> {
        let place = RX_AT + u64::from(self.read) * 16;
        let mut status = [0];
        side.own.read(place + 12, &mut status);
        if status[0] & DONE == 0 {
            self.give_back(side)?;
            return Ok(Next::Nothing);
        }
        // Only after the status: the card has then written the whole descriptor.
        let mut descriptor = [0; 16];
        side.own.read(place, &mut descriptor);
        let length = usize::from(u16::from_le_bytes([descriptor[8], descriptor[9]]));
        if descriptor[12] & END == 0 || !(14..=2048).contains(&length) {
            return Ok(Next::Garbled);
        }
        let mut frame = vec![0; length];
        side.own.read(BUFFERS_AT + u64::from(self.read) * BUFFER, &mut frame);
        if descriptor[12] & TAGGED != 0 {
            let [first, second] = TAG.to_be_bytes();
            frame.splice(12..12, [first, second, descriptor[15], descriptor[14]]);
        }
        side.own.write(place, &empty(side.own.device_base(), self.read));
        self.read = (self.read + 1) % RING;
        self.back += 1;
        if self.back == BACK {
            self.give_back(side)?;
        }
        Ok(Next::Frame(frame))
    }

    fn drain(&mut self, side: &mut Side<'_>) -> Result<bool, DeviceError> {
        for _ in 0..MAX_CARD_READS {
            self.complete(side);
            if self.done == self.free {
                return Ok(true);
            }
            side.get(at(STATUS), 4)?;
        }
        Ok(false)
    }

    fn reset(&mut self, _: &mut Side<'_>) -> Result<(), DeviceError> {
        self.next = 0;
        self.frame = Frame::default();
        self.pending.clear();
        self.front.reset()?;
        // Each guest has a virtual PHY, which another guest must not observe.
        self.front.reset_phy();
        self.contexts = std::mem::take(&mut self.restored);
        self.fresh = [false; 2];
        for context in self.contexts.iter().flatten() {
            self.front.assemble(context);
        }
        Ok(())
    }

    fn may_master(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        self.walk(side)
    }

    fn read(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        match self.front.register_at(offset, bytes, false) {
            Some(TDH) => self.complete(side),
            Some(STATUS) => {
                let status = side.get(at(STATUS), 4)?;
                self.front.set_link(status);
            }
            _ => {}
        }
        self.front.read(E1000.bar(), offset, bytes)
    }

    fn write(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        let reg = self.front.register_at(offset, bytes, true);
        let sent = self.front.value(TCTL) & EN != 0;
        if reg == Some(MDIC) && value & PHY_READ == PHY_READ {
            self.look_at_link(side, value >> 16 & 0x1F)?;
        }
        if reg == Some(TCTL) && sent {
            // The holder may disable the transmitter: the card still sends what it has.
            self.empty(side)?;
        }
        self.front.write(E1000.bar(), offset, bytes, value)?;
        let sends = self.front.value(TCTL) & EN != 0;
        match reg {
            Some(TCTL) if sends && !sent => {
                self.next = self.front.value(TDH) & 0xFFFF;
                self.walk(side)
            }
            Some(TCTL) if !sends => {
                self.forget_frame();
                Ok(())
            }
            Some(TDT) => self.walk(side),
            _ => Ok(()),
        }
    }

    /// The card uses no window of the holder: the rings are the owner's, and [`Places`] maps frames when they are sent.
    fn map(&mut self, _: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        self.places.grant(mapping);
        self.front.map(mapping)
    }

    fn unmap(&mut self, _: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        self.places.withdraw(mapping);
        self.front.unmap(mapping)
    }

    fn hidden(&mut self) -> Vec<u8> {
        let both = self.contexts.map(|context| context.unwrap_or_default());
        if self.contexts == [None; 2] { Vec::new() } else { both.concat() }
    }

    fn set_hidden(&mut self, hidden: Vec<u8>) {
        self.contexts = [None; 2];
        for (context, bytes) in self.restored.iter_mut().zip(hidden.as_chunks::<16>().0) {
            // All zeros means that the guest has sent no context: a context has a command bit.
            *context = (*bytes != [0; 16]).then_some(*bytes);
        }
        if hidden.is_empty() {
            self.restored = [None; 2];
        }
    }

    fn forget_memory(&mut self, side: &mut Side<'_>, seat: usize) -> Result<(), DeviceError> {
        self.places.forget(side.card, seat)
    }
}
