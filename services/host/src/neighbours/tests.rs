//! The registry with members that have real memory files, over its real socket; no VM, no KVM.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions, Readers};
use machine::slots::HostMapping;
use neighbour::layout::Header;
use neighbour::registers::reason;
use neighbour_protocol::{FromDaemon, FromMonitor, Permitted, Piece, Socket, SocketError};

use super::*;

const HANG_LIMIT: Duration = Duration::from_secs(20);
const SIZE: u64 = 2 << 20;

struct Bed {
    _directory: tempfile::TempDir,
    path: std::path::PathBuf,
    neighbours: Neighbours,
}

/// A registry with timeouts longer than delays on a busy machine: most of these members don't report.
fn start() -> Bed {
    start_with(Duration::from_secs(60))
}

fn start_with(patience: Duration) -> Bed {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("neighbours");
    let heartbeat = Heartbeat { patience, ..Heartbeat::DEFAULT };
    let config = NeighboursConfig { heartbeat, ..NeighboursConfig::default() };
    let neighbours = Neighbours::start(&path, Access::default(), config).unwrap();
    Bed { _directory: directory, path, neighbours }
}

fn ram(readers: Readers) -> GuestRam {
    let options = RamOptions { name: "test".into(), readers, ..RamOptions::default() };
    GuestRam::allocate(&RamLayout::new(&[SIZE]).unwrap(), &options).unwrap()
}

/// A member without a VM.
struct Fake {
    socket: Socket,
    ram: GuestRam,
    signals: Vec<OwnedFd>,
    slots: u32,
}

impl Fake {
    fn connect(bed: &Bed) -> Self {
        let socket = Socket::connect(&bed.path).unwrap();
        let (FromDaemon::Hello { slots, version: 3, .. }, _) = socket.wait(HANG_LIMIT).unwrap() else {
            panic!("hello comes first")
        };
        let signals = (0..slots).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
        Self { socket, ram: ram(Readers::Anybody), signals, slots }
    }

    fn ask(&self, vm: &str, permits: &[&str], files: &[BorrowedFd<'_>], ram: Vec<Piece>) -> FromDaemon {
        let permits = permits.iter().map(|vm| Permitted { vm: (*vm).to_owned(), uid: None }).collect();
        self.ask_permitting(vm, permits, files, ram)
    }

    fn ask_permitting(
        &self,
        vm: &str,
        permits: Vec<Permitted>,
        files: &[BorrowedFd<'_>],
        ram: Vec<Piece>,
    ) -> FromDaemon {
        let join = FromMonitor::Join {
            vm: vm.to_owned(),
            group: "nas".to_owned(),
            permits,
            ram,
            slot: None,
            epoch: 0,
        };
        let mut fds = files.to_vec();
        fds.extend(self.signals.iter().map(AsFd::as_fd));
        self.socket.send(&join, &fds).unwrap();
        self.next()
    }

    fn join(bed: &Bed, vm: &str, permits: &[&str]) -> (Self, u32) {
        let member = Self::connect(bed);
        let file = member.ram.regions()[0].read_only.clone().unwrap();
        let piece = Piece { address: 0, size: SIZE, file: 0, offset: 0 };
        match member.ask(vm, permits, &[file.as_fd()], vec![piece]) {
            FromDaemon::Joined { slot } => (member, slot),
            other => panic!("{other:?}"),
        }
    }

    fn next(&self) -> FromDaemon {
        self.socket.wait(HANG_LIMIT).unwrap().0
    }

    /// Receives the next connection: slot, epoch, RAM file, segment, signal. The common peers of the two follow it.
    fn connected(&self) -> (u32, u32, File, File, OwnedFd) {
        let (connection, common) = self.connected_with();
        assert_eq!(common, 0);
        connection
    }

    fn connected_with(&self) -> ((u32, u32, File, File, OwnedFd), u64) {
        let (message, fds) = self.socket.wait::<FromDaemon>(HANG_LIMIT).unwrap();
        let FromDaemon::Connect { slot, epoch, .. } = message else { panic!("{message:?}") };
        let [ram, segment, signal] = <[OwnedFd; 3]>::try_from(fds).unwrap();
        let FromDaemon::Common { slot: same, slots } = self.next() else {
            panic!("whom they have in common")
        };
        assert_eq!(same, slot);
        ((slot, epoch, ram.into(), segment.into(), signal), slots)
    }

    fn is_silent(&self) -> bool {
        std::thread::sleep(Duration::from_millis(300));
        self.socket.receive::<FromDaemon>().unwrap().is_none()
    }
}

fn piece(size: u64, offset: u64) -> Piece {
    Piece { address: 0, size, file: 0, offset }
}

/// A peer's descriptors read the other's RAM and signal the other, and permit no write: neither by the descriptor, nor by reopening it (or
/// any other descriptor of the peer) through /proc.
#[test]
fn a_peer_sees_memory_that_it_cannot_write() {
    let bed = start();
    let (a, slot_a) = Fake::join(&bed, "a", &["b"]);
    let (b, slot_b) = Fake::join(&bed, "b", &["a"]);
    let (peer, epoch, memory, segment, signal) = a.connected();
    let (peer_of_b, epoch_b, _, segment_b, _) = b.connected();
    assert_eq!((peer, peer_of_b, epoch), (slot_b, slot_a, epoch_b));

    b.ram.memory().memory().write_obj(0x1234_5678_u32, GuestAddress(0x5000)).unwrap();
    let mut seen = [0; 4];
    memory.read_exact_at(&mut seen, 0x5000).unwrap();
    assert_eq!(u32::from_le_bytes(seen), 0x1234_5678);
    assert!(HostMapping::new("window", memory.as_fd(), 0, SIZE, false).is_ok());

    assert!(HostMapping::new("window", memory.as_fd(), 0, SIZE, true).is_err());
    assert!(memory.write_at(&[1], 0).is_err());
    let reopened =
        File::options().read(true).write(true).open(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    if let Ok(reopened) = reopened {
        // Only its owner and root can open it, and even they can't map it for writing.
        assert!(HostMapping::new("window", reopened.as_fd(), 0, SIZE, true).is_err());
        assert!(reopened.write_at(&[1], 0).is_err() && reopened.set_len(0).is_err());
    }

    segment.write_at(b"shared", 8192).unwrap();
    let mut shared = [0; 6];
    segment_b.read_exact_at(&mut shared, 8192).unwrap();
    assert_eq!(&shared, b"shared");
    let size = usize::try_from(segment.metadata().unwrap().len()).unwrap();
    let mut bytes = vec![0; size];
    segment.read_exact_at(&mut bytes, 0).unwrap();
    let words: Vec<_> = bytes
        .chunks_exact(8)
        .map(|word| std::sync::atomic::AtomicU64::new(u64::from_le_bytes(word.try_into().unwrap())))
        .collect();
    let (header, _) = Header::read(&words[..]).unwrap();
    header.agrees(epoch, &NeighboursConfig::default().geometry, [slot_a, slot_b]).unwrap();
    assert!(segment.set_len(0).is_err(), "a peer can't make the other's accesses fault");

    rustix::io::write(&signal, &1_u64.to_ne_bytes()).unwrap();
    let at = usize::try_from(slot_a).unwrap();
    let mut count = [0; 8];
    rustix::io::read(&b.signals[at], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    // The report follows at the end of the thread's pass, after the members were notified.
    let begun = Instant::now();
    while bed.neighbours.inspect()["nas"][0]["epoch_by_peer"]["b"] != epoch {
        assert!(begun.elapsed() < HANG_LIMIT, "{}", bed.neighbours.inspect());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_permission_of_both_nobody_is_given_anything() {
    let bed = start();
    let (a, _) = Fake::join(&bed, "a", &["b"]);
    let (b, _) = Fake::join(&bed, "b", &[]);
    let (c, _) = Fake::join(&bed, "c", &["a", "b"]);
    assert!(a.is_silent() && b.is_silent() && c.is_silent());
}

#[test]
fn memory_that_could_change_under_a_peer_is_refused() {
    let bed = start();
    let good = ram(Readers::Anybody);
    let writable = good.regions()[0].file.clone();
    let unsealed = ram(Readers::Nobody);
    let unsealed_reader =
        File::open(format!("/proc/self/fd/{}", unsealed.regions()[0].file.as_raw_fd())).unwrap();
    let elsewhere = File::open("/proc/self/exe").unwrap();
    let reader = good.regions()[0].read_only.clone().unwrap();
    for (file, piece, expected) in [
        (writable.as_fd(), piece(SIZE, 0), "reading only"),
        (unsealed_reader.as_fd(), piece(SIZE, 0), "neither sealed against writing"),
        (elsewhere.as_fd(), piece(SIZE, 0), "memory file"),
        (reader.as_fd(), piece(SIZE, 4096), "doesn't lie in its file"),
        (reader.as_fd(), piece(u64::MAX - 4095, 8192), "doesn't lie in its file"),
        (reader.as_fd(), piece(0, 0), "whole pages"),
    ] {
        let member = Fake::connect(&bed);
        let FromDaemon::Refused { reason } = member.ask("a", &[], &[file], vec![piece]) else {
            panic!("{expected}: taken")
        };
        assert!(reason.contains(expected), "{reason}");
    }
    let mut member = Fake::connect(&bed);
    member.signals.pop();
    let answer = member.ask("a", &[], &[reader.as_fd()], vec![piece(SIZE, 0)]);
    assert!(
        matches!(&answer, FromDaemon::Refused { reason } if reason.contains("descriptors")),
        "{answer:?}"
    );
    assert_eq!(member.slots, 16);
}

/// Memory that devices in other processes write isn't sealed: no peer of the same user gets it, nor does root. The same member may have
/// peers of other users. Its daemon's HCA can map its memory for writing, now and after a restart.
#[test]
fn unsealed_memory_is_for_other_users_only() {
    let bed = start();
    let me = rustix::process::geteuid().as_raw();
    let owned = ram(Readers::OtherUsers);
    let file = owned.regions()[0].read_only.clone().unwrap();
    let join = |uids: &[Option<u32>]| {
        let member = Fake::connect(&bed);
        let permits = uids.iter().map(|uid| Permitted { vm: "b".to_owned(), uid: *uid }).collect();
        let answer = member.ask_permitting("a", permits, &[file.as_fd()], vec![piece(SIZE, 0)]);
        (member, answer)
    };
    for uids in [&[None][..], &[Some(me)], &[Some(0)], &[Some(me + 1), None]] {
        let (_, answer) = join(uids);
        let FromDaemon::Refused { reason } = answer else { panic!("{uids:?}: {answer:?}") };
        assert!(reason.contains("run b as another user"), "{reason}");
    }
    let (_member, answer) = join(&[Some(me + 1)]);
    assert!(matches!(answer, FromDaemon::Joined { .. }), "{answer:?}");
    for _daemon in 0..2 {
        let file: OwnedFd = owned.regions()[0].file.try_clone().unwrap().into();
        dma::MemoryRegion::map(0, SIZE, &file, 0, true).unwrap();
    }
    let begun = Instant::now();
    while bed.neighbours.inspect()["nas"][0]["memory"] != "other users only" {
        assert!(begun.elapsed() < HANG_LIMIT, "{}", bed.neighbours.inspect());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The peers' KVM would refuse a signal that isn't an eventfd, and so disable a BAR of theirs.
#[test]
fn signals_that_are_no_eventfds_are_refused() {
    let bed = start();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let memory = rustix::fs::memfd_create("anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let timer = rustix::time::timerfd_create(
        rustix::time::TimerfdClockId::Monotonic,
        rustix::time::TimerfdFlags::CLOEXEC,
    )
    .unwrap();
    for wrong in [pipe, memory, epoll, timer] {
        let mut member = Fake::connect(&bed);
        member.signals[3] = wrong;
        let file = member.ram.regions()[0].read_only.clone().unwrap();
        let answer = member.ask("a", &[], &[file.as_fd()], vec![piece(SIZE, 0)]);
        let FromDaemon::Refused { reason } = answer else { panic!("taken: {answer:?}") };
        assert!(reason.contains("slot 3 is not an eventfd"), "{reason}");
    }
    Fake::join(&bed, "a", &[]);
}

/// A member that releases each connection at once is reconnected with a back-off.
#[test]
fn one_who_lets_go_at_once_is_paused() {
    let bed = start();
    let (a, slot_a) = Fake::join(&bed, "a", &["b"]);
    let (b, slot_b) = Fake::join(&bed, "b", &["a"]);
    let began = Instant::now();
    let mut connections = 0;
    while began.elapsed() < Duration::from_secs(1) {
        for (member, other) in [(&a, slot_b), (&b, slot_a)] {
            while let Some((message, _)) = member.socket.receive::<FromDaemon>().unwrap() {
                if let FromDaemon::Connect { slot, epoch, .. } = message {
                    assert_eq!(slot, other);
                    member.socket.send(&FromMonitor::Release { slot, epoch }, &[]).unwrap();
                    connections += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // After 0, 50, 150, 350, 750 ms, reported to both; later on a busy machine.
    assert!((4..=10).contains(&connections), "{connections}");
}

/// A pipeline: each pair learns which third member both may read, when it arrives and when it leaves.
#[test]
fn a_pair_is_told_whom_it_has_in_common() {
    let bed = start();
    let (files, slot_files) = Fake::join(&bed, "files", &["raid", "disks"]);
    let (raid, slot_raid) = Fake::join(&bed, "raid", &["files", "disks"]);
    files.connected();
    raid.connected();
    let (disks, slot_disks) = Fake::join(&bed, "disks", &["files", "raid"]);
    let (first, second) = (disks.next(), disks.next());
    assert!(matches!((&first, &second), (FromDaemon::Connect { .. }, FromDaemon::Connect { .. })));
    let mut told: Vec<FromDaemon> = (0..2).map(|_| disks.next()).collect();
    told.sort_by_key(|message| matches!(message, FromDaemon::Common { slot, .. } if *slot == slot_raid));
    assert_eq!(
        told,
        [
            FromDaemon::Common { slot: slot_files, slots: 1 << slot_raid },
            FromDaemon::Common { slot: slot_raid, slots: 1 << slot_files },
        ]
    );
    // Members that were connected before learn of the new one.
    let news = (0..3).map(|_| files.next()).collect::<Vec<_>>();
    assert!(news.contains(&FromDaemon::Common { slot: slot_raid, slots: 1 << slot_disks }), "{news:?}");
    drop(disks);
    let news = (0..2).map(|_| files.next()).collect::<Vec<_>>();
    assert!(news.contains(&FromDaemon::Common { slot: slot_raid, slots: 0 }), "{news:?}");
}

/// When a member's monitor dies, its peer is notified at once. The member returns to its slot. It is reconnected only after the peer has
/// released its old memory, which stays readable until then.
#[test]
fn a_dead_members_memory_stays_until_its_peer_has_let_go() {
    let bed = start();
    let (a, slot_a) = Fake::join(&bed, "a", &["b"]);
    let (b, slot_b) = Fake::join(&bed, "b", &["a"]);
    let (_, epoch, memory, ..) = a.connected();
    b.ram.memory().memory().write_obj(7_u8, GuestAddress(0)).unwrap();
    drop(b);
    assert_eq!(a.next(), FromDaemon::Gone { slot: slot_b, epoch, reason: reason::LEFT });
    let mut seen = [0];
    memory.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(seen, [7]);
    let (b, again) = Fake::join(&bed, "b", &["a"]);
    assert_eq!(again, slot_b);
    assert!(a.is_silent() && b.is_silent());
    a.socket.send(&FromMonitor::Release { slot: slot_b, epoch }, &[]).unwrap();
    let (peer, later, ..) = a.connected();
    assert!(peer == slot_b && later > epoch);
    assert_eq!(b.connected().0, slot_a);
}

/// A member that stops reporting, and one whose driver stops counting: the peer is notified, with the reason. (`neighbour::heartbeat`
/// verifies the times; the registry's timeouts are long here, as the machine may be busy.)
#[test]
fn a_peer_is_told_that_a_member_hangs() {
    let bed = start_with(Duration::from_secs(2));
    for hang in [true, false] {
        let (a, _) = Fake::join(&bed, "a", &["b"]);
        let (b, slot_b) = Fake::join(&bed, "b", &["a"]);
        let (_, epoch, ..) = a.connected();
        // It reports for a while.
        for count in 1..8 {
            for member in [&a, &b] {
                member.socket.send(&FromMonitor::Alive { count }, &[]).unwrap();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let stopped = Instant::now();
        let mut count = 8;
        let told = loop {
            a.socket.send(&FromMonitor::Alive { count }, &[]).unwrap();
            if hang {
                b.socket.send(&FromMonitor::Alive { count: 7 }, &[]).unwrap();
            }
            if let Some((message, _)) = a.socket.receive::<FromDaemon>().unwrap() {
                break message;
            }
            assert!(stopped.elapsed() < HANG_LIMIT, "never told");
            count += 1;
            std::thread::sleep(Duration::from_millis(20));
        };
        let reason = if hang { reason::HUNG } else { reason::SILENT };
        assert_eq!(told, FromDaemon::Gone { slot: slot_b, epoch, reason });
    }
}

#[test]
fn who_connects_and_does_not_join_is_told_so_and_hung_up_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("neighbours");
    let config = NeighboursConfig { joining: Duration::from_millis(300), ..NeighboursConfig::default() };
    let neighbours = Neighbours::start(&path, Access::default(), config).unwrap();
    let bed = Bed { _directory: directory, path, neighbours };
    let late = Fake::connect(&bed);
    let FromDaemon::Refused { reason } = late.next() else { panic!("it was to be refused") };
    assert!(reason.contains("joins within 0.3 s"), "{reason}");
    assert!(matches!(late.socket.wait::<FromDaemon>(HANG_LIMIT), Err(SocketError::Closed)));
}

#[test]
fn a_member_that_says_nonsense_is_hung_up_on_and_the_others_are_not() {
    let bed = start();
    let (a, _) = Fake::join(&bed, "a", &["b"]);
    let (b, slot_b) = Fake::join(&bed, "b", &["a"]);
    let (_, epoch, ..) = a.connected();
    b.connected();
    // Releases of connections that it doesn't have are ignored.
    b.socket.send(&FromMonitor::Release { slot: 14, epoch: 1 }, &[]).unwrap();
    b.socket.send(&FromMonitor::Release { slot: u32::MAX, epoch: u32::MAX }, &[]).unwrap();
    assert!(a.is_silent());
    rustix::io::write(&b.socket, b"nonsense").unwrap();
    assert_eq!(a.next(), FromDaemon::Gone { slot: slot_b, epoch, reason: reason::LEFT });
    assert!(matches!(b.socket.wait::<FromDaemon>(HANG_LIMIT), Err(SocketError::Closed)));
}
