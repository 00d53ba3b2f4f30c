//! The shipped `causeway cluster serve` as a process, and etcd for two of them.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Signal, set_parent_process_death_signal};

/// Time-out of a program's start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Where an instance keeps its state.
#[derive(Debug, Clone)]
pub enum Store {
    /// A file of its own.
    File(PathBuf),
    /// Members of etcd; the lease of its leader in seconds.
    Etcd { members: String, leader_lease: u64 },
}

/// A running instance. Dropping it kills it.
#[derive(Debug)]
pub struct Instance {
    child: Child,
    pub address: SocketAddr,
    pub metrics: SocketAddr,
    log: PathBuf,
}

impl Instance {
    /// Starts an instance, and waits until it serves. Its standard error goes to `log`.
    ///
    /// # Errors
    /// It can't be started, or ends before it serves: with its last line.
    pub fn start(
        program: &Path,
        (address, metrics): (SocketAddr, SocketAddr),
        store: &Store,
        lease: Duration,
        log: &Path,
    ) -> anyhow::Result<Self> {
        let file = std::fs::File::create(log)
            .with_context(|| format!("{} could not be made for the service's log", log.display()))?;
        let mut command = Command::new(program);
        command.args(["cluster", "serve", "--listen", &address.to_string()]);
        command.args(["--metrics", &metrics.to_string(), "--lease", &lease.as_secs().to_string()]);
        match store {
            Store::File(path) => drop(command.arg("--state").arg(path)),
            Store::Etcd { members, leader_lease } => {
                command.args(["--etcd", members, "--leader-lease", &leader_lease.to_string()]);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let child = spawn(command)?;
        let mut instance = Self { child, address, metrics, log: log.to_owned() };
        wait_for("causeway cluster serve", address, || instance.trouble())?;
        Ok(instance)
    }

    /// Kills it at once, as a crash does, and waits for its end.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill().context("The cluster service can't be killed")?;
        self.child.wait().context("The cluster service is lost")?;
        Ok(())
    }

    /// Returns its resident memory in bytes.
    ///
    /// # Errors
    /// It has ended.
    pub fn resident(&self) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(&path).with_context(|| format!("{path} could not be read"))?;
        let kibibytes = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let kibibytes: u32 = kibibytes
            .and_then(|number| number.trim().parse().ok())
            .with_context(|| format!("{path} has no VmRSS"))?;
        Ok(f64::from(kibibytes) * 1024.0)
    }

    /// Returns why it has ended, if it has.
    ///
    /// # Errors
    /// Its state can't be determined.
    pub fn trouble(&mut self) -> anyhow::Result<Option<String>> {
        let status =
            self.child.try_wait().context("What became of the cluster service can't be found out")?;
        Ok(status.map(|status| {
            let text = std::fs::read_to_string(&self.log).unwrap_or_default();
            let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            format!("'causeway cluster serve' ended ({status}): {}", last.trim())
        }))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One member of etcd with a folder of its own. Dropping it kills it.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    pub members: String,
}

impl Etcd {
    /// Starts a member; `None`: etcd isn't installed.
    ///
    /// # Errors
    /// It doesn't serve.
    pub fn start(folder: &Path) -> anyhow::Result<Option<Self>> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err()
        {
            return Ok(None);
        }
        let [client, peer] = [(); 2].map(|()| facilities::ports::loopback());
        let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
        let log = std::fs::File::create(folder.join("etcd.log")).context("etcd's log could not be made")?;
        let mut command = Command::new("etcd");
        command.args(["--name", "bench", "--data-dir"]).arg(folder.join("etcd"));
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &format!("bench={peer_url}"), "--log-level", "error"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut etcd = Self { child: spawn(command)?, members: client_url };
        wait_for("etcd", client, || {
            let status = etcd.child.try_wait().context("What became of etcd can't be found out")?;
            Ok(status.map(|status| format!("etcd ended ({status})")))
        })?;
        Ok(Some(etcd))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a program that ends with this one.
#[allow(unsafe_code)] // Between fork and exec, a child requests the signal on its parent's death.
fn spawn(mut command: Command) -> anyhow::Result<Child> {
    // SAFETY: the closure makes one system call, which is safe between fork and exec.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    let shown = command.get_program().to_string_lossy().into_owned();
    command.spawn().with_context(|| format!("'{shown}' could not be started"))
}

fn wait_for(
    what: &str,
    address: SocketAddr,
    mut trouble: impl FnMut() -> anyhow::Result<Option<String>>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    while TcpStream::connect(address).is_err() {
        if let Some(trouble) = trouble()? {
            bail!("{trouble}");
        }
        if Instant::now() > deadline {
            bail!("'{what}' did not serve at {address} within {START_TIMEOUT:?}");
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}
