//! The device shared region: copied when the driver describes it, and never read again. What the guest rewrites later has no effect.

use dma::access::read_array;
use dma::{Dma, DmaFault};
use zerocopy::{IntoBytes, transmute};

use super::config::Config;
use super::error::FatalError;
use super::events::EventRing;
use crate::abi::PAGE;
use crate::abi::commands::{COMMAND_SIZE, RESPONSE_SIZE};
use crate::abi::registers::INTERFACE_VERSION;
use crate::abi::rings::{
    ASYNC_ELEMENT, ASYNC_SLOTS, COMPLETION_ELEMENT, COMPLETION_SLOTS, EVENT_RING_PAGES, event,
};
use crate::abi::shared_region::{CAPABILITIES, DriverPart, RingPages};
use crate::page_list::{PageListError, read_page_list};

/// The part of the region that stays valid after it was accepted.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedRegion {
    pub driver_version: u32,
    pub command_slot: u64,
    pub response_slot: u64,
    /// Guest page frame of UAR page 0.
    pub uar_pfn: u64,
}

/// Why a shared region can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// Not aligned.
    #[error("The shared region or a slot is at {0:#x}, which is not aligned to 8 bytes")]
    Alignment(u64),
    /// Not guest memory.
    #[error("The shared region or a slot is not the guest's memory")]
    Memory(
        #[from]
        #[source]
        DmaFault,
    ),
    /// The driver's interface version assumes that handles equal queue pair numbers.
    #[error(
        "The driver speaks interface version {0}, the device needs {INTERFACE_VERSION}; use Linux 5.5 or later"
    )]
    Version(u32),
    /// Not the number of pages that the driver's index arithmetic implies.
    #[error("An event ring has {0} pages instead of {EVENT_RING_PAGES}")]
    RingPages(u32),
    /// An unusable page directory.
    #[error("The pages of an event ring can't be found")]
    Pages(
        #[from]
        #[source]
        PageListError,
    ),
    /// The ring's indices are invalid.
    #[error("The indices of an event ring are not those of a ring")]
    RingState,
}

fn driver_part(memory: &impl Dma, address: u64) -> Result<DriverPart, RegionError> {
    if !address.is_multiple_of(8) {
        return Err(RegionError::Alignment(address));
    }
    let bytes: [u8; size_of::<DriverPart>()] = read_array(memory, address)?;
    Ok(transmute!(bytes))
}

/// Locates a ring's indices and its only used page of elements.
fn event_ring(
    memory: &impl Dma,
    described: RingPages,
    slots: u32,
    element: u64,
) -> Result<EventRing, RegionError> {
    if described.pages.get() != EVENT_RING_PAGES {
        return Err(RegionError::RingPages(described.pages.get()));
    }
    let pages = read_page_list(memory, described.directory.get(), 2)?;
    EventRing::new(memory, pages[0], pages[1], slots, element).ok_or(RegionError::RingState)
}

impl SharedRegion {
    /// Copies the driver's part, locates the event rings, and writes the capabilities last: a refused region has none, which the driver
    /// detects.
    pub fn accept(
        memory: &impl Dma,
        address: u64,
        config: &Config,
    ) -> Result<(Self, EventRing, EventRing), RegionError> {
        let driver = driver_part(memory, address)?;
        let driver_version = driver.driver_version.get();
        if driver_version < INTERFACE_VERSION {
            return Err(RegionError::Version(driver_version));
        }
        let (command_slot, response_slot) = (driver.command_slot.get(), driver.response_slot.get());
        for (slot, size) in [(command_slot, COMMAND_SIZE), (response_slot, RESPONSE_SIZE)] {
            if !slot.is_multiple_of(8) {
                return Err(RegionError::Alignment(slot));
            }
            memory.check(slot, size as u64)?;
        }
        let async_ring = event_ring(memory, driver.async_ring, ASYNC_SLOTS, ASYNC_ELEMENT)?;
        let completion_ring =
            event_ring(memory, driver.completion_ring, COMPLETION_SLOTS, COMPLETION_ELEMENT)?;
        let capabilities = address.checked_add(CAPABILITIES).ok_or(RegionError::Alignment(address))?;
        memory.write(capabilities, config.guest_capabilities().as_bytes())?;
        let region = Self { driver_version, command_slot, response_slot, uar_pfn: driver.uar_pfn.get() };
        Ok((region, async_ring, completion_ring))
    }

    /// The UAR page of a context's page frame number.
    pub fn uar_page(&self, pfn: u64, max_uar: u32) -> Option<u32> {
        let page = u32::try_from(pfn.checked_sub(self.uar_pfn)?).ok()?;
        (1..max_uar).contains(&page).then_some(page)
    }
}

/// Posts DEVICE_FATAL in the ring of the region at `address`, at the ring's current position.
pub(super) fn post_fatal(memory: &impl Dma, address: u64) -> Result<(), FatalError> {
    let driver = driver_part(memory, address)?;
    let mut ring = event_ring(memory, driver.async_ring, ASYNC_SLOTS, ASYNC_ELEMENT)?;
    let mut element = [0; 8];
    element[..4].copy_from_slice(&event::DEVICE_FATAL.to_le_bytes());
    element[4..].copy_from_slice(&1u32.to_le_bytes());
    if !ring.push(memory, &element) || !ring.publish(memory) {
        return Err(FatalError::Ring);
    }
    Ok(())
}

const _: () = assert!(ASYNC_SLOTS as u64 * ASYNC_ELEMENT <= PAGE);
const _: () = assert!(COMPLETION_SLOTS as u64 * COMPLETION_ELEMENT <= PAGE);
