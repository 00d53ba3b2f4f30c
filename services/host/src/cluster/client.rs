//! The thread that is the client of the cluster service.
//!
//! ```text
//!  connect ─▶ RegisterHost ─▶ Watch ─▶ RegisterVm … ReportLinks ─▶ events, local changes, heartbeats ─┐
//!     ▲                                                                                              │ any failure
//!     └──────────── back-off 0.1 to 2 s, with jitter ◀────────────────────────────────────────────────┘
//! ```
//! A task of its own reads messages of the migration protocol (`Coordinate`), so that they don't wait for requests to the service. Nor do
//! they wait for the engine or the view's file: other threads of the runtime block on these.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_api::backoff::Backoff;
use control_api::cluster::ClusterError;
use control_api::cluster::proto::cluster_service_client::ClusterServiceClient;
use control_api::cluster::proto::{self, Speaker};
use tokio::sync::oneshot;
use tonic::Code;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::view::View;
use super::{ClusterConfig, ClusterDirectory, Hold, LocalNic};
use crate::engine::EngineHandle;
use crate::transport::VmId;

/// First and longest back-off between attempts.
const SOON: Duration = Duration::from_millis(100);
const LATE: Duration = Duration::from_secs(2);
/// Changes by guests are reported at once, and further ones this much later: a guest that binds addresses in a loop doesn't keep the
/// cluster busy.
const CALM: Duration = Duration::from_millis(50);
/// Delay of writing the view after a change, so that many changes cause one write.
const WRITE_AFTER: Duration = Duration::from_millis(100);

/// Limit of messages of the migration protocol that wait to be sent; the protocol repeats dropped ones.
const OUTBOX: usize = 1024;
/// Limit of events applied at once.
const BATCH: usize = 1024;

type Client = ClusterServiceClient<Channel>;
/// VMs by name, with their NICs.
type Vms = BTreeMap<String, Vec<proto::Nic>>;

/// Registers this host as just started, and receives the whole state. Blocks.
pub(super) fn join(config: &ClusterConfig, address: SocketAddr) -> Result<(View, u64), ClusterError> {
    let service = &config.service;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(ClusterError::SetUp)?;
    runtime.block_on(async {
        let mut client = service.connect().await?;
        let reply = service.within("RegisterHost", client.register_host(hello(config, address, 0))).await?;
        service.set_lease(lease(&reply));
        let speaker = reply.speaker.unwrap_or_default();
        let settings = reply.settings.unwrap_or_default();
        let sockets = u16::try_from(settings.sockets).unwrap_or(0);
        let mut view = View::new(speaker.host, settings.mtu, sockets);
        warn_of(&view.set_pins(&settings.pins));
        let request = proto::WatchRequest { instance: 0, revision: 0 };
        let mut events = service.within("Watch", client.watch(request)).await?;
        let after = service.timeout();
        let first = tokio::time::timeout(after, events.message()).await;
        let late = || ClusterError::Timeout { service: service.name().to_owned(), after, request: "Watch" };
        let first = first.map_err(|_| late())?.map_err(|status| service.error("Watch", status))?;
        view.apply([first.ok_or_else(late)?]);
        Ok((view, speaker.incarnation))
    })
}

/// The lease: a host without a heartbeat for so long counts as silent.
fn lease(reply: &proto::RegisterHostReply) -> Duration {
    Duration::from_millis(reply.lease_milliseconds.clamp(30, 3_600_000))
}

/// Logs pins to unknown transports, which are ignored.
fn warn_of(unknown: &[String]) {
    for pin in unknown {
        tracing::warn!(
            "The cluster pins {pin}, which this version doesn't know: it isn't pinned on this host"
        );
    }
}

fn hello(config: &ClusterConfig, address: SocketAddr, incarnation: u64) -> proto::RegisterHostRequest {
    let (name, fabric_address) = (config.name.clone(), address.to_string());
    proto::RegisterHostRequest { name, fabric_address, incarnation }
}

/// The running thread. Dropping it ends it; the host's VMs stay registered, as they do when the daemon dies.
#[derive(Debug)]
pub struct ClusterThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ClusterThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel has no thread or descriptor left.
    pub fn start(directory: Arc<ClusterDirectory>, engine: EngineHandle) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("cluster".to_owned()).spawn(move || {
            let mut link = Link {
                directory,
                engine,
                told: BTreeMap::new(),
                said_links: None,
                said_waiting: None,
                complaints: BTreeMap::new(),
            };
            runtime.block_on(async {
                tokio::select! {
                    () = link.run() => {}
                    // A dropped daemon stops as well.
                    _ = stopped => {}
                }
            });
            // Waits for the view's file if it is being written; then writes the latest view.
            drop(runtime);
            write_view(&link.directory);
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ClusterThread {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // A thread that has failed doesn't receive this.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The thread for the cluster service panicked; this is a bug");
        }
    }
}

/// A VM as reported to the service.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    vm: u32,
    epoch: u64,
    /// `None`: to be reported again.
    nics: Option<Vec<proto::Nic>>,
}

struct Link {
    directory: Arc<ClusterDirectory>,
    engine: EngineHandle,
    told: BTreeMap<String, Told>,
    said_links: Option<BTreeSet<(VmId, VmId)>>,
    /// `None`: to be reported again.
    said_waiting: Option<Vec<proto::Waiting>>,
    /// Refusals by VM, each logged once.
    complaints: BTreeMap<String, String>,
}

impl Link {
    async fn run(&mut self) {
        let mut backoff = Backoff::new(SOON, LATE);
        let mut last = String::new();
        loop {
            let began = Instant::now();
            let Err(error) = self.session().await;
            if began.elapsed() > LATE {
                backoff.reset();
            }
            *self.directory.outbox() = None;
            let followed = self.directory.lost();
            // Logs the same sentence once per outage.
            let text = error.to_string();
            if followed || text != last {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "The cluster service isn't followed; this host goes on with what it knows"
                );
                last = text;
            }
            tokio::time::sleep(backoff.wait()).await;
        }
    }

    /// One connection, until it fails.
    async fn session(&mut self) -> Result<std::convert::Infallible, ClusterError> {
        let directory = Arc::clone(&self.directory);
        let service = &directory.config.service;
        let mut client = service.connect().await?;
        let reply = self.register(&mut client).await?;
        let lease = lease(&reply);
        service.set_lease(lease);
        let speaker = reply.speaker.unwrap_or_default();
        let settings = reply.settings.unwrap_or_default();
        let (instance, revision) = directory.view.load().place;
        let mut events =
            service.within("Watch", client.watch(proto::WatchRequest { instance, revision })).await?;
        // Everything is reported again: the service may have lost it, or refused it before.
        self.said_links = None;
        self.said_waiting = None;
        for told in self.told.values_mut() {
            told.nics = None;
        }
        if directory.view.load().contents.own != speaker.host {
            directory.change(|view| view.contents.own = speaker.host);
            self.use_view(Vec::new()).await;
        }
        // Before VMs are registered, so that participants in migrations learn of them.
        let switch_ms = settings.switch_milliseconds;
        let mut reader = self.coordinate(&mut client, speaker, switch_ms).await?;
        self.say(&mut client, speaker).await?;
        directory.status().away_since = None;
        tracing::info!(
            service = service.name(),
            incarnation = speaker.incarnation,
            "The cluster service is followed"
        );
        let mut heartbeat = tokio::time::interval(lease / 3);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut write_at, mut say_at) = (None, None);
        let mut said = tokio::time::Instant::now();
        loop {
            let (write, say) = (until(write_at), until(say_at));
            tokio::select! {
                event = events.message() => {
                    let event = event.map_err(|status| service.error("Watch", status))?;
                    let Some(event) = event else {
                        let status = tonic::Status::unavailable("the stream of events has ended");
                        return Err(service.error("Watch", status));
                    };
                    let mut batch = vec![event];
                    // A change rebuilds the whole view, so all waiting events are applied together.
                    while batch.len() < BATCH
                        && let Ok(Ok(Some(event))) = tokio::time::timeout(Duration::ZERO, events.message()).await
                    {
                        batch.push(event);
                    }
                    self.use_view(batch).await;
                    write_at = write_at.or_else(|| Some(tokio::time::Instant::now() + WRITE_AFTER));
                }
                ended = &mut reader.0 => {
                    let status = ended.unwrap_or_else(|error| tonic::Status::internal(error.to_string()));
                    return Err(service.error("Coordinate", status));
                }
                () = directory.changed.notified() => say_at = say_at.or(Some(said + CALM)),
                () = say => {
                    say_at = None;
                    self.say(&mut client, speaker).await?;
                    said = tokio::time::Instant::now();
                }
                _ = heartbeat.tick() => {
                    self.beat(&mut client, speaker).await?;
                    // Reports that the service refused because a VM moved may succeed now.
                    self.say(&mut client, speaker).await?;
                }
                () = write => {
                    write_at = None;
                    let directory = Arc::clone(&directory);
                    blocking(move || write_view(&directory)).await;
                }
            }
        }
    }

    /// Registers this host, and takes over its incarnation and the cluster's settings.
    async fn register(&self, client: &mut Client) -> Result<proto::RegisterHostReply, ClusterError> {
        let directory = &self.directory;
        let incarnation = directory.incarnation.load(Ordering::SeqCst);
        let request = hello(&directory.config, directory.address, incarnation);
        let reply = directory.config.service.within("RegisterHost", client.register_host(request)).await;
        if let Err(ClusterError::Refused { code: Code::FailedPrecondition, .. }) = &reply {
            // Another daemon with this host's name has registered and is gone: this daemon has its address. The service accepts this daemon
            // as a new start, unless it has another address for the name.
            directory.incarnation.store(0, Ordering::SeqCst);
        }
        let reply = reply?;
        let speaker = reply.speaker.unwrap_or_default();
        directory.incarnation.store(speaker.incarnation, Ordering::SeqCst);
        let settings = reply.settings.clone().unwrap_or_default();
        let own = (u64::from(directory.view.load().contents.mtu), u32::from(directory.sockets));
        if (u64::from(settings.mtu), settings.sockets) != own {
            tracing::warn!(
                mtu = settings.mtu,
                sockets = settings.sockets,
                "The cluster's settings have changed; restart this daemon to use them"
            );
        }
        warn_of(&directory.change(|view| view.set_pins(&settings.pins)));
        Ok(reply)
    }

    /// Joins the migration protocol: from here on messages flow both ways.
    async fn coordinate(
        &self,
        client: &mut Client,
        speaker: Speaker,
        switch_ms: u32,
    ) -> Result<MessageReader, ClusterError> {
        let service = &self.directory.config.service;
        let (out, outgoing) = tokio::sync::mpsc::channel(OUTBOX);
        *self.directory.outbox() = Some(out);
        if let Some(migration_handle) = self.directory.migration_handle() {
            // Its first message opens the stream.
            migration_handle.joined(speaker.host, speaker.incarnation, switch_ms);
        }
        let messages = service.within("Coordinate", client.coordinate(ReceiverStream::new(outgoing))).await?;
        Ok(MessageReader::start(Arc::clone(&self.directory), messages))
    }

    /// Applies events, and makes the engine use the view; returns when it does.
    async fn use_view(&self, events: Vec<proto::WatchEvent>) {
        let (directory, engine) = (Arc::clone(&self.directory), self.engine.clone());
        let old = blocking(move || {
            let old =
                directory.change(|view| if events.is_empty() { Vec::new() } else { view.apply(events) });
            // The engine is gone when the daemon ends.
            let _ = engine.call(crate::engine::Worker::directory_changed);
            old
        });
        for old in old.await {
            self.directory.refused_old_epochs.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "The cluster service speaks of {old}; that isn't believed. Was its database restored from an old copy?"
            );
        }
    }

    /// Heartbeat, with the monitors that wait for VMs.
    async fn beat(&mut self, client: &mut Client, speaker: Speaker) -> Result<(), ClusterError> {
        let waiting = self.directory.waiting();
        let request = proto::HeartbeatRequest { speaker: Some(speaker), waiting: waiting.clone() };
        self.directory.config.service.within("Heartbeat", client.heartbeat(request)).await?;
        self.said_waiting = Some(waiting);
        Ok(())
    }

    /// Reports local changes.
    async fn say(&mut self, client: &mut Client, speaker: Speaker) -> Result<(), ClusterError> {
        if self.said_waiting.as_ref() != Some(&self.directory.waiting()) {
            self.beat(client, speaker).await?;
        }
        let (vms, links) = self.here();
        self.report_ended(client, speaker, &vms).await?;
        self.report_running(client, speaker, vms).await?;
        if self.said_links.as_ref() != Some(&links) {
            let said = links.iter().map(|(vm, peer)| proto::Link { vm: vm.0, peer: peer.0 }).collect();
            let request = proto::ReportLinksRequest { speaker: Some(speaker), links: said };
            let service = &self.directory.config.service;
            service.within("ReportLinks", client.report_links(request)).await?;
            self.said_links = Some(links);
        }
        self.say_holds(client, speaker).await
    }

    /// Reports VMs that have ended here.
    async fn report_ended(
        &mut self,
        client: &mut Client,
        speaker: Speaker,
        vms: &Vms,
    ) -> Result<(), ClusterError> {
        let ended: Vec<(String, Told)> = self
            .told
            .iter()
            .filter(|(name, _)| !vms.contains_key(*name))
            .map(|(name, told)| (name.clone(), told.clone()))
            .collect();
        let directory = Arc::clone(&self.directory);
        let service = &directory.config.service;
        for (name, told) in ended {
            if directory.place(VmId(told.vm)).is_some_and(|(_, epoch)| epoch > told.epoch) {
                // It has moved away, so this host must not end it.
                drop(self.told.remove(&name));
                continue;
            }
            let request = proto::EndVmRequest { speaker: Some(speaker), vm: told.vm, epoch: told.epoch };
            let ended = service.within("EndVm", client.end_vm(request)).await;
            match self.heard(&name, ended)? {
                Heard::Done(_) => {
                    drop(self.told.remove(&name));
                    if let Some(migration_handle) = directory.migration_handle() {
                        migration_handle.ended(told.vm);
                    }
                }
                // It is moving, or the service can't write: retry with the next heartbeat.
                Heard::Refused(Code::Aborted | Code::Internal) => {}
                // It is another host's now, or doesn't exist.
                Heard::Refused(_) => drop(self.told.remove(&name)),
            }
        }
        Ok(())
    }

    /// Reports VMs that run here, if they or their NICs are new.
    async fn report_running(
        &mut self,
        client: &mut Client,
        speaker: Speaker,
        vms: Vms,
    ) -> Result<(), ClusterError> {
        let directory = Arc::clone(&self.directory);
        let service = &directory.config.service;
        for (name, nics) in vms {
            let before = self.told.get(&name);
            if before.is_some_and(|told| told.nics.as_ref() == Some(&nics)) {
                continue;
            }
            // 0: just started, as far as this daemon knows.
            let epoch = before.map_or(0, |told| told.epoch);
            let request = proto::RegisterVmRequest {
                speaker: Some(speaker),
                name: name.clone(),
                epoch,
                nics: nics.clone(),
            };
            let registered = service.within("RegisterVm", client.register_vm(request)).await;
            match self.heard(&name, registered)? {
                Heard::Done(reply) => {
                    for refused in &reply.refused {
                        tracing::warn!(vm = name, "{refused}: this VM isn't reached there");
                    }
                    if let Some(migration_handle) = directory.migration_handle() {
                        migration_handle.started(reply.vm, reply.epoch, reply.after);
                    }
                    let told = Told { vm: reply.vm, epoch: reply.epoch, nics: Some(nics) };
                    self.told.insert(name, told);
                }
                // The service refuses the epoch as old, so this daemon forgets it.
                Heard::Refused(Code::FailedPrecondition) => drop(self.told.remove(&name)),
                Heard::Refused(_) => {}
            }
        }
        Ok(())
    }

    /// Reports peer pauses. An older service doesn't support that.
    async fn say_holds(&self, client: &mut Client, speaker: Speaker) -> Result<(), ClusterError> {
        let holds: Vec<Hold> = self.directory.here().holds.iter().copied().collect();
        if holds.is_empty() {
            return Ok(());
        }
        let told = |hold: &Hold| proto::Hold {
            migration: hold.migration,
            vm: hold.vm,
            microseconds: hold.microseconds,
            host: String::new(),
        };
        let request =
            proto::ReportHoldsRequest { speaker: Some(speaker), holds: holds.iter().map(told).collect() };
        let service = &self.directory.config.service;
        match service.within("ReportHolds", client.report_holds(request)).await {
            Ok(_) | Err(ClusterError::Refused { code: Code::Unimplemented, .. }) => {}
            Err(error) => return Err(error),
        }
        // Keeps pauses added meanwhile; reported ones may already be dropped for lack of room.
        self.directory.here().holds.retain(|hold| !holds.contains(hold));
        Ok(())
    }

    /// Local VMs with their NICs in order, and their connections.
    fn here(&self) -> (Vms, BTreeSet<(VmId, VmId)>) {
        let here = self.directory.here();
        let mut vms = Vms::new();
        for LocalNic { vm, segment, addresses } in here.nics.values() {
            let addresses = addresses.iter().map(|gid| gid.0.to_vec()).collect();
            let nic = proto::Nic { segment: segment.clone(), addresses, mac: None };
            vms.entry(vm.clone()).or_default().push(nic);
        }
        (vms, here.links.clone())
    }

    /// Separates refusals, which concern one VM, from other errors, which end the connection. So does a host that the service doesn't
    /// recognise.
    fn heard<T>(&mut self, name: &str, answer: Result<T, ClusterError>) -> Result<Heard<T>, ClusterError> {
        match answer {
            Ok(done) => {
                self.complaints.remove(name);
                Ok(Heard::Done(done))
            }
            Err(ClusterError::Refused { code, reason }) => {
                if code == Code::NotFound && reason.contains("register first") {
                    return Err(ClusterError::Refused { code, reason });
                }
                if self.complaints.get(name) != Some(&reason) {
                    tracing::warn!(vm = name, "The cluster service refuses what this host says: {reason}");
                    self.complaints.insert(name.to_owned(), reason);
                }
                Ok(Heard::Refused(code))
            }
            Err(error) => Err(error),
        }
    }
}

/// Writes the view's file.
fn write_view(directory: &ClusterDirectory) {
    if let Err(error) = directory.view.load().save(&directory.path) {
        tracing::warn!(%error, "{} can't be written; this daemon can't be restarted while the cluster service is away", directory.path.display());
    }
}

/// Has another thread do what blocks, so that this one reads messages meanwhile.
async fn blocking<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> R {
    match tokio::task::spawn_blocking(job).await {
        Ok(result) => result,
        // It isn't cancelled: it panicked, and so does this thread.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// The task that reads messages of the migration protocol. Dropping it ends it.
struct MessageReader(tokio::task::JoinHandle<tonic::Status>);

impl MessageReader {
    fn start(directory: Arc<ClusterDirectory>, mut messages: tonic::Streaming<proto::Envelope>) -> Self {
        Self(tokio::spawn(async move {
            loop {
                match messages.message().await {
                    Ok(Some(envelope)) => directory.receive(&envelope.message),
                    Ok(None) => return tonic::Status::unavailable("the stream of messages has ended"),
                    Err(status) => return status,
                }
            }
        }))
    }
}

impl Drop for MessageReader {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Completes at a time, or never.
async fn until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The service's response to a report about a VM.
enum Heard<T> {
    Done(T),
    Refused(Code),
}
