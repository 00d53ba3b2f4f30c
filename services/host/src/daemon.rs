//! Start and end of the daemon.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::access::Access;
use crate::cluster::{ClusterConfig, ClusterDirectory, ClusterThread, JoinError};
use crate::engine::{EngineError, EngineSetup, EngineThread};
use crate::hardening;
use crate::listener::{ListenError, Place, SocketFile, listen};
use crate::metrics_server::bind_metrics;
use crate::migration::manager::MigrationThread;
use crate::neighbours::{Neighbours, NeighboursConfig};
use crate::peer_messages::{self, PeerMessagesThread};
use crate::registry::Registry;
use crate::remembered::Remembered;
use crate::sandbox::{self, SandboxError, TcpUse};
use crate::server::{self, Sockets};
use crate::transport::{
    Absent, ClusterKey, Directory, DirectoryError, FabricError, FileDirectory, Found, KeyError, Transports,
};

/// Configuration of a daemon.
#[derive(Debug, Clone)]
pub struct DaemonConfig {
    /// Path of the service's socket. A folder of the same name with `.d` is created beside it.
    pub socket: PathBuf,
    /// Callers that may have NICs, besides root and the daemon's own user.
    pub access: Access,
    /// TCP address of the metrics, besides the socket `metrics` in the folder. Not authenticated.
    pub metrics: Option<SocketAddr>,
    /// Settings of the engine's thread.
    pub engine: EngineSetup,
    /// RDMA to other hosts.
    pub fabric: Option<FabricConfig>,
    /// Windows and rings of neighbours.
    pub neighbours: NeighboursConfig,
    /// Whether to confine the daemon's threads, and the thread that starts it, by seccomp and Landlock.
    pub sandbox: bool,
    /// Whether messages of migrations are exchanged with other daemons directly. Without it the daemon listens on no TCP port for them, and
    /// the cluster service passes all of them on, as for daemons of older builds.
    pub direct_messages: bool,
}

/// Configuration of RDMA to other hosts.
#[derive(Debug, Clone)]
pub struct FabricConfig {
    /// The directory of hosts and VMs.
    pub directory: DirectorySource,
    /// Address of the daemon's first UDP socket; with a directory file, the address of one of its hosts. With a cluster service, other
    /// daemons reach this one there by TCP as well, for messages of migrations.
    pub address: SocketAddr,
    /// File with the cluster's key: packets and messages between hosts are encrypted. Without a key they are plain.
    pub cluster_key: Option<PathBuf>,
    /// Whether to offer transport `verbs`, with the RDMA device that has this host's address.
    pub verbs: bool,
}

/// Source of the directory of VMs.
#[derive(Debug, Clone)]
pub enum DirectorySource {
    /// A file, the same on all hosts.
    File(PathBuf),
    /// The cluster's service.
    Cluster(ClusterConfig),
}

impl DaemonConfig {
    /// A configuration with defaults.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            access: Access::default(),
            metrics: None,
            engine: EngineSetup::default(),
            fabric: None,
            neighbours: NeighboursConfig::default(),
            sandbox: false,
            direct_messages: true,
        }
    }
}

/// Why the daemon can't be started.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A socket can't be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The engine can't be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The directory of other hosts can't be read.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The cluster's service refuses, or isn't available.
    #[error(transparent)]
    Cluster(#[from] JoinError),
    /// The cluster's key can't be read.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Sockets to other hosts can't be opened.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// Messages of other daemons can't be received.
    #[error(
        "TCP port {address} can't be used for messages of other hosts; does another program use it, or isn't the address this host's? Free the port, or choose another --fabric-address"
    )]
    PeerMessages {
        /// Address of the port.
        address: SocketAddr,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The host's RDMA device isn't usable.
    #[error("Transport verbs can't be offered, which --verbs asks for: {0}")]
    Verbs(#[from] Absent),
    /// The directory doesn't contain this host.
    #[error("{address} is none of the hosts in the directory {}; give --fabric-address one of them", directory.display())]
    NotAHost {
        /// This host's address.
        address: SocketAddr,
        /// Path of the directory.
        directory: PathBuf,
    },
    /// The sandbox can't be entered.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// Metrics can't be served by TCP.
    #[error("Metrics can't be served at {address}; choose another --metrics")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// A thread or an event loop can't be started.
    #[error("The daemon's {what} can't be started")]
    Start {
        /// Name of the part.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A running daemon. Dropping it ends it in order: connections are closed, devices and sockets removed. Guests' devices fail.
#[derive(Debug)]
pub struct Daemon {
    stop: Option<oneshot::Sender<()>>,
    control: Option<JoinHandle<()>>,
    registry: Arc<Registry>,
    neighbours: Arc<Neighbours>,
    keeper: Option<JoinHandle<()>>,
    cluster: Option<ClusterThread>,
    directory: Option<Arc<ClusterDirectory>>,
    peer_messages: Option<PeerMessagesThread>,
    migration: Option<MigrationThread>,
    // Dropped after the NICs, which use it.
    engine: Option<EngineThread>,
    files: Vec<SocketFile>,
    metrics: Option<SocketAddr>,
    place: Place,
}

impl Daemon {
    /// Starts the daemon, which serves when this returns.
    ///
    /// # Errors
    /// When another daemon has the socket, or the host lacks a required facility.
    pub fn start(config: &DaemonConfig) -> Result<Self, DaemonError> {
        hardening::prepare();
        let place = Place::take(&config.socket)?;
        // Loads the library and its drivers, since the sandbox permits no loading.
        let verbs = config.fabric.as_ref().filter(|fabric| fabric.verbs).map(look_for_verbs).transpose()?;
        let (mut transports, cluster) = match &config.fabric {
            Some(fabric) => transports(fabric, place.folder(), config.direct_messages)?,
            None => {
                let alone = Transports::without_directory();
                (alone.map_err(|source| DaemonError::Start { what: "RDMA transport", source })?, None)
            }
        };
        let metrics_tcp = config
            .metrics
            .map(|address| bind_metrics(address).map_err(|source| DaemonError::Metrics { address, source }))
            .transpose()?;
        // Everything outside of the folder is open; threads are created from here on.
        if config.sandbox {
            let tcp = cluster.as_ref().map(ClusterOpened::tcp);
            sandbox::enter(place.socket(), place.folder(), verbs.as_ref().map(Found::node), tcp.as_ref())?;
        } else {
            tracing::warn!("The daemon runs without a sandbox: no seccomp, no Landlock");
        }
        if let Some(found) = &verbs {
            // Not earlier: the kernel accepts a device's requests only with the credentials that opened it.
            transports.open_verbs(found)?;
        }
        let engine = EngineThread::start(config.engine, Some(transports))?;
        let remembered = Remembered::load(place.folder());
        let (registry, events) =
            Registry::new(place.folder(), config.access.clone(), engine.handle(), remembered);
        let directory = cluster.as_ref().map(|cluster| Arc::clone(&cluster.directory));
        let migration = directory.clone().map(|directory| {
            let migration =
                MigrationThread::start(Arc::clone(&directory), Arc::clone(&registry), engine.handle());
            migration.inspect(|migration| directory.set_migration_handle(migration.handle()))
        });
        let migration = migration
            .transpose()
            .map_err(|source| DaemonError::Start { what: "migration thread", source })?;
        let (peer_messages, cluster) = match cluster {
            Some(opened) => {
                let (directory, peer_messages) = opened.exchange_messages()?;
                let thread = ClusterThread::start(directory, engine.handle());
                let thread =
                    thread.map_err(|source| DaemonError::Start { what: "cluster thread", source })?;
                (peer_messages, Some(thread))
            }
            None => (None, None),
        };
        let metrics_address = metrics_tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        let (metrics, metrics_file) = listen(&place.folder().join("metrics"))?.into_parts();
        let kept = Arc::clone(&registry);
        let keeper = std::thread::Builder::new()
            .name("keeper".to_owned())
            .spawn(move || kept.keep(&events))
            .map_err(|source| DaemonError::Start { what: "keeper thread", source })?;
        let at = place.folder().join(neighbour_protocol::SOCKET_NAME);
        let neighbours = Neighbours::start(&at, config.access.clone(), config.neighbours)
            .map_err(|source| DaemonError::Start { what: "registry of neighbours", source })?;
        let neighbours = Arc::new(neighbours);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| DaemonError::Start { what: "event loop", source })?;
        // Last: every client that connects is served.
        let (service, service_file) = place.listen()?.into_parts();
        let sockets = Sockets { service, metrics, metrics_tcp };
        let (stop, stopped) = oneshot::channel();
        let of_cluster = directory.clone();
        let (served, shown) = (Arc::clone(&registry), Arc::clone(&neighbours));
        let control = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                if let Err(error) =
                    runtime.block_on(server::serve(sockets, served, shown, directory, stopped))
                {
                    tracing::error!(%error, "The daemon's service has ended; restart it");
                }
            })
            .map_err(|source| DaemonError::Start { what: "control thread", source })?;
        Ok(Self {
            stop: Some(stop),
            control: Some(control),
            registry,
            neighbours,
            keeper: Some(keeper),
            cluster,
            directory: of_cluster,
            peer_messages,
            migration,
            engine: Some(engine),
            files: vec![service_file, metrics_file],
            metrics: metrics_address,
            place,
        })
    }

    /// Path of the service's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.place.socket()
    }

    /// The registry of neighbours.
    #[must_use]
    pub fn neighbours(&self) -> &Neighbours {
        &self.neighbours
    }

    /// TCP address of the metrics.
    #[must_use]
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Accept no new NICs.
        self.files.clear();
        if let Some(stop) = self.stop.take() {
            // A control thread that has failed doesn't receive this.
            let _ = stop.send(());
        }
        join(self.control.take(), "control");
        // Before the devices are removed: their VMs haven't ended, only the daemon has.
        drop(self.cluster.take());
        if let Some(directory) = self.directory.take() {
            // They refer to each other.
            directory.set_peer_messages(None);
        }
        drop(self.peer_messages.take());
        drop(self.migration.take());
        self.registry.clear();
        self.registry.stop_keeper();
        join(self.keeper.take(), "keeper");
        drop(self.engine.take());
    }
}

/// What a host of a cluster with a service has opened before its sandbox closes.
struct ClusterOpened {
    directory: Arc<ClusterDirectory>,
    /// TCP ports of the service.
    service_ports: BTreeSet<u16>,
    /// Where other daemons connect, and the key of these connections.
    peers: Option<(TcpListener, Option<ClusterKey>)>,
}

impl ClusterOpened {
    /// TCP that the sandbox permits. A host that joins later with a port of its own connects to this one.
    fn tcp(&self) -> TcpUse {
        let mut connect = self.service_ports.clone();
        if self.peers.is_some() {
            connect.extend(self.directory.hosts().iter().map(SocketAddr::port));
        }
        TcpUse { connect, own_address: self.peers.is_some() }
    }

    /// Begins to exchange messages with other daemons directly.
    fn exchange_messages(self) -> Result<(Arc<ClusterDirectory>, Option<PeerMessagesThread>), DaemonError> {
        let Self { directory, peers, .. } = self;
        let start = |(listener, key)| {
            let thread = PeerMessagesThread::start(Arc::clone(&directory) as _, listener, key);
            thread.inspect(|thread| directory.set_peer_messages(Some(thread.handle())))
        };
        let thread = peers
            .map(start)
            .transpose()
            .map_err(|source| DaemonError::Start { what: "thread for other daemons' messages", source })?;
        Ok((directory, thread))
    }
}

/// Transports of a host with a directory, and what a cluster's host has besides.
type Opened = (Transports, Option<ClusterOpened>);

fn transports(config: &FabricConfig, folder: &Path, direct: bool) -> Result<Opened, DaemonError> {
    let address = config.address;
    let key = config.cluster_key.as_deref().map(ClusterKey::load).transpose()?;
    let (directory, cluster): (Arc<dyn Directory>, _) = match &config.directory {
        DirectorySource::File(path) => {
            let directory = FileDirectory::load(path)?;
            if !directory.hosts().contains(&address) {
                return Err(DaemonError::NotAHost { address, directory: path.clone() });
            }
            (Arc::new(directory), None)
        }
        DirectorySource::Cluster(cluster) => {
            // If another daemon has the address, the service must not learn of a restart of this host.
            let probe = std::net::UdpSocket::bind(address);
            drop(probe.map_err(|source| FabricError::Port { address, source })?);
            let listener = direct.then(|| peer_messages::bind(address)).transpose();
            let listener = listener.map_err(|source| DaemonError::PeerMessages { address, source })?;
            let directory = ClusterDirectory::open(cluster.clone(), address, folder)?;
            let opened = ClusterOpened {
                directory: Arc::clone(&directory),
                service_ports: cluster.service.ports(),
                peers: listener.map(|listener| (listener, key.clone())),
            };
            (directory as _, Some(opened))
        }
    };
    let transports = Transports::open(directory, address, key.as_ref())?;
    tracing::info!(
        %address,
        encryption = transports.fabric().encryption,
        "RDMA between hosts is {}",
        if key.is_some() {
            "encrypted and authenticated with the cluster key"
        } else {
            "plain: whoever can forge a host's address can forge requests; --cluster-key FILE encrypts"
        }
    );
    Ok((transports, cluster))
}

/// Finds the RDMA device with this host's address, and raises the limit of pinned memory for it.
fn look_for_verbs(config: &FabricConfig) -> Result<Found, DaemonError> {
    let found = Found::look(config.address.ip())?;
    let all = rustix::process::Rlimit { current: None, maximum: None };
    if let Err(errno) = rustix::process::setrlimit(rustix::process::Resource::Memlock, all) {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        tracing::warn!(
            %errno,
            limit,
            "The limit of locked memory can't be lifted: guests can't register more than that for transport verbs; raise it (ulimit -l, LimitMEMLOCK=)"
        );
    }
    let info = found.info();
    tracing::info!(
        device = info.device,
        port = info.port,
        address = %config.address.ip(),
        "Transport verbs is there, for VMs that the directory pins to it; its packets are the device's own, {}",
        if config.cluster_key.is_some() { "NOT encrypted with the cluster key" } else { "plain" }
    );
    Ok(found)
}

fn join(thread: Option<JoinHandle<()>>, name: &str) {
    if let Some(thread) = thread
        && thread.join().is_err()
    {
        tracing::error!("The {name} thread panicked; this is a bug");
    }
}
