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

/// Registers a vCPU starts with.
#[derive(Debug, Clone, Default)]
pub struct StartRegisters {
    /// General registers.
    pub regs: kvm_regs,
    /// System registers. The APIC base is KVM's own; what stands here is ignored.
    pub sregs: kvm_sregs,
    /// Floating point, where it isn't the power-on state.
    pub fpu: Option<kvm_fpu>,
    /// MSRs to set.
    pub msrs: Vec<kvm_msr_entry>,
}

/// How a vCPU begins.
#[derive(Debug, Clone)]
pub enum VcpuStart {
    /// Runs at once with these registers.
    Registers(Box<StartRegisters>),
    /// Power-on state; with local APICs, in the kernel or in the monitor, it waits for INIT and SIPI.
    WaitForSipi,
    /// Goes on where another one was saved.
    Restored(Box<SavedVcpu>),
}

/// One vCPU to create.
#[derive(Debug, Clone)]
pub struct VcpuConfig {
    /// vCPU and APIC id ([`crate::x86::CpuTopology::apic_id`]).
    pub id: u32,
    /// Its CPUID leaves ([`crate::x86::guest_cpuid`]). Ignored for [`VcpuStart::Restored`], which brings its own.
    pub cpuid: CpuId,
    /// Whether further leaves tell the guest the frequency of its time-stamp counter, for those that don't read KVM's clock. Not where vCPUs of several hosts are
    /// compared by their leaves: each host's frequency is a little different.
    pub tells_tsc_frequency: bool,
    /// How it begins.
    pub start: VcpuStart,
    /// Host CPUs its thread may run on; empty for all.
    pub pin_to: Vec<usize>,
}

/// Something ended or interrupted a vCPU. Its thread waits then until it is given new state, or stopped; the other vCPUs
/// go on until paused.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VcpuEvent {
    /// Triple fault: how a guest of this architecture asks for a reset when nothing else works.
    Shutdown {
        /// vCPU.
        vcpu: u32,
        /// Where.
        rip: Option<u64>,
    },
    /// KVM reports a system event (reset, shutdown, crash).
    SystemEvent {
        /// vCPU.
        vcpu: u32,
        /// KVM_SYSTEM_EVENT_*.
        kind: u32,
    },
    /// HLT without local APICs and no handler for it.
    Halted {
        /// vCPU.
        vcpu: u32,
    },
    /// The exit handler asked to stop ([`ExitAction::Stop`]).
    Stopped {
        /// vCPU.
        vcpu: u32,
    },
    /// KVM can't go on: emulation failure, entry failure, memory fault or an exit nobody asked for.
    Failed {
        /// vCPU.
        vcpu: u32,
        /// What happened, with rip and instruction bytes where KVM gives them.
        what: String,
    },
    /// A device or handler panicked on this vCPU's thread.
    Panicked {
        /// vCPU.
        vcpu: u32,
        /// The panic's message.
        what: String,
    },
}

/// What to do after a [`VcpuExitHandler`] call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitAction {
    /// Not mine: treat it as usual.
    Pass,
    /// Done; the vCPU goes on.
    Handled,
    /// Done; the vCPU stops with [`VcpuEvent::Stopped`].
    Stop,
}

/// Registers of a vCPU whose thread is between two runs.
pub trait GuestRegisters {
    /// General registers.
    fn get(&self) -> Result<kvm_regs, VcpuError>;
    /// Replaces them.
    fn set(&self, registers: &kvm_regs) -> Result<(), VcpuError>;
}

/// Takes exits before the buses see them (payload guests). Called on vCPU threads, possibly several at once.
pub trait VcpuExitHandler: Send + Sync {
    /// The vCPU is about to run: for the first time, after a pause, and after each [`VcpuManager::kick`]. Port and memory accesses are
    /// complete, so registers are those of an instruction boundary. May wait, and must return soon after its owner has been told that
    /// the VM is to pause or stop. Default: nothing.
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
        /// vCPU.
        vcpu: u32,
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The state is of another program.
    #[error("Saved state of vCPU {vcpu} has version {found}, but this program reads up to {known}")]
    Version {
        /// vCPU.
        vcpu: u32,
        /// Version found.
        found: u32,
        /// Newest known.
        known: u32,
    },
    /// The state doesn't fit.
    #[error("Saved state of vCPU {vcpu} can't be restored here: {reason}")]
    BadState {
        /// vCPU.
        vcpu: u32,
        /// Why.
        reason: String,
    },
    /// A vCPU can't be saved.
    #[error("vCPU {vcpu} can't be saved: {reason}")]
    NotSaveable {
        /// vCPU.
        vcpu: u32,
        /// Why.
        reason: String,
    },
    /// A bug, reported rather than passed on.
    #[error("The thread of vCPU {vcpu} panicked when asked to {what}; the log has the panic's text")]
    Panicked {
        /// vCPU.
        vcpu: u32,
        /// What was tried.
        what: &'static str,
    },
    /// The VM description asks for what can't be.
    #[error("vCPU {vcpu} can't be created: {reason}")]
    BadConfig {
        /// vCPU.
        vcpu: u32,
        /// Why.
        reason: String,
    },
    /// KVM doesn't leave local APICs to the monitor.
    #[error("The VM's local APICs can't be in the monitor")]
    LocalApics(#[source] VmError),
    /// The host gave no thread, or wouldn't pin it.
    #[error("The thread of vCPU {vcpu} could not be {what}")]
    Thread {
        /// vCPU.
        vcpu: u32,
        /// What was tried.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No such vCPU.
    #[error("There is no vCPU {0}")]
    Absent(u32),
    /// Paused state is needed.
    #[error("The vCPUs must be paused to {0}")]
    NotPaused(&'static str),
    /// A vCPU doesn't come out of a device.
    #[error("vCPU {vcpu} did not pause within {seconds} s: it is inside a device handler")]
    Stuck {
        /// vCPU.
        vcpu: u32,
        /// Time waited.
        seconds: u64,
    },
    /// Would wait for itself.
    #[error("A vCPU thread can't {0}: it would wait for itself")]
    OwnThread(&'static str),
    /// The threads are gone.
    #[error("The vCPUs have been stopped")]
    Gone,
}
