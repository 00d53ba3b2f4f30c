//! NICs of a host daemon: one request for both functions, and another after the daemon's restart.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use control_api::host::NicRequest;
use control_api::host::proto::{self, host_service_server};
use tonic::{Request, Response, Status};
use vfio_user_protocol::device::Device;
use vfio_user_protocol::server::Server;

use super::*;
use crate::vfio_user::{Nic, NicConnector};

/// A daemon with one NIC, whose sockets are named after the daemon's generation.
struct Daemon {
    stop_service: Option<tokio::sync::oneshot::Sender<()>>,
    stop_devices: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
    asked: Arc<Mutex<Vec<proto::AttachNicRequest>>>,
}

struct Service {
    folder: PathBuf,
    generation: u32,
    asked: Arc<Mutex<Vec<proto::AttachNicRequest>>>,
}

#[tonic::async_trait]
impl host_service_server::HostService for Service {
    async fn attach_nic(
        &self,
        request: Request<proto::AttachNicRequest>,
    ) -> Result<Response<proto::AttachNicReply>, Status> {
        lock(&self.asked).push(request.into_inner());
        let socket = |function| device_socket(&self.folder, self.generation, function).display().to_string();
        Ok(Response::new(proto::AttachNicReply { functions: vec![socket(0), socket(1)], mac: vec![2; 6] }))
    }
    async fn detach_nic(
        &self,
        _: Request<proto::DetachNicRequest>,
    ) -> Result<Response<proto::DetachNicReply>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn list_nics(
        &self,
        _: Request<proto::ListNicsRequest>,
    ) -> Result<Response<proto::ListNicsReply>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn set_limits(
        &self,
        _: Request<proto::SetLimitsRequest>,
    ) -> Result<Response<proto::SetLimitsReply>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn inspect(
        &self,
        _: Request<proto::InspectRequest>,
    ) -> Result<Response<proto::InspectReply>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn move_vm(
        &self,
        _: tonic::Request<proto::MoveVmRequest>,
    ) -> Result<tonic::Response<proto::MoveVmReply>, tonic::Status> {
        Err(tonic::Status::unimplemented("not here"))
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
        Err(Status::unimplemented("not in this test"))
    }
}

fn device_socket(folder: &Path, generation: u32, function: u8) -> PathBuf {
    folder.join(format!("nic-{generation}.{function}"))
}

impl Daemon {
    fn start(folder: &Path, generation: u32, devices: [&Arc<TestDevice>; 2]) -> Self {
        let stop_devices = Arc::new(super::super::events::new_event().unwrap());
        let mut threads = Vec::new();
        for (function, device) in (0..).zip(devices) {
            let server = Server::bind(&device_socket(folder, generation, function)).unwrap();
            let device: Arc<dyn Device> = Arc::clone(device) as _;
            let stop = Arc::clone(&stop_devices);
            threads.push(std::thread::spawn(move || server.serve(&device, stop.as_fd()).unwrap()));
        }
        let path = folder.join("host.sock");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let service = Service { folder: folder.to_owned(), generation, asked: Arc::clone(&asked) };
        let (stop_service, stopped) = tokio::sync::oneshot::channel::<()>();
        threads.push(std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let incoming = tonic::codegen::tokio_stream::wrappers::UnixListenerStream::new(listener);
                tonic::transport::Server::builder()
                    .add_service(host_service_server::HostServiceServer::new(service))
                    .serve_with_incoming_shutdown(incoming, async { drop(stopped.await) })
                    .await
                    .unwrap();
            });
        }));
        Self { stop_service: Some(stop_service), stop_devices, threads, asked }
    }

    fn requests(&self) -> Vec<proto::AttachNicRequest> {
        lock(&self.asked).clone()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop_service.take());
        rustix::io::write(&self.stop_devices, &1_u64.to_ne_bytes()).unwrap();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

#[test]
fn both_functions_connect_with_one_request_and_reconnect_with_another() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (TestDevice::new(), TestDevice::new());
    let daemon = Daemon::start(folder.path(), 1, [&first, &second]);
    let nic = Nic::new(
        &folder.path().join("host.sock"),
        NicRequest {
            vm: "vm1".into(),
            name: "rdma0".into(),
            mac: Some([2, 0, 0, 0, 0, 1]),
            segment: "s0".into(),
            tap: None,
            incoming: false,
        },
    );
    let functions = [0, 1].map(|function| {
        let connector = NicConnector { nic: Arc::clone(&nic), function };
        let opened = OpenedFunction::open(&format!("rdma0.{function}"), Box::new(connector)).unwrap();
        let function = VfioUserFunction::new(opened, ram(), FakeMsi::new().as_ref()).unwrap();
        function.start(Box::new(|| {}), Arc::new(|| {})).unwrap();
        function
    });
    let asked = daemon.requests();
    assert_eq!(asked.len(), 1);
    assert_eq!(
        (asked[0].vm.as_str(), asked[0].name.as_str(), asked[0].segment.as_str()),
        ("vm1", "rdma0", "s0")
    );
    functions[1].bar_write(0, 0, &[1]);
    second.wait_for("the write", |events| {
        events.contains(&TestEvent::Write { region: 0, offset: 0, data: vec![1] })
    });
    assert!(!first.events().iter().any(|event| matches!(event, TestEvent::Write { region: 0, .. })));

    drop(daemon);
    wait_until("the loss", || functions.iter().all(|function| !function.is_connected()));
    let daemon = Daemon::start(folder.path(), 2, [&first, &second]);
    wait_until("the return", || functions.iter().all(|function| function.is_connected()));
    assert_eq!(daemon.requests().len(), 1, "one function asks for both");
}
