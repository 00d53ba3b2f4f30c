//! The gRPC service: checks what comes in, asks the registry, puts answers into messages.

use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use control_api::cluster::proto;
use control_api::cluster::proto::cluster_service_server::ClusterService;
use nomad::{Epoch, Incarnation, MigrationId, Node, VmId};
use telemetry::guest_log::GuestLog;
use tokio::sync::Semaphore;
use tonic::codegen::tokio_stream::Stream;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::keeper::{Handle, Keeper};
use crate::messages;
use crate::refusal::Refusal;
use crate::roles::Roles;
use crate::store_error::StoreError;

/// Messages of one host that wait to be carried out.
const MAX_MESSAGES_IN_FLIGHT: usize = 64;
/// Limit of peer pauses in one report.
const MAX_PEER_PAUSES: usize = 1024;

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub roles: Arc<Roles>,
    pub began: Instant,
    /// Whether callers have shown certificates.
    pub authenticated: bool,
}

/// The refusal's own words, and what it was caused by.
pub(crate) fn status(error: &Refusal) -> Status {
    let mut text = error.to_string();
    // The store's own sentence is in the text.
    let mut source = match error {
        Refusal::Store(error) => std::error::Error::source(error),
        _ => None,
    };
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    match error {
        Refusal::Invalid(_) => Status::invalid_argument(text),
        Refusal::Missing(_) => Status::not_found(text),
        Refusal::Conflict(_) => Status::aborted(text),
        Refusal::Old(_) => Status::failed_precondition(text),
        Refusal::TooMany(_) => Status::resource_exhausted(text),
        Refusal::Store(StoreError::NotLeading) => Roles::not_leading(text, ""),
        Refusal::Store(StoreError::Unknown) => Status::unavailable(text),
        Refusal::Store(_) => Status::internal(text),
    }
}

impl Service {
    async fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, Instant) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Status> {
        ask(&self.roles.leading()?, job).await
    }

    /// A question: it changes nothing on the disk.
    async fn question<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, Instant) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Status> {
        self.roles.leading()?.question(job).await?.map_err(|error| status(&error))
    }
}

async fn ask<R: Send + 'static>(
    keeper: &Handle,
    job: impl FnOnce(&mut Keeper, Instant) -> Result<R, Refusal> + Send + 'static,
) -> Result<R, Status> {
    keeper.ask(job).await?.map_err(|error| status(&error))
}

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ClusterService for Service {
    async fn register_host(
        &self,
        request: Request<proto::RegisterHostRequest>,
    ) -> Result<Response<proto::RegisterHostReply>, Status> {
        let request = request.into_inner();
        let reply = self
            .ask(move |keeper, now| {
                let address = messages::socket_address(&request.fabric_address)?;
                let incarnation = Incarnation(request.incarnation);
                let speaker = keeper.registry.register_host(&request.name, address, incarnation, now)?;
                let lease = keeper.registry.lease().as_millis();
                Ok(proto::RegisterHostReply {
                    speaker: Some(messages::said(speaker)),
                    lease_milliseconds: u64::try_from(lease).unwrap_or(u64::MAX),
                    settings: Some(messages::settings(&keeper.registry)),
                })
            })
            .await?;
        Ok(Response::new(reply))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatReply>, Status> {
        let proto::HeartbeatRequest { speaker, waiting } = request.into_inner();
        self.question(move |keeper, now| {
            let speaker = messages::speaker(speaker)?;
            keeper.registry.heartbeat(speaker, now)?;
            let one = |waiting: proto::Waiting| Ok((waiting.vm, messages::socket_address(&waiting.address)?));
            let waiting = waiting.into_iter().map(one).collect::<Result<_, Refusal>>()?;
            keeper.registry.set_waiting(speaker, waiting, now)
        })
        .await?;
        Ok(Response::new(proto::HeartbeatReply {}))
    }

    async fn find_waiting(
        &self,
        request: Request<proto::FindWaitingRequest>,
    ) -> Result<Response<proto::FindWaitingReply>, Status> {
        let proto::FindWaitingRequest { vm, host } = request.into_inner();
        let address = self.question(move |keeper, _| keeper.registry.find_waiting(&vm, &host)).await?;
        Ok(Response::new(proto::FindWaitingReply { address: address.to_string() }))
    }

    async fn register_vm(
        &self,
        request: Request<proto::RegisterVmRequest>,
    ) -> Result<Response<proto::RegisterVmReply>, Status> {
        let request = request.into_inner();
        let registered = self
            .ask(move |keeper, now| {
                let speaker = messages::speaker(request.speaker)?;
                let nics = messages::nics(request.nics)?;
                keeper.registry.register_vm(speaker, &request.name, Epoch(request.epoch), nics, now)
            })
            .await?;
        Ok(Response::new(proto::RegisterVmReply {
            vm: registered.vm.0,
            epoch: registered.epoch.0,
            refused: registered.refused,
            after: registered.after.0,
        }))
    }

    async fn end_vm(
        &self,
        request: Request<proto::EndVmRequest>,
    ) -> Result<Response<proto::EndVmReply>, Status> {
        let request = request.into_inner();
        self.ask(move |keeper, now| {
            let speaker = messages::speaker(request.speaker)?;
            keeper.registry.end_vm(speaker, VmId(request.vm), Epoch(request.epoch), now)
        })
        .await?;
        Ok(Response::new(proto::EndVmReply {}))
    }

    async fn forget_host(
        &self,
        request: Request<proto::ForgetHostRequest>,
    ) -> Result<Response<proto::ForgetHostReply>, Status> {
        let name = request.into_inner().name;
        let lost = self.ask(move |keeper, now| keeper.registry.forget_host(&name, now)).await?;
        Ok(Response::new(proto::ForgetHostReply { lost }))
    }

    async fn claim_vm(
        &self,
        request: Request<proto::ClaimVmRequest>,
    ) -> Result<Response<proto::ClaimVmReply>, Status> {
        let request = request.into_inner();
        let reply = self
            .ask(move |keeper, now| {
                let speaker = messages::speaker(request.speaker)?;
                let epoch = Epoch(request.epoch);
                let claimed = keeper.registry.claim_vm(speaker, &request.vm, epoch, request.keeps, now)?;
                Ok(messages::claimed(keeper.registry.state(), &request.vm, claimed))
            })
            .await?;
        Ok(Response::new(reply))
    }

    async fn report_links(
        &self,
        request: Request<proto::ReportLinksRequest>,
    ) -> Result<Response<proto::ReportLinksReply>, Status> {
        let request = request.into_inner();
        self.ask(move |keeper, now| {
            let speaker = messages::speaker(request.speaker)?;
            let links: Vec<_> = request.links.iter().map(|link| (VmId(link.vm), VmId(link.peer))).collect();
            keeper.registry.report_links(speaker, &links, now)
        })
        .await?;
        Ok(Response::new(proto::ReportLinksReply {}))
    }

    async fn report_holds(
        &self,
        request: Request<proto::ReportHoldsRequest>,
    ) -> Result<Response<proto::ReportHoldsReply>, Status> {
        let request = request.into_inner();
        self.question(move |keeper, now| {
            let speaker = messages::speaker(request.speaker)?;
            keeper.registry.renew_lease(speaker, now)?;
            for hold in request.holds.iter().take(MAX_PEER_PAUSES) {
                let (migration, vm) = (MigrationId(hold.migration), VmId(hold.vm));
                keeper.peer_pauses.report(migration, vm, speaker.host, hold.microseconds);
            }
            Ok(())
        })
        .await?;
        Ok(Response::new(proto::ReportHoldsReply {}))
    }

    async fn get_holds(
        &self,
        request: Request<proto::GetHoldsRequest>,
    ) -> Result<Response<proto::GetHoldsReply>, Status> {
        let migration = request.into_inner().migration;
        let holds = self
            .question(move |keeper, _| {
                let named = |(vm, host, microseconds): (VmId, nomad::HostId, u64)| proto::Hold {
                    migration,
                    vm: vm.0,
                    microseconds,
                    host: keeper.registry.state().host_name(host),
                };
                Ok(keeper.peer_pauses.of(MigrationId(migration)).map(named).collect())
            })
            .await?;
        Ok(Response::new(proto::GetHoldsReply { holds }))
    }

    async fn lookup(
        &self,
        request: Request<proto::LookupRequest>,
    ) -> Result<Response<proto::LookupReply>, Status> {
        use proto::lookup_request::What;
        let what = request.into_inner().what;
        let reply = self
            .question(move |keeper, _| {
                let state = keeper.registry.state();
                let (vm, what) = match what {
                    Some(What::Id(id)) => (Some(VmId(id)), format!("VM {id}")),
                    Some(What::Name(name)) => {
                        let shown: String = name.chars().take(64).collect();
                        (state.vm(&name).map(|(vm, _)| vm), format!("VM {}", shown.escape_debug()))
                    }
                    Some(What::Address(address)) => {
                        let gid = messages::gid(&address.gid)?;
                        let segment: String = address.segment.chars().take(64).collect();
                        let shown = std::net::Ipv6Addr::from(gid);
                        let text = format!("VM with address {shown} in segment {}", segment.escape_debug());
                        (state.owner_of(&address.segment, &gid), text)
                    }
                    None => return Err(Refusal::Invalid("The question names no VM".to_owned())),
                };
                let missing = || Refusal::Missing(format!("The cluster has no {what}"));
                let vm = vm.and_then(|vm| messages::vm(state, vm)).ok_or_else(missing)?;
                let host = messages::host(&keeper.registry, nomad::HostId(vm.host));
                Ok(proto::LookupReply { vm: Some(vm), host })
            })
            .await?;
        Ok(Response::new(reply))
    }

    type WatchStream = ReceiverStream<Result<proto::WatchEvent, Status>>;

    async fn watch(
        &self,
        request: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let events = self
            .roles
            .leading()?
            .question(move |keeper, _| keeper.watch(request.instance, request.revision))
            .await??;
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn get_state(&self, _: Request<proto::GetStateRequest>) -> Result<Response<proto::State>, Status> {
        let (uptime_seconds, authenticated) = (self.began.elapsed().as_secs(), self.authenticated);
        let state = self
            .roles
            .leading()?
            .question(move |keeper, _| proto::State {
                instance: keeper.instance,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                uptime_seconds,
                authenticated,
                watchers: u32::try_from(keeper.watchers()).unwrap_or(u32::MAX),
                shown_revision: keeper.shown,
                ..messages::state(&keeper.registry)
            })
            .await?;
        Ok(Response::new(proto::State { role: Some(self.roles.role()), ..state }))
    }

    async fn get_role(&self, _: Request<proto::GetRoleRequest>) -> Result<Response<proto::Role>, Status> {
        Ok(Response::new(self.roles.role()))
    }

    async fn set_group(
        &self,
        _: Request<proto::SetGroupRequest>,
    ) -> Result<Response<proto::SetGroupReply>, Status> {
        Err(Status::failed_precondition(
            "SetGroup is gone: the cluster service has no named groups; `causeway migrate --group` names the VMs that move together",
        ))
    }

    async fn migrate(
        &self,
        request: Request<proto::MigrateRequest>,
    ) -> Result<Response<proto::MigrateReply>, Status> {
        let proto::MigrateRequest { wishes, speaker, together, attempt } = request.into_inner();
        let reply = self
            .ask(move |keeper, now| {
                let [wish] = &wishes[..] else {
                    return Err(Refusal::Invalid(format!(
                        "Migrate moves one VM, which its host's daemon asks for, and not {}: `causeway migrate --group` names the VMs that move together",
                        wishes.len()
                    )));
                };
                let (vm, host) = (wish.vm.as_str(), wish.host.as_str());
                let Some(speaker) = speaker else {
                    let vm: String = vm.chars().take(64).collect();
                    return Err(Refusal::Invalid(format!(
                        "Migrate of VM {} doesn't say which host asks: it is for the VM's daemon, of this release; `causeway migrate` on that host has it asked for",
                        vm.escape_debug()
                    )));
                };
                keeper.registry.check_requester(messages::speaker(Some(speaker))?, vm, now)?;
                if together.is_empty() {
                    let begun = keeper.migrate(&[(wish.vm.clone(), wish.host.clone())], now)?;
                    return Ok(proto::MigrateReply { migration: begun.0, missing: Vec::new() });
                }
                keeper.migrate_together((vm, host), attempt, &together, now)
            })
            .await?;
        Ok(Response::new(reply))
    }

    async fn cancel_migration(
        &self,
        request: Request<proto::CancelMigrationRequest>,
    ) -> Result<Response<proto::CancelMigrationReply>, Status> {
        let proto::CancelMigrationRequest { migration, vm } = request.into_inner();
        self.ask(move |keeper, now| {
            if vm.is_empty() {
                return keeper.registry.cancel(MigrationId(migration), now);
            }
            keeper.group_requests.withdraw(&vm);
            Ok(())
        })
        .await?;
        Ok(Response::new(proto::CancelMigrationReply {}))
    }

    type CoordinateStream = Answers<proto::Envelope>;

    async fn coordinate(
        &self,
        request: Request<Streaming<proto::Envelope>>,
    ) -> Result<Response<Self::CoordinateStream>, Status> {
        let mut incoming = request.into_inner();
        let none = || Status::invalid_argument("A host's first message says who it is; none came");
        let first = parse(&incoming.message().await?.ok_or_else(none)?)?;
        let Node::Host(host) = first.from else {
            return Err(Status::invalid_argument("The message isn't a host's"));
        };
        let leading = self.roles.leading()?;
        let outgoing = ask(&leading, move |keeper, now| {
            // The answer to the first message goes to the stream that brought it.
            let speaker = crate::registry::Speaker { host, incarnation: first.incarnation };
            keeper.registry.heartbeat(speaker, now)?;
            let outgoing = keeper.attach(host);
            keeper.registry.message(first, now)?;
            Ok(outgoing)
        })
        .await?;
        tokio::spawn(async move {
            let room = Arc::new(Semaphore::new(MAX_MESSAGES_IN_FLIGHT));
            while let Ok(Some(envelope)) = incoming.message().await {
                let Ok(message) = parse(&envelope) else { return };
                if message.from != Node::Host(host) {
                    return;
                }
                // Of this term: the next one has other streams.
                if !leading.term.holds() {
                    return;
                }
                // The next message doesn't wait for the write of this one: hosts repeat what isn't answered, and would send faster than writes end.
                let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
                leading.post(move |keeper, now| {
                    drop(permit);
                    let passed = match message.to {
                        Node::Coordinator => keeper.registry.message(message, now),
                        // It shows nothing of what the coordinator decides, and needs no write.
                        Node::Host(_) => keeper.pass_on(&message, now),
                    };
                    if let Err(error) = passed {
                        static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
                        telemetry::guest_warn!(LOG, "A message of {host} is refused: {error}");
                    }
                });
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}

fn parse(envelope: &proto::Envelope) -> Result<nomad::Message, Status> {
    nomad::wire::parse(&envelope.message).map_err(|error| {
        Status::invalid_argument(format!("A message of the migration protocol is wrong: {error}"))
    })
}
