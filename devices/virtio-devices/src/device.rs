//! The trait of virtio devices, and the parameters of their activation.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use machine::memory::GuestMemorySpace;
use virtio_queue::Queue;

/// Interrupts to the driver, for used buffers or a configuration change. Cheap to clone, usable from any thread. The caller implements
/// event suppression (`VIRTIO_F_EVENT_IDX`, `Queue::needs_notification`).
pub trait VirtioInterrupt: Send + Sync {
    /// Interrupts for queue `index` (used buffers).
    fn queue(&self, index: u16);
    /// Interrupts for a configuration change.
    fn config(&self);
    /// Fails the device: sets DEVICE_NEEDS_RESET and interrupts for a configuration change. The transport logs `reason`, and `causeway
    /// inspect` reports it.
    fn failed(&self, reason: &str);
}

/// A queue that the driver has set up.
pub struct ActiveQueue {
    /// Index of the queue.
    pub index: u16,
    /// The ring.
    pub queue: Queue,
    /// Signalled (by ioeventfd) when the driver has made buffers available.
    pub kick: Arc<OwnedFd>,
}

/// Parameters of an activation, when the driver sets DRIVER_OK.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemorySpace,
    /// Negotiated features.
    pub features: u64,
    /// The enabled queues, ascending by index.
    pub queues: Vec<ActiveQueue>,
    /// Interrupts to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
}

/// A virtio device without its transport. The transport calls it under one lock, so `&mut self` methods never run concurrently. Data-path
/// work belongs to threads of the device's own, one or more per device.
///
/// ```text
/// created -> activate -> (stop -> activate)* -> dropped
///               |  guest-caused error: interrupt.failed(reason), queues idle until stop
/// ```
pub trait VirtioDevice: Send {
    /// Name, unique in the VM.
    fn name(&self) -> &str;
    /// virtio device id (1 net, 2 block, 4 rng, 19 vsock).
    fn device_id(&self) -> u16;
    /// Offered features, without the transport's own (`VERSION_1`, `EVENT_IDX`, `INDIRECT_DESC` included here when
    /// the device supports them).
    fn features(&self) -> u64;
    /// Limit of each queue's size, powers of two.
    fn queue_sizes(&self) -> Vec<u16>;
    /// Reads device-specific configuration; bytes beyond its end read as zero.
    fn config_read(&self, offset: u64, data: &mut [u8]);
    /// Writes device-specific configuration; read-only fields are ignored.
    fn config_write(&mut self, offset: u64, data: &[u8]);
    /// Starts the device's threads. On an error the transport marks the device as failed and calls `stop`, which ends threads that did
    /// start.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Stops the threads after the requests in flight: each is completed or returned unserved, and never lost after it was acknowledged.
    /// Returns the queues with their positions, so that `activate` can continue after a pause. An inactive device returns an empty list.
    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError>;
    /// Clears driver-visible state after a reset by the driver (`stop` was called before).
    fn reset(&mut self);
    /// Saves the device-specific state while stopped, versioned; `NotSaveable` has the reason.
    fn save(&self) -> Result<SavedDevice, DeviceError>;
    /// Restores a saved state into a device that is open on this host and was never active. Its files, interfaces and sockets stay this
    /// host's; the driver-visible state is the saved one.
    ///
    /// # Errors
    /// [`DeviceError::Saved`] when the state is damaged, or this device can't provide what the driver has negotiated.
    fn restored(self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError>;
    /// Makes written data durable while the device runs, so that a later [`VirtioDevice::hand_over`] takes less time.
    ///
    /// # Errors
    /// When the host refuses.
    fn settle(&self) -> Result<(), DeviceError>;
    /// Releases what only one host may hold, so that the VM can run on another host: locks of images, after written data is durable. Called
    /// while stopped; the device can't be activated until [`VirtioDevice::take_over`].
    ///
    /// # Errors
    /// When written data can't be made durable, or the host refuses.
    fn hand_over(&mut self) -> Result<(), DeviceError>;
    /// Claims what [`VirtioDevice::hand_over`] released, on either host. Does nothing if the device holds it already.
    ///
    /// # Errors
    /// When another process holds it.
    fn take_over(&mut self) -> Result<(), DeviceError>;
    /// Announces the guest to the network of this host. Called after it has begun to run.
    ///
    /// # Errors
    /// When the host refuses; the guest runs all the same.
    fn announce(&self) -> Result<(), DeviceError>;
    /// Reports state and counters.
    fn inspect(&self) -> serde_json::Value;
}

/// A saved device state; a constructor of the concrete type restores it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedDevice {
    /// Version of `state`, per device type.
    pub version: u32,
    /// Serialised state.
    pub state: Vec<u8>,
}

/// Why an operation on a device failed. Never caused by the guest.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device can't be saved.
    #[error("Device {name} can't be saved: {reason}")]
    NotSaveable {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The device can't be restored from this state.
    #[error("Saved state of device {name} can't be used: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The host refused an operation.
    #[error("Device {name} could not {what}")]
    Host {
        /// Device name.
        name: String,
        /// The failed operation, with its values.
        what: String,
        /// The error.
        #[source]
        source: std::io::Error,
    },
}
