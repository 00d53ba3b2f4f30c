//! The lock around the protocol of this node, and what its actions do.

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
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

use super::DsmError;
use super::ahead::Helpers;
use super::checkpoint::Step;
use super::hot::HotPages;
use super::link::{Control, Link};
use super::pages::LivePages;
use super::report::{Phase, Stalls};
use super::spanning::Trouble;
use super::vcpus::Slot;
use crate::payload::Stopper;

/// How a VM that spans hosts ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// With this exit code.
    Exit(u32),
    /// It couldn't go on. Found by this node, or told by another one.
    Failed { text: String, here: bool },
}

/// What this node has that other threads need: set once the payload VM is there.
pub(super) struct Machine {
    pub(super) ram: Arc<SharedRam>,
    pub(super) manager: Arc<VcpuManager>,
    /// Ids of this node's vCPUs, in the order of the protocol's numbers.
    pub(super) ids: Vec<u32>,
    pub(super) stopper: Stopper,
    /// All of its memory, by the monitor's own mapping.
    pub(super) memory: GuestMemorySpace,
}

/// What this node counts beside the protocol's own counters.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    /// Messages sent and their bytes, by kind.
    pub(super) sent: BTreeMap<&'static str, (u64, u64)>,
    /// Waits for pages.
    pub(super) stalls: Stalls,
    /// Faults of pages that were there when the fault was read.
    pub(super) late: u64,
    /// vCPUs brought out of the guest to have their registers read.
    pub(super) kicks: u64,
    /// Instructions that were taken for retired though their registers hadn't changed over several looks.
    pub(super) unproven: u64,
    /// Instructions that were carried out for a vCPU so that pages which they were granted could be given away.
    pub(super) stepped: u64,
    /// Trapped instructions that were carried out, and those that aren't known, so that their page was invalidated.
    pub(super) emulated: u64,
    pub(super) not_emulated: u64,
    /// Pages fetched before they were asked for.
    pub(super) ahead: u64,
    /// Those of them that were taken at once.
    pub(super) in_vain: u64,
    /// Nanoseconds that vCPUs have waited for pages which this node had had before, and for trapped stores.
    pub(super) waited_again_ns: u64,
    /// Nanoseconds that vCPUs have waited for pages which this node had never had.
    pub(super) waited_first_ns: u64,
}

/// Messages that wait for others to leave with them: several events are taken in a row, under one lock.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    holds: bool,
    /// Nodes to which some are put off.
    to: NodeSet,
}

impl Outbox {
    /// From here on, until [`Engine::send_held`].
    pub(super) fn hold(&mut self) {
        self.holds = true;
    }
}

/// Everything behind the lock.
pub(super) struct Core {
    pub(super) node: Node,
    pub(super) pages: LivePages,
    pub(super) vcpus: Vec<Slot>,
    /// vCPUs by thread.
    pub(super) threads: HashMap<u32, usize>,
    pub(super) counts: Counts,
    pub(super) hot: HotPages,
    pub(super) phase: Phase,
    pub(super) stopping: bool,
    /// vCPUs are leaving the guest for a checkpoint: they hold no page against others.
    pub(super) holding: bool,
    /// They have left it.
    pub(super) standing: bool,
    /// A vCPU has ended the VM.
    pub(super) ending: bool,
    /// vCPUs to be kicked again, and when.
    pub(super) rekick: Vec<(u64, usize)>,
    pub(super) helpers: Helpers,
    /// Pages whose mode has been asked for, where tests do that.
    pub(super) advised: BTreeSet<Page>,
    actions: Vec<Action>,
    bytes: Vec<u8>,
    pub(super) outbox: Outbox,
    /// When the faults thread comes for a deadline of the protocol.
    pub(super) armed: Option<u64>,
}

/// Told once why the VM can't go on, on any thread.
pub(super) type Tell = Box<dyn Fn(&str) + Send + Sync>;

/// One node of a VM that spans hosts.
pub(super) struct Engine {
    pub(super) me: u8,
    pub(super) links: Vec<Option<Link>>,
    pub(super) machine: OnceLock<Machine>,
    core: Mutex<Option<Core>>,
    /// One for each vCPU of this node, on `core`.
    pub(super) changed: Vec<Condvar>,
    /// Wakes the faults thread.
    pub(super) wake: OwnedFd,
    outcome: Mutex<Option<Outcome>>,
    /// Who is told at once why the VM can't go on.
    pub(super) on_failure: OnceLock<Tell>,
    /// Told when the outcome is known, and when reports and `Parked` arrive.
    pub(super) news: Condvar,
    peer_states: Mutex<PeerStates>,
    /// On node 0: where the guest's console goes.
    console: Mutex<Option<Box<dyn Write + Send>>>,
    /// Bytes that have gone there.
    pub(super) console_bytes: AtomicU64,
    /// What other nodes say about checkpoints goes here.
    pub(super) steps: SyncSender<(u8, Step)>,
    /// The service threads shall end.
    pub(super) quit: AtomicBool,
    /// What tests put in.
    pub(super) trouble: Trouble,
}

/// What other nodes have reported, and which of them are gone.
#[derive(Debug, Default)]
pub(super) struct PeerStates {
    /// What nodes counted.
    pub(super) reports: BTreeMap<u8, Vec<u8>>,
    /// What nodes have counted so far, of those that were asked and have answered.
    pub(super) answers: BTreeMap<u8, Vec<u8>>,
    /// Nodes without a vCPU that runs.
    pub(super) parked: BTreeSet<u8>,
    /// Nodes that are ready to run.
    pub(super) ready: BTreeSet<u8>,
    /// Nodes whose link has ended.
    pub(super) gone: BTreeSet<u8>,
}

/// The calling thread, by the number that the host knows it by.
pub(super) fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Nanoseconds of the host's monotonic clock, which all nodes of a host share.
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
        trouble: Trouble,
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
            news: Condvar::new(),
            peer_states: Mutex::default(),
            console: Mutex::new(None),
            console_bytes: AtomicU64::new(0),
            steps,
            quit: AtomicBool::new(false),
            trouble,
        })
    }

    /// Gives it the payload VM of this node. Before that, it does nothing.
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
            holding: false,
            standing: false,
            ending: false,
            rekick: Vec::new(),
            helpers: Helpers::default(),
            advised: BTreeSet::new(),
            actions: Vec::new(),
            bytes: Vec::new(),
            outbox: Outbox::default(),
            armed: None,
        };
        // Called once.
        let _ = self.machine.set(machine);
        *self.lock() = Some(core);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Core>> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn console(&self) -> MutexGuard<'_, Option<Box<dyn Write + Send>>> {
        self.console.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes to the console; how many bytes it took. Only node 0 has one.
    pub(super) fn write_console(&self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut *self.console() {
            Some(console) => console.write(bytes)?,
            None => bytes.len(),
        };
        self.console_bytes.fetch_add(u64::try_from(written).unwrap_or(0), Ordering::Relaxed);
        Ok(written)
    }

    /// What was written to the console goes out; how many bytes that were.
    pub(super) fn flush_console(&self) -> io::Result<u64> {
        let mut console = self.console();
        console.as_mut().map_or(Ok(()), |console| console.flush())?;
        Ok(self.console_bytes.load(Ordering::Relaxed))
    }

    pub(super) fn peer_states(&self) -> MutexGuard<'_, PeerStates> {
        self.peer_states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for news about what other nodes said, at most so long.
    pub(super) fn await_news<'a>(
        &self,
        states: MutexGuard<'a, PeerStates>,
        timeout: Duration,
    ) -> MutexGuard<'a, PeerStates> {
        self.news.wait_timeout(states, timeout).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().flatten()
    }

    pub(super) fn link(&self, node: u8) -> Option<&Link> {
        self.links.get(usize::from(node))?.as_ref()
    }

    /// Makes the faults thread look around.
    pub(super) fn poke(&self) {
        // Full: it has been poked already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn send_control(&self, node: u8, control: &Control) {
        if self.link(node).is_some_and(|link| link.send_control(control)) {
            self.poke();
        }
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The VM has ended: tells the other nodes, where it was found here, and stops this node's vCPUs. Only the first counts.
    pub(super) fn end(&self, outcome: Outcome) {
        let mut known = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_some() {
            return;
        }
        *known = Some(outcome.clone());
        drop(known);
        let tell = match &outcome {
            Outcome::Exit(code) => Some(Control::Exit(*code)),
            Outcome::Failed { text, here: true } => Some(Control::Failed(text.clone())),
            Outcome::Failed { here: false, .. } => None,
        };
        if let Some(control) = tell {
            for link in self.links() {
                link.send_control(&control);
            }
        }
        // Before the vCPUs are stopped, which may take a while.
        if let (Outcome::Failed { text, here }, Some(tell)) = (&outcome, self.on_failure.get())
            && (*here || self.me == 0)
        {
            tell(text);
        }
        if let Some(machine) = self.machine.get() {
            machine.stopper.stop();
        }
        self.tell_news();
        self.poke();
        self.wake_checkpoints();
    }

    /// Makes the thread for checkpoints look around.
    fn wake_checkpoints(&self) {
        // Full: it looks anyway.
        let _ = self.steps.try_send((self.me, Step::Look));
    }

    /// Wakes those who wait for what other nodes say.
    pub(super) fn tell_news(&self) {
        // Under the lock: nobody is between a look and a wait.
        let _states = self.peer_states();
        self.news.notify_all();
    }

    /// The VM can't go on for a reason found on this node.
    pub(super) fn fail(&self, text: String) {
        self.end(Outcome::Failed { text, here: true });
    }

    /// No vCPU is kept waiting from here on.
    pub(super) fn stop_waiting(&self) {
        if let Some(core) = &mut *self.lock() {
            core.stopping = true;
        }
        for changed in &self.changed {
            changed.notify_all();
        }
        self.poke();
    }

    /// Gives the protocol an event, and does what it says.
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
        self.fetch_next(core);
        if !core.outbox.holds {
            core.pages.carry_out();
        }
        if let Some(text) = core.pages.refused.take() {
            self.fail(text);
        }
        let deadline = core.node.deadline();
        if deadline.is_some_and(|at| core.armed.is_none_or(|armed| at < armed)) {
            core.armed = deadline;
            self.poke();
        }
    }

    fn perform(&self, core: &mut Core, action: Action, more: &mut Vec<Event>) {
        tracing::trace!(at = now(), node = self.me, ?action);
        if let Some(recorder) = &mut core.pages.recorder {
            recorder.get_mut().action(now(), &action);
        }
        if let Action::Resume { vcpu } | Action::Trap { vcpu, .. } | Action::Kick { vcpu } = action
            && let Some(helper) = Self::helper(core, vcpu)
        {
            Self::helped(core, helper);
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
                    if !std::mem::replace(&mut slot.examined, false) {
                        // What is known of it is of an older instruction.
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
                self.summon(core, index);
            }
            Action::Completed { vcpu, old } => {
                let index = usize::from(vcpu);
                if let Some(slot) = core.vcpus.get_mut(index) {
                    slot.completed = Some(old);
                    slot.operating = false;
                    // Not until its thread runs again: when that is depends on the host.
                    if let Some(since) = slot.operating_since.take() {
                        core.counts.waited_again_ns += now().saturating_sub(since);
                    }
                }
                self.notify(index);
            }
            Action::Kick { vcpu } => {
                let index = usize::from(vcpu);
                let Some(slot) = core.vcpus.get_mut(index) else { return };
                if slot.ended || core.holding {
                    more.push(Event::Retired { vcpu });
                    return;
                }
                slot.kick = true;
                slot.looks = 0;
                self.summon(core, index);
            }
            // It faults again by itself.
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
        if core.outbox.holds {
            core.outbox.to = core.outbox.to.with(NodeSet::one(message.to));
            link.put_off(&core.bytes);
        } else if link.send(&core.bytes) {
            self.poke();
        }
    }

    /// What was put off since [`Outbox::hold`] leaves, as few writes.
    pub(super) fn send_held(&self, core: &mut Core) {
        core.pages.carry_out();
        if let Some(text) = core.pages.refused.take() {
            self.fail(text);
        }
        for node in std::mem::take(&mut core.outbox).to.iter() {
            if self.link(node.0).is_some_and(Link::flush) {
                self.poke();
            }
        }
    }

    pub(super) fn notify(&self, vcpu: usize) {
        if let Some(changed) = self.changed.get(vcpu) {
            changed.notify_all();
        }
    }

    /// Brings a vCPU out of the guest, or tells it where it waits outside.
    pub(super) fn summon(&self, core: &mut Core, vcpu: usize) {
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

    /// Whether a page allows what a vCPU wants.
    pub(super) fn allows(node: &Node, page: Page, fault: Fault) -> bool {
        match node.access(page) {
            Access::None => false,
            Access::Read => fault == Fault::Read,
            Access::Write => true,
        }
    }
}
