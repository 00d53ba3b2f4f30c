//! A VM migrates while a peer writes to it by RDMA faster than the migration's link. Three daemons and a cluster service run in this
//! process, with the fabric over loopback. Both sides use the monitors' own migration code, over sockets that are limited to the
//! link's rate. The VM's monitor is the tests' (no KVM, no running guest). The measurement is the peer's: bytes of completed writes
//! before, during and after the migration.
//!
//! Pages reach the migration as copies on request, and finally into a machine. So the blackout contains two copies that a monitor
//! doesn't make.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use control_api::cluster::{Service, proto};
use control_api::host::HostClient;
use control_api::migration::{MigrationRequest, MigrationTimeline};
use dma::Dma as _;
use host::cluster::ClusterConfig;
use host::{DaemonConfig, DirectorySource, FabricConfig};
use host_testbed::driver::{Endpoint, Guest};
use host_testbed::monitor::{Machine, Monitor};
use machine::interrupt::IrqchipKind;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemorySpace, GuestRam};
use machine::memory::{RamLayout, RamOptions};
use machine::slots::DirtyPages;
use monitor::migration::MigrationError;
use monitor::migration::connection::Stop;
use monitor::migration::daemon::{Daemon, DecisionWait, MigrationOutcome};
use monitor::migration::destination::{DestinationDevices, Streams};
use monitor::migration::progress::ProgressReporter;
use monitor::migration::shape::Shape;
use monitor::migration::source::{SourceMachine, migrate};
use serde::Serialize;
use vfio_user_protocol::client::Client;
use vfio_user_protocol::migration::DeviceState;
use virtio_devices::block::DiskContent;

/// RAM of the migrating VM in bytes, and its buffer that the peer overwrites.
const RAM: u64 = 48 << 20;
const BUFFER_PAGES: u32 = 8192;
/// Bytes of a write.
const WRITE: u32 = 64 << 10;
const AT_ONCE: usize = 16;
const PAGE: usize = 4096;
/// Duration of the measurements before and after.
const STEADY: Duration = Duration::from_secs(2);
/// The link's rate: a part of the peer's rate before, with a limit in bytes per second.
const PART: f64 = 0.25;
const FASTEST_LINK: f64 = 100e6;
/// Longest idle time for which a link may catch up.
const BURST: Duration = Duration::from_millis(5);
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// One migration.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Rate of the migration's link in bytes per second.
    pub link: u64,
    /// The peer's rate in bytes per second, in two seconds before the migration.
    pub before: f64,
    /// The peer's rate during pre-copy, without the blackout.
    pub during: f64,
    /// Of that, the rate in rounds with throttling.
    pub held: f64,
    /// Duration of these rounds in seconds.
    pub held_for: f64,
    /// The peer's rate in two seconds after the migration.
    pub after: f64,
    /// Duration of pre-copy in seconds.
    pub copied_for: f64,
    /// The blackout in seconds.
    pub pause: f64,
    /// Number of rounds.
    pub rounds: usize,
    /// Strongest throttling in per cent.
    pub held_back: u8,
    /// Bytes that the migration sent.
    pub sent: u64,
}

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[15]) = (0xFF, 0xFF, 10, last);
    gid
}

fn wait(what: &str, mut holds: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let until = Instant::now() + STEP_TIMEOUT;
    while !holds()? {
        ensure!(Instant::now() < until, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn clients(monitor: &Monitor) -> [&Client; 2] {
    [&monitor.ethernet, &monitor.rdma]
}

fn shape() -> Shape {
    Shape {
        version: Shape::VERSION,
        name: "a".to_owned(),
        program: "bench".to_owned(),
        vcpus: vec![0],
        memory: vec![(0, RAM, 0)],
        windows: Vec::new(),
        console: false,
        devices: Vec::new(),
        interrupts: IrqchipKind::Kernel,
        cpuid: Vec::new(),
    }
}

fn ram() -> anyhow::Result<GuestRam> {
    Ok(GuestRam::allocate(&RamLayout::new(&[RAM])?, &RamOptions::default())?)
}

/// The VM at its source.
struct Mover {
    machine: Machine,
    monitor: Monitor,
    daemon: Daemon,
    copy: GuestRam,
    most_held: Mutex<u8>,
}

impl Mover {
    fn fetch(&self, bitmap: &[u64]) -> Result<(), MigrationError> {
        let memory = self.copy.memory().memory().clone();
        let mut page = [0; PAGE];
        for at in (DirtyPages { start: 0, bitmap: bitmap.to_vec() }).pages() {
            self.machine.ram.read(at, &mut page).map_err(MigrationError::machine("read"))?;
            memory.write_slice(&page, GuestAddress(at)).map_err(MigrationError::machine("read"))?;
        }
        Ok(())
    }

    fn each<E: std::error::Error + Send + Sync + 'static>(
        &self,
        what: &'static str,
        act: impl Fn(&Client) -> Result<(), E>,
    ) -> Result<(), MigrationError> {
        clients(&self.monitor).into_iter().try_for_each(act).map_err(MigrationError::machine(what))
    }
}

impl SourceMachine for Mover {
    fn shape(&self) -> Shape {
        shape()
    }
    fn memory(&self) -> GuestMemorySpace {
        self.copy.memory()
    }
    fn present(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        let bitmap = vec![u64::MAX; usize::try_from(RAM).unwrap_or(0) / PAGE / 64];
        self.fetch(&bitmap)?;
        Ok(vec![DirtyPages { start: 0, bitmap }])
    }
    fn start_logging(&self) -> Result<(), MigrationError> {
        self.machine.ram.set_dirty_log(true);
        self.each("set to log writes", |client| client.start_dma_logging(&[(0, RAM)]))
    }
    fn stop_logging(&self) {
        self.machine.ram.set_dirty_log(false);
    }
    fn take_dirty(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        let none = || MigrationError::Protocol("nothing: the log of writes is off".to_owned());
        let mut bitmap = self.machine.ram.take_dirty(0, RAM).ok_or_else(none)?;
        for client in clients(&self.monitor) {
            let more = client.take_dirty(0, RAM).map_err(MigrationError::machine("asked what it wrote"))?;
            bitmap.iter_mut().zip(more).for_each(|(word, more)| *word |= more);
        }
        self.fetch(&bitmap)?;
        Ok(vec![DirtyPages { start: 0, bitmap }])
    }
    fn settle(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn throttle(&self, _: Duration) {}
    fn throttle_peers(&self, percent: u8) -> Result<(), MigrationError> {
        let held = self.monitor.rdma.hold_back(percent);
        held.map_err(MigrationError::machine("kept from being written by peers"))?;
        if let Ok(mut most) = self.most_held.lock() {
            *most = percent.max(*most);
        }
        Ok(())
    }
    fn stop(&self) -> Result<Vec<u8>, MigrationError> {
        self.each("stopped", |client| client.set_device_state(DeviceState::StopCopy))?;
        Ok(vec![0])
    }
    fn rollback(&self) -> Result<(), MigrationError> {
        self.each("resumed", |client| client.set_device_state(DeviceState::Running))
    }
    fn daemon(&self) -> Option<&Daemon> {
        Some(&self.daemon)
    }
    fn begin_devices(&self) -> Result<(), MigrationError> {
        self.each("read", |client| client.set_device_state(DeviceState::PreCopy))
    }
    fn read_devices(&self) -> Result<Vec<Vec<u8>>, MigrationError> {
        let read =
            clients(&self.monitor).into_iter().map(Client::read_all_migration_data).collect::<Result<_, _>>();
        read.map_err(MigrationError::machine("read"))
    }
    fn disks(&self) -> &[DiskContent] {
        &[]
    }
    fn set_in_doubt(&self) {}

    fn is_stopped(&self) -> bool {
        true
    }
}

/// Its devices at the destination.
struct There {
    monitor: Monitor,
    begun: AtomicBool,
}

impl DestinationDevices for There {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(Some("h3".to_owned()))
    }
    fn receive_state(&self, number: u32, data: &[u8]) -> Result<(), MigrationError> {
        let failed = || MigrationError::machine("given its state");
        let all = clients(&self.monitor);
        if !self.begun.swap(true, Ordering::SeqCst) {
            all.into_iter()
                .try_for_each(|client| client.set_device_state(DeviceState::Resuming))
                .map_err(failed())?;
        }
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let client = all.get(number).ok_or_else(|| MigrationError::Protocol(format!("device {number}")))?;
        client.write_migration_data(data).map_err(failed())
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        Err(MigrationError::NoPostcopy("it has an RDMA NIC".to_owned()))
    }
    fn disks(&self) -> &[DiskContent] {
        &[]
    }
}

/// Receives the VM into its memory and devices at the destination.
fn arrive(
    socket: &Path,
    ends: Vec<OwnedFd>,
    machine: Machine,
    monitor: Monitor,
) -> anyhow::Result<(Machine, There)> {
    let (stop, ram) = (Stop::default(), ram()?);
    let there = There { monitor, begun: AtomicBool::new(false) };
    let streams = Streams::over(ends, None, &stop)?;
    let (mut incoming, _) = streams.receive(&shape(), &ram.memory(), &there, &stop)?;
    let (memory, mut page) = (ram.memory().memory().clone(), [0; PAGE]);
    for at in (0..RAM).step_by(PAGE) {
        memory.read_slice(&mut page, GuestAddress(at))?;
        machine.ram.write(at, &page)?;
    }
    for client in clients(&there.monitor) {
        client.set_device_state(DeviceState::Stop)?;
    }
    incoming.restored()?;
    let daemon = Daemon::new(socket.to_owned(), "a".to_owned());
    let on_doubt = |why: &str| eprintln!("The migration's end isn't known: {why}");
    match daemon.vote(&DecisionWait { on_doubt: &on_doubt, is_over: &|| false })? {
        MigrationOutcome::RunsHere => {}
        other => bail!("The VM was to run at its destination: {other:?}"),
    }
    for client in clients(&there.monitor) {
        client.set_device_state(DeviceState::Running)?;
    }
    for vector in &there.monitor.vectors {
        rustix::io::write(vector, &1_u64.to_ne_bytes())?;
    }
    // The source's daemon may have notified it already, and it may have closed the connection.
    let _ = incoming.running();
    Ok((machine, there))
}

/// Returns both ends of a stream that is limited to `rate` bytes per second towards the second.
fn link(rate: u64) -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (a, a_inner) = UnixStream::pair()?;
    let (b, b_inner) = UnixStream::pair()?;
    let (back_from, back_to) = (b_inner.try_clone()?, a_inner.try_clone()?);
    std::thread::spawn(move || relay(a_inner, b_inner, Some(rate)));
    std::thread::spawn(move || relay(back_from, back_to, None));
    Ok((a.into(), b.into()))
}

/// Relays bytes until one end closes.
fn relay(mut from: UnixStream, mut to: UnixStream, rate: Option<u64>) {
    use std::io::{Read as _, Write as _};
    let mut buffer = vec![0; 16 << 10];
    let mut free_at = Instant::now();
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if let Some(rate) = rate {
            // Unused time counts briefly, so that a late wake-up is compensated.
            let earliest = Instant::now().checked_sub(BURST).unwrap_or(free_at);
            free_at = free_at.max(earliest) + Duration::from_nanos(read as u64 * 1_000_000_000 / rate);
            std::thread::sleep(free_at.saturating_duration_since(Instant::now()));
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// The peer.
struct Writer {
    _machine: Machine,
    monitor: Monitor,
    guest: Guest,
    endpoint: Endpoint,
}

impl Writer {
    /// Overwrites a buffer until the end; counts bytes of completed writes. A failed write is an error.
    fn run(&self, target: (u64, u32), complete: &AtomicU64, over: &AtomicBool) -> anyhow::Result<()> {
        let places = u64::from(BUFFER_PAGES) * PAGE as u64 / u64::from(WRITE);
        let mut number = 0;
        while !over.load(Ordering::Relaxed) {
            for _ in 0..AT_ONCE {
                let to = (target.0 + number % places * u64::from(WRITE), target.1);
                number += u64::from(self.guest.post_write(&self.monitor, &self.endpoint, number, WRITE, to));
            }
            while let Some(entry) = self.guest.poll(&self.monitor, &self.endpoint) {
                ensure!(entry.status.get() == 0, "a write failed with status {}", entry.status.get());
                complete.fetch_add(u64::from(WRITE), Ordering::Relaxed);
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Completed bytes, every few milliseconds.
type Seen = Vec<(Instant, u64)>;

fn sample(complete: &AtomicU64, over: &AtomicBool) -> Seen {
    let mut seen = Seen::new();
    while !over.load(Ordering::Relaxed) {
        seen.push((Instant::now(), complete.load(Ordering::Relaxed)));
        std::thread::sleep(Duration::from_millis(5));
    }
    seen
}

/// Returns completed bytes and seconds of rounds with throttling.
fn held(seen: &Seen, began: Instant, timeline: &MigrationTimeline) -> (u64, f64) {
    let at = |ms: u64| {
        let when = began + Duration::from_millis(ms);
        seen.iter().take_while(|(time, _)| *time <= when).last().map_or(0, |(_, bytes)| *bytes)
    };
    let rounds = timeline.rounds.iter().filter(|round| round.throttle_percent > 0 && !round.stopped);
    let (mut bytes, mut ms) = (0, 0);
    for round in rounds {
        bytes += at(round.began_ms + round.took_ms) - at(round.began_ms);
        ms += round.took_ms;
    }
    (bytes, super::float(ms) / 1e3)
}

fn rate(bytes: u64, time: f64) -> f64 {
    super::float(bytes) / time.max(1e-9)
}

/// Migrates a VM between two hosts while a third host's VM writes to it, over a link with a part of that rate.
///
/// # Errors
/// It doesn't converge, a write fails, or a host fails.
pub fn converge() -> anyhow::Result<Sample> {
    let folder = tempfile::tempdir()?;
    let mut config = cluster::ServerConfig::new("127.0.0.1:0".parse()?, folder.path().join("cluster.redb"));
    (config.mtu, config.sockets) = (Some(1376), Some(1));
    config.switch_limit = Duration::from_secs(8);
    let server = cluster::Server::start(&config)?;
    let service = Service::new(&server.address().to_string(), None)?;
    let port = facilities::ports::free(1);
    let daemons = (1..=3).map(|number| {
        let mut config = DaemonConfig::new(folder.path().join(format!("h{number}/host.sock")));
        let name = format!("h{number}");
        let address: SocketAddr = format!("127.0.0.{number}:{port}").parse()?;
        config.fabric = Some(FabricConfig {
            directory: DirectorySource::Cluster(ClusterConfig { service: service.clone(), name }),
            address,
            cluster_key: None,
            verbs: false,
        });
        Ok(host::Daemon::start(&config)?)
    });
    let daemons: Vec<host::Daemon> = daemons.collect::<anyhow::Result<_>>()?;
    let [h1, h2, h3] = &daemons[..] else { bail!("three hosts were to be started") };

    let vm = |daemon: &host::Daemon, name: &str, ram, pages, last| {
        let machine = Machine::with_ram(name, "blue", ram);
        let monitor = machine.connect(daemon.socket(), true);
        let mut guest = Guest::new(&machine);
        // A quarter of a second: a crowded machine may delay a packet by more than a millisecond.
        guest.timeout = 16;
        guest.probe(&monitor, gid(last));
        let endpoint = guest.endpoint(&monitor, 1, pages);
        (machine, monitor, guest, endpoint)
    };
    let (machine, monitor, guest, endpoint) = vm(h1, "a", RAM, BUFFER_PAGES, 1);
    let (its_machine, its_monitor, its_guest, its_endpoint) = vm(h2, "b", 8 << 20, WRITE / 4096, 2);
    let runs = |state: &proto::State, name: &str| {
        let has = |vm: &proto::Vm| {
            vm.alive && vm.name == name && vm.nics.iter().any(|nic| !nic.addresses.is_empty())
        };
        state.vms.iter().any(has)
    };
    wait("both VMs", || Ok(service.state().map(|state| runs(&state, "a") && runs(&state, "b"))?))?;
    let revision = service.state()?.shown_revision;
    for daemon in [h1, h2, h3] {
        let client = HostClient::new(daemon.socket());
        wait("a daemon's view", || {
            Ok(client.inspect(Some("daemon/cluster"))?["revision"].as_u64() >= Some(revision))
        })?;
    }
    guest.connect(&monitor, &endpoint, its_endpoint.qp.1, gid(2));
    its_guest.connect(&its_monitor, &its_endpoint, endpoint.qp.1, gid(1));
    // Pages of zeros would be sent as nearly nothing.
    its_guest.fill(&its_endpoint.buffer, 0xA7);
    let target = (endpoint.buffer.address, endpoint.buffer.rkey);

    let writer =
        Writer { _machine: its_machine, monitor: its_monitor, guest: its_guest, endpoint: its_endpoint };
    let daemon = Daemon::new(h1.socket().to_owned(), "a".to_owned());
    let mover = Mover { machine, monitor, daemon, copy: ram()?, most_held: Mutex::new(0) };
    let landing_place = Machine::with_ram("a", "blue", RAM);
    let its_place = landing_place.await_vm(h3.socket());
    let (complete, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let steady = || {
        let (from, began) = (complete.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(STEADY);
        rate(complete.load(Ordering::Relaxed) - from, began.elapsed().as_secs_f64())
    };
    let measured = std::thread::scope(|scope| {
        let writing = scope.spawn(|| writer.run(target, &complete, &over));
        let watching = scope.spawn(|| sample(&complete, &over));
        let moved = (|| {
            std::thread::sleep(STEADY / 2);
            let before = steady();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "positive, and far below 2^64"
            )]
            let link_rate = (before * PART).clamp(1e5, FASTEST_LINK) as u64;
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..2 {
                let (one, other) = link(link_rate / 2)?;
                ours.push(one);
                theirs.push(other);
            }
            let request = MigrationRequest {
                destination: "h3".to_owned(),
                downtime_ms: 100,
                timeout_seconds: 120,
                max_throttle_percent: 99,
                post_copy_after: None,
                mirror: None,
                together: Vec::new(),
                key: None,
            };
            let (reporter, socket) = (ProgressReporter::default(), h3.socket());
            let stop = reporter.begin("h3", None).context("a migration is under way")?;
            let arriving = scope.spawn(move || arrive(socket, theirs, landing_place, its_place));
            let (from, began) = (complete.load(Ordering::Relaxed), Instant::now());
            let timeline: MigrationTimeline = migrate(&mover, ours, &request, &reporter, &stop)?;
            let until = complete.load(Ordering::Relaxed);
            let there = arriving.join().map_err(|_| anyhow!("the destination panicked"))??;
            let after = steady();
            // The VM lives until the peer has ended.
            Ok::<_, anyhow::Error>((link_rate, before, until - from, after, timeline, began, there))
        })();
        over.store(true, Ordering::Relaxed);
        let wrote = writing.join().map_err(|_| anyhow!("the peer panicked"))?;
        let seen = watching.join().map_err(|_| anyhow!("the one who looks panicked"))?;
        let moved = moved?;
        wrote?;
        Ok::<_, anyhow::Error>((moved, seen))
    });
    let ((link_rate, before, during, after, timeline, began, _there), seen) = measured?;
    let (held_bytes, held_for) = held(&seen, began, &timeline);
    let copied_for = (timeline.total_ms - timeline.pause_ms) / 1e3;
    let held_back = mover.most_held.lock().map_or(0, |most| *most);
    drop(server);
    Ok(Sample {
        link: link_rate,
        before,
        during: rate(during, copied_for),
        held: if held_for > 0.0 { rate(held_bytes, held_for) } else { rate(during, copied_for) },
        held_for,
        after,
        copied_for,
        pause: timeline.pause_ms / 1e3,
        rounds: timeline.rounds.len(),
        held_back,
        sent: timeline.bytes,
    })
}
