//! A payload VM that spans several nodes: either all of them on this host, or one of them, with the others started
//! separately.

use std::ffi::OsString;
use std::net::ToSocketAddrs as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use cluster_key::ClusterKey;
use control_api::discovery;
use dsm::Policy;
use machine::memory::shared::SharedRam;
use monitor::description::{HugePages, Payload, SandboxMode, VmDescription};
use monitor::dsm::{Checkpoints, FaultInjection, NodeAddress, NodeSettings, RdmaDevice, SpanningVm};
use monitor::payload::process_status;
use monitor::sandbox::{NodePlaces, Sandbox, ThreadKind, privileges_used, raise_limits_for_rdma};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::payload;
use crate::cli::{Coherence, RunArgs};
use crate::exposure::{self, Exposed};
use crate::{failure, output};

/// Time-out for the local nodes to end after node 0.
const NODES_END_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns whether a child is stopped by a signal, so that it can't end by itself. Doesn't use `/proc`, which the
/// sandbox lacks.
fn is_stopped(child: &Child) -> bool {
    let which = WaitId::Pid(Pid::from_child(child));
    let how = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(which, how), Ok(Some(status)) if status.stopped())
}

/// The command line's node options.
#[derive(Debug)]
pub struct Span {
    nodes: u8,
    /// This node and the addresses of all nodes. `None`: all nodes start here.
    place: Option<(u8, Vec<NodeAddress>)>,
    key: Option<ClusterKey>,
    coherence: Coherence,
    checkpoints: Option<Checkpoints>,
    restart: Option<PathBuf>,
}

/// Default interval of checkpoints in seconds.
const DEFAULT_CHECKPOINT_INTERVAL_S: f64 = 10.0;

/// Returns the command line's checkpoint options.
fn checkpoints(args: &mut RunArgs) -> anyhow::Result<Option<Checkpoints>> {
    let seconds = args.checkpoint_every.take().unwrap_or(DEFAULT_CHECKPOINT_INTERVAL_S);
    let Some(folder) = args.checkpoint.take() else { return Ok(None) };
    let every = Duration::try_from_secs_f64(seconds).ok().filter(|every| *every >= Duration::from_millis(10));
    let every = every
        .ok_or_else(|| anyhow!("--checkpoint-every: {seconds} s is not possible; choose 0.01 or more"))?;
    Ok(Some(Checkpoints { folder, every }))
}

impl Span {
    /// Takes the options from the flags. Returns `None` for a VM of one node. With several nodes there is one vCPU per
    /// node unless --cpus is given.
    pub fn take(args: &mut RunArgs) -> anyhow::Result<Option<Self>> {
        let peers = std::mem::take(&mut args.peers);
        let named = u8::try_from(peers.len()).unwrap_or(u8::MAX);
        let nodes = args.nodes.take().unwrap_or(named.max(1));
        let node = args.node.take();
        let coherence = args.coherence.take();
        let (checkpoints, restart) = (checkpoints(args)?, args.restart.take());
        if nodes == 1 && peers.is_empty() && node.is_none() {
            for (given, flag) in [
                (coherence.is_some(), "--coherence"),
                (checkpoints.is_some(), "--checkpoint"),
                (restart.is_some(), "--restart"),
            ] {
                if given {
                    bail!("{flag}: it is about VMs of several nodes; give --nodes, too");
                }
            }
            return Ok(None);
        }
        if args.payload.is_none() {
            bail!("--nodes: only payload guests can span nodes; give --payload, too");
        }
        if !(2..=64).contains(&nodes) {
            bail!("--nodes: {nodes} nodes are not possible; choose 2 to 64");
        }
        let place = match (node, peers.is_empty()) {
            (None, true) => None,
            (Some(node), false) if named == nodes && node < nodes => Some((node, peers)),
            (Some(node), false) if named == nodes => {
                bail!("--node: there is no node {node} among {nodes}; they are numbered from 0")
            }
            (Some(_), false) => {
                bail!("--peers: {named} addresses were given for {nodes} nodes; give one for each")
            }
            _ => bail!("--node and --peers belong together: which node this is, and where all are"),
        };
        let key = args.cluster_key.take().as_deref().map(ClusterKey::load).transpose()?;
        if let (Some((_, addresses)), None) = (&place, &key) {
            check_exposure(addresses, args.insecure)?;
        }
        if args.cpus.is_none() {
            args.cpus = Some(monitor::description::written::Cpus::Count(nodes.into()));
        }
        let coherence = coherence.unwrap_or(Coherence::Update);
        Ok(Some(Self { nodes, place, key, coherence, checkpoints, restart }))
    }

    fn policy(&self) -> Policy {
        monitor::dsm::tuned(match self.coherence {
            Coherence::Invalidate => Policy::IVY,
            Coherence::Update => Policy::OURS,
        })
    }
}

/// Runs one node. If all nodes are local, starts the others.
pub fn run(
    description: &VmDescription,
    program: &Payload,
    span: &Span,
    json: bool,
) -> anyhow::Result<ExitCode> {
    if description.memory.hugepages != HugePages::None {
        bail!("--hugepages: memory that nodes share moves in pages of 4 KiB; leave it out");
    }
    let builder = payload::builder(description, program)?;
    let mut children = ChildNodes::default();
    let (node, addresses) = match &span.place {
        Some((node, addresses)) => (*node, addresses.clone()),
        None => (0, children.start(&description.name, span.nodes)?),
    };
    let settings = NodeSettings {
        node,
        addresses,
        device: None,
        key: span.key.clone(),
        policy: span.policy(),
        record: false,
        checkpoints: span.checkpoints.clone(),
        restart: span.restart.clone(),
        fault_injection: FaultInjection::default(),
    };
    let builder = builder.userfault(SharedRam::userfault()?);
    let settings = confine(description, settings, children.folder.is_some())?;
    // With RDMA there are none: see `NodePlaces::rdma`.
    let privileged = description.sandbox == SandboxMode::On && settings.device.is_none();
    let builder = if privileged { builder.on_thread_start(privileges_used) } else { builder };
    let mut vm = SpanningVm::join(builder, &settings)?;
    if privileged {
        privileges_used();
    }
    if node == 0 {
        vm.serve_top(&top_socket(&description.name))?;
    }
    // Immediately, as the rest of the shutdown may take a while.
    vm.on_failure(move |text| {
        failure::report(&anyhow!(text.to_owned()), json);
    });
    let ended = vm.run()?;
    children.end();
    // The failing component has already printed the cause.
    let Ok(code) = ended.outcome else { return Ok(ExitCode::FAILURE) };
    if json && node == 0 {
        output::print_json(&serde_json::json!({
            "outcome": "exit",
            "code": code,
            "coherence": span.coherence.name(),
            "nodes": ended.reports,
            "exits": ended.exits,
        }))?;
    }
    Ok(ExitCode::from(process_status(code)))
}

/// Checks that links without a key stay on this host, or that the user accepts the risk.
fn check_exposure(addresses: &[NodeAddress], insecure: bool) -> anyhow::Result<()> {
    for address in addresses {
        let (NodeAddress::Tcp(place) | NodeAddress::Rdma(place)) = address else { continue };
        let found =
            place.to_socket_addrs().with_context(|| format!("--peers: {place} can't be looked up"))?;
        let exposed = Exposed {
            flag: "--peers",
            address: &address.to_string(),
            key_flag: "--cluster-key",
            risk: "anyone who can reach it can take a node's place, and anyone on the network path can read and change the guest's memory",
        };
        exposure::check(exposed, found.map(|found| found.ip()), false, insecure)?;
    }
    Ok(())
}

/// Applies the sandbox to this node. From now on it needs only its sockets, KVM and the directories of checkpoints.
fn confine(
    description: &VmDescription,
    mut settings: NodeSettings,
    has_children: bool,
) -> anyhow::Result<NodeSettings> {
    let runtime = discovery::runtime_directory();
    discovery::prepare_directory(&runtime)?;
    let mut places = NodePlaces { has_children, ..NodePlaces::default() };
    if settings.node == 0 {
        places.sockets.insert(runtime);
    }
    for (node, address) in settings.addresses.iter_mut().enumerate() {
        let own = node == usize::from(settings.node);
        let rdma = matches!(address, NodeAddress::Rdma(_));
        match address {
            NodeAddress::Unix(socket) => {
                let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
                places.sockets.insert(folder.map_or_else(|| PathBuf::from("."), PathBuf::from));
            }
            NodeAddress::Tcp(_) if description.sandbox == SandboxMode::Off => {}
            NodeAddress::Tcp(place) | NodeAddress::Rdma(place) => {
                // The sandbox permits no name resolution. It happens once here, and the first address is used.
                let found = place
                    .to_socket_addrs()
                    .with_context(|| format!("--peers: {place} can't be looked up"))?;
                let first = found.into_iter().next();
                let first = first.ok_or_else(|| anyhow!("--peers: {place} has no address"))?;
                if own { &mut places.listens } else { &mut places.connects }.insert(first.port());
                *place = first.to_string();
                if rdma && own {
                    // The sandbox permits no loading of libraries either.
                    let found = RdmaDevice::look(first.ip());
                    let found = found.with_context(|| {
                        format!(
                            "--peers: this node, {node}, can't have its links by RDMA as rdma:{first} asks"
                        )
                    })?;
                    places.rdma = Some(found.node().to_owned());
                    settings.device = Some(found);
                    raise_limits_for_rdma();
                }
            }
        }
    }
    if let Some(checkpoints) = &settings.checkpoints {
        checkpoints.make_folder()?;
        places.checkpoints.insert(checkpoints.folder.clone());
    }
    // A missing directory leads to an error about a missing checkpoint.
    places.restarts.extend(settings.restart.clone().filter(|folder| folder.exists()));
    let sandbox = Sandbox::prepare_node(description, &places)?;
    sandbox.enter_process()?;
    sandbox.thread_filter(ThreadKind::Node).apply()?;
    Ok(settings)
}

/// Returns the socket on which node 0 of a VM reports its nodes' counters.
pub fn top_socket(name: &str) -> PathBuf {
    discovery::runtime_directory().join(format!("{name}.dsm"))
}

/// Nodes 1 and up of a VM whose nodes are all on this host.
#[derive(Default)]
struct ChildNodes {
    children: Vec<Child>,
    folder: Option<PathBuf>,
}

impl ChildNodes {
    /// Starts the nodes; returns the addresses of all nodes.
    fn start(&mut self, name: &str, nodes: u8) -> anyhow::Result<Vec<NodeAddress>> {
        let runtime = discovery::runtime_directory();
        discovery::prepare_directory(&runtime)?;
        let folder = runtime.join(format!("{name}-{}.nodes", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| {
            format!("The folder {} for the nodes' sockets can't be made", folder.display())
        })?;
        self.folder = Some(folder.clone());
        let addresses = (0..nodes)
            .map(|node| Ok(format!("unix:{}", folder.join(node.to_string()).display()).parse()?))
            .collect::<anyhow::Result<Vec<NodeAddress>>>()?;
        let peers = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let program = std::env::current_exe().context("This program's own file can't be found")?;
        let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
        let after_run = words.iter().position(|word| word == "run").map_or(0, |at| at + 1);
        for node in 1..nodes {
            let more = ["--node".into(), node.to_string().into(), "--peers".into(), peers.clone().into()];
            words.splice(after_run..after_run, more);
            let child = Command::new(&program)
                .args(&words)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .with_context(|| format!("Node {node} can't be started from {}", program.display()))?;
            self.children.push(child);
            words.drain(after_run..after_run + 4);
        }
        Ok(addresses)
    }

    /// Waits for the nodes until the time-out, then kills them.
    fn end(&mut self) {
        let deadline = Instant::now() + NODES_END_TIMEOUT;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline && !is_stopped(child) {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Fails if the node has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
        self.children.clear();
        if let Some(folder) = self.folder.take()
            && let Err(error) = std::fs::remove_dir_all(&folder)
        {
            tracing::warn!(%error, folder = %folder.display(), "The folder of the nodes' sockets can't be removed");
        }
    }
}

impl Drop for ChildNodes {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_distinguished_from_a_running_one() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = rustix::process::Pid::from_child(&child);
        assert!(!is_stopped(&child));
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        let since = Instant::now();
        while !is_stopped(&child) && since.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(is_stopped(&child));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(&child));
    }
}
