//! The drivers behind one interface, for tests that run with each card.

use device_models::describe::Device;
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};

use super::memory::Memory;
use super::{e1000, ne2000, rtl8139};

/// Cards that VMs can share.
pub const CARDS: [&Device; 3] = [&RTL8139, &E1000, &NE2000];

/// A driver of one of the cards.
#[derive(Debug, Clone)]
pub enum Driver {
    Rtl8139(rtl8139::Driver),
    /// With the number of frames in flight.
    E1000(e1000::Driver, u32),
    /// With whether a frame is in flight.
    Ne2000(ne2000::Driver, bool),
}

impl Driver {
    /// Finds the card and reads its address.
    pub fn probe(device: &Device, ports: &mut dyn Memory, number: u8) -> Self {
        match device.name {
            "rtl8139" => Self::Rtl8139(rtl8139::Driver::probe(ports, number)),
            "e1000" => Self::E1000(e1000::Driver::probe(ports, number), 0),
            "ne2000" => Self::Ne2000(ne2000::Driver::probe(ports), false),
            other => panic!("no driver for {other}"),
        }
    }

    pub fn address(&self) -> [u8; 6] {
        match self {
            Self::Rtl8139(driver) => driver.address,
            Self::E1000(driver, _) => driver.address,
            Self::Ne2000(driver, _) => driver.address,
        }
    }

    /// Starts the card.
    pub fn start(&mut self, ports: &mut dyn Memory) {
        match self {
            Self::Rtl8139(driver) => driver.start(ports),
            Self::E1000(driver, _) => driver.start(ports),
            Self::Ne2000(driver, _) => driver.start(ports),
        }
    }

    /// Returns whether a frame can be handed over.
    pub fn has_room(&self) -> bool {
        match self {
            Self::Rtl8139(driver) => driver.has_room(),
            Self::E1000(_, under_way) => *under_way < e1000::RING - 8,
            Self::Ne2000(_, under_way) => !under_way,
        }
    }

    pub fn send(&mut self, ports: &mut dyn Memory, frame: &[u8]) {
        match self {
            Self::Rtl8139(driver) => driver.send(ports, frame),
            Self::E1000(driver, under_way) => {
                driver.send(ports, frame);
                *under_way += 1;
            }
            Self::Ne2000(driver, under_way) => {
                driver.send(ports, frame);
                *under_way = true;
            }
        }
    }

    /// Runs the interrupt handler. Returns received frames, the number of sent frames, and whether there was a transmit
    /// error.
    pub fn interrupt(&mut self, ports: &mut dyn Memory) -> (Vec<Vec<u8>>, u32, bool) {
        match self {
            Self::Rtl8139(driver) => driver.interrupt(ports),
            Self::E1000(driver, under_way) => {
                let (frames, sent) = driver.interrupt(ports);
                // Tests may post descriptors by themselves.
                *under_way = under_way.saturating_sub(sent);
                (frames, sent, false)
            }
            Self::Ne2000(driver, under_way) => {
                let (frames, sent, error) = driver.interrupt(ports);
                *under_way &= !(sent || error);
                (frames, u32::from(sent), error)
            }
        }
    }
}
