//! Guests of a few instructions that migrate between two monitors of the shipped program.
#![allow(unsafe_code)] // The guests are in this program, as assembly.

use std::io::{BufRead as _, BufReader};
use std::process::{ChildStderr, Command};
use std::time::{Duration, Instant};

use crate::small_guests::{HANG_LIMIT, code, end, has_kvm, kernel, run};

// 32-bit protected mode without paging, as PVH starts a guest. The code is position-independent.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".code32",
    // Prints the letter B, and resets through the keyboard controller.
    "boots_and_resets:",
    "mov $0x3f8, %dx",
    "mov $0x42, %al",
    "out %al, %dx",
    "mov $10, %al",
    "out %al, %dx",
    "mov $0xfe, %al",
    "out %al, $0x64",
    "1: hlt",
    "jmp 1b",
    "boots_and_resets_end:",
    ".code64",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static boots_and_resets: u8;
    static boots_and_resets_end: u8;
}

/// Reads a log until a line has all of these words.
pub fn wait_for(log: &mut BufReader<ChildStderr>, words: &[&str]) {
    let mut all = String::new();
    loop {
        let mut line = String::new();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "the VM has ended, without {words:?}: {all}");
        if words.iter().all(|word| line.contains(word)) {
            return;
        }
        all.push_str(&line);
    }
}

/// A guest with a pending reset whose VM migrates is reset at the destination. (The source once dropped the request, and the guest waited
/// forever.)
#[test]
fn a_guest_that_waits_for_its_reset_gets_it_where_it_moves_to() {
    if !has_kvm() {
        return;
    }
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    // SAFETY: the labels are data of this program.
    let guest = kernel(here.path(), unsafe { code(&boots_and_resets, &boots_and_resets_end) });
    let start = |directory: &tempfile::TempDir, more: &[&str]| {
        let mut command = run(directory.path(), &["--console", "file:console", "--kernel"]);
        let mut vm = command.arg(&guest).args(more).spawn().unwrap();
        let log = BufReader::new(vm.stderr.take().unwrap());
        (vm, log)
    };
    let (mut source, mut source_log) = start(&here, &[]);
    let address = facilities::ports::loopback();
    let (mut destination, mut log) = start(&there, &["--incoming", &address.to_string()]);
    wait_for(&mut log, &["Waiting for a VM"]);
    // The reset is delayed by almost a second, and a boot is short: the VM migrates during the delay.
    wait_for(&mut source_log, &["resetting the machine", "delay_ms=800"]);
    let moved = Command::new(env!("CARGO_BIN_EXE_causeway"))
        .args(["migrate", "small", "--to", &address.to_string()])
        .env("XDG_RUNTIME_DIR", here.path())
        .output()
        .unwrap();
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    source.stderr = Some(source_log.into_inner());
    let status = source.wait().unwrap();
    assert!(status.success(), "{status}");
    wait_for(&mut log, &["The VM has arrived"]);
    // First the request from the source, then a request made at the destination.
    wait_for(&mut log, &["resetting the machine", "delay_ms=100"]);
    wait_for(&mut log, &["resetting the machine", "delay_ms=200"]);
    // The console's own thread writes the file.
    let begin = Instant::now();
    while !std::fs::read_to_string(there.path().join("console")).unwrap_or_default().contains('B') {
        assert!(begin.elapsed() < HANG_LIMIT, "the guest has printed nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    destination.stderr = Some(log.into_inner());
    let (status, log) = end(destination);
    assert!(status.success(), "{status}: {log}");
}
