//! The driver's side of virtio over PCI: how a guest driver sets a function up.

use std::sync::Arc;

use pci::function::PciFunction;
use pci_testbed::FakeMsi;

use crate::MockDriver;

/// Offsets in BAR 0 from the capabilities; a test of the transport compares them.
pub const COMMON: u64 = 0;
/// ISR status.
pub const ISR: u64 = 0x1000;
/// Device-specific configuration.
pub const DEVICE: u64 = 0x2000;
/// Notification, 4 bytes per queue.
pub const NOTIFY: u64 = 0x3000;
/// MSI-X table.
pub const MSIX_TABLE: u64 = 0x4000;

/// A driver of a virtio function.
pub struct PciDriver<F> {
    /// The function.
    pub function: Arc<F>,
    /// Its interrupt vectors: one per queue, the last for configuration changes.
    pub msi: Arc<FakeMsi>,
}

impl<F: PciFunction> PciDriver<F> {
    /// Drives `function`, whose vectors are `msi`'s.
    pub fn new(function: Arc<F>, msi: Arc<FakeMsi>) -> Self {
        Self { function, msi }
    }

    /// Reads `N` bytes of BAR 0.
    pub fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.function.bar_read(0, offset, &mut data);
        data
    }

    /// Writes BAR 0.
    pub fn write(&self, offset: u64, data: &[u8]) {
        self.function.bar_write(0, offset, data);
    }

    /// Device status.
    pub fn status(&self) -> u8 {
        self.read::<1>(COMMON + 0x14)[0]
    }

    /// Adds bits to the device status, or resets with 0.
    pub fn set_status(&self, bits: u8) {
        let new = if bits == 0 { 0 } else { self.status() | bits };
        self.write(COMMON + 0x14, &[new]);
    }

    /// Features that the device offers.
    pub fn offered(&self) -> u64 {
        let half = |select: u32| {
            self.write(COMMON, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.read(COMMON + 4)))
        };
        half(0) | half(1) << 32
    }

    /// Resets, then negotiates the offered ones of `features`; returns whether the device accepted.
    pub fn negotiate(&self, features: u64) -> bool {
        self.set_status(0);
        self.set_status(1);
        self.set_status(2);
        let features = features & self.offered();
        for (select, half) in [(0u32, features & 0xFFFF_FFFF), (1, features >> 32)] {
            self.write(COMMON + 8, &select.to_le_bytes());
            self.write(COMMON + 0xC, &half.to_le_bytes()[..4]);
        }
        self.set_status(8);
        self.status() & 8 != 0
    }

    /// Enables MSI-X with every vector unmasked; vector `i` has data `i`.
    pub fn enable_msix(&self) {
        for (vector, _) in (0u32..).zip(self.msi.vectors()) {
            let entry = MSIX_TABLE + 16 * u64::from(vector);
            self.write(entry, &0xFEE0_0000u64.to_le_bytes());
            self.write(entry + 8, &vector.to_le_bytes());
            self.write(entry + 12, &0u32.to_le_bytes());
        }
        let capability = self.capability(0x11);
        self.function.config_write(capability + 2, &0x8000u16.to_le_bytes());
    }

    /// Offset of a capability.
    pub fn capability(&self, id: u8) -> u16 {
        let byte = |at: u16| {
            let mut data = [0];
            self.function.config_read(at, &mut data);
            data[0]
        };
        let mut at = byte(0x34);
        while at != 0 && byte(at.into()) != id {
            at = byte(u16::from(at) + 1);
        }
        assert_ne!(at, 0, "there is no capability {id:#x}");
        at.into()
    }

    /// Sets up and enables the queue of `driver`; its vector is its index.
    pub fn set_queue(&self, driver: &MockDriver) {
        self.write(COMMON + 0x16, &driver.index.to_le_bytes());
        self.write(COMMON + 0x18, &driver.size.to_le_bytes());
        self.write(COMMON + 0x1A, &driver.index.to_le_bytes());
        self.write(COMMON + 0x20, &driver.descriptors().to_le_bytes());
        self.write(COMMON + 0x28, &driver.available_ring().to_le_bytes());
        self.write(COMMON + 0x30, &driver.used_ring().to_le_bytes());
        self.write(COMMON + 0x1C, &1u16.to_le_bytes());
    }

    /// Sets the vector for configuration changes.
    pub fn set_config_vector(&self, vector: u16) {
        self.write(COMMON + 0x10, &vector.to_le_bytes());
    }

    /// All steps from reset to DRIVER_OK.
    pub fn start(&self, features: u64, queues: &[&MockDriver]) -> bool {
        if !self.negotiate(features) {
            return false;
        }
        for driver in queues {
            self.set_queue(driver);
        }
        self.set_status(4);
        self.status() & 0x40 == 0
    }

    /// Notifies a queue through the BAR.
    pub fn notify(&self, queue: u16) {
        self.write(NOTIFY + 4 * u64::from(queue), &queue.to_le_bytes());
    }
}
