//! Interface to local APICs outside KVM: the calls that vCPU threads make to them, and how they kick vCPUs.
//!
//! ```text
//! vCPU thread                                         other threads
//!   kicked = false, immediate_exit = 0                  latch an interrupt
//!   next_event: inject, reset, wait                     VcpuKicks::kick: kicked = true, immediate_exit = 1,
//!   cr8 ─▶ KVM_RUN ─▶ left_guest(cr8)                     then a signal if the vCPU is in the guest, a wake-up if it waits
//!   exits: RDMSR, WRMSR, HLT, SET_TPR, IRQ_WINDOW_OPEN
//! ```
//!
//! The APIC latches an interrupt before it kicks the vCPU, and a vCPU thread clears the kick before it checks for interrupts. So no
//! interrupt is lost, whatever the thread does at that moment.
//!
//! KVM has no filter for x2APIC MSRs (0x800 to 0x8FF). Without in-kernel APICs it refuses accesses to them, and the monitor asks that
//! refused accesses exit to user space. Accesses to IA32_APIC_BASE and IA32_XAPIC_DISABLE_STATUS, which KVM would answer itself, exit
//! too.
//!
//! Performance counters are off: KVM reports their overflows only to in-kernel APICs.
//!
//! Sources: Linux `Documentation/virt/kvm/api.rst` (KVM_CAP_X86_USER_SPACE_MSR, KVM_X86_SET_MSR_FILTER, KVM_INTERRUPT, KVM_NMI); Intel
//! SDM volume 3, "Processor management and initialization", for INIT and start-up.

use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER,
    KVM_MSR_EXIT_REASON_INVAL, KVM_PMU_CAP_DISABLE, kvm_enable_cap,
};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags};

use crate::vcpu::VcpuKicks;
use crate::vm::{Vm, VmError, errno};

const MSR_APIC_BASE: u32 = 0x1B;
const MSR_XAPIC_DISABLE_STATUS: u32 = 0xBD;

/// The action of a vCPU thread before it enters the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApicEvent {
    /// Reset the vCPU's registers as INIT does.
    Init,
    /// Start in real mode at page `vector`.
    Startup {
        /// The page number.
        vector: u8,
    },
    /// Wait for a kick, then call [`LocalApics::next_event`] again.
    WaitForStartup,
    /// Inject a non-maskable interrupt.
    Nmi,
    /// Inject this interrupt.
    Interrupt {
        /// Its vector.
        vector: u8,
    },
    /// Enter the guest, and exit as soon as the guest can receive an interrupt.
    AwaitInterruptWindow,
    /// Enter the guest.
    None,
}

/// The local APICs of a VM whose interrupt controllers aren't in the kernel. They are in x2APIC mode: there is no page of registers.
///
/// All calls but [`LocalApics::connect`] come from the thread of the vCPU that they name, possibly several at once for different vCPUs.
/// An implementation must not wait for vCPUs.
pub trait LocalApics: Send + Sync {
    /// Passes the handle by which the implementation kicks vCPUs. Called once, before any vCPU runs.
    fn connect(&self, kicks: VcpuKicks);
    /// CR8 with which the vCPU enters the guest, 0 to 15.
    fn cr8(&self, vcpu: u32) -> u8;
    /// Reports that the vCPU has left the guest with this CR8. This call precedes every other call that the exit causes.
    fn left_guest(&self, vcpu: u32, cr8: u8);
    /// The next action before the vCPU enters the guest. The thread calls again until it gets [`ApicEvent::None`],
    /// [`ApicEvent::AwaitInterruptWindow`] or [`ApicEvent::WaitForStartup`]. `interruptible`: KVM can inject an interrupt now.
    fn next_event(&self, vcpu: u32, interruptible: bool) -> ApicEvent;
    /// Whether the halted vCPU must resume. `interruptible`: RFLAGS.IF is set.
    fn has_event(&self, vcpu: u32, interruptible: bool) -> bool;
    /// Time until the APIC's timer interrupts; `None`: never. While the vCPU is in the guest, the implementation kicks it when this time
    /// has passed.
    fn time_to_timer(&self, vcpu: u32) -> Option<Duration>;
    /// Executes RDMSR. `None` makes the vCPU raise #GP; an MSR that no local APIC has must get it.
    fn read_msr(&self, vcpu: u32, msr: u32) -> Option<u64>;
    /// Executes WRMSR. `false` makes the vCPU raise #GP; an MSR that no local APIC has must get it.
    fn write_msr(&self, vcpu: u32, msr: u32, value: u64) -> bool;
}

/// Makes accesses to the MSRs of local APICs exit to user space. To be called before the first vCPU exists.
pub(crate) fn enable(vm: &Vm) -> Result<(), VmError> {
    if vm.has_kernel_irqchip() {
        let source = std::io::Error::other("its local APICs are in the kernel already");
        return Err(VmError::refused("leave local APICs to the monitor", source));
    }
    if !vm.fd().check_extension(Cap::X86UserSpaceMsr) {
        let source =
            std::io::Error::new(std::io::ErrorKind::Unsupported, "it lacks user_space_msr (Linux 5.10)");
        return Err(VmError::refused("leave MSRs of local APICs to the monitor", source));
    }
    let reasons = u64::from(KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_FILTER);
    let cap =
        kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, args: [reasons, 0, 0, 0], ..Default::default() };
    vm.fd()
        .enable_cap(&cap)
        .map_err(|error| VmError::refused("leave MSRs of local APICs to the monitor", errno(error)))?;
    let pmu = u64::from(KVM_PMU_CAP_DISABLE);
    if u64::try_from(vm.fd().check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()))
        .is_ok_and(|has| has & pmu != 0)
    {
        let cap = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, args: [pmu, 0, 0, 0], ..Default::default() };
        vm.fd()
            .enable_cap(&cap)
            .map_err(|error| VmError::refused("switch performance counters off", errno(error)))?;
    }
    let filtered = [MSR_APIC_BASE, MSR_XAPIC_DISABLE_STATUS].map(|base| MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base,
        msr_count: 1,
        // A clear bit: KVM doesn't handle the MSR.
        bitmap: &[0],
    });
    vm.fd().set_msr_filter(MsrFilterDefaultAction::ALLOW, &filtered).map_err(|error| {
        let what = format!("leave MSRs {MSR_APIC_BASE:#x} and {MSR_XAPIC_DISABLE_STATUS:#x} to the monitor");
        VmError::refused(what, errno(error))
    })?;
    vm.set_user_local_apics();
    Ok(())
}
