//! An engine with devices, as in a host daemon.

use std::cell::Cell;
use std::collections::BTreeMap;

use dma::Dma;
use hca::names::DeviceId;
use hca::{Engine, EngineConfig};

use pvrdma::Pvrdma;
use pvrdma::device::doorbells::Uar;
use pvrdma::device::{Config, Device, Interrupts};
use pvrdma::devices::Devices;

/// Counts of raised interrupt vectors.
#[derive(Debug, Default)]
pub struct Lines {
    raised: [Cell<u64>; 3],
}

impl Lines {
    /// How many times a vector was raised.
    #[must_use]
    pub fn raised(&self, vector: u16) -> u64 {
        self.raised[usize::from(vector)].get()
    }
}

impl Interrupts for Lines {
    fn raise(&self, vector: u16) {
        let count = &self.raised[usize::from(vector)];
        count.set(count.get() + 1);
    }
}

/// An engine and its devices.
pub struct Host<M: Dma + Clone + 'static> {
    /// The engine.
    pub engine: Engine<Pvrdma<M>>,
    /// Its devices.
    pub devices: Devices<M>,
    /// Interrupts of each device.
    pub lines: BTreeMap<DeviceId, Lines>,
    /// The clock, nanoseconds.
    pub now: u64,
    /// Number of work requests that the engine executed.
    pub requests: u64,
}

impl<M: Dma + Clone + 'static> std::fmt::Debug for Host<M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Host").field("devices", &self.devices).field("now", &self.now).finish()
    }
}

impl<M: Dma + Clone + 'static> Default for Host<M> {
    fn default() -> Self {
        Self::new(EngineConfig::default())
    }
}

impl<M: Dma + Clone + 'static> Host<M> {
    /// An engine without devices.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config),
            devices: Devices::default(),
            lines: BTreeMap::new(),
            now: 1_000_000_000,
            requests: 0,
        }
    }

    /// Adds a device with bus mastering on.
    pub fn add(&mut self, config: Config, memory: M) -> DeviceId {
        let mut device = Device::new(config, memory, &mut self.engine).unwrap();
        device.set_bus_master(&mut self.engine, true);
        let id = device.id();
        self.devices.insert(device);
        self.lines.insert(id, Lines::default());
        id
    }

    /// Executes a register write of the guest.
    pub fn write(&mut self, id: DeviceId, offset: u64, value: u32) {
        while self.write_slice(id, offset, value) {}
    }

    /// Executes a slice of a register write of the guest; returns whether more follow.
    pub fn write_slice(&mut self, id: DeviceId, offset: u64, value: u32) -> bool {
        let device = self.devices.get_mut(id).unwrap();
        device.register_write(&mut self.engine, offset, value, &self.lines[&id]);
        device.is_unfinished()
    }

    /// Executes a register read of the guest.
    pub fn read(&mut self, id: DeviceId, offset: u64) -> u32 {
        self.devices.get_mut(id).unwrap().register_read(offset)
    }

    /// One pass of a daemon's loop: doorbells, work, events. Returns whether anything was done.
    pub fn turn<'a, U: Uar + 'a>(&mut self, uars: impl IntoIterator<Item = (DeviceId, &'a U)>) -> bool {
        let mut worked = false;
        for (id, uar) in uars {
            let looked = self.devices.get_mut(id).unwrap().look(&mut self.engine, uar, self.now);
            worked |= looked.unwrap_or(false);
        }
        let progress = self.engine.poll(self.now, &mut self.devices);
        worked |= progress.worked;
        self.requests += u64::from(progress.requests);
        // Both are ordered by identifier.
        for (device, lines) in self.devices.iter_mut().zip(self.lines.values()) {
            device.flush_events(self.now, lines);
        }
        self.now += 1_000;
        worked
    }
}
