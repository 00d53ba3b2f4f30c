//! x86 register types (KVM's own) and the CPUID leaves of a guest.

mod cpuid;
pub(crate) mod mtrr;
mod topology;
mod tsc_frequency;

pub use cpuid::guest_cpuid;
pub use topology::{CpuTopology, MAX_APIC_ID, MAX_VCPUS, TopologyError};
pub(crate) use tsc_frequency::with_tsc_frequency;

pub use kvm_bindings::{
    CpuId, kvm_cpuid_entry2, kvm_debugregs, kvm_dtable, kvm_fpu, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
