//! The control thread: gRPC on the daemon's socket, metrics over HTTP. The only asynchronous code of the daemon.

use std::io;
use std::net::TcpListener as StdTcpListener;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use control_api::host::proto::host_service_server::HostServiceServer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, Server};
use vfio_user_protocol::device::Peer;

use crate::cluster::ClusterDirectory;
use crate::inspect;
use crate::metrics_server::{Readers, no_more};
use crate::neighbours::Neighbours;
use crate::registry::Registry;
use crate::service::Service;

/// Limit of concurrent connections of authorized callers; more are closed.
const CONNECTIONS: usize = 64;
/// Limit of concurrent connections of other callers, which get only an error.
const STRANGERS: usize = 8;
/// Limit of a connection's lifetime.
const LONGEST_CONNECTION: Duration = Duration::from_secs(120);
/// Limit of a request, bytes.
const LARGEST_REQUEST: usize = 64 << 10;

/// A connection with the peer's credentials, for the service.
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

/// Sockets of the thread.
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
    let of = Arc::clone(&registry);
    let readers = Readers::new(move || inspect::metrics::text(&of));
    tokio::spawn(readers.clone().serve_unix(metrics));
    if let Some(tcp) = tcp {
        tokio::spawn(readers.serve_tcp(tcp));
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
            // A dropped daemon stops as well.
            let _ = stop.await;
        })
        .await
        .map_err(io::Error::other)
}

/// Accepts connections as long as there is room for their kind.
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
        // Closes a connection without room: waiting here would let one kind exclude the other.
        let Ok(permit) = Arc::clone(kind).try_acquire_owned() else { continue };
        if callers.send(Ok(Caller { stream, peer, _permit: permit })).await.is_err() {
            return;
        }
    }
}
