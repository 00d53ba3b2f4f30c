//! What can be seen of a device from outside.

use dma::Dma;

use super::{Counters, Device, Phase};

/// A device's state, for `inspect`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// How far the driver has come.
    pub phase: Phase,
    /// Guest address of the shared region.
    pub shared_region: Option<u64>,
    /// The driver's interface version.
    pub driver_version: Option<u32>,
    /// Whether it may access memory.
    pub bus_master: bool,
    /// Whether interrupts are masked.
    pub masked: bool,
    /// Live UAR pages, the kernel's included.
    pub uar_pages: usize,
    /// Protection domains.
    pub protection_domains: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
    /// Asynchronous events that wait for room in the ring.
    pub waiting_events: usize,
    /// Asynchronous events dropped, since too many waited.
    pub dropped_events: u64,
    /// Counters.
    pub counters: Counters,
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// The device's state.
    #[must_use]
    pub fn report(&self) -> DeviceReport {
        DeviceReport {
            name: self.config.name.clone(),
            phase: self.phase,
            shared_region: self.region_address,
            driver_version: self.region.map(|region| region.driver_version),
            bus_master: self.bus_master,
            masked: self.masked,
            uar_pages: self.pages.len(),
            protection_domains: self.pds.len(),
            queue_pairs: self.qps.len(),
            waiting_events: self.events.waiting(),
            dropped_events: self.events.dropped,
            counters: self.counters,
        }
    }

    /// What happened since the device was made.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }
}
