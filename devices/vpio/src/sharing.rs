//! A card that several guests share. A hand-off moves the transmitter, and the receiver serves all guests at any time.
//!
//! A hand-off with a receiver would reset the card and lose incoming frames. And the receiver would write every guest's
//! frames into the holder's memory. So the receiver of a shared card always belongs to the owner: one ring in the
//! owner's memory accepts all frames. A hand-off moves the rest, such as the transmitter, which sends the holder's
//! frames. The holder sees a virtual receiver: that of the reference emulation, which fills the holder's ring. To the
//! monitor a [`SharedCard`] is a normal [`PhysicalDevice`].
//!
//! ```text
//! Monitor ─▶ SharedCard ─┬─ frames to send ────────▶ card ─▶ wire
//!                        ├─ link ──────────────────▶ card
//!                        └─ other registers ───────▶ reference emulation ─▶ holder's ring
//! wire ─▶ card ─▶ owner's ring ─▶ holder: its receiver; others: their queues, until they hold the card
//! ```
//!
//! | kind | owner's ring | frames to send |
//! |---|---|---|
//! | `rtl8139` | in the owner's memory | by DMA out of the holder's memory; the card's descriptors go round, whichever the holder uses |
//! | `e1000` | in the owner's memory | by DMA out of the holder's memory; the holder's descriptors are read once, checked and put into a ring of the owner's |
//! | `ne2000` | on the card | each guest's on-card memory is the emulation's; a frame is copied to the card when it is sent |
//!
//! Without an IOMMU a card reaches any address that its descriptors name, so it must get all of them from the owner. An
//! e1000's rings are the owner's in any case. The holder's frames get the addresses that its [`MemoryMap`] returns
//! ([`SharedCard::add_seat_of`]). Nothing is mapped then.
//!
//! A frame from one guest to another goes onto the wire and directly to that guest, since no wire returns it. A guest's
//! memory receives only frames for this guest. The virtual receiver writes only into windows that the monitor validated
//! and mapped.

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

/// Capacity of a guest's queue, in frames: they wait until the guest holds the card or its ring has room.
const QUEUE: usize = 512;
/// Frames that [`SharedCard::poll`] takes from the owner's ring at a time.
const BATCH: usize = 64;
/// Limit of status reads until a card must have sent what it has.
const MAX_CARD_READS: u32 = 10_000;

/// The owner's memory for the card: at least [`own_bytes`] bytes.
pub trait OwnRing: Scratch {
    /// Reads bytes at an offset, as the card wrote them.
    fn read(&mut self, offset: u64, into: &mut [u8]);
}

/// Returns how many bytes of the owner's memory a card needs for DMA, or `None` if it can't be shared.
pub fn own_bytes(device: &Device) -> Option<u64> {
    match device.name {
        "rtl8139" => Some(RING),
        "e1000" => Some(e1000::OWN_BYTES),
        "ne2000" => Some(0),
        _ => None,
    }
}

/// Returns the titles of all cards that can be shared.
pub fn known() -> String {
    let all = devices::ALL.iter().filter(|device| own_bytes(device).is_some());
    all.map(|device| device.title).collect::<Vec<_>>().join(", ")
}

/// Frame counters of one guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Fed {
    /// Frames that were stored in the guest's ring.
    pub delivered: u64,
    /// Of these, frames that waited for the card or for room.
    pub queued: u64,
    /// Frames that were lost because the queue was full.
    pub dropped: u64,
    /// Frames that were handed to the card.
    pub sent: u64,
    /// Frames that were refused: outside of the guest's memory, impossible to map, or in more pieces than a card
    /// accepts.
    pub refused: u64,
}

/// State of one guest of the card.
struct Seat {
    address: [u8; 6],
    /// The guest's memory map, for a card without an IOMMU.
    map: Option<Box<dyn MemoryMap + Send>>,
    /// The guest's receive filter, while another guest has the card.
    parked: Option<Filter>,
    queue: VecDeque<Vec<u8>>,
    /// The guest's ring has no room for the first frame of the queue. Only an access of this guest changes that.
    full: bool,
    /// Interrupt causes that the guest gets together with the card.
    owed: u32,
    /// Hidden device state of the guest: state that no register exposes.
    hidden: Vec<u8>,
    fed: Fed,
}

/// Counters of the card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Frames that the card received.
    pub arrived: u64,
    /// Of these, frames that no guest accepts.
    pub for_nobody: u64,
    /// Frames from one guest to another.
    pub between_guests: u64,
    /// Overruns of the owner's ring or the card's buffer.
    pub overruns: u64,
    /// Resets of the card, which lose the frames that it holds.
    pub resets: u64,
}

/// The card with its owner's side and its holder's. See the module.
pub struct SharedCard<P, B, O> {
    device: &'static Device,
    card: Counted<P>,
    own: O,
    kind: Box<dyn Kind<B> + Send>,
    pad: Pad,
    seats: Vec<Seat>,
    holder: Option<usize>,
    /// Bus mastering as the holder's command register has it, and as the monitor has it. Both must be on.
    guest_master: bool,
    monitor_master: bool,
    totals: Totals,
}

impl<P: PhysicalDevice, B: Bus + Send + 'static, O: OwnRing> SharedCard<P, B, O> {
    /// Starts the receiver of a card that matches the description `device`, with a ring in `own`. No guest has a seat
    /// yet.
    ///
    /// # Errors
    /// The card is unreachable or can't be shared. Of the cards with DMA only the e1000 can be shared without an IOMMU.
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

    /// Returns the card's description.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns scratch memory for the monitor.
    pub fn pad(&self) -> Pad {
        self.pad.clone()
    }

    /// Returns the card itself.
    pub fn card(&mut self) -> &mut P {
        &mut self.card.card
    }

    /// Returns how many bytes of guests' memory are mapped for the card, and the peak.
    pub fn mapped(&self) -> (u64, u64) {
        (self.card.mapped, self.card.peak)
    }

    /// Adds a guest with this Ethernet address. Seats are numbered from 0. Only for a card behind an IOMMU or without
    /// DMA.
    pub fn add_seat(&mut self, address: [u8; 6]) {
        self.push_seat(address, None);
    }

    /// Adds a guest to any card. Without an IOMMU the card reads the guest's frames at the addresses from
    /// [`MemoryMap::dma`]. This memory must stay there, pinned and owned by the guest, until the guest has lost the
    /// card.
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

    /// Returns a guest's frame counters.
    pub fn fed(&self, seat: usize) -> Fed {
        self.seats.get(seat).map(|seat| seat.fed).unwrap_or_default()
    }

    /// Returns the card's counters.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns the guests that don't hold the card, and have queued frames for which their rings may have room.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        let waits = |(number, seat): (usize, &Seat)| {
            (self.holder != Some(number) && !seat.queue.is_empty() && !seat.full).then_some(number)
        };
        self.seats.iter().enumerate().filter_map(waits)
    }

    /// Saves the receive filter of the holder, which is about to lose the card. Call it before the monitor's `release`.
    pub fn park(&mut self) {
        let filter = self.kind.filter();
        if let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) {
            seat.parked = Some(filter);
        }
    }

    /// Assigns the following accesses to this guest with this memory, or to no guest with `None`. Call it after the
    /// monitor's `release`.
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

    /// Removes a guest and its queue. It must not hold the card.
    pub fn vacate(&mut self, seat: usize) {
        if let Some(seat) = self.seats.get_mut(seat) {
            seat.parked = None;
            seat.queue.clear();
            seat.hidden.clear();
            (seat.full, seat.owed) = (false, 0);
        }
    }

    /// Resets a card that failed or may have failed, and restarts its receiver. Reports the holder's pending frames as
    /// sent. The monitor's `recover` must follow.
    ///
    /// # Errors
    /// The card is unreachable.
    pub fn restart(&mut self) -> Result<(), DeviceError> {
        self.totals.resets += 1;
        self.with(|kind, side| kind.start(side))
    }

    /// Unmaps all memory of a guest, which must not hold the card.
    ///
    /// # Errors
    /// The card is unreachable.
    pub fn forget_memory(&mut self, seat: usize) -> Result<(), DeviceError> {
        self.with(|kind, side| kind.forget_memory(side, seat))
    }

    /// Sets bus mastering as the holder's command register has it.
    ///
    /// # Errors
    /// The card is unreachable.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.master(on, self.monitor_master)
    }

    fn master(&mut self, guest: bool, monitor: bool) -> Result<(), DeviceError> {
        let before = self.masters();
        if before && !(guest && monitor) {
            // Before the windows are unmapped.
            self.with(|kind, side| kind.empty(side))?;
        }
        (self.guest_master, self.monitor_master) = (guest, monitor);
        if !before && self.masters() {
            self.with(|kind, side| kind.may_master(side))?;
        }
        Ok(())
    }

    /// Processes what the card has finished: received frames and sent frames. Returns whether more is pending. The
    /// caller may unmask the card's interrupt afterwards.
    ///
    /// # Errors
    /// The card is unreachable.
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

    /// Stores the holder's queued frames in its ring while there is room. Call it after the monitor's `switch` and
    /// after each access. Room that appears during a hand-off isn't the guest's.
    pub fn feed(&mut self) {
        let masters = self.masters();
        let Some(seat) = self.holder.and_then(|holder| self.seats.get_mut(holder)) else { return };
        let owed = std::mem::take(&mut seat.owed);
        if owed != 0 {
            self.kind.raise(owed);
        }
        seat.full = false;
        while let Some(frame) = seat.queue.front() {
            // The filter may have changed since the frame was queued.
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

    /// Calls the card's kind, then updates counters and delivers copies.
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

    /// Delivers a frame to all guests whose receivers accept it, except its sender. Returns whether any guest accepts
    /// it.
    fn deliver(&mut self, frame: &[u8], sender: Option<usize>) -> bool {
        let masters = self.masters();
        let mut taken = false;
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let holds = self.holder == Some(number);
            // A guest gets only frames to its own address or to a group, even with a promiscuous filter.
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

    /// Returns whether the card may use the holder's memory. A card without bus mastering needs no permission.
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
        // The monitor's own frames to itself need only the monitor's permission.
        self.kind.front().set_bus_master(on)
    }

    /// Independent of the card: the emulated receiver checks the monitor's mappings, and the kind does so for frames to
    /// send.
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
