//! The network device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net as b;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::backend::{NetBackend, NetChannel};
use super::control::{ControlQueue, GUEST_OFFLOADS, Shared};
use super::error::NetError;
use super::header::has;
use super::mac::MacAddress;
use super::passt::Passt;
use super::queue_pair::QueuePair;
use super::tap::{self, Tap};
use super::worker::PairWorker;
use super::{Backend, NetConfig};
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice, VirtioInterrupt};
use crate::queue::Ring;
use crate::saved;
use crate::worker::{self, Worker};

/// Entries of each receive and transmit queue.
pub const QUEUE_SIZE: u16 = 512;
const CONTROL_QUEUE_SIZE: u16 = 64;
/// Version of the saved state.
const SAVED_VERSION: u32 = 1;
/// Lower bound of the MTU (IPv4's).
const MTU_MIN: u16 = 68;
const CONFIG_LEN: usize = 12;

/// A virtio network device.
pub struct Net {
    name: String,
    shared: Arc<Shared>,
    /// Address at the start and after a reset.
    mac: MacAddress,
    mtu: Option<u16>,
    pairs: u16,
    /// The channel of each pair, unless the pair's thread owns it.
    channels: Vec<Option<Box<dyn NetChannel>>>,
    workers: Vec<Worker<PairWorker>>,
    /// Queues of an active device that no thread serves.
    idle: Vec<ActiveQueue>,
    /// Features and interrupts of an active device.
    active: Option<(u64, Arc<dyn VirtioInterrupt>)>,
}

/// Saved state without the rings, which the transport saves.
#[derive(serde::Serialize, serde::Deserialize)]
struct SavedNet {
    mac: MacAddress,
    /// Address after a reset.
    reset_mac: MacAddress,
    mtu: Option<u16>,
    pairs: u16,
    active_pairs: u16,
    receive_modes: u8,
    offloads: Option<u64>,
    link_up: bool,
    /// Offload features that the backend offered, which the guest may have negotiated.
    offered: u64,
}

impl Net {
    /// Opens the device and its backend. Call it from a thread that lives as long as the VM: passt ends with the thread that started it.
    pub fn open(config: NetConfig) -> Result<Self, NetError> {
        let NetConfig { name, backend, mac, queue_pairs, mtu } = config;
        let range = |what, value: u16, allowed: String| NetError::Range {
            name: name.clone(),
            what,
            value: u64::from(value),
            allowed,
        };
        if let Some(mtu) = mtu.filter(|mtu| *mtu < MTU_MIN) {
            return Err(range("the MTU", mtu, format!("{MTU_MIN} to 65535 are possible")));
        }
        let pairs_max = match &backend {
            Backend::Tap { .. } => tap::QUEUES_MAX,
            Backend::TapFd(fds) => u16::try_from(fds.len()).unwrap_or(u16::MAX).min(tap::QUEUES_MAX),
            Backend::User => 1,
        };
        let fixed = matches!(&backend, Backend::TapFd(_));
        if queue_pairs == 0 || queue_pairs > pairs_max || (fixed && queue_pairs != pairs_max) {
            let allowed = match &backend {
                Backend::Tap { .. } => format!("1 to {pairs_max} are possible"),
                Backend::TapFd(_) => {
                    format!("{pairs_max} file descriptors were given, one is needed per pair")
                }
                Backend::User => "passt has one".to_owned(),
            };
            return Err(range("the number of queue pairs", queue_pairs, allowed));
        }
        if let Some(mac) = mac.filter(|mac| !mac.is_unicast()) {
            return Err(NetError::Mac { name, mac });
        }
        let host =
            |source| NetError::Host { name: name.clone(), what: "share its back end".to_owned(), source };
        let (backend, channels, identity, mtu): (Box<dyn NetBackend>, _, _, _) = match backend {
            Backend::Tap { ifname } => {
                let tap = Tap::open(&ifname, queue_pairs)?;
                let mtu = tap_mtu(&tap, mtu)?;
                let channels = tap.channels().map_err(host)?;
                (Box::new(tap), channels, ifname, mtu)
            }
            Backend::TapFd(fds) => {
                let tap = Tap::from_fds(fds)?;
                let (channels, ifname) = (tap.channels().map_err(host)?, tap.ifname().to_owned());
                (Box::new(tap), channels, ifname, mtu)
            }
            Backend::User => {
                let passt = Passt::start(&name, mtu)?;
                let channels = vec![passt.channel().map_err(host)?];
                (Box::new(passt), channels, "user".to_owned(), mtu)
            }
        };
        let mac = mac.unwrap_or_else(|| MacAddress::stable(&identity, &name));
        Ok(Self::with_backend(name, backend, channels, mac, mtu))
    }

    /// A device over a given backend, with one queue pair per channel.
    pub fn with_backend(
        name: String,
        backend: Box<dyn NetBackend>,
        channels: Vec<Box<dyn NetChannel>>,
        mac: MacAddress,
        mtu: Option<u16>,
    ) -> Self {
        let pairs = u16::try_from(channels.len()).unwrap_or(u16::MAX);
        Self {
            name,
            shared: Arc::new(Shared::new(backend, mac)),
            mac,
            mtu,
            pairs,
            channels: channels.into_iter().map(Some).collect(),
            workers: Vec::new(),
            idle: Vec::new(),
            active: None,
        }
    }

    /// Opens the device with a saved state. `config` selects this host's backend; address and MTU are the saved ones. The driver should
    /// announce the guest.
    pub fn restore(config: NetConfig, from: &SavedDevice) -> Result<Self, NetError> {
        let name = config.name.clone();
        let bad = |reason| NetError::Saved { name: name.clone(), reason };
        // With the saved MTU, so that a tap of this host with a smaller one is refused.
        let mtu = Self::decode(from).map_err(bad)?.mtu;
        Self::open(NetConfig { mtu, ..config })?.with_saved(from).map_err(bad)
    }

    fn decode(from: &SavedDevice) -> Result<SavedNet, String> {
        if from.version != SAVED_VERSION {
            return Err(format!("its version is {}, known is {SAVED_VERSION}", from.version));
        }
        saved::decode(&from.state)
    }

    /// Applies a saved state.
    pub fn with_saved(mut self, from: &SavedDevice) -> Result<Self, String> {
        let state = Self::decode(from)?;
        if state.pairs != self.pairs || !(1..=self.pairs).contains(&state.active_pairs) {
            let (was, active, is) = (state.pairs, state.active_pairs, self.pairs);
            return Err(format!("{active} of {was} queue pairs were active; {is} are configured here"));
        }
        let missing = state.offered & !self.shared.backend.offload_features();
        if missing != 0 {
            return Err(format!(
                "this host lacks the offloads {missing:#x}; use a newer kernel or switch them off"
            ));
        }
        if state.offloads.is_some_and(|bits| bits & !GUEST_OFFLOADS != 0) || !state.mac.is_unicast() {
            return Err("offloads or address can't be a guest's".to_owned());
        }
        let link_up = {
            let mut own = self.shared.state();
            own.mac = state.mac;
            own.receive_modes = state.receive_modes;
            own.offloads = state.offloads;
            own.link_up = state.link_up;
            own.announce = state.link_up;
            own.link_up
        };
        self.carrier(link_up);
        self.mac = state.reset_mac;
        self.mtu = state.mtu;
        self.shared
            .set_active_pairs(state.active_pairs)
            .map_err(|error| format!("{} queue pairs can't be activated: {error}", state.active_pairs))?;
        Ok(self)
    }

    /// The guest's address.
    pub fn mac(&self) -> MacAddress {
        self.shared.state().mac
    }

    /// Connects or disconnects the guest's link, like a cable.
    pub fn set_link(&mut self, up: bool) {
        let changed = std::mem::replace(&mut self.shared.state().link_up, up) != up;
        if changed {
            self.carrier(up);
            if let Some((_, interrupt)) = &self.active {
                interrupt.config();
            }
        }
    }

    fn carrier(&self, up: bool) {
        if let Err(error) = self.shared.backend.set_carrier(up) {
            // Linux has it since 5.0; otherwise only the guest learns of the link state.
            tracing::debug!("The carrier of {} can't be set: {error}", self.name);
        }
    }

    /// Sets the backend's offloads and number of queue pairs.
    fn configure_backend(&self, features: u64) -> Result<(), DeviceError> {
        let offloads = {
            let mut state = self.shared.state();
            *state.offloads.get_or_insert(features & GUEST_OFFLOADS) & features
        };
        self.shared
            .backend
            .set_guest_offloads(offloads)
            .map_err(|error| self.host(&format!("set the offloads {offloads:#x}"), error))?;
        let pairs = if has(features, b::VIRTIO_NET_F_MQ) { self.shared.active_pairs() } else { 1 };
        self.shared
            .set_active_pairs(pairs)
            .map_err(|error| self.host(&format!("activate {pairs} queue pairs"), error))
    }

    fn start_worker(
        &mut self,
        pair: PairWorker,
        interrupt: &Arc<dyn VirtioInterrupt>,
    ) -> Result<(), DeviceError> {
        let name = format!("{}/{}", self.name, pair.index);
        let worker = Worker::spawn(&name, Arc::clone(interrupt), pair, |pair, poller| pair.run(poller))
            .map_err(|error| self.host(&format!("start the thread {name}"), error))?;
        self.workers.push(worker);
        Ok(())
    }

    fn host(&self, what: &str, source: std::io::Error) -> DeviceError {
        DeviceError::Host { name: self.name.clone(), what: what.to_owned(), source }
    }

    fn config(&self) -> [u8; CONFIG_LEN] {
        let state = self.shared.state();
        let mut status = 0u32;
        if state.link_up {
            status |= b::VIRTIO_NET_S_LINK_UP;
        }
        if state.announce {
            status |= b::VIRTIO_NET_S_ANNOUNCE;
        }
        let status = u16::try_from(status).unwrap_or(0);
        let mut config = [0; CONFIG_LEN];
        config[..6].copy_from_slice(&state.mac.0);
        config[6..8].copy_from_slice(&status.to_le_bytes());
        config[8..10].copy_from_slice(&self.pairs.to_le_bytes());
        config[10..12].copy_from_slice(&self.mtu.unwrap_or(0).to_le_bytes());
        config
    }
}

fn tap_mtu(tap: &Tap, wanted: Option<u16>) -> Result<Option<u16>, NetError> {
    let Ok(have) = tap.mtu() else { return Ok(wanted) };
    match wanted {
        Some(want) if want > have => Err(NetError::TapMtu { ifname: tap.ifname().to_owned(), have, want }),
        Some(want) => Ok(Some(want)),
        None => Ok(Some(have)),
    }
}

impl VirtioDevice for Net {
    fn name(&self) -> &str {
        &self.name
    }

    fn device_id(&self) -> u16 {
        u16::try_from(VIRTIO_ID_NET).unwrap_or(1)
    }

    fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << b::VIRTIO_NET_F_MAC
            | 1 << b::VIRTIO_NET_F_STATUS
            | 1 << b::VIRTIO_NET_F_MRG_RXBUF
            | 1 << b::VIRTIO_NET_F_CTRL_VQ
            | 1 << b::VIRTIO_NET_F_CTRL_RX
            | 1 << b::VIRTIO_NET_F_CTRL_RX_EXTRA
            | 1 << b::VIRTIO_NET_F_CTRL_MAC_ADDR
            | 1 << b::VIRTIO_NET_F_GUEST_ANNOUNCE
            | self.shared.backend.offload_features();
        if features & GUEST_OFFLOADS != 0 {
            features |= 1 << b::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
        }
        if self.pairs > 1 {
            features |= 1 << b::VIRTIO_NET_F_MQ;
        }
        if self.mtu.is_some() {
            features |= 1 << b::VIRTIO_NET_F_MTU;
        }
        features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![QUEUE_SIZE; 2 * usize::from(self.pairs)];
        sizes.push(CONTROL_QUEUE_SIZE);
        sizes
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let config = self.config();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(config.len());
        data.fill(0);
        for (to, byte) in data.iter_mut().zip(&config[from..]) {
            *to = *byte;
        }
    }

    fn config_write(&mut self, _offset: u64, _data: &[u8]) {
        // The address is writable in legacy devices only; here the control queue sets it.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let Activation { memory, features, queues, interrupt } = activation;
        self.configure_backend(features)?;
        // Without MQ the control queue follows the first pair (5.1.2).
        let served = if has(features, b::VIRTIO_NET_F_MQ) { self.pairs } else { 1 };
        let control_index = has(features, b::VIRTIO_NET_F_CTRL_VQ).then_some(2 * served);
        let mut by_index: std::collections::BTreeMap<u16, ActiveQueue> =
            queues.into_iter().map(|queue| (queue.index, queue)).collect();
        let mut control = control_index.and_then(|index| by_index.remove(&index));

        let wakes = (0..served)
            .map(|_| worker::new_event().map(Arc::new))
            .collect::<std::io::Result<Vec<Arc<OwnedFd>>>>()
            .map_err(|error| self.host("make an eventfd", error))?;
        self.active = Some((features, Arc::clone(&interrupt)));
        let mut workers = Vec::new();
        for (index, wake) in (0..served).zip(&wakes) {
            let (receive, transmit) = (2 * index, 2 * index + 1);
            if !by_index.contains_key(&receive) || !by_index.contains_key(&transmit) {
                // The driver doesn't use this pair.
                continue;
            }
            let slot = &mut self.channels[usize::from(index)];
            let (Some(receive), Some(transmit), Some(channel)) =
                (by_index.remove(&receive), by_index.remove(&transmit), slot.take())
            else {
                let lost = std::io::Error::other("the thread of an earlier activation died with it");
                return Err(self.host(&format!("find the channel of queue pair {index}"), lost));
            };
            let (counters, log) = (Arc::clone(&self.shared.counters), Arc::clone(&self.shared.log));
            let mut pair =
                QueuePair::new(receive, transmit, channel, features, memory.clone(), counters, log);
            if let Err(error) = pair.check() {
                let (receive, transmit, channel) = pair.into_parts();
                self.channels[usize::from(index)] = Some(channel);
                self.idle.extend([receive, transmit]);
                interrupt.failed(&error.to_string());
                continue;
            }
            let control = if index == 0 { control.take() } else { None };
            let control = control.map(|queue| {
                let ring = Ring::new(queue, features);
                ControlQueue::new(
                    ring,
                    features,
                    self.pairs,
                    memory.clone(),
                    Arc::clone(&self.shared),
                    wakes.clone(),
                )
            });
            workers.push(PairWorker {
                index,
                pair,
                control,
                shared: Arc::clone(&self.shared),
                interrupt: Arc::clone(&interrupt),
                wake: Arc::clone(wake),
            });
        }
        self.idle.extend(by_index.into_values());
        self.idle.extend(control);
        for pair in workers {
            self.start_worker(pair, &interrupt)?;
        }
        if self.shared.state().announce && has(features, b::VIRTIO_NET_F_GUEST_ANNOUNCE) {
            interrupt.config();
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError> {
        self.active = None;
        let mut queues = std::mem::take(&mut self.idle);
        let mut died = false;
        for worker in std::mem::take(&mut self.workers) {
            let Some(PairWorker { index, pair, control, .. }) = worker.stop() else {
                died = true;
                continue;
            };
            let (receive, transmit, channel) = pair.into_parts();
            queues.extend([receive, transmit]);
            queues.extend(control.map(|control| control.into_ring().into_active()));
            if let Some(slot) = self.channels.get_mut(usize::from(index)) {
                *slot = Some(channel);
            }
        }
        if died {
            let lost = std::io::Error::other("a thread died with its queues");
            return Err(self.host("stop", lost));
        }
        queues.sort_by_key(|queue| queue.index);
        Ok(queues)
    }

    fn reset(&mut self) {
        {
            let mut state = self.shared.state();
            state.mac = self.mac;
            state.receive_modes = 0;
            state.offloads = None;
            state.announce = false;
        }
        if let Err(error) = self.shared.set_active_pairs(1) {
            tracing::warn!("{} keeps more than one queue pair after a reset: {error}", self.name);
        }
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        let state = self.shared.state();
        let saved = SavedNet {
            mac: state.mac,
            reset_mac: self.mac,
            mtu: self.mtu,
            pairs: self.pairs,
            active_pairs: self.shared.active_pairs(),
            receive_modes: state.receive_modes,
            offloads: state.offloads,
            link_up: state.link_up,
            offered: self.shared.backend.offload_features(),
        };
        let state = saved::encode(&saved).map_err(|error| self.host("serialise its state", error))?;
        Ok(SavedDevice { version: SAVED_VERSION, state })
    }

    fn restored(self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError> {
        let name = self.name.clone();
        let device = self.with_saved(saved).map_err(|reason| DeviceError::Saved { name, reason })?;
        Ok(Box::new(device))
    }

    fn settle(&self) -> Result<(), DeviceError> {
        // It holds no unwritten data.
        Ok(())
    }

    fn hand_over(&mut self) -> Result<(), DeviceError> {
        // Its interface is this host's; the other host has its own.
        Ok(())
    }

    fn take_over(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn announce(&self) -> Result<(), DeviceError> {
        let (mac, up) = {
            let state = self.shared.state();
            (state.mac, state.link_up)
        };
        if !up {
            return Ok(());
        }
        let result = self.shared.backend.announce(mac);
        result.map_err(|error| self.host(&format!("announce {mac} to the network"), error))
    }

    fn inspect(&self) -> serde_json::Value {
        let state = self.shared.state().clone();
        let counters: serde_json::Map<String, serde_json::Value> = self
            .shared
            .counters
            .values()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        serde_json::json!({
            "kind": "net",
            "backend": self.shared.backend.description(),
            "mac": state.mac,
            "mtu": self.mtu,
            "link_up": state.link_up,
            "queue_pairs": self.pairs,
            "active_queue_pairs": self.shared.active_pairs(),
            "receive_modes": state.receive_modes,
            "guest_offloads": format!("{:#x}", state.offloads.unwrap_or(0)),
            "features": self.active.as_ref().map(|(features, _)| format!("{features:#x}")),
            "counters": counters,
        })
    }
}
