//! The API of the cluster service (`causeway cluster`): gRPC over TCP, with mutual TLS if keys are configured.
//!
//! [`proto`] has the messages, generated from `proto/cluster.proto`. The crate `cluster` has the server. A service with
//! keys answers only clients with a certificate of the cluster's authority. A service without keys authenticates no
//! client.

use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri};
use tonic::{Code, Status};

use proto::cluster_service_client::ClusterServiceClient;

/// Messages and service of `proto/cluster.proto`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("causeway.cluster.v1");
}

/// Default time-out of a connection, and of a response, unless the hosts' lease is longer.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// Upper limit of these time-outs.
const MAX_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out of the query whether an instance leads. Instances that don't answer are skipped.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Metadata key in the response of an instance that doesn't lead: the leader's address, or nothing.
pub const LEADER: &str = "causeway-leader";
/// Limit of a message in bytes: the state of 65,536 VMs fits.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Keys for mutual TLS.
#[derive(Clone)]
pub struct Keys {
    /// The authority of the other side's certificates, PEM.
    pub authority: Vec<u8>,
    /// The own certificate with its chain up to the authority, PEM.
    pub certificate: Vec<u8>,
    /// The certificate's private key, PEM.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// Reads the three files.
    ///
    /// # Errors
    /// A file can't be read, or contains no PEM.
    pub fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Self, ClusterError> {
        let read = |path: &Path, label: &str, what: &'static str| {
            let bytes = std::fs::read(path).map_err(|source| ClusterError::File {
                path: path.to_owned(),
                what,
                source,
            })?;
            if String::from_utf8_lossy(&bytes).contains(label) {
                Ok(bytes)
            } else {
                Err(ClusterError::NotPem { path: path.to_owned(), what })
            }
        };
        Ok(Self {
            authority: read(authority, "BEGIN CERTIFICATE", "certificate")?,
            certificate: read(certificate, "BEGIN CERTIFICATE", "certificate")?,
            key: read(key, "PRIVATE KEY", "private key")?,
        })
    }
}

/// A request to the cluster service failed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The address is invalid.
    #[error("\"{}\" is no address of a cluster service: write HOST:PORT", address.escape_debug())]
    Address {
        /// The address as given.
        address: String,
        /// The cause if a name couldn't be resolved.
        #[source]
        source: Option<std::io::Error>,
    },
    /// A key file can't be read.
    #[error("The {what} {} can't be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A key file contains no PEM.
    #[error("{} holds no {what} in PEM format", path.display())]
    NotPem {
        /// The file.
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
    },
    /// Certificate, key and authority don't match.
    #[error("The certificate and key for the cluster service can't be used")]
    Keys(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No service answers.
    #[error("No cluster service answers at {service}; is `causeway cluster serve` running there{}?", if *encrypted { ", with keys of the same authority" } else { ", without keys" })]
    Connect {
        /// The service's address.
        service: String,
        /// Whether the connection used TLS.
        encrypted: bool,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The service didn't respond in time.
    #[error("The cluster service at {service} gave no answer to {request} within {} s", after.as_secs())]
    Timeout {
        /// The service's address.
        service: String,
        /// The time-out.
        after: Duration,
        /// The request.
        request: &'static str,
    },
    /// The connection broke.
    #[error("The cluster service at {service} broke off its answer to {request}; {}", if *encrypted { "has its authority signed this certificate?" } else { "if it runs with keys, give --ca, --cert and --key" })]
    Broken {
        /// The service's address.
        service: String,
        /// Whether the connection used TLS.
        encrypted: bool,
        /// The request.
        request: &'static str,
        /// The cause.
        #[source]
        source: Box<Status>,
    },
    /// The instance doesn't lead. It has done nothing.
    #[error("{reason}")]
    NotLeading {
        /// The leader's address, if the instance knows it.
        leader: Option<String>,
        /// The instance's message.
        reason: String,
    },
    /// None of the instances leads.
    #[error("None of the cluster service's instances leads: {}", responses.join("; "))]
    NoLeader {
        /// Each instance's message or error.
        responses: Vec<String>,
    },
    /// The service refused the request.
    #[error("{reason}")]
    Refused {
        /// The gRPC code.
        code: Code,
        /// The service's message, one sentence.
        reason: String,
    },
    /// This process can't create connections.
    #[error("The client of the cluster service could not be set up")]
    SetUp(#[source] std::io::Error),
}

impl ClusterError {
    /// Returns whether the service responded with a refusal.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// An instance of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Instance {
    /// The address as given: `HOST:PORT`.
    name: String,
    /// The host name or address that certificates must contain.
    host: String,
    addresses: Vec<SocketAddr>,
}

impl Instance {
    fn new(address: &str) -> Result<Self, ClusterError> {
        let wrong = |source| ClusterError::Address { address: address.chars().take(300).collect(), source };
        let (host, port) = address.rsplit_once(':').ok_or_else(|| wrong(None))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port: u16 = port.parse().map_err(|_| wrong(None))?;
        if host.is_empty() || port == 0 {
            return Err(wrong(None));
        }
        let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(|error| wrong(Some(error)))?.collect();
        if addresses.is_empty() {
            return Err(wrong(None));
        }
        Ok(Self { name: address.to_owned(), host: host.to_owned(), addresses })
    }
}

/// An instance's address, and its response about its role.
pub type InstanceRole = (String, Result<proto::Role, ClusterError>);

/// Address of a cluster service, and parameters of its connections. Holds no connection.
#[derive(Debug, Clone)]
pub struct Service {
    /// The addresses as given: `HOST:PORT`, or several separated by commas.
    name: String,
    instances: Vec<Instance>,
    /// A leader that isn't in the list, which one of the instances named.
    hint: Arc<Mutex<Option<Instance>>>,
    keys: Option<Keys>,
    /// Time-out in milliseconds that follows from the service's lease; 0 until the lease is known.
    timeout_ms: Arc<AtomicU64>,
}

impl Service {
    /// Resolves the address of a service, or the addresses of its instances (separated by commas), once.
    ///
    /// # Errors
    /// An address is invalid, or its name can't be resolved.
    pub fn new(addresses: &str, keys: Option<Keys>) -> Result<Self, ClusterError> {
        let instances: Vec<_> = addresses.split(',').map(Instance::new).collect::<Result<_, _>>()?;
        Ok(Self {
            name: addresses.to_owned(),
            instances,
            hint: Arc::default(),
            keys,
            timeout_ms: Arc::new(AtomicU64::new(0)),
        })
    }

    /// Returns the time-out of a connection, and of a response.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)).clamp(TIMEOUT, MAX_TIMEOUT)
    }

    /// Sets the time-out of responses to five sixths of the hosts' lease. On slow machines, where hosts get a longer
    /// lease, the service gets a longer time-out as well.
    pub fn set_lease(&self, lease: Duration) {
        let timeout_ms = u64::try_from(lease.as_millis() / 6 * 5).unwrap_or(u64::MAX);
        self.timeout_ms.store(timeout_ms, Ordering::Relaxed);
    }

    /// Returns the addresses as given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the TCP ports of all instances.
    #[must_use]
    pub fn ports(&self) -> BTreeSet<u16> {
        self.instances.iter().flat_map(|instance| &instance.addresses).map(SocketAddr::port).collect()
    }

    fn hint(&self) -> MutexGuard<'_, Option<Instance>> {
        self.hint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the instances to connect to.
    fn candidates(&self) -> Vec<Instance> {
        let mut all = self.instances.clone();
        all.extend(self.hint().clone().filter(|hint| !self.instances.contains(hint)));
        all
    }

    /// Stores the leader that an instance named. It must be an address: a sandboxed process can't resolve names.
    fn set_leader_hint(&self, leader: &str) {
        if leader.parse::<SocketAddr>().is_ok()
            && !self.instances.iter().any(|instance| instance.name == leader)
        {
            *self.hint() = Instance::new(leader).ok();
        }
    }

    /// Returns whether connections are mutually authenticated and encrypted.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.keys.is_some()
    }

    /// Connects to the service. If it has several instances, connects to the leader.
    ///
    /// # Errors
    /// No instance answers, the keys don't match, or no instance leads.
    pub async fn connect(&self) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        let candidates = self.candidates();
        if let [only] = candidates.as_slice() {
            return self.connect_to(only).await;
        }
        // In parallel: an instance that doesn't answer must not delay the others.
        let mut probes = JoinSet::new();
        for instance in candidates {
            let service = self.clone();
            probes
                .spawn(async move { service.probe(&instance).await.map_err(|error| (instance.name, error)) });
        }
        let (mut responses, mut errors) = (Vec::new(), Vec::new());
        while let Some(probe) = probes.join_next().await {
            match probe {
                Ok(Ok(client)) => return Ok(client),
                Ok(Err((name, error))) => {
                    if let ClusterError::NotLeading { leader: Some(leader), .. } = &error {
                        self.set_leader_hint(leader);
                    }
                    responses.push(format!("{name}: {error}"));
                    errors.push(error);
                }
                // A task that panicked or was cancelled has no result.
                Err(_) => {}
            }
        }
        // If the hint leads nowhere, the next attempt ignores it.
        if !errors.iter().any(|error| matches!(error, ClusterError::NotLeading { leader: Some(_), .. })) {
            *self.hint() = None;
        }
        responses.sort();
        Err(ClusterError::NoLeader { responses })
    }

    /// Connects to an instance if it leads.
    async fn probe(&self, instance: &Instance) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        let timed_out = || ClusterError::Timeout {
            service: instance.name.clone(),
            after: PROBE_TIMEOUT,
            request: "GetRole",
        };
        let (client, role) = tokio::time::timeout(PROBE_TIMEOUT, async {
            let mut client = self.connect_to(instance).await?;
            let role = client.get_role(proto::GetRoleRequest {}).await;
            Ok::<_, ClusterError>((
                client,
                role.map_err(|status| self.error("GetRole", status))?.into_inner(),
            ))
        })
        .await
        .map_err(|_| timed_out())??;
        if role.leads {
            return Ok(client);
        }
        let leader = Some(role.leader).filter(|leader| !leader.is_empty());
        let reason = match &leader {
            Some(leader) => format!("it doesn't lead, {leader} does"),
            None if role.store_answers => "it knows none that leads".to_owned(),
            None => role.store_error,
        };
        Err(ClusterError::NotLeading { leader, reason })
    }

    /// Queries each instance's role, in the given order. Blocks.
    ///
    /// # Errors
    /// This process can't create connections.
    pub fn roles(&self) -> Result<Vec<InstanceRole>, ClusterError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClusterError::SetUp)?;
        runtime.block_on(async {
            let mut queries = JoinSet::new();
            for (place, instance) in self.instances.iter().cloned().enumerate() {
                let service = self.clone();
                queries.spawn(async move {
                    let request = "GetRole";
                    let query = async {
                        let mut client = service.connect_to(&instance).await?;
                        service.within(request, client.get_role(proto::GetRoleRequest {})).await
                    };
                    let role = tokio::time::timeout(PROBE_TIMEOUT, query).await;
                    let timed_out = ClusterError::Timeout {
                        service: instance.name.clone(),
                        after: PROBE_TIMEOUT,
                        request,
                    };
                    (place, instance.name, role.unwrap_or(Err(timed_out)))
                });
            }
            let mut roles = queries.join_all().await;
            roles.sort_by_key(|(place, ..)| *place);
            Ok(roles.into_iter().map(|(_, name, role)| (name, role)).collect())
        })
    }

    async fn connect_to(&self, instance: &Instance) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        // gRPC requires a URI; the connector ignores it.
        let mut endpoint = Endpoint::from_static("http://cluster").tcp_nodelay(true);
        // With TLS 1.3 the client's handshake completes before the server has checked its certificate. So the first
        // response reports a refusal.
        if let Some(keys) = &self.keys {
            let tls = ClientTlsConfig::new()
                .domain_name(instance.host.clone())
                .ca_certificate(Certificate::from_pem(&keys.authority))
                .identity(Identity::from_pem(&keys.certificate, &keys.key));
            endpoint = Endpoint::from_static("https://cluster")
                .tcp_nodelay(true)
                .tls_config(tls)
                .map_err(|source| ClusterError::Keys(source.into()))?;
        }
        let endpoint = endpoint
            .connect_timeout(self.timeout())
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(self.timeout())
            .keep_alive_while_idle(true);
        let addresses = instance.addresses.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let addresses = addresses.clone();
            async move {
                let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
                for address in addresses {
                    match TcpStream::connect(address).await {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(TokioIo::new(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        });
        let connected =
            tokio::time::timeout(self.timeout(), endpoint.connect_with_connector(connector)).await;
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| ClusterError::Connect {
            service: instance.name.clone(),
            encrypted: self.keys.is_some(),
            source,
        };
        let channel = match connected {
            Ok(connected) => connected.map_err(|error| failed(crate::host::root_cause(error)))?,
            Err(_) => return Err(failed(std::io::Error::from(std::io::ErrorKind::TimedOut).into())),
        };
        Ok(ClusterServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// Sends one request on a new connection, and blocks the calling thread until the response.
    ///
    /// # Errors
    /// No service answers, or the service refuses: [`ClusterError::Refused`] has its message.
    pub fn ask<T>(
        &self,
        request: &'static str,
        call: impl AsyncFnOnce(&mut ClusterServiceClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, ClusterError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClusterError::SetUp)?;
        runtime.block_on(async {
            let mut client = self.connect().await?;
            if self.candidates().len() == 1 {
                // The only known address may be one of several instances.
                let role = client.get_role(proto::GetRoleRequest {});
                if let Ok(Ok(role)) = tokio::time::timeout(PROBE_TIMEOUT, role).await
                    && !role.get_ref().leads
                {
                    self.set_leader_hint(&role.get_ref().leader);
                    if self.hint().is_some() {
                        client = self.connect().await?;
                    }
                }
            }
            self.within(request, call(&mut client)).await
        })
    }

    /// Returns the service's whole state. Blocks.
    ///
    /// # Errors
    /// As [`Service::ask`].
    pub fn state(&self) -> Result<proto::State, ClusterError> {
        self.ask("GetState", async |client| client.get_state(proto::GetStateRequest {}).await)
    }

    /// Removes a host that is permanently gone from the cluster. Returns the names of the VMs that are lost with it.
    /// Blocks.
    ///
    /// # Errors
    /// As [`Service::ask`]. The service refuses while the host reports.
    pub fn forget(&self, host: &str) -> Result<Vec<String>, ClusterError> {
        let request = proto::ForgetHostRequest { name: host.to_owned() };
        Ok(self.ask("ForgetHost", async |client| client.forget_host(request).await)?.lost)
    }

    /// Waits for a response until the time-out.
    ///
    /// # Errors
    /// The time-out expires, or the service refuses.
    pub async fn within<T>(
        &self,
        request: &'static str,
        answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, ClusterError> {
        let after = self.timeout();
        match tokio::time::timeout(after, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.error(request, status)),
            Err(_) => Err(ClusterError::Timeout { service: self.name.clone(), after, request }),
        }
    }

    /// Converts a status into an error.
    #[must_use]
    pub fn error(&self, request: &'static str, status: Status) -> ClusterError {
        if let Some(leader) = status.metadata().get(LEADER) {
            let leader = leader.to_str().ok().filter(|leader| !leader.is_empty()).map(str::to_owned);
            if let Some(leader) = &leader {
                self.set_leader_hint(leader);
            }
            return ClusterError::NotLeading { leader, reason: status.message().to_owned() };
        }
        // A status that the service sent has no source. A status of the transport has one of these codes or a source.
        let transport = matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
            || std::error::Error::source(&status).is_some();
        if transport {
            let (service, encrypted) = (self.name.clone(), self.keys.is_some());
            return ClusterError::Broken { service, encrypted, request, source: Box::new(status) };
        }
        ClusterError::Refused { code: status.code(), reason: status.message().to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Service;

    /// The time-out is five sixths of a host's lease, within the default and the upper limit.
    #[test]
    fn the_timeout_follows_the_lease_within_bounds() {
        let service = Service::new("127.0.0.1:1", None).unwrap();
        assert_eq!(service.timeout(), Duration::from_secs(5), "no lease is known");
        for (lease, timeout) in [(1, 5), (6, 5), (30, 25), (3600, 60)] {
            service.clone().set_lease(Duration::from_secs(lease));
            assert_eq!(service.timeout(), Duration::from_secs(timeout), "lease {lease} s");
        }
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for wrong in ["", "h", ":1", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:99999"] {
            let error = Service::new(wrong, None).map(drop).unwrap_err().to_string();
            assert!(error.contains("write HOST:PORT"), "{error}");
        }
        let service = Service::new("[::1]:4793", None).unwrap();
        assert_eq!((service.ports().first(), service.instances[0].host.as_str()), (Some(&4793), "::1"));
        let several = Service::new("127.0.0.1:1,127.0.0.2:1,127.0.0.3:2", None).unwrap();
        assert_eq!(several.ports().into_iter().collect::<Vec<_>>(), [1, 2]);
        assert!(Service::new("127.0.0.1:1,", None).is_err());
    }

    /// An instance may name a leader that isn't in the list. An address is used; a name is never resolved.
    #[test]
    fn a_leader_outside_the_list_is_used_if_it_is_an_address() {
        let service = Service::new("127.0.0.1:1", None).unwrap();
        let candidates = |service: &Service| service.candidates().len();
        for leader in ["127.0.0.1:1", "h1:4793", "", "127.0.0.2"] {
            service.set_leader_hint(leader);
            assert_eq!(candidates(&service), 1, "{leader}");
        }
        service.set_leader_hint("127.0.0.2:1");
        assert_eq!(candidates(&service.clone()), 2);
    }
}
