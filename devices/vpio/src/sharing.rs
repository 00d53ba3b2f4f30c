//! A card that guests take turns with, and whose receiver nobody takes from the others.
//!
//! A hand-off resets a card, and what comes in meanwhile is lost; and a card that takes every guest's frames would put them all into the
//! holder's memory. So the receiver of a shared card is its owner's for good: one ring of the owner's own, all frames. What the monitor hands over is
//! the rest, among it the transmitter, which sends the holder's frames; and in the receiver's place a virtual one, the reference
//! emulation's, which fills the holder's ring. The monitor doesn't see the difference: this is a [`PhysicalDevice`].
//!
//! ```text
//! Monitor ─▶ SharedCard ─┬─ frames to send ────────▶ card ─▶ wire
//!                        ├─ link ──────────────────▶ card
//!                        └─ other registers ───────▶ reference emulation ─▶ holder's ring
//! wire ─▶ card ─▶ owner's ring ─▶ holder: its receiver; others: their queues, until it is their turn
//! ```
//!
//! | kind | owner's ring | frames to send |
//! |---|---|---|
//! | `rtl8139` | in the owner's memory | by DMA out of the holder's memory; the card's descriptors go round, whichever the holder uses |
//! | `e1000` | in the owner's memory | by DMA out of the holder's memory; the holder's descriptors are read once, checked and put into a ring of the owner's |
//! | `ne2000` | on the card | each guest's on-card memory is the emulation's; a frame is copied to the card when it is sent |
//!
//! A card without an IOMMU reaches whatever its descriptors name, so it takes them from the owner only: an e1000's rings are the owner's in any case,
//! and the holder's frames get the addresses that its [`MemoryMap`] gives ([`SharedCard::add_seat_of`]). Nothing is mapped then.
//!
//! A frame of a guest for another one's address goes onto the wire and to that guest: no wire brings it back. Nothing of a frame that isn't
//! a guest's reaches its memory, and the virtual receiver writes only where the monitor has mapped a validated window.

mod counted;
mod e1000;
mod kind;
mod ne2000;
mod places;
mod rtl8139;

use std::collections::VecDeque;

use device_models::describe::{BusMaster, Device};
use device_models::devices;
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference::{Filter, SHORTEST};
use serde::Serialize;

use self::counted::Counted;
use self::kind::{Kind, Look, Next, Side};
use crate::dma::MemoryMap;
use crate::fast_forward::{RING, Scratch};
use crate::pad::{Inlet, Pad};

/// Frames that wait for a guest's turn or for room in its ring.
const QUEUE: usize = 512;
/// Frames that are taken out of the owner's ring at a time.
const BATCH: usize = 64;
/// Looks at the card until what it has must have been sent.
const MAX_CARD_READS: u32 = 10_000;

/// The owner's memory for the card: at least [`own_bytes`].
pub trait OwnRing: Scratch {
    /// Reads bytes at an offset, as the card wrote them.
    fn read(&mut self, offset: u64, into: &mut [u8]);
}

/// Bytes of the owner's memory that a card needs, which it reaches by DMA; `None`: such a card can't be shared.
pub fn own_bytes(device: &Device) -> Option<u64> {
    match device.name {
        "rtl8139" => Some(RING),
        "e1000" => Some(e1000::OWN_BYTES),
        "ne2000" => Some(0),
        _ => None,
    }
}

/// Cards that can be shared.
pub fn known() -> String {
    let all = devices::ALL.iter().filter(|device| own_bytes(device).is_some());
    all.map(|device| device.title).collect::<Vec<_>>().join(", ")
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
    /// Not handed to the card: they lie outside of the guest's memory or where it can't be mapped, or have more pieces than a card takes.
    pub refused: u64,
}

/// One guest's side.
struct Seat {
    address: [u8; 6],
    /// Where its memory is for a card without an IOMMU.
    map: Option<Box<dyn MemoryMap + Send>>,
    /// What its receiver takes, while another guest has the card.
    parked: Option<Filter>,
    queue: VecDeque<Vec<u8>>,
    /// Its ring has no room for the first of the queue: only the guest itself changes that, by an access.
    full: bool,
    /// Causes that it is told when it has the card again.
    owed: u32,
    /// What a kind keeps of a guest that no register shows.
    hidden: Vec<u8>,
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
pub struct SharedCard<P, B, O> {
    device: &'static Device,
    card: Counted<P>,
    own: O,
    kind: Box<dyn Kind<B> + Send>,
    pad: Pad,
    seats: Vec<Seat>,
    holder: Option<usize>,
    /// The holder's command register lets the card master the bus; and the monitor does.
    guest_master: bool,
    monitor_master: bool,
    totals: Totals,
}

impl<P: PhysicalDevice, B: Bus + Send + 'static, O: OwnRing> SharedCard<P, B, O> {
    /// Starts the receiver of a card, which is what `device` describes, with a ring in `own`. No guest has a seat yet.
    ///
    /// # Errors
    /// The card can't be reached, or nobody knows how to share it: of those that reach memory only the e1000 without an IOMMU.
    pub fn new(device: &'static Device, card: P, own: O) -> Result<Self, DeviceError> {
        if device.pci.bus_master != BusMaster::Never && device.name != "e1000" && !card.has_iommu() {
            let why = format!(
                "an {} without an IOMMU can't be shared: share an e1000 or NE2000, or use a host with an IOMMU",
                device.title
            );
            return Err(DeviceError { bar: 0, offset: 0, why });
        }
        let pad = Pad::new();
        let inlet = Inlet::new(None, pad.clone());
        let kind: Box<dyn Kind<B> + Send> = match device.name {
            "rtl8139" => Box::new(rtl8139::Shared::new(inlet)),
            "e1000" => Box::new(e1000::Shared::new(inlet)),
            "ne2000" => Box::new(ne2000::Shared::new()),
            name => {
                let why = format!("an {name} can't be shared; {} can", known());
                return Err(DeviceError { bar: 0, offset: 0, why });
            }
        };
        let mut shared = Self {
            device,
            card: Counted { card, mapped: 0, peak: 0 },
            own,
            kind,
            pad,
            seats: Vec::new(),
            holder: None,
            guest_master: false,
            monitor_master: false,
            totals: Totals::default(),
        };
        shared.with(|kind, side| kind.start(side))?;
        Ok(shared)
    }

    /// What it is.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Scratch memory for the monitor.
    pub fn pad(&self) -> Pad {
        self.pad.clone()
    }

    /// The card itself.
    pub fn card(&mut self) -> &mut P {
        &mut self.card.card
    }

    /// Bytes of guests' memory that are mapped for the card, and the most that there were.
    pub fn mapped(&self) -> (u64, u64) {
        (self.card.mapped, self.card.peak)
    }

    /// A seat for a guest with this address: the next number, from 0 on. Behind an IOMMU, or at a card that reaches no memory.
    pub fn add_seat(&mut self, address: [u8; 6]) {
        self.push_seat(address, None);
    }

    /// The same at any card. Without an IOMMU the card reads the guest's frames where [`MemoryMap::dma`] says that they are, so that memory stays
    /// there, pinned, and the guest's, until the guest has lost the card.
    pub fn add_seat_of(&mut self, address: [u8; 6], map: Box<dyn MemoryMap + Send>) {
        self.push_seat(address, Some(map));
    }

    fn push_seat(&mut self, address: [u8; 6], map: Option<Box<dyn MemoryMap + Send>>) {
        self.seats.push(Seat {
            address,
            map,
            parked: None,
            queue: VecDeque::new(),
            full: false,
            owed: 0,
            hidden: Vec::new(),
            fed: Fed::default(),
        });
    }

    /// What happened to a guest's frames.
    pub fn fed(&self, seat: usize) -> Fed {
        self.seats.get(seat).map(|seat| seat.fed).unwrap_or_default()
    }

    /// What happened to the card.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Guests without the card for whom frames wait, which their rings may have room for.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        let waits = |(number, seat): (usize, &Seat)| {
            (self.holder != Some(number) && !seat.queue.is_empty() && !seat.full).then_some(number)
        };
        self.seats.iter().enumerate().filter_map(waits)
    }

    /// The holder is about to lose the card: what its receiver takes is remembered. Before the monitor's `release`.
    pub fn park(&mut self) {
        let filter = self.kind.filter();
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.parked = Some(filter);
        }
    }

    /// The next accesses are for this guest, with this memory; nobody's with `None`. After the monitor's `release`.
    pub fn seat(&mut self, holder: Option<(usize, B, bool)>) {
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.hidden = self.kind.hidden();
        }
        let (seat, memory, master) = match holder {
            Some((seat, memory, master)) => (Some(seat), Some(memory), master),
            None => (None, None, false),
        };
        self.holder = seat;
        self.kind.set_memory(memory);
        self.guest_master = master;
        let seat = self.holder.and_then(|holder| self.seats.get_mut(holder));
        self.kind.set_hidden(seat.map(|seat| std::mem::take(&mut seat.hidden)).unwrap_or_default());
    }

    /// The guest of a seat is gone, and so is what waits for it. It doesn't hold the card.
    pub fn vacate(&mut self, seat: usize) {
        if let Some(seat) = self.seats.get_mut(seat) {
            seat.parked = None;
            seat.queue.clear();
            seat.hidden.clear();
            (seat.full, seat.owed) = (false, 0);
        }
    }

    /// The card has failed, or may have: it is reset, with what it has, and its receiver starts anew. What it had of the holder's is told as sent.
    /// The monitor's `recover` comes next.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn restart(&mut self) -> Result<(), DeviceError> {
        self.totals.resets += 1;
        self.with(|kind, side| kind.start(side))
    }

    /// Nothing of the memory of a seat's guest is mapped any more after this. It doesn't hold the card.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn forget_memory(&mut self, seat: usize) -> Result<(), DeviceError> {
        self.with(|kind, side| kind.forget_memory(side, seat))
    }

    /// Bus mastering as the holder's command register has it.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.master(on, self.monitor_master)
    }

    fn master(&mut self, guest: bool, monitor: bool) -> Result<(), DeviceError> {
        let before = self.masters();
        if before && !(guest && monitor) {
            // Before windows are unmapped.
            self.with(|kind, side| kind.empty(side))?;
        }
        (self.guest_master, self.monitor_master) = (guest, monitor);
        if !before && self.masters() {
            self.with(|kind, side| kind.may_master(side))?;
        }
        Ok(())
    }

    /// Takes what the card has finished: frames that came in, frames that were sent. Whether there is more. The card's interrupt may be unmasked
    /// after it.
    ///
    /// # Errors
    /// The card can't be reached.
    pub fn poll(&mut self) -> Result<bool, DeviceError> {
        let look = self.with(|kind, side| kind.look(side))?;
        self.totals.overruns += u64::from(look.overrun);
        if look.all != 0 {
            self.seats.iter_mut().for_each(|seat| seat.owed |= look.all);
        }
        for _ in 0..BATCH {
            match self.with(|kind, side| kind.next(side))? {
                Next::Nothing => return Ok(look.more),
                Next::Garbled => {
                    self.totals.resets += 1;
                    self.with(|kind, side| kind.start(side))?;
                    return Ok(look.more);
                }
                Next::Frame(mut frame) => {
                    self.totals.arrived += 1;
                    frame.resize(frame.len().max(SHORTEST), 0);
                    if !self.deliver(&frame, None) {
                        self.totals.for_nobody += 1;
                    }
                }
            }
        }
        Ok(true)
    }

    /// Puts what waits for the holder into its ring, as far as there is room. After the monitor's `switch` and after each access: what makes room
    /// in the midst of a hand-off makes none for the guest.
    pub fn feed(&mut self) {
        let masters = self.masters();
        let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) else { return };
        let owed = std::mem::take(&mut seat.owed);
        if owed != 0 {
            self.kind.raise(owed);
        }
        seat.full = false;
        while let Some(frame) = seat.queue.front() {
            // A filter that has changed meanwhile decides anew.
            if self.kind.filter().accepts(frame) {
                if !masters {
                    return;
                }
                if !self.kind.has_room(frame.len()) {
                    seat.full = true;
                    return;
                }
                seat.fed.delivered += u64::from(self.kind.receive(frame));
            }
            seat.queue.pop_front();
        }
    }

    /// Has the kind do something, and does what follows.
    fn with<R>(
        &mut self,
        act: impl FnOnce(&mut dyn Kind<B>, &mut Side<'_>) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let mut side = Side {
            device: self.device,
            masters: self.guest_master && self.monitor_master,
            card: &mut self.card,
            own: &mut self.own,
            seats: &self.seats,
            holder: self.holder,
            copies: Vec::new(),
            handed: 0,
            refused: 0,
            resets: 0,
        };
        let result = act(self.kind.as_mut(), &mut side);
        let Side { copies, handed, refused, resets, .. } = side;
        self.totals.resets += resets;
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.fed.sent += handed;
            seat.fed.refused += refused;
        }
        for frame in copies {
            if self.deliver(&frame, self.holder) {
                self.totals.between_guests += 1;
            }
        }
        result
    }

    /// Gives a frame to all whose receivers take it but its sender. Whether anybody does.
    fn deliver(&mut self, frame: &[u8], sender: Option<usize>) -> bool {
        let masters = self.masters();
        let mut taken = false;
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let holds = self.holder == Some(number);
            // A guest has its own frames and groups', whatever else it would take.
            let its = frame.get(..6).is_some_and(|to| to[0] & 1 == 1 || to == seat.address);
            if sender == Some(number) || !its {
                continue;
            }
            let accepts = if holds {
                self.kind.filter().accepts(frame)
            } else {
                seat.parked.is_some_and(|filter| filter.accepts(frame))
            };
            if !accepts {
                continue;
            }
            taken = true;
            if holds && masters && seat.queue.is_empty() && self.kind.has_room(frame.len()) {
                seat.fed.delivered += u64::from(self.kind.receive(frame));
            } else if seat.queue.len() < QUEUE {
                seat.queue.push_back(frame.to_vec());
                seat.fed.queued += 1;
            } else {
                seat.fed.dropped += 1;
            }
        }
        taken
    }

    /// Whether the card may use the holder's memory. One that has no bus mastering needs no leave.
    fn masters(&self) -> bool {
        self.device.pci.bus_master == BusMaster::Never || self.guest_master && self.monitor_master
    }
}

impl<P: PhysicalDevice, B: Bus + Send + 'static, O: OwnRing> PhysicalDevice for SharedCard<P, B, O> {
    fn read(&mut self, _: u8, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        self.with(|kind, side| kind.read(side, offset, bytes))
    }

    fn write(&mut self, _: u8, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        self.with(|kind, side| kind.write(side, offset, bytes, value))
    }

    fn keeps_memory(&self) -> bool {
        self.kind.keeps_memory()
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.kind.front().interrupt()
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.with(|kind, side| {
            kind.empty(side)?;
            kind.reset(side)
        })
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.master(self.guest_master, on)?;
        // The monitor's own frames to itself need nobody else's leave.
        self.kind.front().set_bus_master(on)
    }

    /// Whatever the card has: what the monitor maps is kept by the emulated receiver, and for frames to send by the kind.
    fn has_iommu(&self) -> bool {
        true
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.with(|kind, side| kind.map(side, mapping))
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.with(|kind, side| kind.unmap(side, mapping))
    }
}
