//! A small ring-3 guest: long mode, identity page tables over the first GiB, IOPL 3, no interrupts. It runs on every
//! KVM back end, including PVM.
#![allow(dead_code)] // Each test file uses its part.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use machine::bus::{AddressSpace, BusDevice};
use machine::exits::RangeNames;
use machine::interrupt::IrqchipKind;
use machine::kvm::Host;
use machine::local_apic::LocalApics;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions};
use machine::slots::SlotId;
use machine::vcpu::{
    ExitAction, StartRegisters, VcpuConfig, VcpuEvent, VcpuExitHandler, VcpuManager, VcpuOptions, VcpuStart,
};
use machine::vm::Vm;
use machine::x86::{CpuTopology, guest_cpuid, kvm_regs, kvm_segment, kvm_sregs};

pub const RAM: u64 = 16 << 20;
pub const CODE: u64 = 0x1_0000;
/// Beyond RAM, within the page tables.
pub const WINDOW: u64 = 0x2000_0000;
/// `out` to this port stops a guest.
pub const PORT_STOP: u8 = 0xf4;

/// Sets ring-0 segments with base 0 and the highest limit: 64-bit code if `long`, 32-bit code otherwise.
pub fn flat_segments(sregs: &mut kvm_sregs, long: bool) {
    let segment = |selector, type_, long: bool| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        s: 1,
        g: 1,
        l: u8::from(long),
        db: u8::from(!long),
        ..Default::default()
    };
    let data = segment(16, 3, false);
    sregs.cs = segment(8, 11, long);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment { limit: 0x67, selector: 24, type_: 11, present: 1, ..Default::default() };
}

/// Opens KVM, or reports the skipped test.
pub fn host() -> Option<Host> {
    if !std::path::Path::new("/dev/kvm").exists() {
        facilities::missing(facilities::Facility::Kvm, "there is no /dev/kvm");
        return None;
    }
    Some(Host::open().unwrap())
}

/// Stops at [`PORT_STOP`], and passes everything else.
pub struct Stopper;

impl VcpuExitHandler for Stopper {
    fn port_out(&self, _vcpu: u32, port: u16, _data: &[u8]) -> ExitAction {
        if port == u16::from(PORT_STOP) { ExitAction::Stop } else { ExitAction::Pass }
    }
}

/// A device that records writes, and answers reads with a number that it increments each time.
#[derive(Default)]
pub struct Recorder {
    pub writes: Mutex<Vec<(u64, Vec<u8>)>>,
    pub next: Mutex<u64>,
}

impl BusDevice for Recorder {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        let mut next = self.next.lock().unwrap();
        data.copy_from_slice(&next.to_le_bytes()[..data.len()]);
        *next += 1;
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.writes.lock().unwrap().push((offset, data.to_vec()));
    }
}

pub struct Guest {
    pub vcpus: Arc<VcpuManager>,
    pub events: mpsc::Receiver<VcpuEvent>,
    pub ports: Arc<AddressSpace>,
    pub memory: Arc<AddressSpace>,
    pub ram: GuestRam,
    pub ram_slots: Vec<SlotId>,
    pub vm: Arc<Vm>,
    pub host: Host,
}

pub fn layout() -> RamLayout {
    RamLayout::new(&[RAM]).unwrap()
}

pub fn new_ram() -> GuestRam {
    let ram =
        GuestRam::allocate(&layout(), &RamOptions { name: "test".into(), ..RamOptions::default() }).unwrap();
    write_page_tables(&ram);
    ram
}

fn write_page_tables(ram: &GuestRam) {
    let memory = ram.memory().memory();
    memory.write_obj(0x2027u64, GuestAddress(0x1000)).unwrap();
    memory.write_obj(0x3027u64, GuestAddress(0x2000)).unwrap();
    for i in 0..512u64 {
        memory.write_obj(i << 21 | 0xe7, GuestAddress(0x3000 + i * 8)).unwrap();
    }
}

pub fn config(host: &Host, vcpus: u32, index: u32, start: VcpuStart) -> VcpuConfig {
    let topology = CpuTopology::flat(vcpus).unwrap();
    VcpuConfig {
        id: topology.apic_id(index),
        cpuid: guest_cpuid(host, &topology, index, IrqchipKind::Kernel).unwrap(),
        tells_tsc_frequency: true,
        start,
        pin_to: Vec::new(),
    }
}

impl Guest {
    /// A guest with `vcpus` vCPUs, paused, without interrupt controllers.
    pub fn new(host: Host, vcpus: u32) -> Self {
        let ram = new_ram();
        let starts = (0..vcpus).map(|_| start(kvm_regs::default())).collect();
        Self::with(host, ram, starts, |_| {})
    }

    /// A guest with the given RAM and start states; `prepare` runs before vCPUs are created.
    pub fn with(host: Host, ram: GuestRam, starts: Vec<VcpuStart>, prepare: impl FnOnce(&Arc<Vm>)) -> Self {
        Self::with_local_apics(host, ram, starts, None, prepare)
    }

    /// A guest with local APICs outside KVM.
    pub fn with_local_apics(
        host: Host,
        ram: GuestRam,
        starts: Vec<VcpuStart>,
        local_apics: Option<Arc<dyn LocalApics>>,
        prepare: impl FnOnce(&Arc<Vm>),
    ) -> Self {
        let vm = host.create_vm().unwrap();
        prepare(&vm);
        let ram_slots = vm.slots().add_ram(&ram).unwrap();
        let names = RangeNames::new();
        let ports = Arc::new(AddressSpace::ports(Arc::clone(&names)));
        let memory = Arc::new(AddressSpace::memory(Arc::clone(&names)));
        let (sender, events) = mpsc::channel();
        let options = VcpuOptions {
            local_apics,
            ports: Arc::clone(&ports),
            memory: Arc::clone(&memory),
            names,
            on_event: Arc::new(move |event| drop(sender.send(event))),
            exit_handler: Some(Arc::new(Stopper)),
            on_thread_start: None,
        };
        let vcpus = u32::try_from(starts.len()).unwrap();
        let configs = (0u32..).zip(starts).map(|(i, start)| config(&host, vcpus, i, start)).collect();
        let vcpus = Arc::new(VcpuManager::start(&vm, configs, options).unwrap());
        Self { vcpus, events, ports, memory, ram, ram_slots, vm, host }
    }

    pub fn load(&self, address: u64, code: &[u8]) {
        self.ram.memory().memory().write_slice(code, GuestAddress(address)).unwrap();
    }

    pub fn read_u64(&self, address: u64) -> u64 {
        self.ram.memory().memory().read_obj(GuestAddress(address)).unwrap()
    }

    /// Runs `code` on vCPU 0 from fresh registers until an event; paused afterwards.
    pub fn run(&self, code: &[u8], regs: kvm_regs) -> VcpuEvent {
        self.load(CODE, code);
        self.vcpus.set_state(0, start(regs)).unwrap();
        self.vcpus.resume().unwrap();
        let event = self.events.recv_timeout(Duration::from_secs(10)).expect("an event within 10 s");
        self.vcpus.pause().unwrap();
        event
    }

    /// Runs `code` as [`Self::run`] does, requires that the stop port ended it, and returns the registers.
    pub fn run_to_stop(&self, code: &[u8], regs: kvm_regs) -> kvm_regs {
        let event = self.run(code, regs);
        assert_eq!(event, VcpuEvent::Stopped { vcpu: 0 });
        self.vcpus.registers(0).unwrap().0
    }

    /// Exits so far by cause or range name.
    pub fn exits(&self, name: &str) -> u64 {
        let snapshot = self.vcpus.exits();
        let (causes, ranges) = (snapshot.causes(), snapshot.ranges());
        causes.get(name).or_else(|| ranges.get(name)).copied().unwrap_or(0)
    }
}

/// Ring 3 in long mode with flat segments. Fills `rip`, `rsp` and `rflags` where they are 0.
pub fn start(regs: kvm_regs) -> VcpuStart {
    VcpuStart::Registers(Box::new(start_registers(regs)))
}

/// The registers of [`start`], for tests that change them.
pub fn start_registers(mut regs: kvm_regs) -> StartRegisters {
    let segment = |selector, type_, l, db| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        s: 1,
        g: 1,
        l,
        db,
        ..Default::default()
    };
    let (cs, data) = (segment(0x33, 11, 1, 0), segment(0x2b, 3, 0, 1));
    let tr = kvm_segment { limit: 0x67, selector: 0x40, type_: 11, present: 1, ..Default::default() };
    let sregs = kvm_sregs {
        cs,
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr,
        cr0: 0x8005_0033,
        cr3: 0x1000,
        cr4: 0x620,
        efer: 0xd00,
        ..Default::default()
    };
    for (register, default) in [(&mut regs.rip, CODE), (&mut regs.rsp, 0x9000), (&mut regs.rflags, 0x3002)] {
        if *register == 0 {
            *register = default;
        }
    }
    StartRegisters { regs, sregs, ..Default::default() }
}

/// Code that ends a program: `out PORT_STOP, al`.
pub const STOP: [u8; 2] = [0xe6, PORT_STOP];

/// The parts of a program, one after the other.
pub fn program(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}
