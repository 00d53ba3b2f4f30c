//! The vsock device.

use std::path::PathBuf;
use std::sync::Arc;

use telemetry::guest_log::GuestLog;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::counters::Counters;
use super::muxer::Muxer;
use super::socket::{Listener, SocketError};
use super::worker::{VsockQueues, payload_buffer};
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice};
use crate::queue::Ring;
use crate::saved;
use crate::worker::Worker;

/// Entries of each queue.
pub const QUEUE_SIZE: u16 = 256;
/// Lower bound of a guest's context id.
pub const CID_MIN: u32 = 3;
/// Upper bound of a guest's context id: the next number means "any".
pub const CID_MAX: u32 = u32::MAX - 1;
const QUEUES: usize = 3;
const SAVED_VERSION: u32 = 1;

/// Configuration of a vsock device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VsockConfig {
    /// Name of the device, unique in the VM.
    pub name: String,
    /// The guest's context id, from 3 on. Needs to be unique on the host by convention only, since the host's side is a socket file of this
    /// VM.
    pub cid: u32,
    /// Unix socket for connections from the host's programs, path of at most 96 bytes. A guest's connection to port P goes to `<socket>_P`.
    pub socket: PathBuf,
}

/// Why the device can't be opened or restored. Never caused by the guest.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// A reserved or invalid context id.
    #[error("Vsock device {name}: the context id is {cid}; {CID_MIN} to {CID_MAX} are possible")]
    Cid {
        /// Device name.
        name: String,
        /// Configured context id.
        cid: u32,
    },
    /// The socket can't be opened.
    #[error("Vsock device {name} can't be opened")]
    Socket {
        /// Device name.
        name: String,
        /// The error.
        #[source]
        source: SocketError,
    },
    /// The saved state doesn't fit.
    #[error("Vsock device {name}: the saved state can't be used: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
}

/// A virtio socket device.
pub struct Vsock {
    name: String,
    cid: u32,
    socket: PathBuf,
    counters: Arc<Counters>,
    log: Arc<GuestLog>,
    /// The connections, unless a thread owns them.
    muxer: Option<Muxer>,
    worker: Option<Worker<VsockQueues>>,
    idle: Vec<ActiveQueue>,
    /// Whether the next activation reports to the guest that its connections are gone.
    announce_reset: bool,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct SavedVsock {
    cid: u32,
}

impl Vsock {
    /// Opens the device and its socket, whose file is removed with the device.
    pub fn open(config: VsockConfig) -> Result<Self, VsockError> {
        let VsockConfig { name, cid, socket } = config;
        if !(CID_MIN..=CID_MAX).contains(&cid) {
            return Err(VsockError::Cid { name, cid });
        }
        let listener =
            Listener::open(&socket).map_err(|source| VsockError::Socket { name: name.clone(), source })?;
        let (counters, log) = (Arc::<Counters>::default(), Arc::<GuestLog>::default());
        let muxer = Muxer::new(u64::from(cid), listener, Arc::clone(&counters), Arc::clone(&log));
        Ok(Self {
            name,
            cid,
            socket,
            counters,
            log,
            muxer: Some(muxer),
            worker: None,
            idle: Vec::new(),
            announce_reset: false,
        })
    }

    /// Opens the device with a saved state: with the guest's context id, whatever `config` has, and without the connections. The guest gets
    /// a transport reset event.
    pub fn restore(config: VsockConfig, from: &SavedDevice) -> Result<Self, VsockError> {
        let bad = |reason| VsockError::Saved { name: config.name.clone(), reason };
        let state = Self::decode(from).map_err(bad)?;
        let mut vsock = Self::open(VsockConfig { cid: state.cid, ..config })?;
        vsock.announce_reset = true;
        Ok(vsock)
    }

    fn decode(from: &SavedDevice) -> Result<SavedVsock, String> {
        if from.version != SAVED_VERSION {
            return Err(format!("its version is {}, known is {SAVED_VERSION}", from.version));
        }
        saved::decode(&from.state)
    }

    fn host(&self, what: &str, source: std::io::Error) -> DeviceError {
        DeviceError::Host { name: self.name.clone(), what: what.to_owned(), source }
    }
}

impl VirtioDevice for Vsock {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_id(&self) -> u16 {
        u16::try_from(VIRTIO_ID_VSOCK).unwrap_or(19)
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; QUEUES]
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let config = u64::from(self.cid).to_le_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(config.len());
        data.fill(0);
        for (to, byte) in data.iter_mut().zip(&config[from..]) {
            *to = *byte;
        }
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {
        // The configuration is read-only.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let Activation { memory, features, mut queues, interrupt } = activation;
        queues.sort_by_key(|queue| queue.index);
        let complete = queues.iter().map(|queue| queue.index).eq([0, 1, 2]);
        let three = <[ActiveQueue; QUEUES]>::try_from(queues);
        let [receive, transmit, event] = match three {
            Ok(three) if complete => three,
            other => {
                interrupt.failed("the driver didn't enable the three queues of a vsock device");
                self.idle = other.map_or_else(|queues| queues, Vec::from);
                return Ok(());
            }
        };
        let Some(muxer) = self.muxer.take() else {
            let lost = std::io::Error::other("the thread of an earlier activation died with them");
            return Err(self.host("find its connections", lost));
        };
        let queues = VsockQueues {
            receive: Ring::new(receive, features),
            transmit: Ring::new(transmit, features),
            event: Ring::new(event, features),
            muxer,
            memory,
            interrupt: Arc::clone(&interrupt),
            counters: Arc::clone(&self.counters),
            log: Arc::clone(&self.log),
            announce_reset: self.announce_reset,
            buffer: payload_buffer(),
        };
        if let Err(error) = queues.check() {
            interrupt.failed(&error.to_string());
            self.take_back(queues);
            return Ok(());
        }
        let worker = Worker::spawn(&self.name, interrupt, queues, |queues, poller| queues.run(poller))
            .map_err(|error| self.host("start its thread", error))?;
        self.worker = Some(worker);
        Ok(())
    }

    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError> {
        if let Some(worker) = self.worker.take() {
            let Some(queues) = worker.stop() else {
                let lost = std::io::Error::other("its thread died with the queues");
                return Err(self.host("stop", lost));
            };
            self.take_back(queues);
        }
        Ok(std::mem::take(&mut self.idle))
    }

    fn reset(&mut self) {
        if let Some(muxer) = &mut self.muxer {
            muxer.clear();
        }
        self.announce_reset = false;
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        let state = saved::encode(&SavedVsock { cid: self.cid })
            .map_err(|error| self.host("serialise its state", error))?;
        Ok(SavedDevice { version: SAVED_VERSION, state })
    }

    fn restored(mut self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError> {
        let bad = |reason| DeviceError::Saved { name: self.name.clone(), reason };
        let state = Self::decode(saved).map_err(bad)?;
        if state.cid != self.cid {
            return Err(bad(format!("the guest's context id is {}, here it is {}", state.cid, self.cid)));
        }
        self.announce_reset = true;
        Ok(self)
    }

    fn settle(&self) -> Result<(), DeviceError> {
        // It holds no unwritten data.
        Ok(())
    }

    fn hand_over(&mut self) -> Result<(), DeviceError> {
        // Its socket is this host's. Connections end with a migration, and the guest gets a transport reset event.
        Ok(())
    }

    fn take_over(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn announce(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn inspect(&self) -> serde_json::Value {
        let counters: serde_json::Map<String, serde_json::Value> =
            self.counters.values().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        serde_json::json!({
            "kind": "vsock",
            "cid": self.cid,
            "socket": self.socket.display().to_string(),
            "connections": self.counters.connections(),
            "counters": counters,
        })
    }
}

impl Vsock {
    /// Takes queues and connections back from a thread.
    fn take_back(&mut self, queues: VsockQueues) {
        let VsockQueues { receive, transmit, event, muxer, announce_reset, .. } = queues;
        self.muxer = Some(muxer);
        self.announce_reset = announce_reset;
        self.idle.extend([receive, transmit, event].map(Ring::into_active));
    }
}
