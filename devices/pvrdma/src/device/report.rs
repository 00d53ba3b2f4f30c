//! Reports of a device's state.

use dma::Dma;

use super::{Counters, Device, Phase};

/// A device's state, for `inspect`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceReport {
    /// Configured name.
    pub name: String,
    /// The driver's progress.
    pub phase: Phase,
    /// Guest address of the shared region.
    pub shared_region: Option<u64>,
    /// The driver's interface version.
    pub driver_version: Option<u32>,
    /// Whether bus mastering is enabled.
    pub bus_master: bool,
    /// Whether interrupts are masked.
    pub masked: bool,
    /// Number of live UAR pages, the kernel's included.
    pub uar_pages: usize,
    /// Number of protection domains.
    pub protection_domains: usize,
    /// Number of queue pairs.
    pub queue_pairs: usize,
    /// Number of asynchronous events that wait for room in the ring.
    pub waiting_events: usize,
    /// Number of asynchronous events that were dropped because too many waited.
    pub dropped_events: u64,
    /// Commands, doorbells and interrupts since the device was created.
    pub counters: Counters,
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Reports the device's state.
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

    /// Counts since the device was created.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }
}
