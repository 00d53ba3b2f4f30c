//! CPUID leaves with the frequencies of a vCPU's time-stamp counter (TSC) and APIC timer. They serve guests that don't read KVM's clock:
//! the VM has no PIT and no PM timer to measure the frequencies against.
//!
//! | leaf | read by | content |
//! |---|---|---|
//! | 0x15, Intel | Linux, FreeBSD | TSC per crystal clock as a fraction, and the crystal clock, which is also the APIC timer's |
//! | 0x16, Intel | Linux, FreeBSD, where 0x15 isn't enough | base and highest frequency in MHz |
//! | 0x40000010 | FreeBSD, Linux under VMware's signature | TSC and APIC timer in kHz |
//!
//! Sources: Intel SDM volume 2A, CPUID; "Hypervisor CPUID Interface Proposal" (Linux kernel list, 2008); Linux `arch/x86/kernel/tsc.c`.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::cpuid::{LEAF_HYPERVISOR, is_amd};

const LEAF_TSC: u32 = 0x15;
const LEAF_FREQUENCY: u32 = 0x16;
const LEAF_TIMING: u32 = 0x4000_0010;
/// KVM's APIC timer counts nanoseconds.
const APIC_TIMER_KHZ: u32 = 1_000_000;
/// Limit for the numerator: Linux multiplies it with the APIC timer's kHz in 32 bits.
const NUMERATOR_LIMIT: u32 = u32::MAX / APIC_TIMER_KHZ;

/// Adds leaves to `cpuid` that report a TSC of `khz` kHz. Adds Intel's leaves only on processors that aren't AMD's or Hygon's and whose
/// highest basic leaf includes them. `None` when the leaves don't fit.
pub(crate) fn with_tsc_frequency(cpuid: &CpuId, khz: u32) -> Option<CpuId> {
    let mut leaves = cpuid.as_slice().to_vec();
    let basic = leaves.iter().find(|leaf| leaf.function == 0);
    let largest = basic.filter(|leaf| !is_amd(leaf)).map_or(0, |leaf| leaf.eax);
    let (numerator, denominator) = fraction(khz, APIC_TIMER_KHZ, NUMERATOR_LIMIT);
    if largest >= LEAF_TSC && numerator > 0 {
        put(&mut leaves, LEAF_TSC, [denominator, numerator, APIC_TIMER_KHZ * 1_000, 0]);
    }
    if largest >= LEAF_FREQUENCY {
        let mhz = khz.saturating_add(500) / 1_000;
        put(&mut leaves, LEAF_FREQUENCY, [mhz, mhz, 0, 0]);
    }
    put(&mut leaves, LEAF_TIMING, [khz, APIC_TIMER_KHZ, 0, 0]);
    // Guests read leaf 0x40000010 only if the hypervisor's highest leaf includes it.
    if let Some(leaf) = leaves.iter_mut().find(|leaf| leaf.function == LEAF_HYPERVISOR) {
        leaf.eax = leaf.eax.max(LEAF_TIMING);
    }
    CpuId::from_entries(&leaves).ok()
}

fn put(leaves: &mut Vec<kvm_cpuid_entry2>, function: u32, [eax, ebx, ecx, edx]: [u32; 4]) {
    leaves.retain(|leaf| leaf.function != function);
    leaves.push(kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() });
}

/// The fraction nearest to `value / unit` whose numerator isn't above `limit`, which is 1 or more. Returns numerator and denominator;
/// `(0, 1)` when even the whole part is above the limit. Uses continued fractions: the last convergent or semiconvergent that fits.
fn fraction(value: u32, unit: u32, limit: u32) -> (u32, u32) {
    let (mut above, mut below) = (u64::from(value), u64::from(unit));
    let (mut last, mut now) = ((0_u64, 1_u64), (1_u64, 0_u64));
    while below != 0 {
        let whole = above / below;
        let fits = (u64::from(limit) - last.0).checked_div(now.0).map_or(whole, |most| most.min(whole));
        let next = (fits * now.0 + last.0, fits * now.1 + last.1);
        if fits < whole {
            // A semiconvergent is nearer than the convergent `now` only if it uses more than half of the partial quotient.
            if fits * 2 > whole {
                now = next;
            }
            break;
        }
        (last, now) = (now, next);
        (above, below) = (below, above % below);
    }
    match (u32::try_from(now.0), u32::try_from(now.1)) {
        (Ok(numerator), Ok(denominator)) if denominator > 0 => (numerator, denominator),
        _ => (0, 1),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaf(function: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn vendor(name: &[u8; 12], largest: u32) -> kvm_cpuid_entry2 {
        let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
        leaf(0, [largest, word(0), word(8), word(4)])
    }

    fn reported(vendor: kvm_cpuid_entry2, khz: u32) -> Vec<kvm_cpuid_entry2> {
        let empty = [leaf(LEAF_TSC, [0; 4]), leaf(LEAF_FREQUENCY, [0; 4])];
        let hypervisor = leaf(LEAF_HYPERVISOR, [0x4000_0001, 1, 2, 3]);
        let leaves: Vec<_> = [vendor, hypervisor].into_iter().chain(empty).collect();
        with_tsc_frequency(&CpuId::from_entries(&leaves).unwrap(), khz).unwrap().as_slice().to_vec()
    }

    fn registers(leaves: &[kvm_cpuid_entry2], function: u32) -> [u32; 4] {
        let found: Vec<_> = leaves.iter().filter(|leaf| leaf.function == function).collect();
        let [leaf] = found[..] else { panic!("{function:#x}: {found:?}") };
        [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]
    }

    #[test]
    fn intel_guests_find_three_leaves_and_others_one() {
        let intel = reported(vendor(b"GenuineIntel", 0x1c), 2_596_142);
        assert_eq!(registers(&intel, LEAF_FREQUENCY), [2596, 2596, 0, 0]);
        assert_eq!(registers(&intel, LEAF_TIMING), [2_596_142, 1_000_000, 0, 0]);
        assert_eq!(registers(&intel, LEAF_HYPERVISOR), [LEAF_TIMING, 1, 2, 3]);
        let [denominator, numerator, crystal, _] = registers(&intel, LEAF_TSC);
        assert_eq!(crystal, 1_000_000_000);
        let hertz = u64::from(crystal) * u64::from(numerator) / u64::from(denominator);
        assert!(hertz.abs_diff(2_596_142_000) < 2_596_142, "{hertz}");

        let old = reported(vendor(b"GenuineIntel", 0xd), 2_000_000);
        assert_eq!(registers(&old, LEAF_TSC), [0; 4]);
        let amd = reported(vendor(b"AuthenticAMD", 0x20), 2_000_000);
        assert_eq!((registers(&amd, LEAF_TSC), registers(&amd, LEAF_FREQUENCY)), ([0; 4], [0; 4]));
        assert_eq!(registers(&amd, LEAF_TIMING), [2_000_000, 1_000_000, 0, 0]);
    }

    proptest! {
        /// As Linux computes it, in 32 bits, the frequency is right to 120 parts per million, and nearly always to one. The exceptions
        /// lie close to whole GHz and other simple fractions, where no better fraction has so small a numerator. NTP corrects 500.
        #[test]
        fn the_fraction_survives_32_bits(khz in 500_000_u32..4_294_000) {
            let (numerator, denominator) = fraction(khz, APIC_TIMER_KHZ, NUMERATOR_LIMIT);
            let product = APIC_TIMER_KHZ.checked_mul(numerator).unwrap();
            let computed = product / denominator;
            prop_assert!(u64::from(computed.abs_diff(khz)) * 1_000_000 <= u64::from(khz) * 120, "{computed} {khz}");
        }
    }

    #[test]
    fn a_frequency_without_a_fraction_is_not_reported() {
        assert_eq!(fraction(u32::MAX, 1, 1_000), (0, 1));
        assert_eq!(fraction(0, APIC_TIMER_KHZ, NUMERATOR_LIMIT), (0, 1));
        let none = reported(vendor(b"GenuineIntel", 0x1c), 0);
        assert_eq!(registers(&none, LEAF_TSC), [0; 4]);
    }
}
