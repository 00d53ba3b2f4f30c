//! Segmentation: from offsets in segments to linear addresses.

use thiserror::Error;

use crate::address::GuestVirtual;
use crate::state::{CodeSize, EFER_LMA, PagingState};

/// A segment register with its hidden part, the fields of its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Linear address of offset 0.
    pub base: u64,
    /// Limit: the last valid offset, in bytes; in an expand-down segment, the last invalid one.
    pub limit: u32,
    /// Type of the descriptor: bit 3 code, bit 2 expand-down (data) or conforming (code), bit 1 writable (data) or readable (code).
    pub kind: u8,
    /// Whether the selector isn't null.
    pub usable: bool,
    /// D/B: 32-bit code; of a stack or an expand-down segment, the upper bound is 4 GiB.
    pub default_32: bool,
    /// L: 64-bit code.
    pub long: bool,
}

/// The segment register of an access. In 64-bit mode only FS and GS have a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentRegister {
    /// CS, for instruction fetches.
    Code,
    /// SS; its faults are #SS instead of #GP.
    Stack,
    /// DS and ES.
    Data,
    /// FS and GS.
    Extra,
}

/// An access for which the processor raises #GP, or #SS for the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("offset {offset:#x} for {bytes} bytes breaks a rule of its segment")]
pub struct SegmentFault {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length of the access, in bytes.
    pub bytes: u64,
}

const CODE: u8 = 1 << 3;
const EXPAND_DOWN: u8 = 1 << 2;
const WRITABLE_OR_READABLE: u8 = 1 << 1;

impl Segment {
    /// Code size of the segment; valid for CS.
    pub fn code_size(&self, state: &PagingState) -> CodeSize {
        if state.is_real_mode() || state.is_virtual_8086() {
            CodeSize::Bits16
        } else if state.efer & EFER_LMA != 0 && self.long {
            CodeSize::Bits64
        } else if self.default_32 {
            CodeSize::Bits32
        } else {
            CodeSize::Bits16
        }
    }

    /// Linear address of the first of `bytes` bytes at `offset`.
    ///
    /// Offsets of 16- and 32-bit code are reduced modulo 4 GiB; their linear addresses have 32 bits.
    ///
    /// # Errors
    /// When the processor raises #GP or #SS: beyond the limit, against the type, with a null selector, or at a non-canonical address.
    pub fn linear(
        &self,
        register: SegmentRegister,
        state: &PagingState,
        code: CodeSize,
        offset: u64,
        bytes: u64,
        write: bool,
    ) -> Result<GuestVirtual, SegmentFault> {
        let fault = SegmentFault { offset, bytes };
        let last = bytes.max(1) - 1;
        if code == CodeSize::Bits64 {
            let base = if register == SegmentRegister::Extra { self.base } else { 0 };
            let first = base.wrapping_add(offset);
            let end = first.wrapping_add(last);
            let canonical = |address| GuestVirtual(address).is_canonical(state.linear_bits());
            // A range that wraps around at 2^64 has two canonical ends. So has a range across the non-canonical hole, but that is longer
            // than any operand.
            return if canonical(first) && canonical(end) && last < 1 << 46 {
                Ok(GuestVirtual(first))
            } else {
                Err(fault)
            };
        }
        let offset = offset & u64::from(u32::MAX);
        let end = offset.checked_add(last).ok_or(fault)?;
        let protected = !state.is_real_mode() && !state.is_virtual_8086();
        if protected && !self.allows(register, write) {
            return Err(fault);
        }
        if !self.contains(offset, end, protected) {
            return Err(fault);
        }
        let linear = self.base.wrapping_add(offset) & u64::from(u32::MAX);
        Ok(GuestVirtual(linear))
    }

    fn allows(&self, register: SegmentRegister, write: bool) -> bool {
        if !self.usable {
            return false;
        }
        let code = self.kind & CODE != 0;
        match (register, write) {
            // The type isn't checked at a fetch, only when CS is loaded.
            (SegmentRegister::Code, false) => true,
            (_, true) => !code && self.kind & WRITABLE_OR_READABLE != 0,
            (_, false) => !code || self.kind & WRITABLE_OR_READABLE != 0,
        }
    }

    /// Whether offsets `first` to `last` are within the segment.
    fn contains(&self, first: u64, last: u64, protected: bool) -> bool {
        let limit = u64::from(self.limit);
        if protected && self.kind & (CODE | EXPAND_DOWN) == EXPAND_DOWN {
            let upper = if self.default_32 { u64::from(u32::MAX) } else { 0xffff };
            return first > limit && last <= upper;
        }
        last <= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{CR0_PE, CR4_LA57};

    const DATA: u8 = 0b0010;

    fn protected() -> PagingState {
        PagingState { cr0: CR0_PE, ..PagingState::default() }
    }

    fn long() -> PagingState {
        PagingState { cr0: CR0_PE, efer: EFER_LMA, ..PagingState::default() }
    }

    fn data(base: u64, limit: u32) -> Segment {
        Segment { base, limit, kind: DATA, usable: true, default_32: true, long: false }
    }

    #[test]
    fn only_fs_and_gs_have_a_base_in_64_bit_mode() {
        let segment = data(0x1000, 0);
        let linear = |register| segment.linear(register, &long(), CodeSize::Bits64, 0x10, 8, true);
        assert_eq!(linear(SegmentRegister::Data), Ok(GuestVirtual(0x10)));
        assert_eq!(linear(SegmentRegister::Extra), Ok(GuestVirtual(0x1010)));
    }

    #[test]
    fn both_ends_are_canonical_in_64_bit_mode() {
        let segment = data(0, 0);
        let linear = |state: &PagingState, offset, bytes| {
            segment.linear(SegmentRegister::Data, state, CodeSize::Bits64, offset, bytes, false).is_ok()
        };
        assert!(linear(&long(), 0x7fff_ffff_fff8, 8));
        assert!(!linear(&long(), 0x7fff_ffff_fff9, 8));
        assert!(!linear(&long(), 0x8000_0000_0000, 1));
        let five = PagingState { cr4: CR4_LA57, ..long() };
        assert!(linear(&five, 0x8000_0000_0000, 1));
    }

    #[test]
    fn a_limit_is_the_last_offset() {
        let segment = data(0x1_0000, 0xfff);
        let linear = |offset, bytes| {
            segment.linear(SegmentRegister::Data, &protected(), CodeSize::Bits32, offset, bytes, true)
        };
        assert_eq!(linear(0xffc, 4), Ok(GuestVirtual(0x1_0ffc)));
        assert_eq!(linear(0xffd, 4), Err(SegmentFault { offset: 0xffd, bytes: 4 }));
    }

    #[test]
    fn an_expand_down_segment_lies_above_its_limit() {
        let segment = Segment { kind: DATA | EXPAND_DOWN, default_32: false, ..data(0, 0xfff) };
        let linear = |offset, bytes| {
            segment
                .linear(SegmentRegister::Stack, &protected(), CodeSize::Bits32, offset, bytes, true)
                .is_ok()
        };
        assert!(!linear(0xfff, 1));
        assert!(linear(0x1000, 4));
        assert!(linear(0xfffc, 4));
        assert!(!linear(0xfffd, 4));
    }

    #[test]
    fn code_is_not_written_and_null_selectors_reach_nothing() {
        let code = Segment { kind: CODE | WRITABLE_OR_READABLE, ..data(0, u32::MAX) };
        let linear = |segment: Segment, register, write| {
            segment.linear(register, &protected(), CodeSize::Bits32, 0, 4, write).is_ok()
        };
        assert!(linear(code, SegmentRegister::Code, false));
        assert!(linear(code, SegmentRegister::Data, false));
        assert!(!linear(code, SegmentRegister::Data, true));
        let execute_only = Segment { kind: CODE, ..code };
        assert!(linear(execute_only, SegmentRegister::Code, false));
        assert!(!linear(execute_only, SegmentRegister::Data, false));
        let read_only = Segment { kind: 0, ..data(0, u32::MAX) };
        assert!(!linear(read_only, SegmentRegister::Data, true));
        let null = Segment { usable: false, ..data(0, u32::MAX) };
        assert!(!linear(null, SegmentRegister::Data, false));
    }

    #[test]
    fn linear_addresses_of_32_bit_code_wrap_at_4_gib() {
        let segment = data(0xffff_f000, u32::MAX);
        let linear = segment.linear(SegmentRegister::Data, &protected(), CodeSize::Bits32, 0x2000, 1, false);
        assert_eq!(linear, Ok(GuestVirtual(0x1000)));
    }

    #[test]
    fn code_size_follows_mode_and_segment() {
        let segment = |long, default_32| Segment { long, default_32, ..data(0, 0) };
        assert_eq!(segment(true, false).code_size(&long()), CodeSize::Bits64);
        assert_eq!(segment(false, true).code_size(&long()), CodeSize::Bits32);
        assert_eq!(segment(true, true).code_size(&protected()), CodeSize::Bits32);
        assert_eq!(segment(false, false).code_size(&protected()), CodeSize::Bits16);
        assert_eq!(segment(false, true).code_size(&PagingState::default()), CodeSize::Bits16);
    }
}
