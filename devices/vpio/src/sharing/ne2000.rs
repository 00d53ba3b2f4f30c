//! A shared NE2000. The card's memory belongs to the owner: six pages for the current transmit frame, and a ring that
//! accepts all frames. Each guest's on-card memory is emulated: its ring and its transmit frames. A hand-off changes
//! the emulation's memory. Moving it through the card's data port, as for an unshared card, would take longer than a
//! time slice if the ring is full. A frame moves to the card when its guest starts the transmission.
//!
//! The card has one remote DMA transfer at a time, which the owner uses. The emulation does the guests' transfers.

use device_models::describe::Reg;
use device_models::devices::ne2000::{
    BNRY, CR, CURR, DATA, DCR, IMR, ISR, MAR0, NCR, NE2000, OVW, PRO, PRX, PSTART, PSTOP, PTX, RBCR0, RBCR1,
    RCR, RDC, RSAR0, RSAR1, RST, RXE, TBCR0, TBCR1, TCR, TPSR, TSR, TXE, TXP,
};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference::ne2000::Ne2000;
use device_models::reference::{Filter, SHORTEST};

use super::{Kind, Look, MAX_CARD_READS, Next, Side};

/// Pages of the card: the transmit frame, then the ring.
const FRAME: u32 = 0x40;
const START: u32 = 0x46;
const STOP: u32 = 0x80;
const PAGE: u32 = 256;
/// Largest frame in bytes without its CRC, with a VLAN tag: it fits into six pages.
const MAX_FRAME_BYTES: usize = 1518;
/// CR: stop; start without remote DMA; the other register page; remote read; remote write; transmit.
const HALT: u32 = 0x21;
const RUN: u32 = 0x22;
const RUN_BANK1: u32 = 0x62;
const HALT_BANK1: u32 = 0x61;
const FETCH: u32 = 0x0A;
const STORE: u32 = 0x12;
const SEND: u32 = 0x26;
/// RCR: promiscuous, multicast as the filter says, broadcast.
const OWN_RCR: u32 = PRO | 0x08 | 0x04;
/// DCR: word transfers, normal operation.
const WORDS: u32 = 0x49;
/// TCR: loopback.
const LOOPBACK: u32 = 0x02;
const OWN_CAUSES: u32 = PRX | PTX | RXE | TXE | OVW;
/// TSR: transmitted; aborted.
const SENT: u32 = 0x01;
const ABORTED: u32 = 0x08;
/// Limit of status reads until a stopped card must report it. QEMU's never does.
const STOPPING: u32 = 2_000;

/// The holder's state.
pub(super) struct Shared {
    front: Ne2000,
    /// Page that the owner reads next.
    next: u32,
    /// The card is sending the holder's frame.
    sending: bool,
    /// After an overflow of the ring, the card stays stopped until the ring is empty. The value says whether its frame
    /// must be sent again.
    full: Option<bool>,
}

/// Returns a register's offset.
fn at(reg: Reg) -> u32 {
    NE2000.register(reg).offset.unwrap_or(0)
}

impl Shared {
    pub fn new() -> Self {
        Self { front: Ne2000::new([0; 6]).without_log(), next: START, sending: false, full: None }
    }

    /// Reads the outcome of the frame that the card sends.
    fn collect(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        if !self.sending || side.get(at(CR), 1)? & TXP != 0 {
            return Ok(());
        }
        let (status, collisions) = (side.get(at(TSR), 1)?, side.get(at(NCR), 1)?);
        self.sending = false;
        self.front.finish(status, collisions, if status & SENT != 0 { PTX } else { TXE });
        Ok(())
    }

    /// Passes the frame that the holder started to the card.
    fn transmit(&mut self, side: &mut Side<'_>, frame: Vec<u8>) -> Result<(), DeviceError> {
        let length @ 1..=MAX_FRAME_BYTES = frame.len() else {
            side.refused += 1;
            self.front.finish(ABORTED, 0, TXE);
            return Ok(());
        };
        store(side, &frame)?;
        let [low, high, ..] = length.to_le_bytes();
        for (reg, value) in [(TBCR0, low.into()), (TBCR1, high.into()), (TPSR, FRAME), (CR, SEND)] {
            side.put(at(reg), 1, value)?;
        }
        self.sending = true;
        side.handed += 1;
        if let (SHORTEST.., Some(to)) = (frame.len(), frame.first_chunk())
            && side.wants(*to)
        {
            side.copies.push(frame);
        }
        Ok(())
    }

    /// Handles an overflow of the ring. As the data sheet requires: stop, and run in loopback until the ring is empty.
    fn stand_still(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        let sending = side.get(at(CR), 1)? & TXP != 0;
        side.put(at(CR), 1, HALT)?;
        let mut causes = 0;
        for _ in 0..STOPPING {
            causes = side.get(at(ISR), 1)?;
            if causes & RST != 0 {
                break;
            }
        }
        self.full = Some(sending && causes & (PTX | TXE) == 0);
        for (reg, value) in [(RBCR0, 0), (RBCR1, 0), (TCR, LOOPBACK), (CR, RUN)] {
            side.put(at(reg), 1, value)?;
        }
        Ok(())
    }

    /// Resumes after an overflow: the ring is empty.
    fn go_on(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        let Some(again) = self.full.take() else { return Ok(()) };
        side.put(at(ISR), 1, OVW)?;
        side.put(at(TCR), 1, 0)?;
        if again { side.put(at(CR), 1, SEND) } else { Ok(()) }
    }
}

/// Starts a transfer of `bytes` bytes, rounded up to whole double words.
fn transfer(side: &mut Side<'_>, place: u32, bytes: usize, command: u32) -> Result<(), DeviceError> {
    let [low, high, ..] = bytes.next_multiple_of(4).to_le_bytes();
    for (reg, value) in [
        (ISR, RDC),
        (RBCR0, low.into()),
        (RBCR1, high.into()),
        (RSAR0, place & 0xFF),
        (RSAR1, place >> 8 & 0xFF),
        (CR, command),
    ] {
        side.put(at(reg), 1, value)?;
    }
    Ok(())
}

/// Ends a transfer.
fn end(side: &mut Side<'_>) -> Result<(), DeviceError> {
    side.put(at(CR), 1, RUN)?;
    side.put(at(ISR), 1, RDC)
}

/// Reads from the card's memory. A read past the ring's end wraps to its start, as on the card.
fn fetch(side: &mut Side<'_>, place: u32, bytes: usize) -> Result<Vec<u8>, DeviceError> {
    transfer(side, place, bytes, FETCH)?;
    let mut data = Vec::with_capacity(bytes + 3);
    while data.len() < bytes {
        data.extend(side.get(at(DATA), 4)?.to_le_bytes());
    }
    data.truncate(bytes);
    end(side)?;
    Ok(data)
}

/// Copies a frame to the transmit pages.
fn store(side: &mut Side<'_>, frame: &[u8]) -> Result<(), DeviceError> {
    transfer(side, FRAME * PAGE, frame.len(), STORE)?;
    for chunk in frame.chunks(4) {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        side.put(at(DATA), 4, u32::from_le_bytes(word))?;
    }
    for _ in 0..MAX_CARD_READS {
        if side.get(at(ISR), 1)? & RDC != 0 {
            return end(side);
        }
    }
    let why =
        format!("a transfer of {} bytes to its memory didn't end in {MAX_CARD_READS} reads", frame.len());
    Err(DeviceError { bar: NE2000.bar(), offset: at(DATA), why })
}

impl<B: Bus> Kind<B> for Shared {
    fn front(&mut self) -> &mut dyn PhysicalDevice {
        &mut self.front
    }

    fn set_memory(&mut self, _: Option<B>) {
        // The card does no DMA.
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
        side.reset()?;
        self.next = START;
        self.full = None;
        if std::mem::take(&mut self.sending) {
            self.front.finish(ABORTED, 0, TXE);
        }
        for (reg, value) in [
            (CR, HALT),
            (DCR, WORDS),
            (RBCR0, 0),
            (RBCR1, 0),
            (TCR, LOOPBACK),
            (PSTART, START),
            (PSTOP, STOP),
            (BNRY, STOP - 1),
            (ISR, 0xFF),
            (CR, HALT_BANK1),
            (CURR, START),
        ] {
            side.put(at(reg), 1, value)?;
        }
        for row in 0..8 {
            side.put(at(Reg(MAR0.0 + row)), 1, 0xFF)?;
        }
        for (reg, value) in [(CR, HALT), (IMR, OWN_CAUSES), (CR, RUN), (TCR, 0), (RCR, OWN_RCR)] {
            side.put(at(reg), 1, value)?;
        }
        Ok(())
    }

    fn look(&mut self, side: &mut Side<'_>) -> Result<Look, DeviceError> {
        let causes = side.get(at(ISR), 1)? & OWN_CAUSES;
        let overrun = causes & OVW != 0;
        if causes & !OVW != 0 {
            // First: later events must set the causes again.
            side.put(at(ISR), 1, causes & !OVW)?;
        }
        if overrun {
            self.stand_still(side)?;
        }
        self.collect(side)?;
        Ok(Look { overrun, ..Look::default() })
    }

    fn next(&mut self, side: &mut Side<'_>) -> Result<Next, DeviceError> {
        side.put(at(CR), 1, RUN_BANK1)?;
        let current = side.get(at(CURR), 1)?;
        side.put(at(CR), 1, RUN)?;
        if current == self.next {
            self.go_on(side)?;
            return Ok(Next::Nothing);
        }
        let header = fetch(side, self.next * PAGE, 4)?;
        let next = u32::from(header[1]);
        let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
        // The length includes the CRC.
        let sane = u32::from(header[0]) & PRX != 0 && (18..=MAX_FRAME_BYTES + 4).contains(&length);
        if !sane || next == self.next || [next, current].iter().any(|page| !(START..STOP).contains(page)) {
            return Ok(Next::Garbled);
        }
        let frame = fetch(side, self.next * PAGE + 4, length - 4)?;
        self.next = next;
        side.put(at(BNRY), 1, if next == START { STOP - 1 } else { next - 1 })?;
        Ok(Next::Frame(frame))
    }

    fn drain(&mut self, side: &mut Side<'_>) -> Result<bool, DeviceError> {
        for _ in 0..MAX_CARD_READS {
            self.collect(side)?;
            if !self.sending {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn reset(&mut self, _: &mut Side<'_>) -> Result<(), DeviceError> {
        self.front.reset()
    }

    fn may_master(&mut self, _: &mut Side<'_>) -> Result<(), DeviceError> {
        // Always permitted: the card has no bus mastering.
        Ok(())
    }

    fn read(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        if offset == at(CR) {
            self.collect(side)?;
        }
        self.front.read(NE2000.bar(), offset, bytes)
    }

    fn write(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        self.front.write(NE2000.bar(), offset, bytes, value)?;
        if !self.sending
            && let Some(frame) = self.front.sending()
        {
            return self.transmit(side, frame);
        }
        Ok(())
    }

    fn keeps_memory(&self) -> bool {
        true
    }

    fn hidden(&mut self) -> Vec<u8> {
        self.front.exchange_memory(Vec::new())
    }

    fn set_hidden(&mut self, hidden: Vec<u8>) {
        drop(self.front.exchange_memory(hidden));
    }

    fn map(&mut self, _: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        self.front.map(mapping)
    }

    fn unmap(&mut self, _: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError> {
        self.front.unmap(mapping)
    }
}
