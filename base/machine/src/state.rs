//! Saved state: versioned types, apart from those of the running machine.

use crate::irqchip_kind::IrqchipKind;
use crate::x86;

/// Version of [`SavedVcpu`] that this program writes.
pub const VCPU_STATE_VERSION: u32 = 1;
/// Version of [`SavedKernelIrqchip`] that this program writes.
pub const IRQCHIP_STATE_VERSION: u32 = 1;
/// Version of [`SavedClock`] that this program writes.
pub const CLOCK_STATE_VERSION: u32 = 1;

/// One MSR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedMsr {
    /// Its number.
    pub index: u32,
    /// Its value.
    pub value: u64,
}

/// The whole state of one vCPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct SavedVcpu {
    /// [`VCPU_STATE_VERSION`] of the writer.
    pub version: u32,
    /// The vCPU's id, which is its APIC id.
    pub id: u32,
    /// CPUID leaves.
    pub cpuid: Vec<x86::kvm_cpuid_entry2>,
    /// General registers.
    pub regs: x86::kvm_regs,
    /// System registers.
    pub sregs: x86::kvm_sregs,
    /// XSAVE area; its length in bytes is what this vCPU's features need.
    pub xsave: Vec<u8>,
    /// Extended control registers (XCR0 and others); absent where the host's CPU has no XSAVE.
    pub xcrs: Option<x86::kvm_xcrs>,
    /// DR0 to DR7.
    pub debugregs: x86::kvm_debugregs,
    /// Local APIC page, where the interrupt controllers are in the kernel.
    pub lapic: Option<x86::kvm_lapic_state>,
    /// Multiprocessing state: running, halted, waiting for SIPI.
    pub mp_state: x86::kvm_mp_state,
    /// Pending exceptions, NMIs, interrupts.
    pub events: x86::kvm_vcpu_events,
    /// Model-specific registers.
    pub msrs: Vec<SavedMsr>,
    /// TSC frequency in kHz, where KVM knows it.
    pub tsc_khz: Option<u32>,
}

impl SavedInterruptController {
    /// Where the saved controllers were emulated.
    pub fn kind(&self) -> IrqchipKind {
        match self {
            Self::KernelIrqchip(_) => IrqchipKind::Kernel,
            Self::Monitor(_) => IrqchipKind::Monitor,
        }
    }

    /// An error of kind `InvalidData`, for a VM whose controllers are in another place (`here`) than the saved ones were.
    pub fn elsewhere(&self, here: IrqchipKind) -> std::io::Error {
        let there = self.kind();
        let text = format!(
            "Saved interrupt controllers were in the {there}, and this VM's are in the {here}: describe it with interrupts = \"{there}\""
        );
        std::io::Error::new(std::io::ErrorKind::InvalidData, text)
    }
}

impl SavedVcpu {
    /// Removes the time-stamp counter, so that a restored vCPU keeps the one that it has.
    pub fn forget_time(&mut self) {
        self.msrs.retain(|msr| !crate::vcpu::is_time(msr.index));
    }
}

/// State of the interrupt controllers outside the vCPUs.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub enum SavedInterruptController {
    /// PICs, IOAPIC and PIT in the kernel ([`crate::irqchip::KernelIrqchip`]).
    KernelIrqchip(Box<SavedKernelIrqchip>),
    /// Controllers in the monitor ([`crate::interrupt::IrqchipKind::Monitor`]), local APICs included, in the monitor's encoding.
    Monitor(Vec<u8>),
}

/// PICs, IOAPIC and PIT of KVM.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct SavedKernelIrqchip {
    /// Version of this type.
    pub version: u32,
    /// First PIC.
    pub pic_master: x86::kvm_irqchip,
    /// Second PIC.
    pub pic_slave: x86::kvm_irqchip,
    /// IOAPIC, with its redirection entries.
    pub ioapic: x86::kvm_irqchip,
    /// 8254 timer, where it was created.
    pub pit: Option<x86::kvm_pit_state2>,
}

/// KVM's paravirtual clock.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedClock {
    /// Version of this type.
    pub version: u32,
    /// Nanoseconds of guest time.
    pub clock_ns: u64,
    /// Host wall-clock nanoseconds at that moment, where KVM reports them.
    pub realtime_ns: Option<u64>,
    /// Host TSC at that moment, where KVM reports it.
    pub host_tsc: Option<u64>,
}
