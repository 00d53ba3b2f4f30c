//! Reference emulations. Registers, decoding and the state graph come from the description. The code here adds the
//! packet handling. They trust their driver as real devices do: they perform exactly what a monitor must prevent.

pub mod e1000;
pub mod filter;
pub mod ne2000;
pub mod port;
pub mod rtl8139;

use crate::describe::Device;
use crate::physical::{Bus, PhysicalDevice};

pub use filter::Filter;

/// A network card of this module.
pub trait Card: PhysicalDevice {
    /// Advances time: frames in transmission are sent.
    fn tick(&mut self);
    /// Returns the frames that were sent since the last call.
    fn take_sent(&mut self) -> Vec<Vec<u8>>;
    /// Receives a frame. Returns whether it was stored.
    fn receive(&mut self, frame: &[u8]) -> bool;
    /// Returns the number of DMA accesses that the IOMMU or a disabled bus master blocked.
    fn blocked(&self) -> u64;
}

/// Creates the emulation of a description, with a station address, on a bus. With `iommu` it reaches mapped memory
/// only. Returns `None` if the description has no emulation.
pub fn card<B: Bus + Send + 'static>(
    device: &'static Device,
    address: [u8; 6],
    bus: B,
    iommu: bool,
) -> Option<Box<dyn Card + Send>> {
    match device.name {
        "ne2000" => Some(Box::new(ne2000::Ne2000::new(address))),
        "e1000" => Some(Box::new(e1000::E1000Card::new(address, bus, iommu))),
        "rtl8139" => Some(Box::new(rtl8139::Rtl8139::new(address, bus, iommu))),
        _ => None,
    }
}

/// Shortest transmitted Ethernet frame in bytes, without CRC.
pub const SHORTEST: usize = 60;

/// Returns the multicast filter's index of an address: the top six bits of the Ethernet CRC-32.
pub fn multicast_index(address: &[u8]) -> usize {
    let crc = address.iter().fold(0xFFFF_FFFFu32, |crc, &byte| {
        (0..8).fold(crc, |crc, bit| {
            let carry = crc >> 31 ^ u32::from(byte >> bit & 1);
            crc << 1 ^ if carry == 1 { 0x04C1_1DB7 } else { 0 }
        })
    });
    usize::try_from(crc >> 26).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_multicast_index_is_that_of_the_data_sheet() {
        // The all-hosts group 01:00:5E:00:00:01 sets bit 31 of the filter in every DP8390 and RTL8139 driver.
        assert_eq!(super::multicast_index(&[0x01, 0x00, 0x5E, 0x00, 0x00, 0x01]), 31);
    }
}
