//! Metrics over HTTP: `GET /metrics`, on a socket for administrators and by TCP.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use telemetry::metrics::EncodeError;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limit of concurrent connections for metrics; more wait.
const READERS: usize = 16;
/// Timeout of a connection for metrics.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

type Source = Arc<dyn Fn() -> Result<String, EncodeError> + Send + Sync>;

/// The readers of metrics on all sockets, and the source of the text.
#[derive(Clone)]
pub(crate) struct Readers {
    source: Source,
    room: Arc<Semaphore>,
}

impl Readers {
    /// Serves the text of `source`, which is made for each request.
    pub fn new(source: impl Fn() -> Result<String, EncodeError> + Send + Sync + 'static) -> Self {
        Self { source: Arc::new(source), room: Arc::new(Semaphore::new(READERS)) }
    }

    /// Serves a Unix socket, to root and this process's own user.
    pub async fn serve_unix(self, listener: UnixListener) {
        loop {
            let Ok(permit) = Arc::clone(&self.room).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let allowed = stream
                        .peer_cred()
                        .is_ok_and(|credentials| crate::access::is_administrator(credentials.uid()));
                    tokio::spawn(answer(stream, Arc::clone(&self.source), allowed, permit));
                }
                Err(error) => no_more(&error).await,
            }
        }
    }

    /// Serves TCP, to any client.
    pub async fn serve_tcp(self, listener: TcpListener) {
        loop {
            let Ok(permit) = Arc::clone(&self.room).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(answer(stream, Arc::clone(&self.source), true, permit))),
                Err(error) => no_more(&error).await,
            }
        }
    }
}

/// Out of descriptors or memory: waits for others to release some.
pub(crate) async fn no_more(error: &io::Error) {
    tracing::warn!(%error, "A connection can't be accepted");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// Serves one connection.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    source: Source,
    allowed: bool,
    _permit: OwnedSemaphorePermit,
) {
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let source = Arc::clone(&source);
        async move { Ok::<_, Infallible>(respond(&request, &source, allowed)) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(5))
        .max_buf_size(16 << 10)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // A reader's error concerns only itself.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
}

fn respond(
    request: &Request<hyper::body::Incoming>,
    source: &Source,
    allowed: bool,
) -> Response<Full<Bytes>> {
    let (status, kind, text) = if !allowed {
        let text = "Only root and the daemon's own user may read its metrics\n".to_owned();
        (StatusCode::FORBIDDEN, "text/plain", text)
    } else if request.method() != Method::GET || request.uri().path() != "/metrics" {
        (StatusCode::NOT_FOUND, "text/plain", "There is GET /metrics and nothing else\n".to_owned())
    } else {
        match source() {
            Ok(text) => (StatusCode::OK, telemetry::metrics::CONTENT_TYPE, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{error}\n")),
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// Listens on a TCP address for metrics.
pub(crate) fn bind_metrics(address: SocketAddr) -> io::Result<StdTcpListener> {
    let listener = StdTcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
