//! A cluster of simulated hosts and a service, and what is measured of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use control_api::cluster::{Service, proto};
use nomad::{HostId, Node, Place, VmId};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use super::host::{About, Command, Shared, SimulatedHost, lock};
use super::service::{Instance, Store};

/// Nothing that is waited for takes longer, or the group fails.
const HANG_LIMIT: Duration = Duration::from_secs(180);
/// A migration without memory to copy that hasn't ended by now was aborted.
const ABORTED_AFTER: Duration = Duration::from_secs(20);
/// Between two looks at what is waited for, and between two lines of progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// How large the cluster is.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub hosts: usize,
    pub vms_per_host: usize,
    /// VMs of the all-to-all job.
    pub ranks: usize,
    /// Migrations at once.
    pub migrations: usize,
    /// Hosts' lease.
    pub lease: Duration,
}

/// A service with all hosts.
pub struct Session {
    pub scale: Scale,
    pub shared: Arc<Shared>,
    pub runtime: Runtime,
    pub instances: Vec<Instance>,
    pub store: Store,
    program: PathBuf,
    folder: PathBuf,
    commands: Vec<mpsc::UnboundedSender<Command>>,
    /// Resident memory before the first host, bytes.
    pub empty_resident: f64,
    /// From the first host's start until all VMs are registered, seconds.
    pub registered_s: f64,
}

impl Session {
    /// Starts instances and hosts, and waits until all VMs are registered.
    ///
    /// # Errors
    /// Something doesn't start, or doesn't register.
    pub fn start(
        program: &Path,
        folder: &Path,
        store: Store,
        instances: usize,
        scale: Scale,
    ) -> anyhow::Result<Self> {
        let mut running = Vec::new();
        for number in 0..instances {
            let addresses = (facilities::ports::loopback(), facilities::ports::loopback());
            let log = folder.join(format!("service{number}.log"));
            running.push(Instance::start(program, addresses, &store, scale.lease, &log)?);
        }
        let addresses: Vec<String> = running.iter().map(|instance| instance.address.to_string()).collect();
        let service = Service::new(&addresses.join(","), None).context("The service has no address")?;
        if instances > 1 {
            leader(&service)?;
        }
        let empty_resident = running.first().context("No instance was asked for")?.resident()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("hosts")
            .enable_all()
            .build()
            .context("An event loop for hosts could not be made")?;
        let shared = Shared::new(service, scale.hosts);
        let began = Instant::now();
        let mut commands = Vec::new();
        for place in 0..scale.hosts {
            let (host, sender) = SimulatedHost::new(&shared, place, scale.vms_per_host);
            runtime.spawn(host.run());
            commands.push(sender);
        }
        let mut session = Self {
            scale,
            shared,
            runtime,
            instances: running,
            store,
            program: program.to_owned(),
            folder: folder.to_owned(),
            commands,
            empty_resident,
            registered_s: 0.0,
        };
        let last = session.until_reported("hosts with all their VMs", began)?;
        session.registered_s = (last - began).as_secs_f64();
        Ok(session)
    }

    fn about(&self, place: usize) -> About {
        self.shared.hosts.get(place).map(|about| lock(about).clone()).unwrap_or_default()
    }

    /// Waits until a count is that of all; says how far it is.
    fn wait_for(&self, what: &str, all: usize, count: impl Fn() -> usize) -> anyhow::Result<()> {
        let (began, mut said) = (Instant::now(), Instant::now());
        loop {
            let now = count();
            if now >= all {
                return Ok(());
            }
            if began.elapsed() > HANG_LIMIT {
                let errors = lock(&self.shared.errors).join("; ");
                bail!("Only {now} of {all} {what} within {HANG_LIMIT:?}. The last errors: {errors}");
            }
            if said.elapsed() > PROGRESS_INTERVAL {
                said = Instant::now();
                eprintln!("bench: cluster: {:.0} s: {now} of {all} {what}", began.elapsed().as_secs_f64());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// When the last host was registered after a time, and when the last one had reported everything.
    fn until_reported(&self, what: &str, since: Instant) -> anyhow::Result<Instant> {
        let later = |at: Option<Instant>| at.filter(|at| *at > since);
        let hosts = &self.shared.hosts;
        let reported = || hosts.iter().filter(|about| later(lock(about).reported).is_some()).count();
        self.wait_for(what, hosts.len(), reported)?;
        Ok(hosts.iter().filter_map(|about| later(lock(about).reported)).max().unwrap_or(since))
    }

    fn command(&self, place: usize, command: Command) -> anyhow::Result<()> {
        let sent = self.commands.get(place).is_some_and(|host| host.send(command).is_ok());
        if sent { Ok(()) } else { bail!("Host h{place} has ended") }
    }

    /// The job's ranks: one VM per host in turn.
    fn ranks(&self) -> Vec<(usize, Place)> {
        let vms: Vec<_> = (0..self.scale.hosts).map(|place| (place, self.about(place))).collect();
        let rank = |rank: usize| {
            let (place, about) = vms.get(rank % vms.len().max(1))?;
            let (vm, epoch) = about.vms.iter().nth(rank / vms.len().max(1))?;
            Some((*place, Place { vm: *vm, host: HostId(about.speaker.host), epoch: *epoch }))
        };
        (0..self.scale.ranks).filter_map(rank).collect()
    }

    /// Connects all ranks to all others, and returns the seconds until all hosts' reports are answered.
    ///
    /// # Errors
    /// A report is refused.
    pub fn link(&self) -> anyhow::Result<f64> {
        let ranks = self.ranks();
        *lock(&self.shared.job) = ranks.iter().map(|(_, rank)| rank.vm).collect();
        let mut of_hosts: BTreeMap<usize, BTreeMap<VmId, Vec<Place>>> = BTreeMap::new();
        for (place, rank) in &ranks {
            let peers = ranks.iter().filter(|(at, _)| at != place).map(|(_, peer)| *peer).collect();
            of_hosts.entry(*place).or_default().insert(rank.vm, peers);
        }
        let began = Instant::now();
        let mut answers = Vec::new();
        for (place, links) in of_hosts {
            let (answer, answered) = oneshot::channel();
            self.command(place, Command::Link(links, answer))?;
            answers.push(answered);
        }
        for answer in answers {
            let answer = self.wait(answer, "a report of connections")?;
            answer.map_err(anyhow::Error::msg).context("A host's connections were refused")?;
        }
        Ok(began.elapsed().as_secs_f64())
    }

    fn wait<T>(&self, answer: oneshot::Receiver<T>, what: &str) -> anyhow::Result<T> {
        let answer = self.runtime.block_on(async { tokio::time::timeout(HANG_LIMIT, answer).await });
        answer
            .with_context(|| format!("No answer to {what} within {HANG_LIMIT:?}"))?
            .with_context(|| format!("The host that waited for {what} has lost its connection"))
    }

    /// Returns milliseconds of a message's round trip: to the coordinator, or to another host and back.
    ///
    /// # Errors
    /// No answer comes.
    pub fn probe(&self, number: usize, to_host: bool) -> anyhow::Result<f64> {
        // Hosts in an order that isn't that of their numbers.
        let place = number.wrapping_mul(7919) % self.scale.hosts;
        let other = (place + self.scale.hosts / 2) % self.scale.hosts;
        let about = self.about(other);
        let vm = *about.vms.keys().next().context("A host has no VM")?;
        let to = if to_host { Node::Host(HostId(about.speaker.host)) } else { Node::Coordinator };
        let (answer, answered) = oneshot::channel();
        self.command(place, Command::Probe { to, vm, answer })?;
        Ok(self.wait(answered, "a message")?.as_secs_f64() * 1e3)
    }

    /// Returns milliseconds of a gRPC round trip with the service that asks nothing of its state.
    ///
    /// # Errors
    /// No answer comes.
    pub fn echo(&self, client: &mut Client) -> anyhow::Result<f64> {
        self.runtime.block_on(async {
            let began = Instant::now();
            client.get_role(proto::GetRoleRequest {}).await.context("The service gives no answer")?;
            Ok(began.elapsed().as_secs_f64() * 1e3)
        })
    }

    /// A connection for [`Session::echo`].
    ///
    /// # Errors
    /// The service doesn't answer.
    pub fn client(&self) -> anyhow::Result<Client> {
        self.runtime.block_on(self.shared.service.connect()).context("The service can't be reached")
    }

    /// Begins migrations at once, each of another VM on another host: ranks of the job, or VMs that aren't. Returns the VMs.
    ///
    /// # Errors
    /// One is refused.
    pub fn begin_migrations(&self, count: usize, of_job: bool, round: usize) -> anyhow::Result<Vec<VmId>> {
        let ranks: Vec<VmId> = lock(&self.shared.job).clone();
        let mut begun = Vec::new();
        for step in 0..self.scale.hosts {
            let place = (step + round * count) % self.scale.hosts;
            let about = self.about(place);
            let Some(vm) = about.vms.keys().copied().find(|vm| ranks.contains(vm) == of_job) else {
                continue;
            };
            let to = (place + self.scale.hosts / 2) % self.scale.hosts;
            let (answer, answered) = oneshot::channel();
            self.command(place, Command::Migrate { vm, to: format!("h{to}"), answer })?;
            begun.push((vm, answered));
            if begun.len() == count {
                break;
            }
        }
        if begun.len() < count {
            bail!("Only {} of {count} VMs could move at once: there are too few hosts", begun.len());
        }
        let mut vms = Vec::new();
        for (vm, answer) in begun {
            let begun = self.wait(answer, "a request to move a VM")?;
            begun.map_err(anyhow::Error::msg).with_context(|| format!("The move of {vm} was refused"))?;
            vms.push(vm);
        }
        Ok(vms)
    }

    /// Waits until migrations have ended; returns when the last VM ran at its destination, and how many did. The others were aborted.
    ///
    /// # Errors
    /// One doesn't end, or none was committed.
    pub fn until_arrived(&self, vms: &[VmId]) -> anyhow::Result<(Instant, usize)> {
        self.until_settled()?;
        let mut all = lock(&self.shared.arrived);
        let arrived: Vec<Instant> =
            all.iter().filter(|(vm, _)| vms.contains(vm)).map(|(_, at)| *at).collect();
        all.retain(|(vm, _)| !vms.contains(vm));
        let last = arrived.iter().max().copied();
        let last = last.with_context(|| format!("All {} migrations were aborted", vms.len()))?;
        Ok((last, arrived.len()))
    }

    /// Waits until no migration is left at the service: all hosts have confirmed what was decided.
    ///
    /// # Errors
    /// One doesn't end.
    pub fn until_settled(&self) -> anyhow::Result<()> {
        self.wait_for("clusters without a migration", 1, || {
            let left = self.metric("causeway_cluster_migrations");
            usize::from(left.is_ok_and(|left| left < 1.0))
        })
    }

    /// Begins as many migrations of VMs that aren't the job's as are needed for so many at a time.
    ///
    /// # Errors
    /// A host has ended.
    pub fn keep_moving(&self, moving: &mut Moving, count: usize) -> anyhow::Result<()> {
        for (vm, _) in std::mem::take(&mut *lock(&self.shared.arrived)) {
            moving.ended += u64::from(moving.begun.remove(&vm).is_some());
        }
        // Of one that is refused, the migration before isn't over at its source.
        moving.begun.retain(|_, (_, answer)| !matches!(answer.try_recv(), Ok(Err(_))));
        // One that takes longer than any of its stages may was aborted.
        let before = moving.begun.len();
        moving.begun.retain(|_, (began, _)| began.elapsed() < ABORTED_AFTER);
        moving.aborted += before - moving.begun.len();
        let ranks: Vec<VmId> = lock(&self.shared.job).clone();
        for _ in 0..self.scale.hosts {
            if moving.begun.len() >= count {
                break;
            }
            moving.place = (moving.place + 1) % self.scale.hosts;
            let free = |vm: &VmId| !ranks.contains(vm) && !moving.begun.contains_key(vm);
            let Some(vm) = self.about(moving.place).vms.keys().copied().find(free) else { continue };
            let to = (moving.place + self.scale.hosts / 2) % self.scale.hosts;
            let (answer, answered) = oneshot::channel();
            self.command(moving.place, Command::Migrate { vm, to: format!("h{to}"), answer })?;
            moving.begun.insert(vm, (Instant::now(), answered));
        }
        Ok(())
    }

    /// Waits until none of these migrations is left.
    ///
    /// # Errors
    /// One doesn't end.
    pub fn until_still(&self, moving: &mut Moving) -> anyhow::Result<()> {
        let began = Instant::now();
        // Requests to begin may be under way.
        while began.elapsed() < Duration::from_millis(500) {
            self.until_settled()?;
            self.keep_moving(moving, 0)?;
        }
        moving.aborted += std::mem::take(&mut moving.begun).len();
        Ok(())
    }

    /// Kills the leader. Where it was alone it is started again at its address, on its database. Returns the seconds until the last host was
    /// registered again, and until it had reported all of its VMs and connections.
    ///
    /// # Errors
    /// The service or a host doesn't come back.
    pub fn fail_over(&mut self) -> anyhow::Result<(f64, f64)> {
        let leader = if self.instances.len() > 1 { leader(&self.shared.service)? } else { 0 };
        let killed = Instant::now();
        let instance = self.instances.get_mut(leader).context("There is no instance")?;
        let addresses: (SocketAddr, SocketAddr) = (instance.address, instance.metrics);
        instance.kill()?;
        if self.instances.len() == 1 {
            self.instances.clear();
            let log = self.folder.join("service-again.log");
            let again = Instance::start(&self.program, addresses, &self.store, self.scale.lease, &log)?;
            self.instances.push(again);
        }
        let reported = self.until_reported("hosts are back with all their VMs", killed)?;
        let registered = self.shared.hosts.iter().filter_map(|about| lock(about).registered).max();
        let registered = registered.context("No host was registered")?;
        if self.instances.len() > 1 {
            self.instances.remove(leader);
        }
        Ok(((registered - killed).as_secs_f64(), (reported - killed).as_secs_f64()))
    }

    /// Returns a counter of the service's metrics.
    ///
    /// # Errors
    /// It isn't served.
    pub fn metric(&self, name: &str) -> anyhow::Result<f64> {
        use std::io::{Read as _, Write as _};
        let address = self.instances.first().context("There is no instance")?.metrics;
        let read = || -> std::io::Result<String> {
            let mut stream = std::net::TcpStream::connect(address)?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        let text = read().with_context(|| format!("The service's metrics at {address} can't be read"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.trim().parse().ok())
            .with_context(|| format!("The service's metrics have no {name}"))
    }

    /// Checks that no VM was lost, and that hosts are those of the beginning: a service that forgets starts them anew.
    ///
    /// # Errors
    /// One is.
    pub fn check(&self) -> anyhow::Result<()> {
        let state = self.shared.service.state().context("The service's state can't be read")?;
        let alive = state.vms.iter().filter(|vm| vm.alive).count();
        let (vms, hosts) = (self.scale.hosts * self.scale.vms_per_host, self.scale.hosts);
        let again = state.hosts.iter().filter(|host| host.incarnation != 1).count();
        if alive != vms || state.hosts.len() != hosts || again > 0 {
            bail!(
                "{alive} of {vms} VMs run on {} of {hosts} hosts, of which {again} count as restarted",
                state.hosts.len()
            );
        }
        let (ranks, links) = (lock(&self.shared.job).len(), state.links.len());
        // Ranks are spread over hosts, so that nearly all pairs are of two hosts.
        if links < ranks * ranks.saturating_sub(ranks / hosts + 1) / 2 {
            bail!("The service knows {links} connected pairs of a job of {ranks} VMs that are all connected");
        }
        Ok(())
    }
}

/// Migrations that are kept at a number.
#[derive(Debug, Default)]
pub struct Moving {
    begun: BTreeMap<VmId, (Instant, oneshot::Receiver<Result<u64, String>>)>,
    place: usize,
    /// How many have ended.
    pub ended: u64,
    /// How many were aborted.
    pub aborted: usize,
}

/// A client of the service.
pub type Client = proto::cluster_service_client::ClusterServiceClient<tonic::transport::Channel>;

/// Which instance leads, once one does.
fn leader(service: &Service) -> anyhow::Result<usize> {
    let began = Instant::now();
    loop {
        let roles = service.roles().context("The instances can't be asked")?;
        if let Some(leader) = roles.iter().position(|(_, role)| role.as_ref().is_ok_and(|role| role.leads)) {
            return Ok(leader);
        }
        if began.elapsed() > HANG_LIMIT {
            bail!("No instance of the service leads within {HANG_LIMIT:?}");
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}
