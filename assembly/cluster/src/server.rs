//! Sockets, TLS and metrics of the service; its start and end.

use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_api::cluster::proto::cluster_service_server::ClusterServiceServer;
use control_api::cluster::{ClusterError, Keys, LARGEST_MESSAGE};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, Server as TonicServer, TcpConnectInfo};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::keeper::{self, Handle};
use crate::metrics;
use crate::registry::Registry;
use crate::service::Service;
use crate::state::Settings;
use crate::store::{RedbStore, Store, StoreError};

/// Connections at once; more are hung up on. Each host has one.
const CONNECTIONS: usize = 8192;
/// A TLS handshake may take so long.
const HANDSHAKE: Duration = Duration::from_secs(5);

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
    /// What is the same on all hosts; `None`: as before, or the defaults.
    pub settings: Option<Settings>,
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
            settings: None,
        }
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
        /// Where.
        address: SocketAddr,
        /// `--listen` or `--metrics`.
        option: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A thread or an event loop.
    #[error("The cluster service's {what} can't be started")]
    Start {
        /// Which part.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The running service. Dropping it ends it: connections break, what was answered is on the disk.
#[derive(Debug)]
pub struct Server {
    stop: Option<oneshot::Sender<()>>,
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
        let settings = config.settings.map(Settings::check).transpose().map_err(ServerError::Settings)?;
        let tls = config.keys.as_ref().map(tls).transpose()?;
        let listener = listen(config.listen, "--listen")?;
        let address = listener.local_addr().unwrap_or(config.listen);
        let metrics = config.metrics.map(|address| listen(address, "--metrics")).transpose()?;
        let metrics_address = metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        let now = Instant::now();
        let mut registry = Registry::new(store, config.lease, config.switch_limit, now)?;
        let settings = settings.unwrap_or(registry.state().settings);
        registry.set_settings(settings, now)?;
        let mut instance = [0; 8];
        random(&mut instance)?;
        let instance = u64::from_le_bytes(instance).max(1);
        let start = |what| move |source| ServerError::Start { what, source };
        let (handle, keeper) = keeper::start(registry, instance).map_err(start("keeper thread"))?;
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
                        ended = serve(listener, metrics, tls, handle) => {
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
        Ok(Self { stop: Some(stop), threads: vec![thread, keeper], address, metrics: metrics_address })
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
        // The keeper ends when the service's handles are gone.
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("A thread of the cluster service panicked; this is a bug");
            }
        }
    }
}

/// Eight random bytes of the kernel.
fn random(bytes: &mut [u8]) -> Result<(), ServerError> {
    use std::io::Read as _;
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(bytes));
    read.map_err(|source| ServerError::Start { what: "random numbers", source })
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
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

async fn serve(
    listener: StdTcpListener,
    metrics: Option<StdTcpListener>,
    tls: Option<ServerTlsConfig>,
    keeper: Handle,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    if let Some(metrics) = metrics {
        tokio::spawn(metrics::serve(TcpListener::from_std(metrics)?, keeper.clone()));
    }
    let (connections, incoming) = tokio::sync::mpsc::channel(1);
    tokio::spawn(accept(listener, connections));
    let mut builder = TonicServer::builder();
    let authenticated = tls.is_some();
    if let Some(tls) = tls {
        builder = builder.tls_config(tls).map_err(io::Error::other)?;
    }
    let service = Service { keeper, began: Instant::now(), authenticated };
    let service = ClusterServiceServer::new(service)
        .max_decoding_message_size(LARGEST_MESSAGE / 16)
        .max_encoding_message_size(LARGEST_MESSAGE);
    builder
        .timeout(Duration::from_secs(30))
        .concurrency_limit_per_connection(16)
        .http2_keepalive_interval(Some(Duration::from_secs(5)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
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
