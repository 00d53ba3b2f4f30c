//! The backend of a model: a card of the host, or its emulation with a tap. A guest can be handed from one to the other.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use device_models::reference::Card;
use machine::interrupt::LevelLine;
use vpio::vfio::{OpenError, Vfio};

use super::wire::{Frames, Wire};

/// A card of this host.
pub(super) trait HostCard: PhysicalDevice {
    /// Sets bus mastering as the guest's command register has it.
    fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError>;
    /// The eventfd that signals that the card's line is up.
    fn interrupt_fd(&self) -> io::Result<OwnedFd>;
    /// Consumes that signal.
    fn signalled(&mut self);
    /// Unmasks the line, after its causes were taken.
    fn unmask(&mut self) -> Result<(), DeviceError>;
    /// Routes the line to [`Self::interrupt_fd`].
    fn enable_interrupt(&self) -> Result<(), OpenError>;
    /// Routes the line directly to the guest, without this process.
    fn connect_interrupt(&self, line: &LevelLine) -> Result<(), OpenError>;
}

impl HostCard for Vfio {
    fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        Self::set_guest_bus_master(self, on)
    }

    fn interrupt_fd(&self) -> io::Result<OwnedFd> {
        Self::interrupt_fd(self)
    }

    fn signalled(&mut self) {
        Self::signalled(self);
    }

    fn unmask(&mut self) -> Result<(), DeviceError> {
        Self::unmask(self)
    }

    fn enable_interrupt(&self) -> Result<(), OpenError> {
        self.enable_interrupt()
    }

    fn connect_interrupt(&self, line: &LevelLine) -> Result<(), OpenError> {
        self.connect_interrupt(line.trigger.as_fd(), line.resample.as_fd())
    }
}

/// An emulated card with its wire.
pub(super) struct Emulation {
    pub card: Box<dyn Card + Send>,
    pub wire: Wire,
    pub frames: Frames,
    guest_master: bool,
    monitor_master: bool,
}

impl Emulation {
    pub fn new(card: Box<dyn Card + Send>, wire: Wire) -> Self {
        Self { card, wire, frames: Frames::default(), guest_master: false, monitor_master: false }
    }

    /// An emulated card without a model.
    pub fn alone(card: Box<dyn Card + Send>, wire: Wire) -> Self {
        Self { monitor_master: true, ..Self::new(card, wire) }
    }

    /// Sets bus mastering as the guest's command register has it.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.guest_master = on;
        self.update_bus_master()
    }

    fn update_bus_master(&mut self) -> Result<(), DeviceError> {
        self.card.set_bus_master(self.guest_master && self.monitor_master)
    }

    /// Sends the frames that the card has queued.
    pub fn take_sent(&mut self) {
        self.wire.take_sent(self.card.as_mut(), &mut self.frames);
    }

    /// Delivers received frames to the card.
    pub fn feed(&mut self) {
        self.wire.feed(self.card.as_mut(), &mut self.frames);
    }
}

/// The backend: a card or its emulation.
pub(super) enum Backend<C> {
    Card(Box<C>),
    Emulation(Box<Emulation>),
}

impl<C: HostCard> Backend<C> {
    fn device(&mut self) -> &mut dyn PhysicalDevice {
        match self {
            Self::Card(card) => card.as_mut(),
            Self::Emulation(emulation) => emulation.card.as_mut(),
        }
    }

    pub fn card(&mut self) -> Option<&mut C> {
        match self {
            Self::Card(card) => Some(card),
            Self::Emulation(_) => None,
        }
    }

    pub fn is_emulation(&self) -> bool {
        matches!(self, Self::Emulation(_))
    }

    /// Sets bus mastering as the guest's command register has it.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        match self {
            Self::Card(card) => card.set_guest_bus_master(on),
            Self::Emulation(emulation) => emulation.set_guest_bus_master(on),
        }
    }

    /// Unmasks the line, after its causes were taken.
    pub fn unmask(&mut self) -> Result<(), DeviceError> {
        self.card().map_or(Ok(()), HostCard::unmask)
    }
}

impl<C: HostCard> PhysicalDevice for Backend<C> {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        self.device().read(bar, offset, size)
    }

    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        self.device().write(bar, offset, size, value)?;
        if let Self::Emulation(emulation) = self {
            emulation.take_sent();
        }
        Ok(())
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.device().interrupt()
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.device().reset()
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        match self {
            Self::Card(card) => card.set_bus_master(on),
            Self::Emulation(emulation) => {
                emulation.monitor_master = on;
                emulation.update_bus_master()
            }
        }
    }

    fn has_iommu(&self) -> bool {
        match self {
            Self::Card(card) => card.has_iommu(),
            Self::Emulation(emulation) => emulation.card.has_iommu(),
        }
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.device().map(mapping)
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.device().unmap(mapping)
    }
}
