//! All NICs of the host: their owners, and their removal when their clients disconnect.
//!
//! ```text
//!  attach ──▶ sockets listen ──▶ clients connect ──▶ both disconnect (crashed, or in order) ──▶ NIC removed
//!                  └── no client connects for a minute ──▶ NIC removed
//! ```

mod error;
mod keeper;
mod nic;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hca::limits::Limits;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::device::{Device, Peer};
use vmxnet3::{MacAddress, Vmxnet3Config};

pub use self::error::RegistryError;
use self::nic::{FunctionServer, Nic};
use crate::access::{Access, Denied, is_administrator, may_use};
use crate::engine::EngineHandle;
use crate::function::NicShared;
use crate::function::ethernet::{EthernetError, EthernetFunction};
use crate::function::rdma::{RdmaError, RdmaFunction};
use crate::identity::{check_name, is_unicast, mac_of, mac_text};
pub use crate::nic::{Event, NicKey};
use crate::remembered::Remembered;
use crate::segments::{Network, Segments, Uplink};

/// Limits of NICs of all VMs, and of one VM.
const MOST_NICS: usize = 1024;
const MOST_NICS_OF_A_VM: usize = 16;
/// Link speed reported to guests, Mbit/s.
const LINK_MBPS: u16 = 10_000;

/// Parameters of a NIC.
#[derive(Debug, Clone)]
pub struct NicSpec {
    /// Identity of the NIC.
    pub key: NicKey,
    /// MAC address; default: derived from the names.
    pub mac: Option<[u8; 6]>,
    /// Name of the network.
    pub segment: String,
    /// Tap that connects the network with the host's.
    pub tap: Option<String>,
    /// MTU in bytes; default: 1500.
    pub mtu: Option<u32>,
    /// Whether its VM migrates here: the NIC works once it has arrived.
    pub incoming: bool,
}

/// Properties of a NIC.
#[derive(Debug, Clone)]
pub struct NicInfo {
    /// Identity of the NIC.
    pub key: NicKey,
    /// MAC address.
    pub mac: [u8; 6],
    /// Name of the network.
    pub segment: String,
    /// Name of the tap.
    pub tap: Option<String>,
    /// MTU in bytes.
    pub mtu: u32,
    /// User that owns it.
    pub uid: u32,
    /// Path of each function's socket.
    pub functions: Vec<PathBuf>,
    /// Whether each function has a client.
    pub connected: Vec<bool>,
}

/// Default quotas of a VM. The engine keeps 8 bytes per registered page, so a VM's registrations can make the daemon grow by 128 MiB.
#[must_use]
pub fn default_limits() -> Limits {
    Limits { registered_bytes: 64 << 30, ..Limits::default() }
}

/// All NICs of the host; see the module.
#[derive(Debug)]
pub struct Registry {
    folder: PathBuf,
    access: Access,
    engine: EngineHandle,
    segments: Segments,
    remembered: Arc<Remembered>,
    events: Sender<Event>,
    /// Rate-limited log: users can make monitors connect and disconnect any number of times.
    log: GuestLog,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    nics: BTreeMap<NicKey, Nic>,
    /// Limits by VM; kept while it has NICs.
    limits: BTreeMap<String, Limits>,
    generations: u64,
}

impl Registry {
    /// An empty registry, and the channel for its keeper.
    #[must_use]
    pub fn new(
        folder: &Path,
        access: Access,
        engine: EngineHandle,
        remembered: Remembered,
    ) -> (Arc<Self>, Receiver<Event>) {
        let (events, inbox) = channel();
        let registry = Self {
            folder: folder.to_owned(),
            access,
            engine,
            segments: Segments::default(),
            remembered: Arc::new(remembered),
            events,
            log: GuestLog::new(),
            state: Mutex::default(),
        };
        (Arc::new(registry), inbox)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The authorization rules.
    #[must_use]
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Handle of the engine.
    #[must_use]
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// The networks.
    #[must_use]
    pub fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Creates a NIC. Replaces one with the same name and owner that has no clients.
    ///
    /// # Errors
    /// When the peer isn't authorized, a parameter is invalid, or the NIC has clients ([`RegistryError::InUse`]).
    pub fn attach(&self, peer: &Peer, spec: &NicSpec) -> Result<NicInfo, RegistryError> {
        self.access.check(peer)?;
        check_name("VM", &spec.key.vm)?;
        check_name("NIC", &spec.key.name)?;
        check_name("segment", &spec.segment)?;
        let mac = spec.mac.unwrap_or_else(|| mac_of(&spec.key.vm, &spec.key.name));
        if !is_unicast(mac) {
            return Err(RegistryError::Mac { mac: mac_text(mac) });
        }
        let mtu = spec.mtu.unwrap_or(1500);
        if !(576..=9000).contains(&mtu) {
            return Err(RegistryError::Mtu { mtu });
        }
        // Locked throughout, so concurrent calls run one after the other. Everything below is quick.
        let mut state = self.state();
        let uid = self.owner(&state, peer, &spec.key)?;
        if let Some(old) = state.nics.get(&spec.key) {
            if old.shared.in_use() {
                return Err(RegistryError::InUse { key: spec.key.clone() });
            }
            state.nics.remove(&spec.key);
        }
        if state.nics.len() >= MOST_NICS {
            return Err(RegistryError::TooMany { what: "This host".to_owned(), limit: MOST_NICS });
        }
        if state.nics.keys().filter(|key| key.vm == spec.key.vm).count() >= MOST_NICS_OF_A_VM {
            return Err(RegistryError::TooMany {
                what: format!("VM {}", spec.key.vm),
                limit: MOST_NICS_OF_A_VM,
            });
        }
        let taken = state.nics.iter().find(|(_, nic)| nic.mac == mac && nic.network.name() == spec.segment);
        if let Some((other, _)) = taken {
            return Err(RegistryError::MacTaken {
                mac: mac_text(mac),
                other: other.clone(),
                segment: spec.segment.clone(),
            });
        }
        let network = self.segments.join(&spec.segment)?;
        let uplink = spec.tap.as_deref().map(|tap| network.uplink(tap, peer.uid)).transpose()?;
        state.generations += 1;
        let generation = state.generations;
        let limits = state.limits.get(&spec.key.vm).copied().unwrap_or_else(default_limits);
        let kind = (spec.incoming, uplink.is_some());
        let shared = Arc::new(NicShared::new(spec.key.clone(), generation, uid, kind, self.events.clone()));
        let nic = self.build(&shared, network, uplink, mac, mtu, limits)?;
        let info = nic.info();
        state.nics.insert(spec.key.clone(), nic);
        drop(state);
        // Starts the timeout for its clients.
        shared.tell(Event::Changed);
        telemetry::guest_info!(
            self.log,
            vm = spec.key.vm,
            nic = spec.key.name,
            segment = spec.segment,
            mac = mac_text(mac),
            uid,
            "NIC attached"
        );
        Ok(info)
    }

    /// The user that owns a NIC, or would.
    fn owner(&self, state: &State, peer: &Peer, key: &NicKey) -> Result<u32, RegistryError> {
        if let Some(nic) = state.nics.get(key) {
            let owner = nic.shared.uid;
            if !may_use(peer.uid, owner) {
                let denied =
                    Denied::NotYours { vm: key.vm.clone(), name: key.name.clone(), owner, uid: peer.uid };
                return Err(denied.into());
            }
            return Ok(owner);
        }
        let other = state.nics.iter().find(|(other, _)| other.vm == key.vm).map(|(_, nic)| nic.shared.uid);
        match other {
            Some(owner) if owner != peer.uid && !is_administrator(peer.uid) => {
                Err(Denied::OtherVm { vm: key.vm.clone(), owner, uid: peer.uid }.into())
            }
            _ => Ok(peer.uid),
        }
    }

    fn build(
        &self,
        shared: &Arc<NicShared>,
        network: Arc<Network>,
        uplink: Option<Arc<Uplink>>,
        mac: [u8; 6],
        mtu: u32,
        limits: Limits,
    ) -> Result<Nic, RegistryError> {
        let key = &shared.key;
        let name = format!("{}:{}", key.vm, key.name);
        let serve = |source: Box<dyn std::error::Error + Send + Sync>| RegistryError::Serve {
            key: key.clone(),
            source,
        };
        let mut config = pvrdma::Config::new(name.clone(), network.id(), mac);
        config.mtu = mtu;
        config.limits = limits;
        config.doorbells = pvrdma::DoorbellMode::Shared;
        let rdma = RdmaFunction::new(
            Arc::clone(shared),
            self.engine.clone(),
            config,
            network.name().to_owned(),
            Arc::clone(&self.remembered),
        )
        .map_err(|error: RdmaError| serve(error.into()))?;
        let config = Vmxnet3Config { name: name.clone(), mac: MacAddress(mac), link_mbps: LINK_MBPS };
        let ethernet = EthernetFunction::new(Arc::clone(shared), config, Arc::clone(&network))
            .map_err(|error: EthernetError| serve(error.into()))?;
        let (rdma, ethernet) = (Arc::new(rdma), Arc::new(ethernet));
        let devices: [Arc<dyn Device>; crate::function::FUNCTIONS] = [ethernet.clone(), rdma.clone()];
        let mut servers = Vec::new();
        for (function, device) in devices.into_iter().enumerate() {
            let path = self.folder.join(format!("{name}.{function}"));
            servers.push(FunctionServer::start(path, device, key, function)?);
        }
        Ok(Nic {
            servers,
            shared: Arc::clone(shared),
            rdma,
            ethernet,
            uplink,
            network,
            mac,
            mtu,
            since: Instant::now(),
            was_used: false,
        })
    }

    /// Removes a NIC, whether or not it is in use.
    ///
    /// # Errors
    /// When it doesn't exist, or is another user's.
    pub fn detach(&self, peer: &Peer, key: &NicKey) -> Result<(), RegistryError> {
        self.access.check(peer)?;
        let mut state = self.state();
        if !state.nics.contains_key(key) {
            return Err(RegistryError::NoSuchNic { key: key.clone() });
        }
        self.owner(&state, peer, key)?;
        let mut nic = state.nics.remove(key);
        nic.iter_mut().for_each(Nic::hide);
        forget_limits(&mut state, &key.vm);
        drop(state);
        // Its threads may take a moment to end.
        drop(nic);
        telemetry::guest_info!(self.log, vm = key.vm, nic = key.name, "NIC detached");
        Ok(())
    }

    /// The NICs that a peer may use.
    ///
    /// # Errors
    /// When it may not use the daemon.
    pub fn list(&self, peer: &Peer) -> Result<Vec<NicInfo>, RegistryError> {
        self.access.check(peer)?;
        Ok(self
            .state()
            .nics
            .values()
            .filter(|nic| may_use(peer.uid, nic.shared.uid))
            .map(Nic::info)
            .collect())
    }

    /// Changes limits of a VM. Returns the number of devices changed.
    ///
    /// # Errors
    /// When the peer isn't an administrator, or the VM has no NIC.
    pub fn set_limits(
        &self,
        peer: &Peer,
        vm: &str,
        change: impl FnOnce(Limits) -> Limits,
    ) -> Result<usize, RegistryError> {
        if !is_administrator(peer.uid) {
            return Err(Denied::Administrators { uid: peer.uid, what: "change limits" }.into());
        }
        let mut state = self.state();
        let devices: Vec<Arc<RdmaFunction>> =
            state.nics.iter().filter(|(key, _)| key.vm == vm).map(|(_, nic)| Arc::clone(&nic.rdma)).collect();
        if devices.is_empty() {
            return Err(RegistryError::NoSuchVm { vm: vm.chars().take(64).collect() });
        }
        let limits = change(state.limits.get(vm).copied().unwrap_or_else(default_limits));
        state.limits.insert(vm.to_owned(), limits);
        drop(state);
        for device in &devices {
            device.set_limits(limits);
        }
        telemetry::guest_info!(self.log, vm, ?limits, "limits changed");
        Ok(devices.len())
    }

    /// The functions of the NICs that `uid` may inspect.
    pub(crate) fn functions(&self, uid: u32) -> Vec<(NicInfo, Arc<RdmaFunction>, Arc<EthernetFunction>)> {
        let state = self.state();
        let seen = state.nics.values().filter(|nic| may_use(uid, nic.shared.uid));
        seen.map(|nic| (nic.info(), Arc::clone(&nic.rdma), Arc::clone(&nic.ethernet))).collect()
    }

    /// The RDMA functions of a VM's NICs, each with the state that it shares with the Ethernet function.
    pub(crate) fn rdma_functions(&self, vm: &str) -> Vec<(Arc<NicShared>, Arc<RdmaFunction>)> {
        let state = self.state();
        let of = state.nics.iter().filter(|(key, _)| key.vm == vm);
        of.map(|(_, nic)| (Arc::clone(&nic.shared), Arc::clone(&nic.rdma))).collect()
    }

    /// Checks that a VM has NICs here, and that a peer may use them.
    ///
    /// # Errors
    /// When there are none, or they are another user's.
    pub(crate) fn check_vm(&self, peer: &Peer, vm: &str) -> Result<(), RegistryError> {
        self.access.check(peer)?;
        let state = self.state();
        let key = state.nics.keys().find(|key| key.vm == vm).cloned();
        let key = key.ok_or_else(|| RegistryError::NoSuchVm { vm: vm.chars().take(64).collect() })?;
        self.owner(&state, peer, &key).map(drop)
    }

    /// Ends the keeper.
    pub(crate) fn stop_keeper(&self) {
        let _ = self.events.send(Event::Stop);
    }

    /// Removes all NICs.
    pub(crate) fn clear(&self) {
        let nics = std::mem::take(&mut self.state().nics);
        drop(nics);
    }
}

/// Drops the limits of a VM without NICs.
fn forget_limits(state: &mut State, vm: &str) {
    if !state.nics.keys().any(|key| key.vm == vm) {
        state.limits.remove(vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineSetup, EngineThread};

    /// A user can create and remove a NIC any number of times without filling the log.
    #[test]
    fn what_users_make_the_registry_log_has_a_limit() {
        const NICS: u64 = 100;
        let folder = tempfile::tempdir().unwrap();
        let engine = EngineThread::start(EngineSetup::default(), None).unwrap();
        let remembered = Remembered::load(folder.path());
        let (registry, _events) =
            Registry::new(folder.path(), Access::default(), engine.handle(), remembered);
        let uid = rustix::process::geteuid().as_raw();
        let peer = Peer { uid, gid: rustix::process::getegid().as_raw(), pid: 1 };
        let key = NicKey { vm: "a".to_owned(), name: "rdma0".to_owned() };
        let spec = NicSpec {
            key: key.clone(),
            mac: None,
            segment: "s0".to_owned(),
            tap: None,
            mtu: None,
            incoming: false,
        };
        let begin = Instant::now();
        let lines = log_capture::lines_of(|| {
            for _ in 0..NICS {
                registry.attach(&peer, &spec).unwrap();
                registry.detach(&peer, &key).unwrap();
            }
        });
        let told = lines.iter().filter(|line| line.contains("NIC attached") || line.contains("NIC detached"));
        let told = told.count() as u64;
        // A burst, and then one a second.
        let most = 11 + begin.elapsed().as_secs();
        assert!((10..=most).contains(&told), "{told} lines for {NICS} NICs");
    }
}
