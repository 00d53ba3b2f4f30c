//! The control thread: gRPC on the daemon's socket, metrics over HTTP. The only asynchronous code here.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use control_api::host::proto::host_service_server::HostServiceServer;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, Server};
use vfio_user_protocol::device::Peer;

use crate::cluster::ClusterDirectory;
use crate::inspect;
use crate::neighbours::Neighbours;
use crate::registry::Registry;
use crate::service::Service;

/// Connections of those who may use the daemon, served at once; more wait.
const CONNECTIONS: usize = 64;
/// Connections of those who may not, and are only told so.
const STRANGERS: usize = 8;
/// Connections that ask for metrics.
const READERS: usize = 16;
/// No connection to the service lasts longer.
const LONGEST_CONNECTION: Duration = Duration::from_secs(120);
/// No connection for metrics lasts longer.
const LONGEST_READ: Duration = Duration::from_secs(10);
/// Largest request, bytes.
const LARGEST_REQUEST: usize = 64 << 10;

/// A connection with the peer's credentials, as the service sees them.
struct Caller {
    stream: UnixStream,
    peer: Peer,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Caller {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Caller {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Caller {
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

/// What the thread listens to.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub service: StdUnixListener,
    pub metrics: StdUnixListener,
    pub metrics_tcp: Option<StdTcpListener>,
}

/// Serves until `stop`.
pub(crate) async fn serve(
    sockets: Sockets,
    registry: Arc<Registry>,
    neighbours: Arc<Neighbours>,
    cluster: Option<Arc<ClusterDirectory>>,
    stop: oneshot::Receiver<()>,
) -> io::Result<()> {
    let service = UnixListener::from_std(sockets.service)?;
    let metrics = UnixListener::from_std(sockets.metrics)?;
    let tcp = sockets.metrics_tcp.map(TcpListener::from_std).transpose()?;
    let readers = Arc::new(Semaphore::new(READERS));
    tokio::spawn(serve_metrics_unix(metrics, Arc::clone(&registry), Arc::clone(&readers)));
    if let Some(tcp) = tcp {
        tokio::spawn(serve_metrics_tcp(tcp, Arc::clone(&registry), readers));
    }
    let (callers, incoming) = tokio::sync::mpsc::channel(1);
    tokio::spawn(accept(service, Arc::clone(&registry), callers));
    let service = HostServiceServer::new(Service::new(registry, neighbours, cluster))
        .max_decoding_message_size(LARGEST_REQUEST);
    Server::builder()
        .max_connection_age(LONGEST_CONNECTION)
        .timeout(Duration::from_secs(30))
        .concurrency_limit_per_connection(4)
        .add_service(service)
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async {
            // A daemon that is dropped stops as well.
            let _ = stop.await;
        })
        .await
        .map_err(io::Error::other)
}

/// Accepts callers as long as there is room for their kind.
async fn accept(
    listener: UnixListener,
    registry: Arc<Registry>,
    callers: tokio::sync::mpsc::Sender<io::Result<Caller>>,
) {
    let known = Arc::new(Semaphore::new(CONNECTIONS));
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                no_more(&error).await;
                continue;
            }
        };
        let Ok(credentials) = stream.peer_cred() else { continue };
        let peer =
            Peer { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid().unwrap_or(0) };
        let kind = if registry.access().check(&peer).is_ok() { &known } else { &strangers };
        // Whoever finds no room is hung up on: waiting here would let one kind keep the other out.
        let Ok(permit) = Arc::clone(kind).try_acquire_owned() else { continue };
        if callers.send(Ok(Caller { stream, peer, _permit: permit })).await.is_err() {
            return;
        }
    }
}

/// Out of descriptors or memory: others may give some back.
async fn no_more(error: &io::Error) {
    tracing::warn!(%error, "A connection can't be accepted");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn serve_metrics_unix(listener: UnixListener, registry: Arc<Registry>, readers: Arc<Semaphore>) {
    loop {
        let Ok(permit) = Arc::clone(&readers).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let allowed = stream.peer_cred().is_ok_and(|credentials| {
                    let peer = Peer { uid: credentials.uid(), gid: credentials.gid(), pid: 0 };
                    crate::access::is_administrator(peer.uid)
                });
                tokio::spawn(answer(stream, Arc::clone(&registry), allowed, permit));
            }
            Err(error) => no_more(&error).await,
        }
    }
}

async fn serve_metrics_tcp(listener: TcpListener, registry: Arc<Registry>, readers: Arc<Semaphore>) {
    loop {
        let Ok(permit) = Arc::clone(&readers).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(answer(stream, Arc::clone(&registry), true, permit))),
            Err(error) => no_more(&error).await,
        }
    }
}

/// One connection for metrics.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    registry: Arc<Registry>,
    allowed: bool,
    _permit: OwnedSemaphorePermit,
) {
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let registry = Arc::clone(&registry);
        async move { Ok::<_, Infallible>(respond(&request, &registry, allowed)) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(5))
        .max_buf_size(16 << 10)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // What a reader does wrong is its own affair.
    let _ = tokio::time::timeout(LONGEST_READ, connection).await;
}

fn respond(
    request: &Request<hyper::body::Incoming>,
    registry: &Registry,
    allowed: bool,
) -> Response<Full<Bytes>> {
    let (status, kind, text) = if !allowed {
        let text = "Only root and the daemon's own user may read its metrics\n".to_owned();
        (StatusCode::FORBIDDEN, "text/plain", text)
    } else if request.method() != Method::GET || request.uri().path() != "/metrics" {
        (StatusCode::NOT_FOUND, "text/plain", "There is GET /metrics and nothing else\n".to_owned())
    } else {
        match inspect::metrics(registry) {
            Ok(text) => (StatusCode::OK, telemetry::metrics::CONTENT_TYPE, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{error}\n")),
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// Listens for readers of metrics.
pub(crate) fn bind_metrics(address: SocketAddr) -> io::Result<StdTcpListener> {
    let listener = StdTcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
