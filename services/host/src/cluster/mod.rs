//! The directory of a host whose cluster has a service (`causeway host --cluster`).
//!
//! ```text
//!  engine thread          owner, host … ──▶ View (lock-free, replaced as a whole)
//!                         tell ───────────▶ local state (a lock held for a moment)
//!                                              │ wakes                ▲ replaces, then notifies the engine
//!  "cluster" thread       registers host and VMs, keeps the lease, follows the watch ◀──▶ causeway cluster serve
//! ```
//! Messages of the migration protocol to other hosts take their direct connection (`peer_messages`) if there is one, and otherwise the
//! service's stream.
//!
//! The engine's thread never waits for the network. During an outage of the service the daemon continues with its current view, and reports
//! local changes afterwards. It keeps the view in a file of its folder, so that a daemon that starts during an outage knows the other
//! hosts.

mod client;
mod messages;
mod view;
mod waiting;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use arc_swap::{ArcSwap, ArcSwapOption};
use control_api::cluster::{ClusterError, Service, proto};
use hca::names::{DeviceId, Gid};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::migration::handle::{MigrationHandle, MonitorReport};
use crate::peer_messages::{PathCounters, PeerMessages};
use crate::transport::{Directory, DirectoryReport, News, TransportKind, VmId};

pub use client::ClusterThread;
pub use view::View;
pub(crate) use waiting::Waits;

/// Name of the view's file in the daemon's folder.
pub const FILE: &str = "cluster.json";

/// Address of the cluster service, and name of this host.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// The service.
    pub service: Service,
    /// This host's name.
    pub name: String,
}

/// Why a daemon can't join its cluster.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The service refuses the host.
    #[error("The cluster service at {service} refuses this host")]
    Refused {
        /// Address of the service.
        service: String,
        /// The service's error.
        #[source]
        source: ClusterError,
    },
    /// The service doesn't respond, and there is no copy of the view.
    #[error("This host can't be started without its cluster service: {} has no copy of the directory from before ({copy})", path.display())]
    Nothing {
        /// Path of the copy.
        path: PathBuf,
        /// Why the copy can't be used.
        copy: String,
        /// The service's error.
        #[source]
        source: ClusterError,
    },
    /// The cluster's settings aren't supported by this version.
    #[error("The cluster has an mtu of {mtu} and {sockets} sockets per host, which this version can't use")]
    Settings {
        /// Bytes of payload per packet.
        mtu: u32,
        /// UDP sockets per host.
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

/// Local state to be reported to the service.
#[derive(Debug, Default)]
struct Here {
    nics: BTreeMap<DeviceId, LocalNic>,
    links: BTreeSet<(VmId, VmId)>,
    /// Peer pauses, oldest first.
    holds: VecDeque<Hold>,
}

/// Limit of peer pauses that wait to be reported; the oldest are dropped.
const MOST_HOLDS: usize = 1024;

/// A peer pause: how long queue pairs of this host that are connected with a moving VM were suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub migration: u64,
    pub vm: u32,
    pub microseconds: u64,
}

/// The directory of a cluster's host; see the module.
#[derive(Debug)]
pub struct ClusterDirectory {
    config: ClusterConfig,
    address: SocketAddr,
    /// Path of the view's file.
    path: PathBuf,
    view: ArcSwap<View>,
    mtu: roce::Mtu,
    sockets: u16,
    here: Mutex<Here>,
    /// Addresses of monitors that wait for VMs, by the VMs' names.
    waiting: Mutex<BTreeMap<String, SocketAddr>>,
    changed: Notify,
    /// The service's number for this start of the host; 0: not registered.
    incarnation: AtomicU64,
    status: Mutex<Status>,
    refused_old_epochs: AtomicU64,
    /// Serialises changes of the view, which two threads make.
    changing: Mutex<()>,
    /// Messages of the migration protocol to the service, while it is connected.
    outbox: Mutex<Option<mpsc::Sender<proto::Envelope>>>,
    /// Handle of the migration manager, once there is one.
    migration_handle: OnceLock<MigrationHandle>,
    /// Direct connections with other daemons, while there are any.
    peer_messages: ArcSwapOption<PeerMessages>,
    /// Room at the migration thread for messages that the service has sent, bytes.
    service_inbox: Arc<Semaphore>,
    sent: PathCounters,
    received: PathCounters,
}

#[derive(Debug)]
struct Status {
    /// Since when the service is unreachable; `None`: it is connected.
    away_since: Option<Instant>,
    failures: u64,
}

impl ClusterDirectory {
    /// Registers this host and receives the state. Without the service, uses the copy of an earlier daemon in `folder`. Blocks for some
    /// seconds at most.
    ///
    /// # Errors
    /// When the service refuses, or neither it nor a copy is available.
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
            migration_handle: OnceLock::new(),
            peer_messages: ArcSwapOption::empty(),
            service_inbox: Arc::new(Semaphore::new(messages::MAX_SERVICE_INBOX_BYTES)),
            sent: PathCounters::default(),
            received: PathCounters::default(),
        }))
    }

    /// Sets the migration manager.
    pub(crate) fn set_migration_handle(&self, migration_handle: MigrationHandle) {
        // Called once per daemon.
        let _ = self.migration_handle.set(migration_handle);
    }

    pub(crate) fn migration_handle(&self) -> Option<&MigrationHandle> {
        self.migration_handle.get()
    }

    /// The cluster's service.
    pub(crate) fn service(&self) -> &Service {
        &self.config.service
    }

    /// This daemon's host number and start number at the service.
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

    /// Makes a new view from the current one.
    fn change<R>(&self, change: impl FnOnce(&mut View) -> R) -> R {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut view = View::clone(&self.view.load());
        let result = change(&mut view);
        self.view.store(Arc::new(view));
        result
    }

    /// Records that a VM runs on a host in an epoch, as that host reports. Returns whether that is new.
    pub(crate) fn moved(&self, vm: VmId, host: u32, epoch: u64) -> bool {
        let known = self.view.load().contents.vms.get(&vm.0).map(|vm| (vm.host, vm.epoch));
        if known.is_none_or(|known| known == (host, epoch) || known.1 > epoch) {
            return false;
        }
        self.change(|view| view.moved(vm, host, epoch));
        true
    }

    /// A VM's host number and epoch.
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

    /// Name of a VM's host.
    pub(crate) fn host_of(&self, vm: VmId) -> Option<String> {
        let (host, _) = self.place(vm)?;
        self.view.load().contents.hosts.get(&host).map(|host| host.name.clone())
    }

    /// Queues a peer pause to be reported to the service.
    pub(crate) fn held(&self, hold: Hold) {
        let mut here = self.here();
        if here.holds.len() >= MOST_HOLDS {
            here.holds.pop_front();
        }
        here.holds.push_back(hold);
        drop(here);
        self.changed.notify_one();
    }

    /// Name of a VM.
    pub(crate) fn name(&self, vm: VmId) -> Option<String> {
        self.view.load().contents.vms.get(&vm.0).map(|vm| vm.name.clone())
    }

    /// Number of the VM with a name, on any host.
    pub(crate) fn number(&self, name: &str) -> Option<VmId> {
        let view = self.view.load();
        view.contents.vms.iter().find(|(_, vm)| vm.alive && vm.name == name).map(|(id, _)| VmId(*id))
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the service is unreachable. Returns whether it was reachable before.
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
                if let (Some(nic), Some(migration_handle)) =
                    (here.nics.remove(&device), self.migration_handle())
                {
                    // If it is leaving, it has lost its monitor; otherwise this has no effect.
                    migration_handle.report(&nic.vm, MonitorReport::Broken);
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
            messages: self.messages_report(),
        })
    }
}
