//! Capabilities: the entries of a function's capability lists.

use super::ConfigError;
use crate::msix::MsixLayout;
use crate::registers::{
    CAP_MSIX, CAP_PCI_EXPRESS, CAP_POWER_MANAGEMENT, CAP_VENDOR_SPECIFIC, MSIX_ENABLE, MSIX_FUNCTION_MASK,
};

/// PCI Express device type of a function (PCI Express Base 5.0, 7.5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpressKind {
    /// An endpoint behind a root port.
    Endpoint,
    /// An endpoint directly on the root bus, like all functions of [`crate::root::PciRoot`].
    RootComplexIntegratedEndpoint,
}

/// A standard capability: its bytes, and masks of the bits that guest and device may change. Offsets count from the
/// start of the capability. Its first two bytes (ID and next pointer) belong to the list itself.
#[derive(Debug, Clone)]
pub struct CapabilityBuilder {
    pub(super) id: u8,
    pub(super) body: MaskedBytes,
}

/// An extended capability, in the part of configuration space that only ECAM reaches. Offsets count from the start of
/// the capability. Its first four bytes (ID, version, next pointer) belong to the list.
#[derive(Debug, Clone)]
pub struct ExtendedCapabilityBuilder {
    pub(super) id: u16,
    pub(super) version: u8,
    pub(super) body: MaskedBytes,
}

/// Bytes, with masks of the bits that guest and device may change.
#[derive(Debug, Clone, Default)]
pub(super) struct MaskedBytes {
    pub(super) value: Vec<u8>,
    pub(super) writable: Vec<u8>,
    pub(super) clearable: Vec<u8>,
    pub(super) device: Vec<u8>,
}

impl MaskedBytes {
    fn zeros(len: usize) -> Self {
        Self { value: vec![0; len], writable: vec![0; len], clearable: vec![0; len], device: vec![0; len] }
    }

    fn grow(&mut self, len: usize) {
        if self.value.len() < len {
            for bytes in [&mut self.value, &mut self.writable, &mut self.clearable, &mut self.device] {
                bytes.resize(len, 0);
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let at = self.value.len();
        self.grow(at + bytes.len());
        self.value[at..].copy_from_slice(bytes);
    }
}

/// Sets `mask` at `offset` of a mask, and grows the capability if necessary.
fn set_mask(
    body: &mut MaskedBytes,
    select: fn(&mut MaskedBytes) -> &mut Vec<u8>,
    offset: usize,
    mask: &[u8],
) {
    body.grow(offset + mask.len());
    for (byte, set) in select(body)[offset..].iter_mut().zip(mask) {
        *byte |= set;
    }
}

macro_rules! body_methods {
    () => {
        /// Appends bytes, which are read-only without a mask.
        #[must_use]
        pub fn bytes(mut self, bytes: &[u8]) -> Self {
            self.body.append(bytes);
            self
        }

        /// Appends a little-endian 16-bit register. The guest may write the bits of `writable`.
        #[must_use]
        pub fn u16(mut self, value: u16, writable: u16) -> Self {
            let at = self.body.value.len();
            self.body.append(&value.to_le_bytes());
            self.writable(at, &writable.to_le_bytes())
        }

        /// Appends a little-endian 32-bit register. The guest may write the bits of `writable`.
        #[must_use]
        pub fn u32(mut self, value: u32, writable: u32) -> Self {
            let at = self.body.value.len();
            self.body.append(&value.to_le_bytes());
            self.writable(at, &writable.to_le_bytes())
        }

        /// Makes the bits of `mask` at `offset` guest-writable.
        #[must_use]
        pub fn writable(mut self, offset: usize, mask: &[u8]) -> Self {
            set_mask(&mut self.body, |body| &mut body.writable, offset, mask);
            self
        }

        /// Makes the bits of `mask` at `offset` write-1-to-clear; the device sets them with
        /// [`super::ConfigSpace::device_write`].
        #[must_use]
        pub fn write_1_to_clear(mut self, offset: usize, mask: &[u8]) -> Self {
            set_mask(&mut self.body, |body| &mut body.clearable, offset, mask);
            self
        }

        /// Makes the bits of `mask` at `offset` changeable by the device with [`super::ConfigSpace::device_write`], and
        /// part of the saved state.
        #[must_use]
        pub fn device_owned(mut self, offset: usize, mask: &[u8]) -> Self {
            set_mask(&mut self.body, |body| &mut body.device, offset, mask);
            self
        }

        /// Returns the length in bytes, including the header.
        #[must_use]
        pub fn len(&self) -> usize {
            self.body.value.len()
        }

        /// Returns false: there is always a header.
        #[must_use]
        pub fn is_empty(&self) -> bool {
            self.body.value.is_empty()
        }
    };
}

impl CapabilityBuilder {
    /// Creates an empty capability with this ID. Append its registers.
    #[must_use]
    pub fn new(id: u8) -> Self {
        Self { id, body: MaskedBytes::zeros(2) }
    }

    body_methods!();

    /// Creates a vendor-specific capability (PCI 3.0, 6.7 and appendix H). Offset 2 has the length, and `data` starts
    /// at offset 3. Virtio's capabilities have this form.
    ///
    /// # Errors
    /// `data` and header exceed 255 bytes.
    pub fn vendor_specific(data: &[u8]) -> Result<Self, ConfigError> {
        let len = u8::try_from(data.len().saturating_add(3))
            .map_err(|_| ConfigError::CapabilityLength { id: CAP_VENDOR_SPECIFIC.into(), len: data.len() })?;
        Ok(Self::new(CAP_VENDOR_SPECIFIC).bytes(&[len]).bytes(data))
    }

    /// Creates an MSI-X capability (PCI 3.0, 6.8.2). Enable and function mask are writable. The rest describes the
    /// table and the pending bits.
    #[must_use]
    pub fn msix(layout: &MsixLayout) -> Self {
        Self::new(CAP_MSIX)
            .u16(layout.count() - 1, MSIX_ENABLE | MSIX_FUNCTION_MASK)
            .u32(layout.table_offset() | u32::from(layout.table_bar()), 0)
            .u32(layout.pba_offset() | u32::from(layout.pba_bar()), 0)
    }

    /// Creates a PCI Express capability, version 2 (PCI Express Base 5.0, 7.5.3): no links, no function-level reset,
    /// 128-byte payloads. Device control bits without effect here keep the written value.
    #[must_use]
    pub fn express(kind: ExpressKind) -> Self {
        const VERSION: u16 = 2;
        const ROLE_BASED_ERRORS: u32 = 1 << 15;
        // Error reporting, relaxed ordering, no snoop, read request size.
        const CONTROL_WRITABLE: u16 = 0x780F | 1 << 4;
        // Relaxed ordering and no snoop enabled, read requests of 512 bytes: the values after reset.
        const CONTROL_RESET: u16 = 0x2810;
        const STATUS_ERRORS: u16 = 0xF;
        let (port_type, link) = match kind {
            // 2.5 GT/s, one lane: the values of a virtual link.
            ExpressKind::Endpoint => (0x0, 0x11),
            ExpressKind::RootComplexIntegratedEndpoint => (0x9, 0),
        };
        Self::new(CAP_PCI_EXPRESS)
            .u16(VERSION | port_type << 4, 0)
            .u32(ROLE_BASED_ERRORS, 0)
            .u16(CONTROL_RESET, CONTROL_WRITABLE)
            .u16(0, 0)
            .write_1_to_clear(0x0A, &STATUS_ERRORS.to_le_bytes())
            // Link capabilities, control and status.
            .u32(link, 0)
            .u32(link << 16, 0)
            // Slot and root registers: none.
            .bytes(&[0; 0x10])
            // Device capabilities and control 2: nothing supported.
            .bytes(&[0; 8])
            // Link capabilities 2 and control 2, slot capabilities and control 2.
            .bytes(&[0; 0x10])
    }

    /// Creates a power management capability (PCI Power Management 1.2, 3.2): D0 and D3hot, no PME, state survives
    /// D3hot. A function in D3hot doesn't decode its BARs.
    #[must_use]
    pub fn power_management() -> Self {
        const VERSION_1_2: u16 = 3;
        const NO_SOFT_RESET: u16 = 1 << 3;
        Self::new(CAP_POWER_MANAGEMENT)
            .u16(VERSION_1_2, 0)
            .u16(NO_SOFT_RESET, crate::registers::PM_STATE)
            .bytes(&[0, 0])
    }
}

impl ExtendedCapabilityBuilder {
    /// Creates an empty extended capability with this ID and version (0 to 15). Append its registers.
    #[must_use]
    pub fn new(id: u16, version: u8) -> Self {
        Self { id, version: version & 0xF, body: MaskedBytes::zeros(4) }
    }

    body_methods!();

    /// Creates a device serial number capability (PCI Express Base 5.0, 7.9.3).
    #[must_use]
    pub fn serial_number(serial: u64) -> Self {
        Self::new(0x0003, 1).bytes(&serial.to_le_bytes())
    }

    /// Creates a vendor-specific extended capability (PCI Express Base 5.0, 7.9.5). `data` follows the header with
    /// `vsec_id`, `revision` (0 to 15) and the length.
    ///
    /// # Errors
    /// Header and `data` exceed 4095 bytes.
    pub fn vendor_specific(vsec_id: u16, revision: u8, data: &[u8]) -> Result<Self, ConfigError> {
        let len = u32::try_from(data.len().saturating_add(8))
            .ok()
            .filter(|len| *len < 1 << 12)
            .ok_or(ConfigError::CapabilityLength { id: 0x000B, len: data.len() })?;
        Ok(Self::new(0x000B, 1)
            .u32(u32::from(vsec_id) | u32::from(revision & 0xF) << 16 | len << 20, 0)
            .bytes(data))
    }
}
