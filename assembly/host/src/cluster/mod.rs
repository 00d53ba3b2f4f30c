//! The directory of a host whose cluster has a service (`causeway host --cluster`).
//!
//! ```text
//!  engine thread          owner, host … ──▶ View (lock-free, replaced as a whole)
//!                         tell ───────────▶ what is here (a lock held for a moment)
//!                                              │ wakes                ▲ replaces, then has the engine look again
//!  "cluster" thread       registers host and VMs, keeps the lease, follows the watch ◀──▶ causeway cluster serve
//! ```
//!
//! The engine's thread never waits for the network. While the service is away everything goes on with the view as it is; what happens here
//! meanwhile is said when it is back. A view is kept in the daemon's folder, so that a daemon that is started during an outage knows where
//! others are.

mod client;
mod view;
mod waiting;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use control_api::cluster::{ClusterError, Service, proto};
use hca::names::{DeviceId, Gid};
use tokio::sync::{Notify, mpsc};

use crate::migration::manager::{MoverHandle, Said};
use crate::transport::{Directory, DirectoryReport, News, TransportKind, VmId};

pub use client::ClusterThread;
pub use view::View;
pub(crate) use waiting::Waits;

/// Name of the view's file in the daemon's folder.
pub const FILE: &str = "cluster.json";

/// Where the cluster's service is, and who this host is.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// The service.
    pub service: Service,
    /// This host's name.
    pub name: String,
}

/// A daemon can't take part in its cluster.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The service refuses.
    #[error("The cluster service at {service} refuses this host")]
    Refused {
        /// Where.
        service: String,
        /// Its sentence.
        #[source]
        source: ClusterError,
    },
    /// Nobody answers, and nothing is known from before.
    #[error("This host can't be started without its cluster service: {} has no copy of the directory from before ({copy})", path.display())]
    Nothing {
        /// Where a copy would be.
        path: PathBuf,
        /// Why it can't be used.
        copy: String,
        /// Why the service can't.
        #[source]
        source: ClusterError,
    },
    /// Settings that this version can't have.
    #[error("The cluster has an mtu of {mtu} and {sockets} sockets per host, which this version can't use")]
    Settings {
        /// Bytes of payload per packet.
        mtu: u32,
        /// UDP sockets.
        sockets: u32,
    },
}

/// A NIC of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LocalNic {
    vm: String,
    segment: String,
    addresses: BTreeSet<Gid>,
}

/// What is here, to be told to the service.
#[derive(Debug, Default)]
struct Here {
    nics: BTreeMap<DeviceId, LocalNic>,
    links: BTreeSet<(VmId, VmId)>,
    /// How long what faces VMs was held here, the oldest first.
    holds: VecDeque<Hold>,
}

/// Held pauses that wait for the service at most; the oldest are dropped.
const MOST_HOLDS: usize = 1024;

/// How long queue pairs that face a VM were held on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub migration: u64,
    pub vm: u32,
    pub microseconds: u64,
}

/// See the module.
#[derive(Debug)]
pub struct ClusterDirectory {
    config: ClusterConfig,
    address: SocketAddr,
    /// Where the view is kept.
    path: PathBuf,
    view: ArcSwap<View>,
    mtu: roce::Mtu,
    sockets: u16,
    here: Mutex<Here>,
    /// Where monitors wait for VMs, by the VMs' names.
    waiting: Mutex<BTreeMap<String, SocketAddr>>,
    changed: Notify,
    /// Which start of this host the service takes it for; 0: it hasn't heard of it.
    incarnation: AtomicU64,
    status: Mutex<Status>,
    refused_old_epochs: AtomicU64,
    /// Held while a view is made from the last one: two threads do.
    changing: Mutex<()>,
    /// Messages of the migration protocol to the service, while it listens.
    outbox: Mutex<Option<mpsc::Sender<proto::Envelope>>>,
    /// Who takes part in migrations, once there is somebody.
    mover: OnceLock<MoverHandle>,
}

#[derive(Debug)]
struct Status {
    /// Since when the service isn't followed; `None`: it is.
    away_since: Option<Instant>,
    failures: u64,
}

impl ClusterDirectory {
    /// Registers this host and gets the state; without the service, what an earlier daemon left in `folder`. Blocks for some seconds at most.
    ///
    /// # Errors
    /// When the service refuses, or neither it nor a copy is there.
    pub fn open(config: ClusterConfig, address: SocketAddr, folder: &Path) -> Result<Arc<Self>, JoinError> {
        let path = folder.join(FILE);
        let (view, incarnation) = match client::join(&config, address) {
            Ok(joined) => joined,
            Err(source) if source.is_refusal() => {
                return Err(JoinError::Refused { service: config.service.name().to_owned(), source });
            }
            Err(source) => {
                let view = View::load(&path).map_err(|error| error.to_string());
                let named = view.and_then(|view| {
                    let own = view.contents.hosts.get(&view.contents.own);
                    match own.filter(|own| own.name == config.name && own.address == address) {
                        Some(_) => Ok(view),
                        None => Err(format!("it isn't of host {} at {address}", config.name)),
                    }
                });
                match named {
                    Ok(view) => {
                        tracing::warn!(
                            error = &source as &dyn std::error::Error,
                            "The cluster service is away; this host goes on with the directory of {}",
                            path.display()
                        );
                        (view, 0)
                    }
                    Err(copy) => return Err(JoinError::Nothing { path, copy, source }),
                }
            }
        };
        let contents = &view.contents;
        let mtu = roce::Mtu::from_bytes(contents.mtu).filter(|_| (1..=16).contains(&contents.sockets));
        let (bytes, sockets) = (contents.mtu, contents.sockets);
        let mtu = mtu.ok_or(JoinError::Settings { mtu: bytes, sockets: sockets.into() })?;
        Ok(Arc::new(Self {
            config,
            address,
            path,
            mtu,
            sockets,
            view: ArcSwap::from_pointee(view),
            here: Mutex::default(),
            waiting: Mutex::default(),
            changed: Notify::new(),
            incarnation: AtomicU64::new(incarnation),
            status: Mutex::new(Status { away_since: Some(Instant::now()), failures: 0 }),
            refused_old_epochs: AtomicU64::new(0),
            changing: Mutex::default(),
            outbox: Mutex::default(),
            mover: OnceLock::new(),
        }))
    }

    /// Who takes part in migrations from now on.
    pub(crate) fn set_mover(&self, mover: MoverHandle) {
        // Once per daemon.
        let _ = self.mover.set(mover);
    }

    pub(crate) fn mover(&self) -> Option<&MoverHandle> {
        self.mover.get()
    }

    /// The cluster's service.
    pub(crate) fn service(&self) -> &Service {
        &self.config.service
    }

    /// Which start of which host the service takes this daemon for.
    pub(crate) fn speaker(&self) -> proto::Speaker {
        let host = self.view.load().contents.own;
        proto::Speaker { host, incarnation: self.incarnation.load(Ordering::SeqCst) }
    }

    /// This host's name.
    #[must_use]
    pub fn host_name(&self) -> &str {
        &self.config.name
    }

    fn outbox(&self) -> MutexGuard<'_, Option<mpsc::Sender<proto::Envelope>>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message of the migration protocol, to the service or by it to another host. What can't be sent now is lost.
    pub(crate) fn send(&self, message: &nomad::Message) {
        let mut bytes = Vec::new();
        nomad::wire::encode(message, &mut bytes);
        let sent = self
            .outbox()
            .as_ref()
            .is_some_and(|out| out.try_send(proto::Envelope { message: bytes }).is_ok());
        if !sent {
            tracing::debug!(
                body = message.body.name(),
                "A message of the migration protocol can't be sent now"
            );
        }
    }

    /// Makes a view from the present one.
    fn change<R>(&self, change: impl FnOnce(&mut View) -> R) -> R {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut view = View::clone(&self.view.load());
        let result = change(&mut view);
        self.view.store(Arc::new(view));
        result
    }

    /// A VM runs on a host in an epoch, as whoever runs it says. Whether that is news.
    pub(crate) fn moved(&self, vm: VmId, host: u32, epoch: u64) -> bool {
        let known = self.view.load().contents.vms.get(&vm.0).map(|vm| (vm.host, vm.epoch));
        if known.is_none_or(|known| known == (host, epoch) || known.1 > epoch) {
            return false;
        }
        self.change(|view| view.moved(vm, host, epoch));
        true
    }

    /// Where a VM runs: its host's number, and its epoch.
    pub(crate) fn place(&self, vm: VmId) -> Option<(u32, u64)> {
        let view = self.view.load();
        view.contents.vms.get(&vm.0).filter(|vm| vm.alive).map(|vm| (vm.host, vm.epoch))
    }

    /// All addresses of a VM.
    pub(crate) fn addresses(&self, vm: VmId) -> Vec<Gid> {
        let view = self.view.load();
        let of = view.contents.vms.get(&vm.0).into_iter().flat_map(|vm| &vm.addresses);
        let gids: BTreeSet<Gid> = of.map(|(_, gid)| Gid(*gid)).collect();
        gids.into_iter().collect()
    }

    /// The name of the host that a VM is on.
    pub(crate) fn host_of(&self, vm: VmId) -> Option<String> {
        let (host, _) = self.place(vm)?;
        self.view.load().contents.hosts.get(&host).map(|host| host.name.clone())
    }

    /// Has the service told of a hold.
    pub(crate) fn held(&self, hold: Hold) {
        let mut here = self.here();
        if here.holds.len() >= MOST_HOLDS {
            here.holds.pop_front();
        }
        here.holds.push_back(hold);
        drop(here);
        self.changed.notify_one();
    }

    /// A VM's name.
    pub(crate) fn name(&self, vm: VmId) -> Option<String> {
        self.view.load().contents.vms.get(&vm.0).map(|vm| vm.name.clone())
    }

    /// The number of the VM of a name, wherever it runs.
    pub(crate) fn number(&self, name: &str) -> Option<VmId> {
        let view = self.view.load();
        view.contents.vms.iter().find(|(_, vm)| vm.alive && vm.name == name).map(|(id, _)| VmId(*id))
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The service isn't followed any more, or still not. Whether it was until now.
    fn lost(&self) -> bool {
        let mut status = self.status();
        let followed = status.away_since.is_none();
        if followed {
            status.away_since = Some(Instant::now());
        }
        status.failures += 1;
        followed
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directory for ClusterDirectory {
    fn owner(&self, segment: &str, gid: Gid) -> Option<VmId> {
        self.view.load().owner(segment, gid)
    }

    fn vm(&self, name: &str) -> Option<VmId> {
        self.view.load().own_vm(name)
    }

    fn host(&self, vm: VmId) -> Option<SocketAddr> {
        self.view.load().host(vm)
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        self.view.load().hosts()
    }

    fn pin(&self, vm: VmId) -> Option<TransportKind> {
        self.view.load().pin(vm)
    }

    fn mtu(&self) -> roce::Mtu {
        self.mtu
    }

    fn sockets(&self) -> u16 {
        self.sockets
    }

    fn tell(&self, news: News<'_>) {
        let mut here = self.here();
        match news {
            News::Nic { device, vm, segment, addresses } => {
                let (vm, segment, addresses) = (vm.to_owned(), segment.to_owned(), addresses.clone());
                here.nics.insert(device, LocalNic { vm, segment, addresses });
            }
            News::NicGone { device } => {
                if let (Some(nic), Some(mover)) = (here.nics.remove(&device), self.mover()) {
                    // One that leaves has lost its monitor; nothing where it doesn't leave, or has left.
                    mover.said(&nic.vm, Said::Broken);
                }
            }
            News::Connected(links) => here.links = links,
        }
        drop(here);
        self.changed.notify_one();
    }

    fn report(&self) -> Option<DirectoryReport> {
        let (view, status) = (self.view.load(), self.status());
        Some(DirectoryReport {
            service: self.config.service.name().to_owned(),
            connected: status.away_since.is_none(),
            outage_seconds: status.away_since.map_or(0, |since| since.elapsed().as_secs()),
            failures: status.failures,
            revision: view.place.1,
            hosts: view.contents.hosts.len(),
            vms: view.running(),
            refused_old_epochs: self.refused_old_epochs.load(Ordering::Relaxed),
        })
    }
}
