//! The interface between a shared card and its kind (RTL8139, e1000, NE2000).

use device_models::describe::Device;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice, poke};
use device_models::reference::Filter;

use super::{OwnRing, Seat};
use crate::dma::MemoryMap;

/// The parts of the shared card that a kind may use during a call.
pub(super) struct Side<'a> {
    pub device: &'static Device,
    pub card: &'a mut dyn PhysicalDevice,
    pub own: &'a mut dyn OwnRing,
    /// The card may use the holder's memory.
    pub masters: bool,
    pub seats: &'a [Seat],
    pub holder: Option<usize>,
    /// Copies of the holder's frames for other guests.
    pub copies: Vec<Vec<u8>>,
    /// Frames of the holder that the card got, and frames that were refused.
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

    /// Resets the card by any available means.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        self.card.reset()?;
        poke(self.device, self.card, self.device.reset)
    }

    /// Returns the holder's memory map, for a card without an IOMMU.
    ///
    /// # Errors
    /// The seat has no memory map.
    pub fn map(&self, holder: usize) -> Result<&dyn MemoryMap, DeviceError> {
        let seat = self.seats.get(holder);
        seat.and_then(|seat| seat.map.as_deref()).map(|map| map as &dyn MemoryMap).ok_or_else(|| {
            let why = format!(
                "it has no IOMMU, and the memory map of the guest in seat {holder} is missing: add the seat with its memory map"
            );
            DeviceError { bar: self.device.bar(), offset: 0, why }
        })
    }

    /// Returns whether another guest may accept a frame of the holder to this address.
    pub fn wants(&self, to: [u8; 6]) -> bool {
        let another = |(number, seat): (usize, &Seat)| self.holder != Some(number) && seat.address == to;
        self.seats.len() > 1 && (to[0] & 1 == 1 || self.seats.iter().enumerate().any(another))
    }
}

/// The result of a poll of the card.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Look {
    /// The card lost received frames.
    pub overrun: bool,
    /// Causes that concern all guests.
    pub all: u32,
    /// More work is pending.
    pub more: bool,
}

/// The next entry of the owner's ring.
#[derive(Debug)]
pub(super) enum Next {
    Frame(Vec<u8>),
    Nothing,
    /// The ring's content is invalid: the card must be reset.
    Garbled,
}

/// The parts of a shared card that depend on its kind.
pub(super) trait Kind<B> {
    /// Returns the emulation with the holder's registers.
    fn front(&mut self) -> &mut dyn PhysicalDevice;
    /// Sets the memory that the emulation reaches.
    fn set_memory(&mut self, memory: Option<B>);
    /// Returns the filter of the holder's receiver.
    fn filter(&self) -> Filter;
    /// Returns whether the holder's ring has room for a frame.
    fn has_room(&self, length: usize) -> bool;
    /// Stores a frame in the holder's ring. Returns whether it did.
    fn receive(&mut self, frame: &[u8]) -> bool;
    /// Raises interrupt causes for the holder.
    fn raise(&mut self, causes: u32);
    /// Resets the card, which loses its frames, and starts its receiver.
    fn start(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    /// Reads the card's causes and collects sent frames.
    fn look(&mut self, side: &mut Side<'_>) -> Result<Look, DeviceError>;
    /// Returns the next received frame.
    fn next(&mut self, side: &mut Side<'_>) -> Result<Next, DeviceError>;
    /// Waits until the card has sent all frames of the holder and no longer reads its memory. Returns false if the card
    /// doesn't finish.
    fn drain(&mut self, side: &mut Side<'_>) -> Result<bool, DeviceError>;
    /// Resets the holder's device.
    fn reset(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    /// Notes that the card may use the holder's memory from now on.
    fn may_master(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError>;
    fn read(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8) -> Result<u32, DeviceError>;
    fn write(&mut self, side: &mut Side<'_>, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError>;
    /// Grants a window of the holder's memory.
    fn map(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError>;
    fn unmap(&mut self, side: &mut Side<'_>, mapping: Mapping) -> Result<(), DeviceError>;
    /// As [`PhysicalDevice::keeps_memory`]: the card's memory is then part of the hidden state.
    fn keeps_memory(&self) -> bool {
        false
    }
    /// Returns the hidden state of the guest that has lost the card.
    fn hidden(&mut self) -> Vec<u8> {
        Vec::new()
    }
    /// Sets the hidden state of the guest that gets the card. A reset of its device follows.
    fn set_hidden(&mut self, _: Vec<u8>) {}
    /// Unmaps the memory that stays mapped for a guest while others have the card.
    fn forget_memory(&mut self, _: &mut Side<'_>, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    /// As [`Self::drain`], but resets a card that doesn't finish.
    fn empty(&mut self, side: &mut Side<'_>) -> Result<(), DeviceError> {
        if !self.drain(side)? {
            side.resets += 1;
            self.start(side)?;
        }
        Ok(())
    }
}
