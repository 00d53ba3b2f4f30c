//! The API of a host daemon (`causeway host`): gRPC on a Unix socket, and a blocking client of it.
//!
//! The messages are in [`proto`], made from `proto/host.proto`; the server is in the crate `host`. The daemon knows
//! its callers by SO_PEERCRED, so there is nothing to log in with.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use proto::host_service_client::HostServiceClient;

/// The messages and the service, as `proto/host.proto` has them.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("causeway.host.v1");
}

/// Where the daemon of a host listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/causeway/host.sock";
/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// An answer is refused beyond this many bytes: 30,000 queue pairs fit into the tree that `Inspect` gives.
const LARGEST_ANSWER: usize = 64 << 20;

/// An RDMA NIC that a monitor wants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NicRequest {
    /// Name of the VM.
    pub vm: String,
    /// Name of the NIC, unique in the VM.
    pub name: String,
    /// MAC address; left out: the daemon makes one from both names, the same each time.
    pub mac: Option<[u8; 6]>,
    /// Segment: VMs on the same one reach each other.
    pub segment: String,
    /// A tap device that connects the segment with the host's network.
    pub tap: Option<String>,
    /// The VM comes from another host of the cluster.
    pub incoming: bool,
}

/// What the daemon made for a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSockets {
    /// One vfio-user socket per PCI function, function 0 first.
    pub functions: Vec<PathBuf>,
}

/// Something went wrong between us and a host daemon.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Nobody answers at the socket.
    #[error("No host daemon answers at {}; start `causeway host` there", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The daemon didn't answer in time.
    #[error("The host daemon at {} gave no answer to {request} within {} s", socket.display(), TIMEOUT.as_secs())]
    Timeout {
        /// The socket.
        socket: PathBuf,
        /// What was asked.
        request: &'static str,
    },
    /// The connection broke, or speaks something else than this service.
    #[error("The host daemon at {} broke off its answer to {request}", socket.display())]
    Broken {
        /// The socket.
        socket: PathBuf,
        /// What was asked.
        request: &'static str,
        /// Why.
        #[source]
        source: Box<Status>,
    },
    /// The daemon said no, in its own words.
    #[error("{reason}")]
    Refused {
        /// One sentence.
        reason: String,
    },
    /// The answer isn't what the service says.
    #[error("The host daemon at {} answered {request} with something that this version doesn't understand: {what}", socket.display())]
    NotUnderstood {
        /// The socket.
        socket: PathBuf,
        /// What was asked.
        request: &'static str,
        /// What is wrong.
        what: String,
    },
    /// This process can't make connections.
    #[error("The client of the host daemon could not be set up")]
    SetUp {
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Asks the daemon at `host_socket` for a NIC, and blocks until its sockets are there (half a minute at most). Asking
/// again for the same NIC gives it anew. Works in a thread that may neither start threads nor open files.
///
/// # Errors
/// When nobody answers, or the daemon refuses: then [`HostError::Refused`] has its sentence.
pub fn attach_nic(host_socket: &Path, nic: &NicRequest) -> Result<NicSockets, HostError> {
    HostClient::new(host_socket).attach_nic(nic)
}

/// The cluster knows that a monitor waits, until this is dropped. Nothing is read or written meanwhile: the open connection is enough.
#[derive(Debug)]
pub struct Awaiting {
    /// This host's name in its cluster.
    pub host: String,
    /// Where sources are told to connect.
    pub address: String,
    // Dropped first.
    _stream: tonic::Streaming<proto::AwaitVmReply>,
    _runtime: tokio::runtime::Runtime,
}

/// A client of one daemon. Each call makes a connection of its own and blocks the calling thread.
#[derive(Debug, Clone)]
pub struct HostClient {
    socket: PathBuf,
}

impl HostClient {
    /// A client of the daemon at `socket`; nothing is connected yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket.
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

    /// Takes a NIC away.
    ///
    /// # Errors
    /// When nobody answers, there is no such NIC, or it is somebody else's.
    pub fn detach_nic(&self, vm: &str, name: &str) -> Result<(), HostError> {
        let request = proto::DetachNicRequest { vm: vm.to_owned(), name: name.to_owned() };
        self.call("DetachNic", async |client| client.detach_nic(request).await).map(drop)
    }

    /// The NICs that this user may use.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn list_nics(&self) -> Result<Vec<proto::Nic>, HostError> {
        let request = proto::ListNicsRequest {};
        Ok(self.call("ListNics", async |client| client.list_nics(request).await)?.nics)
    }

    /// Changes limits of a VM; says how many devices took them.
    ///
    /// # Errors
    /// When nobody answers, the VM has no device, or this user may not.
    pub fn set_limits(&self, vm: &str, limits: proto::Limits) -> Result<u32, HostError> {
        let request = proto::SetLimitsRequest { vm: vm.to_owned(), limits: Some(limits) };
        Ok(self.call("SetLimits", async |client| client.set_limits(request).await)?.devices)
    }

    /// The live tree, or what is below `path`.
    ///
    /// # Errors
    /// When nobody answers or there is nothing at `path`.
    pub fn inspect(&self, path: Option<&str>) -> Result<serde_json::Value, HostError> {
        let request = proto::InspectRequest { path: path.unwrap_or_default().to_owned() };
        let reply = self.call("Inspect", async |client| client.inspect(request).await)?;
        serde_json::from_str(&reply.json).map_err(|error| HostError::NotUnderstood {
            socket: self.socket.clone(),
            request: "Inspect",
            what: error.to_string(),
        })
    }

    /// A monitor's part in the migration of its VM: says what it has done, and blocks until there is something to do, some seconds at most.
    ///
    /// # Errors
    /// When nobody answers, or the daemon refuses: then [`HostError::Refused`] has its sentence.
    pub fn move_vm(
        &self,
        vm: &str,
        step: proto::move_vm_request::Step,
    ) -> Result<proto::MoveVmReply, HostError> {
        let request = proto::MoveVmRequest { vm: vm.to_owned(), step: Some(step) };
        self.call("MoveVm", async |client| client.move_vm(request).await)
    }

    /// Says that a monitor waits for a VM at this address; blocks until the daemon has taken that. It is known to the cluster until what is
    /// returned is dropped, or this process ends.
    ///
    /// # Errors
    /// When nobody answers, or the daemon refuses: then [`HostError::Refused`] has its sentence.
    pub fn await_vm(&self, vm: &str, address: SocketAddr) -> Result<Awaiting, HostError> {
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
        let timed = runtime.block_on(async { tokio::time::timeout(TIMEOUT, exchange).await });
        let (stream, reply) = timed
            .unwrap_or_else(|_| Err(HostError::Timeout { socket: self.socket.clone(), request: REQUEST }))?;
        Ok(Awaiting { host: reply.host, address: reply.address, _stream: stream, _runtime: runtime })
    }

    /// Where a monitor waits for a VM on a host of the cluster, as an address with a port.
    ///
    /// # Errors
    /// When nobody answers, or no monitor waits there: then [`HostError::Refused`] has the sentence.
    pub fn find_waiting(&self, vm: &str, host: &str) -> Result<String, HostError> {
        let request = proto::FindWaitingRequest { vm: vm.to_owned(), host: host.to_owned() };
        Ok(self.call("FindWaiting", async |client| client.find_waiting(request).await)?.address)
    }

    /// Version and process of the daemon.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn version(&self) -> Result<proto::VersionReply, HostError> {
        let request = proto::VersionRequest {};
        self.call("Version", async |client| client.version(request).await)
    }

    fn call<T>(
        &self,
        request: &'static str,
        call: impl AsyncFnOnce(&mut HostServiceClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, HostError> {
        // Everything runs on the calling thread: a sandboxed one can start no other.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| HostError::SetUp { source })?;
        runtime.block_on(async {
            let exchange = async {
                let channel = self.connect().await?;
                let mut client = HostServiceClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
                call(&mut client).await.map(tonic::Response::into_inner).map_err(|s| self.error(request, s))
            };
            match tokio::time::timeout(TIMEOUT, exchange).await {
                Ok(answer) => answer,
                Err(_) => Err(HostError::Timeout { socket: self.socket.clone(), request }),
            }
        })
    }

    async fn connect(&self) -> Result<Channel, HostError> {
        let path = self.socket.clone();
        // gRPC needs a URI; nothing looks at this one.
        let endpoint = Endpoint::from_static("http://localhost");
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move {
                loop {
                    match UnixStream::connect(&path).await {
                        // The queue of those who wait to be accepted is full; the caller's time limit ends this.
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
        // A status that the daemon sent has no source; one that the transport made of a broken connection, or of a peer
        // that is no gRPC server, has one of these codes or a source.
        let transport = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
            || std::error::Error::source(&status).is_some();
        if transport {
            return HostError::Broken { socket: self.socket.clone(), request, source: Box::new(status) };
        }
        HostError::Refused { reason: status.message().to_owned() }
    }
}

/// The transport wraps the OS error several times, with texts that say nothing.
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
