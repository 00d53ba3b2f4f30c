//! Attacks of a compromised monitor on its VM's neighbour. A process joins as a neighbour over the registry's real socket. Then it tries
//! with every descriptor that it holds, and through `/proc`, to write the other's RAM, to map it for writing, or to harm it otherwise.
//! Needs root, to become another user; without it the tests report that they are skipped.
#![allow(unsafe_code)] // An attacker isn't bound by Rust's guarantees.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use host::access::Access;
use host::neighbours::{Neighbours, NeighboursConfig};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions, Readers};
use neighbour::heartbeat::Heartbeat;
use neighbour_protocol::{FromDaemon, FromMonitor, Permitted, Piece, Socket};
use rustix::event::{EventfdFlags, eventfd};

const SIZE: u64 = 2 << 20;
const HANG_LIMIT: Duration = Duration::from_secs(60);
const PATTERN: u8 = 0x5A;
/// The user `nobody` on every Linux.
const ATTACKER: u32 = 65_534;
/// Environment variables: path of the registry's socket, and process identifier of the victim if the attacker may try that as well.
const SOCKET: &str = "CAUSEWAY_TEST_SOCKET";
const VICTIM: &str = "CAUSEWAY_TEST_VICTIM";
const VICTIM_UID: &str = "CAUSEWAY_TEST_VICTIM_UID";

fn page() -> usize {
    4096
}

/// Joins, and keeps the RAM.
fn join(path: &Path, vm: &str, peer: &str, uid: u32, readers: Readers) -> (Socket, GuestRam) {
    let socket = Socket::connect(path).unwrap();
    let (FromDaemon::Hello { slots, .. }, _) = socket.wait(HANG_LIMIT).unwrap() else { panic!("no hello") };
    let options = RamOptions { name: vm.to_owned(), readers, ..RamOptions::default() };
    let ram = GuestRam::allocate(&RamLayout::new(&[SIZE]).unwrap(), &options).unwrap();
    let signals: Vec<OwnedFd> = (0..slots).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    let join = FromMonitor::Join {
        vm: vm.to_owned(),
        group: "nas".to_owned(),
        permits: vec![Permitted { vm: peer.to_owned(), uid: Some(uid) }],
        ram: vec![Piece { address: 0, size: SIZE, file: 0, offset: 0 }],
        slot: None,
        epoch: 0,
    };
    let file = ram.regions()[0].read_only.clone().unwrap();
    let mut fds = vec![file.as_fd()];
    fds.extend(signals.iter().map(AsFd::as_fd));
    socket.send(&join, &fds).unwrap();
    let (answer, _) = socket.wait::<FromDaemon>(HANG_LIMIT).unwrap();
    assert!(matches!(answer, FromDaemon::Joined { .. }), "{answer:?}");
    (socket, ram)
}

/// Runs an attacker of user `uid` as the neighbour of a VM of this process.
fn attacked(readers: Readers, uid: u32, with_process: bool) {
    if !rustix::process::geteuid().is_root() {
        facilities::missing(facilities::Facility::Root, "only root can start a process of another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = directory.path().join("neighbours");
    let heartbeat = Heartbeat { patience: HANG_LIMIT, ..Heartbeat::DEFAULT };
    let config = NeighboursConfig { heartbeat, ..NeighboursConfig::default() };
    let access = Access { uids: vec![uid], ..Access::default() };
    let _registry = Neighbours::start(&path, access, config).unwrap();
    let (_socket, ram) = join(&path, "victim", "attacker", uid, readers);
    let memory = ram.memory().memory();
    let pattern = vec![PATTERN; usize::try_from(SIZE).unwrap()];
    memory.write_slice(&pattern, GuestAddress(0)).unwrap();

    // The other user may be unable to find the binary by its path.
    let mut attacker = Command::new("/proc/self/exe");
    attacker
        .args(["--exact", "attacker", "--ignored", "--nocapture"])
        .env(SOCKET, &path)
        .env(VICTIM_UID, "0");
    if with_process {
        attacker.env(VICTIM, std::process::id().to_string());
    }
    let output = attacker.uid(uid).gid(uid).current_dir("/").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let line = |word: &str| {
        let line =
            said.lines().find_map(|line| line.split_once(word).map(|(_, rest)| rest.trim().to_owned()));
        line.unwrap_or_else(|| panic!("no {word} in {said}"))
    };
    // Unprotected memory shows that the attempts are effective.
    for way in ["reopened", "mapped"] {
        assert!(line("CONTROL").contains(way), "{said}");
    }
    let tried: usize = line("TRIED").parse().unwrap();
    assert!(tried >= if with_process { 100 } else { 40 }, "{said}");
    assert_eq!(line("HARMED"), "", "{said}");
    let mut after = vec![0; pattern.len()];
    memory.read_slice(&mut after, GuestAddress(0)).unwrap();
    assert!(after == pattern, "the victim's memory was changed");
    let there = ram.regions()[0].file.metadata().unwrap();
    assert_eq!((there.mode() & 0o7777, there.uid(), there.len()), (0o600, 0, SIZE));
}

/// A peer of another user can't write RAM that devices of other processes write (not sealed).
#[test]
fn a_peer_of_another_user_cannot_write_unsealed_memory() {
    attacked(Readers::OtherUsers, ATTACKER, true);
}

/// A peer of another user can't write sealed RAM.
#[test]
fn a_peer_of_another_user_cannot_write_sealed_memory() {
    attacked(Readers::Anybody, ATTACKER, true);
}

/// Sealed RAM is protected from a peer of the same user, even root, as far as descriptors go. (Its sandbox must prevent what such a process
/// could do to the other process.)
#[test]
fn a_peer_of_the_same_user_cannot_write_sealed_memory_by_any_descriptor() {
    attacked(Readers::Anybody, 0, false);
}

/// The attacker's process.
#[test]
#[ignore = "the process that the other tests start"]
fn attacker() {
    let path = std::env::var_os(SOCKET).unwrap();
    let victim_uid = std::env::var(VICTIM_UID).unwrap().parse().unwrap();
    println!("CONTROL {}", control().join(", "));
    let (socket, _ram) = join(Path::new(&path), "attacker", "victim", victim_uid, Readers::Anybody);
    let (message, fds) = socket.wait::<FromDaemon>(HANG_LIMIT).unwrap();
    assert!(matches!(message, FromDaemon::Connect { .. }), "{message:?}");
    assert_eq!(fds.len(), 3);
    let mut attack = Attack::default();
    // Every descriptor of the attacker that is the victim's memory; the segment is its own to write.
    let victim = fds[0].as_fd();
    let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    let mut found = 0;
    for number in 0..1024 {
        // SAFETY: used in calls that fail if it isn't open.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        if inode(fd).is_some_and(|of| Some(of) == inode(victim)) {
            attack.descriptor(&format!("descriptor {number}"), fd, true);
            found += 1;
        }
    }
    assert!(found >= 1);
    if let Ok(process) = std::env::var(VICTIM) {
        attack.process(process.parse().unwrap());
    }
    println!("TRIED {}", attack.tried);
    println!("HARMED {}", attack.harmed.join(", "));
}

/// The same on unprotected memory, whose descriptor is read-only, too.
fn control() -> Vec<String> {
    let file = File::from(rustix::fs::memfd_create("control", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(SIZE).unwrap();
    let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    drop(file);
    let mut attack = Attack::default();
    attack.descriptor("reader", reader.as_fd(), true);
    attack.harmed
}

#[derive(Default)]
struct Attack {
    tried: usize,
    harmed: Vec<String>,
}

fn done(result: i64) -> bool {
    result >= 0
}

impl Attack {
    fn note(&mut self, from: &str, how: &str, worked: bool) {
        self.tried += 1;
        if worked {
            self.harmed.push(format!("{from} {how}"));
        }
    }

    /// All uses of a descriptor; with `reopen`, also as a name by which to open another one.
    fn descriptor(&mut self, from: &str, fd: BorrowedFd<'_>, reopen: bool) {
        self.maps(from, fd);
        self.writes(from, fd);
        let raw = fd.as_raw_fd();
        // It would exclude the victim's devices.
        let seal = rustix::fs::fcntl_add_seals(fd, rustix::fs::SealFlags::FUTURE_WRITE);
        self.note(from, "sealed", seal.is_ok());
        // SAFETY: plain calls on a descriptor.
        let flagged = unsafe { libc::fcntl(raw, libc::F_SETFL, libc::O_RDWR) };
        if flagged == 0 {
            self.maps(&format!("{from} with O_RDWR set"), fd);
        }
        if !reopen {
            return;
        }
        // Its owner may do that without a gain; the mode is restored, which the test's end checks.
        let opened_up = rustix::fs::fchmod(fd, rustix::fs::Mode::from_raw_mode(0o666)).is_ok();
        self.note(from, "changes the mode", opened_up && !self.owns(fd));
        // SAFETY: as above.
        let given = done(unsafe { libc::fchown(raw, libc::getuid(), libc::getgid()) }.into());
        self.note(from, "changes the owner", given && !self.owns(fd));
        let pid = std::process::id();
        for name in [
            format!("/proc/self/fd/{raw}"),
            format!("/proc/thread-self/fd/{raw}"),
            format!("/proc/{pid}/fd/{raw}"),
            format!("/proc/{pid}/task/{pid}/fd/{raw}"),
            format!("/dev/fd/{raw}"),
        ] {
            self.open(from, &name);
        }
        self.links(from, fd);
        if opened_up {
            rustix::fs::fchmod(fd, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        }
    }

    fn owns(&self, fd: BorrowedFd<'_>) -> bool {
        rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw())
    }

    /// A name by which to open another descriptor.
    fn open(&mut self, from: &str, name: &str) {
        let path = CString::new(name).unwrap();
        for (mode, flags) in [
            ("for reading and writing", libc::O_RDWR),
            ("for writing", libc::O_WRONLY),
            ("truncating", libc::O_RDWR | libc::O_TRUNC),
        ] {
            // SAFETY: a C string; what is opened is owned below.
            let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC | libc::O_NONBLOCK) };
            self.tried += 1;
            if fd >= 0 {
                // SAFETY: just opened.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                self.descriptor(&format!("{from} reopened {mode} as {name}"), fd.as_fd(), false);
            }
        }
    }

    /// Names outside of /proc.
    fn links(&mut self, from: &str, fd: BorrowedFd<'_>) {
        let (raw, empty) = (fd.as_raw_fd(), CString::default());
        let name = CString::new(format!("/tmp/causeway-isolation-{}", std::process::id())).unwrap();
        // SAFETY: C strings.
        let linked =
            unsafe { libc::linkat(raw, empty.as_ptr(), libc::AT_FDCWD, name.as_ptr(), libc::AT_EMPTY_PATH) };
        self.note(from, "gets a name", done(linked.into()));
        // struct file_handle with room for 128 bytes
        let mut handle = [0_u32; 34];
        handle[0] = 128;
        let mut mount = 0;
        // SAFETY: the handle says how long it is, and both outlive the call.
        let made = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                raw,
                empty.as_ptr(),
                handle.as_mut_ptr(),
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        };
        if done(made) {
            // SAFETY: as above.
            let opened =
                unsafe { libc::syscall(libc::SYS_open_by_handle_at, raw, handle.as_mut_ptr(), libc::O_RDWR) };
            self.tried += 1;
            if done(opened) {
                // SAFETY: just opened.
                let opened = unsafe { OwnedFd::from_raw_fd(i32::try_from(opened).unwrap()) };
                self.descriptor(&format!("{from} reopened by handle"), opened.as_fd(), false);
            }
        } else {
            self.tried += 1;
        }
    }

    /// Writable mappings, and mappings made writable.
    fn maps(&mut self, from: &str, fd: BorrowedFd<'_>) {
        // A mapping of truncated memory (the control's) can't be accessed.
        let there = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size >= 4096);
        let map = |protection| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe {
                libc::mmap(std::ptr::null_mut(), page(), protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
            };
            (at != libc::MAP_FAILED).then_some(at)
        };
        let writable = map(libc::PROT_READ | libc::PROT_WRITE);
        if let Some(at) = writable.filter(|_| there) {
            // SAFETY: mapped for writing, one page.
            unsafe { at.cast::<u8>().write_volatile(1) };
        }
        self.note(from, "mapped for writing", writable.is_some());
        let Some(at) = map(libc::PROT_READ) else { return };
        // SAFETY: a page of our own mapping.
        let changed = unsafe { libc::mprotect(at, page(), libc::PROT_READ | libc::PROT_WRITE) };
        if changed == 0 && there {
            // SAFETY: writable now.
            unsafe { at.cast::<u8>().write_volatile(2) };
        }
        self.note(from, "mapped and made writable", changed == 0);
        if changed == 0 {
            return;
        }
        // SAFETY: our own mapping; the kernel writes it, or not.
        let removed = unsafe { libc::madvise(at, page(), libc::MADV_REMOVE) };
        self.note(from, "mapped and punched", removed == 0);
        let zeros = File::open("/dev/zero").unwrap();
        // SAFETY: the kernel checks the address.
        let read = unsafe { libc::read(zeros.as_raw_fd(), at, page()) };
        self.note(from, "mapped and read into", read > 0);
        let byte = [3_u8];
        let local = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: at, iov_len: 1 };
        // SAFETY: the kernel checks both.
        let written =
            unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        self.note(from, "mapped and written by process_vm_writev", written > 0);
        let memory = File::options().write(true).open("/proc/self/mem");
        let forced = memory.is_ok_and(|memory| memory.write_at(&byte, at.addr() as u64).is_ok());
        self.note(from, "mapped and forced through /proc/self/mem", forced);
        let range = format!("/proc/self/map_files/{:x}-{:x}", at.addr(), at.addr() + page());
        let through = File::options().read(true).write(true).open(range);
        self.note(
            from,
            "mapped and reopened in map_files",
            through.is_ok_and(|file| file.write_at(&byte, 0).is_ok()),
        );
    }

    /// Calls that write.
    fn writes(&mut self, from: &str, fd: BorrowedFd<'_>) {
        let raw = fd.as_raw_fd();
        let byte = [4_u8];
        self.note(from, "written", rustix::io::pwrite(fd, &byte, 0).is_ok());
        let vector = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
        // SAFETY: one byte that outlives the call.
        let written = unsafe { libc::pwritev2(raw, &raw const vector, 1, 0, libc::RWF_DSYNC) };
        self.note(from, "written by pwritev2", written > 0);
        let source = File::from(rustix::fs::memfd_create("source", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        source.write_all_at(&[5; 4096], 0).unwrap();
        let (mut to, mut at) = (0_i64, 0_i64);
        // SAFETY: offsets outlive the calls.
        let copied =
            unsafe { libc::copy_file_range(source.as_raw_fd(), &raw mut at, raw, &raw mut to, page(), 0) };
        self.note(from, "written by copy_file_range", copied > 0);
        // SAFETY: as above.
        let sent = unsafe { libc::sendfile(raw, source.as_raw_fd(), std::ptr::null_mut(), page()) };
        self.note(from, "written by sendfile", sent > 0);
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer, &byte).unwrap();
        // SAFETY: as above.
        let spliced =
            unsafe { libc::splice(reader.as_raw_fd(), std::ptr::null_mut(), raw, &raw mut to, 1, 0) };
        self.note(from, "written by splice", spliced > 0);
        for (how, mode) in [
            ("punched", libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            ("zeroed", libc::FALLOC_FL_ZERO_RANGE),
            ("collapsed", libc::FALLOC_FL_COLLAPSE_RANGE),
        ] {
            // SAFETY: a plain call.
            let done = unsafe { libc::fallocate(raw, mode, 0, 4096) };
            self.note(from, how, done == 0);
        }
        // SAFETY: a plain call.
        let shrunk = unsafe { libc::ftruncate(raw, 4096) };
        self.note(from, "shrunk", shrunk == 0);
    }

    /// The victim's process: its descriptors and its memory.
    fn process(&mut self, pid: i32) {
        for number in 0..256 {
            self.open("the victim's", &format!("/proc/{pid}/fd/{number}"));
        }
        let memory = File::options().write(true).open(format!("/proc/{pid}/mem"));
        self.note("the victim's", "memory opened", memory.is_ok());
        let maps = std::fs::read_dir(format!("/proc/{pid}/map_files"));
        self.note("the victim's", "mappings listed", maps.is_ok());
        let byte = [6_u8];
        let local = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
        // SAFETY: the kernel checks both; nothing is mapped at 0.
        let written = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
        let refused = written < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM);
        self.note("the victim's", "memory written", !refused);
        // SAFETY: plain calls.
        let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0_usize, 0_usize) };
        self.note("the victim's", "process traced", seized == 0);
        // SAFETY: plain calls.
        let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        for number in 0..64 {
            // SAFETY: plain calls.
            let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, handle, number, 0) };
            self.note("the victim's", "descriptor taken", done(taken));
        }
    }
}
