//! The API of the cluster service (`causeway cluster`): gRPC over TCP, with mutual TLS where keys are given.
//!
//! The messages are in [`proto`], made from `proto/cluster.proto`; the server is in the crate `cluster`. Who has no certificate of the cluster's
//! authority isn't answered, where the service has one; where it has none, nobody is authenticated.

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

/// The messages and the service, as `proto/cluster.proto` has them.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("causeway.cluster.v1");
}

/// How long a connection, and then an answer, may take, where hosts' leases aren't longer.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// How long they may take at most.
const MAX_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an instance may take to say whether it leads; those that don't answer are passed over.
const PROBE: Duration = Duration::from_secs(2);
/// Metadata of an answer of an instance that doesn't lead: the address of the one that does, or nothing.
pub const LEADER: &str = "causeway-leader";
/// A message is refused beyond this many bytes: the state of 65,536 VMs fits.
pub const LARGEST_MESSAGE: usize = 64 << 20;

/// Keys for mutual TLS, read.
#[derive(Clone)]
pub struct Keys {
    /// The authority whose certificates the other side must have, PEM.
    pub authority: Vec<u8>,
    /// Own certificate, with those between it and the authority, PEM.
    pub certificate: Vec<u8>,
    /// Its private key, PEM.
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
    /// When one can't be read, or holds no PEM.
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

/// Something went wrong between us and the cluster service.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The address.
    #[error("\"{}\" is no address of a cluster service: write HOST:PORT", address.escape_debug())]
    Address {
        /// As given.
        address: String,
        /// Why, where a name couldn't be resolved.
        #[source]
        source: Option<std::io::Error>,
    },
    /// A file of keys.
    #[error("The {what} {} can't be read", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file of keys with something else in it.
    #[error("{} holds no {what} in PEM format", path.display())]
    NotPem {
        /// Which.
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
    },
    /// Certificate, key and authority don't make TLS.
    #[error("The certificate and key for the cluster service can't be used")]
    Keys(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Nobody answers.
    #[error("No cluster service answers at {service}; is `causeway cluster serve` running there{}?", if *encrypted { ", with keys of the same authority" } else { ", without keys" })]
    Connect {
        /// Where.
        service: String,
        /// Whether it was tried with TLS.
        encrypted: bool,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No answer in time.
    #[error("The cluster service at {service} gave no answer to {request} within {} s", after.as_secs())]
    Timeout {
        /// Where.
        service: String,
        /// How long was waited.
        after: Duration,
        /// What was asked.
        request: &'static str,
    },
    /// The connection broke.
    #[error("The cluster service at {service} broke off its answer to {request}; {}", if *encrypted { "has its authority signed this certificate?" } else { "if it runs with keys, give --ca, --cert and --key" })]
    Broken {
        /// Where.
        service: String,
        /// Whether it was tried with TLS.
        encrypted: bool,
        /// What was asked.
        request: &'static str,
        /// Why.
        #[source]
        source: Box<Status>,
    },
    /// The instance doesn't lead; nothing was done.
    #[error("{reason}")]
    NotLeading {
        /// Which one does, as far as it knows.
        leader: Option<String>,
        /// Its own words.
        reason: String,
    },
    /// None of several instances leads.
    #[error("None of the cluster service's instances leads: {}", said.join("; "))]
    NoLeader {
        /// What each said, or what is wrong with it.
        said: Vec<String>,
    },
    /// The service said no, in its own words.
    #[error("{reason}")]
    Refused {
        /// gRPC's code.
        code: Code,
        /// One sentence.
        reason: String,
    },
    /// This process can't make connections.
    #[error("The client of the cluster service could not be set up")]
    SetUp(#[source] std::io::Error),
}

impl ClusterError {
    /// Whether the service has answered, and said no.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// An instance of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Instance {
    /// As given: `HOST:PORT`.
    name: String,
    /// What certificates must be for.
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

/// What an instance says of itself, with its address.
pub type Said = (String, Result<proto::Role, ClusterError>);

/// Where a cluster service is, and how to speak with it. Nothing is connected yet.
#[derive(Debug, Clone)]
pub struct Service {
    /// As given: `HOST:PORT`, or several with commas between them.
    name: String,
    instances: Vec<Instance>,
    /// One that isn't among them, and of which one of them has said that it leads.
    hint: Arc<Mutex<Option<Instance>>>,
    keys: Option<Keys>,
    /// Milliseconds that the service's lease allows; 0: it has said nothing yet.
    patience: Arc<AtomicU64>,
}

impl Service {
    /// Resolves the address of a service, or of its instances with commas between them, once.
    ///
    /// # Errors
    /// When one is none, or its name can't be resolved.
    pub fn new(addresses: &str, keys: Option<Keys>) -> Result<Self, ClusterError> {
        let instances: Vec<_> = addresses.split(',').map(Instance::new).collect::<Result<_, _>>()?;
        Ok(Self {
            name: addresses.to_owned(),
            instances,
            hint: Arc::default(),
            keys,
            patience: Arc::new(AtomicU64::new(0)),
        })
    }

    /// How long a connection, and then an answer, may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.patience.load(Ordering::Relaxed)).clamp(TIMEOUT, MAX_TIMEOUT)
    }

    /// The service has said how long a host may be silent: it may take nearly as long for an answer from now on. Whoever gives hosts more time, on
    /// machines that stand still for seconds, gives it to the service as well.
    pub fn set_lease(&self, lease: Duration) {
        let patience = u64::try_from(lease.as_millis() / 6 * 5).unwrap_or(u64::MAX);
        self.patience.store(patience, Ordering::Relaxed);
    }

    /// As given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The TCP ports to which connections are made.
    #[must_use]
    pub fn ports(&self) -> BTreeSet<u16> {
        self.instances.iter().flat_map(|instance| &instance.addresses).map(SocketAddr::port).collect()
    }

    fn hint(&self) -> MutexGuard<'_, Option<Instance>> {
        self.hint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those to be asked.
    fn candidates(&self) -> Vec<Instance> {
        let mut all = self.instances.clone();
        all.extend(self.hint().clone().filter(|hint| !self.instances.contains(hint)));
        all
    }

    /// An instance has said that another leads. Names aren't resolved here: who sent this may not look names up any more.
    fn heard_of(&self, leader: &str) {
        if leader.parse::<SocketAddr>().is_ok()
            && !self.instances.iter().any(|instance| instance.name == leader)
        {
            *self.hint() = Instance::new(leader).ok();
        }
    }

    /// Whether both sides are authenticated and what they say is encrypted.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.keys.is_some()
    }

    /// Connects with the service; where it has several instances, with the one that leads.
    ///
    /// # Errors
    /// When nobody answers, or with other keys; when none of several leads.
    pub async fn connect(&self) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        let candidates = self.candidates();
        if let [only] = candidates.as_slice() {
            return self.connect_to(only).await;
        }
        // All at once: one that is gone or stopped doesn't hold the others up.
        let mut probes = JoinSet::new();
        for instance in candidates {
            let service = self.clone();
            probes.spawn(async move { service.probe(&instance).await.map_err(|said| (instance.name, said)) });
        }
        let (mut said, mut away) = (Vec::new(), Vec::new());
        while let Some(probe) = probes.join_next().await {
            match probe {
                Ok(Ok(client)) => return Ok(client),
                Ok(Err((name, error))) => {
                    if let ClusterError::NotLeading { leader: Some(leader), .. } = &error {
                        self.heard_of(leader);
                    }
                    said.push(format!("{name}: {error}"));
                    away.push(error);
                }
                // A task that has panicked or was ended has nothing to say.
                Err(_) => {}
            }
        }
        // Where a hint leads nowhere, the next attempt is without.
        if !away.iter().any(|error| matches!(error, ClusterError::NotLeading { leader: Some(_), .. })) {
            *self.hint() = None;
        }
        said.sort();
        Err(ClusterError::NoLeader { said })
    }

    /// Connects with an instance if it leads.
    async fn probe(&self, instance: &Instance) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        let late =
            || ClusterError::Timeout { service: instance.name.clone(), after: PROBE, request: "GetRole" };
        let (client, role) = tokio::time::timeout(PROBE, async {
            let mut client = self.connect_to(instance).await?;
            let role = client.get_role(proto::GetRoleRequest {}).await;
            Ok::<_, ClusterError>((
                client,
                role.map_err(|status| self.error("GetRole", status))?.into_inner(),
            ))
        })
        .await
        .map_err(|_| late())??;
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

    /// What each instance says of itself, in the order given; blocks.
    ///
    /// # Errors
    /// When this process can't make connections.
    pub fn roles(&self) -> Result<Vec<Said>, ClusterError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClusterError::SetUp)?;
        runtime.block_on(async {
            let mut asked = JoinSet::new();
            for (place, instance) in self.instances.iter().cloned().enumerate() {
                let service = self.clone();
                asked.spawn(async move {
                    let request = "GetRole";
                    let asked = async {
                        let mut client = service.connect_to(&instance).await?;
                        service.within(request, client.get_role(proto::GetRoleRequest {})).await
                    };
                    let role = tokio::time::timeout(PROBE, asked).await;
                    let late =
                        ClusterError::Timeout { service: instance.name.clone(), after: PROBE, request };
                    (place, instance.name, role.unwrap_or(Err(late)))
                });
            }
            let mut roles = asked.join_all().await;
            roles.sort_by_key(|(place, ..)| *place);
            Ok(roles.into_iter().map(|(_, name, role)| (name, role)).collect())
        })
    }

    async fn connect_to(&self, instance: &Instance) -> Result<ClusterServiceClient<Channel>, ClusterError> {
        // gRPC needs a URI; where connections go is the connector's affair.
        let mut endpoint = Endpoint::from_static("http://cluster").tcp_nodelay(true);
        // TLS 1.3 is done for the client before the server has looked at its certificate: a refusal comes with the first answer.
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
            .connect_timeout(self.patience())
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(self.patience())
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
            tokio::time::timeout(self.patience(), endpoint.connect_with_connector(connector)).await;
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
            .max_decoding_message_size(LARGEST_MESSAGE)
            .max_encoding_message_size(LARGEST_MESSAGE))
    }

    /// One question: connects, asks, and blocks the calling thread until the answer is there.
    ///
    /// # Errors
    /// When nobody answers, or the service refuses: then [`ClusterError::Refused`] has its sentence.
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
                // It may be one of several all the same.
                let role = client.get_role(proto::GetRoleRequest {});
                if let Ok(Ok(role)) = tokio::time::timeout(PROBE, role).await
                    && !role.get_ref().leads
                {
                    self.heard_of(&role.get_ref().leader);
                    if self.hint().is_some() {
                        client = self.connect().await?;
                    }
                }
            }
            self.within(request, call(&mut client)).await
        })
    }

    /// Everything that the service knows; blocks.
    ///
    /// # Errors
    /// As [`Service::ask`].
    pub fn state(&self) -> Result<proto::State, ClusterError> {
        self.ask("GetState", async |client| client.get_state(proto::GetStateRequest {}).await)
    }

    /// Has the cluster forget a host that is gone for good; blocks. Names of the VMs that are lost with it.
    ///
    /// # Errors
    /// As [`Service::ask`]; the service refuses while the host is heard of.
    pub fn forget(&self, host: &str) -> Result<Vec<String>, ClusterError> {
        let request = proto::ForgetHostRequest { name: host.to_owned() };
        Ok(self.ask("ForgetHost", async |client| client.forget_host(request).await)?.lost)
    }

    /// Waits for an answer as long as one may take.
    ///
    /// # Errors
    /// When it doesn't come, or says no.
    pub async fn within<T>(
        &self,
        request: &'static str,
        answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, ClusterError> {
        let after = self.patience();
        match tokio::time::timeout(after, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.error(request, status)),
            Err(_) => Err(ClusterError::Timeout { service: self.name.clone(), after, request }),
        }
    }

    /// What a status means.
    #[must_use]
    pub fn error(&self, request: &'static str, status: Status) -> ClusterError {
        if let Some(leader) = status.metadata().get(LEADER) {
            let leader = leader.to_str().ok().filter(|leader| !leader.is_empty()).map(str::to_owned);
            if let Some(leader) = &leader {
                self.heard_of(leader);
            }
            return ClusterError::NotLeading { leader, reason: status.message().to_owned() };
        }
        // A status that the service sent has no source; one that the transport made has one of these codes or a source.
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

    /// Answers may take five sixths of a host's lease, but neither less than they may by default nor longer than a user waits.
    #[test]
    fn patience_follows_the_lease_within_bounds() {
        let service = Service::new("127.0.0.1:1", None).unwrap();
        assert_eq!(service.patience(), Duration::from_secs(5), "nothing was said");
        for (lease, patience) in [(1, 5), (6, 5), (30, 25), (3600, 60)] {
            service.clone().set_lease(Duration::from_secs(lease));
            assert_eq!(service.patience(), Duration::from_secs(patience), "lease {lease} s");
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

    /// An instance may say that another leads, which the list doesn't have: an address is taken, a name isn't looked up.
    #[test]
    fn a_leader_that_is_not_on_the_list_is_asked_where_it_has_an_address() {
        let service = Service::new("127.0.0.1:1", None).unwrap();
        let candidates = |service: &Service| service.candidates().len();
        for said in ["127.0.0.1:1", "h1:4793", "", "127.0.0.2"] {
            service.heard_of(said);
            assert_eq!(candidates(&service), 1, "{said}");
        }
        service.heard_of("127.0.0.2:1");
        assert_eq!(candidates(&service.clone()), 2);
    }
}
