//! Joins this build of the crate with the drivers of `virtio-devices-testbed`, which are linked with the crate built
//! without tests.

use std::sync::Arc;

use machine::memory::GuestMemorySpace;
use virtio_devices_testbed::{MockDriver, MockInterrupt};

use crate::device::{Activation, ActiveQueue, VirtioInterrupt};

impl VirtioInterrupt for MockInterrupt {
    fn queue(&self, _index: u16) {
        self.count_queue();
    }

    fn config(&self) {
        self.count_config();
    }

    fn failed(&self, reason: &str) {
        self.note_failure(reason);
    }
}

/// The driver's queue as the transport would pass it to the device.
pub(crate) fn active_queue(driver: &MockDriver) -> ActiveQueue {
    ActiveQueue { index: driver.index, queue: driver.queue(), kick: Arc::clone(&driver.kick) }
}

/// The activation that a transport would pass to a device for these queues.
pub(crate) fn activation(
    space: &GuestMemorySpace,
    features: u64,
    drivers: &[&MockDriver],
    interrupt: &Arc<MockInterrupt>,
) -> Activation {
    Activation {
        memory: space.clone(),
        features,
        queues: drivers.iter().map(|driver| active_queue(driver)).collect(),
        interrupt: Arc::clone(interrupt) as Arc<dyn VirtioInterrupt>,
    }
}
