//! A VM without RDMA NICs whose migration loses its connection at the commit point, and the commands of
//! `docs/how-to/operate-migrations.md` that end the doubt.
//!
//! ```text
//! source ── relay ── destination      the relay closes both connections in place of one frame
//! ```
#![allow(unsafe_code)] // The guest is in this program, as assembly.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output};
use std::time::{Duration, Instant};

use crate::moved_guests::wait_for;
use crate::small_guests::{HANG_LIMIT, code, end, has_kvm, kernel, run_within};

/// Time limit of a VM: a migration, and a step.
const VM_LIMIT: Duration = Duration::from_secs(180);
/// Bytes of a frame before its payload (`monitor::migration::frame`).
const FRAME_HEADER_BYTES: usize = 16;
/// The commit, from the source.
const GO: u16 = 9;
/// The destination's answer.
const RUNNING: u16 = 10;

// 32-bit protected mode without paging, as PVH starts a guest. The code is position-independent.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".code32",
    // Prints the letter T endlessly, with pauses.
    "prints_slowly:",
    "mov $0x3f8, %dx",
    "mov $0x54, %al",
    "1: out %al, %dx",
    "mov $2000, %ecx",
    "2: loop 2b",
    "jmp 1b",
    "prints_slowly_end:",
    ".code64",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static prints_slowly: u8;
    static prints_slowly_end: u8;
}

/// Copies frames until one of kind `lost`, which isn't delivered, or until the end.
fn copy_frames(mut from: &TcpStream, mut to: &TcpStream, lost: u16) -> io::Result<()> {
    loop {
        let mut header = [0; FRAME_HEADER_BYTES];
        from.read_exact(&mut header)?;
        if u16::from_le_bytes([header[0], header[1]]) == lost {
            return Ok(());
        }
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        to.write_all(&header)?;
        io::copy(&mut from.take(length.into()), &mut to)?;
    }
}

/// Relays one migration with one stream to `destination`. Closes the connections in place of the frame `lost`.
fn relay(destination: SocketAddr, lost: u16) -> SocketAddr {
    let listener = TcpListener::bind(facilities::ports::loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (source, _) = listener.accept().unwrap();
        let destination = TcpStream::connect(destination).unwrap();
        let both = [(&source, &destination), (&destination, &source)];
        std::thread::scope(|scope| {
            for (from, to) in both {
                scope.spawn(move || {
                    // The end of the other direction closes this one.
                    let _ = copy_frames(from, to, lost);
                    for side in [from, to] {
                        let _ = side.shutdown(Shutdown::Both);
                    }
                });
            }
        });
    });
    address
}

/// A monitor with its runtime directory.
struct Monitor {
    directory: tempfile::TempDir,
    vm: Child,
    log: BufReader<ChildStderr>,
}

impl Monitor {
    fn start(guest: &Path, more: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = run_within(VM_LIMIT, directory.path(), &["--console", "file:console", "--kernel"]);
        let mut vm = command.arg(guest).args(more).spawn().unwrap();
        let log = BufReader::new(vm.stderr.take().unwrap());
        Self { directory, vm, log }
    }

    fn causeway(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_causeway"))
            .args(arguments)
            .env("XDG_RUNTIME_DIR", self.directory.path())
            .output()
            .unwrap()
    }

    /// Executes a command that succeeds; returns its output.
    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.causeway(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Executes a command that is refused; returns the sentence.
    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.causeway(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn printed(&self) -> usize {
        std::fs::read(self.directory.path().join("console")).unwrap_or_default().len()
    }

    /// Waits until the guest prints.
    fn wait_for_print(&self) {
        let (begin, before) = (Instant::now(), self.printed());
        while self.printed() == before {
            assert!(begin.elapsed() < HANG_LIMIT, "the guest prints nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(mut self) {
        self.vm.stderr = Some(self.log.into_inner());
        let (status, log) = end(self.vm);
        assert!(status.success(), "{status}: {log}");
    }

    /// Waits until the monitor has ended, with or without an error.
    fn wait_for_end(mut self) {
        let mut log = String::new();
        self.log.read_to_string(&mut log).unwrap();
        let status = self.vm.wait().unwrap();
        // 137: killed at the time limit.
        assert_ne!(status.code(), Some(137), "{log}");
    }
}

/// Migrates a VM whose connection breaks in place of a frame. Returns the source in doubt, and the destination.
fn doubtful_migration(lost: u16) -> (Monitor, Monitor) {
    let guests = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(guests.path(), unsafe { code(&prints_slowly, &prints_slowly_end) });
    let source = Monitor::start(&guest, &[]);
    source.wait_for_print();
    let address = facilities::ports::loopback();
    let mut destination = Monitor::start(&guest, &["--incoming", &address.to_string()]);
    wait_for(&mut destination.log, &["Waiting for a VM"]);
    let to = relay(address, lost).to_string();
    let error = source.refused(&["migrate", "small", "--to", &to, "--streams", "1"]);
    assert!(error.contains("doubt"), "{error}");
    assert!(source.succeed(&["list"]).contains("in-doubt"));
    let error = source.refused(&["resume", "small"]);
    assert!(error.contains("check the destination") && error.contains("resume --force"), "{error}");
    (source, destination)
}

/// The commit doesn't reach the destination, which ends. The operator sees that, and resumes the VM at the source.
#[test]
fn a_vm_whose_commit_was_lost_is_resumed_by_force() {
    if !has_kvm() {
        return;
    }
    let (source, destination) = doubtful_migration(GO);
    assert_eq!(destination.printed(), 0);
    destination.wait_for_end();
    let before = source.printed();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(source.printed(), before, "a VM in doubt ran");
    source.succeed(&["resume", "small", "--force"]);
    source.wait_for_print();
    assert!(source.succeed(&["list"]).contains("running"));
    source.end();
}

/// The destination runs the VM, and its answer doesn't reach the source. The operator sees that, and ends the VM at the source.
#[test]
fn a_vm_whose_destination_runs_is_ended_at_its_source_by_force() {
    if !has_kvm() {
        return;
    }
    let (source, destination) = doubtful_migration(RUNNING);
    destination.wait_for_print();
    assert!(destination.succeed(&["list"]).contains("running"));
    let before = source.printed();
    source.succeed(&["stop", "small", "--force"]);
    assert_eq!(source.printed(), before, "a VM in doubt ran");
    source.wait_for_end();
    destination.wait_for_print();
    destination.end();
}
