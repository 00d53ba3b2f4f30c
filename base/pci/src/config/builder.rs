//! Builds a configuration space: identity, BARs, capabilities.

use super::capability::{CapabilityBuilder, ExtendedCapabilityBuilder, MaskedBytes};
use super::{CapabilityPlace, ConfigError, ConfigSpace, Masks};
use crate::function::{BarKind, BarLayout};
use crate::registers::*;

/// Identification of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// Vendor ID.
    pub vendor_id: u16,
    /// Device ID.
    pub device_id: u16,
    /// Revision ID.
    pub revision: u8,
    /// Class code.
    pub class: ClassCode,
    /// Subsystem vendor ID.
    pub subsystem_vendor_id: u16,
    /// Subsystem ID.
    pub subsystem_id: u16,
}

/// Class code (PCI 3.0 appendix D).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClassCode {
    /// Base class.
    pub base: u8,
    /// Sub-class, whose meaning depends on the base class.
    pub sub: u8,
    /// Programming interface.
    pub interface: u8,
}

impl ClassCode {
    /// Mass storage, other.
    pub const STORAGE_OTHER: Self = Self::new(0x01, 0x80, 0);
    /// SCSI storage: the traditional class of virtio-block.
    pub const STORAGE_SCSI: Self = Self::new(0x01, 0x00, 0);
    /// Ethernet controller.
    pub const ETHERNET: Self = Self::new(0x02, 0x00, 0);
    /// Network controller, other.
    pub const NETWORK_OTHER: Self = Self::new(0x02, 0x80, 0);
    /// Communication controller, other.
    pub const COMMUNICATION_OTHER: Self = Self::new(0x07, 0x80, 0);
    /// Host bridge.
    pub const HOST_BRIDGE: Self = Self::new(0x06, 0x00, 0);
    /// Fits no other class.
    pub const OTHER: Self = Self::new(0xFF, 0x00, 0);

    /// Builds a class code from its three bytes.
    #[must_use]
    pub const fn new(base: u8, sub: u8, interface: u8) -> Self {
        Self { base, sub, interface }
    }
}

/// INTA to INTD of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum InterruptPin {
    /// INTA; the only one for single-function devices.
    A,
    /// INTB, 2 in the interrupt pin register.
    B,
    /// INTC, 3 in the interrupt pin register.
    C,
    /// INTD, 4 in the interrupt pin register.
    D,
}

impl InterruptPin {
    /// All four, in order.
    pub const ALL: [Self; 4] = [Self::A, Self::B, Self::C, Self::D];

    /// Converts the value of the interrupt pin register. Returns `None` for 0 and reserved values.
    #[must_use]
    pub fn from_register(value: u8) -> Option<Self> {
        value.checked_sub(1).and_then(|index| Self::ALL.get(usize::from(index)).copied())
    }

    /// Returns the value of the interrupt pin register, 1 to 4.
    #[must_use]
    pub fn register(self) -> u8 {
        self.index() + 1
    }

    /// Returns 0 for INTA to 3 for INTD, as in ACPI.
    #[must_use]
    pub fn index(self) -> u8 {
        match self {
            Self::A => 0,
            Self::B => 1,
            Self::C => 2,
            Self::D => 3,
        }
    }
}

/// Builds a [`ConfigSpace`] with header type 0. Its content when built is the power-on state.
#[derive(Debug, Clone)]
pub struct ConfigSpaceBuilder {
    value: Vec<u8>,
    masks: Masks,
    bars: Vec<BarLayout>,
    capabilities: Vec<CapabilityPlace>,
    next_capability: usize,
    next_extended: usize,
}

impl ConfigSpaceBuilder {
    pub(super) fn new(identity: Identity) -> Self {
        let mut builder = Self {
            value: vec![0; CONFIG_SPACE_SIZE],
            masks: Masks::new(),
            bars: Vec::new(),
            capabilities: Vec::new(),
            next_capability: usize::from(FIRST_CAPABILITY),
            next_extended: usize::from(FIRST_EXTENDED_CAPABILITY),
        };
        builder.set(VENDOR_ID, &identity.vendor_id.to_le_bytes());
        builder.set(DEVICE_ID, &identity.device_id.to_le_bytes());
        builder.set(REVISION_ID, &[identity.revision]);
        builder.set(CLASS_INTERFACE, &[identity.class.interface, identity.class.sub, identity.class.base]);
        builder.set(SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor_id.to_le_bytes());
        builder.set(SUBSYSTEM_ID, &identity.subsystem_id.to_le_bytes());
        let command = COMMAND_BUS_MASTER | COMMAND_PARITY | COMMAND_SERR | COMMAND_INTX_DISABLE;
        Masks::add(&mut builder.masks.writable, COMMAND, &command.to_le_bytes());
        Masks::add(&mut builder.masks.clearable, STATUS, &STATUS_ERRORS.to_le_bytes());
        Masks::add(&mut builder.masks.writable, CACHE_LINE_SIZE, &[0xFF]);
        Masks::add(&mut builder.masks.writable, INTERRUPT_LINE, &[0xFF]);
        builder
    }

    fn set(&mut self, offset: u16, bytes: &[u8]) {
        let at = usize::from(offset);
        self.value[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Adds a BAR. Its decode bit in the command register becomes writable.
    ///
    /// # Errors
    /// The index or size is invalid, or another BAR uses the register.
    pub fn bar(&mut self, layout: BarLayout) -> Result<&mut Self, ConfigError> {
        check_bar(&self.bars, layout)?;
        let offset = BAR0 + 4 * u16::from(layout.index);
        let address_mask = !(layout.size - 1);
        let flags = match layout.kind {
            BarKind::Io => BAR_IO,
            BarKind::Memory32 => 0,
            BarKind::Memory64 => BAR_MEMORY_64,
        };
        let prefetchable = if layout.prefetchable { BAR_PREFETCHABLE } else { 0 };
        self.set(offset, &(flags | prefetchable).to_le_bytes());
        let (decode, width) = match layout.kind {
            BarKind::Io => (COMMAND_IO, 4),
            BarKind::Memory32 => (COMMAND_MEMORY, 4),
            BarKind::Memory64 => (COMMAND_MEMORY, 8),
        };
        Masks::add(&mut self.masks.writable, offset, &address_mask.to_le_bytes()[..width]);
        Masks::add(&mut self.masks.writable, COMMAND, &decode.to_le_bytes());
        self.bars.push(layout);
        self.bars.sort_by_key(|bar| bar.index);
        Ok(self)
    }

    /// Sets the function's INTx pin.
    pub fn interrupt_pin(&mut self, pin: InterruptPin) -> &mut Self {
        self.set(INTERRUPT_PIN, &[pin.register()]);
        self
    }

    /// Sets the multifunction bit. [`crate::root::PciRoot`] sets it by itself.
    pub fn multifunction(&mut self) -> &mut Self {
        self.set(HEADER_TYPE, &[HEADER_MULTIFUNCTION]);
        self
    }

    /// Appends a standard capability; returns its offset in configuration space.
    ///
    /// # Errors
    /// The 192 bytes for capabilities are exhausted.
    pub fn capability(&mut self, capability: CapabilityBuilder) -> Result<u16, ConfigError> {
        let id = u16::from(capability.id);
        let offset = self.append(id, false, &capability.body)?;
        self.set(offset, &[capability.id]);
        // Standard capabilities are below 256: the low byte is the whole offset.
        let [link, _] = offset.to_le_bytes();
        match self.last(false) {
            Some(previous) => self.set(previous + 1, &[link]),
            None => {
                self.set(CAPABILITY_POINTER, &[link]);
                self.set(STATUS, &STATUS_CAPABILITY_LIST.to_le_bytes());
            }
        }
        self.capabilities.push(CapabilityPlace { id, offset, extended: false });
        Ok(offset)
    }

    /// Appends an extended capability; returns its offset in configuration space. Guests look for them only in
    /// functions with the PCI Express capability.
    ///
    /// # Errors
    /// The 3840 bytes for extended capabilities are exhausted.
    pub fn extended_capability(&mut self, capability: ExtendedCapabilityBuilder) -> Result<u16, ConfigError> {
        let offset = self.append(capability.id, true, &capability.body)?;
        self.set(offset, &capability.id.to_le_bytes());
        self.set(offset + 2, &[capability.version]);
        if let Some(previous) = self.last(true) {
            let at = usize::from(previous) + 2;
            let link = offset << 4 | u16::from(self.value[at]);
            self.set(previous + 2, &link.to_le_bytes());
        }
        self.capabilities.push(CapabilityPlace { id: capability.id, offset, extended: true });
        Ok(offset)
    }

    fn last(&self, extended: bool) -> Option<u16> {
        self.capabilities.iter().rfind(|place| place.extended == extended).map(|place| place.offset)
    }

    fn append(&mut self, id: u16, extended: bool, body: &MaskedBytes) -> Result<u16, ConfigError> {
        let (next, end) = if extended {
            (&mut self.next_extended, CONFIG_SPACE_SIZE)
        } else {
            (&mut self.next_capability, LEGACY_CONFIG_SPACE_SIZE)
        };
        let (at, len) = (*next, body.value.len());
        let no_room = ConfigError::NoRoom { id, len, left: end - at };
        let (Some(after), Ok(offset)) =
            (at.checked_add(len).filter(|after| *after <= end), u16::try_from(at))
        else {
            return Err(no_room);
        };
        *next = after.next_multiple_of(4);
        self.set(offset, &body.value);
        // ID and links stay read-only, independent of the masks.
        let header = if extended { 4 } else { 2 };
        for (mask, bits) in [
            (&mut self.masks.writable, &body.writable),
            (&mut self.masks.clearable, &body.clearable),
            (&mut self.masks.device, &body.device),
        ] {
            mask[at + header..after].copy_from_slice(&bits[header..]);
        }
        Ok(offset)
    }

    /// Adds a device-specific 32-bit register outside the capability lists. The guest may write the bits of `writable`.
    ///
    /// # Errors
    /// `offset` isn't a multiple of 4 between 0x40 and 0xFFC, or overlaps a capability. Add capabilities first.
    pub fn register(&mut self, offset: u16, value: u32, writable: u32) -> Result<&mut Self, ConfigError> {
        let at = usize::from(offset);
        let free = if at < LEGACY_CONFIG_SPACE_SIZE { self.next_capability } else { self.next_extended };
        if at % 4 != 0 || at < free || at >= CONFIG_SPACE_SIZE {
            return Err(ConfigError::Register { offset });
        }
        self.set(offset, &value.to_le_bytes());
        Masks::add(&mut self.masks.writable, offset, &writable.to_le_bytes());
        Ok(self)
    }

    /// Builds the configuration space in power-on state.
    #[must_use]
    pub fn build(self) -> ConfigSpace {
        ConfigSpace::new(self.value, self.masks, self.bars, self.capabilities)
    }
}

fn check_bar(taken: &[BarLayout], layout: BarLayout) -> Result<(), ConfigError> {
    let registers = |bar: &BarLayout| bar.index..=bar.index + u8::from(bar.kind == BarKind::Memory64);
    if layout.index > 5 || *registers(&layout).end() > 5 {
        return Err(ConfigError::BarIndex { layout });
    }
    let (smallest, largest) = match layout.kind {
        BarKind::Io => (4, 1 << 15),
        BarKind::Memory32 => (16, 1 << 31),
        BarKind::Memory64 => (16, 1 << 62),
    };
    if !layout.size.is_power_of_two() || layout.size < smallest || layout.size > largest {
        return Err(ConfigError::BarSize { layout });
    }
    if layout.kind == BarKind::Io && layout.prefetchable {
        return Err(ConfigError::BarPrefetchableIo { layout });
    }
    if taken.iter().any(|bar| registers(bar).any(|register| registers(&layout).contains(&register))) {
        return Err(ConfigError::BarTaken { layout });
    }
    Ok(())
}
