//! Sockets, TLS and metrics of the service; its start and end.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_api::cluster::proto::cluster_service_server::ClusterServiceServer;
use control_api::cluster::{ClusterError, Keys, MAX_MESSAGE_BYTES};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, Server as TonicServer, TcpConnectInfo};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::election::{self, Candidate, Make};
use crate::keeper;
use crate::kv::Kv;
use crate::kv_store::KvStore;
use crate::metrics;
use crate::registry::Registry;
use crate::roles::Roles;
use crate::service::Service;
use crate::state::Settings;
use crate::store::{RedbStore, Store};
use crate::store_error::StoreError;

/// Connections at once; more are hung up on. Each host has one.
const CONNECTIONS: usize = 8192;
/// Connections that the kernel keeps until they are accepted; the kernel bounds it by `net.core.somaxconn`. After an outage all hosts come at once,
/// and one beyond this waits a second or more for its next attempt.
const LISTEN_BACKLOG: i32 = 4096;
/// A TLS handshake may take so long.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// A connection of whose other end nothing is heard for so long is ended, or for as long as a host's lease where that is longer.
const SILENCE: Duration = Duration::from_secs(10);

/// What the service is started with.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Its database; made where there is none.
    pub state: PathBuf,
    /// For mutual TLS. Without keys nobody is authenticated.
    pub keys: Option<Keys>,
    /// Where metrics are served by HTTP, to everybody who reaches it.
    pub metrics: Option<SocketAddr>,
    /// How long a host counts as alive after it was heard.
    pub lease: Duration,
    /// How long a migration's switch-over may take, from when peers are asked to stop to the decision; what takes longer is given up.
    pub switch_limit: Duration,
    /// Names of transports that VMs' connections are pinned to, by the VMs' names; `*` is all others.
    pub pins: BTreeMap<String, String>,
    /// Bytes of payload per packet between hosts; `None`: as before, or the default.
    pub mtu: Option<u32>,
    /// UDP sockets of each host; `None`: as before, or the default.
    pub sockets: Option<u16>,
}

impl ServerConfig {
    /// With defaults.
    #[must_use]
    pub fn new(listen: SocketAddr, state: impl Into<PathBuf>) -> Self {
        Self {
            listen,
            state: state.into(),
            keys: None,
            metrics: None,
            lease: Duration::from_secs(6),
            switch_limit: Duration::from_secs(2),
            pins: BTreeMap::new(),
            mtu: None,
            sockets: None,
        }
    }

    /// What is the same on all hosts, given what it was before.
    fn settings(&self, before: Settings) -> Settings {
        Settings { mtu: self.mtu.unwrap_or(before.mtu), sockets: self.sockets.unwrap_or(before.sockets) }
    }

    /// What decides, with a database.
    fn registry(&self, store: Box<dyn Store>) -> Result<Registry, StoreError> {
        let now = Instant::now();
        let mut registry = Registry::new(store, self.lease, self.switch_limit, now)?;
        let settings = self.settings(registry.state().settings);
        registry.set_settings(settings, now)?;
        registry.set_pins(self.pins.clone());
        Ok(registry)
    }
}

/// The service can't be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Its database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its settings.
    #[error("{0}")]
    Settings(String),
    /// Its keys.
    #[error(transparent)]
    Keys(#[from] ClusterError),
    /// A socket.
    #[error("The cluster service can't listen at {address}; choose another {option}")]
    Listen {
        /// The address that the service can't bind.
        address: SocketAddr,
        /// `--listen` or `--metrics`.
        option: &'static str,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// A thread or an event loop.
    #[error("The cluster service's {what} can't be started")]
    Start {
        /// Which part.
        what: &'static str,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

/// The running service. Dropping it ends it: connections break, what was answered is on the disk.
#[derive(Debug)]
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
    /// Dropped, it ends the part in the election.
    step_down: Option<std::sync::mpsc::Sender<()>>,
    threads: Vec<JoinHandle<()>>,
    address: SocketAddr,
    metrics: Option<SocketAddr>,
}

impl Server {
    /// Starts it with its database in a file; it serves when this returns.
    ///
    /// # Errors
    /// When the database, the keys or the sockets can't be had.
    pub fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        let store = RedbStore::open(&config.state)?;
        Self::with(config, Box::new(store))
    }

    /// Starts it with another database.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn with(config: &ServerConfig, store: Box<dyn Store>) -> Result<Self, ServerError> {
        config.settings(store.state().settings).check().map_err(ServerError::Settings)?;
        let sockets = Sockets::open(config)?;
        let registry = config.registry(store)?;
        let (handle, keeper) = keeper::start(registry, instance()?)
            .map_err(|source| ServerError::Start { what: "keeper thread", source })?;
        let place = config.state.display().to_string();
        let roles = Roles::alone(sockets.address.to_string(), place, handle);
        Self::serve(sockets, roles, vec![keeper], None)
    }

    /// Starts it as one of several instances that share a store; it answers when this returns, and leads when it is elected. The file of
    /// `config.state` isn't used.
    ///
    /// # Errors
    /// When the keys or the sockets can't be had. A store that doesn't answer is waited for.
    pub fn elected(
        config: &ServerConfig,
        kv: Arc<dyn Kv>,
        candidate: &Candidate,
    ) -> Result<Self, ServerError> {
        config.settings(Settings::default()).check().map_err(ServerError::Settings)?;
        let sockets = Sockets::open(config)?;
        let mut candidate = candidate.clone();
        if candidate.address.is_empty() {
            candidate.address = sockets.address.to_string();
        }
        let roles = Roles::one_of_several(candidate.address.clone(), kv.place());
        let (elected, own) = (Arc::clone(&roles), config.clone());
        // A number for each term: watchers of an earlier one get the whole state.
        let base = instance()?;
        let begin_with = candidate.begin_with.clone();
        let make: Make = Arc::new(move |mut store: KvStore| {
            if let Some(state) = &begin_with {
                if store.begin_with(state)? {
                    tracing::info!(revision = state.revision, "The state of the file is taken over");
                } else {
                    tracing::info!("There is a state already: that of the file isn't taken over");
                }
            }
            let number = base.wrapping_add(store.term().number()).max(1);
            Ok((own.registry(Box::new(store))?, number))
        });
        let (step_down, stop) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("election".to_owned())
            .spawn(move || election::run(&kv, &candidate, &elected, &make, &stop))
            .map_err(|source| ServerError::Start { what: "election thread", source })?;
        Self::serve(sockets, roles, vec![thread], Some(step_down))
    }

    fn serve(
        sockets: Sockets,
        roles: Arc<Roles>,
        mut threads: Vec<JoinHandle<()>>,
        step_down: Option<std::sync::mpsc::Sender<()>>,
    ) -> Result<Self, ServerError> {
        let Sockets { tls, listener, address, metrics, metrics_address, silence } = sockets;
        let start = |what| move |source| ServerError::Start { what, source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(start("event loop"))?;
        if tls.is_some() {
            tracing::info!(%address, "The cluster service answers whoever has a certificate of its authority");
        } else {
            tracing::warn!(
                %address,
                "The cluster service runs without keys: nothing is authenticated or encrypted; whoever reaches this address can change everything. --ca, --cert and --key make it safe"
            );
        }
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("cluster".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        ended = serve(listener, metrics, tls, roles, silence) => {
                            if let Err(error) = ended {
                                tracing::error!(%error, "The cluster service has ended; restart it");
                            }
                        }
                        // A service that is dropped stops as well.
                        _ = stopped => {}
                    }
                });
                // Connections and their tasks go with the runtime.
                runtime.shutdown_background();
            })
            .map_err(start("service thread"))?;
        threads.insert(0, thread);
        Ok(Self { stop: Some(stop), step_down, threads, address, metrics: metrics_address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where metrics are served.
    #[must_use]
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // A thread that has failed doesn't listen.
            let _ = stop.send(());
        }
        // The lease is given back, so that another instance leads at once.
        drop(self.step_down.take());
        // The keeper ends when the service's handles are gone.
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("A thread of the cluster service panicked; this is a bug");
            }
        }
    }
}

/// A random number for this start of the service.
fn instance() -> Result<u64, ServerError> {
    use std::io::Read as _;
    let mut bytes = [0; 8];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|source| ServerError::Start { what: "random numbers", source })?;
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// What it serves at.
struct Sockets {
    tls: Option<ServerTlsConfig>,
    listener: StdTcpListener,
    address: SocketAddr,
    metrics: Option<StdTcpListener>,
    metrics_address: Option<SocketAddr>,
    /// How long nothing may be heard of a connection.
    silence: Duration,
}

impl Sockets {
    fn open(config: &ServerConfig) -> Result<Self, ServerError> {
        let tls = config.keys.as_ref().map(tls).transpose()?;
        let listener = listen(config.listen, "--listen")?;
        let address = listener.local_addr().unwrap_or(config.listen);
        let metrics = config.metrics.map(|address| listen(address, "--metrics")).transpose()?;
        let metrics_address = metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        Ok(Self { tls, listener, address, metrics, metrics_address, silence: config.lease.max(SILENCE) })
    }
}

fn tls(keys: &Keys) -> Result<ServerTlsConfig, ServerError> {
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(&keys.certificate, &keys.key))
        .client_ca_root(Certificate::from_pem(&keys.authority))
        .timeout(HANDSHAKE);
    // Whether they make TLS shows only here.
    let _ =
        TonicServer::builder().tls_config(tls.clone()).map_err(|source| ClusterError::Keys(source.into()))?;
    Ok(tls)
}

fn listen(address: SocketAddr, option: &'static str) -> Result<StdTcpListener, ServerError> {
    let failed = |source| ServerError::Listen { address, option, source };
    let listener = StdTcpListener::bind(address).map_err(failed)?;
    // The library's own backlog is 128.
    rustix::net::listen(&listener, LISTEN_BACKLOG).map_err(|errno| failed(errno.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

async fn serve(
    listener: StdTcpListener,
    metrics: Option<StdTcpListener>,
    tls: Option<ServerTlsConfig>,
    roles: Arc<Roles>,
    silence: Duration,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    if let Some(metrics) = metrics {
        tokio::spawn(metrics::serve(TcpListener::from_std(metrics)?, Arc::clone(&roles)));
    }
    let (connections, incoming) = tokio::sync::mpsc::channel(1);
    tokio::spawn(accept(listener, connections));
    let mut builder = TonicServer::builder();
    let authenticated = tls.is_some();
    if let Some(tls) = tls {
        builder = builder.tls_config(tls).map_err(io::Error::other)?;
    }
    let service = Service { roles, began: Instant::now(), authenticated };
    let service = ClusterServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES / 16)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    builder
        .timeout(Duration::from_secs(30))
        .concurrency_limit_per_connection(16)
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(silence))
        .add_service(service)
        .serve_with_incoming(ReceiverStream::new(incoming))
        .await
        .map_err(io::Error::other)
}

/// A connection that is counted.
struct Counted {
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Counted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

async fn accept(listener: TcpListener, connections: tokio::sync::mpsc::Sender<io::Result<Counted>>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
                // Small answers, waited for.
                let _ = stream.set_nodelay(true);
                if connections.send(Ok(Counted { stream, _permit: permit })).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                // Out of descriptors or memory: others may give some back.
                tracing::warn!(%error, "A connection can't be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test that can't go on has failed.

    use std::net::TcpStream;
    use std::time::Duration;

    use super::listen;

    /// Hosts that come at once, before the service has accepted any, are connected without a retransmission.
    #[test]
    fn many_hosts_connect_at_once() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), "--listen").unwrap();
        let address = listener.local_addr().unwrap();
        // A connection that has no room is tried for minutes.
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(60)).unwrap();
        let hosts: Vec<TcpStream> = (0..1_000).map(connect).collect();
        assert_eq!(hosts.len(), 1_000);
    }
}
