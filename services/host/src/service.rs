//! The gRPC service: checks what comes in, asks the registry, puts answers into messages.

mod moving;
mod waiting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::host::proto;
use control_api::host::proto::host_service_server::HostService;
use hca::limits::Limits;
use telemetry::guest_log::GuestLog;
use tonic::{Request, Response, Status};
use vfio_user_protocol::device::Peer;

use crate::cluster::ClusterDirectory;
use crate::inspect;
use crate::neighbours::Neighbours;
use crate::registry::{NicInfo, NicKey, NicSpec, Registry, RegistryError};

/// How long an attach waits for the NIC's last monitor, which may have died this instant.
const DETACH_TIMEOUT: Duration = Duration::from_secs(1);

/// The service.
#[derive(Debug, Clone)]
pub struct Service {
    registry: Arc<Registry>,
    neighbours: Arc<Neighbours>,
    cluster: Option<Arc<ClusterDirectory>>,
    log: Arc<GuestLog>,
}

impl Service {
    /// Over both registries, and the cluster that the host belongs to.
    #[must_use]
    pub fn new(
        registry: Arc<Registry>,
        neighbours: Arc<Neighbours>,
        cluster: Option<Arc<ClusterDirectory>>,
    ) -> Self {
        Self { registry, neighbours, cluster, log: Arc::default() }
    }
}

fn peer<T>(request: &Request<T>) -> Result<Peer, Status> {
    let peer = request.extensions().get::<Peer>().copied();
    peer.ok_or_else(|| Status::internal("The caller's credentials are missing; this is a bug"))
}

/// The error's own words, and what they were caused by.
fn status(error: &RegistryError) -> Status {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    match error {
        RegistryError::Denied(_) => Status::permission_denied(text),
        RegistryError::NoSuchNic { .. } | RegistryError::NoSuchVm { .. } => Status::not_found(text),
        RegistryError::Name(_)
        | RegistryError::Mac { .. }
        | RegistryError::Mtu { .. }
        | RegistryError::Segment(crate::segments::SegmentError::Tap { .. }) => Status::invalid_argument(text),
        RegistryError::InUse { .. } | RegistryError::MacTaken { .. } => Status::failed_precondition(text),
        RegistryError::TooMany { .. } => Status::resource_exhausted(text),
        RegistryError::Segment(_) | RegistryError::Listen(_) | RegistryError::Serve { .. } => {
            Status::internal(text)
        }
    }
}

fn nic(info: NicInfo) -> proto::Nic {
    proto::Nic {
        vm: info.key.vm,
        name: info.key.name,
        mac: info.mac.to_vec(),
        segment: info.segment,
        tap: info.tap,
        mtu: info.mtu,
        uid: info.uid,
        functions: info.functions.iter().map(|path| path.display().to_string()).collect(),
        connected: info.connected,
    }
}

fn changed(mut limits: Limits, change: &proto::Limits) -> Limits {
    fn quota<T: Copy>(place: &mut T, change: Option<T>) {
        if let Some(value) = change {
            *place = value;
        }
    }
    fn rate(place: &mut Option<u64>, change: Option<u64>) {
        if let Some(value) = change {
            *place = (value > 0).then_some(value);
        }
    }
    quota(&mut limits.queue_pairs, change.queue_pairs);
    quota(&mut limits.completion_queues, change.completion_queues);
    quota(&mut limits.shared_receive_queues, change.shared_receive_queues);
    quota(&mut limits.memory_regions, change.memory_regions);
    quota(&mut limits.protection_domains, change.protection_domains);
    quota(&mut limits.contexts, change.contexts);
    quota(&mut limits.registered_bytes, change.registered_bytes);
    rate(&mut limits.messages_per_second, change.messages_per_second);
    rate(&mut limits.bytes_per_second, change.bytes_per_second);
    limits
}

#[tonic::async_trait]
impl HostService for Service {
    async fn attach_nic(
        &self,
        request: Request<proto::AttachNicRequest>,
    ) -> Result<Response<proto::AttachNicReply>, Status> {
        let peer = peer(&request)?;
        let request = request.into_inner();
        let mac = match request.mac {
            None => None,
            Some(bytes) => match <[u8; 6]>::try_from(bytes.as_slice()) {
                Ok(mac) => Some(mac),
                Err(_) => {
                    let text = format!("A MAC address has 6 bytes, the one given has {}", bytes.len());
                    return Err(Status::invalid_argument(text));
                }
            },
        };
        let spec = NicSpec {
            key: NicKey { vm: request.vm, name: request.name },
            mac,
            segment: request.segment,
            tap: request.tap,
            mtu: request.mtu,
            incoming: request.incoming,
        };
        let asked = Instant::now();
        loop {
            match self.registry.attach(&peer, &spec) {
                Ok(info) => {
                    let reply = nic(info);
                    let reply = proto::AttachNicReply { functions: reply.functions, mac: reply.mac };
                    return Ok(Response::new(reply));
                }
                Err(RegistryError::InUse { .. }) if asked.elapsed() < DETACH_TIMEOUT => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => {
                    let status = status(&error);
                    telemetry::guest_warn!(self.log, ?peer, "A NIC is refused: {}", status.message());
                    return Err(status);
                }
            }
        }
    }

    async fn detach_nic(
        &self,
        request: Request<proto::DetachNicRequest>,
    ) -> Result<Response<proto::DetachNicReply>, Status> {
        let peer = peer(&request)?;
        let request = request.into_inner();
        let key = NicKey { vm: request.vm, name: request.name };
        self.registry.detach(&peer, &key).map_err(|error| status(&error))?;
        Ok(Response::new(proto::DetachNicReply {}))
    }

    async fn list_nics(
        &self,
        request: Request<proto::ListNicsRequest>,
    ) -> Result<Response<proto::ListNicsReply>, Status> {
        let nics = self.registry.list(&peer(&request)?).map_err(|error| status(&error))?;
        Ok(Response::new(proto::ListNicsReply { nics: nics.into_iter().map(nic).collect() }))
    }

    async fn set_limits(
        &self,
        request: Request<proto::SetLimitsRequest>,
    ) -> Result<Response<proto::SetLimitsReply>, Status> {
        let peer = peer(&request)?;
        let request = request.into_inner();
        let change = request.limits.unwrap_or_default();
        let devices = self
            .registry
            .set_limits(&peer, &request.vm, |limits| changed(limits, &change))
            .map_err(|error| status(&error))?;
        Ok(Response::new(proto::SetLimitsReply { devices: u32::try_from(devices).unwrap_or(u32::MAX) }))
    }

    async fn inspect(
        &self,
        request: Request<proto::InspectRequest>,
    ) -> Result<Response<proto::InspectReply>, Status> {
        let peer = peer(&request)?;
        self.registry.access().check(&peer).map_err(|error| Status::permission_denied(error.to_string()))?;
        let path = request.into_inner().path;
        let tree = inspect::tree(&self.registry, &self.neighbours, peer.uid);
        match inspect::below(&tree, &path) {
            Ok(value) => Ok(Response::new(proto::InspectReply { json: value.to_string() })),
            Err(text) => Err(Status::not_found(text)),
        }
    }

    async fn move_vm(
        &self,
        request: Request<proto::MoveVmRequest>,
    ) -> Result<Response<proto::MoveVmReply>, Status> {
        let peer = peer(&request)?;
        let proto::MoveVmRequest { vm, step } = request.into_inner();
        self.registry.check_vm(&peer, &vm).map_err(|error| status(&error))?;
        let step =
            step.ok_or_else(|| Status::invalid_argument("The message says nothing of the migration"))?;
        let none = || {
            let text = "VM's RDMA NICs can't move: this host's daemon has no cluster service; start it with --cluster HOST:PORT --name HOST";
            Status::failed_precondition(format!("{vm}: a {text}"))
        };
        let cluster = self.cluster.as_ref().ok_or_else(none)?;
        Ok(Response::new(moving::step(cluster, &self.registry, &vm, step).await?))
    }

    type AwaitVmStream = waiting::Announcement;

    async fn await_vm(
        &self,
        request: Request<proto::AwaitVmRequest>,
    ) -> Result<Response<Self::AwaitVmStream>, Status> {
        let peer = peer(&request)?;
        self.registry.access().check(&peer).map_err(|error| Status::permission_denied(error.to_string()))?;
        let cluster = self.cluster.as_ref().ok_or_else(waiting::no_cluster)?;
        Ok(Response::new(waiting::announce(cluster, &request.into_inner())?))
    }

    async fn find_waiting(
        &self,
        request: Request<proto::FindWaitingRequest>,
    ) -> Result<Response<proto::FindWaitingReply>, Status> {
        let peer = peer(&request)?;
        self.registry.access().check(&peer).map_err(|error| Status::permission_denied(error.to_string()))?;
        let cluster = self.cluster.as_ref().ok_or_else(waiting::no_cluster)?;
        Ok(Response::new(waiting::find(cluster, &request.into_inner()).await?))
    }

    async fn version(
        &self,
        request: Request<proto::VersionRequest>,
    ) -> Result<Response<proto::VersionReply>, Status> {
        let peer = peer(&request)?;
        self.registry.access().check(&peer).map_err(|error| Status::permission_denied(error.to_string()))?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let host = self.cluster.as_ref().map(|cluster| cluster.host_name().to_owned()).unwrap_or_default();
        Ok(Response::new(proto::VersionReply { version, pid: std::process::id(), host }))
    }
}
