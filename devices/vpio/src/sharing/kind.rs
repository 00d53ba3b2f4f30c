//! What differs from one kind of card to another, and what a kind sees of everything else.

use device_models::describe::Device;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice, poke};
use device_models::reference::Filter;

use super::{OwnRing, Seat};
use crate::dma::MemoryMap;

/// What a kind of card sees of everything else while it works.
pub(super) struct Side<'a> {
    pub device: &'static Device,
    pub card: &'a mut dyn PhysicalDevice,
    pub own: &'a mut dyn OwnRing,
    /// The card may use the holder's memory.
    pub masters: bool,
    pub seats: &'a [Seat],
    pub holder: Option<usize>,
    /// Frames of the holder that another guest takes.
    pub copies: Vec<Vec<u8>>,
    /// Frames of the holder that the card got, and that it didn't.
    pub handed: u64,
    pub refused: u64,
    pub resets: u64,
}

impl Side<'_> {
    pub fn get(&mut self, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        self.card.read(self.device.bar(), offset, bytes)
    }

    pub fn put(&mut self, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        self.card.write(self.device.bar(), offset, bytes, value)
    }

    /// Resets the card, by whatever way there is.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        self.card.reset()?;
        poke(self.device, self.card, self.device.reset)
    }

    /// Where the holder's memory is for a card without an IOMMU.
    ///
    /// # Errors
    /// Nobody has said it.
    pub fn map(&self, holder: usize) -> Result<&dyn MemoryMap, DeviceError> {
        let seat = self.seats.get(holder);
        seat.and_then(|seat| seat.map.as_deref()).map(|map| map as &dyn MemoryMap).ok_or_else(|| {
            let why = format!(
                "it has no IOMMU, and nobody has said where the memory of the guest in seat {holder} is: add the seat with its memory map"
            );
            DeviceError { bar: self.device.bar(), offset: 0, why }
        })
    }

    /// Whether another guest may take a frame of the holder to this address.
    pub fn wants(&self, to: [u8; 6]) -> bool {
        let another = |(number, seat): (usize, &Seat)| self.holder != Some(number) && seat.address == to;
        self.seats.len() > 1 && (to[0] & 1 == 1 || self.seats.iter().enumerate().any(another))
    }
}

/// What the card said.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Look {
    /// Frames that came in were lost.
    pub overrun: bool,
    /// Causes that concern all guests.
    pub all: u32,
    /// There is more to do at once.
    pub more: bool,
}

/// What is next in the owner's ring.
#[derive(Debug)]
pub(super) enum Next {
    Frame(Vec<u8>),
    Nothing,
    /// The ring can't be followed any more.
    Garbled,
}

/// What differs from one kind of card to another.
pub(super) trait Kind<B> {
    /// The emulation behind which the holder's registers are.
    fn front(&mut self) -> &mut dyn PhysicalDevice;
    /// What the emulation reaches from here on.
    fn set_memory(&mut self, memory: Option<B>);
    /// What the holder's receiver takes.
    fn filter(&self) -> Filter;
    /// Whether the holder's ring has room for a frame.
    fn has_room(&self, length: usize) -> bool;
    /// Puts a frame into the holder's ring. Whether it did.
    fn receive(&mut self, frame: &[u8]) -> bool;
    /// Causes of an interrupt for the holder.
    fn raise(&mut self, causes: u32);
    /// Resets the card, with what it has, and starts its receiver.
    fn start(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    /// Takes the card's causes, and what it has sent.
    fn look(&mut self, side: &mut Side<'_>) -> Result<Look, DeviceError>;
    /// The next frame that came in.
    fn next(&mut self, side: &mut Side<'_>) -> Result<Next, DeviceError>;
    /// Waits until the card has nothing of the holder's any more, so reads nothing of its memory. False: it doesn't come to an end.
    fn drain(&mut self, side: &mut Side<'_>) -> Result<bool, DeviceError>;
    /// The holder's device is reset.
    fn reset(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    /// The card may use the holder's memory from here on.
    fn may_master(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    fn read(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8) -> Result<u32, DeviceError>;
    fn write(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError>;
    /// A window of the holder's memory may be used.
    fn map(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError>;
    fn unmap(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError>;
    /// As [`PhysicalDevice::keeps_memory`]: it is part of what is hidden.
    fn keeps_memory(&self) -> bool {
        false
    }
    /// What no register shows of the guest that has lost the card.
    fn hidden(&mut self) -> Vec<u8> {
        Vec::new()
    }
    /// The same, of the guest that gets it. Its device is reset next.
    fn set_hidden(&mut self, _: Vec<u8>) {}
    /// What stays mapped for the guest of a seat while others have the card is unmapped.
    fn forget_memory(&mut self, _: &mut Side<'_>, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    /// As [`Self::drain`]; a card that doesn't come to an end is reset.
    fn empty(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        if !self.drain(side)? {
            side.resets += 1;
            self.start(side)?;
        }
        Ok(())
    }
}
