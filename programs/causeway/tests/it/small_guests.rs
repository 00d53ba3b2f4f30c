//! Guests of a few instructions under the shipped program: the behaviour of a VM whose guest or device fails.
#![allow(unsafe_code)] // The guests are in this program, as assembly.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit, after which a step counts as hung.
pub const HANG_LIMIT: Duration = Duration::from_secs(60);
/// Load address and entry point of a guest.
pub const LOAD_ADDRESS: u32 = 0x10_0000;
/// Its offset in the file.
const FILE_OFFSET: u64 = 0x1000;

// 32-bit protected mode without paging, the start state of PVH. The code is position-independent.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".code32",
    // Resets at once through the keyboard controller.
    "resets_at_once:",
    "mov $0xfe, %al",
    "out %al, $0x64",
    "1: hlt",
    "jmp 1b",
    "resets_at_once_end:",
    // Prints the letter x endlessly.
    "prints_much:",
    "mov $0x3f8, %dx",
    "mov $0x78, %al",
    "1: out %al, %dx",
    "jmp 1b",
    "prints_much_end:",
    // Starts the virtio device in slot 1 with its first queue, through the window in its configuration space. Prints N
    // when the device needs a reset.
    "starts_a_device:",
    "mov $0xe0008000, %ebx",
    "movzbl 0x34(%ebx), %esi",
    // The vendor-specific capability (9) of type 5.
    "1: cmpb $9, (%ebx,%esi)",
    "jne 2f",
    "cmpb $5, 3(%ebx,%esi)",
    "je 3f",
    "2: movzbl 1(%ebx,%esi), %esi",
    "jmp 1b",
    "3: add %ebx, %esi",
    // BAR 0 of the function: offset at 8, length at 12, data at 16.
    "movb $0, 4(%esi)",
    ".macro register offset, length, suffix, value",
    "movl $\\offset, 8(%esi)",
    "movl $\\length, 12(%esi)",
    "mov\\suffix $\\value, 16(%esi)",
    ".endm",
    "register 0x14, 1, b, 0",
    "register 0x14, 1, b, 1",
    "register 0x14, 1, b, 3",
    // VIRTIO_F_VERSION_1.
    "register 0x08, 4, l, 1",
    "register 0x0c, 4, l, 1",
    "register 0x14, 1, b, 11",
    "register 0x16, 2, w, 0",
    "register 0x20, 4, l, 0x200000",
    "register 0x24, 4, l, 0",
    "register 0x28, 4, l, 0x210000",
    "register 0x2c, 4, l, 0",
    "register 0x30, 4, l, 0x220000",
    "register 0x34, 4, l, 0",
    "register 0x1c, 2, w, 1",
    "register 0x14, 1, b, 15",
    "movl $0x14, 8(%esi)",
    "movl $1, 12(%esi)",
    "4: movb 16(%esi), %al",
    "test $0x40, %al",
    "jz 4b",
    "mov $0x3f8, %dx",
    "mov $0x4e, %al",
    "out %al, %dx",
    "mov $10, %al",
    "out %al, %dx",
    "5: hlt",
    "jmp 5b",
    "starts_a_device_end:",
    ".code64",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static resets_at_once: u8;
    static resets_at_once_end: u8;
    static prints_much: u8;
    static prints_much_end: u8;
    static starts_a_device: u8;
    static starts_a_device_end: u8;
}

/// Returns the bytes between two labels.
pub fn code(begin: &'static u8, end: &'static u8) -> &'static [u8] {
    let (begin, end) = (&raw const *begin, &raw const *end);
    // SAFETY: both labels are in the assembly above, the second behind the first, in data that never changes.
    unsafe { std::slice::from_raw_parts(begin, end.addr() - begin.addr()) }
}

/// A vmlinux of these instructions: ELF with a PVH note, which starts in 32-bit mode.
pub fn kernel(directory: &Path, code: &[u8]) -> PathBuf {
    elf(directory, code, LOAD_ADDRESS, 2)
}

/// A vmlinux without the note, which starts in 64-bit mode at `entry`.
pub fn kernel64(directory: &Path, code: &[u8], entry: u32) -> PathBuf {
    elf(directory, code, entry, 1)
}

/// An ELF file whose first `headers` program headers are a segment to load and a PVH note.
fn elf(directory: &Path, code: &[u8], entry: u32, headers: u8) -> PathBuf {
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // Executable for x86-64, version 1, entry, program headers at 64.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend(u64::from(entry).to_le_bytes());
    file.extend(64u64.to_le_bytes());
    file.extend([0; 12]);
    file.extend([64, 0, 56, 0, headers, 0, 0, 0, 0, 0, 0, 0]);
    let mut header = |kind: u32, offset: u64, address: u64, len: u64| {
        file.extend(kind.to_le_bytes());
        file.extend(5u32.to_le_bytes());
        for field in [offset, address, address, len, len, 4] {
            file.extend(field.to_le_bytes());
        }
    };
    header(1, FILE_OFFSET, LOAD_ADDRESS.into(), code.len() as u64);
    header(4, 0x200, 0, 20);
    file.resize(0x200, 0);
    // XEN_ELFNOTE_PHYS32_ENTRY: lengths of name and description, type, "Xen", entry.
    for word in [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), LOAD_ADDRESS] {
        file.extend(word.to_le_bytes());
    }
    file.resize(usize::try_from(FILE_OFFSET).unwrap(), 0);
    file.extend(code);
    let path = directory.join("guest.elf");
    std::fs::write(&path, file).unwrap();
    path
}

pub fn has_kvm() -> bool {
    let there = Path::new("/dev/kvm").exists();
    if !there {
        facilities::missing(facilities::Facility::Kvm, "small guests need /dev/kvm");
    }
    there
}

/// `causeway run` in a directory of its own. `timeout` forwards signals, and ends a hung program.
pub fn run(directory: &Path, arguments: &[&str]) -> Command {
    run_within(HANG_LIMIT, directory, arguments)
}

/// `causeway run` with another time limit.
pub fn run_within(limit: Duration, directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["--signal=KILL", &limit.as_secs().to_string(), env!("CARGO_BIN_EXE_causeway")])
        .args(["--log-level", "info", "run", "--name", "small", "--memory", "64M", "--rng=off"])
        .args(arguments)
        .current_dir(directory)
        .env("XDG_RUNTIME_DIR", directory)
        .env_remove("RUST_LOG")
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Ends the VM by a signal. Returns its status and its remaining log.
pub fn end(mut vm: Child) -> (ExitStatus, String) {
    kill_process(Pid::from_child(&vm), Signal::TERM).unwrap();
    let mut log = String::new();
    vm.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    (vm.wait().unwrap(), log)
}

/// A guest that resets at once is restarted with back-off. A signal ends the VM during the wait.
#[test]
fn a_guest_that_resets_at_once_is_delayed() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(directory.path(), unsafe { code(&resets_at_once, &resets_at_once_end) });
    let mut vm = run(directory.path(), &["--console", "null", "--kernel"]).arg(guest).spawn().unwrap();
    let mut log = BufReader::new(vm.stderr.take().unwrap());
    let mut delays = Vec::new();
    while delays.len() < 4 {
        let mut line = String::new();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "the VM has ended");
        if line.contains("resetting the machine") {
            let (_, delay) = line.split_once("delay_ms=").unwrap_or_else(|| panic!("no delay in {line}"));
            delays.push(delay.split_whitespace().next().unwrap().parse::<u64>().unwrap());
        }
    }
    assert_eq!(delays, [100, 200, 400, 800]);
    vm.stderr = Some(log.into_inner());
    let (status, log) = end(vm);
    assert!(status.success(), "{status}: {log}");
}

/// The starter of a VM may have set a low soft limit of open files. The program raises it to the hard limit.
#[test]
fn a_low_soft_limit_of_open_files_is_raised() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(directory.path(), unsafe { code(&resets_at_once, &resets_at_once_end) });
    let vm = run(directory.path(), &["--console", "null", "--on-reboot", "stop", "--kernel"]);
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=16:4096").arg(vm.get_program()).args(vm.get_args()).arg(guest);
    limited.current_dir(directory.path()).env("XDG_RUNTIME_DIR", directory.path()).stdin(Stdio::null());
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Within the sandbox, too, a console's file restarts at its limit, and the older file has the earlier content.
#[test]
fn a_console_file_begins_anew_in_the_sandbox() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(directory.path(), unsafe { code(&prints_much, &prints_much_end) });
    let mut vm =
        run(directory.path(), &["--console", "file:console.log", "--console-limit", "64K", "--kernel"])
            .arg(guest)
            .spawn()
            .unwrap();
    let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap_or_default();
    let begin = Instant::now();
    while read("console.log.1").is_empty() {
        assert!(begin.elapsed() < HANG_LIMIT, "{} bytes", read("console.log").len());
        assert_eq!(vm.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (status, log) = end(vm);
    assert!(status.success(), "{status}: {log}");
    for content in [read("console.log.1"), read("console.log")] {
        assert!(!content.is_empty() && content.len() <= 64 << 10, "{} bytes", content.len());
        assert!(content.iter().all(|byte| *byte == b'x'));
    }
}

/// If a library panics on a hostile image, the program reports an error about the image. It doesn't end by a panic.
#[test]
fn an_image_that_makes_its_library_panic_is_refused() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(directory.path(), unsafe { code(&resets_at_once, &resets_at_once_end) });
    // qcow2 version 3 with a feature name table of one byte: the library slices beyond its end.
    let image = std::fs::File::create(directory.path().join("hostile.qcow2")).unwrap();
    image.set_len(1 << 20).unwrap();
    let mut header = b"QFI\xfb".to_vec();
    let fields: [(usize, u32); 10] = [
        (4, 3),
        (20, 16),
        (28, 1 << 20),
        (36, 1),
        (44, 3 << 16),
        (52, 1 << 16),
        (56, 1),
        (96, 4),
        (100, 104),
        (104, 0x6803_f857),
    ];
    header.resize(112, 0);
    for (at, value) in fields {
        header[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    header[108..].copy_from_slice(&1u32.to_be_bytes());
    image.write_all_at(&header, 0).unwrap();
    let output =
        run(directory.path(), &["--console", "null", "--disk", "hostile.qcow2,readonly", "--kernel"])
            .arg(guest)
            .output()
            .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("hostile.qcow2 is damaged") && error.contains("library panicked"), "{error}");
}

/// A device whose thread panics needs a reset by its driver. The guest sees that, and the VM continues. Only builds
/// with debug assertions panic on request.
#[cfg(debug_assertions)]
#[test]
fn a_device_whose_thread_panics_fails_alone() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the labels are data of this program.
    let guest = kernel(directory.path(), unsafe { code(&starts_a_device, &starts_a_device_end) });
    std::fs::File::create(directory.path().join("disk.raw")).unwrap().set_len(1 << 20).unwrap();
    let mut vm = run(directory.path(), &["--console", "stdio", "--disk", "disk.raw", "--kernel"])
        .arg(guest)
        .env("CAUSEWAY_TEST_CONTAINED_PANIC", "disk0-q0")
        .spawn()
        .unwrap();
    let mut console = BufReader::new(vm.stdout.take().unwrap());
    let mut line = String::new();
    console.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), "N", "{:?}", vm.try_wait());
    let (status, log) = end(vm);
    assert!(status.success(), "{status}: {log}");
    assert!(log.contains("thread disk0-q0 panicked at") && log.contains("a test asks for it"), "{log}");
    assert!(log.contains("Device disk0 has failed and needs a reset"), "{log}");
}
