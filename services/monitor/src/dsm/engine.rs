//! The node's engine: the lock around the protocol, and the execution of its actions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dsm::{Access, Action, Event, Fault, Message, Node, NodeSet, Page, wire};
use machine::memory::GuestMemorySpace;
use machine::memory::shared::SharedRam;
use machine::vcpu::VcpuManager;
use prefetch::NodePrefetcher;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

use super::DsmError;
use super::checkpoint::Step;
use super::hot::HotPages;
use super::link::{Control, Link};
use super::pages::LivePages;
use super::report::{Phase, Stalls};
use super::spanning::FaultInjection;
use super::vcpus::Slot;
use crate::payload::Stopper;

/// Outcome of a VM that spans hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The guest ended with this exit code.
    Exit(u32),
    /// The VM failed. `here`: this node found the reason; else another node reported it.
    Failed { text: String, here: bool },
}

/// Parts of this node's payload VM that service threads need. Set once the VM exists.
pub(super) struct Machine {
    pub(super) ram: Arc<SharedRam>,
    pub(super) manager: Arc<VcpuManager>,
    /// Ids of this node's vCPUs, in the order of the protocol's numbers.
    pub(super) ids: Vec<u32>,
    pub(super) stopper: Stopper,
    /// All guest memory, by the monitor's own mapping.
    pub(super) memory: GuestMemorySpace,
}

/// Counters of this node besides the protocol's.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    /// Messages sent and their bytes, by kind.
    pub(super) sent: BTreeMap<&'static str, (u64, u64)>,
    /// Counts and lengths of stalls.
    pub(super) stalls: Stalls,
    /// Faults on pages that had arrived when the fault was read.
    pub(super) late: u64,
    /// vCPUs kicked to sample their registers.
    pub(super) kicks: u64,
    /// Instructions that counted as retired although several samples of their registers were equal.
    pub(super) unproven: u64,
    /// Instructions that were emulated so that pages granted to them could be released.
    pub(super) stepped: u64,
    /// Trapped instructions that were emulated, and unsupported ones, whose page became write-invalidate.
    pub(super) emulated: u64,
    pub(super) not_emulated: u64,
    /// Pages that were prefetched.
    pub(super) prefetched: u64,
    /// Prefetched pages that were revoked soon ([`super::prefetch::EARLY_REVOCATION_NS`]).
    pub(super) prefetched_in_vain: u64,
    /// Time that vCPUs stalled for pages that this node had had before, and for trapped stores, ns.
    pub(super) waited_again_ns: u64,
    /// Time that vCPUs stalled for pages that this node had never had, ns.
    pub(super) waited_first_ns: u64,
}

/// Messages that are batched: several events are processed under one lock, and their messages leave in one write per link.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    batching: bool,
    /// Nodes with batched messages.
    to: NodeSet,
}

impl Outbox {
    /// Batches messages until [`Engine::flush_batched`].
    pub(super) fn batch(&mut self) {
        self.batching = true;
    }
}

/// State behind the engine's lock.
pub(super) struct Core {
    pub(super) node: Node,
    pub(super) pages: LivePages,
    pub(super) vcpus: Vec<Slot>,
    /// vCPUs by thread ID.
    pub(super) threads: HashMap<u32, usize>,
    pub(super) counts: Counts,
    pub(super) hot: HotPages,
    pub(super) phase: Phase,
    pub(super) stopping: bool,
    /// vCPUs are leaving the guest for a checkpoint: they hold no pages.
    pub(super) suspending: bool,
    /// vCPUs have left the guest for a checkpoint.
    pub(super) suspended: bool,
    /// A vCPU has ended the VM.
    pub(super) ending: bool,
    /// When to kick vCPUs again, ns, and which.
    pub(super) rekick: Vec<(u64, usize)>,
    pub(super) prefetcher: NodePrefetcher,
    /// Predicted pages are being requested.
    pub(super) prefetching: bool,
    /// Pages for which tests have requested a mode.
    pub(super) advised: BTreeSet<Page>,
    actions: Vec<Action>,
    bytes: Vec<u8>,
    pub(super) outbox: Outbox,
    /// The protocol's deadline that the faults thread's timer is set for, ns.
    pub(super) armed: Option<u64>,
}

/// Called once, on any thread, with the reason for which the VM can't continue.
pub(super) type FailureHandler = Box<dyn Fn(&str) + Send + Sync>;

/// One node of a VM that spans hosts.
pub(super) struct Engine {
    pub(super) me: u8,
    pub(super) links: Vec<Option<Link>>,
    pub(super) machine: OnceLock<Machine>,
    core: Mutex<Option<Core>>,
    /// One per vCPU of this node, used with `core`.
    pub(super) changed: Vec<Condvar>,
    /// Wakes the faults thread.
    pub(super) wake: OwnedFd,
    outcome: Mutex<Option<Outcome>>,
    /// Called at once when the VM can't continue.
    pub(super) on_failure: OnceLock<FailureHandler>,
    /// Notified when the outcome is known, and when reports and `Parked` arrive. Used with `peer_states`.
    pub(super) peer_states_changed: Condvar,
    peer_states: Mutex<PeerStates>,
    /// On node 0, the sink of the guest's console.
    console: Mutex<Option<Box<dyn Write + Send>>>,
    /// Bytes written to it.
    pub(super) console_bytes: AtomicU64,
    /// Sends other nodes' checkpoint messages to the checkpoint thread.
    pub(super) steps: SyncSender<(u8, Step)>,
    /// The service threads must end.
    pub(super) quit: AtomicBool,
    /// Fault injection, for tests.
    pub(super) fault_injection: FaultInjection,
}

/// Reports and states of other nodes.
#[derive(Debug, Default)]
pub(super) struct PeerStates {
    /// Last reports of nodes, encoded.
    pub(super) reports: BTreeMap<u8, Vec<u8>>,
    /// Interim reports of nodes that have answered a request for one, encoded.
    pub(super) answers: BTreeMap<u8, Vec<u8>>,
    /// Nodes of which no vCPU runs.
    pub(super) parked: BTreeSet<u8>,
    /// Nodes that are ready to run.
    pub(super) ready: BTreeSet<u8>,
    /// Nodes whose link has ended.
    pub(super) disconnected: BTreeSet<u8>,
}

/// The calling thread's ID.
pub(super) fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Time of the host's monotonic clock, ns. All nodes of a host share it.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

impl Engine {
    pub(super) fn new(
        me: u8,
        links: Vec<Option<Link>>,
        vcpus: usize,
        fault_injection: FaultInjection,
        steps: SyncSender<(u8, Step)>,
    ) -> Result<Self, DsmError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| DsmError::Host { what: "an eventfd", source: error.into() })?;
        Ok(Self {
            me,
            links,
            machine: OnceLock::new(),
            core: Mutex::new(None),
            changed: (0..vcpus).map(|_| Condvar::new()).collect(),
            wake,
            outcome: Mutex::new(None),
            on_failure: OnceLock::new(),
            peer_states_changed: Condvar::new(),
            peer_states: Mutex::default(),
            console: Mutex::new(None),
            console_bytes: AtomicU64::new(0),
            steps,
            quit: AtomicBool::new(false),
            fault_injection,
        })
    }

    /// Hands over the payload VM of this node. Before, the engine does nothing.
    pub(super) fn begin(&self, node: Node, machine: Machine, pages: usize, record: bool) {
        let core = Core {
            node,
            pages: LivePages::new(Arc::clone(&machine.ram), pages, record),
            vcpus: machine.ids.iter().map(|_| Slot::default()).collect(),
            threads: HashMap::new(),
            counts: Counts::default(),
            hot: HotPages::default(),
            phase: Phase::default(),
            stopping: false,
            suspending: false,
            suspended: false,
            ending: false,
            rekick: Vec::new(),
            prefetcher: NodePrefetcher::new(machine.ids.len()),
            prefetching: false,
            advised: BTreeSet::new(),
            actions: Vec::new(),
            bytes: Vec::new(),
            outbox: Outbox::default(),
            armed: None,
        };
        // Called once, so the cell is empty.
        let _ = self.machine.set(machine);
        *self.lock() = Some(core);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Core>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn console(&self) -> MutexGuard<'_, Option<Box<dyn Write + Send>>> {
        self.console.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes to the console, and returns the number of bytes written. Only node 0 has one; other nodes discard the bytes.
    pub(super) fn write_console(&self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut *self.console() {
            Some(console) => console.write(bytes)?,
            None => bytes.len(),
        };
        self.console_bytes.fetch_add(u64::try_from(written).unwrap_or(0), Ordering::Relaxed);
        Ok(written)
    }

    /// Flushes the console. Returns the bytes written so far.
    pub(super) fn flush_console(&self) -> io::Result<u64> {
        let mut console = self.console();
        console.as_mut().map_or(Ok(()), |console| console.flush())?;
        Ok(self.console_bytes.load(Ordering::Relaxed))
    }

    pub(super) fn peer_states(&self) -> MutexGuard<'_, PeerStates> {
        self.peer_states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the states of other nodes change, or `timeout` passes.
    pub(super) fn wait_for_peer_states<'a>(
        &self,
        states: MutexGuard<'a, PeerStates>,
        timeout: Duration,
    ) -> MutexGuard<'a, PeerStates> {
        self.peer_states_changed.wait_timeout(states, timeout).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().flatten()
    }

    pub(super) fn link(&self, node: u8) -> Option<&Link> {
        self.links.get(usize::from(node))?.as_ref()
    }

    /// Wakes the faults thread.
    pub(super) fn wake_faults_thread(&self) {
        // A full counter means that a wakeup is pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn send_control(&self, node: u8, control: &Control) {
        if self.link(node).is_some_and(|link| link.send_control(control)) {
            self.wake_faults_thread();
        }
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the VM: notifies the other nodes, if this node found the outcome, and stops this node's vCPUs. Only the first call has an
    /// effect.
    pub(super) fn end(&self, outcome: Outcome) {
        let mut known = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_some() {
            return;
        }
        *known = Some(outcome.clone());
        drop(known);
        let notification = match &outcome {
            Outcome::Exit(code) => Some(Control::Exit(*code)),
            Outcome::Failed { text, here: true } => Some(Control::Failed(text.clone())),
            Outcome::Failed { here: false, .. } => None,
        };
        if let Some(control) = notification {
            for link in self.links() {
                link.send_control(&control);
            }
        }
        // Before stopping the vCPUs, which may take a while.
        if let (Outcome::Failed { text, here }, Some(on_failure)) = (&outcome, self.on_failure.get())
            && (*here || self.me == 0)
        {
            on_failure(text);
        }
        if let Some(machine) = self.machine.get() {
            machine.stopper.stop();
        }
        self.notify_peer_states();
        self.wake_faults_thread();
        self.wake_checkpoints();
    }

    /// Wakes the checkpoint thread.
    fn wake_checkpoints(&self) {
        // A full channel wakes the thread anyway.
        let _ = self.steps.try_send((self.me, Step::Look));
    }

    /// Wakes the threads that wait for states of other nodes.
    pub(super) fn notify_peer_states(&self) {
        // Under the lock, so that no thread is between its check and its wait.
        let _states = self.peer_states();
        self.peer_states_changed.notify_all();
    }

    /// Ends the VM for a reason that this node found.
    pub(super) fn fail(&self, text: String) {
        self.end(Outcome::Failed { text, here: true });
    }

    /// Releases all vCPUs that wait, for good.
    pub(super) fn stop_waiting(&self) {
        if let Some(core) = &mut *self.lock() {
            core.stopping = true;
        }
        for changed in &self.changed {
            changed.notify_all();
        }
        self.wake_faults_thread();
    }

    /// Passes an event to the protocol, and performs the actions.
    pub(super) fn step(&self, core: &mut Core, event: Event) {
        let mut next = Some(event);
        let mut more = Vec::new();
        while let Some(event) = next.take() {
            let time = now();
            tracing::trace!(at = time, node = self.me, ?event);
            if let Some(recorder) = &mut core.pages.recorder {
                recorder.get_mut().event(time, &event);
            }
            let mut actions = std::mem::take(&mut core.actions);
            core.node.step(event, time, &mut core.pages, &mut actions);
            for action in actions.drain(..) {
                self.perform(core, action, &mut more);
            }
            core.actions = actions;
            next = more.pop();
        }
        self.prefetch(core);
        if !core.outbox.batching {
            core.pages.apply_changes();
        }
        if let Some(text) = core.pages.refused.take() {
            self.fail(text);
        }
        let deadline = core.node.deadline();
        if deadline.is_some_and(|at| core.armed.is_none_or(|armed| at < armed)) {
            core.armed = deadline;
            self.wake_faults_thread();
        }
    }

    fn perform(&self, core: &mut Core, action: Action, more: &mut Vec<Event>) {
        tracing::trace!(at = now(), node = self.me, ?action);
        if let Some(recorder) = &mut core.pages.recorder {
            recorder.get_mut().action(now(), &action);
        }
        if let Action::Resume { vcpu } | Action::Trap { vcpu, .. } | Action::Kick { vcpu } = action
            && Self::end_context(core, vcpu)
        {
            more.push(Event::Retired { vcpu });
            return;
        }
        match action {
            Action::Send(message) => self.send(core, &message),
            Action::Resume { vcpu } => {
                let index = usize::from(vcpu);
                let Some(slot) = core.vcpus.get_mut(index) else { return };
                slot.operating = false;
                if let Some(fault) = slot.fault.take() {
                    if !std::mem::replace(&mut slot.sampled, false) {
                        // The sample is of an earlier instruction.
                        slot.snapshot = None;
                    }
                    let time = now();
                    let waited = core.counts.stalls.count(&fault, time);
                    core.counts.count_wait(&fault, time);
                    core.hot.waited(fault.page, waited);
                    if !slot.granted.contains(&fault.page) {
                        slot.granted.push(fault.page);
                    }
                    core.pages.wake(fault.page);
                }
                self.notify(index);
            }
            Action::Trap { vcpu, page } => {
                let index = usize::from(vcpu);
                let Some(slot) = core.vcpus.get_mut(index) else { return };
                slot.trap = Some(page);
                if let Some(fault) = slot.fault.take() {
                    slot.trapped_at = fault.at;
                    core.counts.count_wait(&fault, now());
                }
                self.kick_vcpu(core, index);
            }
            Action::Completed { vcpu, old } => {
                let index = usize::from(vcpu);
                if let Some(slot) = core.vcpus.get_mut(index) {
                    slot.completed = Some(old);
                    slot.operating = false;
                    // Until now, not until the thread runs again, which depends on the host's scheduler.
                    if let Some(since) = slot.operating_since.take() {
                        core.counts.waited_again_ns += now().saturating_sub(since);
                    }
                }
                self.notify(index);
            }
            Action::Kick { vcpu } => {
                let index = usize::from(vcpu);
                let Some(slot) = core.vcpus.get_mut(index) else { return };
                if slot.ended || core.suspending {
                    more.push(Event::Retired { vcpu });
                    return;
                }
                slot.kick = true;
                slot.samples = 0;
                self.kick_vcpu(core, index);
            }
            // The vCPU faults again by itself.
            Action::Wounded { .. } => {}
        }
    }

    fn send(&self, core: &mut Core, message: &Message) {
        core.bytes.clear();
        wire::encode(message, &mut core.bytes);
        let bytes = u64::try_from(core.bytes.len()).unwrap_or(0);
        let count = core.counts.sent.entry(message.body.name()).or_default();
        *count = (count.0 + 1, count.1 + bytes);
        let Some(link) = self.link(message.to.0) else { return };
        if core.outbox.batching {
            core.outbox.to = core.outbox.to.with(NodeSet::one(message.to));
            link.put_off(&core.bytes);
        } else if link.send(&core.bytes) {
            self.wake_faults_thread();
        }
    }

    /// Sends what was batched since [`Outbox::hold`], in one write per link.
    pub(super) fn flush_batched(&self, core: &mut Core) {
        core.pages.apply_changes();
        if let Some(text) = core.pages.refused.take() {
            self.fail(text);
        }
        for node in std::mem::take(&mut core.outbox).to.iter() {
            if self.link(node.0).is_some_and(Link::flush) {
                self.wake_faults_thread();
            }
        }
    }

    pub(super) fn notify(&self, vcpu: usize) {
        if let Some(changed) = self.changed.get(vcpu) {
            changed.notify_all();
        }
    }

    /// Kicks a vCPU out of the guest, or wakes it where it waits outside.
    pub(super) fn kick_vcpu(&self, core: &mut Core, vcpu: usize) {
        let Some(slot) = core.vcpus.get(vcpu) else { return };
        if slot.outside {
            self.notify(vcpu);
            return;
        }
        core.counts.kicks += 1;
        let Some(machine) = self.machine.get() else { return };
        if let Some(id) = machine.ids.get(vcpu)
            && let Err(error) = machine.manager.kick(*id)
        {
            self.fail(format!("vCPU {id} can't be brought out of the guest: {error}"));
        }
    }

    /// Whether the rights of a page satisfy a fault.
    pub(super) fn allows(node: &Node, page: Page, fault: Fault) -> bool {
        match node.access(page) {
            Access::None => false,
            Access::Read => fault == Fault::Read,
            Access::Write => true,
        }
    }
}
