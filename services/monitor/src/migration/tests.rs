//! Both sides of a migration against each other, with memory that changes meanwhile: over complete streams, over streams that are cut at
//! every point, and with destinations that refuse. Without KVM: a stand-in with real guest memory replaces the machine.

mod mirror;
mod post_copy;
mod with_a_daemon;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use control_api::migration::{MigrationRequest, MigrationTimeline, StreamKey};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace, GuestRam};
use machine::slots::DirtyPages;
use virtio_devices::block::DiskContent;

use super::connection::Stop;
use super::daemon::Daemon;
use super::destination::{DestinationDevices, Streams};
use super::error::MigrationError;
use super::pages::tests::ram;
use super::progress::ProgressReporter;
use super::shape::Shape;
use super::shape::tests::shape;
use super::source::{SourceMachine, migrate};

const STATE: &[u8] = b"everything but memory";
const MIB: u64 = 4;

/// A destination without served devices.
struct NoDevices;

impl DestinationDevices for NoDevices {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(None)
    }
    fn receive_state(&self, number: u32, _: &[u8]) -> Result<(), MigrationError> {
        Err(MigrationError::Protocol(format!("state of device {number}")))
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        Err(MigrationError::NoPostcopy("there is no userfaultfd".to_owned()))
    }
    fn disks(&self) -> &[DiskContent] {
        &[]
    }
}

/// A machine whose guest writes memory at each query for dirty pages.
struct StandIn {
    ram: GuestRam,
    shape: Shape,
    /// Pages that the guest writes between two rounds, round by round.
    writes: Mutex<Vec<Vec<u64>>>,
    stamp: AtomicU64,
    throttled_us: AtomicU64,
    /// By call: per cent by which peers were throttled.
    peers: Mutex<Vec<u8>>,
    /// Peers write the memory while they are throttled by less than this.
    peers_write_below: u8,
    /// 0: runs here, 1: stopped, 2: stopped in doubt.
    run_state: AtomicU32,
    stops: AtomicU32,
    /// Number of times the VM became in doubt.
    doubts: AtomicU32,
    logging: AtomicU32,
    /// The destination holds the disks' locks.
    locked_there: AtomicBool,
    daemon: Option<Daemon>,
    /// State of served devices, round by round, the last round first.
    devices: Mutex<Vec<Vec<Vec<u8>>>>,
    disks: Vec<DiskContent>,
    /// What its guest does to its disks at each query for dirty pages, and as it stops.
    writer: Option<Box<dyn Fn(bool) + Sync + Send>>,
}

impl StandIn {
    fn new(writes: Vec<Vec<u64>>) -> Self {
        let ram = ram(MIB);
        for page in [0u64, 1, 2, 100, 300, 1023] {
            ram.memory().memory().write_slice(&page.to_le_bytes(), GuestAddress(page * 4096)).unwrap();
            ram.memory().memory().write_obj(7u8, GuestAddress(page * 4096 + 77)).unwrap();
        }
        Self {
            ram,
            shape: shape(),
            writes: Mutex::new(writes.into_iter().rev().collect()),
            stamp: AtomicU64::new(1),
            throttled_us: AtomicU64::new(0),
            peers: Mutex::default(),
            peers_write_below: u8::MAX,
            run_state: AtomicU32::new(0),
            stops: AtomicU32::new(0),
            doubts: AtomicU32::new(0),
            logging: AtomicU32::new(0),
            locked_there: AtomicBool::new(false),
            daemon: None,
            devices: Mutex::default(),
            disks: Vec::new(),
            writer: None,
        }
    }
}

impl SourceMachine for StandIn {
    fn shape(&self) -> Shape {
        self.shape.clone()
    }
    fn memory(&self) -> GuestMemorySpace {
        self.ram.memory()
    }
    fn present(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        self.ram.present().map_err(MigrationError::machine("looked at"))
    }
    fn start_logging(&self) -> Result<(), MigrationError> {
        self.logging.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn stop_logging(&self) {
        self.logging.fetch_sub(1, Ordering::SeqCst);
    }
    fn take_dirty(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        self.writer.iter().for_each(|write| write(false));
        let mut bitmap = vec![0u64; 16];
        let mut pages = self.writes.lock().unwrap().pop().unwrap_or_default();
        if self.peers.lock().unwrap().last().is_some_and(|held| *held >= self.peers_write_below) {
            pages.clear();
        }
        for page in pages {
            let stamp = self.stamp.fetch_add(1, Ordering::SeqCst);
            self.ram.memory().memory().write_obj(stamp, GuestAddress(page * 4096 + 8)).unwrap();
            bitmap[usize::try_from(page / 64).unwrap()] |= 1 << (page % 64);
        }
        Ok(vec![DirtyPages { start: 0, bitmap }])
    }
    fn settle(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn throttle(&self, time: Duration) {
        self.throttled_us.fetch_add(u64::try_from(time.as_micros()).unwrap(), Ordering::SeqCst);
    }
    fn throttle_peers(&self, percent: u8) -> Result<(), MigrationError> {
        self.peers.lock().unwrap().push(percent);
        Ok(())
    }
    fn stop(&self) -> Result<Vec<u8>, MigrationError> {
        self.writer.iter().for_each(|write| write(true));
        self.stops.fetch_add(1, Ordering::SeqCst);
        self.run_state.store(1, Ordering::SeqCst);
        Ok(STATE.to_vec())
    }
    fn rollback(&self) -> Result<(), MigrationError> {
        let until = Instant::now() + Duration::from_secs(5);
        while self.locked_there.load(Ordering::SeqCst) {
            if Instant::now() > until {
                let busy = std::io::Error::other("the destination holds the disks");
                return Err(MigrationError::machine("resumed")(busy));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.run_state.store(0, Ordering::SeqCst);
        Ok(())
    }
    fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }
    fn begin_devices(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn read_devices(&self) -> Result<Vec<Vec<u8>>, MigrationError> {
        let mut rounds = self.devices.lock().unwrap();
        // The last entry is what is left after the stop.
        let last = self.stops.load(Ordering::SeqCst) > 0;
        if last {
            Ok(if rounds.is_empty() { Vec::new() } else { rounds.remove(0) })
        } else if rounds.len() > 1 {
            Ok(rounds.pop().unwrap_or_default())
        } else {
            Ok(Vec::new())
        }
    }
    fn disks(&self) -> &[DiskContent] {
        &self.disks
    }
    fn set_in_doubt(&self) {
        self.doubts.fetch_add(1, Ordering::SeqCst);
        self.run_state.store(2, Ordering::SeqCst);
    }
    fn is_stopped(&self) -> bool {
        self.run_state.load(Ordering::SeqCst) != 0
    }
}

fn request(downtime_ms: u64, timeout_seconds: u64) -> MigrationRequest {
    MigrationRequest {
        destination: "there".to_owned(),
        downtime_ms,
        timeout_seconds,
        max_throttle_percent: 60,
        post_copy_after: None,
        mirror: None,
        together: Vec::new(),
        key: None,
    }
}

/// The key of a request, which both sides use.
fn key_of(request: &MigrationRequest) -> Option<ClusterKey> {
    request.key.as_ref().and_then(|key| ClusterKey::new(key.0))
}

/// The request, encrypted.
fn sealed(request: MigrationRequest) -> MigrationRequest {
    let key = std::array::from_fn(|at| u8::try_from(at).unwrap());
    MigrationRequest { key: Some(StreamKey(key)), ..request }
}

/// The result at the destination.
#[derive(Debug, PartialEq, Eq)]
enum There {
    /// The guest runs there.
    Runs,
    /// The guest doesn't run there, and why.
    No(String),
}

/// A destination that acts as a monitor, with a restore that may fail.
fn destination(
    ours: &Shape,
    to: &GuestRam,
    ends: Vec<OwnedFd>,
    key: Option<&ClusterKey>,
    restore: Result<(), &str>,
) -> There {
    let stop = Stop::default();
    let taken = Streams::over(ends, key, &stop)
        .and_then(|streams| streams.receive(ours, &to.memory(), &NoDevices, &stop));
    let (mut incoming, state) = match taken {
        Ok(taken) => taken,
        Err(error) => return There::No(super::error::line(&error)),
    };
    assert_eq!(state, STATE);
    assert!(
        incoming.blackout().is_some_and(|pause| pause.elapsed() > Duration::ZERO),
        "since when it stands still"
    );
    if let Err(reason) = restore {
        incoming.refuse(reason);
        return There::No(reason.to_owned());
    }
    match incoming.ready() {
        Ok(()) => {
            let _ = incoming.running();
            There::Runs
        }
        Err(error) => There::No(super::error::line(&error)),
    }
}

fn same(a: &GuestRam, b: &GuestRam) -> bool {
    let read = |ram: &GuestRam| {
        let mut all = vec![0; usize::try_from(ram.layout().total()).unwrap()];
        ram.memory().memory().read_slice(&mut all, GuestAddress(0)).unwrap();
        all
    };
    read(a) == read(b)
}

/// Sockets of `streams` streams. Threads carry up to `limit` bytes between them, over all streams and both directions together, and then
/// cut everything. Also returns the number of carried bytes.
fn wires(streams: usize, limit: u64) -> (Vec<OwnedFd>, Vec<OwnedFd>, std::sync::Arc<AtomicU64>) {
    let carried = std::sync::Arc::new(AtomicU64::new(0));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut inner = Vec::new();
    for _ in 0..streams {
        let (a, a_inner) = UnixStream::pair().unwrap();
        let (b, b_inner) = UnixStream::pair().unwrap();
        ours.push(a.into());
        theirs.push(b.into());
        inner.push((a_inner, b_inner));
    }
    let all: std::sync::Arc<Vec<(UnixStream, UnixStream)>> = std::sync::Arc::new(inner);
    for index in 0..streams {
        for back in [false, true] {
            let (all, carried) = (std::sync::Arc::clone(&all), std::sync::Arc::clone(&carried));
            std::thread::spawn(move || {
                let (a, b) = &all[index];
                let (mut from, mut to) = if back { (b, a) } else { (a, b) };
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = from.read(&mut buffer) {
                    let before = carried.fetch_add(read as u64, Ordering::SeqCst);
                    let room = usize::try_from(limit.saturating_sub(before)).unwrap_or(usize::MAX).min(read);
                    if to.write_all(&buffer[..room]).is_err() || room < read {
                        break;
                    }
                }
                if carried.load(Ordering::SeqCst) > limit {
                    for (a, b) in all.iter() {
                        let _ = a.shutdown(std::net::Shutdown::Both);
                        let _ = b.shutdown(std::net::Shutdown::Both);
                    }
                } else {
                    let _ = to.shutdown(std::net::Shutdown::Write);
                }
            });
        }
    }
    (ours, theirs, carried)
}

struct Outcome {
    here: Result<MigrationTimeline, MigrationError>,
    there: There,
    same: bool,
    carried: u64,
}

fn go(
    machine: &StandIn,
    ours: &Shape,
    streams: usize,
    limit: u64,
    request: &MigrationRequest,
    restore: Result<(), &'static str>,
) -> Outcome {
    let to = &ram(MIB);
    let (a, b, carried) = wires(streams, limit);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let (here, there) = std::thread::scope(|scope| {
        let key = key_of(request);
        let destination_thread = scope.spawn(move || destination(ours, to, b, key.as_ref(), restore));
        let here = migrate(machine, a, request, &reporter, &stop);
        (here, destination_thread.join().unwrap())
    });
    let logging = machine.logging.load(Ordering::SeqCst);
    assert!(logging == 0 || here.is_ok(), "nobody stopped the log");
    Outcome { here, there, same: same(&machine.ram, to), carried: carried.load(Ordering::SeqCst) }
}

/// Memory that changes in each round arrives as it was when the guest stopped, over one and over several streams. The guest runs there
/// and nowhere else, and the timeline has the right figures.
#[test]
fn a_vm_migrates_while_its_memory_changes() {
    for (streams, encrypted) in [(1, false), (3, false), (1, true), (3, true)] {
        let machine = StandIn::new(vec![(0..900).collect(), (5..700).collect(), vec![1, 2, 700], vec![0, 2]]);
        // 900 pages never fit 10 ms at the speed of the first round; three always do.
        let requested = if encrypted { sealed(request(12, 60)) } else { request(12, 60) };
        let outcome = go(&machine, &shape(), streams, u64::MAX, &requested, Ok(()));
        let timeline = outcome.here.unwrap();
        assert_eq!(outcome.there, There::Runs);
        assert!(outcome.same && machine.run_state.load(Ordering::SeqCst) == 1);
        assert_eq!(timeline.streams, streams);
        let stopped: Vec<bool> = timeline.rounds.iter().map(|round| round.stopped).collect();
        assert_eq!(stopped.iter().filter(|stopped| **stopped).count(), 1);
        assert_eq!(stopped.last(), Some(&true));
        assert_eq!(timeline.rounds[0].pages, 6);
        assert_eq!(timeline.state_bytes, STATE.len() as u64);
        let parts = timeline.stop_ms + timeline.rest_ms + timeline.restore_ms + timeline.commit_ms;
        assert!(timeline.pause_ms >= parts * 0.99 && timeline.total_ms >= timeline.pause_ms);
    }
}

/// At every cut of the streams, exactly one side has the guest, or neither runs it and the source reports doubt. Before the commit it is
/// always the source. Nothing hangs or panics.
#[test]
fn wherever_the_streams_are_cut_at_most_one_side_runs_the_guest() {
    for (streams, requested) in [(1, request(300, 60)), (2, request(300, 60)), (2, sealed(request(300, 60)))]
    {
        let whole = {
            let machine = StandIn::new(vec![vec![3], vec![4]]);
            let outcome = go(&machine, &shape(), streams, u64::MAX, &requested, Ok(()));
            outcome.here.unwrap();
            outcome.carried
        };
        let (mut runs, mut stays, mut doubts) = (0, 0, 0);
        // Every byte at the start and the end, where frames are short; every 397th of the contents.
        let cuts = (0..whole).filter(|cut| *cut < 200 || *cut + 260 > whole || cut % 397 == 0);
        for cut in cuts {
            let machine = StandIn::new(vec![vec![3], vec![4]]);
            let outcome = go(&machine, &shape(), streams, cut, &requested, Ok(()));
            let run_state = machine.run_state.load(Ordering::SeqCst);
            match (outcome.here, outcome.there) {
                (Ok(_), There::Runs) => {
                    assert_eq!(run_state, 1);
                    runs += 1;
                }
                (Err(MigrationError::InDoubt(_)), there) => {
                    assert_eq!(run_state, 2, "cut {cut}: {there:?}");
                    doubts += 1;
                }
                (Err(_), There::No(reason)) => {
                    assert_eq!(run_state, 0, "cut {cut}");
                    assert!(!reason.is_empty());
                    stays += 1;
                }
                (here, there) => panic!("cut {cut}: {here:?}, {there:?}"),
            }
        }
        // The order of streams changes the sums of bytes between runs, so a late cut may not occur.
        assert!(stays > 200 && doubts > 0, "{runs} {stays} {doubts}");
    }
}

/// A destination that can't accept the VM reports it before the guest is disturbed. One that can't restore it reports it before the
/// commit. The source gets both sentences.
#[test]
fn a_destination_refuses_with_a_sentence() {
    let machine = StandIn::new(vec![]);
    let other = Shape { vcpus: vec![0], ..shape() };
    let outcome = go(&machine, &other, 2, u64::MAX, &request(300, 60), Ok(()));
    let error = outcome.here.unwrap_err().to_string();
    assert!(error.contains("refuses") && error.contains("--cpus"), "{error}");
    assert_eq!(machine.stops.load(Ordering::SeqCst), 0);

    let outcome = go(&machine, &shape(), 2, u64::MAX, &request(300, 60), Err("Disk disk0 is in use"));
    let error = outcome.here.unwrap_err().to_string();
    assert_eq!(error, "The destination refuses the VM: Disk disk0 is in use");
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.run_state.load(Ordering::SeqCst)), (1, 0));
    assert_eq!(outcome.there, There::No("Disk disk0 is in use".to_owned()));
}

/// A guest that writes faster than it is copied is throttled, and stays at the source when the time limit has passed. It was never
/// stopped.
#[test]
fn a_guest_that_writes_too_fast_is_throttled_and_then_stays_at_the_source() {
    let machine = StandIn::new((0..100_000).map(|_| (0..1024).collect()).collect());
    let outcome = go(&machine, &shape(), 1, u64::MAX, &request(0, 1), Ok(()));
    let error = outcome.here.unwrap_err();
    assert!(matches!(error, MigrationError::NotConverging { seconds: 1, left: 1024, .. }), "{error}");
    assert!(machine.throttled_us.load(Ordering::SeqCst) > 0);
    assert_eq!(machine.stops.load(Ordering::SeqCst), 0);
    assert!(matches!(outcome.there, There::No(reason) if reason.contains("aborted the migration")));
}

/// Peers that write into the guest's memory faster than it is copied are throttled, step by step, until the migration converges.
#[test]
fn peers_that_write_too_fast_are_throttled_until_it_converges() {
    let mut machine = StandIn::new((0..100_000).map(|_| (0..1024).collect()).collect());
    machine.peers_write_below = 60;
    let outcome = go(&machine, &shape(), 1, u64::MAX, &request(0, 60), Ok(()));
    assert!(outcome.here.is_ok(), "{:?}", outcome.here);
    assert_eq!(outcome.there, There::Runs);
    assert_eq!(*machine.peers.lock().unwrap(), [20, 30, 40, 50, 60]);
}

/// A cancel ends a migration that wouldn't end by itself, in any phase.
#[test]
fn a_cancel_ends_it_at_once() {
    let machine = StandIn::new((0..100_000).map(|_| (0..1024).collect()).collect());
    let (a, b, _) = wires(2, u64::MAX);
    let (to, reporter) = (ram(MIB), ProgressReporter::default());
    let stop = reporter.begin("there", None).unwrap();
    std::thread::scope(|scope| {
        let ours = shape();
        let to = &to;
        let destination_thread = scope.spawn(move || destination(&ours, to, b, None, Ok(())));
        let source_thread = scope.spawn(|| migrate(&machine, a, &request(0, 0), &reporter, &stop));
        while reporter.progress().is_some_and(|progress| progress.round < 2) {
            std::thread::sleep(Duration::from_millis(1));
        }
        reporter.cancel().unwrap();
        assert!(matches!(source_thread.join().unwrap(), Err(MigrationError::Cancelled)));
        assert!(matches!(destination_thread.join().unwrap(), There::No(_)));
    });
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 0);
}

/// A cancel while the destination has the disks and waits for the commit: the destination learns of it and unlocks the disks, and the
/// source resumes the guest.
#[test]
fn a_cancel_before_the_commit_unlocks_the_disks() {
    let machine = StandIn::new(vec![]);
    let (a, b, _) = wires(2, u64::MAX);
    let (to, reporter) = (ram(MIB), ProgressReporter::default());
    let stop = reporter.begin("there", None).unwrap();
    std::thread::scope(|scope| {
        let destination_thread = scope.spawn(|| {
            let theirs = Stop::default();
            let streams = Streams::over(b, None, &theirs).unwrap();
            let (mut incoming, _) = streams.receive(&shape(), &to.memory(), &NoDevices, &theirs).unwrap();
            machine.locked_there.store(true, Ordering::SeqCst);
            reporter.cancel().unwrap();
            let answer = incoming.ready();
            machine.locked_there.store(false, Ordering::SeqCst);
            answer
        });
        let here = migrate(&machine, a, &request(300, 60), &reporter, &stop);
        assert!(matches!(here, Err(MigrationError::Cancelled)), "{here:?}");
        destination_thread.join().unwrap().unwrap_err();
    });
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 0);
}
