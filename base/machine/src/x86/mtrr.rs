//! Memory type range registers: their state at power-on, and which MSRs hold them.
//!
//! Source: Intel SDM volume 3, 12.11; AMD APM volume 2, 7.7.

use std::ops::RangeInclusive;

/// `IA32_MTRR_DEF_TYPE`: whether MTRRs are on, and the type of memory that none of them covers.
pub(crate) const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;

/// Value that firmware leaves in [`MSR_MTRR_DEF_TYPE`] of every processor: MTRRs are enabled (bit 11), and all memory is write-back
/// (type 6) unless a range or the page tables select another type. With MTRRs disabled, Linux disables PAT too, and then has no
/// write-combining.
pub(crate) const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// The eight pairs of base and mask that KVM emulates.
const VARIABLE: RangeInclusive<u32> = 0x200..=0x20f;
/// First MiB: one register for 512 KiB, two of 128 KiB each, eight of 32 KiB each.
const FIXED: [u32; 11] = [0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f];

/// All MTRRs that hold state. [`MSR_MTRR_DEF_TYPE`] is the last, so that a restore enables MTRRs after it has set the ranges. Only newer
/// kernels list them among a vCPU's MSRs.
pub(crate) fn msrs() -> impl Iterator<Item = u32> {
    VARIABLE.chain(FIXED).chain([MSR_MTRR_DEF_TYPE])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtrrs_are_on_with_write_back_as_default() {
        assert_eq!(MTRR_WRITE_BACK, 0x806);
        let all: Vec<u32> = msrs().collect();
        assert_eq!((all.len(), all.last()), (28, Some(&MSR_MTRR_DEF_TYPE)));
    }
}
