//! One node of a VM that spans monitors, from its settings to its end.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use dsm::trace::Entry;
use dsm::{Config, Node, NodeId, Plant, Policy, wire};
use machine::exits::ExitSnapshot;
use machine::vcpu::{GuestRegisters, VcpuError};
use prefetch::MAX_PREFETCH_CONTEXTS;
use serde_json::Value;

use super::checkpoint::{self, Checkpoints, List, Listed, Member, Plan, Restored, Step};
use super::engine::{Engine, Machine, Outcome, PeerStates};
use super::identity::{Identified, compatibility};
use super::join::{Hello, device_of, join};
use super::link::{Control, Link};
use super::{CheckpointError, DsmError, NodeAddress, RdmaDevice, service, top};
use crate::payload::{PayloadBuilder, PayloadError, PayloadVm, Whole, vcpus_of};

/// Time that node 0 waits at the end for reports of nodes that still send heartbeats.
const FINAL_REPORTS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that other nodes wait at the end for node 0, which may be waiting for one of them, while it still sends heartbeats.
const OTHER_NODES_END_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval at which a node that waits for others checks whether the VM has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Limit of unprocessed checkpoint messages. Correct nodes send one at a time.
const MAX_QUEUED_STEPS: usize = 256;

/// Settings that make a payload VM one node of several.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// This node's number.
    pub node: u8,
    /// Addresses of all nodes, in order, this one included: 2 to 64.
    pub addresses: Vec<NodeAddress>,
    /// The RDMA device with this node's address, if links use RDMA and the device was found before a sandbox. Otherwise
    /// [`SpanningVm::join`] finds it. From then on the credentials of the process and its threads must not change.
    pub device: Option<RdmaDevice>,
    /// Encrypts and authenticates links. The same on all nodes. Without a key, any host that reaches a node's address can impersonate
    /// another node, and a host on the path can read and change the guest's memory.
    pub key: Option<ClusterKey>,
    /// The policy of the memory protocol. The same on all nodes.
    pub policy: Policy,
    /// Record this node for the simulator ([`Ended::trace`]). Each event costs memory.
    pub record: bool,
    /// Folder and interval of checkpoints; none: no checkpoints.
    pub checkpoints: Option<Checkpoints>,
    /// Resume from the last checkpoint in this folder, instead of starting the program.
    pub restart: Option<PathBuf>,
    /// Fault injection, for tests; none by default.
    pub fault_injection: FaultInjection,
}

/// Fault injection, for tests. No program offers it.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultInjection {
    /// A bug of the protocol to inject.
    pub plant: Plant,
    /// Pages with odd numbers become write-update at their first fault. For policies that change no modes.
    pub mixed_modes: bool,
    /// Bytes that the first node sends to the second arrive later by this time, in order: a slow path of the network.
    pub slow_link: Option<(u8, u8, Duration)>,
}

/// The end of a VM that spans nodes.
#[derive(Debug)]
pub struct Ended {
    /// The program's exit code, or the reason for which the VM couldn't continue.
    pub outcome: Result<u32, String>,
    /// Whether this node found the failure; else another node reported it.
    pub found_here: bool,
    /// On node 0, after an exit: the reports of all nodes that sent one.
    pub reports: BTreeMap<u8, Value>,
    /// Exits of this node's vCPUs.
    pub exits: ExitSnapshot,
    /// The recording of this node; see [`NodeSettings::record`].
    pub trace: Vec<Entry>,
    /// The configuration of this node's protocol, for a simulation of the same run.
    pub config: Config,
}

/// One node of a VM that spans several monitors.
pub struct SpanningVm {
    vm: PayloadVm,
    engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
    nodes: u8,
    vcpus: u32,
    config: Config,
    top: Option<top::Served>,
    checkpointing: Option<Checkpointing>,
}

/// Parameters of the checkpoint thread.
struct Checkpointing {
    member: Member,
    steps: Receiver<(u8, Step)>,
    plan: Plan,
}

/// The node, in its role for the payload VM.
struct Seat {
    engine: Arc<Engine>,
    nodes: u32,
    first: u32,
}

impl Seat {
    fn local(&self, index: u32) -> usize {
        usize::try_from(index.saturating_sub(self.first)).unwrap_or(usize::MAX)
    }
}

impl Whole for Seat {
    fn node(&self) -> u32 {
        self.engine.me.into()
    }
    fn nodes(&self) -> u32 {
        self.nodes
    }
    fn before_run(&self, index: u32, registers: &dyn GuestRegisters) {
        self.engine.before_run(self.local(index), registers);
    }
    fn ended(&self, index: u32, parked: bool) {
        self.engine.vcpu_ended(self.local(index), parked);
    }
    fn phase(&self, begins: bool) {
        if let Some(core) = &mut *self.engine.lock() {
            core.mark(begins);
        }
        for link in self.engine.links() {
            self.engine.send_control(link.peer, &Control::Phase(begins));
        }
    }
    fn before_stop(&self) {
        self.engine.stop_waiting();
    }
}

/// The console of a node other than 0: sends to node 0.
struct RemoteConsole(Arc<Engine>);

impl Write for RemoteConsole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(link) = self.0.link(0)
            && link.send_patiently(&Control::Console(bytes.to_vec()))
        {
            self.0.wake_faults_thread();
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The console of node 0, which all nodes share.
struct SharedConsole(Arc<Engine>);

impl Write for SharedConsole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_console(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush_console().map(drop)
    }
}

impl SpanningVm {
    /// Connects to the other nodes, waits for those that haven't started, and builds this node's part of the VM. `builder` has the settings
    /// of the whole VM, the same on all nodes; only node 0's console is used. Nothing runs yet.
    pub fn join(builder: PayloadBuilder, settings: &NodeSettings) -> Result<Self, DsmError> {
        let (config, here) = Self::configure(&builder, settings)?;
        let Config { nodes, pages, .. } = config;
        let (vcpus, wide) = (builder.definition().vcpus, u32::from(nodes));
        // The heap grows on all threads while pages are requested.
        crate::sandbox::use_one_arena();
        let identified = Identified { definition: builder.definition(), nodes, policy: settings.policy };
        let identity = identified.identity();
        let digest = compatibility(identity, settings.checkpoints.is_some(), settings.restart.is_some());
        let device = device_of(settings.node, &settings.addresses, settings.device.as_ref())?;
        let hello = Hello { node: settings.node, nodes, digest, rdma: device.is_some() };
        let (last, first) = Self::checkpoints_of(settings, identity, nodes)?;
        let links = join(hello, &settings.addresses, device.as_ref(), settings.key.as_ref())?;
        let (sender, steps) = sync_channel(MAX_QUEUED_STEPS);
        let engine =
            Arc::new(Engine::new(settings.node, links, here.len(), settings.fault_injection, sender)?);
        let threads = service::start(&engine)?;
        let seat = Seat { engine: Arc::clone(&engine), nodes: wide, first: here.start };
        let (builder, console) = if settings.node == 0 {
            builder.replace_console(SharedConsole(Arc::clone(&engine)))
        } else {
            builder.replace_console(RemoteConsole(Arc::clone(&engine)))
        };
        *engine.console() = (settings.node == 0).then_some(console);
        let built = builder.part_of(Arc::new(seat)).build();
        let vm = match built {
            Ok(vm) => vm,
            Err(error) => {
                engine.fail(format!("Node {} could not be made: {}", settings.node, chain(&error)));
                end_threads(&engine, threads);
                return Err(error.into());
            }
        };
        let node = match &settings.restart {
            None => Node::new(config)
                .map(|node| Restored { node, ended: vec![false; here.len()] })
                .map_err(DsmError::from),
            Some(folder) => Self::restore(&vm, &engine, config, identity, folder, last.as_ref(), &steps),
        };
        let Restored { node, ended } = match node {
            Ok(node) => node,
            Err(error) => {
                // Logged once, by the node that found the problem.
                engine.fail(format!("Node {} could not be made: {}", settings.node, chain(&error)));
                end_threads(&engine, threads);
                return Err(error);
            }
        };
        let (manager, ids) = vm.vcpus();
        if let Some(ram) = vm.shared_ram() {
            let machine = Machine {
                ram: Arc::clone(ram),
                manager: Arc::clone(manager),
                ids: ids.iter().map(|(id, _)| *id).collect(),
                stopper: vm.stopper(),
                memory: vm.memory(),
            };
            engine.begin(node, machine, usize::try_from(pages).unwrap_or(0), settings.record);
        }
        if let Some(core) = &mut *engine.lock() {
            for (slot, ended) in core.vcpus.iter_mut().zip(ended) {
                slot.ended = ended;
            }
        }
        let checkpointing = settings.checkpoints.as_ref().map(|checkpoints| {
            let member = Member { engine: Arc::clone(&engine), folder: checkpoints.folder.clone(), identity };
            Checkpointing { member, steps, plan: Plan { nodes, first, every: checkpoints.every } }
        });
        Ok(Self { vm, engine, threads, nodes, vcpus, config, top: None, checkpointing })
    }

    /// Checks the settings. Returns this node's protocol configuration and its vCPUs.
    fn configure(
        builder: &PayloadBuilder,
        settings: &NodeSettings,
    ) -> Result<(Config, Range<u32>), DsmError> {
        let nodes = u8::try_from(settings.addresses.len()).unwrap_or(u8::MAX);
        let vcpus = builder.definition().vcpus;
        if !(2..=64).contains(&nodes) || settings.node >= nodes || vcpus < u32::from(nodes) {
            return Err(DsmError::Settings(format!(
                "node {} of {nodes}, with {vcpus} vCPUs in all; choose 2 to 64 nodes and at least one vCPU for each",
                settings.node
            )));
        }
        let here = vcpus_of(settings.node.into(), nodes.into(), vcpus);
        let pages = builder.highest_address().div_ceil(wire::PAGE_SIZE as u64);
        let config = Config {
            me: NodeId(settings.node),
            nodes,
            vcpus: u16::try_from(here.len()).unwrap_or(u16::MAX).saturating_add(MAX_PREFETCH_CONTEXTS),
            stride: pages.div_ceil(nodes.into()),
            pages,
            policy: settings.policy,
            plant: settings.fault_injection.plant,
        };
        config.check()?;
        Ok((config, here))
    }

    /// On node 0, before anything starts: the checkpoint to resume from, if any, and the number of the next one.
    fn checkpoints_of(
        settings: &NodeSettings,
        identity: u64,
        nodes: u8,
    ) -> Result<(Option<List>, u64), CheckpointError> {
        if settings.node != 0 {
            return Ok((None, 0));
        }
        let last = settings.restart.as_deref().map(List::read).transpose()?;
        if let (Some(list), Some(folder)) = (&last, &settings.restart) {
            let other = |reason: String| CheckpointError::Other { path: folder.clone(), reason };
            if list.nodes.len() != usize::from(nodes) {
                let saved = list.nodes.len();
                return Err(other(format!(
                    "it had {saved} nodes, this one has {nodes}; give --nodes {saved}"
                )));
            }
            if list.identity != identity {
                return Err(other(checkpoint::another_program()));
            }
        }
        let mut number = last.as_ref().map_or(0, |list| list.number);
        if let Some(checkpoints) = &settings.checkpoints {
            checkpoint::make_folder(&checkpoints.folder)?;
            number = match List::read(&checkpoints.folder) {
                Ok(list) => number.max(list.number),
                Err(CheckpointError::None(_)) => number,
                Err(error) => return Err(error),
            };
        }
        Ok((last, number.saturating_add(1)))
    }

    /// Restores this node. Node 0 sends the checkpoint's file name. Returns the protocol's node, and which vCPUs have parked.
    fn restore(
        vm: &PayloadVm,
        engine: &Engine,
        config: Config,
        identity: u64,
        folder: &Path,
        last: Option<&List>,
        steps: &Receiver<(u8, Step)>,
    ) -> Result<Restored, DsmError> {
        let own: Listed = if let Some(list) = last {
            for listed in &list.nodes {
                engine.send_control(listed.node, &Control::Checkpoint(Step::Restore(listed.clone())));
            }
            engine.console_bytes.store(list.console_bytes, Ordering::Relaxed);
            list.nodes.first().cloned().ok_or_else(|| CheckpointError::None(folder.to_owned()))?
        } else {
            loop {
                match steps.recv_timeout(END_POLL_INTERVAL) {
                    Ok((0, Step::Restore(listed))) if listed.node == engine.me => break listed,
                    Err(RecvTimeoutError::Timeout) if engine.outcome().is_none() => {}
                    _ => {
                        let known = match engine.outcome() {
                            Some(Outcome::Failed { text, .. }) => text,
                            _ => "node 0 doesn't say which checkpoint".to_owned(),
                        };
                        return Err(DsmError::Ended(known));
                    }
                }
            }
        };
        Ok(checkpoint::restore(vm, config, identity, folder, &own)?)
    }

    /// Serves reports of all nodes on a Unix socket while the VM runs. A client gets one JSON array, with a report of each node that
    /// answered within half a second. For node 0.
    pub fn serve_top(&mut self, socket: &Path) -> Result<(), DsmError> {
        let served = top::serve(&self.engine, socket).map_err(|source| DsmError::Listen {
            node: self.engine.me,
            address: format!("unix:{}", socket.display()),
            source,
        })?;
        self.top = Some(served);
        Ok(())
    }

    /// Registers a callback for the reason why the VM can't continue. It is called at most once, on any thread, as soon as the reason is
    /// known: on the node that found it, and on node 0.
    pub fn on_failure(&self, tell: impl Fn(&str) + Send + Sync + 'static) {
        // The first callback stays.
        let _ = self.engine.on_failure.set(Box::new(tell));
    }

    /// Runs this node until the VM ends, here or on another node.
    pub fn run(mut self) -> Result<Ended, DsmError> {
        self.await_all();
        let ended = if self.engine.outcome().is_none() {
            self.vm.start()?;
            if let Some(checkpointing) = self.checkpointing.take() {
                self.threads.push(start_checkpoints(checkpointing)?);
            }
            self.vm.wait()
        } else {
            // The VM ended before its start.
            self.vm.stop().and(Err(VcpuError::Gone.into()))
        };
        match ended {
            Ok(code) => self.engine.end(Outcome::Exit(code)),
            Err(PayloadError::AllParked { .. }) => self.await_end(),
            Err(error) if self.engine.outcome().is_none() => self.engine.fail(chain(&error)),
            Err(_) => {}
        }
        let (report, trace) = match &mut *self.engine.lock() {
            Some(core) => (core.report(self.engine.me), core.pages.recorded()),
            None => (Value::Null, Vec::new()),
        };
        let reports = self.collect_reports(report);
        let (outcome, found_here) = match self.engine.outcome() {
            Some(Outcome::Exit(code)) => (Ok(code), true),
            Some(Outcome::Failed { text, here }) => (Err(text), here),
            // `wait` returned, so there is an outcome.
            None => (Err("The VM ended without a reason".to_owned()), true),
        };
        let exits = self.vm.exits();
        for link in self.engine.links() {
            link.close();
        }
        end_threads(&self.engine, std::mem::take(&mut self.threads));
        Ok(Ended { outcome, found_here, reports, exits, trace, config: self.config })
    }

    /// Waits until all nodes are ready.
    fn await_all(&self) {
        let engine = &self.engine;
        if engine.me != 0 {
            engine.send_control(0, &Control::Start);
        }
        let needed = if engine.me == 0 { usize::from(self.nodes) - 1 } else { 1 };
        let mut states = engine.peer_states();
        // A node that never becomes ready is lost by its silence, which ends the VM.
        while states.ready.len() < needed && engine.outcome().is_none() {
            states = engine.wait_for_peer_states(states, Duration::from_secs(1));
        }
        drop(states);
        if engine.me == 0 {
            for node in 1..self.nodes {
                engine.send_control(node, &Control::Start);
            }
        }
    }

    /// All vCPUs of this node have parked. The node continues to serve its memory.
    fn await_end(&self) {
        let engine = &self.engine;
        engine.send_control(0, &Control::Parked);
        let mut states = engine.peer_states();
        if engine.me == 0 {
            states.parked.insert(0);
        }
        while engine.outcome().is_none() {
            if engine.me == 0 && states.parked.len() == usize::from(self.nodes) {
                drop(states);
                engine.fail(PayloadError::AllParked { vcpus: self.vcpus }.to_string());
                return;
            }
            states = engine.wait_for_peer_states(states, Duration::from_secs(1));
        }
    }

    /// Node 0 collects the reports of the others. The others send theirs, and wait until node 0 has all: it may still need messages over
    /// their links.
    fn collect_reports(&self, own: Value) -> BTreeMap<u8, Value> {
        let engine = &self.engine;
        // After a failure no reports are needed, and a node that is cut off would be waited for in vain.
        let timeout = match engine.outcome() {
            Some(Outcome::Exit(_)) if engine.me == 0 => FINAL_REPORTS_TIMEOUT,
            Some(Outcome::Exit(_)) => OTHER_NODES_END_TIMEOUT,
            _ => Duration::ZERO,
        };
        let until = Instant::now() + timeout;
        if engine.me != 0 {
            engine.send_control(0, &Control::Report(own.to_string().into_bytes()));
        }
        let mut states = engine.peer_states();
        loop {
            let awaited: Vec<&Link> = engine.links().filter(|link| self.awaits(link, &states)).collect();
            // A node that is silent was lost at the program's end or before. That is reported after the usual time.
            let silent = awaited.iter().map(|link| service::until_lost(link)).max().unwrap_or_default();
            let left = until.saturating_duration_since(Instant::now()).min(silent);
            if left.is_zero() {
                break;
            }
            states = engine.wait_for_peer_states(states, left);
        }
        if let Some(Outcome::Exit(code)) = engine.outcome() {
            self.warn_missing_nodes(code, &states);
        }
        let parse = |(node, bytes): (&u8, &Vec<u8>)| Some((*node, serde_json::from_slice(bytes).ok()?));
        let mut reports: BTreeMap<u8, Value> = states.reports.iter().filter_map(parse).collect();
        reports.insert(engine.me, own);
        reports
    }

    /// Whether a link must still deliver something before this node may end.
    fn awaits(&self, link: &Link, states: &PeerStates) -> bool {
        let needed =
            if self.engine.me == 0 { !states.reports.contains_key(&link.peer) } else { link.peer == 0 };
        needed && !states.disconnected.contains(&link.peer)
    }

    /// Logs the nodes that may not have learned of the program's end. The program's result stays valid.
    fn warn_missing_nodes(&self, code: u32, states: &PeerStates) {
        for link in self.engine.links() {
            let (peer, address) = (link.peer, &link.address);
            if self.awaits(link, states) {
                tracing::warn!(
                    "The program has ended with {code}, but node {peer} has not ended with it and was last heard from {} ms ago over the link {address}: its host is down, cut off, stopped or very slow, and its monitor may have to be ended by hand",
                    service::silence(link).as_millis()
                );
            } else if self.engine.me == 0 && !states.reports.contains_key(&peer) {
                tracing::warn!(
                    "The program has ended with {code}, but the link {address} to node {peer} was closed before it said what it counted: its monitor has died or was ended"
                );
            }
        }
    }
}

/// Starts the checkpoint thread. It ends after the VM.
fn start_checkpoints(work: Checkpointing) -> Result<JoinHandle<()>, DsmError> {
    let thread = std::thread::Builder::new().name("dsm-checkpoint".to_owned());
    thread
        .spawn(move || checkpoint::serve(&work.member, &work.steps, work.plan))
        .map_err(|source| DsmError::Host { what: "a thread", source })
}

fn end_threads(engine: &Engine, threads: Vec<JoinHandle<()>>) {
    for link in engine.links() {
        // Sends the queued bytes, unless the peer is gone.
        link.flush();
        link.close();
    }
    engine.quit.store(true, Ordering::Relaxed);
    engine.wake_faults_thread();
    for thread in threads {
        if thread.join().is_err() {
            tracing::error!("A thread of the shared memory panicked; this is a bug");
        }
    }
}

/// An error and its causes, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}
