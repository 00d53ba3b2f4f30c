//! Three hosts of a cluster in network namespaces, and the cluster service beside them.
//!
//! ```text
//! bridge 10.77.0.254: causeway cluster serve
//!    ├── h1 10.77.0.1: causeway host    the VM is on h1 or h2
//!    ├── h2 10.77.0.2: causeway host
//!    └── h3 10.77.0.3: causeway host    the peer
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use control_api::migration::MigrationTimeline;

use super::running::{Running, STEP_TIMEOUT};
use crate::host_daemon::{self, HostDaemon};
use crate::outside::network::Network;

/// Number of hosts.
const HOSTS: u8 = 3;
/// The peer's host.
pub const PEER_HOST: u8 = 3;
const SERVICE_PORT: u16 = 4793;
const FABRIC_PORT: u16 = 4792;
const MIGRATION_PORT: u16 = 7000;

/// The cluster. Dropping it ends its processes and removes its namespaces and files.
pub struct Hosts {
    daemons: Vec<HostDaemon>,
    _service: Running,
    network: Network,
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl Hosts {
    /// Starts service and daemons, all with a cluster key.
    ///
    /// # Errors
    /// A namespace or process can't be started.
    pub fn start(program: &Path) -> anyhow::Result<Self> {
        let folder = host_daemon::folder()?;
        let network = Network::new(HOSTS)?;
        let at = |name: &str| folder.path().join(name);
        output(Command::new(program).arg("key").arg(at("cluster.key")), "causeway key")?;
        let listen = format!("{}:{SERVICE_PORT}", Network::address(0));
        let mut command = network.on(0, program);
        command.args(["cluster", "serve", "--listen", &listen, "--state"]).arg(at("cluster.redb"));
        let mut service = Running::start("causeway cluster serve", command, at("service.log"))?;
        let mut ask = || {
            let mut command = network.on(0, program);
            command.args(["cluster", "hosts", "--json", "--cluster", &listen]);
            output(&mut command, "causeway cluster hosts")
        };
        service.await_success(&mut ask)?;
        let mut daemons = Vec::new();
        for host in 1..=HOSTS {
            let fabric = format!("{}:{FABRIC_PORT}", Network::address(host));
            let key = at("cluster.key").display().to_string();
            let name = format!("h{host}");
            let options =
                ["--cluster", &listen, "--name", &name, "--fabric-address", &fabric, "--cluster-key", &key];
            let socket = at(&name).join("host.sock");
            let command = network.on(host, program);
            daemons.push(HostDaemon::start(command, &socket, &options.map(str::to_owned))?);
        }
        Ok(Self { daemons, _service: service, network, program: program.to_owned(), folder })
    }

    /// Returns the path of a file of the cluster.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the socket of a host's daemon.
    pub fn daemon(&self, host: u8) -> PathBuf {
        self.path(&format!("h{host}/host.sock"))
    }

    /// Returns `causeway` as a command on a host, which has its own folder of sockets.
    pub fn causeway(&self, host: u8) -> Command {
        let mut command = self.network.on(host, &self.program);
        command.env("XDG_RUNTIME_DIR", self.path(&format!("h{host}"))).env_remove("RUST_LOG");
        command
    }

    /// Returns the address at which a host's monitor waits.
    pub fn migration_address(host: u8) -> String {
        format!("{}:{MIGRATION_PORT}", Network::address(host))
    }

    /// Waits until the service knows an address of each of these VMs.
    ///
    /// # Errors
    /// It doesn't know them in time.
    pub fn await_addresses(&self, vms: &[&str]) -> anyhow::Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        let listen = format!("{}:{SERVICE_PORT}", Network::address(0));
        loop {
            let mut command = self.causeway(0);
            let text = output(
                command.args(["cluster", "vms", "--json", "--cluster", &listen]),
                "causeway cluster vms",
            )?;
            let listed: serde_json::Value =
                serde_json::from_str(&text).with_context(|| format!("Not JSON: {text}"))?;
            let has_address = |name: &str| {
                let vms = listed.as_array().into_iter().flatten();
                vms.filter(|vm| vm["name"] == name).any(|vm| vm["nics"][0]["addresses"][0].is_string())
            };
            if vms.iter().all(|name| has_address(name)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "The cluster service knows no address of a VM: {text}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// Migrates a VM from one host to another.
    ///
    /// # Errors
    /// It doesn't move.
    pub fn migrate(&self, vm: &str, from: u8, to: u8) -> anyhow::Result<MigrationTimeline> {
        let mut command = self.causeway(from);
        command.args(["migrate", vm, "--to", &format!("h{to}"), "--json", "--daemon"]).arg(self.daemon(from));
        command.arg("--key").arg(self.path("cluster.key"));
        let text = output(&mut command, "causeway migrate")?;
        serde_json::from_str(&text).with_context(|| format!("'causeway migrate' printed no timeline: {text}"))
    }

    /// Fails if a daemon has ended.
    ///
    /// # Errors
    /// One has.
    pub fn check(&mut self) -> anyhow::Result<()> {
        for daemon in &mut self.daemons {
            if let Some(trouble) = daemon.trouble()? {
                anyhow::bail!("{trouble}");
            }
        }
        Ok(())
    }
}

/// Runs a command to its end; returns its output.
fn output(command: &mut Command, what: &str) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("'{what}' could not be started"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    ensure!(output.status.success(), "'{what}' failed: {} {}", text(&output.stdout), text(&output.stderr));
    Ok(text(&output.stdout))
}
