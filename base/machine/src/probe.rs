//! Whether kernel code runs natively under this host's KVM.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::bus::AddressSpace;
use crate::exits::RangeNames;
use crate::interrupt::IrqchipKind;
use crate::kvm::{Host, HostError};
use crate::memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryError, GuestRam, MemoryError, RamLayout, RamOptions,
};
use crate::slots::SlotError;
use crate::vcpu::{
    ExitAction, StartRegisters, VcpuConfig, VcpuError, VcpuEvent, VcpuExitHandler, VcpuManager, VcpuOptions,
    VcpuStart,
};
use crate::vm::VmError;
use crate::x86::{CpuTopology, guest_cpuid, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};

/// Result of the probe for ring-0 code.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Ring0Probe {
    /// Whether an ordinary kernel is expected to boot.
    pub ordinary_kernels: bool,
    /// The observation, as one sentence.
    pub finding: String,
    /// Nanoseconds per simple ring-0 instruction, where the probe could measure it.
    pub ns_per_instruction: Option<f64>,
}

/// The probe itself could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("The probe for ring-0 code could not be set up")]
pub struct ProbeError(#[source] Box<dyn std::error::Error + Send + Sync>);

macro_rules! probe_error_from {
    ($($source:ty),+) => {
        $(impl From<$source> for ProbeError {
            fn from(source: $source) -> Self {
                Self(Box::new(source))
            }
        })+
    };
}
probe_error_from!(HostError, VmError, MemoryError, SlotError, VcpuError, GuestMemoryError);

const RAM: u64 = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORY: u64 = 0x3000;
const CODE: u64 = 0x1_0000;
const STACK: u64 = 0x9000;
const ITERATIONS: u32 = 10_000;
/// The probe uses the shortest of these rounds: a busy host interrupts some.
const ROUNDS: u8 = 8;
const PORT_BEGIN: u16 = 0x80;
const PORT_COUNTED: u16 = 0x81;
const PORT_END: u16 = 0x82;
/// Limit in nanoseconds per instruction; an iteration has two. Emulators need microseconds, processors less than a nanosecond. A virtual
/// machine inside a binary translator needs a few nanoseconds and still counts as able.
const SLOWEST_NS: f64 = 50.0;
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// Counts down in ring 0, then executes privileged instructions as kernels do: control registers, EFER, interrupt flag.
fn code() -> Vec<u8> {
    let mut code = vec![0xb3, ROUNDS]; // mov bl, ROUNDS
    code.extend([0xe6, 0x80, 0xb9]); // out 0x80, al; mov ecx, ITERATIONS
    code.extend(ITERATIONS.to_le_bytes());
    code.extend([
        0xff, 0xc9, // dec ecx
        0x75, 0xfc, // jnz to the dec
        0xe6, 0x81, // out 0x81, al
        0xfe, 0xcb, 0x75, 0xef, // dec bl; jnz to the first out
        0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8, // mov rax, cr3; mov cr3, rax
        0x0f, 0x20, 0xe0, 0x0f, 0x22, 0xe0, // mov rax, cr4; mov cr4, rax
        0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f, 0x32, 0x0f, 0x30, // mov ecx, 0xc0000080; rdmsr; wrmsr
        0xfa, // cli
        0xe6, 0x82, // out 0x82, al
        0xf4, 0xeb, 0xfd, // hlt; jmp to the hlt
    ]);
    code
}

fn registers() -> StartRegisters {
    let segment = |selector, type_, l, db| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        s: 1,
        g: 1,
        l,
        db,
        ..Default::default()
    };
    let (cs, data) = (segment(8, 11, 1, 0), segment(16, 3, 0, 1));
    let tr = kvm_segment { limit: 0x67, selector: 24, type_: 11, present: 1, ..Default::default() };
    let table = kvm_dtable { base: 0, limit: 0, ..Default::default() };
    let sregs = kvm_sregs {
        cs,
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr,
        gdt: table,
        idt: table,
        cr0: 0x8005_0033,
        cr3: PML4,
        cr4: 0x620,
        efer: 0x500,
        ..Default::default()
    };
    let regs = kvm_regs { rip: CODE, rsp: STACK, rflags: 2, ..Default::default() };
    StartRegisters { regs, sregs, ..Default::default() }
}

/// The events that the guest program has reported by port writes.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    began: Option<Instant>,
    /// The shortest round.
    best: Option<Duration>,
    ended: bool,
}

#[derive(Default)]
struct Watch(Mutex<Seen>);

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VcpuExitHandler for Watch {
    fn port_out(&self, _vcpu: u32, port: u16, _data: &[u8]) -> ExitAction {
        let mut seen = self.lock();
        match port {
            PORT_BEGIN => seen.began = Some(Instant::now()),
            PORT_COUNTED => {
                let round = seen.began.map(|began| began.elapsed());
                seen.best = round.into_iter().chain(seen.best).min();
            }
            PORT_END => {
                seen.ended = true;
                return ExitAction::Stop;
            }
            _ => return ExitAction::Pass,
        }
        ExitAction::Handled
    }
}

impl Host {
    /// Runs a few thousand simple ring-0 instructions in a temporary VM, to find whether ordinary kernels can run. Blocks for at most
    /// about a second.
    pub fn probe_ring0(&self) -> Result<Ring0Probe, ProbeError> {
        let vm = self.create_vm()?;
        let ram = GuestRam::allocate(
            &RamLayout::new(&[RAM])?,
            &RamOptions { name: "probe".into(), ..RamOptions::default() },
        )?;
        vm.slots().add_ram(&ram)?;
        let memory = ram.memory().memory();
        // Present, writable, accessed, dirty; the last level maps 2 MiB.
        memory.write_obj(PDPT | 0x23, GuestAddress(PML4))?;
        memory.write_obj(PAGE_DIRECTORY | 0x23, GuestAddress(PDPT))?;
        memory.write_obj(0xe3u64, GuestAddress(PAGE_DIRECTORY))?;
        memory.write_slice(&code(), GuestAddress(CODE))?;
        let (sender, events) = mpsc::channel();
        let watch = Arc::new(Watch::default());
        let names = RangeNames::new();
        let options = VcpuOptions {
            local_apics: None,
            ports: Arc::new(AddressSpace::ports(Arc::clone(&names))),
            memory: Arc::new(AddressSpace::memory(Arc::clone(&names))),
            names,
            on_event: Arc::new(move |event| drop(sender.send(event))),
            exit_handler: Some(Arc::clone(&watch) as Arc<dyn VcpuExitHandler>),
            on_thread_start: None,
        };
        let topology = CpuTopology::flat(1).map_err(|error| ProbeError(Box::new(error)))?;
        let config = VcpuConfig {
            id: 0,
            cpuid: guest_cpuid(self, &topology, 0, IrqchipKind::Kernel)?,
            tells_tsc_frequency: false,
            start: VcpuStart::Registers(Box::new(registers())),
            pin_to: Vec::new(),
        };
        let manager = VcpuManager::start(&vm, vec![config], options)?;
        manager.resume()?;
        let event = events.recv_timeout(TIME_LIMIT).ok();
        manager.stop()?;
        let seen = *watch.lock();
        Ok(judge(event, seen))
    }
}

fn judge(event: Option<VcpuEvent>, seen: Seen) -> Ring0Probe {
    let ns_per_instruction = seen.best.map(|spent| spent.as_secs_f64() * 1e9 / f64::from(2 * ITERATIONS));
    let (ordinary_kernels, finding) = match (event, ns_per_instruction) {
        (Some(VcpuEvent::Stopped { .. }), Some(ns)) if seen.ended && ns <= SLOWEST_NS => {
            (true, format!("Ring-0 code runs natively, {ns:.2} ns per simple instruction"))
        }
        (Some(VcpuEvent::Stopped { .. }), Some(ns)) => (
            false,
            format!(
                "Ring-0 code is emulated, {ns:.0} ns per simple instruction: ordinary kernels won't boot"
            ),
        ),
        (Some(VcpuEvent::Failed { what, .. }), _) => (false, format!("Ring-0 code fails: {what}")),
        (Some(VcpuEvent::Shutdown { rip, .. }), _) => {
            (false, format!("Ring-0 code ends in a triple fault at rip {:#x}", rip.unwrap_or(0)))
        }
        (Some(event), _) => (false, format!("Ring-0 code ends unexpectedly: {event:?}")),
        (None, Some(_)) => (false, "Privileged instructions don't come to an end within a second".into()),
        (None, None) => {
            (false, "20,000 simple ring-0 instructions don't come to an end within a second".into())
        }
    };
    Ring0Probe { ordinary_kernels, finding, ns_per_instruction }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(microseconds: u64, ended: bool) -> Seen {
        Seen { began: None, best: Some(Duration::from_micros(microseconds)), ended }
    }

    #[test]
    fn only_fast_and_complete_runs_promise_ordinary_kernels() {
        let stopped = || Some(VcpuEvent::Stopped { vcpu: 0 });
        assert!(judge(stopped(), seen(100, true)).ordinary_kernels);
        assert!(!judge(stopped(), seen(20_000, true)).ordinary_kernels);
        assert!(!judge(None, seen(100, false)).ordinary_kernels);
        assert!(!judge(None, Seen::default()).ordinary_kernels);
        let failed = VcpuEvent::Failed { vcpu: 0, what: "no way".into() };
        let probe = judge(Some(failed), seen(100, false));
        assert!(!probe.ordinary_kernels && probe.finding.contains("no way"));
    }
}
