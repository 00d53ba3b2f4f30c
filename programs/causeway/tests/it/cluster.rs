//! `causeway cluster` as shipped: a service in a process of its own, and the commands that query it.

use std::io::Read as _;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use control_api::cluster::Service;
use control_api::cluster::proto::{HeartbeatRequest, RegisterHostRequest, RegisterVmRequest, Speaker};

/// Time limit, after which a step counts as hung.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A service that ends when this value is dropped.
struct Running {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut child = causeway()
            .args(["--json", "cluster", "serve", "--listen", "127.0.0.1:0", "--lease", "1", "--state"])
            .arg(folder.path().join("cluster.redb"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // One JSON object, which may have several lines.
        let (mut text, mut byte) = (String::new(), [0]);
        let mut out = child.stdout.take().unwrap();
        let shown = loop {
            assert_eq!(out.read(&mut byte).unwrap(), 1, "the service has ended: {text}");
            text.push(char::from(byte[0]));
            if let Ok(shown) = serde_json::from_str::<serde_json::Value>(&text) {
                break shown;
            }
        };
        Self { child, address: shown["listen"].as_str().unwrap().to_owned(), _folder: folder }
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        causeway().args(arguments).args(["--cluster", &self.address]).output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn causeway() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn register(service: &Service, name: &str, number: u8) -> Speaker {
    let fabric_address = format!("10.77.0.{number}:4792");
    let request = RegisterHostRequest { name: name.to_owned(), fabric_address, incarnation: 0 };
    service.ask("RegisterHost", async |client| client.register_host(request).await).unwrap().speaker.unwrap()
}

fn start_vm(service: &Service, speaker: Speaker, name: &str) -> u64 {
    let (speaker, name) = (Some(speaker), name.to_owned());
    let request = RegisterVmRequest { speaker, name, epoch: 0, nics: Vec::new() };
    service.ask("RegisterVm", async |client| client.register_vm(request).await).unwrap().epoch
}

/// Waits until a host counts as silent, one second after its last report.
fn wait_for_silence(service: &Service, name: &str) {
    let until = Instant::now() + HANG_LIMIT;
    while service.state().unwrap().hosts.iter().any(|host| host.name == name && host.heard) {
        assert!(Instant::now() < until, "host {name} is heard of for ever");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A host that reports can't be forgotten. A silent one can, and isn't listed any more; its VMs are lost and may be started on other
/// hosts.
#[test]
fn a_host_that_is_gone_is_forgotten() {
    let running = Running::start();
    let service = Service::new(&running.address, None).unwrap();
    let (h1, h2) = (register(&service, "h1", 1), register(&service, "h2", 2));
    assert_eq!((start_vm(&service, h1, "a"), start_vm(&service, h1, "b")), (1, 1));
    // The host keeps reporting until the command has been refused.
    let refused = std::thread::scope(|scope| {
        let asked = scope.spawn(|| running.ask(&["cluster", "forget", "h1"]));
        while !asked.is_finished() {
            let beat = HeartbeatRequest { speaker: Some(h1), waiting: Vec::new() };
            service.ask("Heartbeat", async |client| client.heartbeat(beat.clone()).await).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        asked.join().unwrap()
    });
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(error.contains("Host h1 can't be forgotten: it was heard of in the last 1 s"), "{error}");
    let unknown = running.ask(&["cluster", "forget", "h9"]);
    let error = text(&unknown.stderr);
    assert!(unknown.status.code() == Some(1) && error.contains("no host h9"), "{error}");

    wait_for_silence(&service, "h1");
    let forgotten = running.ask(&["cluster", "forget", "h1"]);
    assert!(forgotten.status.success(), "{}", text(&forgotten.stderr));
    assert_eq!(
        text(&forgotten.stdout),
        "Host h1 is forgotten; lost, and free to be started elsewhere: a, b\n"
    );
    let hosts = text(&running.ask(&["cluster", "hosts"]).stdout);
    assert!(!hosts.contains("h1") && hosts.contains("h2"), "{hosts}");
    let again = running.ask(&["cluster", "forget", "h1"]);
    assert_eq!(again.status.code(), Some(1), "{}", text(&again.stdout));
    assert_eq!(start_vm(&service, h2, "a"), 2, "in a new epoch");

    wait_for_silence(&service, "h2");
    let forgotten = running.ask(&["--json", "cluster", "forget", "h2"]);
    let shown: serde_json::Value = serde_json::from_slice(&forgotten.stdout).unwrap();
    assert_eq!((shown["host"].as_str(), shown["lost"][0].as_str()), (Some("h2"), Some("a")));
    let vms = running.ask(&["--json", "cluster", "vms"]);
    let vms: serde_json::Value = serde_json::from_slice(&vms.stdout).unwrap();
    assert!(vms.as_array().unwrap().iter().all(|vm| vm["state"] == "lost"), "{vms}");
}
