//! A host of the cluster without a machine: the migration protocol's real state machine and the real client of the service, on an HTTP/2
//! connection of its own. A stand-in answers at once where a daemon would wait for a monitor or the engine.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control_api::backoff::Backoff;
use control_api::cluster::proto::cluster_service_client::ClusterServiceClient;
use control_api::cluster::proto::{self, Speaker};
use control_api::cluster::{ClusterError, Service};
use nomad::{
    Action, Body, Epoch, Event, HostId, Incarnation, Message, MigrationId, Node, Place, Timer, VmId,
};
use tokio::sync::{mpsc, oneshot};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// First and longest back-off, as daemons have them.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);
/// Messages that wait to be sent, as daemons have them.
const OUTBOX: usize = 1024;
/// VMs of this number and above don't exist: a host's message about one of them is a probe, which the other host's stand-in returns.
const PROBE: u32 = 0xFFFF_0000;

/// What all hosts and the driver share.
#[derive(Debug)]
pub struct Shared {
    pub service: Service,
    /// Each host, by its place.
    pub hosts: Vec<Mutex<About>>,
    /// Where the state of a VM that arrives is reported.
    by_id: Mutex<HashMap<HostId, mpsc::UnboundedSender<Command>>>,
    vms: Mutex<HashMap<VmId, String>>,
    /// Connections of VMs, which move with them.
    links: Mutex<HashMap<VmId, Vec<Place>>>,
    /// VMs of the job.
    pub job: Mutex<Vec<VmId>>,
    /// VMs that run at their migrations' destinations, with the time.
    pub arrived: Mutex<Vec<(VmId, Instant)>>,
    /// The last errors of connections, shown when a wait ends in vain.
    pub errors: Mutex<Vec<String>>,
}

/// What the driver knows of a host.
#[derive(Debug, Default, Clone)]
pub struct About {
    pub name: String,
    pub speaker: Speaker,
    /// When its last registration was answered, and when all of its VMs and links were reported after it.
    pub registered: Option<Instant>,
    pub reported: Option<Instant>,
    /// Its VMs.
    pub vms: BTreeMap<VmId, Epoch>,
}

/// What the driver, or another host's stand-in, has a host do.
#[derive(Debug)]
pub enum Command {
    /// Its VMs are connected to these: reported at once.
    Link(BTreeMap<VmId, Vec<Place>>, oneshot::Sender<Result<(), String>>),
    /// Has a VM of it move.
    Migrate { vm: VmId, to: String, answer: oneshot::Sender<Result<u64, String>> },
    /// Sends a message and waits for its answer: to the coordinator, or to another host.
    Probe { to: Node, vm: VmId, answer: oneshot::Sender<Duration> },
    /// All of a VM's state has come here.
    Arrived { migration: MigrationId, vm: VmId },
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn new(service: Service, hosts: usize) -> Arc<Self> {
        let about = |place| Mutex::new(About { name: format!("h{place}"), ..About::default() });
        Arc::new(Self {
            service,
            hosts: (0..hosts).map(about).collect(),
            by_id: Mutex::default(),
            vms: Mutex::default(),
            links: Mutex::default(),
            job: Mutex::default(),
            arrived: Mutex::default(),
            errors: Mutex::default(),
        })
    }
}

/// The host's task.
pub struct SimulatedHost {
    shared: Arc<Shared>,
    place: usize,
    vms: usize,
    commands: mpsc::UnboundedReceiver<Command>,
    sender: mpsc::UnboundedSender<Command>,
    host: Option<nomad::Host>,
    /// VMs that are registered here, by name.
    names: BTreeMap<String, (VmId, Epoch)>,
    timers: BTreeMap<(Instant, u64), Timer>,
    next_timer: u64,
    probes: HashMap<u32, (Instant, oneshot::Sender<Duration>)>,
    next_probe: u32,
    outbox: Option<mpsc::Sender<proto::Envelope>>,
    /// What the last `Watch` brought.
    seen: (u64, u64),
}

type Client = ClusterServiceClient<Channel>;

impl SimulatedHost {
    /// A host that starts so many VMs.
    pub fn new(shared: &Arc<Shared>, place: usize, vms: usize) -> (Self, mpsc::UnboundedSender<Command>) {
        let (sender, commands) = mpsc::unbounded_channel();
        let host = Self {
            shared: Arc::clone(shared),
            place,
            vms,
            commands,
            sender: sender.clone(),
            host: None,
            names: BTreeMap::new(),
            timers: BTreeMap::new(),
            next_timer: 0,
            probes: HashMap::new(),
            next_probe: 0,
            outbox: None,
            seen: (0, 0),
        };
        (host, sender)
    }

    fn about(&self) -> MutexGuard<'_, About> {
        lock(&self.shared.hosts[self.place])
    }

    /// Sessions, one after the other, with the daemons' back-off.
    pub async fn run(mut self) {
        let mut backoff = Backoff::new(FIRST_BACKOFF, LONGEST_BACKOFF);
        loop {
            let began = Instant::now();
            let Err(error) = self.session().await;
            if began.elapsed() > LONGEST_BACKOFF {
                backoff.reset();
            }
            {
                let mut errors = lock(&self.shared.errors);
                errors.push(format!("h{}: {error}", self.place));
                let old = errors.len().saturating_sub(16);
                errors.drain(..old);
            }
            self.outbox = None;
            self.probes.clear();
            tokio::time::sleep(backoff.wait()).await;
        }
    }

    async fn session(&mut self) -> Result<std::convert::Infallible, ClusterError> {
        let shared = Arc::clone(&self.shared);
        let service = &shared.service;
        let mut client = service.connect().await?;
        let (name, incarnation) = {
            let about = self.about();
            (about.name.clone(), about.speaker.incarnation)
        };
        let place = u32::try_from(self.place).unwrap_or(u32::MAX);
        let [_, second, third, fourth] = place.to_be_bytes();
        let fabric_address = format!("10.{second}.{third}.{fourth}:4792");
        let request = proto::RegisterHostRequest { name, fabric_address, incarnation };
        let reply = service.within("RegisterHost", client.register_host(request)).await?;
        let lease = Duration::from_millis(reply.lease_milliseconds);
        let speaker = reply.speaker.unwrap_or_default();
        {
            let mut about = self.about();
            (about.speaker, about.registered) = (speaker, Some(Instant::now()));
        }
        lock(&shared.by_id).insert(HostId(speaker.host), self.sender.clone());
        let request = proto::WatchRequest { instance: self.seen.0, revision: self.seen.1 };
        let mut events = service.within("Watch", client.watch(request)).await?;
        let mut messages = self.coordinate(&mut client, speaker).await?;
        self.register_vms(&mut client, speaker).await?;
        self.report_links(&mut client, speaker).await?;
        self.about().reported = Some(Instant::now());
        let mut heartbeat = tokio::time::interval(lease / 3);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let due = self.timers.first_key_value().map(|((at, _), _)| *at);
            let timer = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = events.message() => {
                    let event = event.map_err(|status| service.error("Watch", status))?;
                    let ended = || service.error("Watch", tonic::Status::unavailable("the stream has ended"));
                    let event = event.ok_or_else(ended)?;
                    self.seen = (event.instance, event.revision);
                }
                message = messages.message() => {
                    let message = message.map_err(|status| service.error("Coordinate", status))?;
                    let ended = || service.error("Coordinate", tonic::Status::unavailable("the stream has ended"));
                    let message = message.ok_or_else(ended)?;
                    if let Ok(message) = nomad::wire::parse(&message.message) {
                        self.receive(message);
                    }
                }
                command = self.commands.recv() => {
                    if let Some(command) = command {
                        self.carry_out(command, &mut client, speaker).await?;
                    }
                }
                _ = heartbeat.tick() => {
                    let request = proto::HeartbeatRequest { speaker: Some(speaker), waiting: Vec::new() };
                    service.within("Heartbeat", client.heartbeat(request)).await?;
                }
                () = timer => self.ring(),
            }
        }
    }

    /// Joins the migration protocol: its first message opens the stream.
    async fn coordinate(
        &mut self,
        client: &mut Client,
        speaker: Speaker,
    ) -> Result<tonic::Streaming<proto::Envelope>, ClusterError> {
        let (outbox, outgoing) = mpsc::channel(OUTBOX);
        self.outbox = Some(outbox);
        let (id, incarnation) = (HostId(speaker.host), Incarnation(speaker.incarnation));
        if self.host.as_ref().is_none_or(|host| (host.id(), host.incarnation()) != (id, incarnation)) {
            self.host = Some(nomad::Host::new(id, incarnation, nomad::Config::default()));
        }
        self.step(Event::Start);
        let service = self.shared.service.clone();
        service.within("Coordinate", client.coordinate(ReceiverStream::new(outgoing))).await
    }

    /// Registers its VMs: at first those that it starts, later those that it runs.
    async fn register_vms(&mut self, client: &mut Client, speaker: Speaker) -> Result<(), ClusterError> {
        if self.names.is_empty() {
            let started = (0..self.vms).map(|number| (format!("vm{}-{number}", self.place), 0));
            for (name, epoch) in started.collect::<Vec<_>>() {
                self.register_vm(client, speaker, name, epoch).await?;
            }
            return Ok(());
        }
        for (name, (_, epoch)) in self.names.clone() {
            self.register_vm(client, speaker, name, epoch.0).await?;
        }
        Ok(())
    }

    async fn register_vm(
        &mut self,
        client: &mut Client,
        speaker: Speaker,
        name: String,
        epoch: u64,
    ) -> Result<(), ClusterError> {
        let mut gid = vec![0; 16];
        // An address that no other VM has: of the host and of the VM.
        let number = name.rsplit('-').next().and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
        let home = name.strip_prefix("vm").and_then(|name| name.split('-').next()?.parse::<u32>().ok());
        gid[8..12].copy_from_slice(&home.unwrap_or(0).to_be_bytes());
        gid[12..].copy_from_slice(&number.to_be_bytes());
        let nics = vec![proto::Nic { segment: "bench".to_owned(), addresses: vec![gid], mac: None }];
        let request = proto::RegisterVmRequest { speaker: Some(speaker), name: name.clone(), epoch, nics };
        let service = self.shared.service.clone();
        let reply = service.within("RegisterVm", client.register_vm(request)).await?;
        let (vm, epoch) = (VmId(reply.vm), Epoch(reply.epoch));
        lock(&self.shared.vms).insert(vm, name.clone());
        self.names.insert(name, (vm, epoch));
        self.about().vms.insert(vm, epoch);
        self.step(Event::Started { vm, epoch, after: MigrationId(reply.after) });
        Ok(())
    }

    async fn report_links(&self, client: &mut Client, speaker: Speaker) -> Result<(), ClusterError> {
        let mut links = Vec::new();
        for (vm, _) in self.names.values() {
            let all = lock(&self.shared.links);
            let peers = all.get(vm).into_iter().flatten();
            links.extend(peers.map(|peer| proto::Link { vm: vm.0, peer: peer.vm.0 }));
        }
        let request = proto::ReportLinksRequest { speaker: Some(speaker), links };
        self.shared.service.within("ReportLinks", client.report_links(request)).await?;
        Ok(())
    }

    async fn carry_out(
        &mut self,
        command: Command,
        client: &mut Client,
        speaker: Speaker,
    ) -> Result<(), ClusterError> {
        match command {
            Command::Link(links, answer) => {
                for (vm, peers) in &links {
                    for peer in peers {
                        self.step(Event::Connected { vm: *vm, peer: *peer });
                    }
                }
                lock(&self.shared.links).extend(links);
                let reported = self.report_links(client, speaker).await;
                // The driver may have given up.
                let _ = answer.send(reported.as_ref().copied().map_err(ToString::to_string));
                reported
            }
            Command::Migrate { vm, to, answer } => {
                let name = lock(&self.shared.vms).get(&vm).cloned().unwrap_or_default();
                let wishes = vec![proto::Wish { vm: name, host: to }];
                let request = proto::MigrateRequest { speaker: Some(speaker), wishes, ..Default::default() };
                let (service, mut client) = (self.shared.service.clone(), client.clone());
                // Its answer isn't waited for: messages of the migration come meanwhile.
                tokio::spawn(async move {
                    let begun = service.within("Migrate", client.migrate(request)).await;
                    let begun = begun.map(|reply| reply.migration).map_err(|error| error.to_string());
                    let _ = answer.send(begun);
                });
                Ok(())
            }
            Command::Probe { to, vm, answer } => {
                let key = match to {
                    Node::Coordinator => vm.0,
                    Node::Host(_) => {
                        self.next_probe = (self.next_probe + 1) % (u32::MAX - PROBE);
                        PROBE + self.next_probe
                    }
                };
                self.probes.insert(key, (Instant::now(), answer));
                self.send(to, Body::Where { vm: VmId(key) });
                Ok(())
            }
            Command::Arrived { migration, vm } => {
                self.step(Event::Arrived { migration, vm });
                Ok(())
            }
        }
    }

    fn send(&mut self, to: Node, body: Body) {
        let Some(host) = &self.host else { return };
        let message = Message { from: Node::Host(host.id()), incarnation: host.incarnation(), to, body };
        self.transmit(&message);
    }

    fn transmit(&self, message: &Message) {
        let Some(outbox) = &self.outbox else { return };
        let mut bytes = Vec::new();
        nomad::wire::encode(message, &mut bytes);
        // The protocol repeats what there is no room for.
        let _ = outbox.try_send(proto::Envelope { message: bytes });
    }

    fn receive(&mut self, message: Message) {
        match &message.body {
            Body::Where { vm } if vm.0 >= PROBE => {
                let (to, body) = (message.from, Body::Lost { vm: *vm, epoch: Epoch(0) });
                return self.send(to, body);
            }
            Body::Lost { vm, .. } if vm.0 >= PROBE => return self.probed(vm.0),
            Body::At { place } => self.probed(place.vm.0),
            _ => {}
        }
        self.step(Event::Message(message));
    }

    fn probed(&mut self, key: u32) {
        if let Some((sent, answer)) = self.probes.remove(&key) {
            let _ = answer.send(sent.elapsed());
        }
    }

    fn ring(&mut self) {
        let now = Instant::now();
        while let Some((&(at, number), &timer)) = self.timers.first_key_value()
            && at <= now
        {
            self.timers.remove(&(at, number));
            self.step(Event::Timer(timer));
        }
    }

    /// Takes an event in, and all that the stand-in answers to what follows from it.
    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        let mut actions = Vec::new();
        while let Some(event) = events.pop() {
            let Some(host) = &mut self.host else { return };
            host.step(event, &mut actions);
            for action in std::mem::take(&mut actions) {
                events.extend(self.act(action));
            }
        }
    }

    /// Carries an action out; what the stand-in answers.
    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => self.transmit(&message),
            Action::Timer { timer, after_ms } => {
                // A timer that is set again begins anew.
                self.timers.retain(|_, set| *set != timer);
                self.next_timer += 1;
                let at = Instant::now() + Duration::from_millis(after_ms.into());
                self.timers.insert((at, self.next_timer), timer);
            }
            Action::Reserve { migration, .. } => {
                return Some(Event::Reservation { migration, granted: true });
            }
            Action::Copy { migration, vm, .. } => return Some(Event::Converged { migration, vm }),
            Action::SuspendQps { migration, vm } => return Some(Event::QpsSuspended { migration, vm }),
            Action::Stop { migration, vm } => return Some(Event::Stopped { migration, vm }),
            Action::Finish { migration, vm, to } => {
                if let Some(destination) = lock(&self.shared.by_id).get(&to) {
                    // Hosts end with the bench only.
                    let _ = destination.send(Command::Arrived { migration, vm });
                }
            }
            Action::Run { vm, epoch } => {
                let name = lock(&self.shared.vms).get(&vm).cloned().unwrap_or_default();
                let moved = self.about().vms.insert(vm, epoch).is_none();
                self.names.insert(name, (vm, epoch));
                if moved {
                    lock(&self.shared.arrived).push((vm, Instant::now()));
                }
            }
            Action::Discard { vm } => {
                self.names.retain(|_, (known, _)| *known != vm);
                self.about().vms.remove(&vm);
            }
            Action::Release { .. }
            | Action::Queued { .. }
            | Action::EndCopy { .. }
            | Action::ResumeQps { .. }
            | Action::Lost { .. } => {}
        }
        None
    }
}
