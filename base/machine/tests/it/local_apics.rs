//! vCPUs whose local APICs are outside KVM, on real KVM: small ring-0 guests, and APICs that follow a script.
#![allow(unsafe_code)] // The guests are in this program, as assembly.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use machine::irqchip::{IrqchipOptions, KernelIrqchip};
use machine::local_apic::{ApicEvent, LocalApics};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace};
use machine::vcpu::{StartRegisters, VcpuError, VcpuEvent, VcpuKicks, VcpuManager, VcpuOptions, VcpuStart};
use machine::x86::{kvm_dtable, kvm_regs, kvm_sregs};

use crate::common::{self, CODE, Guest, flat_segments, host, new_ram};

/// Time limit, after which a step counts as hung.
const HANG_LIMIT: Duration = Duration::from_secs(60);
const GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
/// Address of the guests' counter.
const COUNTER: u64 = 0x8000;
/// Page of the real-mode code.
const START_PAGE: u8 = 0x20;
const NMI: u8 = 2;
const GENERAL_PROTECTION: u8 = 13;
const VECTOR: u8 = 0x41;
const HALTED: u32 = 3;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".code64",
    "local_apic_guests:",
    // Reads 0x802 to rbx, writes 0x808, reads 0x1b to rsi, tries refused accesses (r8 counts their faults), and reads CR8 to r9.
    "accesses_msrs:",
    "mov $0x802, %ecx",
    "rdmsr",
    "mov %rax, %rbx",
    "mov $0x808, %ecx",
    "mov $0x50, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0x1b, %ecx",
    "rdmsr",
    "mov %rax, %rsi",
    "xor %r8d, %r8d",
    "mov $0x8ff, %ecx",
    "rdmsr",
    "wrmsr",
    "mov $0x1b, %ecx",
    "xor %eax, %eax",
    "wrmsr",
    // An MSR that neither a local APIC nor KVM has.
    "mov $0xc0011fff, %ecx",
    "wrmsr",
    "mov %cr8, %r9",
    "mov $3, %eax",
    "mov %rax, %cr8",
    "out %al, $0xf4",
    // Halts in a loop; interrupts increment the counter at 0x8000.
    "halts:",
    "sti",
    "1: hlt",
    "jmp 1b",
    // Loops forever, with interrupts disabled most of the time.
    "runs_closed:",
    "1: cli",
    "mov $20, %ecx",
    "2: dec %ecx",
    "jnz 2b",
    "sti",
    "nop",
    "nop",
    "jmp 1b",
    "counts:",
    "incq 0x8000",
    "iretq",
    "skips:",
    "inc %r8",
    "add $8, %rsp",
    "addq $2, (%rsp)",
    "iretq",
    "local_apic_guests_end:",
    ".code16",
    // Stores its page to 0x8100 and halts.
    "starts:",
    "mov %cs, %ax",
    "mov %ax, %ds:(0x8100)",
    "1: hlt",
    "jmp 1b",
    "starts_end:",
    ".code64",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static local_apic_guests: u8;
    static local_apic_guests_end: u8;
    static accesses_msrs: u8;
    static halts: u8;
    static runs_closed: u8;
    static counts: u8;
    static skips: u8;
    static starts: u8;
    static starts_end: u8;
}

fn bytes(begin: &'static u8, end: &'static u8) -> &'static [u8] {
    let (begin, end) = (&raw const *begin, &raw const *end);
    // SAFETY: both labels are in the assembly above, the second behind the first, in data that never changes.
    unsafe { std::slice::from_raw_parts(begin, end.addr() - begin.addr()) }
}

/// Guest address of a label in the 64-bit guests.
fn address(label: &'static u8) -> u64 {
    let begin = &raw const local_apic_guests;
    CODE + ((&raw const *label).addr() - begin.addr()) as u64
}

/// APICs that follow a script: vCPU 0 `script`, the others `others`.
#[derive(Default)]
struct Script {
    script: Mutex<VecDeque<ApicEvent>>,
    others: Mutex<VecDeque<ApicEvent>>,
    /// The other vCPUs wait for a start-up IPI.
    waits: AtomicBool,
    cr8: Mutex<u8>,
    written: Mutex<Vec<(u32, u64)>>,
    timer: Mutex<Option<Instant>>,
    kicks: OnceLock<VcpuKicks>,
}

impl Script {
    fn of(&self, vcpu: u32) -> &Mutex<VecDeque<ApicEvent>> {
        if vcpu == 0 { &self.script } else { &self.others }
    }

    fn send(&self, vcpu: u32, event: ApicEvent) {
        self.of(vcpu).lock().unwrap().push_back(event);
        self.kicks.get().unwrap().kick(vcpu);
    }

    fn is_done(&self, vcpu: u32) -> bool {
        self.of(vcpu).lock().unwrap().is_empty()
    }

    /// Adds the timer's interrupt once it is due.
    fn advance(&self, vcpu: u32) {
        let mut timer = self.timer.lock().unwrap();
        if vcpu == 0 && timer.is_some_and(|due| due <= Instant::now()) {
            *timer = None;
            self.script.lock().unwrap().push_back(ApicEvent::Interrupt { vector: VECTOR });
        }
    }
}

impl LocalApics for Script {
    fn connect(&self, kicks: VcpuKicks) {
        assert!(self.kicks.set(kicks).is_ok());
    }

    fn cr8(&self, _vcpu: u32) -> u8 {
        *self.cr8.lock().unwrap()
    }

    fn left_guest(&self, _vcpu: u32, cr8: u8) {
        *self.cr8.lock().unwrap() = cr8;
    }

    fn next_event(&self, vcpu: u32, interruptible: bool) -> ApicEvent {
        self.advance(vcpu);
        let mut script = self.of(vcpu).lock().unwrap();
        match script.front() {
            Some(ApicEvent::Interrupt { .. }) if !interruptible => ApicEvent::AwaitInterruptWindow,
            Some(_) => {
                let event = script.pop_front().unwrap();
                match event {
                    ApicEvent::Init => self.waits.store(true, Ordering::SeqCst),
                    ApicEvent::Startup { .. } => self.waits.store(false, Ordering::SeqCst),
                    _ => {}
                }
                event
            }
            None if vcpu != 0 && self.waits.load(Ordering::SeqCst) => ApicEvent::WaitForStartup,
            None => ApicEvent::None,
        }
    }

    fn has_event(&self, vcpu: u32, interruptible: bool) -> bool {
        self.advance(vcpu);
        let script = self.of(vcpu).lock().unwrap();
        script.front().is_some_and(|event| interruptible || !matches!(event, ApicEvent::Interrupt { .. }))
    }

    fn time_to_timer(&self, vcpu: u32) -> Option<Duration> {
        let due = self.timer.lock().unwrap().filter(|_| vcpu == 0)?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    fn read_msr(&self, _vcpu: u32, msr: u32) -> Option<u64> {
        match msr {
            0x1b => Some(0xfee0_0d00),
            0x802 => Some(0x1234),
            _ => None,
        }
    }

    fn write_msr(&self, _vcpu: u32, msr: u32, value: u64) -> bool {
        self.written.lock().unwrap().push((msr, value));
        msr == 0x808
    }
}

/// Ring 0 of long mode.
fn ring0(rip: u64) -> VcpuStart {
    let mut sregs = kvm_sregs {
        gdt: kvm_dtable { base: GDT, limit: 0x27, ..Default::default() },
        idt: kvm_dtable { base: IDT, limit: 0xFFF, ..Default::default() },
        cr0: 0x8005_0033,
        cr3: 0x1000,
        cr4: 0x620,
        efer: 0x500,
        ..Default::default()
    };
    flat_segments(&mut sregs, true);
    let regs = kvm_regs { rip, rsp: 0x9000, rflags: 2, ..Default::default() };
    VcpuStart::Registers(Box::new(StartRegisters { regs, sregs, ..Default::default() }))
}

/// A guest with an interrupt table. Its first vCPU starts at `entry`; the others wait.
fn guest(vcpus: usize, entry: &'static u8) -> Option<(Guest, Arc<Script>)> {
    let script = Arc::new(Script::default());
    script.waits.store(true, Ordering::SeqCst);
    let mut all = vec![ring0(address(entry))];
    all.resize(vcpus, VcpuStart::WaitForSipi);
    let apics = Arc::clone(&script) as Arc<dyn LocalApics>;
    let guest = Guest::with_local_apics(host()?, new_ram(), all, Some(apics), |_| {});
    prepare(&guest);
    Some((guest, script))
}

fn prepare(guest: &Guest) {
    // SAFETY: the labels are data of this program.
    let (code, real_mode, counter, fault) = unsafe {
        (bytes(&local_apic_guests, &local_apic_guests_end), bytes(&starts, &starts_end), &counts, &skips)
    };
    guest.load(CODE, code);
    guest.load(u64::from(START_PAGE) << 12, real_mode);
    let memory = guest.ram.memory();
    let store = |at: u64, value: u64| memory.memory().write_obj(value, GuestAddress(at)).unwrap();
    store(GDT + 8, 0x00AF_9B00_0000_FFFF);
    store(GDT + 16, 0x00CF_9300_0000_FFFF);
    for (vector, handler) in [(VECTOR, counter), (NMI, counter), (GENERAL_PROTECTION, fault)] {
        let (gate, handler) = (IDT + 16 * u64::from(vector), address(handler));
        store(gate, handler & 0xFFFF | 8 << 16 | 0x8E00 << 32 | handler >> 16 << 48);
    }
}

/// Waits until `done`; fails after [`HANG_LIMIT`].
fn wait_for(guest: &Guest, what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < HANG_LIMIT, "{what}: {:?}", guest.events.try_recv());
        std::thread::yield_now();
    }
}

#[test]
fn accesses_to_msrs_reach_the_local_apic_or_fault() {
    // SAFETY: the label is data of this program.
    let Some((guest, script)) = guest(1, unsafe { &accesses_msrs }) else { return };
    *script.cr8.lock().unwrap() = 9;
    guest.vcpus.resume().unwrap();
    let event = guest.events.recv_timeout(HANG_LIMIT).unwrap();
    assert_eq!(event, VcpuEvent::Stopped { vcpu: 0 });
    guest.vcpus.pause().unwrap();
    let (regs, _) = guest.vcpus.registers(0).unwrap();
    assert_eq!((regs.rbx & 0xFFFF_FFFF, regs.rsi & 0xFFFF_FFFF), (0x1234, 0xfee0_0d00));
    assert_eq!(regs.r8, 4, "each refused access is a #GP");
    assert_eq!(regs.r9, 9, "the APIC's CR8 is the vCPU's");
    assert_eq!(*script.cr8.lock().unwrap(), 3, "and the other way round");
    let written = script.written.lock().unwrap();
    assert_eq!(written[..3], [(0x808, 0x50), (0x8ff, 0xfee0_0d00), (0x1b, 0)], "{written:x?}");
    assert!(guest.exits("rdmsr") >= 3 && guest.exits("wrmsr") >= 3);
}

/// Sends each interrupt as soon as the previous one was delivered: while the vCPU goes to sleep, sleeps, or wakes up.
#[test]
fn no_wake_up_from_hlt_is_lost() {
    // SAFETY: the label is data of this program.
    let Some((guest, script)) = guest(1, unsafe { &halts }) else { return };
    guest.vcpus.resume().unwrap();
    for count in 1..=10_000 {
        script.send(0, ApicEvent::Interrupt { vector: VECTOR });
        wait_for(&guest, "the halted vCPU wakes up", || guest.read_u64(COUNTER) == count);
        if count % 1000 == 0 {
            // A pause, and a save and restore in HLT.
            guest.vcpus.pause().unwrap();
            let saved = guest.vcpus.save().unwrap().remove(0);
            guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
            guest.vcpus.resume().unwrap();
        }
    }
    assert!(guest.exits("hlt") > 0);
}

/// Interrupts arrive while the vCPU has interrupts disabled: each is delivered in an interrupt window.
#[test]
fn interrupts_wait_for_their_window() {
    // SAFETY: the label is data of this program.
    let Some((guest, script)) = guest(1, unsafe { &runs_closed }) else { return };
    guest.vcpus.resume().unwrap();
    for count in 1..=100 {
        script.send(0, ApicEvent::Interrupt { vector: VECTOR });
        wait_for(&guest, "the vCPU takes an interrupt", || guest.read_u64(COUNTER) == count);
    }
    assert!(guest.exits("irq_window") > 0);
}

#[test]
fn a_halted_vcpu_takes_nmis_and_its_timer() {
    // SAFETY: the label is data of this program.
    let Some((guest, script)) = guest(1, unsafe { &halts }) else { return };
    guest.vcpus.resume().unwrap();
    wait_for(&guest, "the vCPU halts", || guest.exits("hlt") == 1);
    script.send(0, ApicEvent::Nmi);
    wait_for(&guest, "the vCPU takes an NMI", || guest.read_u64(COUNTER) == 1);
    wait_for(&guest, "the vCPU halts", || guest.exits("hlt") == 2);
    guest.vcpus.pause().unwrap();
    let saved = guest.vcpus.save().unwrap().remove(0);
    assert_eq!(saved.mp_state.mp_state, HALTED);
    assert!(saved.lapic.is_none());
    *script.timer.lock().unwrap() = Some(Instant::now() + Duration::from_millis(5));
    guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
    guest.vcpus.resume().unwrap();
    // No kick: the vCPU's own thread wakes at the timer's time.
    wait_for(&guest, "the timer wakes the vCPU", || guest.read_u64(COUNTER) == 2);
}

#[test]
fn init_and_start_up_take_a_vcpu_to_real_mode() {
    // SAFETY: the label is data of this program.
    let Some((guest, script)) = guest(2, unsafe { &halts }) else { return };
    guest.vcpus.resume().unwrap();
    for round in 1..=3u64 {
        let memory = guest.ram.memory();
        memory.memory().write_obj(0u16, GuestAddress(0x8100)).unwrap();
        script.send(1, ApicEvent::Init);
        wait_for(&guest, "the vCPU waits", || script.is_done(1));
        if round == 2 {
            guest.vcpus.pause().unwrap();
            let (regs, sregs) = guest.vcpus.registers(1).unwrap();
            assert_eq!((regs.rip, sregs.cs.selector, sregs.cs.base), (0xfff0, 0xf000, 0xffff_0000));
            guest.vcpus.resume().unwrap();
        }
        script.send(1, ApicEvent::Startup { vector: START_PAGE });
        let page = || -> u16 { memory.memory().read_obj(GuestAddress(0x8100)).unwrap() };
        wait_for(&guest, "the vCPU runs in real mode", || page() == u16::from(START_PAGE) << 8);
        wait_for(&guest, "the vCPU halts", || guest.vcpus.exits().vcpus[1].causes["hlt"] == round);
    }
    // A reset returns the vCPU to its wait for a start-up IPI.
    guest.vcpus.pause().unwrap();
    guest.vcpus.set_state(1, VcpuStart::WaitForSipi).unwrap();
    guest.vcpus.resume().unwrap();
    guest.vcpus.stop().unwrap();
}

#[test]
fn local_apics_in_the_kernel_and_outside_exclude_each_other() {
    let Some(host) = host() else { return };
    let vm = host.create_vm().unwrap();
    KernelIrqchip::create(&vm, IrqchipOptions::default()).unwrap();
    let config = common::config(&host, 1, 0, VcpuStart::WaitForSipi);
    let options = VcpuOptions { local_apics: Some(Arc::new(Script::default())), ..crate::vcpu::options() };
    let error = VcpuManager::start(&vm, vec![config], options).err().unwrap();
    assert!(matches!(&error, VcpuError::LocalApics(_)), "{error}");
}
