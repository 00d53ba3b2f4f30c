//! The API of a host daemon (`causeway host`): gRPC on a Unix socket, and a blocking client.
//!
//! [`proto`] has the messages, generated from `proto/host.proto`. The crate `host` has the server. The daemon
//! identifies callers by SO_PEERCRED, so clients need no credentials.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use proto::host_service_client::HostServiceClient;

/// Messages and service of `proto/host.proto`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("causeway.host.v1");
}

/// Default socket of a host daemon.
pub const DEFAULT_SOCKET: &str = "/run/causeway/host.sock";
/// Time-out of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit of a response in bytes: the `Inspect` tree of 30,000 queue pairs fits.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// A monitor's request for an RDMA NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NicRequest {
    /// Name of the VM.
    pub vm: String,
    /// Name of the NIC, unique in the VM.
    pub name: String,
    /// MAC address. If `None`, the daemon derives one from both names, which is always the same.
    pub mac: Option<[u8; 6]>,
    /// Segment: VMs of the same segment can reach each other.
    pub segment: String,
    /// A tap device that connects the segment to the host's network.
    pub tap: Option<String>,
    /// The VM migrates here from another host of the cluster.
    pub incoming: bool,
}

/// The daemon's sockets for a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSockets {
    /// One vfio-user socket per PCI function, function 0 first.
    pub functions: Vec<PathBuf>,
}

/// A request to a host daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No daemon listens at the socket.
    #[error("No host daemon answers at {}; start `causeway host` there", socket.display())]
    Connect {
        /// The socket's path.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon didn't respond in time.
    #[error("The host daemon at {} gave no answer to {request} within {} s", socket.display(), RESPONSE_TIMEOUT.as_secs())]
    Timeout {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: &'static str,
    },
    /// The connection broke, or the peer doesn't speak this service.
    #[error("The host daemon at {} broke off its answer to {request}", socket.display())]
    Broken {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: &'static str,
        /// The cause.
        #[source]
        source: Box<Status>,
    },
    /// The daemon refused the request.
    #[error("{reason}")]
    Refused {
        /// The daemon's message, one sentence.
        reason: String,
    },
    /// The response doesn't match the service.
    #[error("The host daemon at {} answered {request} with something that this version doesn't understand: {what}", socket.display())]
    NotUnderstood {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: &'static str,
        /// The problem.
        what: String,
    },
    /// This process can't create connections.
    #[error("The client of the host daemon could not be set up")]
    SetUp {
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// Requests a NIC from the daemon at `host_socket`, and blocks until its sockets exist, at most 30 seconds. A repeated
/// request for the same NIC replaces it. Works in a thread that may neither start threads nor open files.
///
/// # Errors
/// No daemon answers, or it refuses: [`HostError::Refused`] has its message.
pub fn attach_nic(host_socket: &Path, nic: &NicRequest) -> Result<NicSockets, HostError> {
    HostClient::new(host_socket).attach_nic(nic)
}

/// Registers a waiting monitor with the cluster until it is dropped. The open connection is enough; nothing is sent on
/// it.
#[derive(Debug)]
pub struct AwaitRegistration {
    /// This host's name in its cluster.
    pub host: String,
    /// The address to which sources connect.
    pub address: String,
    // Dropped before the runtime.
    _stream: tonic::Streaming<proto::AwaitVmReply>,
    _runtime: tokio::runtime::Runtime,
}

/// A client of one daemon. Each call opens its own connection and blocks the calling thread.
#[derive(Debug, Clone)]
pub struct HostClient {
    socket: PathBuf,
}

impl HostClient {
    /// Creates a client of the daemon at `socket`, without a connection.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Returns the socket's path.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// See [`attach_nic`].
    ///
    /// # Errors
    /// As there.
    pub fn attach_nic(&self, nic: &NicRequest) -> Result<NicSockets, HostError> {
        let request = proto::AttachNicRequest {
            vm: nic.vm.clone(),
            name: nic.name.clone(),
            mac: nic.mac.map(|mac| mac.to_vec()),
            segment: nic.segment.clone(),
            tap: nic.tap.clone(),
            mtu: None,
            incoming: nic.incoming,
        };
        let reply = self.call("AttachNic", async |client| client.attach_nic(request).await)?;
        if reply.functions.is_empty() {
            return Err(HostError::NotUnderstood {
                socket: self.socket.clone(),
                request: "AttachNic",
                what: "it names no sockets".to_owned(),
            });
        }
        Ok(NicSockets { functions: reply.functions.into_iter().map(PathBuf::from).collect() })
    }

    /// Detaches a NIC.
    ///
    /// # Errors
    /// No daemon answers, the NIC doesn't exist, or another user owns it.
    pub fn detach_nic(&self, vm: &str, name: &str) -> Result<(), HostError> {
        let request = proto::DetachNicRequest { vm: vm.to_owned(), name: name.to_owned() };
        self.call("DetachNic", async |client| client.detach_nic(request).await).map(drop)
    }

    /// Returns the NICs that this user may use.
    ///
    /// # Errors
    /// No daemon answers.
    pub fn list_nics(&self) -> Result<Vec<proto::Nic>, HostError> {
        let request = proto::ListNicsRequest {};
        Ok(self.call("ListNics", async |client| client.list_nics(request).await)?.nics)
    }

    /// Changes limits of a VM. Returns the number of devices that applied them.
    ///
    /// # Errors
    /// No daemon answers, the VM has no device, or this user has no permission.
    pub fn set_limits(&self, vm: &str, limits: proto::Limits) -> Result<u32, HostError> {
        let request = proto::SetLimitsRequest { vm: vm.to_owned(), limits: Some(limits) };
        Ok(self.call("SetLimits", async |client| client.set_limits(request).await)?.devices)
    }

    /// Returns the live tree, or the part below `path`.
    ///
    /// # Errors
    /// No daemon answers, or `path` doesn't exist.
    pub fn inspect(&self, path: Option<&str>) -> Result<serde_json::Value, HostError> {
        let request = proto::InspectRequest { path: path.unwrap_or_default().to_owned() };
        let reply = self.call("Inspect", async |client| client.inspect(request).await)?;
        serde_json::from_str(&reply.json).map_err(|error| HostError::NotUnderstood {
            socket: self.socket.clone(),
            request: "Inspect",
            what: error.to_string(),
        })
    }

    /// Exchanges one step of a migration between the VM's monitor and the daemon. Reports what the monitor has done,
    /// and blocks until the daemon has a next step, at most some seconds.
    ///
    /// # Errors
    /// No daemon answers, or it refuses: [`HostError::Refused`] has its message.
    pub fn move_vm(
        &self,
        vm: &str,
        step: proto::move_vm_request::Step,
    ) -> Result<proto::MoveVmReply, HostError> {
        let request = proto::MoveVmRequest { vm: vm.to_owned(), step: Some(step) };
        self.call("MoveVm", async |client| client.move_vm(request).await)
    }

    /// Registers a monitor that waits for a VM at this address, and blocks until the daemon has accepted it. The
    /// registration lasts until the returned value is dropped or this process ends.
    ///
    /// # Errors
    /// No daemon answers, or it refuses: [`HostError::Refused`] has its message.
    pub fn await_vm(&self, vm: &str, address: SocketAddr) -> Result<AwaitRegistration, HostError> {
        const REQUEST: &str = "AwaitVm";
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| HostError::SetUp { source })?;
        let request = proto::AwaitVmRequest { vm: vm.to_owned(), address: address.to_string() };
        let exchange = async {
            let mut client = HostServiceClient::new(self.connect().await?);
            let answer = client.await_vm(request).await.map_err(|status| self.error(REQUEST, status))?;
            let mut stream = answer.into_inner();
            let first = stream.message().await.map_err(|status| self.error(REQUEST, status))?;
            let first = first.ok_or_else(|| HostError::NotUnderstood {
                socket: self.socket.clone(),
                request: REQUEST,
                what: "it ended at once".to_owned(),
            })?;
            Ok((stream, first))
        };
        let timed = runtime.block_on(async { tokio::time::timeout(RESPONSE_TIMEOUT, exchange).await });
        let (stream, reply) = timed
            .unwrap_or_else(|_| Err(HostError::Timeout { socket: self.socket.clone(), request: REQUEST }))?;
        Ok(AwaitRegistration { host: reply.host, address: reply.address, _stream: stream, _runtime: runtime })
    }

    /// Returns the address with port at which a monitor waits for a VM on a host of the cluster.
    ///
    /// # Errors
    /// No daemon answers, or no monitor waits there: [`HostError::Refused`] has the message.
    pub fn find_waiting(&self, vm: &str, host: &str) -> Result<String, HostError> {
        let request = proto::FindWaitingRequest { vm: vm.to_owned(), host: host.to_owned() };
        Ok(self.call("FindWaiting", async |client| client.find_waiting(request).await)?.address)
    }

    /// Returns version and process of the daemon.
    ///
    /// # Errors
    /// No daemon answers.
    pub fn version(&self) -> Result<proto::VersionReply, HostError> {
        let request = proto::VersionRequest {};
        self.call("Version", async |client| client.version(request).await)
    }

    fn call<T>(
        &self,
        request: &'static str,
        call: impl AsyncFnOnce(&mut HostServiceClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, HostError> {
        // Everything runs on the calling thread: a sandboxed thread can't start another.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| HostError::SetUp { source })?;
        runtime.block_on(async {
            let exchange = async {
                let channel = self.connect().await?;
                let mut client =
                    HostServiceClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
                call(&mut client).await.map(tonic::Response::into_inner).map_err(|s| self.error(request, s))
            };
            match tokio::time::timeout(RESPONSE_TIMEOUT, exchange).await {
                Ok(answer) => answer,
                Err(_) => Err(HostError::Timeout { socket: self.socket.clone(), request }),
            }
        })
    }

    async fn connect(&self) -> Result<Channel, HostError> {
        let path = self.socket.clone();
        // gRPC requires a URI; nothing uses this one.
        let endpoint = Endpoint::from_static("http://localhost");
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move {
                loop {
                    match UnixStream::connect(&path).await {
                        // The listener's queue is full. The caller's time-out limits the retries.
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                        connected => return connected.map(TokioIo::new),
                    }
                }
            }
        });
        endpoint
            .connect_with_connector(connector)
            .await
            .map_err(|source| HostError::Connect { socket: self.socket.clone(), source: root_cause(source) })
    }

    fn error(&self, request: &'static str, status: Status) -> HostError {
        // A status that the daemon sent has no source. A status of the transport, for a broken connection or a peer
        // without gRPC, has one of these codes or a source.
        let transport = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
            || std::error::Error::source(&status).is_some();
        if transport {
            return HostError::Broken { socket: self.socket.clone(), request, source: Box::new(status) };
        }
        HostError::Refused { reason: status.message().to_owned() }
    }
}

/// Returns the innermost cause: the transport wraps the OS error several times.
pub(crate) fn root_cause(error: tonic::transport::Error) -> Box<dyn std::error::Error + Send + Sync> {
    let mut cause: &(dyn std::error::Error + 'static) = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    match cause.downcast_ref::<std::io::Error>() {
        Some(io) => match io.raw_os_error() {
            Some(code) => Box::new(std::io::Error::from_raw_os_error(code)),
            None => Box::new(std::io::Error::new(io.kind(), io.to_string())),
        },
        None => Box::new(error),
    }
}

#[cfg(test)]
mod tests;
