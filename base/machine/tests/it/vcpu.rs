//! vCPU threads on real KVM: exits and their counters, events, pause and resume.

use crate::common;

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use common::{CODE, Guest, Recorder, STOP, WINDOW, host, program, start, start_registers};
use machine::bus::{AddressSpace, BusDevice};
use machine::exits::RangeNames;
use machine::irqchip::{IrqchipOptions, KernelIrqchip};
use machine::machine_check;
use machine::stats::KernelStats;
use machine::vcpu::{VcpuConfig, VcpuError, VcpuEvent, VcpuManager, VcpuOptions, VcpuStart};
use machine::x86::{kvm_msr_entry, kvm_regs};

#[test]
fn port_accesses_reach_their_device_and_are_counted() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(Recorder::default());
    *device.next.lock().unwrap() = 0x77;
    guest.ports.insert(0x10, 4, "recorder", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    // out 0x12, al; in al, 0x10; then a word across the range's end: out 0x13, ax; and an unclaimed port: in eax, 0x50
    let code = program(&[&[0xe6, 0x12, 0xe4, 0x10, 0x88, 0xc3, 0x66, 0xe7, 0x13, 0xe5, 0x50], &STOP]);
    let regs = guest.run_to_stop(&code, kvm_regs { rax: 0xaa5a, ..Default::default() });
    assert_eq!(regs.rbx & 0xff, 0x77, "what the device answered");
    assert_eq!(regs.rax & 0xffff_ffff, 0xffff_ffff, "an unclaimed port reads as ones");
    let expected = vec![(2, vec![0x5a]), (3, vec![0x77])];
    assert_eq!(*device.writes.lock().unwrap(), expected, "of the word, one byte is the device's");
    assert_eq!((guest.exits("io_out"), guest.exits("io_in")), (3, 2));
    assert_eq!((guest.exits("port:recorder"), guest.exits("port:unclaimed")), (3, 1));
    assert_eq!(regs.rip, CODE + code.len() as u64, "the stopping `out` is complete");
}

#[test]
fn string_output_reaches_the_device_item_by_item() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(Recorder::default());
    guest.ports.insert(0x10, 1, "recorder", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    guest.load(0x8000, b"hello");
    // mov edx, 0x10; rep outsb
    let code = program(&[&[0xba, 0x10, 0, 0, 0, 0xf3, 0x6e], &STOP]);
    guest.run_to_stop(&code, kvm_regs { rsi: 0x8000, rcx: 5, ..Default::default() });
    let bytes: Vec<u8> = device.writes.lock().unwrap().iter().flat_map(|(_, data)| data.clone()).collect();
    assert_eq!(bytes, b"hello");
}

#[test]
fn memory_accesses_reach_their_device_with_their_width() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(Recorder::default());
    *device.next.lock().unwrap() = 0x1122_3344_5566_7788;
    guest.memory.insert(WINDOW, 0x1000, "recorder", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    // mov rbx, [rdi]; mov [rdi+8], ax; mov rdx, [rdi+0x1000] (unclaimed)
    let code =
        program(&[&[0x48, 0x8b, 0x1f, 0x66, 0x89, 0x47, 0x08, 0x48, 0x8b, 0x97, 0, 0x10, 0, 0], &STOP]);
    let regs = guest.run_to_stop(&code, kvm_regs { rdi: WINDOW, rax: 0xbeef, ..Default::default() });
    assert_eq!(regs.rbx, 0x1122_3344_5566_7788);
    assert_eq!(regs.rdx, u64::MAX);
    assert_eq!(*device.writes.lock().unwrap(), vec![(8, vec![0xef, 0xbe])]);
    assert_eq!((guest.exits("memory:recorder"), guest.exits("memory:unclaimed")), (2, 1));
    assert_eq!((guest.exits("mmio_read"), guest.exits("mmio_write")), (2, 1));
}

#[test]
fn hlt_without_interrupt_controllers_is_an_event() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    // HLT faults in ring 3; PVM exits with it nevertheless.
    let event = guest.run(&[0xf4], kvm_regs::default());
    assert!(
        matches!(
            event,
            VcpuEvent::Halted { vcpu: 0 } | VcpuEvent::Shutdown { vcpu: 0, .. } | VcpuEvent::Failed { .. }
        ),
        "{event:?}"
    );
}

/// Checks the leaves passed to KVM: under PVM the processor answers CPUID itself, with the host's leaves.
#[test]
fn a_guest_finds_the_frequency_of_its_time_stamp_counter() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let saved = guest.vcpus.save().unwrap().remove(0);
    let Some(khz) = saved.tsc_khz else { return println!("this host's TSC has no frequency") };
    let leaf = |function| *saved.cpuid.iter().find(|leaf| leaf.function == function).unwrap();
    assert_eq!((leaf(0x4000_0010).eax, leaf(0x4000_0010).ebx), (khz, 1_000_000), "TSC and APIC timer, kHz");
    assert!(leaf(0x4000_0000).eax >= 0x4000_0010);
}

#[test]
fn a_triple_fault_is_an_event_and_the_vcpu_can_be_reset() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    // ud2 without an interrupt table
    let event = guest.run(&[0x0f, 0x0b], kvm_regs::default());
    assert!(matches!(event, VcpuEvent::Shutdown { vcpu: 0, .. } | VcpuEvent::Failed { .. }), "{event:?}");
    assert!(matches!(guest.vcpus.save(), Err(VcpuError::NotSaveable { vcpu: 0, .. })));
    let regs = guest.run_to_stop(&STOP, kvm_regs { rbx: 42, ..Default::default() });
    assert_eq!(regs.rbx, 42);
}

/// Answers each write with a machine check.
struct Refuser;

impl BusDevice for Refuser {
    fn read(&self, _offset: u64, _data: &mut [u8]) {}
    fn write(&self, _offset: u64, _data: &[u8]) {
        machine_check::raise();
    }
}

/// A guest that has disabled machine checks (CR4.MCE) shuts down, as a processor does. If only the bank is disabled, nothing is reported.
#[test]
fn a_machine_check_of_a_device_reaches_the_vcpu() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    guest.ports.insert(0x10, 1, "refuser", Arc::new(Refuser) as Arc<dyn BusDevice>).unwrap();
    // out 0x10, al; inc rbx; then the end
    let code = program(&[&[0xe6, 0x10, 0x48, 0xff, 0xc3], &STOP]);
    let regs = guest.run_to_stop(&code, kvm_regs::default());
    assert_eq!(regs.rbx, 1, "the bank is off: the guest goes on");
    let mut registers = start_registers(kvm_regs::default());
    registers.msrs =
        vec![kvm_msr_entry { index: machine_check::BANK_CONTROL, data: u64::MAX, ..Default::default() }];
    guest.vcpus.set_state(0, VcpuStart::Registers(Box::new(registers))).unwrap();
    guest.vcpus.resume().unwrap();
    let event = guest.events.recv_timeout(Duration::from_secs(10)).expect("an event within 10 s");
    assert!(matches!(event, VcpuEvent::Shutdown { vcpu: 0, .. } | VcpuEvent::Failed { .. }), "{event:?}");
}

/// A machine check requested by another thread, for a deferred write of an unknown vCPU, reaches a running vCPU and one that was paused
/// meanwhile. A reset drops it, because the vCPU then runs another guest.
#[test]
fn a_machine_check_from_without_reaches_a_vcpu() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    // inc qword [rdi]; jmp back
    guest.load(CODE, &[0x48, 0xff, 0x07, 0xeb, 0xfb]);
    let enabled = || {
        let mut registers = start_registers(kvm_regs { rdi: 0x8000, ..Default::default() });
        let all = kvm_msr_entry { index: machine_check::BANK_CONTROL, data: u64::MAX, ..Default::default() };
        registers.msrs = vec![all];
        VcpuStart::Registers(Box::new(registers))
    };
    for paused in [false, true] {
        guest.vcpus.set_state(0, enabled()).unwrap();
        if paused {
            guest.vcpus.machine_check().unwrap();
            guest.vcpus.set_state(0, enabled()).unwrap();
        }
        guest.vcpus.resume().unwrap();
        assert!(guest.events.recv_timeout(Duration::from_millis(200)).is_err(), "nobody has asked");
        if paused {
            guest.vcpus.pause().unwrap();
        }
        guest.vcpus.machine_check().unwrap();
        if paused {
            guest.vcpus.resume().unwrap();
        }
        let event = guest.events.recv_timeout(Duration::from_secs(10)).expect("an event within 10 s");
        assert!(matches!(event, VcpuEvent::Shutdown { vcpu: 0, .. } | VcpuEvent::Failed { .. }), "{event:?}");
        guest.vcpus.pause().unwrap();
    }
}

struct Bomb;

impl BusDevice for Bomb {
    fn read(&self, _offset: u64, _data: &mut [u8]) {
        panic!("the bomb went off");
    }
    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[test]
fn a_panicking_device_is_reported_instead_of_hanging() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    guest.ports.insert(0x20, 1, "bomb", Arc::new(Bomb)).unwrap();
    let event = guest.run(&[0xe4, 0x20], kvm_regs::default());
    assert_eq!(event, VcpuEvent::Panicked { vcpu: 0, what: "the bomb went off".into() });
    guest.vcpus.stop().unwrap();
    assert!(matches!(guest.vcpus.resume(), Err(VcpuError::Gone)));
}

#[test]
fn pausing_stops_all_vcpus_and_resuming_continues_them() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 2);
    // inc qword [rdi]; jmp back
    guest.load(CODE, &[0x48, 0xff, 0x07, 0xeb, 0xfb]);
    let counters = [0x8000, 0x8100];
    for (vcpu, rdi) in (0..).zip(counters) {
        guest.vcpus.set_state(vcpu, start(kvm_regs { rdi, ..Default::default() })).unwrap();
    }
    for _ in 0..100 {
        let before = counters.map(|at| guest.read_u64(at));
        guest.vcpus.resume().unwrap();
        let patience = Instant::now() + Duration::from_secs(10);
        while counters.iter().zip(before).any(|(at, before)| guest.read_u64(*at) == before) {
            assert!(Instant::now() < patience, "a vCPU makes no progress after resume");
            std::thread::yield_now();
        }
        guest.vcpus.pause().unwrap();
        assert!(guest.vcpus.is_paused());
        let paused = counters.map(|at| guest.read_u64(at));
        std::thread::sleep(Duration::from_micros(50));
        assert_eq!(counters.map(|at| guest.read_u64(at)), paused, "a paused vCPU runs");
    }
    assert_eq!(guest.vcpus.exits().vcpus.len(), 2);
    assert!(guest.vcpus.exits().vcpus.iter().all(|vcpu| vcpu.causes["kick"] > 0));
}

#[test]
fn a_pause_between_a_port_read_and_its_result_loses_nothing() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(Recorder::default());
    guest.ports.insert(0x20, 4, "sequence", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    guest.memory.insert(WINDOW, 8, "sequence", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    // next: in eax, 0x20; cmp eax, ebx; jne out; inc ebx; mov eax, [rdi]; cmp eax, ebx; jne out; inc ebx; jmp next
    let code = [
        0xe5, 0x20, 0x39, 0xd8, 0x75, 0x0c, 0xff, 0xc3, 0x8b, 0x07, 0x39, 0xd8, 0x75, 0x04, 0xff, 0xc3, 0xeb,
        0xee, 0xe6, 0xf4,
    ];
    guest.load(CODE, &code);
    guest.vcpus.set_state(0, start(kvm_regs { rdi: WINDOW, ..Default::default() })).unwrap();
    for round in 0..300 {
        let before = *device.next.lock().unwrap();
        guest.vcpus.resume().unwrap();
        let patience = Instant::now() + Duration::from_secs(10);
        while *device.next.lock().unwrap() == before && guest.events.try_recv().is_err() {
            assert!(Instant::now() < patience, "no progress after resume");
            std::thread::yield_now();
        }
        // Different delays, so that pauses occur at different points.
        (0..round % 37 * 20).for_each(|_| std::hint::spin_loop());
        if round % 3 == 0 {
            guest.vcpus.kick(0).unwrap();
        }
        guest.vcpus.pause().unwrap();
        // A guest that saw a value twice, or missed one, has stopped, and can't be saved.
        let saved = guest.vcpus.save().unwrap().remove(0);
        guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
    }
    let (regs, _) = guest.vcpus.registers(0).unwrap();
    let handed_out = *device.next.lock().unwrap();
    assert!(handed_out > 0 && handed_out - regs.rbx <= 1, "{handed_out} values given, {} seen", regs.rbx);
}

#[test]
fn the_wrong_moment_is_an_error() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    guest.load(CODE, &[0xeb, 0xfe]);
    guest.vcpus.set_state(0, start(kvm_regs::default())).unwrap();
    guest.vcpus.resume().unwrap();
    assert!(matches!(guest.vcpus.save(), Err(VcpuError::NotPaused(_))));
    assert!(matches!(guest.vcpus.set_state(0, VcpuStart::WaitForSipi), Err(VcpuError::NotPaused(_))));
    assert!(matches!(guest.vcpus.kick(9), Err(VcpuError::Absent(9))));
    guest.vcpus.pause().unwrap();
    assert!(matches!(guest.vcpus.set_state(0, VcpuStart::WaitForSipi), Err(VcpuError::BadState { .. })));
}

#[test]
fn the_kernels_own_statistics_are_read_or_reported_as_absent() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    guest.run_to_stop(&STOP, kvm_regs::default());
    for stats in [guest.vm.kernel_stats(), guest.vcpus.kernel_stats().remove(0).1] {
        match stats {
            KernelStats::Counters(counters) => assert!(!counters.is_empty()),
            KernelStats::Absent(why) => println!("absent: {why}"),
        }
    }
    if let KernelStats::Counters(counters) = &guest.vcpus.kernel_stats()[0].1 {
        assert!(counters["exits"] >= 1, "{counters:?}");
    }
}

#[test]
fn the_ring_0_probe_comes_to_a_verdict() {
    let Some(host) = host() else { return };
    let probe = host.probe_ring0().unwrap();
    println!("{probe:?} {:?}", host.capabilities());
    assert!(!probe.finding.is_empty());
}

/// Tries to stop the VM from a vCPU's own thread.
#[derive(Default)]
struct SelfPause {
    vcpus: OnceLock<Weak<VcpuManager>>,
    answers: Mutex<Vec<Result<(), VcpuError>>>,
}

impl BusDevice for SelfPause {
    fn read(&self, _offset: u64, _data: &mut [u8]) {}
    fn write(&self, _offset: u64, _data: &[u8]) {
        let vcpus = self.vcpus.get().unwrap().upgrade().unwrap();
        self.answers.lock().unwrap().extend([vcpus.pause(), vcpus.resume(), vcpus.stop()]);
    }
}

#[test]
fn a_device_that_waits_for_its_own_vcpu_gets_an_error_instead_of_a_deadlock() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(SelfPause::default());
    device.vcpus.set(Arc::downgrade(&guest.vcpus)).unwrap();
    guest.ports.insert(0x10, 1, "suicide", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    guest.run_to_stop(&program(&[&[0xe6, 0x10], &STOP]), kvm_regs::default());
    let answers = device.answers.lock().unwrap();
    assert_eq!(answers.len(), 3);
    assert!(answers.iter().all(|answer| matches!(answer, Err(VcpuError::OwnThread(_)))), "{answers:?}");
}

pub fn options() -> VcpuOptions {
    let names = RangeNames::new();
    VcpuOptions {
        local_apics: None,
        ports: Arc::new(AddressSpace::ports(Arc::clone(&names))),
        memory: Arc::new(AddressSpace::memory(Arc::clone(&names))),
        names,
        on_event: Arc::new(|_| {}),
        exit_handler: None,
        on_thread_start: None,
    }
}

#[test]
fn vcpus_that_can_not_be_created_are_named() {
    let Some(host) = host() else { return };
    let vm = host.create_vm().unwrap();
    let one = || common::config(&host, 1, 0, start(kvm_regs::default()));
    let twice = VcpuManager::start(&vm, vec![one(), one()], options());
    assert!(matches!(twice.err(), Some(VcpuError::BadConfig { vcpu: 0, .. })));
    let nowhere = VcpuManager::start(&vm, vec![VcpuConfig { pin_to: vec![100_000], ..one() }], options());
    let text = nowhere.err().unwrap().to_string();
    assert_eq!(text, "The thread of vCPU 0 could not be pinned to host CPUs [100000]");
}

#[test]
fn threads_have_names_and_run_where_they_are_pinned() {
    let Some(host) = host() else { return };
    let vm = host.create_vm().unwrap();
    let config = common::config(&host, 8, 7, start(kvm_regs::default()));
    let vcpus = VcpuManager::start(&vm, vec![VcpuConfig { pin_to: vec![0], ..config }], options()).unwrap();
    let pinned = std::fs::read_dir("/proc/self/task").unwrap().any(|task| {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        status.contains("Name:\tvcpu7\n") && status.contains("Cpus_allowed_list:\t0\n")
    });
    assert!(pinned);
    vcpus.stop().unwrap();
}

#[test]
fn as_many_vcpus_as_apic_ids_allow_can_be_paused_and_saved() {
    let Some(host) = host() else { return };
    let starts =
        (0..254).map(|i| if i == 0 { start(kvm_regs::default()) } else { VcpuStart::WaitForSipi }).collect();
    let guest = Guest::with(host, common::new_ram(), starts, |vm| {
        KernelIrqchip::create(vm, IrqchipOptions::default()).unwrap();
    });
    guest.load(CODE, &[0xeb, 0xfe]);
    for _ in 0..3 {
        guest.vcpus.resume().unwrap();
        guest.vcpus.pause().unwrap();
    }
    assert_eq!(guest.vcpus.save().unwrap().len(), 254);
    assert_eq!(guest.vcpus.ids().last(), Some(&253));
    guest.vcpus.stop().unwrap();
}
