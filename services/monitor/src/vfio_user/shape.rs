//! Properties of a server's device that the guest sees: identity, BARs, capabilities, interrupts. They are read once, when the VM is built.
//! A server that returns after a failure must offer the same.

use pci::config::{CapabilityBuilder, ClassCode, ConfigSpace, Identity, InterruptPin};
use pci::function::{BarKind, BarLayout};
use pci::msix::MsixLayout;
use pci::registers::{
    BAR_IO, BAR_MEMORY_64, BAR_PREFETCHABLE, BAR0, CAP_MSIX, CAPABILITY_POINTER, CONFIG_SPACE_SIZE,
    FIRST_CAPABILITY, HEADER_TYPE, INTERRUPT_PIN, LEGACY_CONFIG_SPACE_SIZE, STATUS, STATUS_CAPABILITY_LIST,
};
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::device::{INTERRUPT_INTX, INTERRUPT_MSIX, REGION_CONFIG};
use vfio_user_protocol::doorbell_mode;

/// MSI. Not offered to the guest, which then uses MSI-X or INTx.
const CAP_MSI: u8 = 0x05;
/// Bytes of the MSI-X capability.
pub(super) const MSIX_CAPABILITY_LEN: u16 = 12;
const BAR_COUNT: u8 = 6;

/// Why a device can't be used.
#[derive(Debug)]
pub(super) enum ShapeError {
    Client(ClientError),
    Device(String),
}

impl From<ClientError> for ShapeError {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    /// Configuration space of the server in power-on state: 64 to 4096 bytes.
    pub config: Vec<u8>,
    /// BARs with a size.
    pub bars: Vec<BarLayout>,
    /// Offset of the MSI-X capability in configuration space, and its layout.
    pub msix: Option<(u16, MsixLayout)>,
    /// INTx pin, if the server can signal it.
    pub pin: Option<InterruptPin>,
    /// Offsets of capabilities that the guest sees, in order.
    pub capabilities: Vec<u8>,
    /// Offsets of capabilities that the guest doesn't see, and must not write.
    pub hidden: Vec<u8>,
    /// Whether the device has doorbell mode.
    pub doorbell_mode: bool,
}

impl Shape {
    /// Reads the shape from the server.
    pub(super) fn read(client: &Client) -> Result<Self, ShapeError> {
        let wrong = |text: String| Err(ShapeError::Device(text));
        let about = client.device()?;
        let config = read_config(client)?;
        if config[usize::from(HEADER_TYPE)] & 0x7F != 0 {
            return wrong("its configuration space has no header of type 0".to_owned());
        }
        let mut bars = Vec::new();
        for index in 0..BAR_COUNT {
            let region = client.region(index.into())?;
            if region.size != 0 {
                bars.push(bar(index, region.size, u32_at(&config, BAR0 + 4 * u16::from(index))));
            }
        }
        let all = capability_list(&config);
        let pin = InterruptPin::from_register(config[usize::from(INTERRUPT_PIN)]);
        let intx = about.interrupts > INTERRUPT_INTX && {
            let kind = client.interrupts(INTERRUPT_INTX)?;
            kind.count > 0 && kind.flags.eventfd
        };
        let vectors = if about.interrupts > INTERRUPT_MSIX {
            let kind = client.interrupts(INTERRUPT_MSIX)?;
            if kind.flags.eventfd { kind.count } else { 0 }
        } else {
            0
        };
        let place = all.iter().find(|(id, _)| *id == CAP_MSIX).map(|(_, at)| u16::from(*at));
        let msix = match place {
            Some(at) if vectors > 0 => Some((at, msix_layout(&config, at, vectors, &bars)?)),
            _ => None,
        };
        let shown = |id: u8| id != CAP_MSI && (id != CAP_MSIX || msix.is_some());
        let (capabilities, hidden): (Vec<_>, Vec<_>) = all.iter().partition(|(id, _)| shown(*id));
        let offsets = |list: Vec<(u8, u8)>| list.into_iter().map(|(_, at)| at).collect::<Vec<_>>();
        let doorbell_mode = about.regions > doorbell_mode::REGION
            && about.interrupts > doorbell_mode::INTERRUPT
            && Client::is_doorbell_mode(&client.region(doorbell_mode::REGION)?)
            && client.interrupts(doorbell_mode::INTERRUPT)?.count == 1;
        let shape = Self {
            config,
            bars,
            msix,
            pin: pin.filter(|_| intx),
            capabilities: offsets(capabilities),
            hidden: offsets(hidden),
            doorbell_mode,
        };
        // This detects all errors of BARs and capabilities.
        match shape.config_space() {
            Ok(_) => Ok(shape),
            Err(error) => wrong(error.to_string()),
        }
    }

    /// PCI device ID.
    pub(super) fn device_id(&self) -> u16 {
        u16::from_le_bytes([self.config[2], self.config[3]])
    }

    /// The monitor's part of configuration space, in power-on state.
    pub(super) fn config_space(&self) -> Result<ConfigSpace, pci::config::ConfigError> {
        let byte = |at: u16| self.config[usize::from(at)];
        let word = |at: u16| u16::from_le_bytes([byte(at), byte(at + 1)]);
        let mut builder = ConfigSpace::builder(Identity {
            vendor_id: word(0),
            device_id: word(2),
            revision: byte(8),
            class: ClassCode::new(byte(11), byte(10), byte(9)),
            subsystem_vendor_id: word(0x2C),
            subsystem_id: word(0x2E),
        });
        for bar in &self.bars {
            builder.bar(*bar)?;
        }
        if let Some(pin) = self.pin {
            builder.interrupt_pin(pin);
        }
        if let Some((_, layout)) = &self.msix {
            builder.capability(CapabilityBuilder::msix(layout))?;
        }
        Ok(builder.build())
    }

    /// The first difference to `other`, if any.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let identity = |shape: &Self| {
            let config = &shape.config;
            (config[..4].to_vec(), config[8..12].to_vec(), config[0x2C..0x30].to_vec())
        };
        if identity(self) != identity(other) {
            Some("its IDs")
        } else if self.bars != other.bars {
            Some("its BARs")
        } else if (self.msix, self.pin) != (other.msix, other.pin) {
            Some("its interrupts")
        } else if self.capabilities != other.capabilities || self.hidden != other.hidden {
            Some("its capabilities")
        } else if self.doorbell_mode != other.doorbell_mode {
            Some("its doorbell mode")
        } else {
            None
        }
    }
}

fn read_config(client: &Client) -> Result<Vec<u8>, ShapeError> {
    let region = client.region(REGION_CONFIG)?;
    let size = usize::try_from(region.size).unwrap_or(usize::MAX).min(CONFIG_SPACE_SIZE);
    if size < LEGACY_CONFIG_SPACE_SIZE || !region.readable {
        return Err(ShapeError::Device(format!(
            "its configuration space has {size} readable bytes, at least 256 are needed"
        )));
    }
    let mut config = vec![0; size];
    // In small pieces, since some servers support no more than a register at a time.
    for (offset, piece) in (0_u64..).step_by(4).zip(config.chunks_mut(4)) {
        client.region_read(REGION_CONFIG, offset, piece)?;
    }
    Ok(config)
}

fn u32_at(config: &[u8], offset: u16) -> u32 {
    let at = usize::from(offset);
    config.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn bar(index: u8, size: u64, register: u32) -> BarLayout {
    let kind = if register & BAR_IO != 0 {
        BarKind::Io
    } else if register & 0b110 == BAR_MEMORY_64 {
        BarKind::Memory64
    } else {
        BarKind::Memory32
    };
    let prefetchable = kind != BarKind::Io && register & BAR_PREFETCHABLE != 0;
    BarLayout { index, kind, prefetchable, size }
}

/// IDs and offsets of capabilities. Bounded by the size of configuration space.
fn capability_list(config: &[u8]) -> Vec<(u8, u8)> {
    let mut found: Vec<(u8, u8)> = Vec::new();
    let status = u32_at(config, STATUS & !3) >> 16;
    if status & u32::from(STATUS_CAPABILITY_LIST) == 0 {
        return found;
    }
    let mut at = config[usize::from(CAPABILITY_POINTER)] & !3;
    while u16::from(at) >= FIRST_CAPABILITY && found.iter().all(|(_, seen)| *seen != at) {
        let [id, next, ..] = u32_at(config, at.into()).to_le_bytes();
        found.push((id, at));
        at = next & !3;
    }
    found
}

fn msix_layout(config: &[u8], at: u16, vectors: u32, bars: &[BarLayout]) -> Result<MsixLayout, ShapeError> {
    let wrong = |text: String| ShapeError::Device(text);
    if usize::from(at + MSIX_CAPABILITY_LEN) > LEGACY_CONFIG_SPACE_SIZE {
        return Err(wrong(format!("its MSI-X capability at {at:#x} is cut")));
    }
    let [_, _, low, high] = u32_at(config, at).to_le_bytes();
    let count = (u16::from_le_bytes([low, high]) & 0x7FF) + 1;
    if u32::from(count) > vectors {
        return Err(wrong(format!("it has {count} MSI-X vectors but signals only {vectors}")));
    }
    let place = |register: u32| {
        let [bar, ..] = (register & 7).to_le_bytes();
        (bar, register & !7)
    };
    let (table, pba) = (place(u32_at(config, at + 4)), place(u32_at(config, at + 8)));
    let layout = MsixLayout::new(count, table, pba).map_err(|error| wrong(error.to_string()))?;
    for (what, bar, offset, size) in [
        ("table", layout.table_bar(), layout.table_offset(), layout.table_size()),
        ("pending bits", layout.pba_bar(), layout.pba_offset(), layout.pba_size()),
    ] {
        let within = bars.iter().any(|layout| {
            layout.index == bar && layout.kind != BarKind::Io && u64::from(offset) + size <= layout.size
        });
        if !within {
            return Err(wrong(format!("its MSI-X {what} lie outside of memory BAR {bar}")));
        }
    }
    Ok(layout)
}
