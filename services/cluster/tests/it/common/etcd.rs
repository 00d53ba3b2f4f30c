//! A temporary etcd for a test: members on loopback, in a folder that is removed with it.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cluster::etcd::Etcd;
use cluster::etcd_config::EtcdConfig;
use cluster::kv::Kv as _;

/// The members of an etcd cluster. They are killed when this is dropped.
pub struct Members {
    folder: tempfile::TempDir,
    /// Each member's ports, for clients and for the other members.
    ports: Vec<(u16, u16)>,
    running: Vec<Option<Child>>,
    /// A folder with `ca`, `cert` and `key`, for mutual TLS with clients.
    tls: Option<PathBuf>,
}

/// Whether etcd is installed. Reports a missing one by `facilities::missing`.
pub fn is_installed(test: &str) -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !found {
        facilities::missing(facilities::Facility::Etcd, format!("{test} needs Debian's package etcd-server"));
    }
    found
}

impl Members {
    /// Starts a cluster of `count` members, and waits until it answers.
    pub fn start(count: usize) -> Self {
        let members = Self::begin(count, None);
        members.wait();
        members
    }

    /// Starts one member with the certificates of a folder.
    pub fn start_with_tls(keys: &Path) -> Self {
        Self::begin(1, Some(keys.to_owned()))
    }

    fn begin(count: usize, tls: Option<PathBuf>) -> Self {
        let ports = (0..count).map(|_| facilities::ports::free(2)).map(|first| (first, first + 1)).collect();
        let running = (0..count).map(|_| None).collect();
        let mut members = Self { folder: tempfile::tempdir().unwrap(), ports, running, tls };
        for member in 0..count {
            members.run(member);
        }
        members
    }

    /// Waits until the members answer as a cluster.
    pub fn wait(&self) {
        let client = self.client();
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = client.get("x", Duration::from_secs(3)) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts a member, or restarts one that was killed.
    pub fn run(&mut self, member: usize) {
        let client = format!("{}://127.0.0.1:{}", self.scheme(), self.ports[member].0);
        let peer = |member: usize| format!("http://127.0.0.1:{}", self.ports[member].1);
        let all: Vec<_> = (0..self.ports.len()).map(|member| format!("m{member}={}", peer(member))).collect();
        let log = std::fs::File::create(self.folder.path().join(format!("m{member}.log"))).unwrap();
        let mut command = Command::new("etcd");
        if let Some(keys) = &self.tls {
            for (option, file) in
                [("--trusted-ca-file", "ca"), ("--cert-file", "cert"), ("--key-file", "key")]
            {
                command.arg(option).arg(keys.join(file));
            }
            command.arg("--client-cert-auth");
        }
        let child = command
            .args(["--name", &format!("m{member}"), "--data-dir"])
            .arg(self.folder.path().join(format!("m{member}")))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer(member), "--initial-advertise-peer-urls", &peer(member)])
            .args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"])
            .args(["--initial-cluster-token", &self.folder.path().display().to_string()])
            .args(["--logger", "zap", "--log-level", "error"])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.running[member] = Some(child);
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Kills a member with SIGKILL, so that it can't shut down cleanly.
    pub fn kill(&mut self, member: usize) {
        if let Some(mut child) = self.running[member].take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// The members' addresses, as the option `--etcd` has them.
    pub fn addresses(&self) -> String {
        let addresses: Vec<_> =
            self.ports.iter().map(|(client, _)| format!("{}://127.0.0.1:{client}", self.scheme())).collect();
        addresses.join(",")
    }

    pub fn client(&self) -> Etcd {
        Etcd::new(EtcdConfig::new(&self.addresses()).unwrap()).unwrap()
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for member in 0..self.running.len() {
            self.kill(member);
        }
    }
}
