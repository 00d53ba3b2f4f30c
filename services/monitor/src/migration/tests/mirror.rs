//! Copying disks: real images that real queues write meanwhile, with complete, cut and hostile streams.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;
use virtio_devices::block::{Block, BlockConfig, BlockQueue, EngineChoice};
use virtio_devices::device::VirtioDevice;
use virtio_devices::queue::Ring;
use virtio_devices_testbed::{MockDriver, MockInterrupt, RINGS, memory};

use super::post_copy::{Peer, postcopy_destination_with, postcopy_request, same_but_for_use, uffd, use_all};
use super::*;
use crate::migration::frame::Kind;
use crate::migration::message::{self, Accepted};
use crate::migration::mirror::message::{MirrorReply, MirrorRequest};

const HEADER: u64 = 0x1000;
const STATUS: u64 = 0x1800;
const DATA: u64 = 0x10_0000;

/// A guest's driver that writes to random places of a disk, one request at a time.
struct Driver {
    driver: MockDriver,
    queue: BlockQueue,
    interrupt: Arc<MockInterrupt>,
    bytes: u64,
    seed: u64,
    /// Completed requests. None is made after the guest was stopped.
    done: u64,
    stopped: bool,
}

impl Driver {
    fn new(block: &Block) -> Self {
        let space = memory(&[(0, 4 << 20)]);
        let driver = MockDriver::new(&space, 0, 64, 0x8_0000, RINGS);
        let queue = block.queue(Ring::new(driver.active_queue(), RINGS), space);
        let (interrupt, bytes) = (MockInterrupt::new(), block.content().bytes());
        Self { driver, queue, interrupt, bytes, seed: 1, done: 0, stopped: false }
    }

    /// A write, a write of zeroes, or a discard at a random place.
    fn request(&mut self) {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let sectors = 1 + (self.seed >> 40) % 200;
        let sector = (self.seed >> 20) % (self.bytes / 512 - sectors);
        let kind = [1u32, 1, 1, 13, 11][usize::try_from((self.seed >> 55) % 5).unwrap()];
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        let data = if kind == 1 {
            header[8..].copy_from_slice(&sector.to_le_bytes());
            vec![u8::try_from(self.seed >> 56).unwrap() | 1; usize::try_from(sectors * 512).unwrap()]
        } else {
            let count = u32::try_from(sectors).unwrap();
            [&sector.to_le_bytes()[..], &count.to_le_bytes(), &0u32.to_le_bytes()].concat()
        };
        self.driver.put(HEADER, &header);
        self.driver.put(DATA, &data);
        let length = u32::try_from(data.len()).unwrap();
        self.driver.push(&[(HEADER, 16, false), (DATA, length, false), (STATUS, 1, true)]).unwrap();
        self.queue.serve(&*self.interrupt, &|| false).unwrap();
        self.driver.wait_used();
        assert_eq!(self.driver.get(STATUS, 1)[0], 0);
        self.done += 1;
    }
}

/// A disk of the source with its guest, and an image of the destination.
struct Disks {
    _directory: TempDir,
    here: PathBuf,
    there: PathBuf,
    source: DiskContent,
    _owner: Mutex<Block>,
    driver: Arc<Mutex<Driver>>,
}

fn open(path: &Path, change: impl FnOnce(&mut BlockConfig)) -> Block {
    let mut config = BlockConfig { engine: EngineChoice::Synchronous, ..BlockConfig::new("disk0", path) };
    change(&mut config);
    Block::open(config).unwrap()
}

impl Disks {
    /// The source's disk has holes, data and zeroes. The destination's image, of `there_bytes` bytes, has old content.
    fn new(bytes: u64, there_bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (here, there) = (directory.path().join("here.raw"), directory.path().join("there.raw"));
        let file = std::fs::File::create(&here).unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(&[3; 5000], bytes / 4).unwrap();
        file.write_all_at(&[0; 70_000], bytes / 2).unwrap();
        file.write_all_at(b"end", bytes - 3).unwrap();
        let old = std::fs::File::create(&there).unwrap();
        old.set_len(there_bytes).unwrap();
        old.write_all_at(&vec![0xDD; usize::try_from(there_bytes / 2).unwrap()], 0).unwrap();
        let source = open(&here, |_| ());
        let driver = Arc::new(Mutex::new(Driver::new(&source)));
        let content = source.content();
        Self { _directory: directory, here, there, source: content, _owner: Mutex::new(source), driver }
    }

    /// A guest that makes `requests` disk requests at each query for dirty pages, and as it is stopped.
    fn machine(&self, requests: u64, writes: Vec<Vec<u64>>) -> StandIn {
        let driver = Arc::clone(&self.driver);
        let writer = move |stopping: bool| {
            let mut driver = driver.lock().unwrap();
            if !driver.stopped {
                (0..requests).for_each(|_| driver.request());
            }
            driver.stopped |= stopping;
        };
        let mut machine = StandIn::new(writes);
        machine.disks = vec![self.source.clone()];
        machine.writer = Some(Box::new(writer));
        machine
    }

    fn image(&self) -> Block {
        open(&self.there, |config| config.claim = false)
    }

    fn equal(&self) -> bool {
        std::fs::read(&self.here).unwrap() == std::fs::read(&self.there).unwrap()
    }
}

fn mirrored(request: MigrationRequest) -> MigrationRequest {
    MigrationRequest { mirror: Some(Vec::new()), ..request }
}

/// A destination with disks.
struct WithDisks(Vec<DiskContent>);

impl DestinationDevices for WithDisks {
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
        &self.0
    }
}

/// Acts as a monitor: receives the VM, locks its disk, and runs it after the commit.
fn run_destination(ends: Vec<OwnedFd>, key: Option<&ClusterKey>, to: &GuestRam, mut disk: Block) -> There {
    let stop = Stop::default();
    let devices = WithDisks(vec![disk.content()]);
    let taken = Streams::over(ends, key, &stop)
        .and_then(|streams| streams.receive(&shape(), &to.memory(), &devices, &stop));
    let (mut incoming, _) = match taken {
        Ok(taken) => taken,
        Err(error) => return There::No(super::super::error::line(&error)),
    };
    if let Err(error) = disk.take_over() {
        let reason = super::super::error::line(&error);
        incoming.refuse(&reason);
        return There::No(reason);
    }
    match incoming.ready() {
        Ok(()) => {
            disk.content().in_use();
            let _ = incoming.running();
            There::Runs
        }
        Err(error) => There::No(super::super::error::line(&error)),
    }
}

/// A migration of such a machine to such a disk. The source unlocks its own first, as a monitor does.
fn go_with(
    machine: &StandIn,
    disk: Block,
    streams: usize,
    limit: u64,
    request: &MigrationRequest,
) -> Outcome {
    let to = &ram(MIB);
    let (a, b, carried) = wires(streams, limit);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let (here, there) = std::thread::scope(|scope| {
        let key = key_of(request);
        let destination_thread = scope.spawn(move || run_destination(b, key.as_ref(), to, disk));
        let here = migrate(machine, a, request, &reporter, &stop);
        (here, destination_thread.join().unwrap())
    });
    Outcome { here, there, same: same(&machine.ram, to), carried: carried.load(Ordering::SeqCst) }
}

/// The guest writes in each round, and a thread writes all the time. Both images are equal when the guest runs there. Old content is
/// gone, holes are holes, and the timeline has the copied bytes.
#[test]
fn a_disk_is_mirrored_while_its_guest_writes() {
    let bytes = (6 << 20) + 512 * 3;
    for (streams, encrypted) in [(1, false), (3, false), (2, true)] {
        let disks = Disks::new(bytes, bytes);
        let machine = disks.machine(3, vec![(0..900).collect(), vec![1, 2, 700], vec![0, 2]]);
        let requested = mirrored(if encrypted { sealed(request(300, 60)) } else { request(300, 60) });
        let over = AtomicBool::new(false);
        let (outcome, all) = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let mut driver = disks.driver.lock().unwrap();
                    if driver.stopped {
                        break;
                    }
                    driver.request();
                    drop(driver);
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            let outcome = go_with(&machine, disks.image(), streams, u64::MAX, &requested);
            over.store(true, Ordering::SeqCst);
            let all = disks.driver.lock().unwrap().done;
            (outcome, all)
        });
        let timeline = outcome.here.unwrap();
        assert_eq!(outcome.there, There::Runs);
        assert!(outcome.same && disks.equal(), "{streams} streams");
        assert!(all > 10, "only {all} requests");
        let [disk] = &timeline.disks[..] else { panic!("{:?}", timeline.disks) };
        assert_eq!((disk.name.as_str(), disk.bytes), ("disk0", bytes));
        let copied: u64 = timeline.rounds.iter().map(|round| round.disk_bytes).sum();
        assert!(disk.copied == copied && copied > bytes, "{copied}");
        assert_eq!(timeline.rounds[0].disk_bytes, bytes);
        assert!(timeline.rounds[0].pages == 0 && timeline.rounds.last().unwrap().stopped);
        // Zeroes and unwritten parts occupy no space.
        let (here, there) =
            (std::fs::metadata(&disks.here).unwrap(), std::fs::metadata(&disks.there).unwrap());
        assert!(there.blocks() <= here.blocks() + 256, "{} {}", there.blocks(), here.blocks());
        assert!(open(&disks.there, |_| ()).take_over().is_ok(), "it is a disk again");
    }
}

/// At every cut of the streams before the commit, the guest has its own disk with all its writes, and the other image is marked as
/// incomplete.
#[test]
fn wherever_the_streams_are_cut_the_source_keeps_its_disk() {
    let bytes = 256 << 10;
    let marks = {
        let disks = Disks::new(bytes, bytes);
        let file = std::fs::File::open(&disks.there).unwrap();
        rustix::fs::fsetxattr(&file, "user.causeway.try", b"1", rustix::fs::XattrFlags::empty()).is_ok()
    };
    for requested in [mirrored(request(300, 60)), mirrored(sealed(request(300, 60)))] {
        let disks = Disks::new(bytes, bytes);
        let whole = go_with(&disks.machine(1, vec![vec![3]]), disks.image(), 2, u64::MAX, &requested);
        whole.here.unwrap();
        let (whole, mut stays, mut begun) = (whole.carried, 0, 0);
        for cut in (0..whole).filter(|cut| *cut + 150 > whole || cut % 1499 == 0) {
            let disks = Disks::new(bytes, bytes);
            let machine = disks.machine(1, vec![vec![3]]);
            let outcome = go_with(&machine, disks.image(), 2, cut, &requested);
            let run_state = machine.run_state.load(Ordering::SeqCst);
            match (outcome.here, outcome.there) {
                (Ok(_), There::Runs) => assert!(run_state == 1 && disks.equal()),
                (Err(MigrationError::InDoubt(_)), there) => {
                    assert_eq!(run_state, 2, "cut {cut}: {there:?}");
                    assert!(disks.equal());
                }
                (Err(_), There::No(reason)) => {
                    assert_eq!(run_state, 0, "cut {cut}");
                    assert!(!reason.is_empty());
                    stays += 1;
                    // The source's disk still works.
                    let mut driver = disks.driver.lock().unwrap();
                    driver.request();
                    let file = std::fs::File::open(&disks.there).unwrap();
                    if rustix::fs::fgetxattr(&file, "user.causeway.incomplete", &mut [0u8; 64][..]).is_ok() {
                        begun += 1;
                        let other = BlockConfig::new("disk0", &disks.there);
                        let error = Block::open(other).err().unwrap().to_string();
                        assert!(error.contains("is incomplete"), "{error}");
                    }
                }
                (here, there) => panic!("cut {cut}: {here:?}, {there:?}"),
            }
        }
        assert!(stays > 50 && (begun > 50 || !marks), "{stays} {begun}");
    }
}

/// Disks that can't be copied are named in a sentence before the migration begins, by the side that detects it.
#[test]
fn disks_that_cannot_be_copied_are_named() {
    let bytes = 1 << 20;
    let named = |names: &[&str]| MigrationRequest {
        mirror: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        ..request(300, 60)
    };
    let refused = |machine: &StandIn, there: Block, requested: &MigrationRequest, expected: &str| {
        let error =
            super::super::error::line(&go_with(machine, there, 2, u64::MAX, requested).here.unwrap_err());
        assert!(error.contains(expected), "{error}");
        assert_eq!(machine.stops.load(Ordering::SeqCst), 0);
    };
    let disks = Disks::new(bytes, 2 << 20);
    let machine = disks.machine(1, vec![]);
    refused(&machine, disks.image(), &named(&[]), "at the destination 2097152; they must be the same");
    refused(&machine, disks.image(), &named(&["disk7"]), "no disk disk7; its disks are: disk0");

    let disks = Disks::new(bytes, bytes);
    let machine = disks.machine(1, vec![]);
    let read_only = open(&disks.there, |config| (config.claim, config.read_only) = (false, true));
    refused(&machine, read_only, &named(&[]), "disk0 is read-only at the destination");
    let other = open(&disks.there, |config| (config.claim, config.name) = (false, "disk1".to_owned()));
    refused(&machine, other, &named(&["disk0"]), "no disk disk0 at the destination");
    let mut bare = disks.machine(1, vec![]);
    bare.disks.clear();
    refused(&bare, disks.image(), &named(&[]), "no disk that its guest may write");
    bare.disks = vec![open(&disks.there, |config| config.read_only = true).content()];
    refused(&bare, disks.image(), &named(&["disk0"]), "disk0 is read-only: nothing in it changes");
    assert_eq!(std::fs::read(&disks.there).unwrap()[0], 0xDD, "nothing was written");
}

/// A disk that both sides share isn't copied, and is reported as in use where the user named it.
#[test]
fn a_shared_disk_is_not_copied_onto_itself() {
    let disks = Disks::new(1 << 20, 1 << 20);
    let machine = disks.machine(1, vec![]);
    let same = || open(&disks.here, |config| config.claim = false);
    let requested = MigrationRequest { mirror: Some(vec!["disk0".to_owned()]), ..request(300, 60) };
    let error = go_with(&machine, same(), 2, u64::MAX, &requested).here.unwrap_err();
    let error = super::super::error::line(&error);
    assert!(error.contains("is in use by another virtual machine"), "{error}");
    assert_eq!(machine.stops.load(Ordering::SeqCst), 0);

    let machine = disks.machine(1, vec![]);
    // The stand-in doesn't unlock its disk, so the other side can't lock it in the end.
    let outcome = go_with(&machine, same(), 2, u64::MAX, &mirrored(request(300, 60)));
    assert!(matches!(outcome.there, There::No(reason) if reason.contains("take its image")));
    assert!(outcome.here.is_err() && machine.stops.load(Ordering::SeqCst) == 1, "it came to the end");
}

/// A file in a small file system of another mount namespace, and the process that keeps the namespace. `None` without privileges.
fn small_file_system(bytes: u64) -> Option<(Child, PathBuf)> {
    let script = format!(
        "mount -t tmpfs -o size=1m none /mnt && truncate -s {bytes} /mnt/disk && echo ready && exec sleep 300"
    );
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut said = [0; 5];
    let ready = child.stdout.take().is_some_and(|mut out| out.read_exact(&mut said).is_ok());
    let path = PathBuf::from(format!("/proc/{}/root/mnt/disk", child.id()));
    if !ready || std::fs::metadata(&path).is_err() {
        let _ = child.kill();
        let _ = child.wait();
        return None;
    }
    Some((child, path))
}

/// A destination without room for the guest's writes reports that, and the source resumes the guest.
#[test]
fn a_full_disk_at_the_destination_is_reported() {
    let bytes = 8 << 20;
    let Some((mut child, path)) = small_file_system(bytes) else {
        facilities::missing(
            facilities::Facility::Root,
            "no mount namespace with a small file system could be made",
        );
        return;
    };
    let disks = Disks::new(bytes, bytes);
    std::fs::File::options()
        .write(true)
        .open(&disks.here)
        .unwrap()
        .write_all_at(&vec![9; 4 << 20], 0)
        .unwrap();
    for streams in [1, 3] {
        let machine = disks.machine(2, vec![]);
        let there = open(&path, |config| config.claim = false);
        let outcome = go_with(&machine, there, streams, u64::MAX, &mirrored(request(300, 60)));
        let error = super::super::error::line(&outcome.here.unwrap_err());
        assert!(error.contains("refuses") && error.contains("No space left on device"), "{error}");
        assert_eq!((machine.stops.load(Ordering::SeqCst), machine.run_state.load(Ordering::SeqCst)), (0, 0));
        disks.driver.lock().unwrap().request();
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A guest that writes its disk faster than it is copied is throttled, and stays at the source when the time limit has passed. The limit
/// starts at the end of the first copy.
#[test]
fn a_guest_that_writes_its_disk_too_fast_is_throttled_and_then_stays_at_the_source() {
    let disks = Disks::new(2 << 20, 2 << 20);
    let machine = disks.machine(0, vec![]);
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                disks.driver.lock().unwrap().request();
            }
        });
        let outcome = go_with(&machine, disks.image(), 1, u64::MAX, &mirrored(request(0, 1)));
        over.store(true, Ordering::SeqCst);
        outcome
    });
    let error = outcome.here.unwrap_err();
    assert!(matches!(error, MigrationError::DisksNotConverging { seconds: 1, left: 1.., .. }), "{error}");
    assert!(machine.throttled_us.load(Ordering::SeqCst) > 0);
    assert_eq!(machine.stops.load(Ordering::SeqCst), 0);
}

/// A cancel while disks are copied ends the migration. The guest was never disturbed, and its writes aren't logged any more.
#[test]
fn a_cancel_ends_the_copy_of_disks() {
    let disks = Disks::new(2 << 20, 2 << 20);
    let machine = disks.machine(0, vec![]);
    let (a, b, _) = wires(2, u64::MAX);
    let (to, reporter) = (ram(MIB), ProgressReporter::default());
    let stop = reporter.begin("there", None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                disks.driver.lock().unwrap().request();
            }
        });
        let (to, there) = (&to, disks.image());
        let destination_thread = scope.spawn(move || run_destination(b, None, to, there));
        let (machine, reporter) = (&machine, &reporter);
        let source_thread =
            scope.spawn(move || migrate(machine, a, &mirrored(request(0, 0)), reporter, &stop));
        while reporter.progress().is_some_and(|progress| progress.round < 2 || progress.disk_bytes_left == 0)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        reporter.cancel().unwrap();
        assert!(matches!(source_thread.join().unwrap(), Err(MigrationError::Cancelled)));
        assert!(matches!(destination_thread.join().unwrap(), There::No(_)));
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.run_state.load(Ordering::SeqCst)), (0, 0));
    disks.driver.lock().unwrap().request();
    assert_eq!(disks.source.take_written().unwrap().covered(), 0);
}

/// With post-copy the disk is complete before the guest runs there; its memory follows.
#[test]
fn with_post_copy_disks_are_complete_before_the_switchover() {
    for after in [0, 1] {
        let Some(uffd) = uffd() else { return };
        let disks = Disks::new(2 << 20, 2 << 20);
        let machine = disks.machine(2, vec![(0..900).collect(), (5..700).collect()]);
        let to = ram(MIB);
        let (a, b, _) = wires(3, u64::MAX);
        let reporter = ProgressReporter::default();
        let stop = reporter.begin("there", None).unwrap();
        let requested = mirrored(MigrationRequest { downtime_ms: 12, ..postcopy_request(after) });
        let timeline = std::thread::scope(|scope| {
            let (to, there) = (&to, disks.image());
            let equal = || disks.equal();
            let destination_thread = scope.spawn(move || {
                let content = there.content();
                postcopy_destination_with(uffd, to, &[content], (b, None), |ram| {
                    assert!(equal(), "the guest runs, and its disk isn't whole");
                    use_all(ram);
                })
            });
            let timeline = migrate(&machine, a, &requested, &reporter, &stop).unwrap();
            destination_thread.join().unwrap().unwrap().unwrap();
            timeline
        });
        assert!(same_but_for_use(&machine.ram, &to));
        assert!(timeline.post_copy.is_some_and(|post| post.missing_pages >= 900));
        assert_eq!(timeline.disks[0].bytes, 2 << 20);
    }
}

/// A destination that shows that it lives where it has nothing to flush can't hold the source: the guest stays there, and runs.
#[test]
fn keepalives_are_no_answer() {
    let disks = Disks::new(1 << 20, 1 << 20);
    let machine = disks.machine(1, vec![]);
    let (a, b, _) = wires(1, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut control = Peer::over(b.into_iter().next().unwrap());
            control.expect(Kind::Hello);
            control.expect(Kind::Offer);
            control.send(Kind::Keepalive, &[]);
            control.expect(Kind::Abort);
        });
        let error = migrate(&machine, a, &request(300, 60), &reporter, &stop).unwrap_err().to_string();
        assert!(error.contains("Keepalive where Accepted was to come"), "{error}");
    });
    assert_eq!(machine.stops.load(Ordering::SeqCst), 0);
}

/// An older destination gets no request: the user learns which version is needed before the migration begins.
#[test]
fn an_older_destination_is_named() {
    let disks = Disks::new(1 << 20, 1 << 20);
    let machine = disks.machine(1, vec![]);
    let (a, b, _) = wires(1, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut control = Peer::over(b.into_iter().next().unwrap());
            control.expect(Kind::Hello);
            control.expect(Kind::Offer);
            control.send(Kind::Accepted, &message::encode(&Accepted { version: 3, host: None }).unwrap());
            let said = message::sentence(&control.expect(Kind::Abort));
            assert!(said.contains("version 3"), "{said}");
        });
        let error = migrate(&machine, a, &mirrored(request(300, 60)), &reporter, &stop).unwrap_err();
        assert!(error.to_string().contains("move the VM without --mirror"), "{error}");
    });
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
}

/// A hostile source sends pieces of disks without a request, of disks that don't exist, beyond their ends, or not all of one. Each is
/// refused with a sentence, and an incomplete image stays marked.
#[test]
fn a_hostile_source_is_refused() {
    use crate::migration::message::{End, Hello, OLDEST_VERSION, VERSION};
    use crate::migration::mirror::message::{RequestedDisk, header};
    let bytes = 1 << 20;
    let piece = |disk, offset: u64, length: u64| header(disk, true, offset, length).to_vec();
    let cases: [(bool, Vec<Vec<u8>>, &str); 6] = [
        (false, vec![piece(0, 0, 512)], "without having asked"),
        (true, vec![piece(1, 0, 512)], "disk 1, which isn't to be filled"),
        (true, vec![piece(0, bytes, 512)], "of disk0, which has"),
        (true, vec![piece(0, u64::MAX - 5, 512)], "of disk0, which has"),
        (true, vec![piece(0, 0, bytes)[..20].to_vec()], "without a header"),
        (true, vec![piece(0, 0, bytes / 2)], "524288 of the 1048576 bytes of disk0 only"),
    ];
    for (asks, blocks, expected) in cases {
        let disks = Disks::new(bytes, bytes);
        let (a, b, _) = wires(1, u64::MAX);
        let to = ram(MIB);
        std::thread::scope(|scope| {
            let (to, there) = (&to, disks.image());
            let destination_thread = scope.spawn(move || run_destination(b, None, to, there));
            let mut control = Peer::over(a.into_iter().next().unwrap());
            let hello =
                Hello { version: VERSION, oldest: OLDEST_VERSION, stream: 0, streams: 1, migration: [1; 16] };
            control.send(Kind::Hello, &hello.encode());
            control.send(Kind::Offer, &message::encode(&shape()).unwrap());
            control.expect(Kind::Accepted);
            if asks {
                let disk = RequestedDisk { name: "disk0".to_owned(), bytes, device: false, named: true };
                control.send(Kind::Mirror, &message::encode(&MirrorRequest { disks: vec![disk] }).unwrap());
                let answer: MirrorReply =
                    message::decode(&control.expect(Kind::Mirror), "an answer").unwrap();
                assert!(answer.shared.is_empty());
            }
            for block in blocks {
                control.send(Kind::Block, &block);
            }
            control.send_if_heard(Kind::State, STATE);
            control.send_if_heard(Kind::End, &message::encode(&End { pages: 0, blackout_us: None }).unwrap());
            let There::No(reason) = destination_thread.join().unwrap() else { panic!("{expected}") };
            assert!(reason.contains(expected), "{reason}");
        });
        assert!(disks.image().take_over().is_err() == asks, "{expected}");
    }
}

/// A round doesn't wait for a further stream that has ended without its share. The missing part is detected at the end.
#[test]
fn a_stream_that_ends_early_is_not_waited_for() {
    use crate::migration::message::{End, Hello, OLDEST_VERSION, VERSION};
    use crate::migration::mirror::message::RequestedDisk;
    let bytes = 1 << 20;
    let disks = Disks::new(bytes, bytes);
    let (a, b, _) = wires(2, u64::MAX);
    let to = ram(MIB);
    std::thread::scope(|scope| {
        let (to, there) = (&to, disks.image());
        let destination_thread = scope.spawn(move || run_destination(b, None, to, there));
        let mut ends: Vec<Peer> = a.into_iter().map(Peer::over).collect();
        for (end, stream) in ends.iter_mut().zip(0..) {
            let hello =
                Hello { version: VERSION, oldest: OLDEST_VERSION, stream, streams: 2, migration: [1; 16] };
            end.send(Kind::Hello, &hello.encode());
        }
        let [control, other] = &mut ends[..] else { panic!() };
        control.send(Kind::Offer, &message::encode(&shape()).unwrap());
        control.expect(Kind::Accepted);
        let disk = RequestedDisk { name: "disk0".to_owned(), bytes, device: false, named: true };
        control.send(Kind::Mirror, &message::encode(&MirrorRequest { disks: vec![disk] }).unwrap());
        control.expect(Kind::Mirror);
        let end = message::encode(&End { pages: 0, blackout_us: None }).unwrap();
        other.send(Kind::End, &end);
        control.send(Kind::Settle, &[]);
        control.expect(Kind::Settled);
        control.send(Kind::State, STATE);
        control.send(Kind::End, &end);
        let There::No(reason) = destination_thread.join().unwrap() else { panic!() };
        assert!(reason.contains("0 of the 1048576 bytes of disk0 only"), "{reason}");
    });
}
