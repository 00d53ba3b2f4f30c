//! The entropy device.

use std::sync::Arc;

use machine::memory::GuestAddressSpace;
use telemetry::guest_log::GuestLog;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::worker::{RngCounters, RngQueue};
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice};
use crate::queue::Ring;
use crate::worker::Worker;

/// Entries of the queue.
pub const QUEUE_SIZE: u16 = 64;
const SAVED_VERSION: u32 = 1;

/// A virtio entropy device.
pub struct Rng {
    name: String,
    counters: Arc<RngCounters>,
    log: Arc<GuestLog>,
    worker: Option<Worker<RngQueue>>,
    /// Queues of an active device that no thread serves.
    idle: Vec<ActiveQueue>,
}

impl Rng {
    /// A device called `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            counters: Arc::default(),
            log: Arc::default(),
            worker: None,
            idle: Vec::new(),
        }
    }

    /// Restores a device. It has no state besides the queue, so only the version is checked.
    pub fn restore(name: impl Into<String>, saved: &SavedDevice) -> Result<Self, RngRestoreError> {
        let name = name.into();
        if saved.version != SAVED_VERSION || !saved.state.is_empty() {
            return Err(RngRestoreError { name, version: saved.version, bytes: saved.state.len() });
        }
        Ok(Self::new(name))
    }

    fn host(&self, what: &str, source: std::io::Error) -> DeviceError {
        DeviceError::Host { name: self.name.clone(), what: what.to_owned(), source }
    }
}

/// The saved state has another version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "Entropy device {name}: saved state of version {version} with {bytes} bytes can't be used; version 1 has none"
)]
pub struct RngRestoreError {
    /// Device name.
    pub name: String,
    /// Version in the state.
    pub version: u32,
    /// Length of the state, bytes.
    pub bytes: usize,
}

impl VirtioDevice for Rng {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_id(&self) -> u16 {
        u16::try_from(VIRTIO_ID_RNG).unwrap_or(4)
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn config_read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {
        // The device has no configuration.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let Activation { memory, features, mut queues, interrupt } = activation;
        if queues.is_empty() {
            return Ok(());
        }
        let ring = Ring::new(queues.remove(0), features);
        self.idle = queues;
        if let Err(error) = ring.check(&memory.memory()) {
            interrupt.failed(&error.to_string());
            self.idle.push(ring.into_active());
            return Ok(());
        }
        let (counters, log) = (Arc::clone(&self.counters), Arc::clone(&self.log));
        let queue = RngQueue { ring, memory, interrupt: Arc::clone(&interrupt), counters, log };
        let worker = Worker::spawn(&self.name, interrupt, queue, |queue, poller| queue.run(poller))
            .map_err(|error| self.host("start its thread", error))?;
        self.worker = Some(worker);
        Ok(())
    }

    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError> {
        let mut queues = std::mem::take(&mut self.idle);
        if let Some(worker) = self.worker.take() {
            let Some(queue) = worker.stop() else {
                let lost = std::io::Error::other("its thread died with the queue");
                return Err(self.host("stop", lost));
            };
            queues.push(queue.ring.into_active());
        }
        queues.sort_by_key(|queue| queue.index);
        Ok(queues)
    }

    fn reset(&mut self) {
        // It has no state between requests.
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        Ok(SavedDevice { version: SAVED_VERSION, state: Vec::new() })
    }

    fn restored(self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError> {
        let fresh = Self::restore(self.name.clone(), saved);
        let device = fresh
            .map_err(|error| DeviceError::Saved { name: self.name.clone(), reason: error.to_string() })?;
        Ok(Box::new(device))
    }

    fn settle(&self) -> Result<(), DeviceError> {
        // It holds no unwritten data.
        Ok(())
    }

    fn hand_over(&mut self) -> Result<(), DeviceError> {
        // It holds no resources of the host.
        Ok(())
    }

    fn take_over(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn announce(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn inspect(&self) -> serde_json::Value {
        serde_json::json!({
            "kind": "rng",
            "source": "getrandom",
            "counters": {
                "requests": self.counters.requests.get(),
                "bytes": self.counters.bytes.get(),
                "errors": self.counters.errors.get(),
            },
        })
    }
}
