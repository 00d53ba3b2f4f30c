//! Guests of a few instructions under the shipped program, with interrupt controllers in the monitor: timers, interrupts between vCPUs,
//! start-up, NMI, pins, and random register writes.
#![allow(unsafe_code)] // The guests are in this program, as assembly.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

use crate::small_guests::{HANG_LIMIT, LOAD_ADDRESS, code, end, has_kvm, kernel64, run, run_within};

/// Rounds of interrupts between two halted vCPUs. The guest prints a line per thousand rounds.
const ROUNDS: usize = 10_000;

// 64-bit mode with memory below 4 GiB mapped one to one, as the Linux protocol starts a guest. The interrupt table is at 0x200000; vCPU 1
// starts in the page at 0x8000. Code and data are addressed by their load addresses.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".code64",
    ".macro print letter",
    "mov $0x3f8, %edx",
    "mov $\\letter, %al",
    "out %al, %dx",
    "mov $10, %al",
    "out %al, %dx",
    ".endm",
    // Clobbers eax, ecx, edx.
    ".macro write_msr number, low, high=0",
    "mov $\\number, %ecx",
    "mov $\\low, %eax",
    "mov $\\high, %edx",
    "wrmsr",
    ".endm",
    ".macro gate vector, handler",
    "mov $(\\handler - interrupt_guests + 0x100000), %eax",
    "mov %ax, 0x200000 + 16 * \\vector",
    "movw $0x10, 0x200002 + 16 * \\vector",
    "movw $0x8e00, 0x200004 + 16 * \\vector",
    "shr $16, %eax",
    "mov %ax, 0x200006 + 16 * \\vector",
    "movl $0, 0x200008 + 16 * \\vector",
    ".endm",
    ".macro load_table",
    "movw $0xfff, 0x1ff000",
    "movq $0x200000, 0x1ff002",
    "lidt 0x1ff000",
    ".endm",
    "interrupt_guests:",
    // Handles 100 interrupts of a one-shot timer and 100 of a periodic one, and halts in between.
    "guest_timers:",
    "load_table",
    "gate 0x41, counts",
    "write_msr 0x80f, 0x1ff",
    "write_msr 0x83e, 0xb",
    "write_msr 0x832, 0x41",
    "xor %ebx, %ebx",
    "1: write_msr 0x838, 300000",
    "mov $0x839, %ecx",
    "rdmsr",
    "cmp $300000, %eax",
    "ja 9f",
    "sti",
    "hlt",
    "cli",
    "cmp $100, %ebx",
    "jb 1b",
    "print 0x31",
    "write_msr 0x832, 0x20041",
    "write_msr 0x838, 300000",
    "2: sti",
    "hlt",
    "cli",
    "cmp $200, %ebx",
    "jb 2b",
    "write_msr 0x838, 0",
    "mov $0x839, %ecx",
    "rdmsr",
    "test %eax, %eax",
    "jnz 9f",
    "print 0x32",
    "3: hlt",
    "jmp 3b",
    "9: print 0x45",
    "jmp 3b",
    // Repeatedly sends itself an NMI, which counts by 1000, and an edge of COM1's pin through a level-triggered entry. Each interrupt
    // must be ended.
    "guest_nmi_and_pin:",
    "load_table",
    "gate 2, takes_nmi",
    "gate 0x44, counts",
    "write_msr 0x80f, 0x1ff",
    "xor %ebx, %ebx",
    "write_msr 0x830, 0x400",
    "1: cmp $1000, %ebx",
    "jne 1b",
    "print 0x4e",
    // Pin 4: vector 0x44, level-triggered, to APIC 0.
    "xor %ebx, %ebx",
    "mov $0xfec00000, %esi",
    "movl $0x19, (%rsi)",
    "movl $0, 0x10(%rsi)",
    "movl $0x18, (%rsi)",
    "movl $0x8044, 0x10(%rsi)",
    "mov $0x3fc, %edx",
    "mov $8, %al",
    "out %al, %dx",
    // The transmitter is empty: an edge each time that its interrupt is acknowledged and enabled again.
    "2: mov $0x3fa, %edx",
    "in %dx, %al",
    "mov $0x3f9, %edx",
    "mov $2, %al",
    "out %al, %dx",
    "sti",
    "hlt",
    "cli",
    "cmp $50, %ebx",
    "jb 2b",
    "print 0x50",
    "3: hlt",
    "jmp 3b",
    // Starts vCPU 1 and sends it interrupts; vCPU 1 answers each with one. Both halt in between.
    "guest_pair:",
    "load_table",
    "gate 0x41, counts",
    "gate 0x42, answers",
    "write_msr 0x80f, 0x1ff",
    // Copies the start code of vCPU 1 to 0x8000.
    "mov $(starts - interrupt_guests + 0x100000), %esi",
    "mov $0x8000, %edi",
    "mov $256, %ecx",
    "rep movsb",
    "write_msr 0x830, 0xc500, 1",
    "write_msr 0x830, 0x4608, 1",
    // A second one has no effect.
    "write_msr 0x830, 0x4609, 1",
    "1: pause",
    "cmpl $1, 0x1fe000",
    "jne 1b",
    "print 0x41",
    "xor %ebx, %ebx",
    "xor %r12d, %r12d",
    "2: mov %ebx, %r13d",
    "write_msr 0x830, 0x42, 1",
    "4: cli",
    "cmp %ebx, %r13d",
    "jne 5f",
    "sti",
    "hlt",
    "jmp 4b",
    "5: inc %r12d",
    "cmp $1000, %r12d",
    "jb 2b",
    "xor %r12d, %r12d",
    "print 0x2e",
    "jmp 2b",
    // Prints a line per 20 interrupts of a periodic timer.
    "guest_ticks:",
    "load_table",
    "gate 0x41, counts",
    "write_msr 0x80f, 0x1ff",
    "write_msr 0x83e, 0xb",
    "write_msr 0x832, 0x20041",
    "write_msr 0x838, 2000000",
    "1: xor %ebx, %ebx",
    "2: sti",
    "hlt",
    "cli",
    "cmp $20, %ebx",
    "jb 2b",
    "print 0x74",
    "jmp 1b",
    // Both vCPUs write and read random registers, without INIT and SMI; a handler skips each refused access. vCPU 0 prints at intervals.
    "guest_random:",
    "load_table",
    "mov $(skips - interrupt_guests + 0x100000), %esi",
    // All vectors count as delivered and are ended. Vector 13 skips the instruction; other exceptions with an error code don't occur.
    "xor %r12d, %r12d",
    "1: mov $(ends - interrupt_guests + 0x100000), %eax",
    "cmp $13, %r12d",
    "cmove %esi, %eax",
    "mov %r12, %rdx",
    "shl $4, %rdx",
    "mov %ax, 0x200000(%rdx)",
    "movw $0x10, 0x200002(%rdx)",
    "movw $0x8e00, 0x200004(%rdx)",
    "shr $16, %eax",
    "mov %ax, 0x200006(%rdx)",
    "movl $0, 0x200008(%rdx)",
    "inc %r12d",
    "cmp $256, %r12d",
    "jb 1b",
    "mov $(starts - interrupt_guests + 0x100000), %esi",
    "mov $0x8000, %edi",
    "mov $256, %ecx",
    "rep movsb",
    // vCPU 1 continues at 0x8000 + its code, which reads its next address here.
    "movl $(random - interrupt_guests + 0x100000), 0x1fe008",
    "write_msr 0x830, 0xc500, 1",
    "write_msr 0x830, 0x4608, 1",
    "mov $0x12345678, %r14d",
    "random:",
    "xor %r15d, %r15d",
    "sti",
    "2: mov %r14, %rax",
    "shl $13, %rax",
    "xor %rax, %r14",
    "mov %r14, %rax",
    "shr $7, %rax",
    "xor %rax, %r14",
    "mov %r14, %rax",
    "shl $17, %rax",
    "xor %rax, %r14",
    "mov %r14d, %ecx",
    "and $0x3f, %ecx",
    "or $0x800, %ecx",
    "mov %r14, %rax",
    "shr $20, %rax",
    // Half of all values are small, because most large ones are refused.
    "test $0x40, %r14d",
    "jz 3f",
    "and $0x1ffff, %eax",
    "3: mov %r14, %rdx",
    "shr $62, %rdx",
    "test $0x80, %r14d",
    "jz 4f",
    "xor %edx, %edx",
    "4: cmp $0x830, %ecx",
    "jne 5f",
    // INIT would stop the vCPU until a start-up IPI.
    "and $~0x600, %eax",
    "5: test $0x300, %r14d",
    "jz 6f",
    "wrmsr",
    "jmp 7f",
    "6: rdmsr",
    "7: sti",
    "inc %r15d",
    "test $0x3ff, %r15d",
    "jnz 2b",
    "cmp $0, %rbp",
    "jne 2b",
    "print 0x2b",
    "jmp 2b",
    // Handlers.
    "counts:",
    "inc %ebx",
    "ends:",
    "push %rax",
    "push %rcx",
    "push %rdx",
    "write_msr 0x80b, 0",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "iretq",
    "answers:",
    "push %rax",
    "push %rcx",
    "push %rdx",
    "write_msr 0x80b, 0",
    "write_msr 0x830, 0x41",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "iretq",
    "takes_nmi:",
    "add $1000, %ebx",
    "iretq",
    "skips:",
    "add $8, %rsp",
    "addq $2, (%rsp)",
    "iretq",
    // vCPU 1, from real mode at 0x8000 to 64-bit mode.
    ".code16",
    "starts:",
    "cli",
    "xor %ax, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "lgdtl 0x8000 + (starts_table - starts)",
    "mov $0x20, %eax",
    "mov %eax, %cr4",
    "mov $0x9000, %eax",
    "mov %eax, %cr3",
    "mov $0xc0000080, %ecx",
    "mov $0x100, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0x80000011, %eax",
    "mov %eax, %cr0",
    "ljmpl $0x10, $(0x8000 + (starts_long - starts))",
    ".balign 8",
    "starts_table:",
    ".word 0x2f",
    ".long 0x500",
    ".code64",
    "starts_long:",
    "mov $0x18, %eax",
    "mov %eax, %ds",
    "mov %eax, %es",
    "mov %eax, %ss",
    "mov $0x1f0000, %esp",
    "lidt 0x1ff000",
    "write_msr 0x80f, 0x1ff",
    "mov $1, %ebp",
    "mov $0x9abcdef, %r14d",
    "movl $1, 0x1fe000",
    "mov 0x1fe008, %eax",
    "test %eax, %eax",
    "jz 1f",
    "jmp *%rax",
    "1: sti",
    "hlt",
    "jmp 1b",
    "interrupt_guests_end:",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static interrupt_guests: u8;
    static interrupt_guests_end: u8;
    static guest_timers: u8;
    static guest_nmi_and_pin: u8;
    static guest_pair: u8;
    static guest_random: u8;
    static guest_ticks: u8;
}

/// Starts a guest at `entry`; returns its monitor and its console.
fn start(directory: &Path, cpus: &str, entry: &'static u8) -> (Child, BufReader<ChildStdout>) {
    start_with(directory, entry, &["--interrupts", "monitor", "--cpus", cpus])
}

fn start_with(directory: &Path, entry: &'static u8, options: &[&str]) -> (Child, BufReader<ChildStdout>) {
    // SAFETY: the labels are data of this program.
    let (all, begin) =
        unsafe { (code(&interrupt_guests, &interrupt_guests_end), &raw const interrupt_guests) };
    let entry = LOAD_ADDRESS + u32::try_from((&raw const *entry).addr() - begin.addr()).unwrap();
    let kernel = kernel64(directory, all, entry);
    // Ten thousand rounds need more than one time limit.
    let mut command = run_within(10 * HANG_LIMIT, directory, options);
    command.args(["--console", "stdio", "--on-reboot", "stop", "--kernel"]).arg(kernel);
    let mut vm = command.spawn().unwrap();
    let console = BufReader::new(vm.stdout.take().unwrap());
    (vm, console)
}

/// The next line; empty where the VM has ended, as `timeout` makes it when it hangs.
fn line(console: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    console.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn end_well(vm: Child) {
    let (status, log) = end(vm);
    assert!(status.success() && !log.contains("panicked"), "{status}: {log}");
}

#[test]
fn timers_interrupt_once_and_again_and_again() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the label is data of this program.
    let (vm, mut console) = start(directory.path(), "1", unsafe { &guest_timers });
    let lines = [line(&mut console), line(&mut console)];
    assert_eq!(lines, ["1", "2"], "one-shot and periodic");
    end_well(vm);
}

#[test]
fn nmis_and_pins_interrupt() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the label is data of this program.
    let (vm, mut console) = start(directory.path(), "1", unsafe { &guest_nmi_and_pin });
    let lines = [line(&mut console), line(&mut console)];
    assert_eq!(lines, ["N", "P"], "NMI and pin");
    end_well(vm);
}

/// INIT and start-up of a second vCPU, then two interrupts per round that wake a halted vCPU. A lost interrupt would be a hang.
#[test]
fn halted_vcpus_lose_no_interrupt_of_each_other() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the label is data of this program.
    let (vm, mut console) = start(directory.path(), "2", unsafe { &guest_pair });
    assert_eq!(line(&mut console), "A", "vCPU 1 runs");
    for round in 0..ROUNDS / 1000 {
        assert_eq!(line(&mut console), ".", "after {round} thousand rounds");
    }
    end_well(vm);
}

#[test]
fn registers_written_at_random_stop_neither_guest_nor_monitor() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // SAFETY: the label is data of this program.
    let (vm, mut console) = start(directory.path(), "2", unsafe { &guest_random });
    for round in 0..10 {
        assert_eq!(line(&mut console), "+", "after {round} thousand accesses");
    }
    end_well(vm);
}

/// Migrates the VM of `directory`, once a monitor listens there. Returns whether it succeeded, and the command's message.
fn migrate(directory: &Path, to: &str) -> (bool, String) {
    let begin = Instant::now();
    loop {
        let output = Command::new(env!("CARGO_BIN_EXE_causeway"))
            .args(["migrate", "small", "--to", to])
            .env("XDG_RUNTIME_DIR", directory)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || !text.contains("onnection refused") || begin.elapsed() > HANG_LIMIT {
            return (output.status.success(), text);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The timer keeps running at the destination. A destination with controllers in the kernel refuses the VM with that reason, and the VM
/// stays at its source.
#[test]
fn a_vm_migrates_to_its_own_kind() {
    if !has_kvm() {
        return;
    }
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [source, other, destination] = directories.each_ref().map(|directory| directory.path());
    // SAFETY: the label is data of this program.
    let entry = unsafe { &guest_ticks };
    let (vm, mut console) = start(source, "1", entry);
    assert_eq!([line(&mut console), line(&mut console)], ["t", "t"]);

    let address = facilities::ports::loopback().to_string();
    let (waiting, _) = start_with(other, entry, &["--cpus", "1", "--incoming", &address]);
    let (moved, text) = migrate(source, &address);
    assert!(!moved && text.contains("its interrupt controllers are in the monitor"), "{text}");
    end(waiting);
    assert_eq!([line(&mut console), line(&mut console)], ["t", "t"]);

    let address = facilities::ports::loopback().to_string();
    let options = ["--interrupts", "monitor", "--cpus", "1", "--incoming", &address];
    let (waiting, mut its_console) = start_with(destination, entry, &options);
    let (moved, text) = migrate(source, &address);
    assert!(moved, "{text}");
    assert!(vm.wait_with_output().unwrap().status.success());
    assert_eq!([line(&mut its_console), line(&mut its_console)], ["t", "t"]);
    end_well(waiting);
}

/// Without local APICs there is nothing to place, and no third place exists.
#[test]
fn what_can_not_be_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (arguments, sentence) in [
        (vec!["--interrupts", "nowhere", "--kernel", "k"], "allowed: kernel, monitor"),
        (vec!["--interrupts", "monitor", "--payload", "p"], "cannot be used with"),
    ] {
        let output = run(directory.path(), &arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(sentence), "{error}");
    }
    std::fs::write(directory.path().join("p.toml"), "interrupts = \"monitor\"\n[payload]\nprogram = \"p\"\n")
        .unwrap();
    let output = run(directory.path(), &["p.toml"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("interrupts: a payload has no interrupt controllers"), "{error}");
}
