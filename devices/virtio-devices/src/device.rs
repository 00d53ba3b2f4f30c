//! The trait that every virtio device implements, and what it is given when the driver starts it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use machine::memory::GuestMemorySpace;
use virtio_queue::Queue;

/// Tells the driver that something happened on a queue, or that the configuration changed. Cheap to
/// clone, usable from any thread. Event suppression (`VIRTIO_F_EVENT_IDX`) is the caller's part
/// (`Queue::needs_notification`).
pub trait VirtioInterrupt: Send + Sync {
    /// Interrupts for queue `index` (used buffers).
    fn queue(&self, index: u16);
    /// Interrupts for a configuration change.
    fn config(&self);
    /// The device has failed: sets DEVICE_NEEDS_RESET and interrupts for a configuration change. The
    /// transport logs `reason`, and `causeway inspect` shows it.
    fn failed(&self, reason: &str);
}

/// One queue as the driver set it up.
pub struct ActiveQueue {
    /// Its index.
    pub index: u16,
    /// The ring.
    pub queue: Queue,
    /// Signalled (by ioeventfd) when the driver has made buffers available.
    pub kick: Arc<OwnedFd>,
}

/// What a device is given when the driver sets DRIVER_OK.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemorySpace,
    /// Features both sides agreed on.
    pub features: u64,
    /// The enabled queues, ascending by index.
    pub queues: Vec<ActiveQueue>,
    /// How to interrupt.
    pub interrupt: Arc<dyn VirtioInterrupt>,
}

/// A virtio device without its transport. The transport calls it under one lock, so `&mut self` methods
/// never run at once; data-path work belongs to threads of the device's own, one or more per device.
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
    /// Largest size of each queue, powers of two.
    fn queue_sizes(&self) -> Vec<u16>;
    /// Reads device-specific configuration; bytes beyond it read as zero.
    fn config_read(&self, offset: u64, data: &mut [u8]);
    /// Writes it; what isn't writable is ignored.
    fn config_write(&mut self, offset: u64, data: &[u8]);
    /// Starts the device's threads. On an error the transport marks the device as failed and calls `stop`, so threads
    /// that did start end there.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Stops the threads and waits for requests in flight (completed or returned unserved, never lost
    /// after being acknowledged). Returns the queues with their positions, so that a pause can go on
    /// with `activate`. A device that isn't active returns an empty list.
    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError>;
    /// Forgets driver-visible state after a reset by the driver (`stop` was called before).
    fn reset(&mut self);
    /// Device-specific saved state while stopped, versioned; `NotSaveable` names the reason.
    fn save(&self) -> Result<SavedDevice, DeviceError>;
    /// The device as it was saved, made of one that is open here and was never active. What belongs to this host (files,
    /// interfaces, sockets) stays; what the driver knows is taken over.
    ///
    /// # Errors
    /// [`DeviceError::Saved`] when the state is damaged, or this device can't be what the driver knows.
    fn restored(self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError>;
    /// Makes what was written durable, while the device runs: what [`VirtioDevice::hand_over`] then has to wait for is less.
    ///
    /// # Errors
    /// When the host refuses.
    fn settle(&self) -> Result<(), DeviceError>;
    /// Gives up what only one host may hold, so that the VM can go on elsewhere: locks of images, behind everything that
    /// was written. Called while stopped; the device can't be activated until [`VirtioDevice::take_over`].
    ///
    /// # Errors
    /// When what was written can't be made durable, or the host refuses.
    fn hand_over(&mut self) -> Result<(), DeviceError>;
    /// Takes what [`VirtioDevice::hand_over`] gave up, there or here. A device that has it keeps it.
    ///
    /// # Errors
    /// When somebody else holds it.
    fn take_over(&mut self) -> Result<(), DeviceError>;
    /// Tells the world outside the host that the guest is here now. Called after it has begun to run.
    ///
    /// # Errors
    /// When the host refuses; the guest goes on all the same.
    fn announce(&self) -> Result<(), DeviceError>;
    /// State and counters.
    fn inspect(&self) -> serde_json::Value;
}

/// Saved device state; restoring is a constructor of the concrete type.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedDevice {
    /// Version of `state`, per device type.
    pub version: u32,
    /// Serialised state.
    pub state: Vec<u8>,
}

/// A device could not do what was asked; the guest never causes these.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It can't be saved.
    #[error("Device {name} can't be saved: {reason}")]
    NotSaveable {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
    /// It can't become what was saved.
    #[error("Saved state of device {name} can't be used: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
    /// The host refused something.
    #[error("Device {name} could not {what}")]
    Host {
        /// Device name.
        name: String,
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
