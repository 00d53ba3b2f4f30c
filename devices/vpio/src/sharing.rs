//! An RTL8139 that guests take turns with, and whose receiver nobody takes from the others.
//!
//! A hand-off resets a card, and what comes in meanwhile is lost; and a card that takes every guest's frames would put them all into the
//! holder's memory. So the receiver of a shared card is its owner's for good: one ring of the owner's own, all frames. What the monitor hands over is
//! the rest, among it the transmitter, which reads frames out of the holder's memory by DMA; and in the receiver's place a virtual one, the reference
//! emulation's, which fills the holder's ring. The monitor doesn't see the difference: this is a [`PhysicalDevice`].
//!
//! ```text
//! Monitor ─▶ SharedCard ─┬─ transmit descriptors ──▶ card ─▶ wire         frames: by DMA out of the holder's memory
//!                        ├─ link, version ─────────▶ card
//!                        └─ other registers ───────▶ reference emulation ─▶ holder's ring
//! wire ─▶ card ─▶ owner's ring ─▶ holder: its receiver; others: their queues, until it is their turn
//! ```
//!
//! A frame of a guest for another one's address goes onto the wire and to that guest: no wire brings it back. Nothing of a frame that isn't
//! a guest's reaches its memory, and the virtual receiver writes only where the monitor has mapped a validated window.

use std::collections::VecDeque;

use device_models::describe::Reg;
use device_models::devices::rtl8139::{
    AAP, AB, AM, APM, BUFE, CAPR, CR, IMR, ISR, LOOPBACK, MAR0, MAR4, OWN, RBSTART, RCR, RE, ROK, RST,
    RTL8139, RXOVW, TCR, TE, TER, TOK, TOK_BIT, TSAD0, TSD0, VERSION, WRAP,
};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice, poke};
use device_models::reference::SHORTEST;
use device_models::reference::rtl8139::{Filter, Rtl8139};
use serde::Serialize;

use crate::fast_forward::Scratch;
use crate::pad::{Inlet, Pad, in_pad};

/// Bytes of the owner's ring, and RCR for it: all frames, a frame at the end goes on behind it, 32 KiB, long bursts.
const OWN_RING: u32 = 0x8000;
const OWN_RCR: u32 = 0xF700 | 0x1000 | WRAP | AAP | APM | AM | AB;
/// Usual gap between frames, 8 retries, long bursts: as Linux's driver has it.
const OWN_TCR: u32 = 0x0300_0680;
/// Received, sent, errors. Not that the ring is full: QEMU's card then drops frames in place of holding them back.
const OWN_CAUSES: u32 = 0x006F;
/// TSD: carrier lost, aborted; the transmitter ran empty.
const ABORTED: u32 = 0x4000_0000;
const EMPTY: u32 = 0x4000;
/// Frames that wait for a guest's turn or for room in its ring.
const QUEUE: usize = 512;
/// Frames that are taken out of the owner's ring at a time.
const BATCH: usize = 64;
/// Reads of a descriptor until its frame must have been sent.
const PATIENCE: u32 = 10_000;

/// The owner's memory for the card: at least [`RING`] bytes.
pub trait OwnRing: Scratch {
    /// Reads bytes at an offset, as the card wrote them.
    fn read(&mut self, offset: u64, into: &mut [u8]);
}

/// What happened to frames for one guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Fed {
    /// Put into its ring.
    pub delivered: u64,
    /// Of these: waited for its turn or for room.
    pub queued: u64,
    /// Lost: more waited than there is room for.
    pub dropped: u64,
    /// Handed to the card.
    pub sent: u64,
}

/// One guest's side.
#[derive(Debug)]
struct Seat {
    address: [u8; 6],
    /// What its receiver takes, while another guest has the card.
    parked: Option<Filter>,
    queue: VecDeque<Vec<u8>>,
    fed: Fed,
}

/// What happened to the card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Frames that came in.
    pub arrived: u64,
    /// Of these, for none of the guests.
    pub for_nobody: u64,
    /// Frames of a guest for another.
    pub between_guests: u64,
    /// Times that the owner's ring or the card's buffer was full.
    pub overruns: u64,
    /// Times that the card had to be reset, with what it held.
    pub resets: u64,
}

/// The card, its owner's side and the holder's. See the module.
#[derive(Debug)]
pub struct SharedCard<P, B, O> {
    card: P,
    own: O,
    /// Where the owner reads next in its ring.
    read: u32,
    front: Rtl8139<Inlet<B>>,
    pad: Pad,
    seats: Vec<Seat>,
    holder: Option<usize>,
    /// The holder's command register lets the card master the bus; and the monitor does.
    guest_master: bool,
    monitor_master: bool,
    /// The holder's descriptors as it sees them.
    tsd: [u32; 4],
    tsad: [u32; 4],
    /// Frames that the card has: the holder's descriptor, the card's.
    pending: VecDeque<(usize, u32)>,
    /// The card's next descriptor.
    next: u32,
    totals: Totals,
}

/// A register's offset.
fn at(reg: Reg) -> u32 {
    RTL8139.register(reg).offset.unwrap_or(0)
}

impl<P: PhysicalDevice, B: Bus, O: OwnRing> SharedCard<P, B, O> {
    /// Starts the card's receiver, with a ring in `own`. No guest has a seat yet.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn new(card: P, own: O) -> Result<Self, DeviceError> {
        let pad = Pad::new();
        let inlet = Inlet::new(None, pad.clone());
        let mut shared = Self {
            card,
            own,
            read: 0,
            front: Rtl8139::new([0; 6], inlet, true),
            pad,
            seats: Vec::new(),
            holder: None,
            guest_master: false,
            monitor_master: false,
            tsd: [OWN; 4],
            tsad: [0; 4],
            pending: VecDeque::new(),
            next: 0,
            totals: Totals::default(),
        };
        shared.start()?;
        Ok(shared)
    }

    /// Scratch memory for the monitor.
    pub fn pad(&self) -> Pad {
        self.pad.clone()
    }

    /// The card itself.
    pub fn card(&mut self) -> &mut P {
        &mut self.card
    }

    /// A seat for a guest with this address: the next number, from 0 on.
    pub fn add_seat(&mut self, address: [u8; 6]) {
        self.seats.push(Seat { address, parked: None, queue: VecDeque::new(), fed: Fed::default() });
    }

    /// What happened to a guest's frames.
    pub fn fed(&self, seat: usize) -> Fed {
        self.seats.get(seat).map(|seat| seat.fed).unwrap_or_default()
    }

    /// What happened to the card.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Guests without the card for whom frames wait.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        let waits = |(number, seat): (usize, &Seat)| {
            (self.holder != Some(number) && !seat.queue.is_empty()).then_some(number)
        };
        self.seats.iter().enumerate().filter_map(waits)
    }

    /// The holder is about to lose the card: what its receiver takes is remembered. Before the monitor's `release`.
    pub fn park(&mut self) {
        let filter = self.front.filter();
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.parked = Some(filter);
        }
    }

    /// The next accesses are for this guest, with this memory; nobody's with `None`. After the monitor's `release`.
    pub fn seat(&mut self, holder: Option<(usize, B, bool)>) {
        let (seat, memory, master) = match holder {
            Some((seat, memory, master)) => (Some(seat), Some(memory), master),
            None => (None, None, false),
        };
        self.holder = seat;
        self.front.bus().set_memory(memory);
        self.guest_master = master;
    }

    /// The guest of a seat is gone, and so is what waits for it. It doesn't hold the card.
    pub fn vacate(&mut self, seat: usize) {
        if let Some(seat) = self.seats.get_mut(seat) {
            seat.parked = None;
            seat.queue.clear();
        }
    }

    /// Bus mastering as the holder's command register has it.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        if !on {
            self.drain()?;
        }
        self.guest_master = on;
        Ok(())
    }

    /// Takes what the card has finished: frames that came in, frames that were sent. Whether there is more. The card's interrupt may be unmasked
    /// after it.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn poll(&mut self) -> Result<bool, DeviceError> {
        let causes = self.get(at(ISR), 2)?;
        if causes != 0 {
            // First: what happens from here on is told again.
            self.put(at(ISR), 2, causes)?;
        }
        if causes & (RXOVW | 0x40) != 0 {
            self.totals.overruns += 1;
        }
        self.collect()?;
        self.take_frames()
    }

    /// Puts what waits for the holder into its ring, as far as there is room. After the monitor's `switch` and after each access: what makes room
    /// in the midst of a hand-off makes none for the guest.
    pub fn feed(&mut self) {
        let masters = self.masters() && !self.loops();
        let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) else { return };
        while let Some(frame) = seat.queue.front() {
            // A filter that has changed meanwhile decides anew.
            if self.front.filter().accepts(frame) {
                if !masters || !self.front.has_room(frame.len()) {
                    return;
                }
                seat.fed.delivered += u64::from(self.front.receive(frame));
            }
            seat.queue.pop_front();
        }
    }

    fn get(&mut self, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        self.card.read(RTL8139.bar(), offset, bytes)
    }

    fn put(&mut self, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        self.card.write(RTL8139.bar(), offset, bytes, value)
    }

    /// Resets the card and starts both engines.
    fn start(&mut self) -> Result<(), DeviceError> {
        self.card.reset()?;
        poke(&RTL8139, &mut self.card, RTL8139.reset)?;
        self.card.set_bus_master(true)?;
        (self.read, self.next) = (0, 0);
        self.pending.clear();
        let ring = u32::try_from(self.own.device_base()).unwrap_or(0);
        self.put(at(RBSTART), 4, ring)?;
        self.put(at(CR), 1, TE | RE)?;
        self.put(at(RCR), 4, OWN_RCR)?;
        self.put(at(TCR), 4, OWN_TCR)?;
        self.put(at(MAR0), 4, u32::MAX)?;
        self.put(at(MAR4), 4, u32::MAX)?;
        self.put(at(IMR), 2, OWN_CAUSES)
    }

    fn restart(&mut self) -> Result<(), DeviceError> {
        self.totals.resets += 1;
        self.start()
    }

    fn take_frames(&mut self) -> Result<bool, DeviceError> {
        for _ in 0..BATCH {
            if self.get(at(CR), 1)? & BUFE != 0 {
                return Ok(false);
            }
            let mut header = [0; 4];
            self.own.read(self.read.into(), &mut header);
            let [low, high, length_low, length_high] = header;
            let (status, length) =
                (u16::from_le_bytes([low, high]), u16::from_le_bytes([length_low, length_high]));
            let length = usize::from(length);
            // With its CRC. A card whose ring can't be followed any more starts anew.
            if u32::from(status) & ROK == 0 || !(18..=1540).contains(&length) {
                self.restart()?;
                return Ok(false);
            }
            let mut frame = vec![0; length - 4];
            self.own.read(u64::from(self.read) + 4, &mut frame);
            let stored = (u32::try_from(length).unwrap_or(0) + 4).next_multiple_of(4);
            self.read = (self.read + stored) % OWN_RING;
            self.put(at(CAPR), 2, self.read.wrapping_sub(16) & 0xFFFF)?;
            self.totals.arrived += 1;
            frame.resize(frame.len().max(SHORTEST), 0);
            if !self.deliver(&frame, None) {
                self.totals.for_nobody += 1;
            }
        }
        Ok(true)
    }

    /// Gives a frame to all whose receivers take it but its sender. Whether anybody does.
    fn deliver(&mut self, frame: &[u8], sender: Option<usize>) -> bool {
        let (live, masters) = (self.front.filter(), self.masters());
        let mut taken = false;
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let holds = self.holder == Some(number);
            let filter = if holds { Some(live) } else { seat.parked };
            // A guest has its own frames and groups', whatever else it would take.
            let its = frame.get(..6).is_some_and(|to| to[0] & 1 == 1 || to == seat.address);
            if sender == Some(number) || !its || !filter.is_some_and(|filter| filter.accepts(frame)) {
                continue;
            }
            taken = true;
            if holds && masters && seat.queue.is_empty() && self.front.has_room(frame.len()) {
                seat.fed.delivered += u64::from(self.front.receive(frame));
            } else if seat.queue.len() < QUEUE {
                seat.queue.push_back(frame.to_vec());
                seat.fed.queued += 1;
            } else {
                seat.fed.dropped += 1;
            }
        }
        taken
    }

    /// Takes what the card says of the frames that it has.
    fn collect(&mut self) -> Result<(), DeviceError> {
        while let Some(&(descriptor, on_card)) = self.pending.front() {
            let status = self.get(at(TSD0) + 4 * on_card, 4)?;
            if status & OWN == 0 || status & (TOK_BIT | ABORTED | EMPTY) == 0 {
                break;
            }
            self.pending.pop_front();
            self.tsd[descriptor] = status;
            self.front.raise(if status & TOK_BIT != 0 { TOK } else { TER });
        }
        Ok(())
    }

    /// After this the card has no frame of the holder's, so reads nothing of its memory any more.
    fn drain(&mut self) -> Result<(), DeviceError> {
        for _ in 0..PATIENCE {
            self.collect()?;
            if self.pending.is_empty() {
                return Ok(());
            }
        }
        self.restart()
    }

    /// The holder hands a frame over, or takes a descriptor back.
    fn transmit(&mut self, descriptor: usize, value: u32) -> Result<(), DeviceError> {
        if value & OWN != 0 || self.pending.iter().any(|&(its, _)| its == descriptor) {
            self.drain()?;
        }
        self.tsd[descriptor] = value;
        if value & OWN != 0 || !self.masters() {
            return Ok(());
        }
        if self.seats.len() > 1 {
            self.pass_on(self.tsad[descriptor], value & 0x1FFF);
        }
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.fed.sent += 1;
        }
        self.put(at(TSAD0) + 4 * self.next, 4, self.tsad[descriptor])?;
        self.put(at(TSD0) + 4 * self.next, 4, value)?;
        self.pending.push_back((descriptor, self.next));
        self.next = (self.next + 1) % 4;
        Ok(())
    }

    /// A copy of a frame that another guest takes. The holder may change it between this and the card's own reading: both are its frames.
    fn pass_on(&mut self, address: u32, length: u32) {
        let length = usize::try_from(length).unwrap_or(0);
        let mut to = [0; 6];
        self.front.bus().read(address.into(), &mut to);
        let another = |(number, seat): (usize, &Seat)| self.holder != Some(number) && seat.address == to;
        if !(SHORTEST..=1518).contains(&length)
            || to[0] & 1 == 0 && !self.seats.iter().enumerate().any(another)
        {
            return;
        }
        let mut frame = vec![0; length];
        self.front.bus().read(address.into(), &mut frame);
        if self.deliver(&frame, self.holder) {
            self.totals.between_guests += 1;
        }
    }

    /// Whether the card may use the holder's memory.
    fn masters(&self) -> bool {
        self.guest_master && self.monitor_master
    }

    fn loops(&self) -> bool {
        self.front.value(TCR) & LOOPBACK == LOOPBACK
    }
}

/// A descriptor's number, for an access to one of four registers from `first` on.
fn descriptor(first: Reg, offset: u32, bytes: u8) -> Option<usize> {
    let within = offset.checked_sub(at(first)).filter(|within| *within < 16)?;
    (bytes == 4 && within.is_multiple_of(4)).then(|| usize::try_from(within / 4).unwrap_or(0))
}

impl<P: PhysicalDevice, B: Bus, O: OwnRing> PhysicalDevice for SharedCard<P, B, O> {
    fn read(&mut self, bar: u8, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        if (0x10..0x20).contains(&offset) && !self.loops() {
            self.collect()?;
            let within = offset - at(TSD0);
            let value = self.tsd[usize::try_from(within / 4).unwrap_or(0) & 3];
            return Ok(value >> (8 * (within & 3)));
        }
        // Link and transceiver.
        if offset == 0x58 || (0x62..0x6C).contains(&offset) {
            return self.card.read(bar, offset, bytes);
        }
        let value = self.front.read(bar, offset, bytes)?;
        if offset == at(TCR) && bytes == 4 {
            return Ok(value & !VERSION | self.get(offset, 4)? & VERSION);
        }
        Ok(value)
    }

    fn write(&mut self, bar: u8, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        if !self.loops()
            && let Some(number) = descriptor(TSD0, offset, bytes)
        {
            return self.transmit(number, value);
        }
        if let Some(number) = descriptor(TSAD0, offset, bytes) {
            self.tsad[number] = value;
        }
        if offset == at(CR) && (value & RST != 0 || value & TE == 0) {
            self.drain()?;
        }
        if offset == at(CR) && value & RST != 0 {
            self.tsd = [OWN; 4];
        }
        self.front.write(bar, offset, bytes, value)
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.front.interrupt()
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.drain()?;
        (self.tsd, self.tsad) = ([OWN; 4], [0; 4]);
        self.front.reset()
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        if !on {
            // Before windows are unmapped.
            self.drain()?;
        }
        self.monitor_master = on;
        // The monitor's own frames to itself need nobody else's leave.
        self.front.set_bus_master(on)
    }

    fn has_iommu(&self) -> bool {
        true
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if in_pad(mapping.device_base).is_none() {
            self.card.map(mapping)?;
        }
        self.front.map(mapping)
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.front.unmap(mapping)?;
        if in_pad(mapping.device_base).is_some() { Ok(()) } else { self.card.unmap(mapping) }
    }
}
