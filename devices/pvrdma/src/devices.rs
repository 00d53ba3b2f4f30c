//! All PVRDMA functions of an engine.

use dma::Dma;
use hca::names::{CqHandle, DeviceId};
use hca::provider::Sink;
use hca::work::AsyncEvent;

use crate::device::Device;

/// The functions of one engine. Pass it to [`hca::Engine::poll`] as the sink, then call [`Device::flush_events`] for each device.
pub struct Devices<M: Dma + Clone + 'static> {
    /// Sorted by identifier: there are tens of devices, and each event needs a look-up.
    devices: Vec<Device<M>>,
}

impl<M: Dma + Clone + 'static> std::fmt::Debug for Devices<M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(&self.devices).finish()
    }
}

impl<M: Dma + Clone + 'static> Default for Devices<M> {
    fn default() -> Self {
        Self { devices: Vec::new() }
    }
}

impl<M: Dma + Clone + 'static> Devices<M> {
    fn position(&self, id: DeviceId) -> Result<usize, usize> {
        self.devices.binary_search_by_key(&id, Device::id)
    }

    /// Adds a device; returns the replaced one with the same identifier, if any.
    pub fn insert(&mut self, device: Device<M>) -> Option<Device<M>> {
        match self.position(device.id()) {
            Ok(at) => Some(std::mem::replace(&mut self.devices[at], device)),
            Err(at) => {
                self.devices.insert(at, device);
                None
            }
        }
    }

    /// Removes and returns a device, which is still in the engine ([`Device::remove`]).
    pub fn remove(&mut self, id: DeviceId) -> Option<Device<M>> {
        self.position(id).ok().map(|at| self.devices.remove(at))
    }

    /// A device.
    #[must_use]
    pub fn get(&self, id: DeviceId) -> Option<&Device<M>> {
        self.position(id).ok().map(|at| &self.devices[at])
    }

    /// A device.
    pub fn get_mut(&mut self, id: DeviceId) -> Option<&mut Device<M>> {
        self.position(id).ok().map(|at| &mut self.devices[at])
    }

    /// All devices, ordered by identifier.
    pub fn iter(&self) -> impl Iterator<Item = &Device<M>> {
        self.devices.iter()
    }

    /// All devices, ordered by identifier. First forwards events that the engine passed to one of them for another, so a loop that scans
    /// and flushes uses this.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Device<M>> {
        if self.devices.iter().any(Device::has_strays) {
            let strays: Vec<_> = self.devices.iter_mut().flat_map(Device::take_strays).collect();
            for (device, event) in strays {
                self.async_event(device, event);
            }
        }
        self.devices.iter_mut()
    }
}

impl<M: Dma + Clone + 'static> Sink for Devices<M> {
    #[inline]
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool {
        // Events of a removed device are dropped.
        self.get_mut(device).is_none_or(|owner| owner.completion_event(device, cq))
    }

    fn async_event(&mut self, device: DeviceId, event: AsyncEvent) {
        if let Some(owner) = self.get_mut(device) {
            owner.async_event(device, event);
        }
    }
}
