use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

use tokio::net::UnixListener as TokioListener;
use tonic::{Request, Response, Status};

use super::proto::host_service_server::{HostService, HostServiceServer};
use super::{HostClient, HostError, NicRequest, proto};

/// Responds with fixed values and records requests.
#[derive(Default)]
struct Fake {
    asked: Arc<Mutex<Vec<proto::AttachNicRequest>>>,
}

#[tonic::async_trait]
impl HostService for Fake {
    async fn attach_nic(
        &self,
        request: Request<proto::AttachNicRequest>,
    ) -> Result<Response<proto::AttachNicReply>, Status> {
        let request = request.into_inner();
        let functions = match request.name.as_str() {
            "taken" => return Err(Status::permission_denied("NIC taken of web1 belongs to user 7")),
            "empty" => Vec::new(),
            name => vec![format!("/run/{name}.0"), format!("/run/{name}.1")],
        };
        self.asked.lock().unwrap().push(request);
        Ok(Response::new(proto::AttachNicReply { functions, mac: vec![0; 6] }))
    }

    async fn detach_nic(
        &self,
        _: Request<proto::DetachNicRequest>,
    ) -> Result<Response<proto::DetachNicReply>, Status> {
        Ok(Response::new(proto::DetachNicReply {}))
    }

    async fn list_nics(
        &self,
        _: Request<proto::ListNicsRequest>,
    ) -> Result<Response<proto::ListNicsReply>, Status> {
        Ok(Response::new(proto::ListNicsReply::default()))
    }

    async fn set_limits(
        &self,
        _: Request<proto::SetLimitsRequest>,
    ) -> Result<Response<proto::SetLimitsReply>, Status> {
        Ok(Response::new(proto::SetLimitsReply { devices: 2 }))
    }

    async fn inspect(
        &self,
        request: Request<proto::InspectRequest>,
    ) -> Result<Response<proto::InspectReply>, Status> {
        let json = match request.into_inner().path.as_str() {
            "" => "{\"a\":1}".to_owned(),
            _ => "{".to_owned(),
        };
        Ok(Response::new(proto::InspectReply { json }))
    }

    async fn move_vm(
        &self,
        _: Request<proto::MoveVmRequest>,
    ) -> Result<Response<proto::MoveVmReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    type AwaitVmStream = tonic::codegen::tokio_stream::Empty<Result<proto::AwaitVmReply, tonic::Status>>;

    async fn await_vm(
        &self,
        _: tonic::Request<proto::AwaitVmRequest>,
    ) -> Result<tonic::Response<Self::AwaitVmStream>, tonic::Status> {
        Err(tonic::Status::unimplemented("not here"))
    }

    async fn find_waiting(
        &self,
        _: tonic::Request<proto::FindWaitingRequest>,
    ) -> Result<tonic::Response<proto::FindWaitingReply>, tonic::Status> {
        Err(tonic::Status::unimplemented("not here"))
    }

    async fn version(
        &self,
        _: Request<proto::VersionRequest>,
    ) -> Result<Response<proto::VersionReply>, Status> {
        Ok(Response::new(proto::VersionReply { version: "1".to_owned(), pid: 1, host: String::new() }))
    }
}

/// Runs a gRPC server on its own thread until the returned sender is dropped.
fn serve(socket: &Path, fake: Fake) -> tokio::sync::oneshot::Sender<()> {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let listener = UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TokioListener::from_std(listener).unwrap();
            let incoming = tonic::codegen::tokio_stream::wrappers::UnixListenerStream::new(listener);
            tonic::transport::Server::builder()
                .add_service(HostServiceServer::new(fake))
                .serve_with_incoming_shutdown(incoming, async { drop(stopped.await) })
                .await
                .unwrap();
        });
    });
    stop
}

#[test]
fn a_request_arrives_whole_and_the_answer_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let fake = Fake::default();
    let asked = fake.asked.clone();
    let _server = serve(&socket, fake);
    let nic = NicRequest {
        vm: "web1".into(),
        name: "rdma0".into(),
        mac: Some([2, 0, 0, 0, 0, 9]),
        segment: "blue".into(),
        tap: Some("tap3".into()),
        incoming: true,
    };
    let sockets = super::attach_nic(&socket, &nic).unwrap();
    assert_eq!(sockets.functions, [Path::new("/run/rdma0.0"), Path::new("/run/rdma0.1")]);
    let asked = asked.lock().unwrap().remove(0);
    assert_eq!((asked.vm.as_str(), asked.segment.as_str()), ("web1", "blue"));
    assert_eq!((asked.mac.unwrap(), asked.tap.unwrap()), (vec![2, 0, 0, 0, 0, 9], "tap3".to_owned()));
}

#[test]
fn a_refusal_is_the_daemons_own_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let _server = serve(&socket, Fake::default());
    let client = HostClient::new(&socket);
    let error = client.attach_nic(&NicRequest { name: "taken".into(), ..Default::default() }).unwrap_err();
    assert!(matches!(error, HostError::Refused { .. }));
    assert_eq!(error.to_string(), "NIC taken of web1 belongs to user 7");
}

#[test]
fn answers_that_make_no_sense_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let _server = serve(&socket, Fake::default());
    let client = HostClient::new(&socket);
    let error = client.attach_nic(&NicRequest { name: "empty".into(), ..Default::default() }).unwrap_err();
    assert!(matches!(error, HostError::NotUnderstood { .. }), "{error}");
    assert_eq!(client.inspect(None).unwrap(), serde_json::json!({"a": 1}));
    assert!(matches!(client.inspect(Some("x")), Err(HostError::NotUnderstood { .. })));
    assert_eq!(client.set_limits("web1", proto::Limits::default()).unwrap(), 2);
}

#[test]
fn nobody_there_and_no_daemon_there_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let error = HostClient::new(&socket).version().unwrap_err();
    assert!(matches!(&error, HostError::Connect { .. }), "{error}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("No such file"), "{source}");
    let listener = UnixListener::bind(&socket).unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 64];
        drop(stream.read(&mut buffer));
        drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    });
    let error = HostClient::new(&socket).version().unwrap_err();
    assert!(matches!(&error, HostError::Broken { .. } | HostError::Connect { .. }), "{error:?}");
    other.join().unwrap();
}
