//! The thread that takes part in migrations: it steps this host's state machine ([`nomad::Host`]) and does what that asks for.
//!
//! ```text
//!  peer-messages thread ── messages in ────────────▶ migration thread ── messages out ──▶ peer-messages thread ──▶ other hosts
//!  cluster thread ── messages in, VMs registered ──▶                  ── messages out ──▶ cluster thread ──▶ service (──▶ other hosts)
//!  control thread ── monitors' reports ────────────▶   nomad::Host      ── phases ──────▶ control thread ──▶ monitors
//!                                                        │ EngineHandle::call: hold, open, stay, start, leave
//!                                                        ▼
//!                                                   engine thread
//! ```
//! The state of a VM's devices travels with its memory, from monitor to monitor. A monitor requests here to stop the VM, reports
//! that it has, and receives the decision: it runs the VM only then.

mod draining;
mod inbox;
mod joining;
mod peers;
mod reasons;

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use hca::names::Gid;
use nomad::{Action, Body, Epoch, Event, HostId, Message, MigrationId, Place, Timer, VmId};

use crate::cluster::ClusterDirectory;
use crate::engine::{EngineHandle, Worker};
use crate::function::NicShared;
use crate::function::rdma::RdmaFunction;
use crate::registry::Registry;
use crate::transport;

use draining::{Drain, Draining};
use inbox::Inbox;
use reasons::Reasons;

use super::handle::{Input, MigrationHandle, MonitorReport};
use super::phases::{Phase, Phases};

/// The running thread. Dropping it ends it; what it holds stays held until the engine ends, too.
#[derive(Debug)]
pub struct MigrationThread {
    handle: MigrationHandle,
    thread: Option<JoinHandle<()>>,
}

impl MigrationThread {
    /// Starts it.
    ///
    /// # Errors
    /// When the kernel has no thread left.
    pub fn start(
        directory: Arc<ClusterDirectory>,
        registry: Arc<Registry>,
        engine: EngineHandle,
    ) -> std::io::Result<Self> {
        let (handle, inbox) = MigrationHandle::new();
        let phases = Arc::clone(handle.phases());
        let thread = std::thread::Builder::new().name("migration".to_owned()).spawn(move || {
            MigrationManager {
                directory,
                registry,
                engine,
                phases,
                nomad: None,
                switch_ms: 0,
                timers: BinaryHeap::new(),
                due: HashMap::new(),
                outgoing: HashMap::new(),
                incoming: HashMap::new(),
                reasons: Reasons::default(),
                suspended_addresses: HashMap::new(),
                suspended_since: HashMap::new(),
                draining: Draining::default(),
            }
            .run(&mut Inbox::new(inbox));
        })?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// For other threads.
    #[must_use]
    pub fn handle(&self) -> MigrationHandle {
        self.handle.clone()
    }
}

impl Drop for MigrationThread {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The migration thread panicked; this is a bug");
        }
    }
}

/// A timer by its time, the earliest first in a heap.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due(std::cmp::Reverse<Instant>, Timer);

struct MigrationManager {
    directory: Arc<ClusterDirectory>,
    registry: Arc<Registry>,
    engine: EngineHandle,
    phases: Arc<Phases>,
    /// Once the service has taken this host for one.
    nomad: Option<nomad::Host>,
    switch_ms: u32,
    timers: BinaryHeap<Due>,
    /// When each timer really runs out: it may have been set again.
    due: HashMap<Timer, Instant>,
    outgoing: HashMap<VmId, MigrationId>,
    incoming: HashMap<VmId, MigrationId>,
    /// Why migrations were given up, as far as this host has had to do with it.
    reasons: Reasons,
    /// Addresses of VMs whose peers here were suspended last.
    suspended_addresses: HashMap<VmId, Vec<Gid>>,
    /// Since when they have been, and for which migration, while they are.
    suspended_since: HashMap<VmId, (MigrationId, Instant)>,
    /// Suspended queue pairs whose requests haven't ended.
    draining: Draining,
}

/// A NIC's RDMA function, and what it shares with the other one.
type Nic = (Arc<NicShared>, Arc<RdmaFunction>);

impl MigrationManager {
    fn run(&mut self, inbox: &mut Inbox) {
        loop {
            let timer = self.timers.peek().map(|due| due.0.0);
            match inbox.next([timer, self.draining.next()].into_iter().flatten().min()) {
                Ok(Input::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(input) => self.handle(input),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Instant::now();
            while self.timers.peek().is_some_and(|due| due.0.0 <= now) {
                let Some(Due(at, timer)) = self.timers.pop() else { break };
                if self.due.get(&timer) == Some(&at.0) {
                    self.due.remove(&timer);
                    if self.nomad.as_ref().is_some_and(|nomad| nomad.awaits(timer)) {
                        self.step(Event::Timer(timer));
                    }
                }
            }
            self.poll_draining();
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Joined { host, incarnation, switch_ms } => self.joined(host, incarnation, switch_ms),
            Input::Message(message, room) => {
                drop(room);
                self.message(message);
            }
            Input::Started { vm, epoch, after } => self.step(Event::Started { vm, epoch, after }),
            Input::Ended { vm } => {
                self.draining.forget(Drain::Own(vm));
                if let Some(migration) = self.outgoing.remove(&vm) {
                    self.step(Event::StreamBroke { migration });
                }
                if let Some(name) = self.name(vm) {
                    self.phases.withdraw(&name, Phase::Idle);
                }
                self.step(Event::Ended { vm });
            }
            Input::Reported { vm, what } => self.monitor_reported(&vm, what),
            Input::Stop => {}
        }
    }

    /// Steps the state machine, and does what it asks for.
    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(nomad) = &mut self.nomad else { return };
            let mut actions = Vec::new();
            nomad.step(event, &mut actions);
            for action in actions {
                events.extend(self.act(action));
            }
        }
    }

    fn send(&mut self, message: &Message) {
        if let Body::Failed { migration, reason } = &message.body {
            self.reasons.note(*migration, reason.to_string());
        }
        // The protocol repeats a message that can't be sent now.
        self.directory.send(message);
    }

    fn message(&mut self, message: Message) {
        self.connect_directly(&message);
        // Connections are asked for when it matters, of the engine, rather than followed all the time.
        match &message.body {
            Body::Switch { migration } => {
                // Once: the coordinator repeats it, and each look-up waits for the engine.
                let begun = self.nomad.as_ref().is_some_and(|nomad| nomad.is_switching_over(*migration));
                let all = self.outgoing.iter().filter(|(_, of)| !begun && *of == migration);
                for vm in all.map(|(vm, _)| *vm).collect::<Vec<_>>() {
                    self.update_peers_of(vm);
                    // Peers of this host get no message: the state machine suspends them itself.
                    self.update_connected_to(vm);
                    self.remember_peers(*migration, vm);
                    // Suspended peers acknowledge nothing, and the VM runs until its monitor has paused it. So its queue pairs are
                    // suspended now: requests that it posts in that time would otherwise use up their retries, and fail.
                    self.suspend_towards_peers(vm);
                }
            }
            Body::Suspend { migration, vms, .. } => {
                let known = |vm: &&VmId| {
                    self.nomad.as_ref().is_some_and(|nomad| nomad.has_suspended(*migration, **vm))
                };
                let new = vms.iter().take(nomad::config::MAX_VMS_PER_MIGRATION).filter(|vm| !known(vm));
                for vm in &new.copied().collect::<Vec<_>>() {
                    self.update_connected_to(*vm);
                }
            }
            _ => {}
        }
        self.step(Event::Message(message));
    }

    fn call_engine<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Option<R> {
        // At the daemon's end there is no engine.
        self.engine.call(job).ok()
    }

    fn place(&self, vm: VmId) -> Option<Place> {
        let (host, epoch) = self.directory.place(transport::VmId(vm.0))?;
        Some(Place { vm, host: HostId(host), epoch: Epoch(epoch) })
    }

    fn addressed(&self, vm: VmId) -> (transport::VmId, Vec<Gid>) {
        let vm = transport::VmId(vm.0);
        (vm, self.directory.addresses(vm))
    }

    fn nics(&self, vm: VmId) -> Vec<Nic> {
        self.name(vm).map(|name| self.registry.rdma_functions(&name)).unwrap_or_default()
    }

    fn name(&self, vm: VmId) -> Option<String> {
        self.directory.name(transport::VmId(vm.0))
    }

    fn set(&self, vm: VmId, phase: Phase) {
        if let Some(name) = self.name(vm) {
            tracing::info!(vm = name, ?phase, "Migration");
            self.phases.set(&name, phase);
        }
    }

    fn set_epoch(&self, vm: VmId, epoch: Epoch) {
        if let Some(name) = self.name(vm) {
            self.phases.set_epoch(&name, epoch.0);
        }
    }

    fn act(&mut self, action: Action) -> Vec<Event> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::Timer { timer, after_ms } => {
                let at = Instant::now() + Duration::from_millis(after_ms.into());
                self.due.insert(timer, at);
                self.timers.push(Due(std::cmp::Reverse(at), timer));
            }
            Action::Reserve { migration, moves } => return vec![self.reserve_all(migration, &moves)],
            Action::Release { migration } => {
                for vm in keys(&self.incoming, migration) {
                    self.release(vm);
                }
            }
            Action::Copy { migration, vm, .. } => return self.copy(migration, vm).into_iter().collect(),
            Action::Queued { migration, waits_for } => self.set_waits_for(migration, waits_for),
            Action::EndCopy { migration } => {
                let reason = self.why(migration);
                for vm in keys(&self.outgoing, migration) {
                    // One that is stopped, or about to be, is resumed by `Action::Run`.
                    if matches!(self.phase(vm), Phase::Copying(_)) {
                        self.roll_back(vm, &reason);
                    }
                }
            }
            Action::SuspendQps { migration, vm } => {
                let addressed = self.addressed(vm);
                // The directory forgets whose addresses they were when the VM is gone.
                self.suspended_addresses.insert(vm, addressed.1.clone());
                if self.suspended_since.get(&vm).is_none_or(|(of, _)| *of != migration) {
                    self.suspended_since.insert(vm, (migration, Instant::now()));
                }
                self.call_engine(move |worker| worker.suspend_peers_of(&addressed));
                return self.drain(Drain::Peers(vm), migration).into_iter().collect();
            }
            Action::ResumeQps { vm, peer } => {
                self.draining.forget(Drain::Peers(peer.vm));
                self.resume_towards(vm, peer);
                self.peers_resumed(peer.vm);
            }
            Action::Lost { peer } => self.peer_lost(peer),
            Action::Stop { migration, vm } => {
                return self.drain(Drain::Own(vm), migration).into_iter().collect();
            }
            Action::Finish { vm, .. } => self.set(vm, Phase::Handing),
            Action::Run { vm, epoch } => self.run_vm(vm, epoch),
            Action::Discard { vm } => self.discard(vm),
        }
        Vec::new()
    }

    /// At the destination: reserves room for all VMs of a migration, or for none.
    fn reserve_all(&mut self, migration: MigrationId, moves: &[nomad::Move]) -> Event {
        let granted = moves.iter().all(|moved| self.reserve(migration, moved.vm));
        for moved in moves.iter().filter(|_| granted) {
            self.set_epoch(moved.vm, moved.epoch);
        }
        if !granted {
            moves.iter().for_each(|moved| self.release(moved.vm));
        }
        Event::Reservation { migration, granted }
    }

    /// At the source: the VM's monitor may copy it. Returns an event if the monitor has given up meanwhile.
    fn copy(&mut self, migration: MigrationId, vm: VmId) -> Option<Event> {
        // Others of its group made it begin when its monitor had just given it up.
        let wanted = self.phase(vm) == Phase::Begun;
        self.outgoing.insert(vm, migration);
        self.nics(vm).iter().for_each(|(shared, _)| shared.set_locked(true));
        // Before its monitor begins to copy it.
        if let Some(epoch) = self.nomad.as_ref().and_then(|nomad| nomad.epoch(vm)) {
            self.set_epoch(vm, epoch);
        }
        self.set(vm, Phase::Copying(migration.0));
        (!wanted).then_some(Event::StreamBroke { migration })
    }

    /// A peer of VMs of this host is lost: their queue pairs to it open, and fail.
    fn peer_lost(&mut self, peer: VmId) {
        self.draining.forget(Drain::Peers(peer));
        self.suspended_since.remove(&peer);
        let mut addressed = self.addressed(peer);
        addressed.1.extend(self.suspended_addresses.remove(&peer).unwrap_or_default());
        self.call_engine(move |worker| {
            for vm in worker.connected_to(addressed.0) {
                worker.resume_towards(vm, &addressed, false);
            }
            worker.forget_peer(&addressed);
        });
    }

    /// A VM of this host runs elsewhere: its devices here end.
    fn discard(&mut self, vm: VmId) {
        self.draining.forget(Drain::Own(vm));
        if let Some(migration) = self.outgoing.remove(&vm) {
            // Queue pairs that faced others of its group from here resume at the destination, if anywhere.
            self.suspended_since.retain(|held, (of, _)| *held == vm || *of != migration);
        }
        for (shared, rdma) in self.nics(vm) {
            rdma.leave();
            shared.set_locked(false);
        }
        self.set(vm, Phase::Moved);
    }

    /// Records the VM that switches over first, for callers that ask what the VMs of a migration wait for.
    fn set_waits_for(&self, migration: MigrationId, waits_for: VmId) {
        let first = self.name(waits_for).unwrap_or_else(|| waits_for.to_string());
        for name in keys(&self.outgoing, migration).into_iter().filter_map(|vm| self.name(vm)) {
            self.phases.set_waits_for(&name, &first);
        }
    }

    fn phase(&self, vm: VmId) -> Phase {
        self.name(vm).map(|name| self.phases.get(&name)).unwrap_or_default()
    }

    fn why(&self, migration: MigrationId) -> String {
        let reason = self.draining.why(migration).map(ToOwned::to_owned);
        let reason = reason.or_else(|| self.reasons.of(migration).map(ToOwned::to_owned));
        reason.unwrap_or_else(|| "it was cancelled, or another host that takes part gave it up".to_owned())
    }

    /// Whether a monitor waits here for a VM, with all its NICs.
    fn reserve(&mut self, migration: MigrationId, vm: VmId) -> bool {
        let nics = self.nics(vm);
        let waits = |(shared, _): &Nic| shared.is_incoming() && shared.in_use() && !shared.is_locked();
        if nics.is_empty() || !nics.iter().all(waits) {
            let name = self.name(vm).unwrap_or_default();
            tracing::warn!(
                vm = name,
                "A VM can't come here: no monitor waits for it; start `causeway run --incoming` first"
            );
            return false;
        }
        for (shared, _) in nics {
            shared.set_arriving_vm(vm.0);
            shared.set_locked(true);
        }
        self.incoming.insert(vm, migration);
        self.set(vm, Phase::Reserved(migration.0));
        true
    }

    /// A VM doesn't come.
    fn release(&mut self, vm: VmId) {
        let Some(migration) = self.incoming.remove(&vm) else { return };
        for (shared, rdma) in self.nics(vm).into_iter().filter(|(shared, _)| shared.is_incoming()) {
            rdma.leave();
            shared.set_arriving_vm(0);
            shared.set_locked(false);
        }
        self.set(vm, Phase::Aborted(self.why(migration)));
    }

    /// A VM of this host that was to leave stays.
    fn roll_back(&mut self, vm: VmId, reason: &str) {
        self.draining.forget(Drain::Own(vm));
        self.outgoing.remove(&vm);
        self.resume_devices(vm);
        // It has never stopped: only this opens the queue pairs that were suspended when the switchover began. Those towards a peer in a
        // switchover of its own open when that has ended.
        for peer in self.nomad.as_ref().map(|nomad| nomad.open_peers(vm)).unwrap_or_default() {
            if let Some(place) = self.place(peer) {
                self.resume_towards(vm, place);
            }
        }
        self.set(vm, Phase::Aborted(reason.to_owned()));
    }

    fn resume_devices(&self, vm: VmId) -> bool {
        let mut fine = true;
        for (shared, rdma) in self.nics(vm) {
            if rdma.device().is_none() {
                // Its monitor has gone, and the VM with it.
                fine = false;
            } else if let Err(error) = rdma.run() {
                fine = false;
                let name = &shared.key;
                tracing::error!(%error, "{name} doesn't work after a migration");
            }
            shared.set_locked(false);
        }
        fine
    }

    /// This host runs a VM: resumes one that stays, or starts one that arrived. Its queue pairs stay closed until the hosts of their peers have
    /// acknowledged.
    fn run_vm(&mut self, vm: VmId, epoch: Epoch) {
        self.draining.forget(Drain::Own(vm));
        let incoming = self.incoming.remove(&vm);
        let outgoing = self.outgoing.remove(&vm);
        let own = self.nomad.as_ref().map(nomad::Host::id);
        if let (Some(_), Some(host)) = (incoming, own) {
            // From here on the directory names this host, whatever the service's last event was.
            self.update_place(Place { vm, host, epoch });
        }
        self.suspend_towards_peers(vm);
        // A monitor that died after it reported the arrival has taken the VM with it.
        let there = incoming.is_none() || !self.nics(vm).is_empty();
        let fine = self.resume_devices(vm) && there;
        let phase = match (incoming, outgoing) {
            (Some(_), _) if fine => Phase::Running,
            (Some(_), _) => Phase::Failed,
            (None, Some(migration)) => Phase::Aborted(self.why(migration)),
            (None, None) => return,
        };
        self.set(vm, phase);
    }

    /// Takes a monitor's report on its VM in.
    fn monitor_reported(&mut self, name: &str, what: MonitorReport) {
        let Some(vm) = self.directory.number(name).map(|vm| VmId(vm.0)) else { return };
        let outgoing = self.outgoing.get(&vm).copied();
        let incoming = self.incoming.get(&vm).copied();
        let event = match (what, outgoing, incoming) {
            (MonitorReport::Converged, Some(migration), _) => Event::Converged { migration, vm },
            (MonitorReport::Stopped, Some(migration), _) => Event::Stopped { migration, vm },
            (MonitorReport::Arrived, _, Some(migration)) => Event::Arrived { migration, vm },
            (MonitorReport::Broken, Some(migration), _) | (MonitorReport::Broken, _, Some(migration)) => {
                Event::StreamBroke { migration }
            }
            _ => return,
        };
        self.step(event);
    }
}

fn keys(of: &HashMap<VmId, MigrationId>, migration: MigrationId) -> Vec<VmId> {
    of.iter().filter(|(_, of)| **of == migration).map(|(vm, _)| *vm).collect()
}
