//! All PVRDMA functions of an engine.

use dma::Dma;
use hca::names::{CqHandle, DeviceId};
use hca::provider::Sink;
use hca::work::AsyncEvent;

use crate::device::Device;

/// The functions that one engine serves; pass it to [`hca::Engine::poll`] as the sink, then call
/// [`Device::flush_events`] for each device.
pub struct Devices<M: Dma + Clone + 'static> {
    /// Sorted by identity: there are tens, and a lookup happens per event.
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

    /// Adds a device; one with the same identity is replaced and returned.
    pub fn insert(&mut self, device: Device<M>) -> Option<Device<M>> {
        match self.position(device.id()) {
            Ok(at) => Some(std::mem::replace(&mut self.devices[at], device)),
            Err(at) => {
                self.devices.insert(at, device);
                None
            }
        }
    }

    /// Takes a device out. It is still to be removed from the engine ([`Device::remove`]).
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

    /// All devices, in the order of their identities.
    pub fn iter(&self) -> impl Iterator<Item = &Device<M>> {
        self.devices.iter()
    }

    /// All devices, in the order of their identities. Events that one of them was handed for another are passed on first, so this
    /// is what a loop that scans and flushes uses.
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
        // Nobody is left to be told of a device that is gone.
        self.get_mut(device).is_none_or(|owner| owner.completion_event(device, cq))
    }

    fn async_event(&mut self, device: DeviceId, event: AsyncEvent) {
        if let Some(owner) = self.get_mut(device) {
            owner.async_event(device, event);
        }
    }
}
