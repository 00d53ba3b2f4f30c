//! The interface to the physical device: VFIO, a device model in another process, or the reference emulation in this
//! one.

use thiserror::Error;

use crate::describe::{Device, Direction, Poke};

/// The device is unreachable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("Cannot reach the device at BAR {bar}, offset {offset:X}h: {why}")]
pub struct DeviceError {
    /// BAR of the access.
    pub bar: u8,
    /// Offset of the access.
    pub offset: u32,
    /// The cause.
    pub why: String,
}

/// A range of memory that the device may access through an IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mapping {
    /// Base in the device's addresses.
    pub device_base: u64,
    /// Guest-physical base.
    pub guest_base: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether the device may write; it may always read.
    pub writable: bool,
}

/// A physical device. All calls come from the thread that owns the device's monitor.
pub trait PhysicalDevice {
    /// Reads `size` bytes (1, 2 or 4) of a BAR.
    ///
    /// # Errors
    /// The device is unreachable.
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError>;
    /// Writes `size` bytes (1, 2 or 4) of a BAR.
    ///
    /// # Errors
    /// The device is unreachable.
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError>;
    /// Returns whether the device keeps each guest's memory separately. Then a hand-off neither moves nor clears any.
    /// No physical card does so.
    fn keeps_memory(&self) -> bool {
        false
    }
    /// Returns the level of the interrupt line.
    ///
    /// # Errors
    /// The device is unreachable.
    fn interrupt(&mut self) -> Result<bool, DeviceError>;
    /// Resets the function.
    ///
    /// # Errors
    /// The device is unreachable.
    fn reset(&mut self) -> Result<(), DeviceError>;
    /// Enables or disables bus mastering.
    ///
    /// # Errors
    /// The device is unreachable.
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError>;
    /// Returns whether the device is behind an IOMMU: then it reaches only what [`Self::map`] mapped.
    fn has_iommu(&self) -> bool;
    /// Maps memory for the device in the IOMMU.
    ///
    /// # Errors
    /// The memory can't be mapped or pinned.
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError>;
    /// Removes a mapping.
    ///
    /// # Errors
    /// The device is unreachable.
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError>;
}

/// Limit of reads of a register until a device must have completed an operation.
const MAX_DRAIN_READS: u32 = 10_000;

/// Executes register accesses in order, without a model.
///
/// # Errors
/// The device is unreachable, or a register doesn't reach its expected value.
pub fn poke(
    device: &Device,
    physical: &mut (impl PhysicalDevice + ?Sized),
    pokes: &[Poke],
) -> Result<(), DeviceError> {
    let bar = device.bar();
    for poke in pokes {
        match *poke {
            Poke::Write(offset, size, value) => physical.write(bar, offset, size, value)?,
            Poke::Read(offset, size) => drop(physical.read(bar, offset, size)?),
            Poke::Hold(offset, size, reads) => {
                for _ in 0..reads {
                    physical.read(bar, offset, size)?;
                }
            }
            Poke::Await(offset, size, mask, value) => {
                let mut reads = 0;
                while physical.read(bar, offset, size)? & mask != value {
                    reads += 1;
                    if reads == MAX_DRAIN_READS {
                        let why =
                            format!("its bits {mask:X}h didn't become {value:X}h in {MAX_DRAIN_READS} reads");
                        return Err(DeviceError { bar, offset, why });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Reads a device's factory Ethernet address. The device was just reset.
///
/// # Errors
/// The device is unreachable.
pub fn station_address(
    device: &Device,
    physical: &mut (impl PhysicalDevice + ?Sized),
) -> Result<[u8; 6], DeviceError> {
    let station = &device.station;
    poke(device, physical, station.before)?;
    let mut address = [0; 6];
    let mut offset = station.offset;
    for byte in &mut address {
        let within = offset % u32::from(station.width);
        let value = physical.read(device.bar(), offset - within, station.width)?;
        *byte = (value >> (8 * within)).to_le_bytes()[0];
        offset += station.stride;
    }
    poke(device, physical, station.after)?;
    Ok(address)
}

/// Memory in a bus master's addresses. The implementation may log every access.
pub trait Bus {
    /// The device reads.
    fn read(&mut self, address: u64, into: &mut [u8]);
    /// The device writes.
    fn write(&mut self, address: u64, data: &[u8]);
}

/// An access of a device to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// The direction.
    pub direction: Direction,
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// The purpose.
    pub purpose: &'static str,
}

#[cfg(test)]
mod tests {
    use super::{Bus, PhysicalDevice, station_address};
    use crate::devices::ALL;
    use crate::reference::card;

    struct NoBus;

    impl Bus for NoBus {
        fn read(&mut self, _: u64, into: &mut [u8]) {
            into.fill(0);
        }
        fn write(&mut self, _: u64, _: &[u8]) {}
    }

    /// A reset keeps what a VM set in an e1000's PHY. The power-on sequence restores its factory state for the next VM.
    #[test]
    fn a_phy_is_as_after_power_on_for_the_next_vm() {
        use crate::devices::e1000::{E1000, MDIC};
        let mut card = card(&E1000, [0x52, 0x54, 0, 0x88, 0x10, 0x01], NoBus, false).unwrap();
        let at = E1000.register(MDIC).offset.unwrap();
        let phy = |card: &mut dyn PhysicalDevice| -> Vec<u32> {
            let read = |register: u32| {
                card.write(0, at, 4, 1 << 27 | 1 << 21 | register << 16).unwrap();
                card.read(0, at, 4).unwrap() & 0xFFFF
            };
            (0..32).map(read).collect()
        };
        let made = phy(card.as_mut());
        // Loopback, no gigabit, Marvell's registers.
        for (register, value) in [(0, 0x4140), (4, 0x0021), (9, 0), (16, 0x0400), (20, 0x4000)] {
            card.write(0, at, 4, 1 << 26 | 1 << 21 | register << 16 | value).unwrap();
        }
        super::poke(&E1000, card.as_mut(), E1000.reset).unwrap();
        assert_ne!(phy(card.as_mut()), made, "a reset of the card is none of its PHY");
        super::poke(&E1000, card.as_mut(), E1000.power_on).unwrap();
        assert_eq!(phy(card.as_mut()), made);
    }

    /// Each description reads its card's address, and its reset by registers completes.
    #[test]
    fn cards_tell_their_address() {
        let address = [0x52, 0x54, 0, 0x88, 0x10, 0x01];
        for device in ALL {
            let mut card = card(device, address, NoBus, false).unwrap();
            super::poke(device, card.as_mut(), device.reset).unwrap();
            super::poke(device, card.as_mut(), device.power_on).unwrap();
            assert_eq!(station_address(device, card.as_mut()).unwrap(), address, "{}", device.name);
        }
    }
}
