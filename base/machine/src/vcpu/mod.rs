//! vCPU threads: run loop, pause, kick, resume, stop, save and restore.

mod apic;
mod control;
mod manager;
mod registers;
mod run;

pub use manager::{VcpuKicks, VcpuManager, VcpuOptions};
pub(crate) use registers::is_time;

use crate::state::SavedVcpu;
use crate::vm::VmError;
use crate::x86::{CpuId, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_sregs};

/// Initial registers of a vCPU.
#[derive(Debug, Clone, Default)]
pub struct StartRegisters {
    /// General registers.
    pub regs: kvm_regs,
    /// System registers. The APIC base is ignored; KVM's value stays.
    pub sregs: kvm_sregs,
    /// Floating-point state; `None` keeps the power-on state.
    pub fpu: Option<kvm_fpu>,
    /// MSRs to set.
    pub msrs: Vec<kvm_msr_entry>,
}

/// Start state of a vCPU.
#[derive(Debug, Clone)]
pub enum VcpuStart {
    /// Runs at once with these registers.
    Registers(Box<StartRegisters>),
    /// Power-on state; with local APICs, in the kernel or in the monitor, it waits for INIT and SIPI.
    WaitForSipi,
    /// Resumes the saved state of another vCPU.
    Restored(Box<SavedVcpu>),
}

/// One vCPU to create.
#[derive(Debug, Clone)]
pub struct VcpuConfig {
    /// vCPU and APIC id ([`crate::x86::CpuTopology::apic_id`]).
    pub id: u32,
    /// The vCPU's CPUID leaves ([`crate::x86::guest_cpuid`]). Ignored for [`VcpuStart::Restored`], which has leaves of its own.
    pub cpuid: CpuId,
    /// Whether further leaves report the frequency of the time-stamp counter, for guests that don't read KVM's clock. Must be `false`
    /// where vCPUs of several hosts are compared by their leaves: the hosts' frequencies differ slightly.
    pub tells_tsc_frequency: bool,
    /// Start state.
    pub start: VcpuStart,
    /// Host CPUs that its thread may run on; empty for all.
    pub pin_to: Vec<usize>,
}

/// An event that ended or interrupted a vCPU. Its thread then waits for new state or the stop; the other vCPUs run until they are paused.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VcpuEvent {
    /// Triple fault: a guest's last resort to request a reset.
    Shutdown {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Instruction pointer, where KVM reports it.
        rip: Option<u64>,
    },
    /// KVM reports a system event (reset, shutdown, crash).
    SystemEvent {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Type of the event, one of KVM_SYSTEM_EVENT_*.
        kind: u32,
    },
    /// HLT in a VM without local APICs, with no handler for it.
    Halted {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
    },
    /// The exit handler returned [`ExitAction::Stop`].
    Stopped {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
    },
    /// The vCPU can't be resumed: emulation failure, entry failure, memory fault, or an exit without a handler.
    Failed {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// What happened, with rip and instruction bytes where KVM reports them.
        what: String,
    },
    /// A device or handler panicked on this vCPU's thread.
    Panicked {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// The panic's message.
        what: String,
    },
}

/// Result of a [`VcpuExitHandler`] call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitAction {
    /// Not handled: the buses handle the exit.
    Pass,
    /// Handled; the vCPU continues.
    Handled,
    /// Handled; the vCPU stops with [`VcpuEvent::Stopped`].
    Stop,
}

/// Registers of a vCPU outside KVM_RUN.
pub trait GuestRegisters {
    /// General registers.
    fn get(&self) -> Result<kvm_regs, VcpuError>;
    /// Replaces the general registers.
    fn set(&self, registers: &kvm_regs) -> Result<(), VcpuError>;
}

/// Handles exits before the buses do (payload guests). Called on vCPU threads, possibly several at once.
pub trait VcpuExitHandler: Send + Sync {
    /// Called before the vCPU runs: for the first time, after a pause, and after each [`VcpuManager::kick`]. Port and memory accesses are
    /// complete, so registers are those of an instruction boundary. May wait, but must return soon after its owner has learned that the
    /// VM is to pause or stop. Default: nothing.
    fn before_run(&self, vcpu: u32, registers: &dyn GuestRegisters) {
        let _ = (vcpu, registers);
    }
    /// `out` of 1, 2 or 4 bytes.
    fn port_out(&self, vcpu: u32, port: u16, data: &[u8]) -> ExitAction {
        let _ = (vcpu, port, data);
        ExitAction::Pass
    }
    /// `in` of 1, 2 or 4 bytes; fills `data` unless it returns [`ExitAction::Pass`].
    fn port_in(&self, vcpu: u32, port: u16, data: &mut [u8]) -> ExitAction {
        let _ = (vcpu, port, data);
        ExitAction::Pass
    }
    /// HLT, where KVM doesn't handle it.
    fn halt(&self, vcpu: u32) -> ExitAction {
        let _ = vcpu;
        ExitAction::Pass
    }
}

/// vCPUs could not be created, paused, saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// An ioctl failed.
    #[error("KVM refused to {what} vCPU {vcpu}")]
    Refused {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// What was tried, with its values.
        what: String,
        /// Error of the ioctl.
        #[source]
        source: std::io::Error,
    },
    /// A newer program saved the state.
    #[error("Saved state of vCPU {vcpu} has version {found}, but this program reads up to {known}")]
    Version {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Version found.
        found: u32,
        /// Newest known.
        known: u32,
    },
    /// The state doesn't fit this vCPU.
    #[error("Saved state of vCPU {vcpu} can't be restored here: {reason}")]
    BadState {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Part of the state that KVM or this program refuses.
        reason: String,
    },
    /// A vCPU can't be saved.
    #[error("vCPU {vcpu} can't be saved: {reason}")]
    NotSaveable {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Nested virtualization in its CPUID, or an event that stopped it.
        reason: String,
    },
    /// A panic on the vCPU's thread: a bug.
    #[error("The thread of vCPU {vcpu} panicked when asked to {what}; the log has the panic's text")]
    Panicked {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// What was tried.
        what: &'static str,
    },
    /// The configuration isn't possible.
    #[error("vCPU {vcpu} can't be created: {reason}")]
    BadConfig {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Limit or rule that the configuration breaks.
        reason: String,
    },
    /// KVM can't leave local APICs to the monitor.
    #[error("The VM's local APICs can't be in the monitor")]
    LocalApics(#[source] VmError),
    /// The host refused to start or pin the thread.
    #[error("The thread of vCPU {vcpu} could not be {what}")]
    Thread {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// What was tried.
        what: String,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// No such vCPU.
    #[error("There is no vCPU {0}")]
    Absent(u32),
    /// The operation needs paused vCPUs.
    #[error("The vCPUs must be paused to {0}")]
    NotPaused(&'static str),
    /// A device handler didn't return in time.
    #[error("vCPU {vcpu} did not pause within {seconds} s: it is inside a device handler")]
    Stuck {
        /// Id of the vCPU, which is its APIC id.
        vcpu: u32,
        /// Time limit in seconds.
        seconds: u64,
    },
    /// A vCPU's thread made the call, and would wait for itself.
    #[error("A vCPU thread can't {0}: it would wait for itself")]
    OwnThread(&'static str),
    /// The vCPUs have been stopped.
    #[error("The vCPUs have been stopped")]
    Gone,
}
