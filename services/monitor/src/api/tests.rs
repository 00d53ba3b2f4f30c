//! The API through its socket and its own client.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use control_api::client::{Client, ClientError};
use control_api::types::{ExitTable, NicBehind, VmState, VmSummary};
use serde_json::{Value, json};
use telemetry::metrics::Family;

use super::*;

/// A VM that has only a state.
pub(crate) struct Fake(pub(crate) Mutex<VmState>);

impl Fake {
    fn go(&self, what: &'static str, from: VmState, to: VmState) -> Result<(), ControlError> {
        let mut state = self.0.lock().unwrap();
        if *state != from && *state != to {
            return Err(ControlError::WrongState { state: *state, what });
        }
        *state = to;
        Ok(())
    }
}

impl VmControl for Fake {
    fn summary(&self) -> VmSummary {
        VmSummary {
            name: "fake".into(),
            pid: 1,
            state: *self.0.lock().unwrap(),
            guest: "kernel".into(),
            vcpus: 2,
            memory_bytes: 1 << 30,
            uptime_seconds: 1.5,
            version: "0".into(),
            rdma_nics: 0,
            waits_for: None,
        }
    }
    fn inspect(&self) -> Value {
        json!({"disks": {"disk0": {"reads": 7}}})
    }
    fn pause(&self) -> Result<(), ControlError> {
        self.go("pause", VmState::Running, VmState::Paused)
    }
    fn resume(&self, _forced: bool) -> Result<(), ControlError> {
        self.go("resume", VmState::Paused, VmState::Running)
    }
    fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<(), ControlError> {
        match (nic, behind) {
            ("nic 0", NicBehind::Emulation) => Ok(()),
            _ => Err(ControlError::NotNow { reason: format!("no {nic} with {behind}") }),
        }
    }
    fn cancel_migration(&self) -> Result<(), ControlError> {
        Err(ControlError::NotNow { reason: "No migration of this VM is under way".into() })
    }
    fn power_button(&self) -> Result<(), ControlError> {
        Err(ControlError::Unsupported { what: "take a power button", reason: "it is a fake".into() })
    }
    fn reset(&self, _forced: bool) -> Result<(), ControlError> {
        let source = std::io::Error::other("no wires").into();
        Err(ControlError::Failed { what: "reset", source })
    }
    fn stop(&self) -> Result<(), ControlError> {
        *self.0.lock().unwrap() = VmState::Stopping;
        Ok(())
    }
    fn exits(&self) -> ExitTable {
        ExitTable { total: 3, ..ExitTable::default() }
    }
    fn metrics(&self) -> Vec<Family> {
        let mut exits = Family::counter("kvm_exits_total", "VM exits.");
        exits.add_count(&[("cause", "mmio")], 3);
        vec![exits]
    }
}

fn serve(directory: &Path) -> (ApiServer, Client) {
    let socket = directory.join("vm.sock");
    let vm = Arc::new(Fake(Mutex::new(VmState::Running)));
    let server = ApiListener::bind(&socket).unwrap().serve(vm, || ()).unwrap();
    (server, Client::new(socket))
}

fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> (u16, String) {
    match result.unwrap_err() {
        ClientError::Refused { status, problem } => (status, problem.to_string()),
        other => panic!("{other}"),
    }
}

#[test]
fn every_request_reaches_the_vm_and_its_answer_the_client() {
    let directory = tempfile::tempdir().unwrap();
    let (server, client) = serve(directory.path());
    assert_eq!(client.summary().unwrap().state, VmState::Running);
    assert_eq!(client.inspect(None).unwrap(), json!({"disks": {"disk0": {"reads": 7}}}));
    assert_eq!(client.inspect(Some("disks/disk0/reads")).unwrap(), json!(7));
    let (status, text) = refusal(client.inspect(Some("disks/disk1")));
    assert_eq!((status, text.as_str()), (404, "disks has no \"disk1\"; it has disk0"));
    assert_eq!(client.pause().unwrap().state, VmState::Paused);
    assert_eq!(client.pause().unwrap().state, VmState::Paused);
    assert_eq!(client.resume(true).unwrap().state, VmState::Running);
    assert_eq!(client.change_nic("nic 0", NicBehind::Emulation).unwrap().state, VmState::Running);
    assert_eq!(refusal(client.change_nic("a/b", NicBehind::Card)), (409, "no a/b with card".to_owned()));
    assert_eq!(refusal(client.power_button()).0, 501);
    assert_eq!(refusal(client.reset(false)), (500, "The VM failed to reset; no wires".to_owned()));
    assert_eq!(client.exits().unwrap().total, 3);
    assert!(client.metrics().unwrap().contains("kvm_exits_total{vm=\"fake\",cause=\"mmio\"} 3\n"));
    assert_eq!(client.stop().unwrap().state, VmState::Stopping);
    assert_eq!(refusal(client.pause()), (409, "The VM is stopping, so it can't pause".to_owned()));
    server.stop();
    assert!(!directory.path().join("vm.sock").exists());
}

#[test]
fn the_description_names_every_route_of_the_client() {
    let directory = tempfile::tempdir().unwrap();
    let (_server, client) = serve(directory.path());
    let document = client.openapi().unwrap();
    assert_eq!(document, serde_json::to_value(openapi()).unwrap());
    for (path, method) in [
        ("/v1/vm", "get"),
        ("/v1/vm", "delete"),
        ("/v1/inspect", "get"),
        ("/v1/pause", "put"),
        ("/v1/resume", "put"),
        ("/v1/power-button", "put"),
        ("/v1/reset", "put"),
        ("/v1/exits", "get"),
        ("/metrics", "get"),
        ("/v1/migration", "delete"),
        ("/v1/nics/{nic}", "put"),
        ("/openapi.json", "get"),
    ] {
        assert!(document["paths"][path][method].is_object(), "{method} {path}");
    }
    for schema in ["VmSummary", "VmState", "Done", "ExitTable", "VcpuExits", "Problem"] {
        assert!(document["components"]["schemas"][schema].is_object(), "{schema}");
    }
}

fn raw(socket: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    // The server may close before it has read all bytes.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn wrong_requests_get_a_problem_and_never_stop_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let (_server, client) = serve(directory.path());
    let socket = client.socket();
    assert!(raw(socket, b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n").contains("{\"error\":\"There is no /v2; "));
    assert!(
        raw(socket, b"POST /v1/vm HTTP/1.1\r\nhost: x\r\n\r\n").contains("/v1/vm doesn't support POST; ")
    );
    assert!(raw(socket, b"GET /v1/inspect?pat=x HTTP/1.1\r\nhost: x\r\n\r\n").starts_with("HTTP/1.1 400"));
    assert!(raw(socket, b"\x16\x03\x01\x00").starts_with("HTTP/1.1 400"));
    let long = [b"GET /".as_slice(), &[b'a'; 1 << 20]].concat();
    assert!(!raw(socket, &long).starts_with("HTTP/1.1 200"));
    assert!(client.summary().is_ok());
}

#[test]
fn the_socket_is_for_its_owner_only_and_never_taken_from_a_running_vm() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vm.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let (server, client) = serve(directory.path());
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(matches!(ApiListener::bind(&socket), Err(ApiError::InUse { .. })));
    assert!(client.summary().is_ok());
    // Another process has replaced the socket: it stays.
    std::fs::remove_file(&socket).unwrap();
    let _other = UnixListener::bind(&socket).unwrap();
    server.stop();
    assert!(socket.exists());
    let missing = ApiListener::bind(&directory.path().join("missing/vm.sock")).unwrap_err();
    assert!(matches!(missing, ApiError::Socket { .. }));
}

#[test]
fn many_clients_at_once_are_all_served() {
    let directory = tempfile::tempdir().unwrap();
    let (_server, client) = serve(directory.path());
    let idle: Vec<_> = (0..8).map(|_| UnixStream::connect(client.socket()).unwrap()).collect();
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| client.summary().unwrap());
        }
    });
    drop(idle);
}
