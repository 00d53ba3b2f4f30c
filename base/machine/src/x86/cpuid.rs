//! The CPUID leaves of one vCPU, from those that KVM supports.
//!
//! Sources: Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E; Linux `Documentation/virt/kvm/x86/cpuid.rst`.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::topology::CpuTopology;
use crate::interrupt::IrqchipKind;
use crate::kvm::{Host, HostError};

const LEAF_FEATURES: u32 = 1;
const LEAF_CACHES_INTEL: u32 = 4;
const LEAF_COUNTERS_INTEL: u32 = 0xa;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
pub(super) const LEAF_HYPERVISOR: u32 = 0x4000_0000;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
const LEAF_SIZES: u32 = 0x8000_0008;
const LEAF_CACHES_AMD: u32 = 0x8000_001d;
const LEAF_TOPOLOGY_AMD: u32 = 0x8000_001e;
const LEAF_COUNTERS_AMD: u32 = 0x8000_0022;
const LEAF_TOPOLOGY_AMD_V2: u32 = 0x8000_0026;

const ECX_VMX: u32 = 1 << 5;
const ECX_X2APIC: u32 = 1 << 21;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_OSXSAVE: u32 = 1 << 27;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;
const EXTENDED_ECX_CMP_LEGACY: u32 = 1 << 1;
const EXTENDED_ECX_SVM: u32 = 1 << 2;
/// ECX of leaf 0x80000001: extended performance counters (AMD), beyond those that every processor has.
const EXTENDED_ECX_COUNTERS: u32 = 1 << 23;

/// The CPUID leaves for vCPU `index`: the leaves that KVM supports, with APIC id, topology, hypervisor bit and KVM's paravirtual leaves.
/// Nested virtualization isn't offered.
///
/// | controllers | TSC-deadline timer | x2APIC | performance counters | KVM's paravirtual features |
/// |---|---|---|---|---|
/// | in the kernel | where KVM emulates it | as KVM supports | as KVM supports | as KVM supports |
/// | in the monitor | no | yes | no | none |
///
/// With controllers in the monitor Linux uses x2APIC because of KVM's signature alone. The paravirtual features are clocks, events and
/// counters that KVM writes to guest memory by itself.
pub fn guest_cpuid(
    host: &Host,
    topology: &CpuTopology,
    index: u32,
    irqchip: IrqchipKind,
) -> Result<CpuId, HostError> {
    let supported = host.supported_cpuid()?;
    let mut leaves = adjust(supported.as_slice(), topology, index, host.has_tsc_deadline());
    if irqchip == IrqchipKind::Monitor {
        remove_kvm_apic_features(&mut leaves);
    }
    CpuId::from_entries(&leaves).map_err(|error| HostError::Refused {
        what: format!("take {} CPUID leaves", leaves.len()),
        source: std::io::Error::other(format!("{error:?}")),
    })
}

fn remove_kvm_apic_features(leaves: &mut [kvm_cpuid_entry2]) {
    for leaf in leaves {
        match leaf.function {
            LEAF_FEATURES => leaf.ecx = leaf.ecx & !ECX_TSC_DEADLINE | ECX_X2APIC,
            LEAF_KVM_FEATURES | LEAF_COUNTERS_INTEL | LEAF_COUNTERS_AMD => {
                (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx) = (0, 0, 0, 0);
            }
            LEAF_EXTENDED_FEATURES => leaf.ecx &= !EXTENDED_ECX_COUNTERS,
            _ => {}
        }
    }
}

/// Sets bits `low..low + width` of a register.
fn put(register: &mut u32, low: u32, width: u32, value: u32) {
    let mask = ((1u32 << width) - 1) << low;
    *register = *register & !mask | value << low & mask;
}

fn adjust(
    supported: &[kvm_cpuid_entry2],
    topology: &CpuTopology,
    index: u32,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let apic_id = topology.apic_id(index);
    let stride = topology.stride();
    let cores = topology.cores_beside(index);
    let largest = supported.iter().find(|leaf| leaf.function == 0).map_or(0, |leaf| leaf.eax);
    let is_amd = supported.iter().any(|leaf| leaf.function == 0 && is_amd(leaf));
    let replaced = [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2, LEAF_TOPOLOGY_AMD_V2];
    let mut leaves: Vec<_> =
        supported.iter().filter(|leaf| !replaced.contains(&leaf.function)).copied().collect();
    for leaf in &mut leaves {
        match leaf.function {
            LEAF_FEATURES => {
                put(&mut leaf.ebx, 24, 8, apic_id);
                put(&mut leaf.ebx, 16, 8, stride.min(255));
                leaf.ecx = leaf.ecx & !(ECX_VMX | ECX_OSXSAVE | ECX_TSC_DEADLINE) | ECX_HYPERVISOR;
                if tsc_deadline {
                    leaf.ecx |= ECX_TSC_DEADLINE;
                }
                put(&mut leaf.edx, EDX_HTT.trailing_zeros(), 1, u32::from(cores > 1));
            }
            // Type 0 ends the list of caches.
            LEAF_CACHES_INTEL if leaf.eax & 0x1f != 0 => {
                put(&mut leaf.eax, 26, 6, (stride - 1).min(63));
                let sharers = sharers(leaf.eax, stride);
                put(&mut leaf.eax, 14, 12, sharers - 1);
            }
            LEAF_CACHES_AMD if leaf.eax & 0x1f != 0 => {
                let sharers = sharers(leaf.eax, cores);
                put(&mut leaf.eax, 14, 12, sharers - 1);
            }
            LEAF_EXTENDED_FEATURES => {
                leaf.ecx &= !(EXTENDED_ECX_SVM | EXTENDED_ECX_CMP_LEGACY);
                if is_amd && cores > 1 {
                    leaf.ecx |= EXTENDED_ECX_CMP_LEGACY;
                }
            }
            LEAF_SIZES if is_amd => {
                put(&mut leaf.ecx, 0, 8, cores - 1);
                put(&mut leaf.ecx, 12, 4, stride.trailing_zeros());
            }
            LEAF_TOPOLOGY_AMD => {
                leaf.eax = apic_id;
                // Core number; one thread per core.
                leaf.ebx = apic_id & (stride - 1);
                // Node number; one node per package.
                leaf.ecx = u32::try_from(topology.package(index)).unwrap_or(0);
                leaf.edx = 0;
            }
            _ => {}
        }
    }
    for function in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
        let known = function == LEAF_TOPOLOGY || supported.iter().any(|leaf| leaf.function == function);
        if function <= largest && known {
            leaves.extend(topology_leaves(function, apic_id, stride, cores));
        }
    }
    add_hypervisor(&mut leaves);
    leaves
}

/// Whether leaf 0 names AMD or Hygon.
pub(super) fn is_amd(leaf: &kvm_cpuid_entry2) -> bool {
    let mut vendor = [0; 12];
    for (part, register) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        part.copy_from_slice(&register.to_le_bytes());
    }
    matches!(&vendor, b"AuthenticAMD" | b"HygonGenuine")
}

/// Cores that share a cache: L3 belongs to the package, smaller ones to a core.
fn sharers(eax: u32, package: u32) -> u32 {
    let level = eax >> 5 & 7;
    if level >= 3 { package } else { 1 }
}

/// Topology levels thread and core, then the end of the list.
fn topology_leaves(function: u32, apic_id: u32, stride: u32, cores: u32) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | kind << 8,
        edx: apic_id,
        ..Default::default()
    };
    [level(0, 0, 1, 1), level(1, stride.trailing_zeros(), cores, 2), level(2, 0, 0, 0)]
}

/// Adds KVM's signature, where the supported leaves lack it.
fn add_hypervisor(leaves: &mut Vec<kvm_cpuid_entry2>) {
    if leaves.iter().any(|leaf| leaf.function == LEAF_HYPERVISOR) {
        return;
    }
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    leaves.push(kvm_cpuid_entry2 {
        function: LEAF_HYPERVISOR,
        eax: LEAF_KVM_FEATURES,
        ebx: word(b"KVMK"),
        ecx: word(b"VMKV"),
        edx: word(b"M\0\0\0"),
        ..Default::default()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn vendor(name: &[u8; 12], largest: u32) -> kvm_cpuid_entry2 {
        let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
        leaf(0, 0, [largest, word(0), word(8), word(4)])
    }

    fn find(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *leaves.iter().find(|leaf| leaf.function == function && leaf.index == index).unwrap()
    }

    #[test]
    fn an_intel_guest_sees_its_own_topology_instead_of_the_hosts() {
        let supported = [
            vendor(b"GenuineIntel", 0x1f),
            leaf(1, 0, [0, 0xff20_0000, ECX_VMX | ECX_OSXSAVE, EDX_HTT]),
            leaf(4, 0, [31 << 26 | 1 << 14 | 1 << 5 | 1, 0, 0, 0]),
            leaf(4, 1, [31 << 26 | 31 << 14 | 3 << 5 | 3, 0, 0, 0]),
            leaf(4, 2, [0, 0, 0, 0]),
            leaf(0xb, 0, [9, 9, 9, 77]),
            leaf(0x1f, 0, [9, 9, 9, 77]),
        ];
        let topology = CpuTopology::packages(&[3, 3]).unwrap();
        let leaves = adjust(&supported, &topology, 4, true);
        let features = find(&leaves, 1, 0);
        assert_eq!((features.ebx >> 24, features.ebx >> 16 & 0xff), (5, 4));
        assert_eq!(features.ecx, ECX_HYPERVISOR | ECX_TSC_DEADLINE);
        assert_eq!(features.edx, EDX_HTT);
        assert_eq!(find(&leaves, 4, 0).eax, 3 << 26 | 1 << 5 | 1);
        assert_eq!(find(&leaves, 4, 1).eax, 3 << 26 | 3 << 14 | 3 << 5 | 3);
        assert_eq!(find(&leaves, 4, 2).eax, 0);
        for function in [0xb, 0x1f] {
            let threads = find(&leaves, function, 0);
            assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (0, 1, 0x100, 5));
            let cores = find(&leaves, function, 1);
            assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (2, 3, 0x201, 5));
            assert_eq!(find(&leaves, function, 2).ecx, 2);
        }
        assert_eq!(find(&leaves, LEAF_HYPERVISOR, 0).ebx, u32::from_le_bytes(*b"KVMK"));
    }

    #[test]
    fn an_amd_guest_gets_cores_caches_and_nodes() {
        let supported = [
            vendor(b"AuthenticAMD", 0xd),
            leaf(1, 0, [0, 0, 0, 0]),
            leaf(LEAF_EXTENDED_FEATURES, 0, [0, 0, EXTENDED_ECX_SVM, 0]),
            leaf(LEAF_SIZES, 0, [0x3030, 0, 0x703f, 0]),
            leaf(LEAF_CACHES_AMD, 3, [15 << 14 | 3 << 5 | 3, 0, 0, 0]),
            leaf(LEAF_TOPOLOGY_AMD, 0, [99, 0x1ff, 0x7ff, 1]),
            leaf(LEAF_TOPOLOGY_AMD_V2, 0, [1, 1, 1, 1]),
            leaf(LEAF_HYPERVISOR, 0, [LEAF_KVM_FEATURES, 1, 2, 3]),
        ];
        let topology = CpuTopology::packages(&[4, 4]).unwrap();
        let leaves = adjust(&supported, &topology, 6, false);
        assert_eq!(find(&leaves, LEAF_EXTENDED_FEATURES, 0).ecx, EXTENDED_ECX_CMP_LEGACY);
        assert_eq!(find(&leaves, LEAF_SIZES, 0).ecx, 0x2003);
        assert_eq!(find(&leaves, LEAF_CACHES_AMD, 3).eax, 3 << 14 | 3 << 5 | 3);
        let node = find(&leaves, LEAF_TOPOLOGY_AMD, 0);
        assert_eq!((node.eax, node.ebx, node.ecx, node.edx), (6, 2, 1, 0));
        assert!(!leaves.iter().any(|leaf| leaf.function == LEAF_TOPOLOGY_AMD_V2));
        assert_eq!(find(&leaves, LEAF_HYPERVISOR, 0).ebx, 1);
        assert_eq!(find(&leaves, 1, 0).ecx, ECX_HYPERVISOR);
    }

    #[test]
    fn apics_in_the_monitor_leave_of_kvm_the_signature() {
        let supported = [
            vendor(b"GenuineIntel", 0xd),
            leaf(1, 0, [0, 0, 1, 1 << 9]),
            leaf(LEAF_HYPERVISOR, 0, [LEAF_KVM_FEATURES, 1, 2, 3]),
            leaf(LEAF_KVM_FEATURES, 0, [0x0100_7efb, 0, 0, 1]),
        ];
        let mut leaves = adjust(&supported, &CpuTopology::flat(1).unwrap(), 0, true);
        remove_kvm_apic_features(&mut leaves);
        assert_eq!(find(&leaves, 1, 0).ecx, 1 | ECX_X2APIC | ECX_HYPERVISOR);
        assert_eq!(find(&leaves, 1, 0).edx, 1 << 9);
        let signature = find(&leaves, LEAF_HYPERVISOR, 0);
        assert_eq!(
            (signature.eax, signature.ebx, signature.ecx, signature.edx),
            (LEAF_KVM_FEATURES, 1, 2, 3)
        );
        let features = find(&leaves, LEAF_KVM_FEATURES, 0);
        assert_eq!((features.eax, features.edx), (0, 0));
    }

    #[test]
    fn a_single_vcpu_shares_no_caches() {
        let supported = [vendor(b"GenuineIntel", 0xd), leaf(1, 0, [0, 0, 0, EDX_HTT])];
        let leaves = adjust(&supported, &CpuTopology::flat(1).unwrap(), 0, false);
        let features = find(&leaves, 1, 0);
        assert_eq!((features.ebx, features.edx), (1 << 16, 0));
        assert_eq!(find(&leaves, 0xb, 1).ebx, 1);
    }
}
