//! A VM of several nodes, each of them a process on this machine.

use super::network::Network;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Poll interval of processes.
const LOOK: Duration = Duration::from_millis(2);

/// A VM's parameters.
pub struct Plan<'a> {
    /// The monitor's path.
    pub causeway: &'a Path,
    /// The payload program's path.
    pub program: PathBuf,
    /// The payload program's arguments.
    pub arguments: &'a [&'a str],
    /// Number of nodes, with a vCPU each.
    pub nodes: u8,
    /// The nodes' namespaces. Without them the nodes use Unix sockets.
    pub network: Option<&'a Network>,
    /// Directory of the sockets.
    pub folder: &'a Path,
    /// Additional flags of `causeway run`.
    pub flags: Vec<String>,
}

/// One node.
struct Node {
    child: Child,
    /// Lines on standard error, with their times.
    said: Arc<Mutex<Vec<(Instant, String)>>>,
    reader: Option<JoinHandle<()>>,
}

/// A running VM. Dropping it kills its processes.
pub struct Vm {
    nodes: Vec<Node>,
    console: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Starts all nodes.
    pub fn start(plan: &Plan<'_>) -> Result<Self> {
        let mut vm = Self { nodes: Vec::new(), console: Arc::default(), reader: None };
        for node in 0..plan.nodes {
            let peers = match plan.network {
                Some(_) => Network::peers(node, plan.nodes),
                None => (0..plan.nodes)
                    .map(|node| format!("unix:{}", plan.folder.join(format!("node{node}")).display()))
                    .collect(),
            };
            let mut command = match plan.network {
                Some(network) => {
                    let mut command = Command::new("ip");
                    command.args(["netns", "exec", &network.namespace(node)]).arg(plan.causeway);
                    command
                }
                None => Command::new(plan.causeway),
            };
            command.env("XDG_RUNTIME_DIR", plan.folder).args([
                "--log-level",
                "warn",
                "run",
                "--sandbox",
                "off",
            ]);
            command.args([
                "--name",
                "faults",
                "--node",
                &node.to_string(),
                "--peers",
                &peers.join(","),
                "--insecure",
            ]);
            command.args(&plan.flags).arg("--payload").arg(&plan.program).arg("--").args(plan.arguments);
            let stdout = if node == 0 { Stdio::piped() } else { Stdio::null() };
            command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
            let mut child = command.spawn().with_context(|| format!("Node {node} can't be started"))?;
            if let Some(mut out) = child.stdout.take() {
                let console = Arc::clone(&vm.console);
                vm.reader = Some(std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(read) = out.read(&mut buffer)
                        && read > 0
                    {
                        lock(&console).extend_from_slice(&buffer[..read]);
                    }
                }));
            }
            let said: Arc<Mutex<Vec<(Instant, String)>>> = Arc::default();
            let errors = child.stderr.take().context("No standard error")?;
            let lines = Arc::clone(&said);
            let reader = std::thread::spawn(move || {
                for line in BufReader::new(errors).lines().map_while(Result::ok) {
                    lock(&lines).push((Instant::now(), line));
                }
            });
            vm.nodes.push(Node { child, said, reader: Some(reader) });
        }
        Ok(vm)
    }

    /// Sends a signal to a node.
    pub fn signal(&self, node: u8, signal: Signal) -> Result<()> {
        let node = self.nodes.get(usize::from(node)).context("No such node")?;
        let pid = i32::try_from(node.child.id()).ok().and_then(Pid::from_raw).context("No such process")?;
        kill_process(pid, signal).context("The signal can't be sent")
    }

    /// Waits, at most `patience`, until these nodes have ended. Returns those that haven't.
    pub fn await_end(&mut self, nodes: impl Fn(u8) -> bool, patience: Duration) -> Vec<u8> {
        let until = Instant::now() + patience;
        loop {
            let left: Vec<u8> = (0u8..)
                .zip(&mut self.nodes)
                .filter(|(number, _)| nodes(*number))
                .filter_map(|(number, node)| matches!(node.child.try_wait(), Ok(None)).then_some(number))
                .collect();
            if left.is_empty() || Instant::now() >= until {
                return left;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Returns node 0's exit status, which is the VM's, once it has ended.
    pub fn status(&mut self) -> Option<i32> {
        self.nodes
            .first_mut()
            .and_then(|node| node.child.try_wait().ok().flatten())
            .and_then(|status| status.code())
    }

    /// Returns the exit codes of all nodes; none for killed or running ones.
    pub fn statuses(&mut self) -> Vec<Option<i32>> {
        let code = |node: &mut Node| node.child.try_wait().ok().flatten().and_then(|status| status.code());
        self.nodes.iter_mut().map(code).collect()
    }

    /// Returns the nodes' lines with their times, for an ended node all of them.
    pub fn said(&mut self) -> Vec<(u8, Instant, String)> {
        let mut all = Vec::new();
        for (number, node) in (0u8..).zip(&mut self.nodes) {
            if matches!(node.child.try_wait(), Ok(Some(_)))
                && let Some(reader) = node.reader.take()
            {
                // It ends with the pipe.
                let _ = reader.join();
            }
            all.extend(lock(&node.said).iter().map(|(at, line)| (number, *at, line.clone())));
        }
        all
    }

    /// Returns the console's output; all of it after node 0's end.
    pub fn console(&mut self) -> Vec<u8> {
        if self.nodes.first_mut().is_some_and(|node| matches!(node.child.try_wait(), Ok(Some(_))))
            && let Some(reader) = self.reader.take()
        {
            let _ = reader.join();
        }
        lock(&self.console).clone()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            // Fails if the node has ended.
            let _ = node.child.kill();
            let _ = node.child.wait();
        }
    }
}
