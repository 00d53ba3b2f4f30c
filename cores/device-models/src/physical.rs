//! The seam to whatever plays the physical device: VFIO, a device model in another process, the reference emulation in this one.

use thiserror::Error;

use crate::describe::{Device, Direction, Poke};

/// The device can't be reached any more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("Cannot reach the device at BAR {bar}, offset {offset:X}h: {why}")]
pub struct DeviceError {
    /// BAR of the access.
    pub bar: u8,
    /// Offset of the access.
    pub offset: u32,
    /// What went wrong.
    pub why: String,
}

/// A piece of memory that the device may reach, behind an IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mapping {
    /// First byte in the device's addresses.
    pub device_base: u64,
    /// First byte in the guest's addresses.
    pub guest_base: u64,
    /// Bytes.
    pub length: u64,
    /// Whether the device may write there; it may always read.
    pub writable: bool,
}

/// A physical device. All calls come from the one thread that holds the monitor of the device.
pub trait PhysicalDevice {
    /// Reads `size` bytes (1, 2 or 4) of a BAR.
    ///
    /// # Errors
    /// The device can't be reached.
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError>;
    /// Writes `size` bytes (1, 2 or 4) of a BAR.
    ///
    /// # Errors
    /// The device can't be reached.
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError>;
    /// Whether each guest finds its memory on the device as it left it, and nobody else's: then nothing of it is moved or cleared at a hand-off. No card
    /// does that by itself.
    fn keeps_memory(&self) -> bool {
        false
    }
    /// Level of the interrupt line.
    ///
    /// # Errors
    /// The device can't be reached.
    fn interrupt(&mut self) -> Result<bool, DeviceError>;
    /// Resets the function.
    ///
    /// # Errors
    /// The device can't be reached.
    fn reset(&mut self) -> Result<(), DeviceError>;
    /// Switches bus mastering.
    ///
    /// # Errors
    /// The device can't be reached.
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError>;
    /// Whether an IOMMU stands between the device and memory: then it reaches what [`Self::map`] named, and nothing else.
    fn has_iommu(&self) -> bool;
    /// Lets the device reach memory, behind an IOMMU.
    ///
    /// # Errors
    /// The memory can't be mapped or pinned.
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError>;
    /// Takes a mapping back.
    ///
    /// # Errors
    /// The device can't be reached.
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError>;
}

/// Reads of one register until a device must have done what it was told.
const MAX_DRAIN_READS: u32 = 10_000;

/// Pokes a device's registers in order.
///
/// # Errors
/// The device can't be reached, or its register doesn't become what it should.
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

/// The address that a device which was just reset was made with.
///
/// # Errors
/// The device can't be reached.
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

/// Memory as a device sees it, in its own addresses: what a bus master reads and writes. Kept by the test or by the IOMMU's owner,
/// who may log every access.
pub trait Bus {
    /// The device reads.
    fn read(&mut self, address: u64, into: &mut [u8]);
    /// The device writes.
    fn write(&mut self, address: u64, data: &[u8]);
}

/// Memory that a device touched by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// What it did.
    pub direction: Direction,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// What for.
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

    /// What a VM leaves in an e1000's PHY a reset leaves there; the next one finds it as it was made.
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

    /// Each description knows how its card tells its address, and its reset by registers comes to an end.
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
