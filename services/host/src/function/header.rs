//! Configuration space of a served function.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pci::config::{CapabilityBuilder, ClassCode, ConfigError, ConfigSpace, Identity};
use pci::function::BarLayout;
use pci::msix::{MsixError, MsixLayout};
use pci::registers::CONFIG_SPACE_SIZE;

/// Contents of a function's configuration space.
#[derive(Debug, Clone)]
pub struct Appearance {
    /// IDs and class.
    pub identity: Identity,
    /// Whether the slot has more functions; set in function 0 only.
    pub multifunction: bool,
    /// Base address registers to build.
    pub bars: Vec<BarLayout>,
    /// MSI-X table and pending bits.
    pub msix: MsixLayout,
}

/// Why a function can't be built as described.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Configuration space can't be built.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// MSI-X can't be laid out.
    #[error(transparent)]
    Msix(#[from] MsixError),
}

/// A class code from its three bytes as one number, base class highest.
#[must_use]
pub fn class_code(class: u32) -> ClassCode {
    let [interface, sub, base, _] = class.to_le_bytes();
    ClassCode::new(base, sub, interface)
}

/// Configuration space, locked. Clients keep BAR addresses and the MSI-X table themselves; only the command register matters here.
#[derive(Debug)]
pub struct Header {
    config: Mutex<ConfigSpace>,
}

impl Header {
    /// Configuration space in its power-on state.
    ///
    /// # Errors
    /// When BARs or capabilities don't fit.
    pub fn new(appearance: &Appearance) -> Result<Self, HeaderError> {
        let mut builder = ConfigSpace::builder(appearance.identity);
        for bar in &appearance.bars {
            builder.bar(*bar)?;
        }
        if appearance.multifunction {
            builder.multifunction();
        }
        builder.capability(CapabilityBuilder::msix(&appearance.msix))?;
        Ok(Self { config: Mutex::new(builder.build()) })
    }

    /// Size of the configuration region in bytes.
    #[must_use]
    pub fn size() -> u64 {
        CONFIG_SPACE_SIZE as u64
    }

    fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads; bytes beyond the end are ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        match u16::try_from(offset) {
            Ok(offset) => self.config().read(offset, data),
            Err(_) => data.fill(0xFF),
        }
    }

    /// Writes. Returns whether the function may access memory now, if that changed.
    #[must_use]
    pub fn write(&self, offset: u64, data: &[u8]) -> Option<bool> {
        let offset = u16::try_from(offset).ok()?;
        let mut config = self.config();
        let before = config.bus_master();
        // The client routes accesses, so BAR addresses have no effect here.
        let _ = config.write(offset, data);
        let after = config.bus_master();
        (before != after).then_some(after)
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        let _ = self.config().reset();
    }

    /// Whether the function may access memory and interrupt.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.config().bus_master()
    }

    /// For `inspect`.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        self.config().inspect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Appearance, Header, class_code};
    use pci::config::Identity;
    use pci::function::{BarKind, BarLayout};
    use pci::msix::MsixLayout;
    use pci::registers::{COMMAND, COMMAND_BUS_MASTER, HEADER_TYPE};

    #[test]
    fn bus_mastering_is_told_when_it_changes_and_the_header_says_what_it_is() {
        let header = Header::new(&Appearance {
            identity: Identity {
                vendor_id: 0x15AD,
                device_id: 0x07B0,
                class: class_code(0x02_00_00),
                ..Identity::default()
            },
            multifunction: true,
            bars: vec![BarLayout { index: 2, kind: BarKind::Memory32, prefetchable: false, size: 8192 }],
            msix: MsixLayout::new(3, (2, 0), (2, 0x1000)).unwrap(),
        })
        .unwrap();
        let mut data = [0; 4];
        header.read(HEADER_TYPE.into(), &mut data[..1]);
        assert_eq!(data[0], 0x80);
        header.read(8, &mut data);
        assert_eq!(u32::from_le_bytes(data) >> 8, 0x02_00_00);
        let command = |value: u16| header.write(COMMAND.into(), &value.to_le_bytes());
        assert_eq!(command(COMMAND_BUS_MASTER), Some(true));
        assert_eq!(command(COMMAND_BUS_MASTER | 2), None);
        assert!(header.bus_master());
        assert_eq!(command(0), Some(false));
        assert_eq!(header.write(1 << 20, &[1]), None);
        header.read(1 << 20, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }
}
