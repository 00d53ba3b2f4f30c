//! A cluster service that doesn't answer a request: the daemon reads messages of the migration protocol all the same.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use control_api::cluster::proto::cluster_service_server::{ClusterService, ClusterServiceServer};
use control_api::cluster::{Service, proto};
use host::cluster::ClusterConfig;
use host::{DaemonConfig, DirectorySource, FabricConfig};
use nomad::{AbortReason, Body, Epoch, HostId, Incarnation, Message, MigrationId, Move, Node, VmId};
use tokio::sync::Notify;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::common;

/// A daemon waits for five sixths of it for an answer, and 60 s at most.
const LEASE_MS: u64 = 3_600_000;
/// A hang limit, below that.
const LIMIT: Duration = Duration::from_secs(50);

/// Host 1 is registered, and its heartbeats aren't answered.
struct Slow {
    heartbeat: Arc<Notify>,
    /// Messages that the daemon sends.
    from_daemon: Sender<Message>,
}

type Answer<T> = Result<Response<T>, Status>;

fn unused<T>() -> Answer<T> {
    Err(Status::unimplemented("not used here"))
}

fn envelope(body: Body) -> proto::Envelope {
    let (from, to) = (Node::Coordinator, Node::Host(HostId(1)));
    let mut message = Vec::new();
    nomad::wire::encode(&Message { from, incarnation: Incarnation(0), to, body }, &mut message);
    proto::Envelope { message }
}

#[tonic::async_trait]
impl ClusterService for Slow {
    type WatchStream = ReceiverStream<Result<proto::WatchEvent, Status>>;
    type CoordinateStream = ReceiverStream<Result<proto::Envelope, Status>>;

    async fn register_host(
        &self,
        _: Request<proto::RegisterHostRequest>,
    ) -> Answer<proto::RegisterHostReply> {
        let settings =
            proto::Settings { mtu: 1376, sockets: 1, switch_milliseconds: 2_000, ..Default::default() };
        Ok(Response::new(proto::RegisterHostReply {
            speaker: Some(proto::Speaker { host: 1, incarnation: 1 }),
            lease_milliseconds: LEASE_MS,
            settings: Some(settings),
        }))
    }

    async fn watch(&self, _: Request<proto::WatchRequest>) -> Answer<Self::WatchStream> {
        let (events, stream) = tokio::sync::mpsc::channel(1);
        let whole = proto::WatchEvent { instance: 1, revision: 1, whole: true, ..Default::default() };
        events.send(Ok(whole)).await.unwrap();
        // The stream stays open.
        tokio::spawn(async move { events.closed().await });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn heartbeat(&self, _: Request<proto::HeartbeatRequest>) -> Answer<proto::HeartbeatReply> {
        self.heartbeat.notified().await;
        Ok(Response::new(proto::HeartbeatReply::default()))
    }

    async fn coordinate(
        &self,
        request: Request<Streaming<proto::Envelope>>,
    ) -> Answer<Self::CoordinateStream> {
        let mut incoming = request.into_inner();
        let (messages, stream) = tokio::sync::mpsc::channel(4);
        let from_daemon = self.from_daemon.clone();
        tokio::spawn(async move {
            while let Ok(Some(envelope)) = incoming.message().await {
                let message = nomad::wire::parse(&envelope.message).unwrap();
                if message.body == Body::Hello {
                    messages.send(Ok(self::envelope(Body::Welcome))).await.unwrap();
                    let moved = Move { vm: VmId(7), from: HostId(2), to: HostId(1), epoch: Epoch(2) };
                    let reserve = Body::Reserve { migration: MigrationId(5), moves: vec![moved] };
                    messages.send(Ok(self::envelope(reserve))).await.unwrap();
                }
                // The test may have its answer already.
                let _ = from_daemon.send(message);
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn find_waiting(&self, _: Request<proto::FindWaitingRequest>) -> Answer<proto::FindWaitingReply> {
        unused()
    }
    async fn register_vm(&self, _: Request<proto::RegisterVmRequest>) -> Answer<proto::RegisterVmReply> {
        unused()
    }
    async fn end_vm(&self, _: Request<proto::EndVmRequest>) -> Answer<proto::EndVmReply> {
        unused()
    }
    async fn report_links(&self, _: Request<proto::ReportLinksRequest>) -> Answer<proto::ReportLinksReply> {
        unused()
    }
    async fn forget_host(&self, _: Request<proto::ForgetHostRequest>) -> Answer<proto::ForgetHostReply> {
        unused()
    }
    async fn claim_vm(&self, _: Request<proto::ClaimVmRequest>) -> Answer<proto::ClaimVmReply> {
        unused()
    }
    async fn lookup(&self, _: Request<proto::LookupRequest>) -> Answer<proto::LookupReply> {
        unused()
    }
    async fn get_state(&self, _: Request<proto::GetStateRequest>) -> Answer<proto::State> {
        unused()
    }
    async fn set_group(&self, _: Request<proto::SetGroupRequest>) -> Answer<proto::SetGroupReply> {
        unused()
    }
    async fn migrate(&self, _: Request<proto::MigrateRequest>) -> Answer<proto::MigrateReply> {
        unused()
    }
    async fn cancel_migration(
        &self,
        _: Request<proto::CancelMigrationRequest>,
    ) -> Answer<proto::CancelMigrationReply> {
        unused()
    }
    async fn report_holds(&self, _: Request<proto::ReportHoldsRequest>) -> Answer<proto::ReportHoldsReply> {
        unused()
    }
    async fn get_holds(&self, _: Request<proto::GetHoldsRequest>) -> Answer<proto::GetHoldsReply> {
        unused()
    }
    async fn get_role(&self, _: Request<proto::GetRoleRequest>) -> Answer<proto::Role> {
        Ok(Response::new(proto::Role { leads: true, ..Default::default() }))
    }
}

fn answer_of(daemon: &Receiver<Message>) -> Option<Body> {
    while let Ok(message) = daemon.recv_timeout(LIMIT) {
        if message.body != Body::Hello {
            return Some(message.body);
        }
    }
    None
}

/// A destination is asked for room while the daemon's first heartbeat waits for an answer. It answers.
#[test]
fn messages_are_read_while_a_request_waits() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let (from_daemon, answers) = std::sync::mpsc::channel();
    let heartbeat = Arc::new(Notify::new());
    let service = ClusterServiceServer::new(Slow { heartbeat: Arc::clone(&heartbeat), from_daemon });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = std::thread::spawn(move || {
        runtime.block_on(async {
            let (accepted, incoming) = tokio::sync::mpsc::channel(1);
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    if accepted.send(Ok::<_, std::io::Error>(stream)).await.is_err() {
                        return;
                    }
                }
            });
            let server = tonic::transport::Server::builder().add_service(service);
            tokio::select! {
                served = server.serve_with_incoming(ReceiverStream::new(incoming)) => served.unwrap(),
                _ = stopped => {}
            }
        });
    });
    let folder = tempfile::tempdir().unwrap();
    let mut config = DaemonConfig::new(folder.path().join("host.sock"));
    let service = Service::new(&address.to_string(), None).unwrap();
    config.fabric = Some(FabricConfig {
        directory: DirectorySource::Cluster(ClusterConfig { service, name: "h1".to_owned() }),
        address: facilities::ports::loopback(),
        cluster_key: None,
        verbs: false,
    });
    let daemon = common::start(config);
    let expected = Body::Failed { migration: MigrationId(5), reason: AbortReason::NoRoom };
    assert_eq!(answer_of(&answers), Some(expected));
    heartbeat.notify_one();
    drop(daemon);
    drop(stop);
    server.join().unwrap();
}
