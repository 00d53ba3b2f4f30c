//! Configuration space of one function: writable bits, BAR sizing, capabilities.
//!
//! A function keeps one [`ConfigSpace`] behind its lock and passes every guest access to it. After a write, the
//! function reads registers with an effect (MSI-X control, device-specific ones) at the offset that
//! [`ConfigSpaceBuilder::capability`] returned:
//!
//! ```
//! use pci::config::{CapabilityBuilder, ClassCode, ConfigSpace, ExpressKind, Identity};
//! use pci::function::{BarKind, BarLayout};
//! use pci::msix::MsixLayout;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let layout = MsixLayout::exclusive(4, 3)?;
//! let mut builder = ConfigSpace::builder(Identity {
//!     vendor_id: 0x1AF4,
//!     device_id: 0x1042,
//!     class: ClassCode::STORAGE_OTHER,
//!     ..Identity::default()
//! });
//! builder.bar(BarLayout { index: 4, kind: BarKind::Memory32, prefetchable: false, size: layout.bar_size() })?;
//! builder.capability(CapabilityBuilder::msix(&layout))?;
//! builder.capability(CapabilityBuilder::express(ExpressKind::RootComplexIntegratedEndpoint))?;
//! let mut config = builder.build();
//!
//! // The guest sizes BAR 4.
//! config.write(0x20, &[0xFF; 4]);
//! let mut size = [0; 4];
//! config.read(0x20, &mut size);
//! assert_eq!(!(u32::from_le_bytes(size) & !0xF) + 1, 4096);
//! # Ok(())
//! # }
//! ```

mod builder;
mod capability;
mod saved;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use builder::{ClassCode, ConfigSpaceBuilder, Identity, InterruptPin};
pub use capability::{CapabilityBuilder, ExpressKind, ExtendedCapabilityBuilder};
pub use saved::SavedConfig;

use crate::function::{BarKind, BarLayout, BarPlace, ConfigEffect};
use crate::registers::*;

/// Number of base address registers of a header of type 0.
const BAR_COUNT: usize = 6;

/// For each bit, whether the guest or the device may change it. A bit in no mask is constant.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Masks {
    /// The guest may write it.
    writable: Vec<u8>,
    /// The guest clears it by writing 1.
    clearable: Vec<u8>,
    /// The device may change it.
    device: Vec<u8>,
}

impl Masks {
    fn new() -> Self {
        let zeros = vec![0; CONFIG_SPACE_SIZE];
        Self { writable: zeros.clone(), clearable: zeros.clone(), device: zeros }
    }

    fn add(mask: &mut [u8], offset: u16, bits: &[u8]) {
        for (byte, set) in mask[usize::from(offset)..].iter_mut().zip(bits) {
            *byte |= set;
        }
    }

    /// Returns the bits that can differ from their power-on state.
    fn changeable(&self, at: usize) -> u8 {
        self.writable[at] | self.clearable[at] | self.device[at]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CapabilityPlace {
    id: u16,
    offset: u16,
    extended: bool,
}

/// The constant part after building; shared between copies.
#[derive(Debug)]
struct Template {
    power_on: Vec<u8>,
    masks: Masks,
    bars: Vec<BarLayout>,
    capabilities: Vec<CapabilityPlace>,
    power_management: Option<u16>,
    msix: Option<u16>,
}

/// The 4 KiB configuration space of one function, header type 0. Not synchronized: the function locks.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    value: Vec<u8>,
    template: Arc<Template>,
}

impl ConfigSpace {
    /// Starts building a configuration space.
    #[must_use]
    pub fn builder(identity: Identity) -> ConfigSpaceBuilder {
        ConfigSpaceBuilder::new(identity)
    }

    fn new(value: Vec<u8>, masks: Masks, bars: Vec<BarLayout>, capabilities: Vec<CapabilityPlace>) -> Self {
        let find = |id: u8| {
            capabilities
                .iter()
                .find(|place| !place.extended && place.id == u16::from(id))
                .map(|place| place.offset)
        };
        let (power_management, msix) = (find(CAP_POWER_MANAGEMENT), find(CAP_MSIX));
        let template =
            Template { power_on: value.clone(), masks, bars, capabilities, power_management, msix };
        Self { value, template: Arc::new(template) }
    }

    /// Reads any number of bytes at any offset. Bytes beyond 4 KiB read as ones, as from a missing device.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        let source = self.value.get(usize::from(offset)..).unwrap_or_default();
        let present = source.len().min(data.len());
        let (inside, beyond) = data.split_at_mut(present);
        inside.copy_from_slice(&source[..present]);
        beyond.fill(0xFF);
    }

    /// Applies a guest write of any number of bytes at any offset. Bits that the guest can't change are dropped.
    pub fn write(&mut self, offset: u16, data: &[u8]) -> ConfigEffect {
        let before = self.addresses();
        let power_state = self.power_state();
        for (at, byte) in (usize::from(offset)..CONFIG_SPACE_SIZE).zip(data) {
            let masks = &self.template.masks;
            let (writable, clearable) = (masks.writable[at], masks.clearable[at]);
            let kept = self.value[at] & !(byte & clearable);
            self.value[at] = kept & !writable | byte & writable;
        }
        self.refuse_unsupported_power_state(power_state);
        ConfigEffect { decoding_changed: self.addresses() != before, resources_changed: false }
    }

    /// Changes the device's own registers. Only bits that are guest-writable, write-1-to-clear or
    /// [`CapabilityBuilder::device_owned`] change.
    pub fn device_write(&mut self, offset: u16, data: &[u8]) {
        for (at, byte) in (usize::from(offset)..CONFIG_SPACE_SIZE).zip(data) {
            let mask = self.template.masks.changeable(at);
            self.value[at] = self.value[at] & !mask | byte & mask;
        }
    }

    /// Returns to the power-on state.
    pub fn reset(&mut self) -> ConfigEffect {
        let before = self.addresses();
        self.value.copy_from_slice(&self.template.power_on);
        ConfigEffect { decoding_changed: self.addresses() != before, resources_changed: false }
    }

    /// Returns a byte, for the device's own use. Bytes beyond the end are ones.
    #[must_use]
    pub fn u8(&self, offset: u16) -> u8 {
        let mut data = [0];
        self.read(offset, &mut data);
        data[0]
    }

    /// Returns a little-endian 16-bit register.
    #[must_use]
    pub fn u16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// Returns a little-endian 32-bit register.
    #[must_use]
    pub fn u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Returns the BARs by index.
    #[must_use]
    pub fn bars(&self) -> &[BarLayout] {
        &self.template.bars
    }

    /// Returns the BARs' current addresses.
    #[must_use]
    pub fn places(&self) -> Vec<BarPlace> {
        let place = |layout: &BarLayout| BarPlace { layout: *layout, address: self.address(layout) };
        self.template.bars.iter().map(place).collect()
    }

    /// Returns the addresses by BAR index, to detect changes.
    fn addresses(&self) -> [Option<u64>; BAR_COUNT] {
        let mut addresses = [None; BAR_COUNT];
        for layout in &self.template.bars {
            addresses[usize::from(layout.index)] = self.address(layout);
        }
        addresses
    }

    /// Returns a BAR's address. `None` if its decoding is off, the function is in D3hot, or the address is invalid (0,
    /// or the top of the address space as during sizing).
    fn address(&self, layout: &BarLayout) -> Option<u64> {
        let decode = match layout.kind {
            BarKind::Io => COMMAND_IO,
            BarKind::Memory32 | BarKind::Memory64 => COMMAND_MEMORY,
        };
        if self.u16(COMMAND) & decode == 0 || self.power_state() != 0 {
            return None;
        }
        let register = BAR0 + 4 * u16::from(layout.index);
        let low = self.u32(register);
        let (base, highest) = match layout.kind {
            BarKind::Io => (u64::from(low & !BAR_IO_FLAGS), 0xFFFF),
            BarKind::Memory32 => (u64::from(low & !BAR_MEMORY_FLAGS), u64::from(u32::MAX) - 1),
            BarKind::Memory64 => {
                (u64::from(self.u32(register + 4)) << 32 | u64::from(low & !BAR_MEMORY_FLAGS), u64::MAX - 1)
            }
        };
        let last = base.checked_add(layout.size - 1)?;
        (base != 0 && last <= highest).then_some(base)
    }

    /// Returns 0 for D0 to 3 for D3hot; always D0 without the power management capability.
    fn power_state(&self) -> u16 {
        self.template.power_management.map_or(0, |at| self.u16(at + 4) & PM_STATE)
    }

    /// Ignores writes of D1 and D2, which aren't supported (PCI Power Management 1.2, 3.2.4).
    fn refuse_unsupported_power_state(&mut self, before: u16) {
        if let Some(at) = self.template.power_management
            && matches!(self.power_state(), 1 | 2)
        {
            let control = self.u16(at + 4) & !PM_STATE | before;
            self.device_write(at + 4, &control.to_le_bytes());
        }
    }

    /// Returns whether the function may access memory and send MSIs.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.u16(COMMAND) & COMMAND_BUS_MASTER != 0
    }

    /// Returns whether the guest has disabled INTx in the command register.
    #[must_use]
    pub fn intx_disabled(&self) -> bool {
        self.u16(COMMAND) & COMMAND_INTX_DISABLE != 0
    }

    /// Returns MSI-X message control, or `None` without the capability. See [`crate::msix::Msix::follow`].
    #[must_use]
    pub fn msix_control(&self) -> Option<u16> {
        self.template.msix.map(|at| self.u16(at + 2))
    }

    /// Sets the interrupt status bit of the status register. See [`crate::intx::IntxPin`].
    pub fn set_interrupt_status(&mut self, pending: bool) {
        let status = self.u16(STATUS) & !STATUS_INTERRUPT;
        let status = if pending { status | STATUS_INTERRUPT } else { status };
        let [low, high] = status.to_le_bytes();
        let at = usize::from(STATUS);
        self.value[at] = low;
        self.value[at + 1] = high;
    }

    /// Returns the offset of the first standard capability with this ID.
    #[must_use]
    pub fn capability_offset(&self, id: u8) -> Option<u16> {
        self.template
            .capabilities
            .iter()
            .find(|place| !place.extended && place.id == u16::from(id))
            .map(|place| place.offset)
    }

    /// Returns identity, command, BARs and capabilities for `causeway inspect`.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let capabilities: Vec<_> = self
            .template
            .capabilities
            .iter()
            .map(|place| {
                serde_json::json!({
                    "id": format!("{:#06x}", place.id),
                    "offset": format!("{:#05x}", place.offset),
                    "extended": place.extended,
                })
            })
            .collect();
        serde_json::json!({
            "vendor_id": format!("{:#06x}", self.u16(VENDOR_ID)),
            "device_id": format!("{:#06x}", self.u16(DEVICE_ID)),
            "class": format!("{:#08x}", self.u32(REVISION_ID) >> 8),
            "command": format!("{:#06x}", self.u16(COMMAND)),
            "power_state": if self.power_state() == 0 { "D0" } else { "D3hot" },
            "capabilities": capabilities,
        })
    }
}

/// A configuration space can't be built or restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The index is invalid: there are six BAR registers, and a 64-bit BAR uses two.
    #[error("There is no BAR register {} for {:?}; use 0 to 5, and at most 4 for 64 bits", layout.index, layout.kind)]
    BarIndex {
        /// The BAR.
        layout: BarLayout,
    },
    /// The size is invalid.
    #[error(
        "BAR {} of kind {:?} can't have {:#x} bytes; use a power of two: 4 to 0x8000 for I/O, 16 to 2^31 for \
         32-bit and 16 to 2^62 for 64-bit memory",
        layout.index, layout.kind, layout.size
    )]
    BarSize {
        /// The BAR.
        layout: BarLayout,
    },
    /// I/O BARs can't be prefetchable.
    #[error("BAR {} is I/O, which is never prefetchable", layout.index)]
    BarPrefetchableIo {
        /// The BAR.
        layout: BarLayout,
    },
    /// Another BAR uses the register.
    #[error("BAR {} needs a register that another BAR has; a 64-bit BAR takes two", layout.index)]
    BarTaken {
        /// The BAR.
        layout: BarLayout,
    },
    /// A capability exceeds its length field.
    #[error("Capability {id:#06x} can't hold {len} bytes of data")]
    CapabilityLength {
        /// Capability ID.
        id: u16,
        /// Length of the data.
        len: usize,
    },
    /// The space for capabilities is exhausted.
    #[error("There is no room for capability {id:#06x} of {len} bytes; {left} bytes are left")]
    NoRoom {
        /// Capability ID.
        id: u16,
        /// Its length in bytes.
        len: usize,
        /// The remaining bytes.
        left: usize,
    },
    /// A device-specific register has an invalid offset.
    #[error("A register can't be at {offset:#x}; use a multiple of 4 behind the capabilities, below 0x1000")]
    Register {
        /// The offset.
        offset: u16,
    },
    /// A later version saved the state.
    #[error(
        "Saved configuration space has version {found}, this program knows up to {known}; use a newer one"
    )]
    Version {
        /// Version of the saved state.
        found: u32,
        /// The newest supported version.
        known: u32,
    },
    /// Another device saved the state.
    #[error(
        "Saved configuration space belongs to device {found:#010x}, not to {expected:#010x}; restore it into \
         the same device"
    )]
    OtherDevice {
        /// Vendor and device ID of the saved state, as the dword at 0.
        found: u32,
        /// Those of this device.
        expected: u32,
    },
    /// The saved state differs in constant bits.
    #[error(
        "Saved configuration space has {found:#010x} at {offset:#x}, where this device has constant bits \
         {constant:#010x}; was the device configured differently?"
    )]
    Constant {
        /// Offset of the dword.
        offset: u16,
        /// Saved value.
        found: u32,
        /// The constant bits' required value.
        constant: u32,
    },
    /// The saved state has an invalid register offset.
    #[error("Saved configuration space has a register at {offset:#x}; the state is damaged")]
    Offset {
        /// The offset.
        offset: u16,
    },
}
