//! The destination monitor: waits for its VM from a source monitor.
//!
//! ```text
//! main thread   assembles the chassis, waits for events    restores, sends Ready, receives Go, runs, sends Running
//! incoming      accepts the streams, fills RAM ──Received─▶
//! api           serves the waiting VM: progress, stop      from then on serves the machine
//! ```

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

use cluster_key::ClusterKey;
use control_api::host::{AwaitRegistration, DEFAULT_SOCKET, HostClient};
use control_api::types::{ExitTable, NicBehind, VmState, VmSummary};
use machine::memory::postcopy::{PostCopyRam, disable_huge_pages, enable_huge_pages};
use machine::memory::{GuestMemorySpace, RamRegion, Userfault, UserfaultError};
use serde_json::{Value, json};
use telemetry::metrics::Family;
use vfio_user_protocol::client::ClientError;
use vfio_user_protocol::migration::DeviceState;
use virtio_devices::block::DiskContent;

use super::error::Error;
use super::event::{Event, Events};
use super::is_ended;
use super::machine::{Chassis, Machine};
use crate::api::{ControlError, VmControl};
use crate::description::{HugePages, VmDescription};
use crate::migration::connection::Stop;
use crate::migration::daemon::{Daemon, DecisionWait, MigrationOutcome};
use crate::migration::destination::{DestinationDevices, IncomingMigration, accept_streams};
use crate::migration::error::{MigrationError, line};
use crate::migration::postcopy::fetching::{Fetching, RemainingPages};
use crate::migration::postcopy::presence::{Presence, PresenceError};
use crate::migration::postcopy::source::DAEMON_TOO_OLD;
use crate::migration::shape::{self, Shape};
use crate::migration::state::SavedMachine;
use crate::sandbox::{Sandbox, ThreadFilter};
use crate::vfio_user::IncomingFunction;

/// A VM whose memory and state were received, and whose source waits for the outcome.
pub struct ReceivedVm {
    incoming: IncomingMigration,
    saved: SavedMachine,
    devices: ServedDevices,
    /// The post-copy, if pages are not present yet.
    fetching: Option<Fetching>,
}

impl std::fmt::Debug for ReceivedVm {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Arrived").field("vcpus", &self.saved.vcpus.len()).finish_non_exhaustive()
    }
}

/// Where the monitor listens for a source.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// The address.
    pub address: SocketAddr,
    /// Key that encrypts the streams; with `None` they must be unencrypted.
    pub key: Option<ClusterKey>,
}

/// The socket for connections from sources.
#[derive(Debug)]
pub struct MigrationListener {
    listener: TcpListener,
    key: Option<ClusterKey>,
    /// Registration with the cluster service; dropping it ends it.
    _announced: Option<AwaitRegistration>,
}

/// Listens for a source. To be called before the sandbox is entered.
pub fn listen(description: &VmDescription, incoming: Incoming) -> Result<MigrationListener, Error> {
    let Incoming { address, key } = incoming;
    let failed = MigrationError::stream("listened for, at the address of --incoming");
    if let Some(reasons) = shape::migration_blockers(description) {
        return Err(Error::IncomingFailed(MigrationError::Blocked(reasons)));
    }
    let listener = TcpListener::bind(address).and_then(|listener| {
        // Accepted streams inherit it: answers during the blackout must not wait for more data.
        rustix::net::sockopt::set_tcp_nodelay(&listener, true)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let listener = listener.map_err(failed).map_err(Error::IncomingFailed)?;
    tracing::info!(%address, encrypted = key.is_some(), "Waiting for a VM");
    let _announced = announce(description, address);
    Ok(MigrationListener { listener, key, _announced })
}

/// Registers the listening address with the cluster service, through the daemon of the VM's RDMA NICs or the host's default one. Then
/// `migrate --to` finds it by the host's name. Where this fails, `migrate --to` still accepts the address.
fn announce(description: &VmDescription, address: SocketAddr) -> Option<AwaitRegistration> {
    let socket = description.rdma.first().map_or(Path::new(DEFAULT_SOCKET), |nic| nic.host.as_path());
    if !socket.exists() {
        return None;
    }
    match HostClient::new(socket).await_vm(&description.name, address) {
        Ok(announced) => {
            tracing::info!(
                host = announced.host,
                address = announced.address,
                "The address for the incoming VM is registered with the cluster service"
            );
            Some(announced)
        }
        Err(error) => {
            tracing::info!(
                reason = line(&error),
                "The address for the incoming VM couldn't be registered with the cluster service; give `migrate --to` the address"
            );
            None
        }
    }
}

/// Served devices of the incoming VM.
pub struct ServedDevices {
    functions: Vec<IncomingFunction>,
    daemon: Option<Daemon>,
    /// Whether the first part of their state has been received.
    receiving: Mutex<bool>,
    postcopy: PostCopyMemory,
    disks: Vec<DiskContent>,
}

/// State that a post-copy needs.
pub struct PostCopyMemory {
    /// Opened while the process had its privileges.
    uffd: Mutex<Result<Userfault, UserfaultError>>,
    regions: Vec<RamRegion>,
    pages: HugePages,
    /// Presence map for a daemon that also has the memory mapped.
    presence: Mutex<Option<Result<Presence, PresenceError>>>,
}

impl PostCopyMemory {
    /// For the RAM of the incoming VM.
    pub fn new(uffd: Result<Userfault, UserfaultError>, chassis: &Chassis) -> Self {
        let pages = chassis.description().memory.hugepages;
        let regions = chassis.ram().regions().to_vec();
        let ranges: Vec<_> = regions.iter().map(|region| (region.range.start, region.range.size)).collect();
        let served = !chassis.description().rdma.is_empty();
        let presence = Mutex::new(served.then(|| Presence::new(&ranges)));
        Self { uffd: Mutex::new(uffd), regions, pages, presence }
    }

    fn presence(&self) -> MutexGuard<'_, Option<Result<Presence, PresenceError>>> {
        self.presence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Result<Userfault, UserfaultError>> {
        self.uffd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prepare(&self) -> Result<(), MigrationError> {
        if let Err(error) = &*self.lock() {
            return Err(MigrationError::NoPostcopy(line(error)));
        }
        if self.pages != HugePages::None {
            let text =
                "this VM's memory is in huge pages, which are too large to fetch one by one; use small ones";
            return Err(MigrationError::NoPostcopy(text.to_owned()));
        }
        if let Some(Err(error)) = &*self.presence() {
            return Err(MigrationError::NoPostcopy(line(error)));
        }
        disable_huge_pages(&self.regions).map_err(MigrationError::machine("prepared"))
    }

    /// All memory was received before the switchover: no post-copy.
    fn not_needed(&self) {
        if self.pages == HugePages::None {
            enable_huge_pages(&self.regions);
        }
    }

    /// Starts the post-copy: pages are fetched while the guest runs.
    fn begin(
        &self,
        rest: RemainingPages,
        functions: &[IncomingFunction],
        from: String,
    ) -> Result<Fetching, MigrationError> {
        let gone = UserfaultError::Open(std::io::Error::other("it is in use"));
        let uffd = std::mem::replace(&mut *self.lock(), Err(gone))
            .map_err(|error| MigrationError::NoPostcopy(line(&error)))?;
        let ram = PostCopyRam::new(uffd, self.regions.clone(), rest.missing.sets());
        let ram = ram.map_err(MigrationError::machine("prepared"))?;
        let presence = match self.presence().take() {
            None => None,
            Some(presence) => Some(presence.map_err(|error| MigrationError::NoPostcopy(line(&error)))?),
        };
        if let Some(presence) = &presence {
            presence.fill(rest.missing.sets());
            for function in functions {
                presence.share(|ranges, bitmap, requests, arrivals| {
                    match function.set_postcopy_memory(ranges, bitmap, requests, arrivals) {
                        Ok(true) => Ok(()),
                        Ok(false) => Err(MigrationError::NoPostcopy(DAEMON_TOO_OLD.to_owned())),
                        Err(error) => Err(server(function.name())(error)),
                    }
                })?;
            }
        }
        let on_lost = move |left, committed, source: MigrationError| {
            // Threads of this process, devices' threads included, block inside the kernel for pages that can't be fetched any more. Only
            // the process's end stops them: without the pages they would read other contents than the guest's.
            let source = Box::new(source);
            let error = if committed {
                Error::Lost(MigrationError::LostSource { from: from.clone(), left, source })
            } else {
                Error::IncomingFailed(*source)
            };
            tracing::error!(error = line(&error), "The VM ends");
            std::process::exit(LOST_EXIT_CODE);
        };
        Fetching::begin(rest, ram, presence, true, Box::new(on_lost))
    }
}

/// Exit code of the process when pages of the VM's memory are lost.
const LOST_EXIT_CODE: i32 = 1;

impl ServedDevices {
    /// For a machine that waits for its VM.
    pub fn new(
        functions: Vec<IncomingFunction>,
        disks: Vec<DiskContent>,
        daemon: Option<Daemon>,
        postcopy: PostCopyMemory,
    ) -> Self {
        Self { functions, daemon, receiving: Mutex::default(), postcopy, disks }
    }
}

fn server(name: &str) -> impl FnOnce(ClientError) -> MigrationError {
    move |source| MigrationError::Device { name: name.to_owned(), source: Box::new(source) }
}

impl DestinationDevices for ServedDevices {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        self.daemon.as_ref().map(Daemon::host).transpose()
    }

    fn receive_state(&self, number: u32, data: &[u8]) -> Result<(), MigrationError> {
        let mut receiving = self.receiving.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *receiving, true) {
            // By now the daemon knows which VM migrates here.
            for function in &self.functions {
                function.begin().map_err(server(function.name()))?;
            }
        }
        let function = usize::try_from(number).ok().and_then(|number| self.functions.get(number));
        let function = function.ok_or_else(|| {
            MigrationError::Protocol(format!("state of a device {number}, which isn't here"))
        })?;
        function.write_state(data).map_err(server(function.name()))
    }

    fn post_copy(&self) -> Result<(), MigrationError> {
        for function in &self.functions {
            if !function.supports_postcopy().map_err(server(function.name()))? {
                return Err(MigrationError::NoPostcopy(DAEMON_TOO_OLD.to_owned()));
            }
        }
        self.postcopy.prepare()
    }

    fn disks(&self) -> &[DiskContent] {
        &self.disks
    }
}

/// Receives a VM on a thread of its own, which sends [`Event::Received`] to the main thread.
pub fn await_vm(
    source: MigrationListener,
    shape: Shape,
    memory: GuestMemorySpace,
    devices: ServedDevices,
    events: Events,
    stop: Stop,
    filter: ThreadFilter,
) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name("incoming".to_owned()).spawn(move || {
        filter.apply_or_end();
        let received = receive(&source, &shape, &memory, devices, &stop);
        events.send(Event::Received(Box::new(received)));
    });
    spawned.map(drop).map_err(|source| Error::Monitor { what: "start the thread that takes a VM in", source })
}

fn receive(
    source: &MigrationListener,
    shape: &Shape,
    memory: &GuestMemorySpace,
    devices: ServedDevices,
    stop: &Stop,
) -> Result<ReceivedVm, MigrationError> {
    let streams = accept_streams(&source.listener, source.key.as_ref(), stop)?;
    let (mut incoming, state) = streams.receive(shape, memory, &devices, stop)?;
    match SavedMachine::decode(&state) {
        Ok(saved) => {
            let from = incoming.source_address().to_owned();
            let fetching = incoming
                .take_remaining()
                .map(|rest| devices.postcopy.begin(rest, &devices.functions, from))
                .transpose();
            let fetching = fetching.inspect_err(|error| incoming.refuse(&line(error)))?;
            if fetching.is_none() {
                devices.postcopy.not_needed();
            }
            Ok(ReceivedVm { incoming, saved, devices, fetching })
        }
        Err(reason) => {
            incoming.refuse(&reason);
            Err(MigrationError::Protocol(format!("state that can't be used: {reason}")))
        }
    }
}

/// Restores the machine and runs its guest, when the source or the coordinator commits the migration. After an error the guest is at the
/// source.
///
/// With a daemon, waits for the coordinator's decision without a time limit, or until one of `events` ends the monitor. Meanwhile `doubt`
/// has the reason why there is no decision yet.
///
/// In a post-copy also returns the fetching, which the caller ends with the VM.
pub fn restore_and_run(
    chassis: Chassis,
    received: ReceivedVm,
    sandbox: &Sandbox,
    events: &mpsc::Receiver<Event>,
    doubt: &Doubt,
) -> Result<(Arc<Machine>, Option<Fetching>), Error> {
    let began = Instant::now();
    let ReceivedVm { mut incoming, saved, devices, fetching } = received;
    let running = saved.running;
    let machine = match chassis.restore(sandbox, saved, incoming.blackout()) {
        Ok(machine) => Arc::new(machine),
        Err(error) => {
            fetching.iter().for_each(Fetching::abandon);
            incoming.refuse(&line(&error));
            return Err(error);
        }
    };
    let restored = began.elapsed();
    let outcome = match &devices.daemon {
        None => incoming.ready(),
        Some(daemon) => vote(&mut incoming, &devices, daemon, events, doubt),
    };
    if let Err(error) = outcome {
        fetching.iter().for_each(Fetching::abandon);
        // No vCPU ran. Ending the machine empties the buses, so that all devices are dropped.
        machine.end()?;
        return Err(Error::IncomingFailed(error));
    }
    // The migration is committed: the guest runs here, whether or not the source learns of it.
    if let Some(fetching) = &fetching {
        fetching.commit();
    }
    for function in &machine.devices.served {
        function.set_device_state(DeviceState::Running)?;
        function.migration_committed();
    }
    machine.devices.disks.iter().for_each(DiskContent::in_use);
    if running {
        machine.resume()?;
    }
    if let Err(error) = incoming.running() {
        tracing::warn!(error = line(&error), "The source could not be notified that its VM runs here");
    }
    for function in &machine.devices.virtio {
        if let Err(error) = function.announce() {
            tracing::warn!(error = line(&error), "The VM's new place could not be announced to the network");
        }
    }
    let restore_ms = restored.as_secs_f64() * 1000.0;
    let total_ms = began.elapsed().as_secs_f64() * 1000.0;
    tracing::info!(restore_ms, total_ms, running, "The VM has arrived");
    Ok((machine, fetching))
}

/// Everything was received: votes, and waits for the coordinator's decision. The vote can't be revoked.
fn vote(
    incoming: &mut IncomingMigration,
    devices: &ServedDevices,
    daemon: &Daemon,
    events: &mpsc::Receiver<Event>,
    doubt: &Doubt,
) -> Result<(), MigrationError> {
    let ended = devices
        .functions
        .iter()
        .try_for_each(|function| function.end().map_err(server(function.name())))
        .and_then(|()| daemon.register());
    if let Err(error) = ended {
        incoming.refuse(&line(&error));
        return Err(error);
    }
    // The source may have voted before its connection was lost.
    if let Err(error) = incoming.restored() {
        tracing::warn!(error = line(&error), "The source could not be notified that its VM was received");
    }
    let on_doubt = |reason: &str| doubt.set(reason);
    let wait = DecisionWait { on_doubt: &on_doubt, is_over: &|| is_ended(events) };
    match daemon.vote(&wait)? {
        MigrationOutcome::RunsHere => Ok(()),
        MigrationOutcome::Aborted(reason) => Err(MigrationError::Aborted(reason)),
        MigrationOutcome::RunsThere => Err(MigrationError::Aborted("it runs on another host".to_owned())),
    }
}

/// The reason why the VM is in doubt, while it is. Thread-safe.
#[derive(Debug, Default)]
pub struct Doubt(Mutex<Option<String>>);

impl Doubt {
    fn set(&self, reason: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    }

    fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The control API's view of the VM, before and after the switchover.
pub struct SwitchableControl(Mutex<Arc<dyn VmControl>>);

impl SwitchableControl {
    /// Starts with the view of the waiting VM.
    pub fn new(waiting: WaitingControl) -> Self {
        Self(Mutex::new(Arc::new(waiting)))
    }

    /// Replaces the view, when the VM has been restored.
    pub fn set(&self, control: Arc<dyn VmControl>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = control;
    }

    fn now(&self) -> Arc<dyn VmControl> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl VmControl for SwitchableControl {
    fn summary(&self) -> VmSummary {
        self.now().summary()
    }
    fn inspect(&self) -> Value {
        self.now().inspect()
    }
    fn pause(&self) -> Result<(), ControlError> {
        self.now().pause()
    }
    fn resume(&self, forced: bool) -> Result<(), ControlError> {
        self.now().resume(forced)
    }
    fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<(), ControlError> {
        self.now().change_nic(nic, behind)
    }
    fn cancel_migration(&self) -> Result<(), ControlError> {
        self.now().cancel_migration()
    }
    fn power_button(&self) -> Result<(), ControlError> {
        self.now().power_button()
    }
    fn reset(&self, forced: bool) -> Result<(), ControlError> {
        self.now().reset(forced)
    }
    fn stop(&self) -> Result<(), ControlError> {
        self.now().stop()
    }
    fn exits(&self) -> ExitTable {
        self.now().exits()
    }
    fn metrics(&self) -> Vec<Family> {
        self.now().metrics()
    }
}

/// The view of a VM that hasn't been restored yet.
pub struct WaitingControl {
    summary: VmSummary,
    description: VmDescription,
    started: Instant,
    events: Events,
    doubt: Arc<Doubt>,
}

impl WaitingControl {
    /// For the waiting chassis.
    pub fn new(
        chassis: &Chassis,
        guest: String,
        events: Events,
        started: Instant,
        doubt: Arc<Doubt>,
    ) -> Self {
        let description = chassis.description().clone();
        let summary = VmSummary {
            name: description.name.clone(),
            pid: std::process::id(),
            state: VmState::Incoming,
            guest,
            vcpus: description.cpus.count().into(),
            memory_bytes: description.memory.size,
            uptime_seconds: 0.0,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            rdma_nics: u32::try_from(description.rdma.len()).unwrap_or(u32::MAX),
            waits_for: None,
        };
        Self { summary, description, started, events, doubt }
    }

    fn not_received(what: &'static str) -> ControlError {
        ControlError::WrongState { state: VmState::Incoming, what }
    }
}

impl VmControl for WaitingControl {
    fn summary(&self) -> VmSummary {
        // A VM in doubt has been received completely, and the decision isn't known.
        let state = if self.doubt.get().is_some() { VmState::InDoubt } else { VmState::Incoming };
        VmSummary { uptime_seconds: self.started.elapsed().as_secs_f64(), state, ..self.summary.clone() }
    }
    fn inspect(&self) -> Value {
        json!({ "summary": self.summary(), "description": self.description, "doubt": self.doubt.get() })
    }
    fn pause(&self) -> Result<(), ControlError> {
        Err(Self::not_received("be paused"))
    }
    fn resume(&self, _forced: bool) -> Result<(), ControlError> {
        Err(Self::not_received("be resumed"))
    }
    fn change_nic(&self, _nic: &str, _behind: NicBehind) -> Result<(), ControlError> {
        Err(Self::not_received("change its NICs"))
    }
    fn cancel_migration(&self) -> Result<(), ControlError> {
        Err(Self::not_received("cancel its migration here; cancel it at the source"))
    }
    fn power_button(&self) -> Result<(), ControlError> {
        Err(Self::not_received("press its power button"))
    }
    fn reset(&self, _forced: bool) -> Result<(), ControlError> {
        Err(Self::not_received("be reset"))
    }
    fn stop(&self) -> Result<(), ControlError> {
        self.events.send(Event::Stop);
        Ok(())
    }
    fn exits(&self) -> ExitTable {
        ExitTable::default()
    }
    fn metrics(&self) -> Vec<Family> {
        Vec::new()
    }
}
