//! Saved state and interrupt controllers on real KVM.

use crate::common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{CODE, Guest, host, new_ram, start, start_registers};
use machine::interrupt::{InterruptController, MsiMessage};
use machine::irqchip::{IrqchipOptions, KernelIrqchip};
use machine::state::{SavedInterruptController, SavedVcpu};
use machine::vcpu::{VcpuError, VcpuStart};
use machine::x86::kvm_regs;

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < patience, "{what} within 10 s");
        std::thread::yield_now();
    }
}

#[test]
fn a_vcpu_continues_in_a_new_vm_from_its_saved_state() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    // movq xmm3, rbx; next: inc rcx; mov [rdi], rcx; movq [rdi+8], xmm3; jmp next
    let code = [
        0x66, 0x48, 0x0f, 0x6e, 0xdb, 0x48, 0xff, 0xc1, 0x48, 0x89, 0x0f, 0x66, 0x0f, 0xd6, 0x5f, 0x08, 0xeb,
        0xf3,
    ];
    guest.load(CODE, &code);
    let regs = kvm_regs { rdi: 0x8000, rbx: 0xdead_beef_1234_5678, ..Default::default() };
    guest.vcpus.set_state(0, start(regs)).unwrap();
    guest.vcpus.resume().unwrap();
    wait_for("the first guest counts", || guest.read_u64(0x8000) > 1000);
    guest.vcpus.pause().unwrap();
    let saved = guest.vcpus.save().unwrap().remove(0);
    let clock = guest.vm.save_clock().unwrap();
    let text = serde_json::to_string(&saved).unwrap();
    let back: SavedVcpu = serde_json::from_str(&text).unwrap();
    let counted = guest.read_u64(0x8000);
    drop(guest);

    let ram = new_ram();
    let other = Guest::with(self::host().unwrap(), ram, vec![VcpuStart::Restored(Box::new(back))], |vm| {
        vm.restore_clock(&clock).unwrap();
    });
    other.load(CODE, &code);
    let again = other.vcpus.save().unwrap().remove(0);
    assert_eq!(again.regs, saved.regs);
    assert_eq!(again.xsave, saved.xsave);
    assert_eq!(again.sregs, saved.sregs);
    assert_eq!(again.cpuid, saved.cpuid);
    for msr in &saved.msrs {
        let other = again.msrs.iter().find(|other| other.index == msr.index);
        // The time-stamp counter runs on.
        assert!(msr.index == 0x10 || other == Some(msr), "{msr:?} {other:?}");
    }
    other.vcpus.resume().unwrap();
    wait_for("the second guest goes on", || other.read_u64(0x8000) > counted + 1000);
    assert_eq!(other.read_u64(0x8008), 0xdead_beef_1234_5678, "xmm3 came along");
    other.vcpus.pause().unwrap();
    assert!(other.vcpus.save().unwrap()[0].regs.rcx > saved.regs.rcx);
}

#[test]
fn state_that_does_not_fit_is_refused_by_name() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let saved = guest.vcpus.save().unwrap().remove(0);
    let set = |saved: SavedVcpu| guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved)));
    assert!(matches!(
        set(SavedVcpu { version: 99, ..saved.clone() }),
        Err(VcpuError::Version { found: 99, .. })
    ));
    assert!(matches!(set(SavedVcpu { id: 3, ..saved.clone() }), Err(VcpuError::BadState { .. })));
    assert!(matches!(
        set(SavedVcpu { xsave: vec![0; 64], ..saved.clone() }),
        Err(VcpuError::BadState { .. })
    ));
    assert!(matches!(
        set(SavedVcpu { xsave: vec![0; 1 << 20], ..saved.clone() }),
        Err(VcpuError::BadState { .. })
    ));
    assert!(matches!(
        set(SavedVcpu { lapic: Some(Default::default()), ..saved.clone() }),
        Err(VcpuError::BadState { .. })
    ));
    set(saved).unwrap();
}

/// A guest with in-kernel controllers, and its vCPU's local APIC enabled by software.
fn with_irqchip() -> Option<(Guest, Arc<KernelIrqchip>)> {
    let host = host()?;
    let mut irqchip = None;
    let guest = Guest::with(host, new_ram(), vec![start(kvm_regs::default())], |vm| {
        irqchip = Some(KernelIrqchip::create(vm, IrqchipOptions { pit: false }).unwrap());
    });
    let mut saved = guest.vcpus.save().unwrap().remove(0);
    let lapic = saved.lapic.as_mut().unwrap();
    // Spurious-interrupt register: enabled, vector 255.
    lapic.regs[0xf0] = -1;
    lapic.regs[0xf1] = 1;
    guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
    Some((guest, irqchip.unwrap()))
}

/// Vectors that are pending in the local APIC of vCPU 0.
fn pending(guest: &Guest) -> Vec<usize> {
    let lapic = guest.vcpus.save().unwrap().remove(0).lapic.unwrap();
    let word = |vector: usize| lapic.regs[0x200 + vector / 32 * 16 + vector % 32 / 8];
    (0..256).filter(|vector| word(*vector) >> (vector % 8) & 1 != 0).collect()
}

fn message(vector: u32) -> MsiMessage {
    MsiMessage { address: 0xfee0_0000, data: vector }
}

#[test]
fn messages_reach_the_local_apic_unless_masked() {
    let Some((guest, irqchip)) = with_irqchip() else { return };
    // An eventfd per route exceeds the usual soft limit.
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = rustix::process::Rlimit { current: limits.maximum, ..limits };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, all).unwrap();
    irqchip.signal_msi(message(0x31)).unwrap();
    assert_eq!(pending(&guest), [0x31]);
    let routes = irqchip.allocate_msi(1024).unwrap();
    let (first, last) = (&routes[0], &routes[1023]);
    first.trigger().unwrap();
    assert_eq!(pending(&guest), [0x31], "masked from the beginning");
    first.set(Some(message(0x41))).unwrap();
    last.set(Some(message(0x51))).unwrap();
    first.trigger().unwrap();
    wait_for("the first message", || pending(&guest) == [0x31, 0x41]);
    // A write to the eventfd, as another process makes it:
    rustix::io::write(last.eventfd().unwrap(), &1u64.to_ne_bytes()).unwrap();
    wait_for("the last message", || pending(&guest) == [0x31, 0x41, 0x51]);
    last.set(None).unwrap();
    rustix::io::write(last.eventfd().unwrap(), &1u64.to_ne_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(pending(&guest), [0x31, 0x41, 0x51]);
    last.set(Some(message(0x61))).unwrap();
    wait_for("what came while masked", || pending(&guest) == [0x31, 0x41, 0x51, 0x61]);
    drop(routes);
    assert_eq!(irqchip.allocate_msi(1024).unwrap().len(), 1024);
    assert_eq!(irqchip.allocate_msi(u16::MAX).err().unwrap().kind(), std::io::ErrorKind::StorageFull);
}

#[test]
#[allow(unsafe_code)] // The IOAPIC's state lies in a union.
fn pins_and_their_eventfds_reach_the_local_apic_through_restored_state() {
    let Some((guest, irqchip)) = with_irqchip() else { return };
    let SavedInterruptController::KernelIrqchip(mut saved) = irqchip.save().unwrap() else { panic!() };
    // Pin 5: edge, vector 0x45; pin 9: level (bit 15), vector 0x49; both unmasked, to APIC 0.
    // SAFETY: the chip is an IOAPIC, so this is the union's field.
    let ioapic = unsafe { &mut saved.ioapic.chip.ioapic };
    ioapic.redirtbl[5].bits = 0x45;
    ioapic.redirtbl[9].bits = 0x8049;
    let saved = SavedInterruptController::KernelIrqchip(saved);
    let text = serde_json::to_string(&saved).unwrap();
    irqchip.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    let error = irqchip.restore(&SavedInterruptController::Monitor(Vec::new())).unwrap_err().to_string();
    assert!(error.contains("were in the monitor") && error.contains("interrupts = \"monitor\""), "{error}");

    let edge = irqchip.edge_eventfd(5).unwrap();
    assert!(Arc::ptr_eq(&edge, &irqchip.edge_eventfd(5).unwrap()));
    rustix::io::write(&edge, &1u64.to_ne_bytes()).unwrap();
    wait_for("the edge interrupt", || pending(&guest) == [0x45]);
    let level = irqchip.level_eventfds(9).unwrap();
    rustix::io::write(&level.trigger, &1u64.to_ne_bytes()).unwrap();
    wait_for("the level interrupt", || pending(&guest) == [0x45, 0x49]);

    assert!(irqchip.set_line(24, true).is_err());
    irqchip.set_line(9, true).unwrap();
    irqchip.set_line(9, false).unwrap();
    irqchip.reset().unwrap();
    irqchip.set_line(5, true).unwrap();
    irqchip.set_line(5, false).unwrap();
    assert_eq!(pending(&guest), [0x45, 0x49], "after a reset all pins are masked");
}

#[test]
fn a_vcpu_that_waits_for_sipi_can_be_paused_saved_and_reset() {
    let Some(host) = host() else { return };
    let starts = vec![start(kvm_regs::default()), VcpuStart::WaitForSipi];
    let guest = Guest::with(host, new_ram(), starts, |vm| {
        KernelIrqchip::create(vm, IrqchipOptions { pit: true }).unwrap();
    });
    guest.load(CODE, &[0xeb, 0xfe]);
    for _ in 0..20 {
        guest.vcpus.resume().unwrap();
        guest.vcpus.pause().unwrap();
    }
    let saved = guest.vcpus.save().unwrap();
    assert_eq!(saved.iter().map(|vcpu| vcpu.mp_state.mp_state).collect::<Vec<_>>(), [0, 1]);
    guest.vcpus.set_state(1, VcpuStart::WaitForSipi).unwrap();
    guest.vcpus.resume().unwrap();
    guest.vcpus.stop().unwrap();
}

#[test]
fn a_vcpu_that_changed_its_own_cpuid_bits_can_be_reset() {
    let Some(host) = host() else { return };
    let has_xsave = host
        .supported_cpuid()
        .unwrap()
        .as_slice()
        .iter()
        .any(|leaf| leaf.function == 1 && leaf.ecx >> 26 & 1 == 1);
    let guest = Guest::new(host, 1);
    let mut registers = start_registers(kvm_regs { rbx: 7, ..Default::default() });
    if has_xsave {
        // CR4.OSXSAVE appears in CPUID.
        registers.sregs.cr4 |= 1 << 18;
    }
    guest.load(CODE, &[0xeb, 0xfe]);
    for _ in 0..3 {
        guest.vcpus.set_state(0, VcpuStart::Registers(Box::new(registers.clone()))).unwrap();
        guest.vcpus.resume().unwrap();
        guest.vcpus.pause().unwrap();
        let saved = guest.vcpus.save().unwrap().remove(0);
        let osxsave = saved.cpuid.iter().any(|leaf| leaf.function == 1 && leaf.ecx >> 27 & 1 == 1);
        assert_eq!(osxsave, has_xsave);
        guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
        guest.vcpus.set_state(0, start(kvm_regs::default())).unwrap();
        assert_eq!(guest.vcpus.registers(0).unwrap().0.rbx, 0);
    }
}

#[test]
fn mtrrs_are_on_from_the_start_and_after_a_reset_and_belong_to_the_state() {
    const DEFAULT_TYPE: u32 = 0x2ff;
    const FIRST_MASK: u32 = 0x201;
    let Some(host) = host() else { return };
    let starts = vec![start(kvm_regs::default()), VcpuStart::WaitForSipi];
    let guest = Guest::with(host, new_ram(), starts, |vm| {
        KernelIrqchip::create(vm, IrqchipOptions { pit: false }).unwrap();
    });
    let msr = |vcpu: usize, index| {
        let saved = guest.vcpus.save().unwrap().remove(vcpu);
        let mut found = saved.msrs.iter().filter(|msr| msr.index == index);
        let value = found.next().unwrap_or_else(|| panic!("MSR {index:#x} is saved")).value;
        assert!(found.next().is_none(), "MSR {index:#x} is saved once");
        value
    };
    assert_eq!([msr(0, DEFAULT_TYPE), msr(1, DEFAULT_TYPE)], [0x806; 2]);

    // A guest that has set a range of its own, and is restored in another VM.
    let mut saved = guest.vcpus.save().unwrap().remove(0);
    for changed in &mut saved.msrs {
        match changed.index {
            DEFAULT_TYPE => changed.value = 0xc06,
            FIRST_MASK => changed.value = 0x8_0000_0800,
            _ => {}
        }
    }
    guest.vcpus.set_state(0, VcpuStart::Restored(Box::new(saved))).unwrap();
    assert_eq!((msr(0, DEFAULT_TYPE), msr(0, FIRST_MASK)), (0xc06, 0x8_0000_0800));

    guest.vcpus.set_state(0, start(kvm_regs::default())).unwrap();
    guest.vcpus.set_state(1, VcpuStart::WaitForSipi).unwrap();
    assert_eq!([msr(0, DEFAULT_TYPE), msr(0, FIRST_MASK), msr(1, DEFAULT_TYPE)], [0x806, 0, 0x806]);
}
