//! Layout of the virtio structures in the function's BAR, and its configuration space (virtio 1.2, 4.1).
//!
//! | BAR 0 at | holds |
//! |---|---|
//! | 0x0000 | common configuration |
//! | 0x1000 | ISR status |
//! | 0x2000 | device-specific configuration |
//! | 0x3000 | notification: 4 bytes per queue |
//! | 0x4000 | MSI-X table |
//! | 0x7000 | MSI-X pending bits |

use pci::config::{
    CapabilityBuilder, ClassCode, ConfigError, ConfigSpace, ExpressKind, Identity, InterruptPin,
};
use pci::function::{BarKind, BarLayout};
use pci::msix::{MsixError, MsixLayout};

/// The only BAR.
pub(super) const BAR: u8 = 0;
pub(super) const BAR_SIZE: u64 = 0x8000;
pub(super) const COMMON: u64 = 0x0000;
pub(super) const COMMON_LEN: u64 = 0x3C;
pub(super) const ISR: u64 = 0x1000;
pub(super) const DEVICE: u64 = 0x2000;
pub(super) const NOTIFY: u64 = 0x3000;
/// `notify_off_multiplier`; the notify offset of a queue is its index.
pub(super) const NOTIFY_STEP: u64 = 4;
const REGION: u64 = 0x1000;
const MSIX_TABLE: u32 = 0x4000;
const MSIX_PENDING: u32 = 0x7000;
/// Each queue can have a vector, and configuration changes one more.
pub(super) const MAX_QUEUES: usize = 512;

const VENDOR: u16 = 0x1AF4;
const FIRST_DEVICE: u16 = 0x1040;
/// Modern devices have revision 1 or higher (4.1.2.1).
const REVISION: u8 = 1;

const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;

const _: () = assert!(MAX_QUEUES as u64 * NOTIFY_STEP <= REGION);
const _: () = assert!((MAX_QUEUES as u64 + 1) * 16 <= (MSIX_PENDING - MSIX_TABLE) as u64);
const _: () = assert!((MAX_QUEUES as u64 + 1).div_ceil(64) * 8 <= BAR_SIZE - MSIX_PENDING as u64);

/// A part of BAR 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Common(u64),
    Isr,
    Device(u64),
    /// Queue index.
    Notify(u64),
    Nothing,
}

impl Region {
    /// The structure at `offset`; MSI-X is handled elsewhere.
    pub(super) fn of(offset: u64) -> Self {
        match offset {
            COMMON..ISR => Self::Common(offset - COMMON),
            ISR => Self::Isr,
            DEVICE..NOTIFY => Self::Device(offset - DEVICE),
            _ if (NOTIFY..NOTIFY + REGION).contains(&offset) => Self::Notify((offset - NOTIFY) / NOTIFY_STEP),
            _ => Self::Nothing,
        }
    }
}

pub(super) fn msix(vectors: u16) -> Result<MsixLayout, MsixError> {
    MsixLayout::new(vectors, (BAR, MSIX_TABLE), (BAR, MSIX_PENDING))
}

/// PCI class of a virtio device id.
fn class(device_id: u16) -> ClassCode {
    match device_id {
        1 => ClassCode::ETHERNET,
        2 => ClassCode::STORAGE_OTHER,
        19 => ClassCode::COMMUNICATION_OTHER,
        _ => ClassCode::OTHER,
    }
}

/// A capability with the offset and length of a structure, from its fourth byte on.
fn capability(kind: u8, offset: u64, len: u64, more: &[u8]) -> Result<CapabilityBuilder, ConfigError> {
    let word = |value: u64| u32::try_from(value).unwrap_or(0).to_le_bytes();
    let mut data = vec![kind, BAR, 0, 0, 0];
    data.extend(word(offset));
    data.extend(word(len));
    data.extend(more);
    CapabilityBuilder::vendor_specific(&data)
}

/// Builds the configuration space. Also returns the offset of the PCI configuration access capability.
pub(super) fn config_space(device_id: u16, msix: &MsixLayout) -> Result<(ConfigSpace, u16), ConfigError> {
    let id = FIRST_DEVICE.wrapping_add(device_id);
    let mut builder = ConfigSpace::builder(Identity {
        vendor_id: VENDOR,
        device_id: id,
        revision: REVISION,
        class: class(device_id),
        subsystem_vendor_id: VENDOR,
        subsystem_id: id,
    });
    builder.bar(BarLayout { index: BAR, kind: BarKind::Memory64, prefetchable: false, size: BAR_SIZE })?;
    builder.interrupt_pin(InterruptPin::A);
    builder.capability(CapabilityBuilder::msix(msix))?;
    builder.capability(capability(CFG_COMMON, COMMON, COMMON_LEN, &[])?)?;
    builder.capability(capability(CFG_ISR, ISR, 1, &[])?)?;
    builder.capability(capability(CFG_DEVICE, DEVICE, REGION, &[])?)?;
    let step = u32::try_from(NOTIFY_STEP).unwrap_or(4).to_le_bytes();
    builder.capability(capability(CFG_NOTIFY, NOTIFY, REGION, &step)?)?;
    // The driver sets BAR, offset and length, and accesses them through the data at 16.
    let window = capability(CFG_PCI, 0, 0, &[0; 4])?
        .writable(4, &[0xFF])
        .writable(8, &[0xFF; 8])
        .writable(16, &[0xFF; 4]);
    let window = builder.capability(window)?;
    builder.capability(CapabilityBuilder::express(ExpressKind::RootComplexIntegratedEndpoint))?;
    Ok((builder.build(), window))
}
