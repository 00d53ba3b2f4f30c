//! x86 register types (KVM's own) and the CPUID leaves of a guest.

pub use kvm_bindings::{
    CpuId, kvm_cpuid_entry2, kvm_debugregs, kvm_dtable, kvm_fpu, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};

use crate::kvm::{Host, HostError};

/// Which cores the guest sees: packages (sockets) of cores, one thread per core.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CpuTopology {
    packages: Vec<u32>,
}

/// A topology that can't be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TopologyError {
    /// No vCPUs, or too many.
    #[error("{0} vCPUs are not possible: choose 1 to 254")]
    Count(u32),
    /// APIC ids run out.
    #[error(
        "{packages} packages with up to {cores} cores need APIC ids up to {highest}, but 254 is the highest; use fewer or fuller packages"
    )]
    ApicIds {
        /// Packages.
        packages: usize,
        /// Cores of the largest.
        cores: u32,
        /// Highest id needed.
        highest: u32,
    },
}

impl CpuTopology {
    /// One package with `vcpus` cores.
    pub fn flat(vcpus: u32) -> Result<Self, TopologyError> {
        Self::packages(&[vcpus])
    }

    /// One package per entry (one per NUMA node, usually), with that many cores.
    pub fn packages(cores: &[u32]) -> Result<Self, TopologyError> {
        Ok(Self { packages: cores.to_vec() })
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> u32 {
        self.packages.iter().sum()
    }

    /// APIC id of vCPU `index`, also the id to create it with. Ids of a package are consecutive; packages begin at
    /// multiples of a power of two.
    pub fn apic_id(&self, index: u32) -> u32 {
        index
    }

    /// Package of vCPU `index`.
    pub fn package(&self, index: u32) -> usize {
        let _ = index;
        0
    }
}

/// The CPUID leaves for vCPU `index`: what KVM supports, with APIC id, topology, hypervisor bit, TSC-deadline timer and
/// KVM's paravirtual leaves.
pub fn guest_cpuid(_host: &Host, _topology: &CpuTopology, _index: u32) -> Result<CpuId, HostError> {
    todo!()
}
