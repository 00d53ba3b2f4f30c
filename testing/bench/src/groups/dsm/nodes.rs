//! A payload VM of one or two nodes. Each node is a process on a CPU of its own: this program, started again as a node.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use dsm::Policy;
use monitor::dsm::{FaultInjection, NodeAddress, NodeSettings, SpanningVm, tuned};
use monitor::payload::{PayloadVm, process_status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::peers;

/// RAM of the VM in bytes.
const MEMORY: u64 = 1 << 30;
/// Time-out of a run.
pub(super) const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// A run exceeded its time-out, in a coherence mode that doesn't suit the program.
#[derive(Debug, thiserror::Error)]
#[error("A run on {nodes} nodes has not ended after {} s", after.as_secs())]
pub(super) struct Late {
    nodes: usize,
    after: Duration,
}
/// The option that starts this program as a node.
pub const AS_NODE: &str = "--dsm-node";

/// Coherence mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Coherence {
    /// Write-invalidate pages only: plain Ivy.
    Invalidate,
    /// Also write-update pages, except pages with atomic instructions.
    Updates,
    /// The full protocol.
    SingleWriter,
}

impl Coherence {
    /// All modes, the simplest first.
    pub const ALL: [Self; 3] = [Self::Invalidate, Self::Updates, Self::SingleWriter];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Invalidate => "invalidate",
            Self::Updates => "updates",
            Self::SingleWriter => "updates, single writer",
        }
    }

    fn policy(self) -> Policy {
        tuned(match self {
            Self::Invalidate => Policy::IVY,
            Self::Updates => Policy { atomics: false, ..Policy::OURS },
            Self::SingleWriter => Policy::OURS,
        })
    }
}

/// Parameters of a node's process.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    node: u8,
    addresses: Vec<String>,
    coherence: Coherence,
    program: PathBuf,
    arguments: Vec<String>,
    cpu: usize,
}

/// Results of a run.
#[derive(Debug, Clone)]
pub struct Ran {
    /// The program's line.
    pub line: Value,
    /// Each node's counters in the part that the program measures; empty with one node.
    pub nodes: Vec<Value>,
}

impl Ran {
    /// Returns a number of the program's line.
    pub fn number(&self, name: &str) -> anyhow::Result<u64> {
        self.line[name]
            .as_u64()
            .with_context(|| format!("The program's line has no number {name}: {}", self.line))
    }

    /// Returns the sum over nodes of a counter at a path such as `/messages`.
    pub fn sum(&self, path: &str) -> u64 {
        self.nodes.iter().filter_map(|node| node.pointer(path)?.as_u64()).sum()
    }

    /// Returns number and total length in nanoseconds of stalls of these kinds.
    pub fn stalls(&self, kinds: &[&str]) -> (u64, u64) {
        let sum = |what| kinds.iter().map(|kind| self.sum(&format!("/stalls/{kind}/{what}"))).sum();
        (sum("count"), sum("total_ns"))
    }
}

#[derive(Clone, Default)]
struct Console(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs as a node, with [`AS_NODE`]'s parameters. Node 0 prints the result.
///
/// # Errors
/// The node can't run.
pub fn be(task: &str) -> anyhow::Result<()> {
    let task: Task =
        serde_json::from_str(task).with_context(|| format!("{AS_NODE} is for this program's own use"))?;
    // Later threads inherit it: the vCPU and the service threads.
    peers::pin(task.cpu)?;
    let console = Console::default();
    let vcpus = u32::try_from(task.addresses.len().max(1))?;
    let builder = PayloadVm::from_file(&task.program)?.vcpus(vcpus).memory(MEMORY).console(console.clone());
    let builder = builder.arguments(task.arguments.iter().cloned());
    let (code, reports) = if task.addresses.is_empty() {
        let mut vm = builder.build()?;
        vm.start()?;
        (vm.wait()?, Vec::new())
    } else {
        let addresses =
            task.addresses.iter().map(|text| text.parse()).collect::<Result<Vec<NodeAddress>, _>>()?;
        let policy = task.coherence.policy();
        let settings = NodeSettings {
            node: task.node,
            addresses,
            device: None,
            key: None,
            policy,
            record: false,
            checkpoints: None,
            restart: None,
            fault_injection: FaultInjection::default(),
        };
        let ended = SpanningVm::join(builder, &settings)?.run()?;
        let code = ended.outcome.map_err(anyhow::Error::msg)?;
        let measured = ended.reports.into_values().map(|mut report| report["measured"].take());
        (code, measured.collect())
    };
    if task.node == 0 {
        let bytes = console.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        println!("{}", json!({ "code": process_status(code), "text": text, "nodes": reports }));
    }
    Ok(())
}

/// Runs a program on one node per CPU, with one vCPU each.
///
/// # Errors
/// It can't run, its result is wrong, or it exceeds [`RUN_TIMEOUT`].
pub fn run(cpus: &[usize], coherence: Coherence, program: &Path, arguments: &[&str]) -> anyhow::Result<Ran> {
    run_within(RUN_TIMEOUT, cpus, coherence, program, arguments)
}

/// As [`run`], with another time-out.
///
/// # Errors
/// As [`run`]; [`Late`] on time-out.
pub(super) fn run_within(
    patience: Duration,
    cpus: &[usize],
    coherence: Coherence,
    program: &Path,
    arguments: &[&str],
) -> anyhow::Result<Ran> {
    let folder = tempfile::tempdir().context("A folder for the nodes' sockets can't be made")?;
    let addresses: Vec<String> = match cpus {
        [_] => Vec::new(),
        _ => (0..cpus.len())
            .map(|node| format!("unix:{}", folder.path().join(node.to_string()).display()))
            .collect(),
    };
    let me = std::env::current_exe().context("This program's own file can't be found")?;
    let mut nodes = Nodes(Vec::new());
    for (node, cpu) in cpus.iter().enumerate() {
        let task = Task {
            node: u8::try_from(node)?,
            addresses: addresses.clone(),
            coherence,
            program: program.to_owned(),
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            cpu: *cpu,
        };
        let mut command = Command::new(&me);
        command.arg(AS_NODE).arg(serde_json::to_string(&task)?).stdin(Stdio::null()).stdout(Stdio::piped());
        nodes.0.push(command.spawn().context("A node can't be started")?);
    }
    let output = nodes.output(patience)?;
    let name = program.file_name().unwrap_or_default().display().to_string();
    let said: Value = serde_json::from_str(&output)
        .with_context(|| format!("{name} on {} nodes ended with: {output}", cpus.len()))?;
    let text = said["text"].as_str().unwrap_or_default();
    let line: Value = serde_json::from_str(text.trim()).with_context(|| format!("{name} printed: {text}"))?;
    if said["code"] != 0 || line["verified"] != true || line["nodes"] != cpus.len() {
        bail!("{name} {} on {} nodes came to {said}", arguments.join(" "), cpus.len());
    }
    let counted = said["nodes"].as_array().cloned().unwrap_or_default();
    Ok(Ran { line, nodes: counted })
}

/// Processes of nodes. Dropping it kills running ones.
struct Nodes(Vec<Child>);

impl Nodes {
    /// Waits for all nodes. Returns node 0's output, which fits in a pipe. (Sleeps until they end, since polling would disturb the
    /// measurement.)
    fn output(&mut self, patience: Duration) -> anyhow::Result<String> {
        let deadline = Instant::now() + patience;
        for child in &self.0 {
            let ended = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
                .context("The end of a node can't be waited for")?;
            let mut polled = [PollFd::new(&ended, PollFlags::IN)];
            let left = || {
                let left = deadline.saturating_duration_since(Instant::now());
                Timespec::try_from(left).map_err(|_| Errno::OVERFLOW)
            };
            let ended = retry_on_intr(|| poll(&mut polled, Some(&left()?)));
            if ended.context("The end of a node can't be waited for")? == 0 {
                return Err(Late { nodes: self.0.len(), after: patience }.into());
            }
        }
        let first =
            self.0.first_mut().and_then(|child| child.stdout.take()).context("Node 0 has no output")?;
        std::io::read_to_string(first).context("Node 0's output can't be read")
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails if it has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
