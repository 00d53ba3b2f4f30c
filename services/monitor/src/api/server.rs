//! The API thread.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use telemetry::guest_log::GuestLog;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use super::VmControl;
use super::socket::{SocketFile, listen};

/// Limit of connections served at once. More wait.
const MAX_CONNECTIONS: usize = 16;
/// A connection is closed after this time, in any state.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of a request, bytes: the head, and what is read ahead of a body that no request has.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Time that responses in progress have when the API stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// System calls of the API thread once it serves, beyond those of every thread: tokio's event loop, accepting, peer credentials, and
/// reading and writing connections. System calls of [`VmControl`] are in the VM's own list.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    // hyper writes head and body in one call.
    libc::SYS_writev,
    libc::SYS_sendmsg,
    // At the end the socket file is checked and removed.
    libc::SYS_lstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_unlink,
];

/// Why the API can't be served.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Another monitor listens on the socket.
    #[error("A VM already answers at {}; choose another name or another API socket", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The socket can't be created.
    #[error("The API socket {} can't be {what}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The operation, as a past participle.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The event loop or the thread can't be created.
    #[error("The API's {what} can't be made")]
    Start {
        /// `event loop` or `thread`.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A listening socket that isn't served yet. Clients that connect wait.
#[derive(Debug)]
pub struct ApiListener {
    listener: UnixListener,
    file: SocketFile,
    runtime: tokio::runtime::Runtime,
    path: PathBuf,
    /// User whose clients are served, besides root's.
    user: u32,
}

impl ApiListener {
    /// Creates the socket. Fails if a VM already listens there. Replaces a socket that no process listens on.
    pub fn bind(path: &Path) -> Result<Self, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| ApiError::Start { what: "event loop", source })?;
        let (listener, file) = listen(path)?;
        let guard = runtime.enter();
        let listener = UnixListener::from_std(listener).map_err(|source| ApiError::Socket {
            path: path.to_owned(),
            what: "watched",
            source,
        })?;
        drop(guard);
        let user = rustix::process::geteuid().as_raw();
        Ok(Self { listener, file, runtime, path: path.to_owned(), user })
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves requests to `vm` on a thread called `api`. The thread first runs `prepare`, which can install its seccomp filter.
    pub fn serve(
        self,
        vm: Arc<dyn VmControl>,
        prepare: impl FnOnce() + Send + 'static,
    ) -> Result<ApiServer, ApiError> {
        let Self { listener, file, runtime, path, user } = self;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("api".to_owned())
            // Enough to serialize deep trees. The default of 2 MiB isn't touched either, but is reserved.
            .stack_size(512 << 10)
            .spawn(move || {
                prepare();
                let _file = file;
                runtime.block_on(accept_until(listener, user, vm, stopped));
            })
            .map_err(|source| ApiError::Start { what: "thread", source })?;
        Ok(ApiServer { stop: Some(stop), thread: Some(thread), path })
    }
}

/// The API in service. Dropping it stops it.
#[derive(Debug)]
pub struct ApiServer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl ApiServer {
    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Stops accepting requests, gives those in progress half a second, and removes the socket. Must not be called on the API thread.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has ended already.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The API thread has panicked");
        }
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.end();
    }
}

async fn accept_until(
    listener: UnixListener,
    user: u32,
    vm: Arc<dyn VmControl>,
    mut stopped: oneshot::Receiver<()>,
) {
    let router = super::document::router()
        .0
        .fallback(super::routes::not_found)
        .method_not_allowed_fallback(super::routes::wrong_method)
        .with_state(vm);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let log = GuestLog::new();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = &mut stopped => break,
            // Removes finished connections, so that the set doesn't grow.
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept(&listener, &places) => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                if is_allowed(&stream, user, &log) {
                    let router = router.clone();
                    connections.spawn(async move {
                        serve_connection(stream, router).await;
                        drop(place);
                    });
                }
            }
            Err(error) => {
                telemetry::guest_warn!(log, "A connection to the API could not be accepted: {error}");
                // Probably out of descriptors: retrying at once would spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    // Responses that are still incomplete are cut off.
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, all).await;
}

async fn accept(
    listener: &UnixListener,
    places: &Arc<Semaphore>,
) -> io::Result<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

/// Whether the peer's user is the monitor's, or root.
fn is_allowed(stream: &UnixStream, ours: u32, log: &GuestLog) -> bool {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == ours || peer.uid() == 0 => true,
        Ok(peer) => {
            telemetry::guest_warn!(log, "User {} may not use the API of this VM; refused", peer.uid());
            false
        }
        Err(error) => {
            telemetry::guest_warn!(log, "The user of an API connection can't be found out: {error}; refused");
            false
        }
    }
}

async fn serve_connection(stream: UnixStream, router: axum::Router) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_REQUEST_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "An API connection broke"),
        Err(_) => tracing::debug!("An API connection took too long and was closed"),
    }
}
