//! KVM's side: a VM with in-kernel controllers, whose vCPUs run a few ring-0 instructions at a time.
#![allow(unsafe_code)] // Memory is handed to KVM by its address.

use apic::registers::{
    END_OF_INTERRUPT, IN_SERVICE, INTERRUPT_REQUEST, PROCESSOR_PRIORITY, SELF_IPI, SPURIOUS_VECTOR,
    TRIGGER_MODE, X2APIC_FIRST,
};
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_RUNNABLE,
    KVM_VCPUEVENT_VALID_NMI_PENDING, Msrs, kvm_dtable, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msi,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::common::flat_segments;

const RAM_BYTES: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORIES: u64 = 0x3000;
const GDT: u64 = 0x8000;
const IDT: u64 = 0x9000;
const STACK_END: u64 = 0xC000;
const HANDLERS: u64 = 0x1_0000;
const CODE: u64 = 0x1_1000;
const IO_APIC: u64 = 0xFEC0_0000;
/// Port that a program writes at its end.
const PORT_END: u16 = 0x10;
/// Port that the handlers write: the byte is the vector of the interrupt or exception.
const PORT_VECTOR: u16 = 0x11;
const GENERAL_PROTECTION: u8 = 13;
const INTERRUPTS_ENABLED: u64 = 0x202;
const INTERRUPTS_DISABLED: u64 = 2;

pub struct Kernel {
    // Dropped before the memory that they use.
    vcpus: Vec<VcpuFd>,
    vm: VmFd,
    memory: GuestMemoryMmap,
    /// KVM ends each interrupt at its delivery.
    pub ends_interrupts: bool,
}

impl Kernel {
    /// Two vCPUs in ring 0 of long mode, in x2APIC mode.
    pub fn new() -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xFFFB_D000).unwrap();
        vm.create_irq_chip().unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES)]).unwrap();
        let region = kvm_userspace_memory_region {
            memory_size: RAM_BYTES as u64,
            userspace_addr: memory.get_host_address(GuestAddress(0)).unwrap() as u64,
            ..Default::default()
        };
        // SAFETY: the mapping is owned by `memory`, which lives as long as the VM.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        fill(&memory);
        let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let vcpus = (0..2u32).map(|id| {
            let vcpu = vm.create_vcpu(id.into()).unwrap();
            for leaf in cpuid.as_mut_slice() {
                match leaf.function {
                    // x2APIC, no TSC-deadline timer.
                    1 => {
                        leaf.ecx = leaf.ecx & !(1 << 24) | 1 << 21;
                        leaf.ebx = leaf.ebx & 0xFF_FFFF | id << 24;
                    }
                    0xB | 0x1F => leaf.edx = id,
                    _ => {}
                }
            }
            vcpu.set_cpuid2(&cpuid).unwrap();
            vcpu
        });
        let vcpus = vcpus.collect();
        let mut kernel = Self { vcpus, vm, memory, ends_interrupts: false };
        for id in 0..2 {
            kernel.enter_long_mode(id);
            kernel.vcpus[id].set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE }).unwrap();
        }
        kernel.look_at_in_service();
        kernel
    }

    /// Sets registers as a kernel's first code does; replaces those that INIT and a start-up IPI have set.
    pub fn enter_long_mode(&mut self, vcpu: usize) {
        let mut sregs = kvm_sregs {
            gdt: kvm_dtable { base: GDT, limit: 0x27, ..Default::default() },
            idt: kvm_dtable { base: IDT, limit: 0xFFF, ..Default::default() },
            cr0: 0x8005_0033,
            cr3: PML4,
            cr4: 0x620,
            efer: 0x500,
            apic_base: 0xFEE0_0C00 | if vcpu == 0 { 0x100 } else { 0 },
            ..Default::default()
        };
        flat_segments(&mut sregs, true);
        self.vcpus[vcpu].set_sregs(&sregs).unwrap();
    }

    /// Runs `code` to its end, or to an interrupt, whose vector it returns.
    fn run(&mut self, vcpu: usize, code: &[u8], regs: kvm_regs) -> (Option<u8>, kvm_regs) {
        let program = [code, &[0xE6, PORT_END.to_le_bytes()[0], 0xF4]].concat();
        let entry = CODE + 64 * vcpu as u64;
        self.memory.write_slice(&program, GuestAddress(entry)).unwrap();
        let fd = &mut self.vcpus[vcpu];
        fd.set_regs(&kvm_regs { rip: entry, rsp: STACK_END, ..regs }).unwrap();
        let (port, byte) = match fd.run().unwrap() {
            VcpuExit::IoOut(port, data) => (port, data[0]),
            other => panic!("vCPU {vcpu} left the guest for {other:?}"),
        };
        // Completes the port access; otherwise the next program would lose its first instruction.
        fd.set_kvm_immediate_exit(1);
        assert_eq!(fd.run().map(drop).unwrap_err().errno(), libc::EINTR);
        fd.set_kvm_immediate_exit(0);
        let regs = fd.get_regs().unwrap();
        match port {
            PORT_END => (None, regs),
            PORT_VECTOR => (Some(byte), regs),
            _ => panic!("vCPU {vcpu} wrote to port {port:#x}"),
        }
    }

    /// Finds whether KVM puts a delivered vector in service, as every processor does.
    fn look_at_in_service(&mut self) {
        const VECTOR: u8 = 0x55;
        assert!(self.write(1, SPURIOUS_VECTOR, 0x1FF) && self.write(1, SELF_IPI, VECTOR.into()));
        assert_eq!(self.take(1), Some(VECTOR));
        self.ends_interrupts = self.page(1).register(IN_SERVICE + u32::from(VECTOR >> 5)) == 0;
        assert!(self.write(1, END_OF_INTERRUPT, 0) && self.write(1, SPURIOUS_VECTOR, 0xFF));
    }

    /// Delivers a pending interrupt to the vCPU, which puts it in service.
    pub fn take(&mut self, vcpu: usize) -> Option<u8> {
        if self.ends_interrupts {
            let priority = self.read(vcpu, PROCESSOR_PRIORITY).unwrap();
            let page = self.page(vcpu);
            let next =
                page.highest(INTERRUPT_REQUEST).filter(|vector| u64::from(vector >> 4) > priority >> 4);
            if let Some(vector) = next.filter(|vector| page.contains(TRIGGER_MODE, *vector)) {
                // A run of the vCPU would end the interrupt, and the IOAPIC would send it again.
                self.put_in_service(vcpu, vector);
                return next;
            }
        }
        let regs = kvm_regs { rflags: INTERRUPTS_ENABLED, ..Default::default() };
        let (vector, _) = self.run(vcpu, &[0x90, 0x90], regs);
        if let Some(vector) = vector.filter(|_| self.ends_interrupts) {
            self.put_in_service(vcpu, vector);
        }
        vector
    }

    /// Moves a vector from IRR to ISR.
    fn put_in_service(&self, vcpu: usize, vector: u8) {
        let mut state = self.vcpus[vcpu].get_lapic().unwrap();
        let bit = (1u8 << (vector & 7)).cast_signed();
        let at = |msr: u32| {
            let word = 16 * (usize::try_from(msr - X2APIC_FIRST).unwrap() + usize::from(vector >> 5));
            word + usize::from(vector >> 3 & 3)
        };
        state.regs[at(INTERRUPT_REQUEST)] &= !bit;
        state.regs[at(IN_SERVICE)] |= bit;
        self.vcpus[vcpu].set_lapic(&state).unwrap();
    }

    /// Enters the guest, so that KVM processes changes.
    pub fn enter(&mut self, vcpu: usize) {
        let regs = kvm_regs { rflags: INTERRUPTS_DISABLED, ..Default::default() };
        assert_eq!(self.run(vcpu, &[], regs).0, None);
    }

    /// Executes WRMSR by ioctl; returns whether KVM allowed it.
    pub fn write(&self, vcpu: usize, msr: u32, value: u64) -> bool {
        let entry = kvm_msr_entry { index: msr, data: value, ..Default::default() };
        self.vcpus[vcpu].set_msrs(&Msrs::from_entries(&[entry]).unwrap()).unwrap() == 1
    }

    /// Executes RDMSR by ioctl; `None` where KVM doesn't allow it.
    pub fn read(&self, vcpu: usize, msr: u32) -> Option<u64> {
        let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index: msr, ..Default::default() }]).unwrap();
        let count = self.vcpus[vcpu].get_msrs(&mut msrs).unwrap();
        (count == 1).then(|| msrs.as_slice()[0].data)
    }

    /// Executes WRMSR in the guest.
    pub fn guest_write(&mut self, vcpu: usize, msr: u32, value: u64) -> bool {
        let regs = kvm_regs { rcx: msr.into(), rax: value & 0xFFFF_FFFF, rdx: value >> 32, ..disabled() };
        match self.run(vcpu, &[0x0F, 0x30], regs).0 {
            None => true,
            Some(GENERAL_PROTECTION) => false,
            Some(vector) => panic!("WRMSR {msr:#x} ended with exception {vector}"),
        }
    }

    /// Executes RDMSR in the guest.
    pub fn guest_read(&mut self, vcpu: usize, msr: u32) -> Option<u64> {
        let (vector, regs) = self.run(vcpu, &[0x0F, 0x32], kvm_regs { rcx: msr.into(), ..disabled() });
        match vector {
            None => Some(regs.rdx << 32 | regs.rax & 0xFFFF_FFFF),
            Some(GENERAL_PROTECTION) => None,
            Some(vector) => panic!("RDMSR {msr:#x} ended with exception {vector}"),
        }
    }

    /// The guest writes a register of the IOAPIC.
    pub fn write_io_apic(&mut self, index: u8, value: u32) {
        let regs = |offset, value: u32| kvm_regs { rsi: IO_APIC + offset, rax: value.into(), ..disabled() };
        let store = [0x89, 0x06]; // mov [rsi], eax
        assert_eq!(self.run(0, &store, regs(0, index.into())).0, None);
        assert_eq!(self.run(0, &store, regs(0x10, value)).0, None);
    }

    /// The guest reads a register of the IOAPIC.
    pub fn read_io_apic(&mut self, index: u8) -> u64 {
        let regs = |offset| kvm_regs { rsi: IO_APIC + offset, rax: index.into(), ..disabled() };
        assert_eq!(self.run(0, &[0x89, 0x06], regs(0)).0, None);
        // mov eax, [rsi]
        self.run(0, &[0x8B, 0x06], regs(0x10)).1.rax
    }

    /// The IOAPIC's redirection entries.
    pub fn io_apic_entries(&self) -> [u64; 24] {
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        self.vm.get_irqchip(&mut chip).unwrap();
        // SAFETY: for this chip id the union is its IOAPIC, and entries are plain bits.
        unsafe { chip.chip.ioapic.redirtbl.map(|entry| entry.bits) }
    }

    pub fn set_line(&self, pin: u32, asserted: bool) {
        self.vm.set_irq_line(pin, asserted).unwrap();
    }

    pub fn signal_msi(&self, address: u32, data: u32) {
        // The result is the number of APICs that accepted it, not an error.
        let _ = self.vm.signal_msi(kvm_msi { address_lo: address, data, ..Default::default() });
    }

    pub fn page(&self, vcpu: usize) -> Page {
        Page(self.vcpus[vcpu].get_lapic().unwrap())
    }

    /// Removes pending NMIs; returns whether there were any.
    pub fn take_nmi(&self, vcpu: usize) -> bool {
        let mut events = self.vcpus[vcpu].get_vcpu_events().unwrap();
        let pending = events.nmi.pending != 0;
        if pending {
            events.nmi.pending = 0;
            events.flags |= KVM_VCPUEVENT_VALID_NMI_PENDING;
            self.vcpus[vcpu].set_vcpu_events(&events).unwrap();
        }
        pending
    }

    /// Whether INIT has reset the vCPU, and it waits for a start-up IPI.
    pub fn waits_for_startup(&self, vcpu: usize) -> bool {
        self.vcpus[vcpu].get_mp_state().unwrap().mp_state == KVM_MP_STATE_INIT_RECEIVED
    }

    /// The page at which the vCPU starts.
    pub fn startup_vector(&self, vcpu: usize) -> u64 {
        self.vcpus[vcpu].get_sregs().unwrap().cs.base >> 12
    }
}

fn disabled() -> kvm_regs {
    kvm_regs { rflags: INTERRUPTS_DISABLED, ..Default::default() }
}

/// Identity page tables over 4 GiB, segments, and an interrupt table whose handlers report their vectors.
fn fill(memory: &GuestMemoryMmap) {
    let store = |at: u64, value: u64| memory.write_obj(value, GuestAddress(at)).unwrap();
    store(PML4, PDPT | 0x23);
    for gib in 0..4 {
        let directory = PAGE_DIRECTORIES + 0x1000 * gib;
        store(PDPT + 8 * gib, directory | 0x23);
        for page in 0..512 {
            store(directory + 8 * page, gib << 30 | page << 21 | 0xE3);
        }
    }
    store(GDT + 8, 0x00AF_9B00_0000_FFFF);
    store(GDT + 16, 0x00CF_9300_0000_FFFF);
    for vector in 0..=u8::MAX {
        let handler = HANDLERS + 8 * u64::from(vector);
        // mov al, vector; out PORT_VECTOR, al; hlt
        let code = [0xB0, vector, 0xE6, PORT_VECTOR.to_le_bytes()[0], 0xF4];
        memory.write_slice(&code, GuestAddress(handler)).unwrap();
        let gate = IDT + 16 * u64::from(vector);
        store(gate, handler & 0xFFFF | 8 << 16 | 0x8E00 << 32 | handler >> 16 << 48);
        store(gate + 8, 0);
    }
}

/// The registers of a local APIC.
pub struct Page(kvm_lapic_state);

impl Page {
    /// Whether the vector's bit is set in a group of eight registers (IRR, ISR or TMR).
    pub fn contains(&self, first: u32, vector: u8) -> bool {
        self.register(first + u32::from(vector >> 5)) >> (vector & 31) & 1 != 0
    }

    pub fn highest(&self, first: u32) -> Option<u8> {
        (0..=u8::MAX).rev().find(|vector| self.contains(first, *vector))
    }

    pub fn register(&self, msr: u32) -> u32 {
        let at = usize::try_from(msr - 0x800).unwrap() * 16;
        let bytes: Vec<u8> = self.0.regs[at..at + 4].iter().map(|byte| byte.cast_unsigned()).collect();
        u32::from_le_bytes(bytes.try_into().unwrap())
    }
}
